"""Write one fragment's log to all regions: claim it, bring it up to date, and append until a majority has each entry.

The rules are in :mod:`diloco.core.log.quorum`. Each region has a writer of its own, so that one which is slow or away keeps no
other one waiting: it gets the entries that it misses when it is there again. Readers hold back few entries until a notice
comes, so a region is told every :data:`~diloco.core.log.quorum.NOTICE_EVERY` entries which of them are committed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

from diloco.core.log.chain import Chain
from diloco.core.log.quorum import MAX_COPIED, NOTICE_EVERY, LogHead, best, outbids
from diloco.errors import AppendUncertainError, BrokerError, FenceError, MessageError, RewoundError, StorageFullError
from diloco.log.log import Log
from diloco.log.stream import Packed
from diloco.process.observe import Logger
from diloco.process.retry import RETRY_S, Complaint, until_available
from diloco.process.tasks import end
from diloco.wire import framing
from diloco.wire.body import ATTEMPT_BYTES
from diloco.wire.entries import Record
from diloco_syncer.owning.places import Places, RegionProgress
from diloco_syncer.regions import Regions

LOOK_S = 0.25  # from one look whether a claim is still wanted to the next
DAMAGED_RETRY_S = 5.0  # until a log that was damaged is looked at again: it rarely heals
KEPT = 8  # entries that are kept in memory for regions that are a little behind


class OutbidError(FenceError):
    """The fragment has to be claimed again, with a higher epoch than ``epoch``."""

    def __init__(self, text: str, epoch: int) -> None:
        super().__init__(text)
        self.epoch = epoch


@dataclass(frozen=True)
class _Queued:
    """An entry in memory, for the regions that miss it."""

    packed: Packed
    made_s: float  # when it was added


class Replication:
    """The writers of a fragment's owner: :meth:`claim`, then :meth:`append`, until another syncer claims it (FenceError)."""

    def __init__(
        self, regions: Regions, fragment: int, syncer: str, genesis_check: bytes, log: Logger, epoch: int, known_epoch: int
    ) -> None:
        """``epoch``: to claim with, where no higher one is found; ``known_epoch``: of what is committed."""
        self.regions, self.fragment, self.syncer, self.log = regions, fragment, syncer, log
        self.genesis_check = genesis_check
        self.epoch, self._known_epoch = epoch, known_epoch
        self.committed = -1  # number of the last entry that a majority holds, or that a notice in the claimed log names
        self._entries: deque[_Queued] = deque()  # the newest
        self._numbered = 0  # entries so far, those included that were dropped from memory
        self._places = Places(regions, fragment)
        self._known = b""  # name of the last entry that a notice in the claimed log names
        self._end = genesis_check, 0  # name and version of the last entry that was claimed and is right
        self._wrong: Container[bytes] = ()  # entries that regions may have after that
        self._before = genesis_check  # name of the entry before those in memory; the own region has it
        self._lost: FenceError | None = None
        self._changed = asyncio.Condition()
        self._writers: list[asyncio.Task[None]] = []

    # ---- claiming

    async def claim(self, chain: Chain, wanted: Callable[[], bool]) -> list[Packed] | None:
        """Shut all others out of a majority of regions. Return the entries that follow ``chain``, to be folded.

        Those that are right are part of the log from now on, committed before or not. None: it is no longer ``wanted``, while
        there is no majority.

        Raises:
            OutbidError: it has to be done again: another syncer is at it, or the own region is too far behind.
        """
        log_heads: dict[str, LogHead] = {}
        claims = [asyncio.ensure_future(self._claim(place, log_heads)) for place in self._places.all]
        try:
            while len(log_heads) < self.regions.majority or self.regions.own not in log_heads:
                if not wanted():
                    return None
                done, _ = await asyncio.wait(claims, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                claims = [task for task in claims if not task.done()]
        finally:
            await end(*claims)
        await self._places.demand_claimed(log_heads)
        chosen = best(log_heads, self.regions.own)
        source = await self.regions.log(chosen)
        path = await until_available(lambda: self._between(source, chain, log_heads[chosen]), self.log)
        if path is None:
            # the own region is so far behind that the entries between are gone elsewhere
            await source.region.install_snapshot(self.fragment, self.regions.home.region, self._places.own.fence)
            raise OutbidError(f"fragment {self.fragment}: this region was far behind, and now has a keyframe", self.epoch)
        if path:
            notice = await until_available(partial(source.region.furthest_notice, self.fragment), self.log)
            self._known = notice.entry_hash if notice is not None else b""
        return path

    def go_on(self, chain: Chain, path: Sequence[Packed], wrong: Container[bytes]) -> None:
        """Take up the log where ``chain`` is, after ``path``; in regions where it ends with ``wrong`` entries, before those."""
        self._before = path[0].previous if path else chain.head
        self._end, self._wrong = (chain.head, chain.version), wrong
        for packed in path:
            number = self._add(packed)
            if packed.entry_hash == self._known:
                self.committed = number

    async def _claim(self, place: RegionProgress, log_heads: dict[str, LogHead]) -> None:
        log, complaint = await self.regions.log(place.region), Complaint(self.log)
        while True:
            try:
                place.made = await self.regions.counted(place.region)
                end = await log.region.log_end(self.fragment, self.genesis_check, self._known_epoch)
                if end.epoch >= self.epoch:
                    raise OutbidError(f"fragment {self.fragment}: region {place.region} is at epoch {end.epoch}", end.epoch)
                place.fence = await log.region.claim(self.fragment, self.epoch, self.syncer, end.last, end.sequence)
                self._places.demand_counted(place)
                log_heads[place.region] = end.last
                return
            except OutbidError:
                raise
            except BrokerError as error:
                self._failed(place, error, complaint)
                self.log.debug("claim_retried", fragment=self.fragment, other_region=place.region, reason=str(error))
                await asyncio.sleep(RETRY_S)

    async def _between(self, source: Log, chain: Chain, log_head: LogHead) -> list[Packed] | None:
        """Return the entries of the chosen log after ``chain``'s head, up to its tip; None: it does not have all of them."""
        if log_head.entry_hash == chain.head:
            return []
        home = source is self.regions.home
        start = chain.sequence if home else await source.region.before(self.fragment, chain.version)
        return await source.region.path(self.fragment, start, log_head.sequence, chain.head, log_head.entry_hash)

    # ---- writing

    def begin(self, group: asyncio.TaskGroup) -> None:
        """Start the writers."""
        self._writers = [group.create_task(self._write(place)) for place in self._places.all]

    async def stop(self) -> None:
        """Write no more; an append that waits fails."""
        await end(*self._writers)
        if self._lost is None:
            await self._lose(FenceError(f"fragment {self.fragment}: {self.syncer} no longer writes it"))

    async def append(self, record: Record, inline: bytes, parts: Sequence[bytes]) -> int:
        """Append an entry and wait until it is committed. Return its sequence in the own region's stream.

        Raises:
            FenceError: the fragment is another owner's now, which finds out whether the entry is committed.
        """
        pieces = [part[ATTEMPT_BYTES:] for part in parts]
        number = self._add(Packed(record, framing.hash_of(record, self.regions.run.identity), 0, inline, pieces))
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._lost is not None or self.committed >= number)
        if self.committed < number:
            assert self._lost is not None
            raise self._lost
        return self._places.own.sequence

    async def settled(self, timeout_s: float) -> None:
        """Wait until all regions have everything, and know that it is committed; but not for ever."""
        newest = self._numbered - 1

        def done() -> bool:
            return self._lost is not None or all(place.noticed >= newest for place in self._places.all)

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(done)
        except TimeoutError:
            away = [place.region for place in self._places.all if place.noticed < newest]
            self.log.warning("regions_behind", fragment=self.fragment, regions=away)

    def waits_s(self, region: str, now_s: float) -> float:
        """Return for how long the oldest entry that a region misses has waited; 0 while it catches up after an absence."""
        place = self._places.by_region[region]
        missing = range(max(place.stored + 1, self._numbered - len(self._entries)), self._numbered)
        return now_s - self._entries[missing[0] - self._numbered].made_s if missing and place.level else 0.0

    def away(self, region: str) -> None:
        """Note that a region cannot be reached: entries that it misses from now on do not wait because of its link's rate."""
        self._places.by_region[region].level = False

    def _add(self, packed: Packed) -> int:
        self._entries.append(_Queued(packed, asyncio.get_running_loop().time()))
        self._numbered += 1
        return self._numbered - 1

    async def _write(self, place: RegionProgress) -> None:
        log, complaint = await self.regions.log(place.region), Complaint(self.log)
        while self._lost is None:
            try:
                if self._places.forget(place) and not await self.regions.look(place.region):
                    await asyncio.sleep(RETRY_S)
                    continue
                if place.refused:
                    await self._look_behind(place, log)
                if place.at is None:
                    await self._settle(place, log)
                elif self._is_behind(place):
                    async with self.regions.turns[place.region]:
                        await self._catch_up(place, log)
                elif place.at != self._newest:
                    await self._store_next(place, log)
                elif self._is_unnoticed(place):
                    await self._notice(place, log)
                else:
                    async with self._changed:
                        await self._changed.wait_for(lambda: self._has_work(place))
                complaint.over()
            except OutbidError as error:
                await self._lose(error)
            except FenceError:
                place.refused = True
            except RewoundError:
                place.at = None
            except MessageError as error:
                self.log.error("region_log_damaged", fragment=self.fragment, other_region=place.region, reason=str(error))
                place.at = None
                await asyncio.sleep(DAMAGED_RETRY_S)
            except BrokerError as error:
                self._failed(place, error, complaint)
                await asyncio.sleep(RETRY_S)

    def _failed(self, place: RegionProgress, error: BrokerError, complaint: Complaint) -> None:
        """Note that a region stored nothing, and complain if it has no room; one that is away needs no word."""
        self.regions.tried(place.region, stored=False)
        if isinstance(error, StorageFullError):
            complaint.error("storage_full", fragment=self.fragment, other_region=place.region, reason=str(error))

    def _is_behind(self, place: RegionProgress) -> bool:
        """Whether a region misses more than the newest entry."""
        last = self._entries[-1].packed.previous if self._entries else self._newest
        return bool(place.older) or place.at not in (self._newest, last)

    async def _catch_up(self, place: RegionProgress, log: Log) -> None:
        while self._lost is None and self._is_behind(place):
            await (self._store(place, log, place.older[0]) if place.older else self._store_next(place, log))

    def _is_unnoticed(self, place: RegionProgress) -> bool:
        return place.noticed < place.stored <= self.committed

    def _has_work(self, place: RegionProgress) -> bool:
        return self._lost is not None or place.at != self._newest or self._is_unnoticed(place)

    @property
    def _newest(self) -> bytes:
        """Name of the last entry."""
        return self._entries[-1].packed.entry_hash if self._entries else self._before

    async def _lose(self, error: FenceError) -> None:
        async with self._changed:
            self._lost = error
            self._changed.notify_all()

    async def _look_behind(self, place: RegionProgress, log: Log) -> None:
        """Move a region's fence behind what everyone passes over; have its log looked at if there is anything else."""
        end = await log.reader.passed_over(self.fragment, place.fence, partial(outbids, epoch=self.epoch))
        place.refused = False
        if end is None or end == place.fence:
            place.at = None
        else:
            place.fence = end

    async def _settle(self, place: RegionProgress, log: Log) -> None:
        """Find out the last entry of a region, and so the next one to store there."""
        place.made, place.since_s = await self.regions.counted(place.region), asyncio.get_running_loop().time()
        end = await log.region.log_end(self.fragment, self.genesis_check, self._known_epoch)
        log_head, place.fence = end.last, end.sequence
        if end.epoch > self.epoch:
            raise OutbidError(f"fragment {self.fragment}: region {place.region} is at epoch {end.epoch}", end.epoch)
        notice = await log.region.furthest_notice(self.fragment)
        place.older.clear()
        place.untold = 0
        if log_head.entry_hash in self._wrong:  # it has all that leads up to them
            place.untold = NOTICE_EVERY
            await self._reached(place, *self._end, log_head.sequence)
        elif self._number(log_head.entry_hash) is not None or log_head.entry_hash == self._before:
            if notice is None or notice.entry_hash != log_head.entry_hash:
                place.untold = NOTICE_EVERY
            await self._reached(place, log_head.entry_hash, log_head.version, log_head.sequence)
        elif notice is not None:  # and after it, perhaps, a dead branch
            await self._reached(place, notice.entry_hash, notice.version, notice.sequence)
        else:
            await self._reached(place, self.genesis_check, 0, 0)

    async def _reached(self, place: RegionProgress, entry_hash: bytes, version: int, sequence: int) -> None:
        async with self._changed:
            place.at, place.version, place.sequence = entry_hash, version, sequence
            number = self._number(entry_hash)
            if number is not None:
                place.stored = number
            place.level = place.level or entry_hash == self._newest
            self._changed.notify_all()
        if number is not None:
            await self._count(number)

    def _number(self, entry_hash: bytes) -> int | None:
        """Return the number of an entry that is in memory; None: it is not."""
        first = self._numbered - len(self._entries)
        return next((first + index for index, entry in enumerate(self._entries) if entry.packed.entry_hash == entry_hash), None)

    async def _store_next(self, place: RegionProgress, log: Log) -> None:
        """Store the next entry, from memory; look for it in the own region's log, if it has left the memory."""
        packed = next((entry.packed for entry in self._entries if entry.packed.previous == place.at), None)
        if packed is None:
            place.older.extend(await self._older(place, log))
            return
        await self._store(place, log, packed)

    async def _store(self, place: RegionProgress, log: Log, packed: Packed) -> None:
        """Store an entry in a region, and every so often a notice of one that is committed: what left the memory is."""
        sequence = await self._append(place, log, packed)
        if place.older:
            place.older.popleft()
        self.regions.tried(place.region, stored=True)
        await self._reached(place, packed.entry_hash, packed.record.version, sequence)
        place.untold += 1
        if place.untold >= NOTICE_EVERY and place.stored <= self.committed:
            await self._tell(place, log, packed)

    async def _append(self, place: RegionProgress, log: Log, packed: Packed) -> int:
        """Store an entry in a region, and return its sequence there; claim again what too many entries would hide."""
        began_s, record = asyncio.get_running_loop().time(), packed.record
        sequence = place.fence = await log.region.append_packed(packed, place.fence)
        self._places.demand_counted(place)
        place.since_s = began_s
        self._took(place, began_s, packed.size_bytes)
        place.copied = place.copied + 1 if record.epoch < self.epoch else 0
        if place.copied >= MAX_COPIED:
            log_head = LogHead(record.epoch, record.version, record.closing, packed.entry_hash, sequence)
            place.fence = await log.region.claim(self.fragment, self.epoch, self.syncer, log_head, sequence)
            place.copied = 0
        return sequence

    def _took(self, place: RegionProgress, began_s: float, size_bytes: int) -> None:
        self.regions.appends[place.region].done(began_s, asyncio.get_running_loop().time(), size_bytes)

    async def _tell(self, place: RegionProgress, log: Log, packed: Packed) -> None:
        """Store a notice of the last entry that a region holds, which is committed."""
        record = packed.record
        await log.region.notice(self.fragment, record.version, record.epoch, packed.entry_hash, place.sequence)
        place.untold = 0

    async def _older(self, place: RegionProgress, log: Log) -> list[Packed]:
        """Return the entries that a region misses of those that have left the memory; the own region's log has them.

        If they are gone there, the region gets a keyframe first, and the entries after that.
        """
        home, stop, last = self.regions.home, self._places.own.sequence, self._before
        assert place.at is not None
        start = await home.region.before(self.fragment, place.version)
        path = await home.region.path(self.fragment, start, stop, place.at, last)
        if path is not None:
            return path
        if (installed := await home.region.install_snapshot(self.fragment, log.region, place.fence)) is None:
            raise AppendUncertainError(f"fragment {self.fragment}: this region has no keyframe to continue from")
        jumped, _ = installed
        place.fence, place.untold = jumped.entry_sequence, 0
        self.log.info("region_given_keyframe", fragment=self.fragment, other_region=place.region, version=jumped.version)
        await self._reached(place, jumped.entry_hash, jumped.version, place.fence)
        return []

    async def _count(self, number: int) -> None:
        """Commit the entries that a majority with the own region holds: those of the own epoch, and with them all before."""
        own = self._places.own
        is_own = self._entries[number - self._numbered].packed.record.epoch == self.epoch
        while is_own and self.committed < number and self._lost is None and self._places.may_hold(number):
            if await self._places.is_held(number):
                async with self._changed:
                    self.committed = max(self.committed, number)
                    self._changed.notify_all()
            else:
                await asyncio.sleep(RETRY_S)  # a region that said to hold it does not answer
        # only the newest stay in memory, once the own region has them; writers of regions further behind read them there
        while len(self._entries) > KEPT and self._numbered - len(self._entries) < min(self.committed, own.stored):
            self._before = self._entries.popleft().packed.entry_hash

    async def _notice(self, place: RegionProgress, log: Log) -> None:
        number = place.stored
        packed = self._entries[number - self._numbered].packed
        began_s = asyncio.get_running_loop().time()
        await self._tell(place, log, packed)
        self._took(place, began_s, 0)
        async with self._changed:
            place.noticed = number
            self._changed.notify_all()
