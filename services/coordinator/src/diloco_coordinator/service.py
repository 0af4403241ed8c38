"""``diloco-coordinator``: creates the run, watches it, answers status requests. Training goes on without it."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec

from diloco import __version__
from diloco.control import creation
from diloco.control.changes import ChangesFollower
from diloco.control.creation import KnownRun
from diloco.control.gate import HeartbeatGate, check_owned
from diloco.control.hearing import hear
from diloco.control.history import Past
from diloco.core.run import tape as events
from diloco.core.run.leadership import Leadership
from diloco.core.run.run_length import rounds_each, too_short
from diloco.errors import AppendUncertainError, BrokerError, FenceError, FormatError, RewoundError
from diloco.log.log import Log
from diloco.log.shortening import RunShortener
from diloco.log.stream import RefusedEntry
from diloco.process import observe
from diloco.process.observe import Counted, Logger, Progress
from diloco.process.retry import Complaint, until_available
from diloco.process.tape import Recorder, TapeFile, Unrecorded
from diloco.process.tasks import end
from diloco.service import skeleton as service
from diloco.service.metrics import Exporter
from diloco.service.other_regions import ways_to_others
from diloco.settings.service import CoordinatorSettings, check_region
from diloco.transport import Connect, Heard, Transport
from diloco.wire import framing
from diloco.wire.control import CoordinatorHeartbeat, Heartbeat, ShardHeartbeat
from diloco.wire.fields import MemberName
from diloco.wire.subjects import Subjects
from diloco_coordinator import overview
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.history import RunHistory, pack
from diloco_coordinator.monitor import Monitor
from diloco_coordinator.origin import origin, preliminary_at_s
from diloco_coordinator.page.page_of_run import serve_page
from diloco_coordinator.run_metrics import ObservedCoordinator
from diloco_coordinator.series import SeriesFile, as_text
from diloco_coordinator.shown.listening import listen_to_members, report_refusals
from diloco_report import page

HISTORY_EVERY_S = 10.0  # at least: a standby's page may be so old, and a successor knows no more of losses
HISTORY_BYTES_S = 8192  # on average, which a thin link to the control store has room for
LAST_HISTORY_S = 5.0  # for the history as of the run's end: then the process ends without it
STORAGE_EVERY_S = 15.0  # between two looks at how full the streams are, which fill over hours
SAVE_EVERY_S = 5.0  # at most so much of the series is lost with a process; writing a long one takes a tenth of a second
LOOK_S = 5.0  # for a look at whether the logs are closed
LAST_HEARTBEATS_S = 1.0  # two heartbeats of every member, which say that it has finished
TICK_S = 0.5  # between the leader's own heartbeats: four fit into leadership.SILENCE_S
NOTE_EVERY_S = 1.0  # of what the series holds: a curve on a page needs no more


class _Leader(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The bucket's key ``coordinator``."""

    coordinator: MemberName
    process: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


_LEADER_DECODER = msgspec.msgpack.Decoder(_Leader)


