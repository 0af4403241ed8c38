"""``diloco up``: a whole run on one machine, every service a process of its own, over real NATS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import nats.errors
import typer
from rich.console import Console

from diloco import live, membership, observe, rundir
from diloco.errors import DilocoError, RunError, SettingsError
from diloco.log import Log
from diloco.membership import Run
from diloco.nats.connection import Link, malloc_environment
from diloco.nats.registry import Registry
from diloco.nats.server import Server
from diloco.report import build, page
from diloco.report.units import count, decimal, duration, share, size
from diloco.rundir import RunDirectory
from diloco.settings import RunSettings, parse_assignments, run_settings
from diloco.wire.subjects import Subjects

POLL_S = 0.5
PLAIN_EVERY_S = 5.0
STOP_TIMEOUT_S = 20.0
NATS_TIMEOUT_S = 20.0


@dataclass
class Service:
    """One process of the run."""

    name: str
    module: str
    process: subprocess.Popen[bytes]
    errors: Path


def up(
    learners: Annotated[int | None, typer.Option(help="Learners (M).")] = None,
    shards: Annotated[int | None, typer.Option(help="Syncer shards.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Token budget of the run.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Directory of the run; an unfinished one is resumed.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the initial model and of the data's order.")] = None,
    data: Annotated[str | None, typer.Option(help="File or folder of text; default: Python's own standard library.")] = None,
    preset: Annotated[str, typer.Option(help="decoupled, published, streaming or diloco.")] = "decoupled",
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any setting; repeatable.")] = None,
    slow: Annotated[list[str] | None, typer.Option(help="LEARNER=FACTOR: its steps take so many times as long.")] = None,
    nats_url: Annotated[str | None, typer.Option("--nats", help="Use this NATS server instead of an embedded one.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON at the end, and nothing else.")] = False,
) -> int:
    """Train one model with several learners, syncer shards and a coordinator on this machine."""
    overrides = parse_assignments(set_ or [])
    overrides |= {
        key: value
        for key, value in {"learners": learners, "shards": shards, "tokens": tokens, "seed": seed}.items()
        if value is not None
    }
    settings = run_settings(preset, overrides, "diloco up")
    factors = _slow_factors(slow or [], settings)
    path = run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    directory, resumed = _directory(path, settings, bool(overrides) or preset != "decoupled", data, nats_url)
    launcher = Launcher(directory, factors, embedded=nats_url is None, quiet=json_, plain=plain)
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


def _slow_factors(items: list[str], settings: RunSettings) -> dict[str, float]:
    names = [f"learner-{i}" for i in range(settings.learners)]
    factors = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if factor < 1:
            raise SettingsError(f"--slow {item}: expected LEARNER=FACTOR with a factor of at least 1, for example learner-3=5")
        if name not in names:
            raise SettingsError(f"--slow {item}: no learner {name!r}; there are {names[0]} to {names[-1]}")
        factors[name] = factor
    return factors


def _directory(
    path: Path, settings: RunSettings, given: bool, data: str | None, nats_url: str | None
) -> tuple[RunDirectory, bool]:
    """The run's directory, and whether it existed."""
    if data is not None:
        data = str(Path(data).resolve())
    if not (path / "run.json").exists():
        if path.exists() and any(path.iterdir()):
            raise RunError(f"{path}: exists, is not empty, and is no run's directory; choose another one")
        name = "".join(c if c.isalnum() or c in "-_" else "-" for c in path.name.lower()).strip("-_")[:40] or "run"
        directory = RunDirectory(path.resolve(), name, nats_url or "", data, settings)
        directory.save()
        return directory, False
    directory = rundir.load(path.resolve())
    if directory.finished:
        raise RunError(f"{path}: this run is finished (its report is {directory.report}); choose another --run-dir")
    if given and directory.settings != settings:
        difference = membership.first_difference(directory.settings.model_dump(), settings.model_dump())
        raise RunError(f"{path}: this run was begun with other settings ({difference}); resume it without settings")
    if data is not None and data != directory.data:
        raise RunError(f"{path}: this run was begun with data {directory.data}; resume it without --data")
    return directory, True


