"""``diloco up``: a whole run on one machine, every service a process of its own, over real NATS."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco import inspect, live, membership, observe, resume, rundir
from diloco.checkpoint import Checkpoint
from diloco.embedded import Embedded
from diloco.errors import BrokerError, DataError, RunError, SettingsError, WanError
from diloco.log import Log
from diloco.membership import Run
from diloco.nats import streams
from diloco.nats.connection import ask, checked, malloc_environment, shown
from diloco.nats.transport import NatsTransport
from diloco.report import build, page
from diloco.report.units import count, decimal, duration, share, size
from diloco.rundir import RunDirectory
from diloco.settings import RunSettings, parse_assignments, run_settings
from diloco.supervise import Supervisor
from diloco.tasks import end
from diloco.wan import control as wan
from diloco.wire.subjects import Subjects

TEND_S = 0.1
POLL_S = 0.5
PLAIN_EVERY_S = 5.0
NEAR_END_S = 15.0
NATS_TIMEOUT_S = 20.0
STATUS_TIMEOUT_S = 1.0
MAX_LEARNERS = 4096


def up(
    learners: Annotated[int | None, typer.Option(help="Learners (M).")] = None,
    shards: Annotated[int | None, typer.Option(help="Syncer shards.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Token budget of the run.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Directory of the run; an unfinished one is resumed.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the initial model and of the data's order.")] = None,
    data: Annotated[str | None, typer.Option(help="File or folder of text; default: Python's own standard library.")] = None,
    preset: Annotated[str, typer.Option(help="decoupled, published, streaming or diloco.")] = "decoupled",
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any setting; repeatable.")] = None,
    resume_from: Annotated[
        Path | None,
        typer.Option("--resume", help="Go on from a checkpoint, or from a run's directory, in a new directory (--run-dir)."),
    ] = None,
    resume_at: Annotated[
        int | None, typer.Option(min=0, help="With --resume: begin again where every fragment's log stood at this version.")
    ] = None,
    archive: Annotated[bool, typer.Option("--archive", help="Keep every merged offer, so that merges can be audited.")] = False,
    standbys: Annotated[int, typer.Option(min=0, help="Syncers beyond the shards, which stand by.")] = 0,
    coordinators: Annotated[int, typer.Option(min=1, help="Coordinators; all but one stand by.")] = 1,
    slow: Annotated[list[str] | None, typer.Option(help="LEARNER=FACTOR: its steps take so many times as long.")] = None,
    nats_url: Annotated[str | None, typer.Option("--nats", help="Use this NATS server instead of an embedded one.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON at the end, and nothing else.")] = False,
) -> int:
    """Train one model with several learners, syncer shards and a coordinator on this machine."""
    overrides = parse_assignments(set_ or [])
    given = {"learners": learners, "shards": shards, "tokens": tokens, "seed": seed, "log.archive": archive or None}
    overrides |= {key: value for key, value in given.items() if value is not None}
    path = run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if data is not None and not Path(data).exists():
        raise DataError(f"--data {data}: there is no such file or folder")
    if nats_url is not None:
        checked(nats_url)
    source: Checkpoint | None = None
    if resume_from is not None:
        source, directory = _resumed(resume_from, path, preset, overrides, data, nats_url)
        resumed = True
    elif resume_at is not None:
        raise SettingsError(f"--resume-at {resume_at}: needs --resume PATH, the checkpoint or the run to go on from")
    else:
        settings = run_settings(preset, overrides, "diloco up")
        directory, resumed = _directory(path, settings, bool(overrides) or preset != "decoupled", data, nats_url)
    factors = _slow_factors(slow or [], directory.learner_names)
    # nothing is written before all that was asked for is known to be right
    if nats_url is not None and not resumed:
        asyncio.run(_check_new(directory))
    if source is not None:
        _prepare(source, directory, resume_at)
    with rundir.locked(directory.path):
        if not resumed:
            directory.save()
        launcher = Launcher(
            directory,
            factors,
            standbys=standbys,
            coordinators=coordinators,
            embedded=nats_url is None,
            quiet=json_,
            plain=plain,
        )
        report = asyncio.run(launcher.run(resumed))
    if report is None:
        if not json_:
            print(f"stopped; go on with: diloco up --run-dir {directory.path}")
        return observe.EXIT_INTERRUPTED
    if json_:
        print(json.dumps(report))
    else:
        summarise(report, directory.path)
    return 0


def _slow_factors(items: list[str], names: list[str]) -> dict[str, float]:
    factors = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not 1 <= factor < math.inf:
            raise SettingsError(f"--slow {item}: expected LEARNER=FACTOR with a factor of at least 1, for example learner-3=5")
        if name not in names:
            raise SettingsError(f"--slow {item}: no learner {name!r}; there are {names[0]} to {names[-1]}")
        factors[name] = factor
    return factors


def _directory(
    path: Path, settings: RunSettings, given: bool, data: str | None, nats_url: str | None
) -> tuple[RunDirectory, bool]:
    """The run's directory, which is not written yet if it is a new one, and whether it existed."""
    if data is not None:
        data = str(Path(data).resolve())
    if not (path / "run.json").exists():
        if path.exists() and any(path.iterdir()):
            raise RunError(f"{path}: exists, is not empty, and is no run's directory; choose another one")
        name = "".join(c if c.isalnum() or c in "-_" else "-" for c in path.name.lower()).strip("-_")[:40] or "run"
        return RunDirectory(path.resolve(), name, nats_url or "", data, settings), False
    directory = rundir.load(path.resolve())
    if directory.finished:
        raise RunError(f"{path}: this run is finished (its report is {directory.report}); choose another --run-dir")
    if given and directory.settings != settings:
        difference = membership.first_difference(directory.settings.model_dump(), settings.model_dump())
        raise RunError(f"{path}: this run was begun with other settings ({difference}); resume it without settings")
    if data is not None and data != directory.data:
        raise RunError(f"{path}: this run was begun with data {directory.data}; resume it without --data")
    return directory, True


