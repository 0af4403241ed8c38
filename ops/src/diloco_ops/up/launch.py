"""Start the services of a run, tend them, show what they do, and end them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import tomli_w
from rich.console import Console

from diloco.control import creation
from diloco.control.changes import read_changes
from diloco.control.creation import KnownRun
from diloco.errors import BrokerError, FormatError, RunError, WanError
from diloco.log.log import Log
from diloco.nats.connection import ask
from diloco.nats.transport import NatsTransport
from diloco.process import files, observe
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.process.tasks import end
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco.settings.service import may_lead
from diloco.states import statefolder
from diloco.wire.subjects import Subjects
from diloco_ops import cuts
from diloco_ops.broker.server import CONNECT_TIMEOUT_S, free_ports
from diloco_ops.finetune import harness
from diloco_ops.finetune.harness import HarnessRequest
from diloco_ops.learner_programs import EVALUATOR, processes_of, programs_of
from diloco_ops.live import screen
from diloco_ops.live.watched import Watched
from diloco_ops.publish import publisher
from diloco_ops.reading import inspect, region_logs
from diloco_ops.reading.run_reader import read_chains
from diloco_ops.report import build, reference
from diloco_ops.report.reference import ReferenceLosses
from diloco_ops.track import trackers
from diloco_ops.track.tracking import FOLDER, Tracking
from diloco_ops.up import pages, serving
from diloco_ops.up.embedded import Embedded
from diloco_ops.up.environment import learner_environment, mesh_of, per_process, service_environment
from diloco_ops.up.progress_lines import progress_line
from diloco_ops.up.supervise import ServiceFailed, Supervisor
from diloco_ops.wan import control as wan
from diloco_report import page
from diloco_report.units import count, lasting

PUBLISHER = "publisher"
TEND_S = 0.1  # a killed service is begun again after so long at most
POLL_S = 0.5  # the live view moves twice a second
PLAIN_EVERY_S = 4.0  # with the time of an answer, a line comes within 5 s
NEAR_END_S = 15.0  # from here on the last status must not be missed
STATUS_TIMEOUT_S = 1.0  # a coordinator on this machine answers in milliseconds


@dataclass(frozen=True)
class LaunchRequest:
    """How a run is started and shown."""

    standbys: int  # syncers beyond the shards
    coordinators: int
    embedded: bool  # start servers; else the run directory names one
    quiet: bool  # print nothing
    plain: bool  # print lines, also on a terminal
    track: Sequence[str] = ()  # kinds of trackers
    pages: Sequence[str] = ()  # addresses of the coordinators' pages, the first one's first; none: no page
    open: bool = False  # open the page in a browser
    listen: tuple[str, int] | None = None  # host and port of the server; None: a free port of the loopback device
    harness: HarnessRequest | None = None  # tasks of lm_eval by which the model is evaluated; None: by none
    metrics: Sequence[str] = ()  # addresses of the services' metrics, in the order in which they are started; none: no metrics


def service_count(directory: RunDirectory, standbys: int, coordinators: int) -> int:
    """Return the number of a run's services, each process of a learner being one."""
    return coordinators + syncer_count(directory.settings) + standbys + sum(processes_of(directory).values())


def syncer_count(settings: RunSettings) -> int:
    """Return the number of a run's syncers without those that stand by: one a shard, and one a region at least."""
    return max(settings.shards, len(settings.regions.names))


def lost_files(failure: ServiceFailed, directory: RunDirectory) -> ServiceFailed:
    """Return an error that also says what to do, where a service has ended since its server has lost its files."""
    names, text = Subjects(directory.name), str(failure)
    if failure.code != BrokerError.exit_code:
        return failure
    if f"bucket {names.bucket}: " in text:
        remedy = "the control store has lost the run: begin again from a checkpoint (diloco up --resume CHECKPOINT)"
    elif directory.settings.regions.names and (f"stream {names.log_stream}: " in text or "has lost the log" in text):
        remedy = f"a region's server has lost its files: diloco up --run-dir {directory.path} gives it what the others hold"
    else:
        return failure
    return ServiceFailed(f"{text}; {remedy}", failure.code)