class Coordinator:
    """The service; ``await serve()`` returns when the run is finished.

    One of several leads: it watches, answers and writes. The others stand by; of the run they know the leader alone.
    """

    def __init__(
        self,
        transport: Transport,
        run: KnownRun,
        settings: CoordinatorSettings,
        log: Logger,
        tape: Recorder | None = None,
        connect: Mapping[str, Connect] | None = None,
    ) -> None:
        """``connect`` leads to the other regions, in a run with regions."""
        self.tape = tape or Unrecorded()
        self.transport, self.run, self.settings, self.log = transport, run, settings, log
        self._connect = connect or {}
        self.subjects = Subjects(run.name)
        self.refused: Counted = Counted(log)
        self._versions = Counted(log, "version_differs")
        self.follower = ChangesFollower(transport, run, log, self._change)
        self.series = SeriesFile(settings.state_dir, log)
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self._leadership = Leadership(settings.name, transport.random_bytes(8), self._clock())
        self.history = RunHistory(run.registry)
        self._alerts = Alerts()
        self.monitor: Monitor | None = None  # while this process leads
        self._gate: HeartbeatGate | None = None  # and of its heartbeats
        self._closed = asyncio.Event()  # of the run that it leads, all logs are closed
        self.finished = self._measured = False  # measured: a learner has said how many tokens its steps have
        self._told_finished = False  # by another coordinator, which may be any process with the identity of one
        self.ticked_s = self._clock()  # time of the last tick of the leadership
        self._heard: frozenset[str] = frozenset()  # members that the tape has as present
        self._away: dict[str, float] = {}  # by region that the logs have as away: since when

    @property
    def leads(self) -> bool:
        """Whether this process leads, as far as it knows."""
        return self._leadership.leads

    @property
    def follows(self) -> bool:
        """Whether another process leads, as far as it knows."""
        return not self.leads and self._leadership.revision > 0

    async def serve(self) -> None:
        """Lead the run, or stand by, until it is finished."""
        identity, refused = self.run.identity, self.refused
        await hear(self.transport, self.subjects.coordinator, CoordinatorHeartbeat, identity, self._hear_coordinator, refused)
        await self.transport.subscribe(self.subjects.status, self._answer)
        await self.transport.subscribe(self.subjects.heartbeat(), self._hear)
        await hear(self.transport, self.subjects.shard(), ShardHeartbeat, identity, self._hear_shard, refused)
        await listen_to_members(self)
        while not self.finished:
            await self._tick()
            if self._leadership.leads:
                await self._lead()
            elif self._told_finished:
                self._told_finished = False
                self.finished = await _is_over(self.transport, self.run)

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
            await self.write_page()
            await self._end_history()
            self.finished = True
            await self._heartbeat()
        else:
            self.monitor = self._gate = None
            self.log.warning("stepped_down", revision=self._leadership.revision)

    async def _tick(self) -> None:
        """Take the leadership's next action, and wait if there is none."""
        leadership, self.ticked_s = self._leadership, self._clock()
        action = leadership.tick(self._clock(), self.transport.connected)
        try:
            if action == "heartbeat":
                await self._heartbeat()
            elif action == "read":
                stored = await self.run.registry.get("coordinator")
                holder, revision = (None, 0) if stored is None else (_holder(stored[0]), stored[1])
                leadership.read(holder, revision, self._clock())
            elif action == "claim":
                leadership.claimed(await self._claim(), self._clock())
        except AppendUncertainError:
            action = "wait"  # the server is silent, for the others too
        if action in ("heartbeat", "wait"):
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

    async def _heartbeat(self) -> None:
        heartbeat = CoordinatorHeartbeat(self.settings.name, self._leadership.revision, self.finished, __version__)
        await self.transport.publish(self.subjects.coordinator, framing.pack(heartbeat, self.run.identity))

    async def _hear_coordinator(self, heartbeat: CoordinatorHeartbeat, _: Heard) -> None:
        self._leadership.hear(heartbeat.revision, self._clock())
        self._told_finished = self._told_finished or heartbeat.finished

    async def _watch(self) -> None:
        """Watch the run until it is finished."""
        self._began_s = self._clock()
        fragment_map = await until_available(partial(creation.find_map, self.run), self.log)
        await until_available(self.follower.look, self.log)
        monitor = Monitor(self.run.name, self.run.created, fragment_map, self.settings.nats_url)
        monitor.change(self.run.now)
        past = await self._past()
        resumed = self.series.resume(monitor, None if past is None else dict(past.curves) | {"at_s": past.at_s})
        if resumed is not None:
            self._began_s = self._clock() - resumed.run_s(self.transport.wall_s())
        self._alerts = self._continued(past)
        self.monitor = monitor
        self._closed.clear()
        home = Log(self.transport, self.run.name, self.run.identity, fragment_map, self.run.created)
        shortener = RunShortener(home, self.run.created, self._connect, lambda: self.run.in_force.log, self.log)
        self._gate = gate = HeartbeatGate(self.run, fragment_map, self.refused, self._hear_learner, self._hear_evaluator)
        async with asyncio.TaskGroup() as group:
            work = (
                self._follow(monitor, home, shortener),
                shortener.work(),
                self._save_regularly(monitor),
                self._note_presence(monitor),
                _note_storage(self.transport, self.subjects, monitor, self.log),
                self._keep_history(monitor, self._leadership.revision),
                self.follower.follow(),
                gate.work(),
                report_refusals(self),
            )
            tasks = [group.create_task(task) for task in work]
            try:
                await self._closed.wait()
                await asyncio.sleep(LAST_HEARTBEATS_S)
                await shortener.finish()
            finally:
                await end(*tasks)
        self.log.info("run_finished", wall_s=round(self.now_s(), 1), versions=sum(monitor.versions))

    def _change(self) -> None:
        if self.monitor is not None:
            self.monitor.change(self.run.now)

    def now_s(self) -> float:
        """Return the seconds since the run began, as far as it was watched."""
        return self._clock() - self._began_s

    async def _answer(self, message: Heard) -> None:
        if not self._leadership.leads:
            return
        if self.monitor is None:
            await message.respond(json.dumps({"run": self.run.name, "state": "waiting"}).encode())
        else:
            await message.respond(overview.packed_status(self.monitor, self.now_s()))

    async def _hear(self, heard: Heard) -> None:
        if self._gate is not None:
            await self._gate.hear(heard)

    async def _hear_learner(self, heartbeat: Heartbeat) -> None:
        if self.monitor is not None:
            self._note_version(heartbeat.learner, heartbeat.software)
            self._note_length(heartbeat.batch_tokens)
            self.monitor.hear(heartbeat, self.now_s())

    async def _hear_evaluator(self, heartbeat: Heartbeat) -> None:
        if self.monitor is not None:
            self._note_version(heartbeat.learner, heartbeat.software)
            self.monitor.hear_evaluator(heartbeat, self.now_s())

    async def _hear_shard(self, heartbeat: ShardHeartbeat, _: Heard) -> None:
        if self.monitor is not None:
            check_owned(heartbeat, len(self.monitor.versions))
            self._note_version(heartbeat.syncer, heartbeat.software)
            self.monitor.hear_shard(heartbeat, self.now_s())

    def _note_length(self, step_tokens: int) -> None:
        """Warn once if a run that begins is short: the first steps say how many tokens a step has, in any task."""
        if self._measured or not step_tokens or self.monitor is None:
            return
        self._measured, settings = True, self.run.in_force
        reason = too_short(settings, step_tokens)
        if reason is not None and not any(self.monitor.versions):
            self.log.warning("run_is_short", rounds=rounds_each(settings, step_tokens), reason=reason)

    def _note_version(self, member: str, software: str) -> None:
        """Log once that a member runs another version, as during an upgrade of one service after another."""
        if software != __version__:
            self._versions.note(member, software or "unknown", here=__version__)

    async def _follow(self, monitor: Monitor, home: Log, shortener: RunShortener) -> None:
        while True:
            try:
                await self._read_log(monitor, home, shortener)
            except RewoundError as error:
                self.log.error("log_rewound", reason=str(error))
                monitor.closed.clear()  # the entries that closed them may be lost

    async def _read_log(self, monitor: Monitor, home: Log, shortener: RunShortener) -> None:
        async for head in home.entries.heads(self._refuse_entry):
            monitor.entry(head.record, self.now_s())
            shortener.note(head.record)
            if monitor.state == "finished":
                self._closed.set()

    def _refuse_entry(self, refusal: RefusedEntry) -> None:
        self.refused.note(refusal.subject, type(refusal.error).__name__, reason=str(refusal.error))

    async def _note_presence(self, monitor: Monitor) -> None:
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            self._note_members(monitor)
            self._note_regions(monitor)
            self._alerts.note(monitor, self.now_s())

    def _note_members(self, monitor: Monitor) -> None:
        """Note on the tape which members came, and which are gone."""
        heard = monitor.heard(self.now_s())
        for member in sorted(heard ^ self._heard):
            self.tape.record((events.Back if member in heard else events.Gone)(self._at_ms(), member))
        if heard != self._heard:
            self.tape.flush()
        self._heard = heard

    def _note_regions(self, monitor: Monitor) -> None:
        away = monitor.presence.lost()
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
            if (series := self._series()) is not None:
                await asyncio.to_thread(self.series.save, series)

    def _progress(self, monitor: Monitor) -> tuple[dict[str, int], dict[str, Any]]:
        counts = {"versions": sum(monitor.versions), "tokens": monitor.tokens_processed()}
        live = monitor.live(self.now_s())
        losses = [heartbeat.loss for heartbeat in live if heartbeat.loss is not None]
        loss = round(statistics.fmean(losses), 4) if losses else None
        return counts, {"state": monitor.state, "learners": len(live), "loss": loss, "refused": self.refused.total}

    def picture(self) -> dict[str, Any] | None:
        """Return all that the run's page shows but the curves; None while another coordinator leads."""
        if self.monitor is None:
            return None
        return overview.picture(self.monitor, self._alerts, self.follower.known, self.now_s()) | {"origin": origin(self)}

    async def _past(self) -> Past | None:
        try:
            return await until_available(self.history.read, self.log)
        except FormatError as error:
            self.log.warning("history_unreadable", reason=str(error))
            return None

    def _continued(self, past: Past | None) -> Alerts:
        """Return the alerts and events that a coordinator before this one stored, and that this one leads."""
        alerts = Alerts()
        if past is not None:
            try:
                alerts.resume(past.picture, self.now_s())
            except (LookupError, TypeError, ValueError) as error:
                self.log.warning("history_unreadable", reason=repr(error))
        alerts.tell(f"{self.settings.name} leads", self.now_s())
        return alerts

    async def _keep_history(self, monitor: Monitor, term: int) -> None:
        """Store the run's history, until a coordinator of a later term does."""
        complaint = Complaint(self.log)
        while True:
            size = 0
            try:
                if self._leadership.sure(self._clock()):
                    size = await self._write_history(monitor, term)
                    complaint.over()
            except FenceError:
                self.log.warning("history_fenced", revision=term)
                return
            except (BrokerError, FormatError) as error:
                complaint.warn("history_not_stored", reason=str(error))
            await asyncio.sleep(max(HISTORY_EVERY_S, size / HISTORY_BYTES_S))

    async def _write_history(self, monitor: Monitor, term: int) -> int:
        """Store the history as of now; return its size in bytes."""
        picture = overview.picture(monitor, self._alerts, self.follower.known, self.now_s()) | {"origin": origin(self)}
        past = Past(term, self.transport.wall_s(), picture, monitor.curves(self.now_s()))
        packed = await asyncio.to_thread(pack, past)
        await self.history.write(packed, term)
        return len(packed)

    async def _end_history(self) -> None:
        """Store the history as of the run's end, which pages on operators' machines show from then on."""
        if self.monitor is None:
            return
        try:
            async with asyncio.timeout(LAST_HISTORY_S):
                await self._write_history(self.monitor, self._leadership.revision)
        except (BrokerError, FormatError, TimeoutError) as error:
            self.log.warning("history_not_stored", reason=str(error) or "no answer")

    async def write_page(self) -> None:
        """Write the page as of the run's end, with its data inside; ``diloco up`` writes one that knows more in its place."""
        picture, monitor = self.picture(), self.monitor
        if picture is None or monitor is None:
            return
        report = overview.ended(overview.report(picture, self.run.created, None), preliminary_at_s(self))
        curves = monitor.curves(self.now_s())

        def write() -> None:
            page.write_html(report | {"series": overview.series(curves)}, self.settings.state_dir / "report.html")

        try:
            await asyncio.to_thread(write)
        except OSError as error:  # the disk is full
            self.log.warning("page_not_written", reason=str(error))

    def save(self) -> None:
        """Write the series to the state directory, if this process leads, which is about to end."""
        if (series := self._series(paused=True)) is not None:
            self.series.save(series)

    def _series(self, *, paused: bool = False) -> str | None:
        if self.monitor is None or not self._leadership.sure(self._clock()):
            return None
        return as_text(self.monitor, self._alerts, self.now_s(), self.transport.wall_s(), paused=paused)