async def _check_new(directory: RunDirectory) -> None:
    """Find out that the server does not have a run of this name: its services would take the places of that one's.

    Raises:
        RunError: it has.
        BrokerError: it does not answer, or cannot be used.
    """
    name, url = directory.name, directory.nats_url
    link = await NatsTransport.open(url, url, "up", observe.get_logger(), NATS_TIMEOUT_S)
    try:
        if await streams.exists(link, f"KV_{Subjects(name).bucket}"):
            raise RunError(
                f"run {name!r} exists at {shown(checked(url))}: go on with it by the --run-dir that it was begun with, or "
                "choose another --run-dir, after whose last part a run is named"
            )
    finally:
        await link.close()


def _resumed(
    source: Path, path: Path, preset: str, overrides: dict[str, Any], data: str | None, nats_url: str | None
) -> tuple[Checkpoint, RunDirectory]:
    """The checkpoint to go on from, and the new run's directory, which is not written yet."""
    if path.exists() and any(path.iterdir()):
        raise RunError(f"{path}: exists and is not empty; a checkpoint goes on in a new directory: choose another --run-dir")
    found = resume.find(source)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    manifest = found.checkpoint.manifest
    settings = found.checkpoint.settings
    if preset not in ("decoupled", settings.preset):
        raise RunError(f"{source}: run {manifest.run!r} has preset {settings.preset}; it cannot go on with --preset {preset}")
    learners = overrides.pop("learners", None)  # who trains is not a setting of the run: shares of the data are leased
    if learners is not None and (not isinstance(learners, int) or not 1 <= learners <= MAX_LEARNERS):
        raise SettingsError(f"--learners {learners}: expected a number from 1 to {MAX_LEARNERS}")
    settings = resume.changed(found.checkpoint, overrides)
    data = manifest.data if data is None else str(Path(data).resolve())
    return found.checkpoint, RunDirectory(path.resolve(), manifest.run, nats_url or "", data, settings, learners)


def _prepare(source: Checkpoint, directory: RunDirectory, at: int | None) -> None:
    existed = directory.path.exists()
    try:
        asyncio.run(resume.prepare(source, directory, at=at))
    except BaseException as error:
        if not existed:
            shutil.rmtree(directory.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"{directory.path}: could not be made from {source.path}: {error}") from None
        raise


