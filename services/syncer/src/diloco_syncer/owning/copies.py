"""A fragment as its log has it: loaded when its owner needs it, or followed all the time by a syncer that stands by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from diloco.core.log.chain import WrongEntries
from diloco.errors import RewoundError, StateError
from diloco.log.follower import FollowedEntry, LogCopy, LogFollower, Wrong
from diloco.log.log import Log
from diloco.log.stream import Refuse
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.wire.entries import Genesis, Record


class Copies:
    """Copies of fragments that no other task uses. :meth:`follow` keeps all of them up to date."""

    def __init__(self, store: Log, genesis: tuple[Genesis, bytes], refuse: Refuse, log: Logger) -> None:
        self.store, self.genesis, self.log = store, genesis, log
        self._follower = LogFollower(store, genesis, refuse, log, in_place=True)

    def clear(self) -> None:
        """Let go of all copies."""
        self._follower.copies.clear()

    def wrong_entries(self, index: int) -> WrongEntries:
        """Return the wrong entries of a fragment that are known here."""
        return self._follower.wrong[index]

    def wrong(self) -> dict[int, Record]:
        """Return by fragment the wrong entry by which its log ends, as far as copies that are kept say so."""
        found = {}
        for index, copy in self._follower.copies.items():
            record = self._follower.wrong[index].stand_after(copy.replica.chain)
            if record is not None:
                found[index] = record
        return found

    async def as_stored(self, index: int) -> LogCopy:
        """Return the fragment as its log has it, whatever copy there is; no other task has it."""
        return await until_available(partial(self._follower.load_once, index), self.log)

    def known(self) -> list[LogCopy]:
        """Return all copies; none may be being folded."""
        return list(self._follower.copies.values())

    async def take(self, index: int) -> LogCopy:
        """Return the fragment as of its log's end, from its copy where that serves; it is the caller's from now on."""
        copy = self._follower.copies.pop(index, None)
        while True:
            try:
                if copy is None:
                    copy = await until_available(partial(self._follower.load_once, index), self.log)
                else:
                    await until_available(partial(self._follower.to_end, copy), self.log)
            except RewoundError as error:
                self.log.error("log_rewound", fragment=index, reason=str(error))
                copy = None
                continue
            except StateError as error:
                if copy is None:
                    raise  # this machine folds to other bits each time
                self.log.warning("log_reloaded", fragment=index, reason=str(error))
                copy = None
                continue
            if await self._serves(index, copy):
                return copy
            copy = None

    async def _serves(self, index: int, copy: LogCopy) -> bool:
        """Whether an owner can go on with a copy that is at its log's end."""
        # after the fence was read: the fence notices a loss from now on
        if not await until_available(partial(self.store.reader.holds, copy.replica.chain), self.log):
            return False
        newest = await until_available(partial(self.store.reader.newest_keyframe, index), self.log)
        if newest is None or newest[1] <= copy.keyframe_sequence or newest[1] in copy.refused:
            return True
        keyframe, sequence = newest
        chain = copy.replica.chain
        if keyframe.entry_hash in self._follower.wrong[index]:
            copy.refused = (*copy.refused, sequence)  # another one is due
            return True
        if keyframe.entry_sequence > chain.sequence or keyframe.version == chain.version:
            # entries before it may have been purged unread; or it has the residual of this very version
            return False
        # a share of the bytes read since the load: records of a fragment are about as large as one another
        versions = max(1, chain.version - copy.keyframe_version)
        copy.log_bytes = copy.log_bytes * (chain.version - keyframe.version) // versions
        copy.keyframe_sequence, copy.keyframe_version = sequence, keyframe.version
        return True

    async def follow(
        self,
        fragments: Sequence[int],
        ready: Callable[[], None],
        folded: Callable[[LogCopy, FollowedEntry | None], Awaitable[None]],
        doubted: Callable[[], None],
    ) -> None:
        """Keep copies of these fragments up to date, for ever.

        A copy from before stays, if the log still has its newest entry. ``ready`` is called when all are loaded, ``folded``
        with each entry (None: the fragment was loaded again), and ``doubted`` when a log has a wrong entry (:meth:`wrong`).
        """
        copies = self._follower.copies
        for index in set(copies).difference(fragments):
            del copies[index]
        for index in fragments:
            copy = copies.get(index)
            if copy is None or not await until_available(partial(self.store.reader.holds, copy.replica.chain), self.log):
                await self._follower.load(index)
        ready()
        async for event in self._follower.follow(fragments):
            if isinstance(event, FollowedEntry):
                await folded(event.copy, event)
            elif isinstance(event, Wrong):
                doubted()
            elif not event.rewound:
                await folded(event.copy, None)
            elif event.copy.replica.chain.fragment == fragments[-1]:
                ready()