async def _note_storage(transport: Transport, subjects: Subjects, monitor: Monitor, log: Logger) -> None:
    """Note how full the streams are, for ever."""
    names = (subjects.log_stream, subjects.offer_stream, subjects.archive_stream)
    complaint = Complaint(log)
    while True:
        try:
            monitor.rooms = await transport.rooms(names)
            complaint.over()
        except BrokerError as error:
            complaint.warn("storage_unknown", reason=str(error))
        await asyncio.sleep(STORAGE_EVERY_S)


async def _is_over(transport: Transport, run: KnownRun) -> bool:
    """Whether all logs of a run are closed, as far as can be told now."""
    try:
        async with asyncio.timeout(LOOK_S):
            home = Log(transport, run.name, run.identity, await creation.find_map(run), run.created)
            return await home.reader.closed()
    except (BrokerError, TimeoutError):
        return False


def _holder(stored: bytes) -> tuple[str, bytes] | None:
    try:
        leader = _LEADER_DECODER.decode(stored)
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
        made = partial(creation.create, transport, settings.run, settings.settings, check_limits=True)
        run = await until_available(made, log)
        log.info("run_ready", preset=run.created.preset, tokens=run.created.tokens)
        tape = TapeFile.begin(settings, run.identity, transport.wall_s(), log)
        names = run.created.regions.names
        connect = ways_to_others(settings, names, transport.identity, exporter, log, needs_all=False)
        coordinator = Coordinator(transport, run, settings, log, tape, connect=connect)
        exporter.observed = ObservedCoordinator(coordinator, exporter.labels())
        async with serve_page(coordinator, settings, log) as server:
            exporter.observed.page = server
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
    """Run the console script."""
    sys.exit(observe.run_main(_main, "diloco-coordinator"))


if __name__ == "__main__":
    main()