class Launcher:
    """Starts the services of a run, starts again what is killed, shows what they do, and ends them."""

    def __init__(
        self,
        directory: RunDirectory,
        slow: dict[str, float],
        *,
        standbys: int,
        coordinators: int,
        embedded: bool,
        quiet: bool,
        plain: bool,
    ) -> None:
        self.directory, self.slow, self.quiet = directory, slow, quiet
        self.standbys, self.coordinators = standbys, coordinators
        self.embedded = Embedded(directory.path, directory.settings.regions.names) if embedded else None
        self.url = self.embedded.url if self.embedded else directory.nats_url
        self.bulk_url = self.embedded.bulk_url if self.embedded else None
        self.wan_control = self.embedded.wan_control if self.embedded else None
        self.console = Console()
        self.live = not quiet and not plain and self.console.is_terminal
        self.stopping = False
        self.log = observe.get_logger()
        self.services = Supervisor(self.log)
        self.server_restarts = 0
        self._complained = False

    async def run(self, resumed: bool) -> dict[str, Any] | None:
        """Run to the end; the report, or None if it was interrupted.

        Raises:
            ServiceFailed: a service ended with an error.
        """
        directory = self.directory
        (directory.path / "logs").mkdir(exist_ok=True)
        observe.configure("up", directory.name, file=directory.path / "logs" / "up.jsonl")
        self._say(f"run {directory.name} in {directory.path}" + (", resumed" if resumed else ""))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        link: NatsTransport | None = None
        try:
            if self.embedded:
                for name in self.embedded.servers:
                    self.embedded.start(name)
            link = await NatsTransport.open(self.url, self.bulk_url or self.url, "up", self.log, NATS_TIMEOUT_S)
            replace(directory, nats_url=self.url, nats_bulk_url=self.bulk_url, wan_control=self.wan_control).save()
            self._start_services(self.embedded)
            if not await self._tend(link):
                return None
            report = await self._report(link)
        finally:
            # learners first, whose last words want what the others know; then the rest
            self.services.end(["diloco_learner"], ["diloco_syncer", "diloco_coordinator"], ["diloco.wan"])
            if link is not None:
                await link.close()
            if self.embedded:
                self.embedded.stop()
        return report

    def _stop(self) -> None:
        self.stopping = True

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    # ---- processes

    def _start_services(self, embedded: Embedded | None) -> None:
        from diloco.core import kernels  # compiles them once, so that not every service does so at the same time

        settings = self.directory.settings
        self.log.info("starting", kernels=kernels.__name__, nats_url=self.url, learners=len(self.directory.learner_names))
        if embedded and embedded.regions:
            log_file = self.directory.path / "logs" / "wan.jsonl"
            self._start("wan", "diloco.wan", {"log_file": str(log_file)} | dict(embedded.links()), endless=True)

        def place(number: int, *, syncer: bool = False) -> dict[str, Any]:
            values = embedded.place(number, syncer=syncer) if embedded else {"nats_url": self.url}
            return values | {"run": self.directory.name, "state_dir": str(self.directory.path)}

        for index in range(self.coordinators):
            name = f"coordinator-{index}" if index else "coordinator"
            self._start_service(name, "diloco_coordinator", place(index) | {"settings": settings.model_dump()})
        for index in range(max(settings.shards, len(settings.regions.names)) + self.standbys):
            self._start_service(f"syncer-{index}", "diloco_syncer", place(index, syncer=True))
        data = {"data": self.directory.data} if self.directory.data else {}
        names = self.directory.learner_names
        for share_, name in enumerate(names):
            values = place(share_) | {"share": share_, "slow": self.slow.get(name, 1.0)} | data
            self._start_service(name, "diloco_learner", values, _core(share_, len(names)))
        self._start_service("evaluator", "diloco_learner", place(0) | {"role": "evaluator"} | data)

    def _start_service(self, name: str, module: str, values: dict[str, Any], cores: set[int] | None = None) -> None:
        clock_file = self.directory.path / "services" / f"{name}.clock"
        self._start(name, module, {"name": name, "clock_file": str(clock_file)} | values, cores)

    def _start(
        self, name: str, module: str, values: dict[str, Any], cores: set[int] | None = None, *, endless: bool = False
    ) -> None:
        config = self.directory.path / "services" / f"{name}.toml"
        config.parent.mkdir(exist_ok=True)
        config.write_text(_toml(values))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
        # the services share this machine's cores: one thread of computation each
        environment |= malloc_environment() | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        }
        self.services.start(name, module, config, environment, cores, endless=endless)

    async def _tend(self, link: NatsTransport) -> bool:
        """Keep the run going until it is finished (True) or interrupted (False).

        Raises:
            ServiceFailed: a service ended with an error.
            BrokerError: the server died and does not come up again.
        """
        showing = asyncio.create_task(self._show(link))
        try:
            while not self.stopping:
                if self.services.tend():
                    return True
                if self.embedded:
                    await self._restart_servers(self.embedded)
                if showing.done():
                    showing.result()
                await asyncio.sleep(TEND_S)
            return False
        finally:
            await end(showing)

    async def _restart_servers(self, embedded: Embedded) -> None:
        for name in await asyncio.to_thread(embedded.restart_dead):
            self.server_restarts += 1
            pid = embedded.servers[name].pid
            self.log.warning("service_restarted", restarted=name, restarts=self.server_restarts, pid=pid)

    # ---- what people see

    async def _show(self, link: NatsTransport) -> None:
        """Show the run, and keep the status it gave last.

        Lines are written from time to time, so the run is asked no more often, over links that may be thin; but for its
        beginning and its end, whose last word is kept.
        """
        subject = Subjects(self.directory.name).status
        said_s, next_s = -PLAIN_EVERY_S, POLL_S
        with self._view() as view:
            while True:
                with suppress(BrokerError):
                    answer = await ask(link.control, link.name, subject, b"", STATUS_TIMEOUT_S)
                    status = {} if answer is None else inspect.answered(answer, self.directory.name)
                    if "learners" in status:
                        self._keep_status(status)
                        quiet = view is None and (status["eta_s"] or 0.0) > NEAR_END_S
                        next_s = PLAIN_EVERY_S if quiet else POLL_S
                        if view is not None:
                            view.update(status)
                        elif time.monotonic() - said_s >= PLAIN_EVERY_S:
                            said_s = time.monotonic()
                            self._say(live.plain_line(status))
                await asyncio.sleep(next_s)

    def _keep_status(self, status: dict[str, Any]) -> None:
        try:
            rundir.write_json(self.directory.path / "status.json", status)
        except OSError as error:  # the disk is full, which is no reason to end a run
            if not self._complained:
                self.log.warning("status_not_saved", reason=str(error))
            self._complained = True
        else:
            self._complained = False

    def _links(self) -> dict[str, Any]:
        """What the emulated links between regions have carried; nothing where there are none, or the relay does not answer."""
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
    def _view(self) -> Iterator[live.LiveView | None]:
        if self.live:
            with live.LiveView(self.console) as view:
                yield view
        else:
            yield None

    async def _report(self, link: NatsTransport) -> dict[str, Any]:
        directory = self.directory
        registry = await link.bucket(Subjects(directory.name).bucket, create=False)
        run = Run(directory.name, directory.settings, registry)
        fragment_map = await membership.find_map(run)
        chains = await build.read_chains(Log(link, run.name, run.identity, fragment_map, run.settings))
        status = build.load_json(directory.path / "status.json")
        series = build.load_json(directory.path / "series.json")
        evaluation = build.load_json(directory.path / "evaluation.json")
        links = await asyncio.to_thread(self._links)
        changes, _ = await membership.changes(run)
        try:
            owners = [fragment["owner"] for fragment in status["fragments"]]
            ledger = build.read_ledger(directory, run.identity, series, len(chains))
            report = build.build(directory, fragment_map, chains, owners, series, ledger, evaluation, links, changes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"{directory.path}: the run is over, but there is no report: series.json, status.json or evaluation.json is "
                f"missing or damaged ({error!r}); its log is whole: diloco verify {directory.path}"
            ) from None
        rundir.write_json(directory.report, report)
        page.write_html(report, directory.path / "report.html")
        return report


