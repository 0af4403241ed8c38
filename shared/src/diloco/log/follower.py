"""The one follower of a log: it loads fragments, folds the entries that come, and loads a fragment again if it must.

The follower holds a :class:`LogCopy` of each fragment, loaded to the log's end (:meth:`LogFollower.load`). One task then
iterates :meth:`LogFollower.follow`, for ever. For each entry that comes, one of these happens:

* It follows its chain: it is folded, in a thread. Event :class:`FollowedEntry`.
* It is the newest once more (a region may be given a snapshot twice): it is passed over. No event.
* It does not follow: it is told to ``refuse`` and passed over, as by every other reader. No event.
* Entries before it are missing (purged below a keyframe): the fragment is loaded again, up to this entry. Event
  :class:`Reloaded`.
* Folding it gives another state than it states. The fragment is loaded again from a keyframe before it, and the entry judged.
  If it is wrong, it is told to ``refuse`` and passed over, as are those that follow it: event :class:`Wrong`. If not, the
  copy was damaged: event :class:`Reloaded`.

If the stream has lost messages that were read (its server lost its last writes), all fragments are loaded again: one
:class:`Reloaded` with ``rewound`` for each.

A server may also go back while nothing new comes, and no stream tells that. :meth:`LogFollower.holds` asks whether the log
still has the newest entry that was read. If not, end the task that follows, call :meth:`LogFollower.rewind`, and follow again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from diloco.core.log.chain import Chain, WrongEntries
from diloco.core.log.fold import Replica
from diloco.errors import ChainError, FormatError, MessageError, RewoundError, StateError
from diloco.log.entries import fold
from diloco.log.log import Log
from diloco.log.stream import LogEntry, Refuse, RefusedEntry
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.process.tasks import computed, side_by_side, unbroken
from diloco.wire.entries import Genesis

# Loading has six round trips beside those of a keyframe's parts: those of a fragment pass while others' parts come. Half of the
# consumers that a process may have, and at most so many fragments' keyframes in memory.
LOADS = 4

Vector = NDArray[np.float32]


@dataclass
class LogCopy:
    """A fragment as its log has it: the replica, and the facts that its owner needs beside it."""

    replica: Replica
    residual: Vector | None  # of the encoder, float32 [size]; None: not known, or not kept
    keyframe_sequence: int  # of the keyframe that it was loaded from
    keyframe_version: int
    refused: tuple[int, ...] = ()  # sequences of newer keyframes, which are not whole
    log_bytes: int = 0  # of entries since the keyframe
    loaded_version: int = 0  # of the keyframe that it was loaded from
    loaded_entry: bytes = b""  # hash of the entry that this keyframe stands after
    loaded_sequence: int = 0  # of that entry
    doubtful: int | None = None  # that sequence, while it may be a wrong entry's; None: an older one served, or version 0
    fence: int = 0  # sequence of the last message of its entries when this was last the log's end


@dataclass(frozen=True)
class FollowedEntry:
    """An entry follows, and was folded into the copy."""

    copy: LogCopy
    entry: LogEntry
    came_s: float  # when all of it was there, by the loop's clock


@dataclass(frozen=True)
class Reloaded:
    """A fragment was loaded again; with ``rewound`` all are, since the log had lost entries that were read."""

    copy: LogCopy
    rewound: bool


@dataclass(frozen=True)
class Wrong:
    """An entry states another state than it folds to. All readers pass over it, and its writer has to be replaced."""

    copy: LogCopy  # as of the entry before
    entry: LogEntry


Event: TypeAlias = FollowedEntry | Reloaded | Wrong


class LogFollower:
    """Keeps copies of fragments up to date with the log; one task at a time loads, takes or follows any one of them.

    ``in_place``: fold into the arrays that there are and keep residuals, for a process that may own the fragments. Otherwise
    each version gets a new ``theta``, so that the arrays of earlier versions stay as they are.
    """

    def __init__(self, store: Log, genesis: tuple[Genesis, bytes], refuse: Refuse, log: Logger, *, in_place: bool) -> None:
        self.store, self.genesis, self.refuse, self.log, self.in_place = store, genesis, refuse, log, in_place
        self.copies: dict[int, LogCopy] = {}
        self.wrong: dict[int, WrongEntries] = {fragment.index: WrongEntries() for fragment in store.map.fragments}
        self._heads: dict[int, Chain] = {}  # as of the newest entry: a thread may be folding the next one
        self._loads, self._held_loads = 1, 0  # how often all was loaded; as of the last time that all heads were there
        self._lost = False  # all is to be loaded again

    async def load(self, fragment: int) -> LogCopy:
        """Load a fragment to its log's end, wherever that is by then; wait for a server that is away."""
        while True:
            try:
                return await self._load(fragment)
            except RewoundError as error:
                self.log.error("log_rewound", fragment=fragment, reason=str(error))

    async def load_all(self, fragments: Sequence[int] | None = None) -> list[LogCopy]:
        """Load fragments (by default all) as :meth:`load` does, :data:`LOADS` at a time; return them in order."""
        if fragments is None:
            fragments = range(len(self.store.map.fragments))
        return await side_by_side(len(fragments), LOADS, lambda place: self.load(fragments[place]))

    async def load_once(self, fragment: int, stop_sequence: int | None = None, before: int | None = None) -> LogCopy:
        """Load a fragment to its log's end, or up to a message of it, as a copy that the follower does not keep.

        Wrong entries are passed over. A keyframe that no learner vouches for may stand after one, so it has to be what the log
        folds to from an older one on. ``before``: begin with a keyframe of an entry before this sequence, and judge all after.
        One state is in memory at a time.

        Raises:
            StateError: this machine folds to other bits each time.
            RewoundError: the log lost the message to stop at.
            AppendUncertainError: the server is silent.
        """
        copy = older = await self._load_once(fragment, stop_sequence, before)
        try:
            while (doubtful := older.doubtful) is not None:
                older.replica = older.replica.without_state()
                older = await self._load_once(fragment, stop_sequence, doubtful)
        except FormatError as error:  # entries after the older one are gone
            self.log.warning("keyframe_not_judged", fragment=fragment, version=copy.loaded_version, reason=str(error))
            copy = older = await self._load_once(fragment, stop_sequence, before)
        if older.replica.chain.head == copy.replica.chain.head:
            copy.replica = replace(older.replica, chain=copy.replica.chain)  # of the same entry, so in the same state
        elif self._is_ahead(copy, older):
            copy = await self._load_once(fragment, stop_sequence, before)
        else:
            return older
        copy.doubtful = None
        return copy

    def _is_ahead(self, copy: LogCopy, older: LogCopy) -> bool:
        """Whether a region's keyframe stands after an entry of which the region has no notice yet: its maker knew that one."""
        judged = copy.loaded_entry in self.wrong[copy.replica.chain.fragment]
        return self.store.entries.stream.regions and not judged and older.replica.chain.sequence < copy.loaded_sequence

    async def _load_once(self, fragment: int, stop_sequence: int | None, before: int | None) -> LogCopy:
        """Load a fragment from the newest keyframe that nothing speaks against, one of an entry before ``before`` if given."""
        while True:
            loaded = await self.store.reader.load(fragment, *self.genesis, before, self.wrong[fragment], residual=self.in_place)
            chain, kept = loaded.replica.chain, loaded.residual if self.in_place else None
            copy = LogCopy(loaded.replica, kept, loaded.keyframe_sequence, chain.version, loaded.refused)
            copy.loaded_version = chain.version
            copy.loaded_entry, copy.loaded_sequence = chain.head, chain.sequence
            if chain.sequence and (before is None or chain.sequence < before):
                copy.doubtful = chain.sequence
            try:
                await self.to_end(copy, stop_sequence, judge=before is not None)
            except StateError as error:
                if before is not None and error.sequence >= before:
                    raise
                before = error.sequence
            else:
                return copy

    async def to_end(self, copy: LogCopy, stop_sequence: int | None = None, *, judge: bool = False) -> None:
        """Fold the entries that a loaded copy lacks, up to its log's end or to a message of it; ``judge`` them all, or none.

        Its arrays are not shared yet, so that they are folded in place.

        Raises:
            StateError: folding gives another state than an entry states; the copy is worth nothing.
            RewoundError: the log lost the message to stop at.
            AppendUncertainError: the server is silent.
        """
        fragment, entries = copy.replica.chain.fragment, self.store.entries
        end = await self.store.reader.end_sequence(fragment) if stop_sequence is None else stop_sequence
        async for entry in entries.fold_missed(
            copy.replica, end, self.refuse, self.wrong[fragment], judge=judge, doubtful=copy.doubtful
        ):
            _note(copy, entry)
        copy.fence = end

    async def follow(self, fragments: Iterable[int]) -> AsyncGenerator[Event, None]:
        """Keep these fragments up to date, for ever; load those first of which there is no copy."""
        fragments = list(fragments)
        while True:
            try:
                async for event in self._follow(fragments):
                    yield event
            except RewoundError as error:
                self.log.error("log_rewound", reason=str(error))
                self.rewind()

    async def holds(self) -> bool:
        """Whether the log still has the newest entry that was read; after all was loaded, that of each fragment.

        Fragments are loaded one after another, and a server may go back meanwhile; all further entries come to one reader.
        While all are to be loaded again, the answer is yes: to begin that load once more would never end a long one.

        Raises:
            AppendUncertainError: the server is silent.
        """
        if self._lost:
            return True
        loads, heads = self._loads, sorted(self._heads.values(), key=lambda chain: -chain.sequence)
        for chain in heads if loads != self._held_loads else heads[:1]:
            if not await self.store.reader.holds(chain):
                return False
        self._held_loads = loads
        return True

    def rewind(self) -> None:
        """Load all fragments again, the next time that they are followed: the log has lost entries that were read."""
        self._lost = True

    async def _follow(self, fragments: list[int]) -> AsyncGenerator[Event, None]:
        rewound = self._lost
        for fragment in fragments:
            if rewound or fragment not in self.copies:
                yield Reloaded(await self._load(fragment), rewound)
        self._loads, self._lost = self._loads + rewound, False
        start = 1 + min(self.copies[fragment].replica.chain.sequence for fragment in fragments)
        async for entry in self.store.entries.follow(fragments, start, self.refuse):
            copy = self.copies[entry.record.fragment]
            if entry.sequence > copy.replica.chain.sequence:
                event = await self._take_in(copy, entry)
                if event is not None:
                    yield event

    async def _take_in(self, copy: LogCopy, entry: LogEntry) -> Event | None:
        """Fold an entry, pass it over, or load the fragment again up to it."""
        came_s = asyncio.get_running_loop().time()
        record, before = entry.record, copy.replica.chain
        index = record.fragment
        if self.store.entries.is_repeated(before, entry):
            self._heads[index] = replace(before)
            return None
        follows_wrong = self.wrong[index].note(record, entry.entry_hash)
        try:
            await unbroken(self._fold(copy, entry))
        except ChainError as error:
            if follows_wrong or record.version <= before.version + 1:
                self.refuse(RefusedEntry(record.syncer, self.store.subjects.record(index), entry.sequence, error))
                return None
            reason: MessageError = error  # entries are missing: purged below a keyframe
            load = partial(self.load_once, index, entry.known_sequence)
        except StateError as error:
            reason = error
            load = partial(self.load_once, index, entry.known_sequence, error.sequence)
        else:
            return FollowedEntry(copy, entry, came_s)
        del self.copies[index]
        self.log.warning("log_reloaded", fragment=index, version=record.version, reason=str(reason))
        again = await self._keep(load)
        if entry.entry_hash in self.wrong[index] and again.replica.chain.head == before.head:
            return Wrong(again, entry)
        return Reloaded(again, rewound=False)

    async def _fold(self, copy: LogCopy, entry: LogEntry) -> None:
        await computed(copy.replica.theta.size, partial(fold, copy.replica, entry, in_place=self.in_place))
        _note(copy, entry)
        self._heads[entry.record.fragment] = replace(copy.replica.chain)

    async def _load(self, fragment: int) -> LogCopy:
        return await self._keep(partial(self.load_once, fragment))

    async def _keep(self, load: Callable[[], Awaitable[LogCopy]]) -> LogCopy:
        copy = await until_available(load, self.log)
        chain = copy.replica.chain
        self.copies[chain.fragment], self._heads[chain.fragment] = copy, replace(chain)
        return copy


def _note(copy: LogCopy, entry: LogEntry) -> None:
    """Account for an entry that was folded: the residual is of the version before."""
    if entry.record.makes_version:
        copy.residual = None
    if any(member.base_version >= copy.loaded_version for member in entry.record.members):
        copy.doubtful = None
    copy.log_bytes += entry.size_bytes