class Launcher:
    """Starts the services of a run, shows what they do, and ends them."""

    def __init__(self, directory: RunDirectory, slow: dict[str, float], *, embedded: bool, quiet: bool, plain: bool) -> None:
        self.directory, self.slow, self.quiet = directory, slow, quiet
        self.server = Server(directory.path / "nats") if embedded else None
        self.url = self.server.url if self.server else directory.nats_url
        self.console = Console()
        self.live = not quiet and not plain and self.console.is_terminal
        self.services: list[Service] = []
        self.stopping = False
        self.log = observe.get_logger()

    async def run(self, resumed: bool) -> dict[str, Any] | None:
        """Run to the end; the report, or None if it was interrupted.

        Raises:
            DilocoError: a service ended with an error.
        """
        directory = self.directory
        (directory.path / "logs").mkdir(exist_ok=True)
        observe.configure("up", directory.name, file=directory.path / "logs" / "up.jsonl")
        self._say(f"run {directory.name} in {directory.path}" + (", resumed" if resumed else ""))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        link: Link | None = None
        try:
            if self.server:
                self.server.start()
            link = await Link.open(self.url, self.url, "up", self.log, NATS_TIMEOUT_S)
            RunDirectory(directory.path, directory.name, self.url, directory.data, directory.settings).save()
            self._start_services()
            finished = await self._watch(link)
            if not finished:
                return None
            report = await self._report(link)
        finally:
            self._end_services()
            if link is not None:
                await link.close()
            if self.server:
                self.server.stop()
        return report

    def _stop(self) -> None:
        self.stopping = True

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    # ---- processes

    def _start_services(self) -> None:
        from diloco.core import kernels  # compiles them once, so that not every service does so at the same time

        settings = self.directory.settings
        self.log.info("starting", kernels=kernels.__name__, nats_url=self.url, learners=settings.learners)
        self._start("coordinator", "diloco_coordinator", {"settings": settings.model_dump()})
        for shard in range(settings.shards):
            self._start(f"syncer-{shard}", "diloco_syncer", {"shard": shard})
        data = {"data": self.directory.data} if self.directory.data else {}
        for share_ in range(settings.learners):
            name = f"learner-{share_}"
            process = self._start(name, "diloco_learner", {"share": share_, "slow": self.slow.get(name, 1.0)} | data)
            _pin(process.pid, share_, settings.learners)
        self._start("evaluator", "diloco_learner", {"role": "evaluator"} | data)

    def _start(self, name: str, module: str, values: dict[str, Any]) -> subprocess.Popen[bytes]:
        path = self.directory.path
        values = {"name": name, "run": self.directory.name, "nats_url": self.url, "state_dir": str(path)} | values
        config, errors = path / "services" / f"{name}.toml", path / "services" / f"{name}.stderr"
        config.parent.mkdir(exist_ok=True)
        config.write_text(_toml(values))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
        # the services share this machine's cores: one thread of computation each
        environment |= malloc_environment() | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        }
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=True,  # Ctrl-C is this process's to hand on, in order
            )
        self.services.append(Service(name, module, process, errors))
        return process

    def _end_services(self) -> None:
        """Learners first, whose checkpoints want what the others know; then the rest."""
        for modules in (("diloco_learner",), ("diloco_syncer", "diloco_coordinator")):
            group = [service for service in self.services if service.module in modules]
            for service in group:
                if service.process.poll() is None:
                    service.process.terminate()
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            for service in group:
                try:
                    service.process.wait(max(0.1, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    service.process.kill()
                    service.process.wait()

    def _check_services(self) -> bool:
        """Whether the run is over: every service has ended by itself.

        Raises:
            DilocoError: a service ended with an error; what it said is the message.
        """
        for service in self.services:
            code = service.process.poll()
            if code:
                lines = service.errors.read_text(errors="replace").strip().splitlines()
                said = lines[-1] if lines else f"ended with code {code}, see {self.directory.path / 'logs'}"
                raise _Failed(f"{service.name}: {said.partition(': ')[2] or said}", code)
        return all(service.process.poll() == 0 for service in self.services)

    # ---- what people see

    async def _watch(self, link: Link) -> bool:
        """Show the run until it is finished (True) or interrupted (False)."""
        subject = Subjects(self.directory.name).status
        said_s = -PLAIN_EVERY_S
        with self._view() as view:
            while not self.stopping:
                if self._check_services():
                    return True
                with suppress(nats.errors.Error, TimeoutError, asyncio.TimeoutError, ValueError):
                    status = json.loads((await link.control.request(subject, b"", timeout=1)).data)
                    if "learners" in status:
                        (self.directory.path / "status.json").write_text(json.dumps(status))
                        if view is not None:
                            view.update(status)
                        elif time.monotonic() - said_s >= PLAIN_EVERY_S:
                            said_s = time.monotonic()
                            self._say(live.plain_line(status))
                await asyncio.sleep(POLL_S)
        return False

    @contextmanager
    def _view(self) -> Iterator[live.LiveView | None]:
        if self.live:
            with live.LiveView(self.console) as view:
                yield view
        else:
            yield None

    async def _report(self, link: Link) -> dict[str, Any]:
        directory = self.directory
        registry = await Registry.open(link, Subjects(directory.name).bucket, create=False)
        run = Run(directory.name, directory.settings, registry)
        fragment_map = await membership.find_map(run)
        chains = await build.read_chains(Log(link, run.name, run.identity, fragment_map))
        status = build.load_json(directory.path / "status.json")
        owners = [fragment["owner"] for fragment in status["fragments"]]
        series = build.load_json(directory.path / "series.json")
        evaluation = build.load_json(directory.path / "evaluation.json")
        report = build.build(directory, fragment_map, chains, owners, series, evaluation)
        rundir.write_json(directory.report, report)
        page.write_html(report, directory.path / "report.html")
        return report


class _Failed(DilocoError):
    """A service ended with an error."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.code if self.code > 0 else 1


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


def _pin(pid: int, index: int, count: int) -> None:
    """Deal ``count`` learners to fewer cores, where the system can: left to itself, it may keep one core for one of four."""
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        if count > len(cores):
            os.sched_setaffinity(pid, {cores[index % len(cores)]})


def printable(text: str) -> str:
    """Generated text without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text.expandtabs(4))


def _toml(values: dict[str, Any], prefix: str = "") -> str:
    """A nested mapping of plain values as TOML."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items() if value is not None]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"\n[{prefix}{key}]", _toml(value, f"{prefix}{key}.")]
    return "\n".join(lines) + "\n"
