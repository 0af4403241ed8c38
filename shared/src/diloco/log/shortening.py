"""Shortening a region's log: what stands before the oldest keyframe that stays is dropped, fragment by fragment.

:func:`diloco.core.log.retention.keyframes_kept` says how many keyframes stay. All entries from the oldest of them on stay too.
Any syncer may store keyframes. So nothing is dropped before the oldest one that stays and the newest one are found whole: all
that their readers check is checked here, and the log has their entries. Then each fragment can be loaded, whatever else is
stored. The content of a keyframe is read once, and only hashed.

The leading coordinator shortens the logs of all regions, so that no syncer has to have the right.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from diloco.core.log.chain import NO_ENTRY, Chain
from diloco.core.log.fold import keyframe_bytes
from diloco.core.log.retention import keyframes_kept
from diloco.core.tensors import codec, outer
from diloco.core.tensors.fragments import Fragment
from diloco.errors import BrokerError, FormatError, HashError, MessageError, RewoundError
from diloco.log.log import Log
from diloco.log.reader import PARTS_AT_ONCE
from diloco.log.stream import decode_keyframe
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.settings.run import LogSettings, RunSettings
from diloco.transport import Connect, Stored
from diloco.wire import subjects
from diloco.wire.body import Body, check_body_size
from diloco.wire.entries import Keyframe, Record

EVERY_S = 5.0  # a look at which keyframes have come costs nothing
AGAIN_S = 60.0  # after an error: servers' lists of an earlier version may not let a coordinator purge
LAST_S = 10.0  # for the logs as of the run's end


class LogShortener:
    """Shortens one region's log.

    Args:
        settings: return those of the log that are in force.
        judged: by fragment, the greatest version that a merged learner had applied: it had folded all before it to the same
            states as the log. Nothing is dropped before a keyframe of a later version, which may stand after a wrong entry.
    """

    def __init__(
        self,
        log: Log,
        settings: Callable[[], LogSettings],
        judged: Mapping[int, int],
        logger: Logger,
        other_region: str | None = None,
    ) -> None:
        self.log, self.settings, self.judged, self.logger = log, settings, judged, logger
        self.about = {} if other_region is None else {"other_region": other_region}  # in what is logged
        self._heads: dict[int, list[int]] = {}  # sequences of keyframes by fragment, without those that are not whole
        self._whole: dict[int, Keyframe] = {}  # by sequence
        self._turn = asyncio.Lock()

    async def follow(self) -> None:
        """Note the keyframes in the log, for ever.

        Raises:
            BrokerError: the region has no log, or the connection was closed for good.
        """
        stream = self.log.stream
        while True:
            self._heads = {fragment.index: [] for fragment in stream.map.fragments}
            self._whole.clear()
            try:
                async for stored in stream.pull([self.log.subjects.keyframe("*")], 1, None, headers_only=True):
                    fragment = subjects.fragment_of(stored.subject)
                    if fragment in self._heads:
                        self._heads[fragment].append(stored.sequence)
            except RewoundError as error:
                self.logger.error("log_rewound", **self.about, reason=str(error))

    def noted(self, fragment: int) -> list[int]:
        """Return the sequences of a fragment's keyframes, as far as they are known and not found damaged, the oldest first."""
        return list(self._heads.get(fragment, []))

    async def shorten(self) -> None:
        """Drop what may go by now.

        Raises:
            BrokerError: the server refuses, or is silent.
        """
        async with self._turn:
            for fragment in self.log.stream.map.fragments:
                stays = await self._find_both(fragment)
                # a server that has lost its last writes may have others in their place
                if stays and all([await self._is_there(*keyframe) for keyframe in stays]):
                    await self._drop(fragment.index, stays[0][1])

    async def _find_both(self, fragment: Fragment) -> list[tuple[int, Keyframe]]:
        """Return the oldest keyframe that stays and the newest one, with their sequences; none: nothing is to be dropped."""
        heads, log = self._heads.get(fragment.index, []), self.log.stream
        kept = keyframes_kept(self.settings(), log.map.size, log.optimizers[fragment.index].moments)
        stays = kept  # how many keyframes would stay
        while len(heads) > stays:
            oldest, newest = heads[-stays], heads[-1]
            found = await self._find_whole(fragment, oldest)
            if found is None:
                heads.remove(oldest)
                continue
            last = await self._find_whole(fragment, newest)
            if last is None:
                heads.remove(newest)
            elif found.version > self.judged.get(fragment.index, 0):
                stays += 1  # learners are behind: an older keyframe may do
            else:
                return [(oldest, found), (newest, last)]
        return []

    async def _is_there(self, sequence: int, keyframe: Keyframe) -> bool:
        """Whether the log still has a keyframe that was found whole."""
        stored = await self.log.stream.get(sequence)
        with contextlib.suppress(MessageError):
            if stored is not None and decode_keyframe(stored, self.log.run)[0] == keyframe:
                return True
        self._whole.pop(sequence, None)
        return False

    async def _drop(self, index: int, oldest: Keyframe) -> None:
        heads = self._heads[index]
        before = len(heads)
        await self.log.writer.purge_below(index, oldest.entry_sequence)
        # a keyframe's head and parts stand after the entry that it was made of
        heads[:] = [sequence for sequence in heads if sequence > oldest.entry_sequence]
        left = {sequence for kept in self._heads.values() for sequence in kept}
        self._whole = {sequence: keyframe for sequence, keyframe in self._whole.items() if sequence in left}
        gone = before - len(heads)
        self.logger.debug("log_shortened", **self.about, fragment=index, version=oldest.version, keyframes=gone)

    async def _find_whole(self, fragment: Fragment, sequence: int) -> Keyframe | None:
        """Return the keyframe with a head of this sequence, if its readers could load it."""
        known = self._whole.get(sequence)
        if known is None:
            stored = await self.log.stream.get(sequence)
            if stored is None:
                return None
            try:
                known = self._whole[sequence] = await self._check(fragment, stored)
            except MessageError as error:
                found = {"fragment": fragment.index, "sequence": sequence}
                self.logger.warning("keyframe_refused", **self.about, **found, reason=str(error))
                return None
        return known

    async def _check(self, fragment: Fragment, stored: Stored) -> Keyframe:
        """Return a keyframe, read and checked to its end.

        Raises:
            MessageError: a reader would pass it over.
        """
        stream = self.log.stream
        keyframe, inline = decode_keyframe(stored, stream.run)
        what = f"fragment {fragment.index}, keyframe of version {keyframe.version}"
        if keyframe.entry_hash == NO_ENTRY:
            raise FormatError(f"{what}: it stands after no entry")
        if not await self.log.reader.holds(Chain.from_keyframe(keyframe, stream.epoch_step)):
            raise FormatError(f"{what}: the log does not have its entry, or another state after it")
        moments = stream.optimizers[fragment.index].moments
        raw_bytes = keyframe_bytes(fragment.size, moments)
        check_body_size(keyframe.body, codec.packed_limit(raw_bytes), what)
        digests = codec.ContentDigests([4 * fragment.size] * (2 + moments))  # Theta, its moments, the residual
        await self._read(digests, keyframe.body, inline, stored, what)
        content_hash, (*state, _) = digests.digests()
        if content_hash != keyframe.body.content_hash or outer.state_hash_of(state) != keyframe.state_hash:
            raise HashError(f"{what}: its content does not have the hashes that its head states")
        return keyframe

    async def _read(self, digests: codec.ContentDigests, body: Body, inline: bytes, stored: Stored, what: str) -> None:
        """Read a keyframe's body, few parts at a time.

        Raises:
            MessageError: a part is missing, the zstd frame is damaged, or a value of the residual is not finite.
        """
        if not body.parts:
            await asyncio.to_thread(digests.feed, [inline])
        size_bytes = 0 if body.parts else len(inline)
        for first in range(0, body.parts, PARTS_AT_ONCE):
            wanted = range(first, min(first + PARTS_AT_ONCE, body.parts))
            pieces = await self.log.stream.parts(stored.subject, body, what, stored.sequence, wanted=wanted)
            size_bytes += sum(map(len, pieces))
            await asyncio.to_thread(digests.feed, pieces)
        if size_bytes != body.size_bytes:
            raise FormatError(f"{what}: body of {size_bytes} bytes, its head says {body.size_bytes}")


