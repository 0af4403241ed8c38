"""One fragment's log in all regions, as its owner writes it: claimed, brought up to date, appended to until a majority has it.

What may be done is :mod:`diloco.core.quorum`'s; this does it. Each region has a writer of its own, so that one which is slow or
away keeps nobody else waiting: it gets what it misses when it is there again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diloco.core.chain import Chain
from diloco.core.quorum import Tip, Undecided, best
from diloco.errors import AppendUncertainError, BrokerError, FenceError, MessageError, RewoundError, StorageFullError
from diloco.log import Log, Packed
from diloco.observe import Logger
from diloco.patience import RETRY_S, patiently
from diloco.tasks import end
from diloco.wire import messages
from diloco.wire.messages import Record
from diloco_syncer.regions import Regions

LOOK_S = 0.25  # that a claim is still wanted
DAMAGED_RETRY_S = 5.0
OLDER_A_NOTICE = 16
KEPT = 8  # entries that are kept in memory for regions that are a little behind


class OutbidError(FenceError):
    """The fragment is to be claimed anew, with a higher epoch than ``epoch``."""

    def __init__(self, text: str, epoch: int) -> None:
        super().__init__(text)
        self.epoch = epoch


@dataclass
class _Place:
    """How far one region's log is."""

    region: str
    fence: int = 0  # sequence of the last message among the heads there
    at: bytes | None = None  # name of the entry after which it goes on; None: what is there has to be looked at
    version: int = 0  # of that entry
    sequence: int = 0  # of that entry, there
    older: deque[Packed] = field(default_factory=deque)  # entries that come next, and are not in memory otherwise
    stored: int = -1  # number of the last entry of those in memory that it holds
    noticed: int = -1  # number of the last entry that it was told is committed
    level: bool = False  # it had everything since it was last away: what it misses now has waited for its link


