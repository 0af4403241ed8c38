"""The other regions, as one region's syncer reaches them: a client of each one's server, and of each one's log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from diloco.control.creation import Run
from diloco.control.genesis import decided_genesis
from diloco.core.bandwidth import Appends
from diloco.core.fragments import FragmentMap
from diloco.core.quorum import majority
from diloco.errors import BrokerError, MessageError, RunError, StorageFullError
from diloco.log.log import Log
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.process.tasks import end
from diloco.transport import Transport

RETRY_S = 0.5  # until a region is asked again whether the run has begun there
# fragments that are brought up to date in a region at the same time: enough to keep a long link busy, few enough that the first
# of them is there, and merged with again, long before the last
CATCHING_UP = 2

Connect = Callable[[], Awaitable[Transport]]


class Regions:
    """All regions' logs. One that cannot be reached yet is waited for by those who ask for it, and by nobody else.

    ``connect`` opens a connection to each other region, however long that takes.
    """

    def __init__(self, own: str, log: Log, run: Run, fragment_map: FragmentMap, connect: Mapping[str, Connect]) -> None:
        self.own, self.run, self.map = own, run, fragment_map
        self.names = list(run.created.regions.names)
        self.majority = majority(len(self.names))
        self.appends = {name: Appends() for name in self.names}
        self.stores = True  # the last entry that was to be stored in the own region, was
        self.turns = {name: asyncio.Semaphore(CATCHING_UP) for name in self.names}  # to catch up in each region
        self._logs = {own: log}
        self._connect = connect
        self._connected = {name: asyncio.Event() for name in self.names if name != own}
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, group: asyncio.TaskGroup) -> None:
        """Connect to all others."""
        self._tasks = [group.create_task(self._open(region)) for region in self._connected]

    async def close(self) -> None:
        """Give all connections up."""
        await end(*self._tasks)
        for region, log in self._logs.items():
            if region != self.own:
                await log.transport.close()

    async def _open(self, region: str) -> None:
        transport = await self._connect[region]()
        log = self._logs[region] = Log(transport, self.run.name, self.run.identity, self.map, self.run.created)
        while not await self._has_begun(log):
            await asyncio.sleep(RETRY_S)
        self._connected[region].set()

    async def _has_begun(self, log: Log) -> bool:
        try:
            return await log.reader.genesis() is not None
        except BrokerError:  # the server is away, or its own syncer has not made the streams yet
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
        reached = {region for region, log in self._logs.items() if log.transport.connected}
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
        """Have the own region's log begin as the run does: with version 0, which its founder stored in some region."""
        home, complaint = self.home, Complaint(log)
        while await home.reader.genesis() is None:
            frame = await decided_genesis(self.run)
            if frame is not None:
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