class RunShortener:
    """Shortens the logs of all regions of a run that can be reached.

    ``judged``: as :class:`LogShortener` has it.
    """

    def __init__(
        self, home: Log, created: RunSettings, connect: Mapping[str, Connect], settings: Callable[[], LogSettings], log: Logger
    ) -> None:
        """``home``: the own region's log; ``created``: the run's settings; ``connect`` leads to the other regions."""
        self.home, self.created, self.connect, self.settings, self.log = home, created, connect, settings, log
        self.judged = {fragment.index: 0 for fragment in home.map.fragments}
        self._shorteners: list[LogShortener] = []

    def note(self, record: Record) -> None:
        """Note an entry of the log: its learners had applied their bases, and so folded all before them."""
        newest = max((member.base_version for member in record.members), default=0)
        self.judged[record.fragment] = max(self.judged[record.fragment], newest)

    async def work(self) -> None:
        """Shorten the logs, for ever; wait for regions that cannot be reached."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._shorten(self.home, None))
            for region, connect in self.connect.items():
                group.create_task(self._shorten_other(region, connect))

    async def finish(self) -> None:
        """Drop once more what may go, of the logs of the regions that can be reached."""
        with contextlib.suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(LAST_S):
                for shortener in self._shorteners:
                    await shortener.shorten()

    async def _shorten_other(self, region: str, connect: Connect) -> None:
        transport = await connect()
        try:
            run_name, run = self.home.subjects.run, self.home.run
            await self._shorten(Log(transport, run_name, run, self.home.map, self.created), region)
        finally:
            await transport.close()

    async def _shorten(self, log: Log, other_region: str | None) -> None:
        shortener = LogShortener(log, self.settings, self.judged, self.log, other_region)
        complaint = Complaint(self.log)
        self._shorteners.append(shortener)
        async with asyncio.TaskGroup() as group:
            group.create_task(_follow(shortener))
            while True:
                await asyncio.sleep(EVERY_S)
                try:
                    await shortener.shorten()
                    complaint.over()
                except BrokerError as error:
                    complaint.warn("log_not_shortened", **shortener.about, reason=str(error))
                    await asyncio.sleep(AGAIN_S)


async def _follow(shortener: LogShortener) -> None:
    """Note keyframes, for ever: a region's log may not be there yet."""
    while True:
        with contextlib.suppress(BrokerError):
            await shortener.follow()
        await asyncio.sleep(EVERY_S)