class Replication:
    """Made by whoever is to own the fragment: :meth:`claim`, then :meth:`append`, until another claims it (FenceError)."""

    def __init__(self, regions: Regions, fragment: int, syncer: str, genesis_check: bytes, log: Logger, epoch: int) -> None:
        """``epoch``: to claim with, where nobody is found to have a higher one."""
        self.regions, self.fragment, self.syncer, self.log = regions, fragment, syncer, log
        self.genesis_check = genesis_check
        self.epoch = epoch
        self.committed = -1  # number of the last entry that a majority holds
        self._entries: deque[Packed] = deque()  # the newest
        self._made_s: deque[float] = deque()  # when each was added
        self._numbered = 0  # entries so far, those included that were dropped from memory
        self._places = {region: _Place(region) for region in regions.names}
        self._before = genesis_check  # name of the entry before those in memory; the own region has it
        self._lost: FenceError | None = None
        self._changed = asyncio.Condition()
        self._writers: list[asyncio.Task[None]] = []

    # ---- claiming

    async def claim(self, chain: Chain, wanted: Callable[[], bool]) -> list[Packed] | None:
        """Shut everybody else out of a majority of regions; the entries that follow ``chain``, to be folded.

        They are part of what the log is from now on, whether or not they were committed before. None: it is no longer
        ``wanted``, while there is no majority.

        Raises:
            OutbidError: it is to be done again: somebody else is at it, or the own region is too far behind.
        """
        tips: dict[str, Tip] = {}
        claims = [asyncio.ensure_future(self._claim(place, tips)) for place in self._places.values()]
        try:
            while len(tips) < self.regions.majority or self.regions.own not in tips:
                if not wanted():
                    return None
                done, _ = await asyncio.wait(claims, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                claims = [task for task in claims if not task.done()]
        finally:
            await end(*claims)
        chosen = best(tips, self.regions.own)
        source = await self.regions.log(chosen)
        path = await patiently(lambda: self._between(source, chain, tips[chosen]), self.log)
        if path is None:
            # the own region is so far behind that the entries between are gone elsewhere
            await source.jump(self.fragment, self.regions.home, self._places[self.regions.own].fence)
            raise OutbidError(f"fragment {self.fragment}: the own region was far behind, and has a keyframe now", self.epoch)
        self._before = chain.head
        for packed in path:
            self._add(packed)
        return path

    async def _claim(self, place: _Place, tips: dict[str, Tip]) -> None:
        log, complained = await self.regions.log(place.region), False
        while True:
            try:
                tip, epoch, head = await log.tip(self.fragment, self.genesis_check)
                if epoch >= self.epoch:
                    raise OutbidError(f"fragment {self.fragment}: region {place.region} is at epoch {epoch}", epoch)
                place.fence = await log.claim(self.fragment, self.epoch, self.syncer, tip, head)
                tips[place.region] = tip
                return
            except OutbidError:
                raise
            except BrokerError as error:
                complained = self._complain(place, error, complained)
                self.log.debug("claim_retried", fragment=self.fragment, other_region=place.region, reason=str(error))
                await asyncio.sleep(RETRY_S)

    async def _between(self, source: Log, chain: Chain, tip: Tip) -> list[Packed] | None:
        """The entries of the chosen log after ``chain``'s head, up to its tip; None: it does not have them all any more."""
        if tip.check == chain.head:
            return []
        home = source is self.regions.home
        start = chain.sequence if home else await source.before(self.fragment, chain.version)
        return await self._path(source, start, tip.sequence, chain.head, tip.check)

    async def _path(self, source: Log, start: int, stop: int, after: bytes, last: bytes) -> list[Packed] | None:
        """The entries after the one named ``after`` up to the one named ``last``; None: the log does not have them all."""
        held: Undecided[Packed] = Undecided(None)
        async for packed in source.stored(self.fragment, start + 1, stop):
            held.add(packed)
        path = held.path(last)
        names = [packed.previous for packed in path]
        return path[names.index(after) :] if after in names else None

    # ---- writing

    def begin(self, group: asyncio.TaskGroup) -> None:
        """Have the writers at work."""
        self._writers = [group.create_task(self._write(place)) for place in self._places.values()]

    async def stop(self) -> None:
        """Write no more; who waits for an append is told so."""
        await end(*self._writers)
        if self._lost is None:
            await self._lose(FenceError(f"fragment {self.fragment}: {self.syncer} writes it no more"))

    async def append(self, record: Record, inline: bytes, parts: Sequence[bytes]) -> int:
        """Append an entry and wait until it is committed; its sequence in the own region's stream.

        Raises:
            FenceError: the fragment is another owner's now. Whether the entry is committed is for that one to find out.
        """
        pieces = [part[messages.ATTEMPT_BYTES :] for part in parts]
        number = self._add(Packed(record, messages.check_of(record, self.regions.run.identity), 0, inline, pieces))
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._lost is not None or self.committed >= number)
        if self.committed < number:
            assert self._lost is not None
            raise self._lost
        return self._places[self.regions.own].sequence

    async def settled(self, timeout_s: float) -> None:
        """Wait until all regions have everything, and know that it is committed; but not for ever."""
        newest = self._numbered - 1

        def done() -> bool:
            return self._lost is not None or all(place.noticed >= newest for place in self._places.values())

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(done)
        except TimeoutError:
            away = [place.region for place in self._places.values() if place.noticed < newest]
            self.log.warning("regions_behind", fragment=self.fragment, regions=away)

    def waits_s(self, region: str, now_s: float) -> float:
        """For how long the oldest entry that a region misses has waited; 0 while it is brought up to date after an absence."""
        place = self._places[region]
        missing = range(max(place.stored + 1, self._numbered - len(self._entries)), self._numbered)
        return now_s - self._made_s[missing[0] - self._numbered] if missing and place.level else 0.0

    def away(self, region: str) -> None:
        """A region cannot be reached: what it misses by the time that it can be waits for no fault of its link's."""
        self._places[region].level = False

    def _add(self, packed: Packed) -> int:
        self._entries.append(packed)
        self._made_s.append(asyncio.get_running_loop().time())
        self._numbered += 1
        return self._numbered - 1

    async def _write(self, place: _Place) -> None:
        log, complained = await self.regions.log(place.region), False
        while self._lost is None:
            try:
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
                complained = False
            except OutbidError as error:
                await self._lose(error)
            except (FenceError, RewoundError):
                place.at = None
            except MessageError as error:
                self.log.error("region_log_damaged", fragment=self.fragment, other_region=place.region, reason=str(error))
                place.at = None
                await asyncio.sleep(DAMAGED_RETRY_S)
            except BrokerError as error:
                complained = self._complain(place, error, complained)
                await asyncio.sleep(RETRY_S)

    def _complain(self, place: _Place, error: BrokerError, complained: bool) -> bool:
        """A region stored nothing: say once if it has no room; whether that is said."""
        self.regions.tried(place.region, stored=False)
        if complained or not isinstance(error, StorageFullError):
            return complained
        self.log.error("storage_full", fragment=self.fragment, other_region=place.region, reason=str(error))
        return True

    def _is_behind(self, place: _Place) -> bool:
        """Whether a region misses more than the newest entry."""
        last = self._entries[-1].previous if self._entries else self._newest
        return bool(place.older) or place.at not in (self._newest, last)

    async def _catch_up(self, place: _Place, log: Log) -> None:
        while self._lost is None and self._is_behind(place):
            await (self._store_older(place, log) if place.older else self._store_next(place, log))

    def _is_unnoticed(self, place: _Place) -> bool:
        return place.noticed < place.stored <= self.committed

    def _has_work(self, place: _Place) -> bool:
        return self._lost is not None or place.at != self._newest or self._is_unnoticed(place)

    @property
    def _newest(self) -> bytes:
        """Name of the last entry that there is."""
        return self._entries[-1].check if self._entries else self._before

    async def _lose(self, error: FenceError) -> None:
        async with self._changed:
            self._lost = error
            self._changed.notify_all()

    async def _settle(self, place: _Place, log: Log) -> None:
        """Find out what a region has, and so what is to be stored there next."""
        tip, epoch, place.fence = await log.tip(self.fragment, self.genesis_check)
        if epoch > self.epoch:
            raise OutbidError(f"fragment {self.fragment}: region {place.region} is at epoch {epoch}, not {self.epoch}", epoch)
        notice = await log.last_notice(self.fragment)
        place.older.clear()
        if self._number(tip.check) is not None or tip.check == self._before:
            await self._reached(place, tip.check, tip.version, tip.sequence)
        elif notice is not None:  # and after it, perhaps, a dead branch
            await self._reached(place, notice.check, notice.version, notice.sequence)
        else:
            await self._reached(place, self.genesis_check, 0, 0)

    async def _reached(self, place: _Place, check: bytes, version: int, sequence: int) -> None:
        async with self._changed:
            place.at, place.version, place.sequence = check, version, sequence
            number = self._number(check)
            if number is not None:
                place.stored = number
                self._count(number)
            place.level = place.level or check == self._newest
            self._changed.notify_all()

    def _number(self, check: bytes) -> int | None:
        """The number of an entry that is in memory."""
        first = self._numbered - len(self._entries)
        return next((first + index for index, packed in enumerate(self._entries) if packed.check == check), None)

    async def _store_next(self, place: _Place, log: Log) -> None:
        """Store the entry that comes next, from memory; or look for it in the own region's log, if it has left the memory."""
        packed = next((packed for packed in self._entries if packed.previous == place.at), None)
        if packed is None:
            place.older.extend(await self._older(place, log))
            return
        await self._append(place, log, packed)
        self.regions.tried(place.region, stored=True)
        await self._reached(place, packed.check, packed.record.version, place.fence)

    async def _append(self, place: _Place, log: Log, packed: Packed) -> None:
        began_s = asyncio.get_running_loop().time()
        place.fence = await log.append_packed(packed, place.fence)
        self._took(place, began_s, packed.size_bytes)

    def _took(self, place: _Place, began_s: float, size_bytes: int) -> None:
        self.regions.appends[place.region].done(began_s, asyncio.get_running_loop().time(), size_bytes)

    async def _store_older(self, place: _Place, log: Log) -> None:
        packed = place.older[0]
        await self._append(place, log, packed)
        place.older.popleft()
        await self._reached(place, packed.check, packed.record.version, place.fence)
        if len(place.older) % OLDER_A_NOTICE == 0:  # readers hold back what no notice speaks of, and not without end
            await log.notice(self.fragment, packed.record.version, packed.record.epoch, packed.check, place.fence)

    async def _older(self, place: _Place, log: Log) -> list[Packed]:
        """The entries that a region misses of those that are not in memory any more, which the own region's log has.

        If they are gone there, the region gets a keyframe first, and what follows that.
        """
        home, stop, last = self.regions.home, self._places[self.regions.own].sequence, self._before
        assert place.at is not None
        path = await self._path(home, await home.before(self.fragment, place.version), stop, place.at, last)
        if path is not None:
            return path
        jumped = await home.jump(self.fragment, log, place.fence)
        if jumped is None:
            raise AppendUncertainError(f"fragment {self.fragment}: the own region has no keyframe to go on from")
        place.fence = jumped.entry_sequence
        self.log.info("region_given_keyframe", fragment=self.fragment, other_region=place.region, version=jumped.version)
        await self._reached(place, jumped.entry_hash, jumped.version, place.fence)
        return []

    def _count(self, number: int) -> None:
        """Commit what a majority holds, the own region among it: entries of the own epoch, and with them all before."""
        held = sum(place.stored >= number for place in self._places.values())
        own = self._places[self.regions.own]
        entry = self._entries[number - self._numbered]
        if held >= self.regions.majority and own.stored >= number and entry.record.epoch == self.epoch:
            self.committed = max(self.committed, number)
        # only the newest stay in memory, once the own region has them; who is further behind reads them there
        while len(self._entries) > KEPT and self._numbered - len(self._entries) < min(self.committed, own.stored):
            self._before = self._entries.popleft().check
            self._made_s.popleft()

    async def _notice(self, place: _Place, log: Log) -> None:
        number = place.stored
        record, check = self._entries[number - self._numbered].record, self._entries[number - self._numbered].check
        began_s = asyncio.get_running_loop().time()
        await log.notice(self.fragment, record.version, record.epoch, check, place.sequence)
        self._took(place, began_s, 0)
        async with self._changed:
            place.noticed = number
            self._changed.notify_all()
