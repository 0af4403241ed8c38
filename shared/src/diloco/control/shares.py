"""Learners' claims to the data's shares in the run's bucket: read as they change, and written by compare-and-set."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from diloco.control.admission import admitted
from diloco.control.creation import KnownRun
from diloco.core.run import leases
from diloco.core.run.leases import MAX_CLAIM_BYTES, ShareClaim
from diloco.core.syncer.claims import step_bounds
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import FormatError, MessageError
from diloco.process.observe import Counted
from diloco.settings.run import RunSettings
from diloco.wire.fields import MAX_MEMBERS

PREFIX = "share."


def key_of(learner: str) -> str:
    """Return the bucket's key of a learner's claim."""
    return f"{PREFIX}{learner}"


class Claims:
    """The claims of all admitted learners, as one learner reads them.

    Only what was set since the last reading is read: revisions rise. A server that lost values gives revisions again; then the
    newest value that was read, or the own one, is not there any more, and everything is read again.
    """

    def __init__(self, run: KnownRun, learner: str, fragments: FragmentMap, refused: Counted) -> None:
        """``fragments``: the run's. ``refused`` counts claims that are passed over, by their writers' names."""
        self.run, self.learner, self.map_digest, self.refused = run, learner, fragments.digest, refused
        self._bounds = step_bounds(run.created, fragments)
        self._claims: dict[str, ShareClaim] = {}
        self._strangers: dict[str, ShareClaim] = {}  # of learners that are not admitted, as far as is known
        self._own: tuple[str, bytes, int] | None = None  # key, value and revision
        self._newest: tuple[str, bytes, int] | None = None
        self._reading = asyncio.Lock()  # a learner that ends frees its shares while it may still be looking at all of them

    async def read(self) -> Mapping[str, ShareClaim]:
        """Return the claims by learner.

        Raises:
            BrokerError: the server is away.
        """
        async with self._reading:
            return await self._read()

    async def _read(self) -> Mapping[str, ShareClaim]:
        for known in dict.fromkeys((self._own, self._newest)):  # they may be one
            if known is not None and not await self._is_there(*known):
                self._own = self._newest = None
                self._claims.clear()
                self._strangers.clear()
                break
        seen = set[str]()
        while found := await self.run.registry.after(f"{PREFIX}*", self._newest[2] if self._newest else 0):
            self._take_in(*found)
            self._newest = found
            if found[0] in seen:
                break  # all that there was at the beginning is read, and a writer without rest must not hold this up
            seen.add(found[0])
        for name in list(self._strangers):
            if (await admitted(self.run, name, self.map_digest)).incarnation is not None:
                self._claims[name] = self._strangers.pop(name)
        return dict(self._claims)

    async def write(self, claim: ShareClaim) -> None:
        """Set the own claim in the place of the one that was read.

        Raises:
            FenceError: another one was written meanwhile, or the one that was read is lost.
            BrokerError: the server is away.
        """
        key, packed = key_of(self.learner), claim.pack()
        if self._own is not None:
            await self.run.registry.update(key, packed, self._own[2])
        else:
            await self.run.registry.create(key, packed)

    async def _is_there(self, key: str, value: bytes, revision: int) -> bool:
        if len(value) > MAX_CLAIM_BYTES:  # no claim: reading it again and again would cost all learners more than its writer
            return True
        return await self.run.registry.get(key) == (value, revision)

    def _take_in(self, key: str, value: bytes, revision: int) -> None:
        name = key.removeprefix(PREFIX)
        self._claims.pop(name, None)
        self._strangers.pop(name, None)
        if name == self.learner:
            self._own = key, value, revision
        if not value:
            return
        try:
            if name != self.learner and len(self._claims) + len(self._strangers) >= MAX_MEMBERS:
                raise FormatError(
                    f"the claim of {name} to data shares was ignored: {MAX_MEMBERS} other learners have "
                    "claims, the most that a run may have"
                )
            claim = leases.unpack(value, name, revision, self._settings, self._bounds)
        except MessageError as error:
            self.refused.note(key, type(error).__name__, reason=str(error))
            return
        (self._claims if name == self.learner else self._strangers)[name] = claim

    @property
    def _settings(self) -> RunSettings:
        """The settings with the largest budget that learners may go by: some may not know yet that it was changed."""
        return max(self.run.created, self.run.in_force, key=lambda settings: settings.tokens)