def summarise(report: dict[str, Any], path: Path) -> None:
    """Print what came out of a run."""
    traffic, baselines = report["traffic"], report["baselines"]
    compared = "".join(f", {name} {value:.3f}" for name, value in baselines.items())
    print(
        f"\nvalidation loss {report['val_loss']:.4f} nats per byte (began at {decimal(report['val_loss_initial'])}{compared})"
    )
    print(
        f"{count(report['tokens_processed'])} tokens in {duration(report['wall_s'])}, "
        f"{share(report['tokens_merged'] / max(1, report['tokens_processed']), 1)} of them merged, "
        f"{report['versions']} versions of {len(report['fragments'])} fragments"
    )
    ratio = f", {traffic['ratio']:.0f} times less than data-parallel" if traffic["ratio"] else ""
    print(f"learners sent {size(traffic['bytes_up'])} and received {size(traffic['bytes_down'])}{ratio}")
    for name, learner in report["learners"].items():
        merged = learner["tokens_merged"] / max(1, learner["tokens_processed"])
        print(
            f"  {name}: {learner['steps']} steps of {learner['step_s']:.3f} s, "
            f"{share(learner['blocked_fraction'], 2)} blocked, {share(merged, 1)} of its tokens merged, "
            f"in {learner['rounds_merged']} versions, missed {learner['rounds_missed']}"
        )
    if report["sample"]:
        print(f"\na sample:\n{printable(report['sample'])}")
    print(f"\nreport: {path / 'report.html'}")


def _core(index: int, count: int) -> set[int] | None:
    """Deal ``count`` learners to fewer cores, where the system can: left to itself, it may keep one core for one of four."""
    if sys.platform != "linux":
        return None
    cores = sorted(os.sched_getaffinity(0))
    return {cores[index % len(cores)]} if count > len(cores) else None


def printable(text: str) -> str:
    """Generated text without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text.expandtabs(4))


def _toml(values: dict[str, Any], prefix: str = "") -> str:
    """A nested mapping of plain values, and of lists of mappings of them, as TOML."""
    tables = {key for key, value in values.items() if isinstance(value, list) and value and isinstance(value[0], dict)}
    plain = {key: value for key, value in values.items() if not isinstance(value, dict) and key not in tables}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items() if value is not None]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"\n[{prefix}{key}]", _toml(value, f"{prefix}{key}.")]
        elif key in tables:
            for item in value:
                lines += [f"\n[[{prefix}{key}]]", _toml(item)]
    return "\n".join(lines) + "\n"
