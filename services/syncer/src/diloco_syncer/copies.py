"""A fragment as its log has it: loaded when its owner needs it, or followed all the time by a syncer that stands by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from diloco.core.fold import Replica
from diloco.errors import ChainError, HashError, MessageError, RewoundError
from diloco.log import Entry, Log
from diloco.observe import Logger
from diloco.patience import patiently
from diloco.tasks import unbroken
from diloco.wire.messages import Genesis, Record

Vector = NDArray[np.float32]


@dataclass
class Copy:
    """A fragment's replica and what an owner has to know beside it."""

    replica: Replica
    residual: Vector | None  # of the encoder; None: not known, since the newest version was made after the keyframe
    keyframe_sequence: int
    keyframe_version: int
    refused: tuple[int, ...] = ()  # sequences of newer keyframes, which are not whole
    log_bytes: int = 0  # of entries since the keyframe
    fence: int = 0  # sequence of the last message of its entries when this was last the log's end


class Copies:
    """Fragments' copies, none of which another task uses. :meth:`follow` keeps all of them up to date."""

    def __init__(
        self, store: Log, genesis: tuple[Genesis, bytes], refuse: Callable[[str, MessageError, int], None], log: Logger
    ) -> None:
        self.store, self.genesis, self.refuse, self.log = store, genesis, refuse, log
        self._copies: dict[int, Copy] = {}

    def clear(self) -> None:
        """Let go of all copies."""
        self._copies.clear()

    def known(self) -> list[Copy]:
        """All copies, none of which may be being folded."""
        return list(self._copies.values())

    async def take(self, index: int) -> Copy:
        """The fragment as of its log's end, from what was followed where that serves; it is the caller's from now on."""
        copy = self._copies.pop(index, None)
        while True:
            try:
                copy = await patiently(partial(self._load, index) if copy is None else partial(self._to_end, copy), self.log)
            except RewoundError as error:
                self.log.error("log_rewound", fragment=index, reason=str(error))
                copy = None
                continue
            # after the fence was read: what is lost from now on, the fence notices
            if not await patiently(partial(self.store.holds, copy.replica.chain), self.log):
                copy = None
                continue
            newest = await patiently(partial(self.store.newest_keyframe, index), self.log)
            if newest is None or newest[1] <= copy.keyframe_sequence or newest[1] in copy.refused:
                return copy
            keyframe, sequence = newest
            chain = copy.replica.chain
            if keyframe.entry_sequence > chain.sequence or keyframe.version == chain.version:
                # what came before it may have been purged unread; or it has the residual of this very version
                copy = None
                continue
            # a share of what was read since the load: records of a fragment are about as large as one another
            versions = max(1, chain.version - copy.keyframe_version)
            copy.log_bytes = copy.log_bytes * (chain.version - keyframe.version) // versions
            copy.keyframe_sequence, copy.keyframe_version = sequence, keyframe.version
            return copy

    async def follow(
        self, fragments: Sequence[int], ready: Callable[[], None], folded: Callable[[Copy, Record | None], Awaitable[None]]
    ) -> None:
        """Load fragments, say so, and fold what comes, for ever; ``folded`` is told of each entry (None: loaded anew)."""
        while True:
            try:
                await self._follow(fragments, ready, folded)
            except RewoundError as error:
                self.log.error("log_rewound", reason=str(error))

    async def _follow(
        self, fragments: Sequence[int], ready: Callable[[], None], folded: Callable[[Copy, Record | None], Awaitable[None]]
    ) -> None:
        for index in fragments:
            self._copies[index] = await patiently(partial(self._load, index), self.log)
        ready()
        start = min(copy.replica.chain.sequence for copy in self._copies.values()) + 1
        async for entry in self.store.follow(fragments, start, self._refuse_entry):
            copy = self._copies[entry.record.fragment]
            if entry.sequence > copy.replica.chain.sequence:
                copy = self._copies[entry.record.fragment] = await unbroken(self._follow_up(copy, entry))
                await folded(copy, entry.record if copy.replica.chain.head == entry.check else None)

    async def _load(self, index: int) -> Copy:
        """From the newest whole keyframe to the log's end."""
        loaded = await self.store.load(index, *self.genesis)
        version = loaded.replica.chain.version
        return await self._to_end(Copy(loaded.replica, loaded.residual, loaded.keyframe_sequence, version, loaded.refused))

    async def _to_end(self, copy: Copy) -> Copy:
        index, start = copy.replica.chain.fragment, copy.replica.chain.sequence + 1
        end = await self.store.end_sequence(index)
        if end >= start:
            async for entry in self.store.follow([index], start, self._refuse_entry, end):
                try:
                    await unbroken(self._fold(copy, entry))
                except ChainError as error:
                    self.refuse(entry.record.syncer, error, entry.sequence)
        copy.fence = end
        return copy

    async def _follow_up(self, copy: Copy, entry: Entry) -> Copy:
        """The copy with an entry folded into it, or loaded anew where that cannot be."""
        record, chain = entry.record, copy.replica.chain
        try:
            await self._fold(copy, entry)
        except (ChainError, HashError) as error:
            if isinstance(error, HashError) or record.version > chain.version + 1:
                # entries are missing (purged below a keyframe), or the replica is spoilt
                self.log.warning("log_reloaded", fragment=record.fragment, version=record.version, reason=str(error))
                return await patiently(partial(self._load, record.fragment), self.log)
            self.refuse(record.syncer, error, entry.sequence)
        return copy

    async def _fold(self, copy: Copy, entry: Entry) -> None:
        await asyncio.to_thread(copy.replica.fold, entry.record, entry.check, entry.sequence, entry.body)
        if entry.record.makes_version:
            copy.residual = None
        copy.log_bytes += entry.size_bytes

    def _refuse_entry(self, sequence: int, error: MessageError) -> None:
        self.refuse("log", error, sequence)
