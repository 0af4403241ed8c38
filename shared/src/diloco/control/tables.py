"""Values of the run's bucket that are replaced by compare-and-set: admissions, owners of fragments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from diloco.control.creation import KnownRun
from diloco.core.syncer.ownership import OwnersTable
from diloco.errors import FenceError
from diloco.transport import Bucket
from diloco.wire.plain import decoded

T = TypeVar("T")


class BucketTable(Generic[T]):
    """One key of the bucket.

    ``unpack`` reads its value (None: the key is not set), ``pack`` writes one.
    """

    def __init__(self, registry: Bucket, key: str, unpack: Callable[[bytes | None], T], pack: Callable[[T], bytes]) -> None:
        self._registry, self._key, self._unpack, self._pack = registry, key, unpack, pack

    async def read(self) -> tuple[T, int]:
        """Return the value, and the key's revision; 0 if it is not set."""
        stored = await self._registry.get(self._key)
        return (self._unpack(None), 0) if stored is None else (self._unpack(stored[0]), stored[1])

    async def write(self, value: T, revision: int) -> int:
        """Put ``value`` in the place of the one at ``revision``; return its own revision.

        Raises:
            FenceError: another one was written meanwhile.
        """
        packed = self._pack(value)
        if revision:
            return await self._registry.update(self._key, packed, revision)
        return await self._registry.create(self._key, packed)

    async def change(self, decide: Callable[[T], T | None]) -> T:
        """Write the value that ``decide`` makes of the present one (None: leave it); return the value then.

        ``decide`` is asked again where another one was written meanwhile.
        """
        while True:
            value, revision = await self.read()
            changed = decide(value)
            if changed is None:
                return value
            try:
                await self.write(changed, revision)
            except FenceError:
                continue
            return changed


_OWNERS_DECODER = msgspec.msgpack.Decoder(OwnersTable)  # made once, by one thread: msgspec crashes where two begin with a class


def owners(run: KnownRun, fragments: int) -> BucketTable[OwnersTable | None]:
    """Return the table of the owners of so many fragments.

    A value that is no such table counts as none, to be replaced.
    """

    def unpack(stored: bytes | None) -> OwnersTable | None:
        table = None if stored is None else decoded(stored, _OWNERS_DECODER)
        return table if table is not None and len(table.owners) == fragments else None

    return BucketTable(run.registry, "owners", unpack, msgspec.msgpack.encode)


async def read_owners(run: KnownRun) -> OwnersTable | None:
    """Read the table of the owners, of however many fragments it is; None: there is none.

    Raises:
        BrokerError: the server is away.
    """
    stored = await run.registry.get("owners")
    return None if stored is None else decoded(stored[0], _OWNERS_DECODER)
