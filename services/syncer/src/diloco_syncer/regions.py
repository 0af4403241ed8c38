"""The other regions, as one region's syncer reaches them: a client of each one's server, and of each one's log.

A region counts, in claims and for majorities, once its log has its genesis record. Whether it has is asked again whenever the
connection was made again, since its server may have lost its disk: then the stream is another one, and holds nothing of what
the region said to hold. The record is the last thing that a syncer of the region stores there. Before, it brings all that the
region may have been counted for (:meth:`Regions.bring_genesis`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from diloco.control.creation import KnownRun
from diloco.control.genesis import decided_genesis
from diloco.core.log.fold import keyframe_bytes
from diloco.core.log.quorum import majority
from diloco.core.syncer.bandwidth import Appends
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import AppendUncertainError, BrokerError, MessageError, RunError, StorageFullError
from diloco.log.log import Log
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.process.tasks import end, side_by_side
from diloco.transport import Connect
from diloco.wire import framing
from diloco.wire.entries import Genesis

RETRY_S = 0.5  # until a region is asked again whether the run has begun there
# fragments that are brought up to date in a region at the same time: enough to keep a long link busy, few enough that the first
# of them is there, and merged with again, long before the last
CATCHING_UP = 2
# fragments of a lost log that are brought at the same time, and bytes of their keyframes: over a long link each takes many
# round trips, and what waits in front of a thin one has to cross it before a request times out
BROUGHT_AT_ONCE, BROUGHT_BYTES = 4, 1 << 20
# after so long a region may have lost its log, and have been brought back: its server starts again, and others' logs are read
COMES_BACK_S = 0.5


class Regions:
    """All regions' logs. One that cannot be reached yet is waited for only by those that ask for it.

    ``connect`` opens a connection to each other region, however long that takes.
    """

    def __init__(
        self, own: str, log: Log, run: KnownRun, fragment_map: FragmentMap, connect: Mapping[str, Connect], name: str
    ) -> None:
        """``name``: of the syncer."""
        self.name = name
        self.own, self.run, self.map = own, run, fragment_map
        self.names = list(run.created.regions.names)
        self.majority = majority(len(self.names))
        self.appends = {name: Appends() for name in self.names}
        self.stores = True  # the last entry that was to be stored in the own region, was
        self.turns = {name: asyncio.Semaphore(CATCHING_UP) for name in self.names}  # to catch up in each region
        self.brings = False  # the own region's log was lost, and is not whole again yet
        self._made: dict[str, str] = {}  # by region: which stream it was that had its genesis record
        self._asked: dict[str, int] = {}  # and over which connection that was found
        self._logs = {own: log}
        self._connect = connect
        self._connected = {name: asyncio.Event() for name in self.names if name != own}
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Connect to all others; return the tasks that do, and then watch them for ever."""
        self._tasks = [group.create_task(self._open(region)) for region in self._connected]
        return self._tasks

    async def close(self) -> None:
        """Give all connections up."""
        await end(*self._tasks)
        await asyncio.gather(*(log.transport.close() for region, log in self._logs.items() if region != self.own))

    async def _open(self, region: str) -> None:
        transport = await self._connect[region]()
        self._logs[region] = Log(transport, self.run.name, self.run.identity, self.map, self.run.created)
        while not await self.look(region):
            await asyncio.sleep(RETRY_S)
        self._connected[region].set()
        await self.watch(region)

    async def watch(self, region: str) -> None:
        """Ask a region again whether it counts, whenever the connection to it was made again; for ever.

        Raises:
            BrokerError: the server of the own region has lost its log. A launcher starts a process again that ends with it.
        """
        while True:
            if not self.counts(region) and not await self.look(region) and region == self.own and await self._is_lost():
                raise BrokerError(
                    f"region {region}: its server has lost the log of run {self.run.name!r}; this syncer ends, and "
                    "restores the log when it is restarted"
                )
            await asyncio.sleep(RETRY_S)

    async def _is_lost(self) -> bool:
        """Whether the own region's log is another stream than the one that counted."""
        try:
            return await self.home.transport.made_at(self.home.subjects.log_stream) != self._made[self.own]
        except BrokerError:
            return False

    async def look(self, region: str) -> bool:
        """Ask a region whether its log has its genesis record."""
        log = self._logs[region]
        connections, name = log.transport.connections, log.subjects.log_stream
        try:
            made = await log.transport.made_at(name)
            if made is None:
                return False
            known = made == self._made.get(region)
            if not known and (await log.reader.genesis() is None or made != await log.transport.made_at(name)):
                return False
        except BrokerError:  # the server is away, or its own syncer has not made the streams yet
            return False
        self._made[region], self._asked[region] = made, connections
        return True

    def counts(self, region: str) -> bool:
        """Whether a region counts in claims and for a majority, as far as the connection that there is now says."""
        log = self._logs.get(region)
        return log is not None and self._asked.get(region) == log.transport.connections

    def reached(self) -> dict[str, bool]:
        """Return for each other region whose server was reached once whether there is a connection to it now."""
        return {name: log.transport.connected for name, log in self._logs.items() if name != self.own}

    @property
    def begun(self) -> bool:
        """Whether a majority of regions with the own one has begun: before, no syncer may own anything."""
        return self.own in self._made and len(self._made) >= self.majority

    async def counted(self, region: str) -> str:
        """Return which stream a region's log is, by its making, once the region counts.

        Raises:
            AppendUncertainError: it does not.
        """
        await self.log(region)
        if not self.counts(region) and not await self.look(region):
            raise AppendUncertainError(f"region {region}: its log is away, or has no genesis record")
        return self._made[region]

    async def same(self, region: str, made: str) -> bool:
        """Ask a region whether its log still is the stream that was made then."""
        log = await self.log(region)
        try:
            return await log.transport.made_at(log.subjects.log_stream) == made
        except BrokerError:
            return False

    @property
    def home(self) -> Log:
        """The own region's log."""
        return self._logs[self.own]

    @property
    def others(self) -> list[Log]:
        """The logs of the other regions that can be reached."""
        return [log for region, log in self._logs.items() if region != self.own and log.transport.connected]

    @property
    def commits(self) -> bool:
        """Whether a version could be committed from here: the own region stores it, and with it a majority can be reached."""
        reached = {region for region, log in self._logs.items() if log.transport.connected and self.counts(region)}
        return self.own in reached and len(reached) >= self.majority and self.stores

    def tried(self, region: str, *, stored: bool) -> None:
        """Note whether an entry was stored in a region. Only the own one counts: without it nothing is committed from here."""
        if region == self.own:
            self.stores = stored

    async def log(self, region: str) -> Log:
        """Return a region's log, once it is reached and the run has begun there."""
        if region != self.own:
            await self._connected[region].wait()
        return self._logs[region]

    def crossing(self) -> list[tuple[str, int, int]]:
        """Return by other region the payload bytes sent to its server, and received from it."""
        others = [(region, log.transport) for region, log in self._logs.items() if region != self.own]
        return [(region, transport.bytes_out, transport.bytes_in) for region, transport in others]

    async def bring_genesis(self, log: Logger) -> None:
        """Have the own region's log begin as the run does: with version 0, which its founder stored in some region.

        Once fragments have had owners, the region may have been counted before it lost its log. Then it is brought back.
        """
        home, complaint, waiting = self.home, Complaint(log), Complaint(log)
        while not await self.look(self.own):
            frame = await decided_genesis(self.run)
            if frame is not None and await self.run.registry.get("owners") is not None:
                self.brings = True
                await self._bring_back(frame, log, waiting)
            elif frame is not None:
                sources = [home, *(self._logs[region] for region in self.names if region in self._logs and region != self.own)]
                for source in sources:
                    try:
                        await home.region.begin_from(source.region, frame)
                        break
                    except StorageFullError as error:
                        complaint.error("storage_full", reason=str(error))
                    except (BrokerError, MessageError, RunError) as error:
                        log.debug("genesis_not_brought", reason=str(error))
            await asyncio.sleep(RETRY_S)
        self.brings = False

    async def _bring_back(self, frame: bytes, log: Logger, complaint: Complaint) -> None:
        """Bring the own region's log, which was lost, to all that the region may have been counted for; at last its genesis.

        What a majority with this region has held, one of so many others holds, that only one less would be a majority without
        this region. The claims that they hold are kept here, too.
        """
        needed = len(self.names) - self.majority + 1
        others = {region: self._made[region] for region in self._connected if self.counts(region)}
        if len(others) < needed:
            missing = sorted(self._connected.keys() - others.keys())
            complaint.warn("region_waits_for_others", regions=missing, needed=needed)
            return
        complaint.over()
        genesis, entry_hash, _ = framing.unpack(frame, Genesis, self.run.identity)
        try:
            largest = max(map(self._keyframe_bytes, range(len(self.map.fragments))))
            most = max(1, min(BROUGHT_AT_ONCE, BROUGHT_BYTES // largest))
            bring = partial(self._bring_fragment, list(others), genesis, entry_hash)
            await side_by_side(len(self.map.fragments), most, bring)
            answers = [await self.same(region, made) for region, made in others.items()]
            if all(answers):
                await self.home.writer.append_genesis(frame)
                log.info("region_brought_back", regions=sorted(others))
        except StorageFullError as error:
            complaint.error("storage_full", reason=str(error))
        except (BrokerError, MessageError, RunError) as error:  # a FenceError: another syncer of this region brings it, too
            log.debug("region_not_brought_back", reason=str(error))

    def _keyframe_bytes(self, fragment: int) -> int:
        return keyframe_bytes(self.map.fragments[fragment].size, self.home.stream.optimizers[fragment].moments)

    async def _bring_fragment(self, others: list[str], genesis: Genesis, entry_hash: bytes, fragment: int) -> None:
        logs = [self._logs[region].region for region in others]
        # before the last entries, which they lead to, since the others go on meanwhile
        notices = await asyncio.gather(*(log.furthest_notice(fragment) for log in logs))
        known_epoch = max((notice.epoch for notice in notices if notice is not None), default=0)
        ends = await asyncio.gather(*(log.log_end(fragment, entry_hash, known_epoch) for log in logs))
        highest = max(end.last.rank for end in ends)
        best = [index for index, end in enumerate(ends) if end.last.rank == highest]
        chosen = best[fragment % len(best)]  # each link carries its part
        home = self.home.region
        noticed = {notice.entry_hash for notice in notices if notice is not None}  # the last one may have come late, and be old
        await home.bring_from(logs[chosen], fragment, ends[chosen], noticed, genesis, entry_hash)
        here, epoch = await home.log_end(fragment, entry_hash, known_epoch), max(end.epoch for end in ends)
        if here.epoch < epoch:
            await home.claim(fragment, epoch, self.name, here.last, here.sequence)
