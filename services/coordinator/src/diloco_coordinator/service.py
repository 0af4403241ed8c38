"""``diloco-coordinator``: creates the run, watches it, answers status requests. Training goes on without it."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from functools import partial
from typing import Annotated, Any

import msgspec

from diloco import __version__, membership, observe, service
from diloco.core import tape as events
from diloco.core.leadership import Leadership
from diloco.errors import AppendUncertainError, BrokerError, FenceError, MessageError, RewoundError
from diloco.following import Follower
from diloco.log import heads
from diloco.membership import Run
from diloco.metrics import Exporter
from diloco.observe import Counted, Logger, Progress
from diloco.patience import patiently
from diloco.rundir import write_json
from diloco.settings import CoordinatorSettings, check_region
from diloco.tape import Recorder, TapeFile, Unrecorded
from diloco.tasks import end
from diloco.transport import Heard, Transport
from diloco.wire import messages
from diloco.wire.messages import CoordinatorPulse, MemberName, Pulse, ShardPulse
from diloco.wire.subjects import Subjects
from diloco_coordinator.metrics import ObservedCoordinator
from diloco_coordinator.monitor import Monitor

SAVE_EVERY_S = 5.0
LAST_PULSES_S = 1.0
TICK_S = 0.5
ASSIGN_EVERY_S = 1.0


class _Leader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The bucket's key ``coordinator``."""

    coordinator: MemberName
    process: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Coordinator:
    """The service; ``await serve()`` returns when the run is finished.

    Of several, one leads: watches, answers and writes. The others stand by, knowing nothing of the run but who leads.
    """

    def __init__(
        self, transport: Transport, run: Run, settings: CoordinatorSettings, log: Logger, tape: Recorder | None = None
    ) -> None:
        self.tape = tape or Unrecorded()
        self.transport, self.run, self.settings, self.log = transport, run, settings, log
        self.subjects = Subjects(run.name)
        self.refused: Counted = Counted(log)
        self._versions = Counted(log, "version_differs")
        self.follower = Follower(transport, run, log, self._change)
        self.file = settings.state_dir / "series.json"
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self._leadership = Leadership(settings.name, transport.random_bytes(8), self._clock())
        self._finished = False
        self.monitor: Monitor | None = None  # while this process leads
        self.ticked_s = self._clock()  # when it last did, or waited for, what there is to do about who leads
        self._heard: frozenset[str] = frozenset()  # members, as the tape has it
        self._away: dict[str, float] = {}  # regions, as the log has it, and since when
        self._complained = False

    @property
    def leads(self) -> bool:
        """Whether it is this process that leads, as far as it knows."""
        return self._leadership.leads

    @property
    def follows(self) -> bool:
        """Whether it knows of another one that leads."""
        return not self.leads and self._leadership.revision > 0

    async def serve(self) -> None:
        """Lead the run, or stand by, until it is finished."""
        await self.transport.subscribe(self.subjects.coordinator, self._hear_coordinator)
        await self.transport.subscribe(self.subjects.status, self._answer)
        await self.transport.subscribe(self.subjects.pulse(), self._hear)
        await self.transport.subscribe(self.subjects.shard(), self._hear_shard)
        while not self._finished:
            await self._tick()
            if self._leadership.leads:
                await self._lead()

    async def _lead(self) -> None:
        """Watch the run while this process leads."""
        self.log.info("leading", revision=self._leadership.revision)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            while self._leadership.leads and not (watching.done() and self._leadership.sure(self._clock())):
                await self._tick()
            await end(watching)
        if self._leadership.leads:
            self.save()
            self._finished = True
            await self._pulse()
        else:
            self.monitor = None
            self.log.warning("stepped_down", revision=self._leadership.revision)

    async def _tick(self) -> None:
        """Do what is to be done about who leads, and wait if that was nothing."""
        leadership, self.ticked_s = self._leadership, self._clock()
        action = leadership.tick(self._clock(), self.transport.connected)
        try:
            if action == "pulse":
                await self._pulse()
            elif action == "read":
                stored = await self.run.registry.get("coordinator")
                holder, revision = (None, 0) if stored is None else (_holder(stored[0]), stored[1])
                leadership.read(holder, revision, self._clock())
            elif action == "claim":
                leadership.claimed(await self._claim(), self._clock())
        except AppendUncertainError:
            action = "wait"  # the server is silent, for the others too
        if action in ("pulse", "wait"):
            await asyncio.sleep(TICK_S)

    async def _claim(self) -> int | None:
        value = msgspec.msgpack.encode(_Leader(self.settings.name, self._leadership.process))
        revision = self._leadership.revision
        try:
            if revision:
                return await self.run.registry.update("coordinator", value, revision)
            return await self.run.registry.create("coordinator", value)
        except FenceError:
            return None

    async def _pulse(self) -> None:
        pulse = CoordinatorPulse(self.settings.name, self._leadership.revision, self._finished, __version__)
        await self.transport.publish(self.subjects.coordinator, messages.pack(pulse, self.run.identity))

    async def _hear_coordinator(self, message: Heard) -> None:
        try:
            pulse, _, _ = messages.unpack(message.data, CoordinatorPulse, self.run.identity)
        except MessageError as error:
            self.refused.note(message.subject, type(error).__name__, reason=str(error))
            return
        self._leadership.hear(pulse.revision, self._clock())
        self._finished = self._finished or pulse.finished

    async def _watch(self) -> None:
        """Watch the run until it is finished."""
        self._began_s = self._clock()
        fragment_map = await patiently(partial(membership.find_map, self.run), self.log)
        await patiently(self.follower.look, self.log)
        monitor = Monitor(self.run.name, self.run.settings, fragment_map, self.settings.nats_url)
        monitor.change(self.run.now)
        self._resume(monitor)
        self.monitor = monitor
        async with asyncio.TaskGroup() as group:
            work = (
                self._follow(monitor),
                self._save_regularly(monitor),
                self._assign_shares(monitor),
                self.follower.follow(),
            )
            tasks = [group.create_task(task) for task in work]
            try:
                await self._until_finished(monitor)
            finally:
                await end(*tasks)
        self.log.info("run_finished", wall_s=round(self.now_s(), 1), versions=sum(monitor.versions))

    async def _until_finished(self, monitor: Monitor) -> None:
        while monitor.state != "finished":
            await asyncio.sleep(0.1)
        await asyncio.sleep(LAST_PULSES_S)

    def _change(self) -> None:
        if self.monitor is not None:
            self.monitor.change(self.run.now)

    def now_s(self) -> float:
        """Seconds since the run began, as far as it was watched."""
        return self._clock() - self._began_s

    def _resume(self, monitor: Monitor) -> None:
        try:
            series = json.loads(self.file.read_text())
            began_s = self._clock() - float(series["wall_s"])
            monitor.resume(series)
            self._began_s = began_s
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self.log.warning("series_unreadable", file=str(self.file), reason=str(error))

    async def _answer(self, message: Heard) -> None:
        if not self._leadership.leads:
            return
        status = {"run": self.run.name, "state": "waiting"} if self.monitor is None else self.monitor.status(self.now_s())
        await message.respond(json.dumps(status).encode())

    async def _hear(self, message: Heard) -> None:
        if self.monitor is None:
            return
        try:
            pulse, _, _ = messages.unpack(message.data, Pulse, self.run.identity)
        except MessageError as error:
            self.refused.note(message.subject, type(error).__name__, reason=str(error))
            return
        self._note_version(pulse.learner, pulse.software)
        self.monitor.hear(pulse, self.now_s())

    async def _hear_shard(self, message: Heard) -> None:
        if self.monitor is None:
            return
        try:
            pulse, _, _ = messages.unpack(message.data, ShardPulse, self.run.identity)
        except MessageError as error:
            self.refused.note(message.subject, type(error).__name__, reason=str(error))
            return
        self._note_version(pulse.syncer, pulse.software)
        self.monitor.hear_shard(pulse, self.now_s())

    def _note_version(self, member: str, software: str) -> None:
        """Say once that a member runs another version, as while services are upgraded one after another."""
        if software != __version__:
            self._versions.note(member, software or "unknown", here=__version__)

    async def _follow(self, monitor: Monitor) -> None:
        while True:
            try:
                await self._read_log(monitor)
            except RewoundError as error:
                self.log.error("log_rewound", reason=str(error))
                monitor.closed.clear()  # the entries that closed them may be among what is lost

    async def _read_log(self, monitor: Monitor) -> None:
        async for record in heads(self.transport, self.run, len(monitor.versions), self._refuse_head):
            monitor.entry(record, self.now_s())

    def _refuse_head(self, subject: str, error: MessageError) -> None:
        self.refused.note(subject, type(error).__name__, reason=str(error))

    async def _assign_shares(self, monitor: Monitor) -> None:
        while True:
            await asyncio.sleep(ASSIGN_EVERY_S)
            self._note_members(monitor)
            self._note_regions(monitor)
            try:
                table, revision = await membership.shares(self.run)
                changed = monitor.assign(table, self.now_s())
                if changed is not None:
                    await membership.set_shares(self.run, changed, revision)
                    for lease in changed.leases:
                        if lease not in table.leases:
                            self.tape.record(events.Lease(self._at_ms(), lease.share, lease.holder or ""))
                    self.tape.flush()
                    self.log.warning("shares_assigned", held=changed.held())
            except BrokerError as error:  # somebody was first, or the server is away: the next look will tell
                self.log.debug("shares_not_assigned", reason=str(error))

    def _note_members(self, monitor: Monitor) -> None:
        """Note on the tape who came, and who is not heard any more."""
        heard = monitor.heard(self.now_s())
        for member in sorted(heard ^ self._heard):
            self.tape.record((events.Back if member in heard else events.Gone)(self._at_ms(), member))
        if heard != self._heard:
            self.tape.flush()
        self._heard = heard

    def _note_regions(self, monitor: Monitor) -> None:
        away = monitor.presence.away()
        for region in sorted(away.keys() - self._away.keys()):
            self.log.warning("region_away", other_region=region, silent_s=round(self.now_s() - away[region], 1))
        for region in sorted(self._away.keys() - away.keys()):
            self.log.info("region_back", other_region=region, away_s=round(self.now_s() - self._away[region], 1))
        self._away = away

    def _at_ms(self) -> int:
        return int(self.transport.wall_s() * 1000)

    async def _save_regularly(self, monitor: Monitor) -> None:
        progress = Progress(self.log, self._clock(), partial(self._progress, monitor))
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            progress.look(self._clock())
            await asyncio.to_thread(self.save)

    def _progress(self, monitor: Monitor) -> tuple[dict[str, int], dict[str, Any]]:
        counts = {"versions": sum(monitor.versions), "tokens": monitor.tokens_processed()}
        live = [pulse for pulse in monitor.live(self.now_s()) if pulse.role == "learner"]
        losses = [pulse.loss for pulse in live if pulse.loss is not None]
        loss = round(statistics.fmean(losses), 4) if losses else None
        return counts, {"state": monitor.state, "learners": len(live), "loss": loss, "refused": self.refused.total}

    def save(self) -> None:
        """Write the series to the state directory, if it is this process that leads."""
        if self.monitor is None or not self._leadership.sure(self._clock()):
            return
        try:
            write_json(self.file, self.monitor.series(self.now_s()))
        except OSError as error:  # the disk is full, which is no reason to end
            if not self._complained:
                self.log.warning("series_not_saved", file=str(self.file), reason=str(error))
            self._complained = True
        else:
            self._complained = False