def _beginning(directory: RunDirectory, resumed: bool) -> str:
    """Return how a run begins, as the end of a sentence."""
    continued = directory.settings.continues
    if continued is not None and not (directory.path / "status.json").exists():
        return f", continues run {continued.run} after {count(continued.tokens)} tokens"
    return ", resumed" if resumed else ""


class Launcher:
    """The services of one run: started, started again where one is killed, shown, and ended.

    ``slow``: by learner, how many times as long its steps take.
    """

    def __init__(self, directory: RunDirectory, slow: Mapping[str, float], asked: LaunchRequest) -> None:
        self.directory, self.slow, self.asked = directory, slow, asked
        regions = directory.settings.regions.names
        self.embedded = Embedded(directory.path, regions, asked.listen) if asked.embedded else None
        self.url = self.embedded.url if self.embedded else directory.nats_url
        self.bulk_url = self.embedded.bulk_url if self.embedded else None
        self.wan_control = self.embedded.wan_control if self.embedded else None
        self.console = Console()
        self.live = not asked.quiet and not asked.plain and self.console.is_terminal
        self._metrics, self._programs = iter(asked.metrics), programs_of(directory)
        self.stopping = False
        self.log = observe.get_logger()
        self.services = Supervisor(self.log, self._tell)
        self.events: list[dict[str, Any]] = []  # of services and servers, as the report has them
        self._run_s = (0.0, time.monotonic())  # seconds of the run as last answered, and when that was
        self._watched: Watched | None = None  # of the live view
        self.server_restarts = 0
        self._saving = Complaint(self.log)
        self._said_s, self._said_failures = -PLAIN_EVERY_S, list[str]()
        self._starting = "the server and the services"
        self._waits = True  # no learner is heard yet

    async def run(self, resumed: bool) -> dict[str, Any] | None:
        """Run to the end. Return the report, or None if it was interrupted.

        Raises:
            ServiceFailed: a service ended with an error.
        """
        directory = self.directory
        (directory.path / "logs").mkdir(exist_ok=True)
        observe.configure("up", directory.name, file=directory.path / "logs" / "up.jsonl")
        self._say(f"run {directory.name} in {directory.path}" + _beginning(directory, resumed))
        if self.asked.pages:
            self._say(f"page: {', '.join(map(pages.link, self.asked.pages))}")
        if self.asked.metrics:
            last = "evaluator" if self.directory.starts_learners else "last syncer"
            self._say(f"metrics: {self.asked.metrics[0]} (coordinator) to {self.asked.metrics[-1]} ({last})")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        link: NatsTransport | None = None
        try:
            if self.embedded:
                for name in self.embedded.servers:
                    self.embedded.start(name)
            link = await NatsTransport.open(self.url, self.bulk_url or self.url, "up", self.log, CONNECT_TIMEOUT_S)
            region_urls = self.embedded.region_urls if self.embedded else {}
            if region_urls and resumed:
                await region_logs.give_back(directory, self.url, region_urls, self.log)
            begun = replace(directory, nats_url=self.url, nats_bulk_url=self.bulk_url, wan_control=self.wan_control)
            replace(begun, region_urls=region_urls or None).save()
            kinds, folder = self.asked.track, directory.path / FOLDER
            tracked = trackers.begin(kinds, folder, directory.name, directory.settings.model_dump())
            async with Tracking(tracked, self.log) as tracking:
                self._start_services(self.embedded)
                if not await self._tend(link, tracking):
                    return None
                with progress_line("making the report", quiet=self.asked.quiet):
                    report = await self._report(link)
                tracking.conclude(report)
        finally:
            # learners first: at their end they still ask the others
            saved = directory.path / statefolder.FOLDER
            learners = {program.module for program in self._programs.values()}
            orders = (
                sorted(learners),
                ["diloco_syncer", "diloco_coordinator"],
                ["diloco_ops.publish", "diloco_ops.wan", harness.MODULE],
            )
            self.services.end(*orders, writing=lambda: files.drafted_bytes(saved))
            if link is not None:
                await link.close()
            if self.embedded:
                self.embedded.stop()
        return report

    def _stop(self) -> None:
        self.stopping = True

    def _say(self, text: str) -> None:
        if text and not self.asked.quiet:
            print(text, flush=True)

    # ---- processes

    def _start_services(self, embedded: Embedded | None) -> None:
        settings = self.directory.settings
        learners = len(self.directory.learner_names)
        if self.directory.starts_learners:
            self._starting = f"{learners} learners compile their first step, which usually takes 20 s to a minute"
            self._say(f"starting {learners} learners and their services; learners compile their steps, which may take a minute")
        else:
            self._starting = "the run waits for learners"
        self._say(serving.told_to_learners(self.directory, self.url, self.asked.listen, embedded=self.asked.embedded))
        self.log.info("starting", nats_url=self.url, learners=learners)
        if embedded and embedded.regions:
            log_file = self.directory.path / "logs" / "wan.jsonl"
            self._start("wan", "diloco_ops.wan", {"log_file": str(log_file)} | dict(embedded.links()), endless=True)

        def place(number: int, *, reaches_others: bool = False) -> dict[str, Any]:
            values = embedded.place(number, reaches_others=reaches_others) if embedded else {"nats_url": self.url}
            return values | {"run": self.directory.name, "state_dir": str(self.directory.path)}

        addresses = iter(self.asked.pages)
        for index in range(self.asked.coordinators):
            name = f"coordinator-{index}" if index else "coordinator"
            values = {"settings": settings.model_dump(), "started_by": self.directory.command or "", "report_follows": True}
            values |= place(index, reaches_others=True) | {"page_address": next(addresses, "")}
            self._start_service(name, "diloco_coordinator", values)
        for index in range(syncer_count(settings) + self.asked.standbys):
            self._start_service(f"syncer-{index}", "diloco_syncer", place(index, reaches_others=True))
        before = statefolder.weights_before(self.directory.path)  # it may have been moved since it was begun
        init = str(before) if before.exists() else self.directory.init
        given = {"data": self.directory.data, "init": init, "init_names": self.directory.init_names}
        given = {name: value for name, value in given.items() if value is not None}
        for share_, name in enumerate(self.directory.learner_names):
            values = place(share_) | {"share": share_, "slow": self.slow.get(name, 1.0)} | given
            self._start_learner(name, values, share_, _core(share_, learners))
        if settings.publish.to:
            self._start(PUBLISHER, "diloco_ops.publish", {"directory": str(self.directory.path)})
        if self.directory.starts_learners:
            self._start_learner(EVALUATOR, place(0) | {"role": "evaluator"} | given, learners, None)
        if self.asked.harness is not None:
            self._start(harness.NAME, harness.MODULE, self.asked.harness.values(self.directory.path))

    def _start_learner(self, name: str, values: dict[str, Any], index: int, cores: set[int] | None) -> None:
        directory, program, learners = self.directory, self._programs[name], len(self.directory.learner_names)
        count = processes_of(directory)[name]
        if program.one_process:  # of a process
            devices, mesh, least = None, None if count == 1 else mesh_of(count), None
            values = values | {"task": (directory.torch or {}).get(name)}
        else:
            devices, least = directory.devices_per_learner, directory.least_processes
            mesh = mesh_of(devices, 1 if count == 1 else directory.replicas)
        values = values | {"mesh": mesh}
        if count == 1:
            self._start_service(name, program.module, values, learner_environment(index, learners, devices), cores)
            return
        shrinks = least is not None and least < count
        group = "" if shrinks else name  # where fewer go on, one that is lost is begun again alone
        address = ",".join(f"127.0.0.1:{port}" for port in free_ports(may_lead(count, least)))
        for process in range(count):
            environment = learner_environment(index * count + process, learners * count, per_process(devices, count))
            processes = {"count": count, "index": process, "address": address, "least": least}
            service = name if process == 0 else f"{name}-p{process}"
            own = values | {"name": name, "processes": processes}
            self._start_service(service, program.module, own, environment, None, group=group)

    def _start_service(
        self,
        name: str,
        module: str,
        values: dict[str, Any],
        environment: Mapping[str, str] | None = None,
        cores: set[int] | None = None,
        group: str = "",
    ) -> None:
        clock_file = self.directory.path / "services" / f"{name}.clock"
        own = {"name": name, "clock_file": str(clock_file), "metrics_address": next(self._metrics, "")}
        self._start(name, module, own | values, environment, cores, group=group)

    def _start(
        self,
        name: str,
        module: str,
        values: dict[str, Any],
        environment: Mapping[str, str] | None = None,
        cores: set[int] | None = None,
        *,
        endless: bool = False,
        group: str = "",
    ) -> None:
        config = self.directory.path / "services" / f"{name}.toml"
        files.replace_text(config, tomli_w.dumps(_without_none(values)))
        environment = environment or service_environment()
        dispensable = name in (EVALUATOR, PUBLISHER)  # no other service waits for its results
        self.services.start(name, module, config, environment, cores, endless=endless, dispensable=dispensable, group=group)

    async def _tend(self, link: NatsTransport, tracking: Tracking) -> bool:
        """Keep the run going until it is finished (True) or interrupted (False).

        Raises:
            ServiceFailed: a service ended with an error.
            BrokerError: the server died and does not come up again.
        """
        showing = asyncio.create_task(self._show(link, tracking))
        looking = [asyncio.create_task(cuts.watch(self._links, self._tell))] if self.wan_control else []
        try:
            while not self.stopping:
                try:
                    if self.services.tend():
                        return True
                except ServiceFailed as failure:
                    raise lost_files(failure, self.directory) from None
                if self.embedded:
                    await self._restart_servers(self.embedded)
                if showing.done():
                    showing.result()
                await asyncio.sleep(TEND_S)
            return False
        finally:
            await end(showing, *looking)

    async def _restart_servers(self, embedded: Embedded) -> None:
        for name in await asyncio.to_thread(embedded.restart_dead):
            self.server_restarts += 1
            pid = embedded.servers[name].pid
            self._tell(name, "the NATS server had ended and is started again")
            self.log.warning("service_restarted", restarted=name, restarts=self.server_restarts, pid=pid)

    # ---- what people see

    def _tell(self, name: str, text: str) -> None:
        """Note what happened to a service: in the view or as a line, and for the report."""
        answered_s, at_s = self._run_s
        self.events.append({"at_s": round(answered_s + time.monotonic() - at_s, 1), "text": f"{name}: {text}"})
        if self._watched is not None:
            self._watched.tell(time.monotonic(), name, text)
        else:
            self._say(f"{name}: {text}")

    async def _show(self, link: NatsTransport, tracking: Tracking) -> None:
        """Show the run, have it tracked, and keep its last status.

        Plain lines are written every few seconds, and the run is asked no more often than that, since links may be thin. At
        its beginning and near its end it is asked more often: the last answer is kept.
        """
        subject = Subjects(self.directory.name).status
        next_s, opened, began_s = POLL_S, False, time.monotonic()
        with self._view() as view:
            while True:
                if self._waits:
                    self._show_start(view, time.monotonic() - began_s)
                with suppress(BrokerError):
                    answer = await ask(link.control, link.name, subject, b"", STATUS_TIMEOUT_S)
                    status = {} if answer is None else self._with_failures(inspect.answered(answer, self.directory))
                    if status and not opened and self.asked.open and self.asked.pages:
                        opened = True
                        await asyncio.to_thread(pages.show, pages.link(self.asked.pages[0]))
                    if status.get("learners"):
                        self._waits = False
                    if "learners" in status:
                        self._run_s = float(status["wall_s"]), time.monotonic()
                        self._keep_status(status)
                        tracking.note(status)
                        quiet = view is None and (status["eta_s"] or 0.0) > NEAR_END_S
                        next_s = PLAIN_EVERY_S if quiet else POLL_S
                        if self._waits:
                            pass  # the start is shown
                        elif view is not None:
                            view.update(status)
                        else:
                            self._say_status(status)
                await asyncio.sleep(next_s)

    def _show_start(self, view: screen.LiveView | None, since_s: float) -> None:
        """Show what is being started: in the view each time, as a line every few seconds."""
        if view is not None:
            view.wait(f"starting: {self._starting}", since_s)
        elif time.monotonic() - self._said_s >= PLAIN_EVERY_S:
            self._say(f"starting: {self._starting}; {lasting(since_s)} so far")
            self._said_s = time.monotonic()

    def _with_failures(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return a status that also has the errors of services without which the run goes on."""
        ended = {name: str(failure).partition(": ")[2] for name, failure in self.services.failures.items()}
        return status | {"failures": status.get("failures", {}) | publisher.failures(self.directory.path, PUBLISHER) | ended}

    def _say_status(self, status: dict[str, Any]) -> None:
        """Say what a view would show, every few seconds; an error once, while it lasts."""
        if time.monotonic() - self._said_s < PLAIN_EVERY_S:
            return
        before, self._said_failures = self._said_failures, screen.failure_lines(status)
        for line in (screen.plain_line(status), *(line for line in self._said_failures if line not in before)):
            self._say(line)
        self._said_s = time.monotonic()

    def _keep_status(self, status: dict[str, Any]) -> None:
        try:
            rundir.write_json(self.directory.path / "status.json", status)
        except OSError as error:  # the disk is full, which is no reason to end a run
            self._saving.warn("status_not_saved", reason=str(error))
        else:
            self._saving.over()

    def _links(self) -> dict[str, Any]:
        """Return the bytes that emulated links between regions carried; nothing without such links, or without an answer."""
        if self.wan_control is None:
            return {}
        try:
            [answer] = wan.asked(self.wan_control, wan.Status())
        except WanError as error:
            self.log.warning("links_unknown", reason=str(error))
            return {}
        links: dict[str, Any] = answer["links"]
        return links

    @contextmanager
    def _view(self) -> Iterator[screen.LiveView | None]:
        if self.live:
            watched = self._watched = Watched(self.directory.name, self.directory.settings.liveness.dead_s)
            page = pages.link(self.asked.pages[0]) if self.asked.pages else None
            with screen.LiveView(self.console, watched, page) as view:
                yield view
        else:
            yield None

    async def _report(self, link: NatsTransport) -> dict[str, Any]:
        directory = self.directory
        registry = await link.bucket(Subjects(directory.name).bucket, create=False)
        run = KnownRun(directory.name, directory.settings, registry)
        fragment_map = await creation.find_map(run)
        chains = await read_chains(Log(link, run.name, run.identity, fragment_map, run.created))
        status = self._with_failures(build.load_json(directory.path / "status.json"))
        series = build.load_json(directory.path / "series.json")
        evaluation = build.load_json(directory.path / "evaluation.json")
        links = await asyncio.to_thread(self._links)
        changes = await read_changes(run)
        try:
            ledger = build.read_ledger(directory, run.identity, series, len(chains))
            found = build.Findings(
                directory=directory,
                map=fragment_map,
                chains=chains,
                owners=[fragment["owner"] for fragment in status["fragments"]],
                series=series,
                ledger=ledger,
                evaluation=evaluation,
                links=links,
                changes=changes,
                references=_references(directory, self.log),
                failures=status["failures"],
                events=self.events,
            )
            report = build.build(found)
            self._keep_status(build.last_status(status, report))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"{directory.path}: the run is over, but there is no report: series.json, status.json or evaluation.json is "
                f"missing or damaged ({error!r}); its log is whole: diloco verify {directory.path}"
            ) from None
        rundir.write_json(directory.report, report)
        page.write_html(report, directory.path / "report.html")
        return report


def _references(directory: RunDirectory, log: Logger) -> list[ReferenceLosses]:
    """Return the references that come with this version, and those that the lab left beside the run's directory."""
    found = []
    for path in reference.files([reference.shipped(), directory.path.parent / reference.LAB]):
        try:
            found.append(reference.read(path))
        except FormatError as error:
            log.warning("reference_damaged", reason=str(error))
    return found


def _core(index: int, count: int) -> set[int] | None:
    """Deal ``count`` learners to fewer cores, where the system can: left to itself, it may keep one core for one of four."""
    if sys.platform != "linux":
        return None
    cores = sorted(os.sched_getaffinity(0))
    return {cores[index % len(cores)]} if count > len(cores) else None


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values without those that TOML cannot say."""
    found = {key: _without_none(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: value for key, value in found.items() if value is not None}
