"""The run's history in its bucket, so that a page that is opened late, or after a coordinator died, shows all of it.

The key ``history`` holds one value of bounded size: the leading coordinator's picture and its curves, thinned. The leader
writes it by compare-and-set, others read it. Each value names the term of its writer, the revision at which it became the
leader. A writer that finds a value of a later term has been replaced, and never writes again.
"""

from __future__ import annotations

import json

import zstandard

from diloco.control.history import FORMAT, KEY, MAX_BYTES, MAX_PLAIN_BYTES, Past, unpack
from diloco.errors import FenceError, FormatError
from diloco.transport import Bucket
from diloco_coordinator.overview import MAX_POINTS, thinned

LEVEL = 3  # of zstd


def pack(past: Past) -> bytes:
    """Return a history as stored, with as few points as it takes to fit into ``MAX_BYTES``.

    Raises:
        FormatError: it does not fit without any: a run of thousands of learners.
    """
    most = MAX_POINTS
    while most:
        value = {"format": FORMAT, "term": past.term, "at_s": past.at_s, "picture": past.picture}
        text = json.dumps(value | {"curves": thinned(past.curves, most)}, separators=(",", ":")).encode()
        packed = zstandard.ZstdCompressor(level=LEVEL).compress(text)
        if len(packed) <= MAX_BYTES and len(text) <= MAX_PLAIN_BYTES:
            return packed
        most //= 4
    raise FormatError(f"history: {len(packed)} bytes without its curves, at most {MAX_BYTES} can be stored")


class RunHistory:
    """The key, as one coordinator reads and writes it."""

    def __init__(self, registry: Bucket) -> None:
        self._registry = registry
        self._revision = 0

    async def read(self) -> Past | None:
        """Return the history, or None if there is none yet.

        Raises:
            FormatError: it is damaged; it can be written over all the same.
            BrokerError: the server refuses, or is silent.
        """
        stored = await self._registry.get(KEY)
        if stored is None:
            return None
        value, self._revision = stored
        return unpack(value)

    async def write(self, packed: bytes, term: int) -> None:
        """Store a packed history of a term, in place of the one that was read or written last.

        Raises:
            FenceError: a coordinator of a later term has written.
            BrokerError: the server refuses, or is silent.
        """
        try:
            await self._set(packed)
        except FenceError:
            try:
                found = await self.read()
            except FormatError:
                found = None
            if found is not None and found.term > term:
                raise
            await self._set(packed)

    async def _set(self, packed: bytes) -> None:
        if self._revision:
            self._revision = await self._registry.update(KEY, packed, self._revision)
        else:
            self._revision = await self._registry.create(KEY, packed)