def _holder(stored: bytes) -> tuple[str, bytes] | None:
    try:
        leader = msgspec.msgpack.decode(stored, type=_Leader)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return leader.coordinator, leader.process


async def serve(settings: CoordinatorSettings) -> None:
    """Create or find the run, and watch it until it is over or a signal comes."""
    log = observe.get_logger()
    check_region(settings.region, settings.settings.regions.names, settings.run)
    async with Exporter(settings, "coordinator", log) as exporter:
        await _serve(settings, exporter, log)


async def _serve(settings: CoordinatorSettings, exporter: Exporter, log: Logger) -> None:
    transport = exporter.transport = await service.connect(settings, "coordinator", log)
    coordinator: Coordinator | None = None
    try:
        run = await patiently(partial(membership.create, transport, settings.run, settings.settings), log)
        log.info("run_ready", preset=run.settings.preset, tokens=run.settings.tokens)
        tape = TapeFile.begin(settings, run.identity, transport.wall_s(), log)
        coordinator = Coordinator(transport, run, settings, log, tape)
        exporter.observed = ObservedCoordinator(coordinator, exporter.labels())
        await coordinator.serve()
    finally:
        if coordinator is not None:
            coordinator.save()
        await transport.close()


def _main() -> int:
    settings = service.parse_settings(CoordinatorSettings, "diloco-coordinator")
    asyncio.run(service.until_stopped(lambda: serve(settings), observe.get_logger()))
    return 0


def main() -> None:
    """Console script."""
    sys.exit(observe.run_main(_main, "diloco-coordinator"))


if __name__ == "__main__":
    main()
