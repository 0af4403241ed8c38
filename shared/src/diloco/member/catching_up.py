"""A learner that joins waits until its region's log has what the run has (:mod:`diloco.core.log.catch_up`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from diloco.control.creation import KnownRun
from diloco.control.gate import HeartbeatGate
from diloco.control.hearing import hear
from diloco.core.log.catch_up import CatchUp, LogStanding
from diloco.log.log import Log
from diloco.process.observe import Counted, Logger
from diloco.process.retry import until_available
from diloco.process.tasks import Tasks, end
from diloco.transport import Heard, Subscribed
from diloco.wire.control import Announcement, Heartbeat

LOOK_S = 0.25  # at the log's notices, of the fragments that are behind

HearRound = Callable[[Announcement, Heard], Awaitable[None]]


async def listen(
    run: KnownRun, store: Log, region: str, tasks: Tasks, refused: Counted, log: Logger, open_round: HearRound
) -> Catching:
    """Begin to hear heartbeats, until the wait is over, and rounds for good, which the learner gets once the log is loaded."""
    catching = Catching(run=run, store=store, region=region, tasks=tasks, log=log, open_round=open_round)
    catching.heartbeats = await store.transport.subscribe(store.subjects.heartbeat(), catching.hear_heartbeat)
    await hear(store.transport, store.subjects.round(), Announcement, run.identity, catching.hear_round, refused)
    return catching


class Catching:
    """Hears the others while its learner joins. Construct it in the loop's thread.

    ``open_round`` is called with the announcements that come once the log is ``loaded``.
    """

    def __init__(self, run: KnownRun, store: Log, region: str, tasks: Tasks, log: Logger, open_round: HearRound) -> None:
        self.store, self.log, self._open_round = store, log, open_round
        self._clock = asyncio.get_running_loop().time
        self._known = CatchUp(region, len(store.map.fragments), run.in_force.liveness.heartbeat_s, self._clock())
        self._gate = HeartbeatGate(run, store.map, None, self._hear_learner)  # the run's members count what is refused
        self._work = tasks.spawn(self._gate.work())
        self.loaded = False
        self.heartbeats: Subscribed | None = None

    async def hear_heartbeat(self, heard: Heard) -> None:
        """Take in a message on the heartbeats' subjects."""
        await self._gate.hear(heard)

    async def hear_round(self, announced: Announcement, heard: Heard) -> None:
        """Take in the announcement of a round."""
        if self.loaded:
            await self._open_round(announced, heard)
        else:
            self._known.hear_round(announced)

    async def _hear_learner(self, heartbeat: Heartbeat) -> None:
        self._known.hear(heartbeat)

    async def wait(self) -> None:
        """Wait until the region's log is where the others are, or is waited for no longer: that is logged as a warning."""
        try:
            await self._wait()
        finally:
            if self.heartbeats is not None:
                await self.heartbeats.end()
            await end(self._work)

    async def _wait(self) -> None:
        known, versions, logged = self._known, [0] * len(self.store.map.fragments), False
        while (wanted := known.wanted(self._clock())) is None:
            await asyncio.sleep(LOOK_S)
        while True:
            for index, version in enumerate(wanted):
                if versions[index] < version:
                    versions[index] = await until_available(partial(self._newest, index), self.log)
            now_s = self._clock()
            standing = known.judge(versions, now_s)
            if standing is LogStanding.CURRENT:
                return
            fragment, stated = known.furthest(versions, now_s)
            about = {"region": known.region, "fragment": fragment, "version": versions[fragment], "stated_version": stated}
            if standing is LogStanding.GIVEN_UP:
                self.log.warning("region_is_old", **about, remedy="check the links between this region and the others")
                return
            if not logged:
                self.log.info("region_catches_up", **about)
                logged = True
            await asyncio.sleep(LOOK_S)
            wanted = known.wanted(now_s) or wanted

    async def _newest(self, fragment: int) -> int:
        """Return the newest committed version of a fragment that the region's log has."""
        notice = await self.store.region.furthest_notice(fragment)
        return 0 if notice is None else notice.version
