"""``diloco up``: a whole run on one machine, every service a process of its own, over real NATS."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.control import creation
from diloco.errors import DilocoError, RunError, SettingsError
from diloco.nats import streams
from diloco.nats.opening import checked, shown
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.loading import parse_assignments
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.time_limits import check_time_limits
from diloco.storage.model_folder import check_data
from diloco.wire.subjects import Subjects
from diloco_ops import inputs
from diloco_ops.broker.server import CONNECT_TIMEOUT_S
from diloco_ops.checkpoints.manifest import RunCheckpoint
from diloco_ops.finetune import harness, memory_need, model_options
from diloco_ops.finetune.harness import EVERY_MINUTES, EvalArgs, EvalEvery, EvalTasks
from diloco_ops.finetune.model_options import AllowCode, ChosenModel, Lora, Model, ModelRequest, Qlora
from diloco_ops.prerequisites import check_installed, check_server, slow_factors
from diloco_ops.publish import owner
from diloco_ops.reading import local_runs
from diloco_ops.track.trackers import TRACKERS
from diloco_ops.up import compiling, continuing, origin, pages, resume, task_check
from diloco_ops.up.environment import check_least, metrics_addresses, per_process
from diloco_ops.up.launch import Launcher, LaunchRequest, service_count
from diloco_ops.up.progress_lines import progress_line
from diloco_ops.up.project import settings_here
from diloco_ops.up.run_summary import summarise
from diloco_ops.up.supervise import ServiceFailed
from diloco_ops.up.up_options import (
    Data,
    DevicesPerLearner,
    Init,
    Learners,
    LeastProcesses,
    Names,
    Preset,
    ProcessesPerLearner,
    ResumeAt,
    ResumeFrom,
    RunFolder,
    Seed,
    Set,
    Shards,
    TaskOptions,
    TokenBudget,
    TorchProcesses,
)

MAX_LEARNERS = 4096
DEFAULT_PRESET = "decoupled"


def up(
    learners: Learners = None,
    shards: Shards = None,
    tokens: TokenBudget = None,
    run_dir: RunFolder = None,
    seed: Seed = None,
    data: Data = None,
    init: Init = None,
    names: Names = None,
    preset: Preset = DEFAULT_PRESET,
    set_: Set = None,
    task: TaskOptions = None,
    model: Model = None,
    lora: Lora = None,
    qlora: Qlora = None,
    allow_code: AllowCode = None,
    eval_: EvalTasks = None,
    eval_every: EvalEvery = EVERY_MINUTES,
    eval_args: EvalArgs = None,
    resume_from: ResumeFrom = None,
    resume_at: ResumeAt = None,
    continue_from: Annotated[Path | None, typer.Option("--continue", help="Finished run that a new run continues.")] = None,
    archive: Annotated[bool, typer.Option("--archive", help="Keep every merged offer, so that merges can be audited.")] = False,
    standbys: Annotated[int, typer.Option(min=0, help="Number of standby syncers, beyond the shards.")] = 0,
    coordinators: Annotated[int, typer.Option(min=1, help="Number of coordinators; one leads and the others stand by.")] = 1,
    devices_per_learner: DevicesPerLearner = None,
    processes_per_learner: ProcessesPerLearner = None,
    least_processes: LeastProcesses = None,
    torch: Annotated[list[str] | None, typer.Option(help="LEARNER=MODULE:MAKE: it computes with this PyTorch task.")] = None,
    torch_processes: TorchProcesses = None,
    slow: Annotated[list[str] | None, typer.Option(help="LEARNER=FACTOR: its steps take FACTOR times as long.")] = None,
    nats_url: Annotated[str | None, typer.Option("--nats", help="Use this NATS server instead of an embedded one.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live view.")] = False,
    track: Annotated[list[str] | None, typer.Option(help=f"Send values to {' or '.join(TRACKERS)}; repeatable.")] = None,
    page: Annotated[str | None, typer.Option(help=pages.HELP)] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the run's page in a browser.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Only print the report as JSON at the end.")] = False,
) -> int:
    """Train one model with several learners, syncers and a coordinator on this machine."""
    given = {"learners": learners, "shards": shards, "tokens": tokens, "seed": seed, "log.archive": archive or None}
    chosen = model_options.choose(ModelRequest(model, lora, qlora, allow_code))
    overrides = overrides_of(set_, task, chosen) | {key: value for key, value in given.items() if value is not None}
    path = run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    check_installed(track or [])
    evaluations = harness.asked(eval_, eval_every, eval_args)
    source, directory = _source(_CameFrom(resume_from, resume_at, continue_from), path, preset, overrides, data, nats_url)
    directory = inputs.beginning_with(directory, init, names, source)
    check_server(nats_url, directory.settings)
    slowed = slow_factors(slow or [], directory.learner_names)
    directory = _shaped(directory, devices_per_learner, processes_per_learner, least_processes)
    directory = _with_torch(directory, torch or [], torch_processes)
    metrics = metrics_addresses(service_count(directory, standbys, coordinators))
    with locked_run(directory, source, resume_at, nats_url, quiet=json_) as (directory, resumed):
        served = pages.addresses(page or (pages.NOWHERE if json_ else pages.ANYWHERE), coordinators)
        asked = LaunchRequest(
            standbys=standbys, coordinators=coordinators, embedded=nats_url is None, quiet=json_, plain=plain,
            track=track or [], pages=served, open=open_, metrics=metrics, harness=evaluations,
        )  # fmt: skip
        report = asyncio.run((launcher := Launcher(directory, slowed, asked)).run(resumed))
    return tell_end(report, directory, json_, launcher.services.failures.values())


def overrides_of(set_: list[str] | None, options: list[str] | None, chosen: ChosenModel | None = None) -> dict[str, Any]:
    """Return the settings that ``--set`` and ``--task`` give, over those of a chosen model; a task's options are settings.

    Raises:
        SettingsError: one is no assignment.
    """
    given = {f"task.options.{key}": value for key, value in parse_assignments(options or [], "--task", "width=64").items()}
    return ({} if chosen is None else chosen.settings) | parse_assignments(set_ or []) | given


@dataclass(frozen=True)
class _CameFrom:
    """The options that say what a run goes on from."""

    resume: str | None
    resume_at: int | None
    continued: Path | None


def _source(
    came_from: _CameFrom,
    path: Path,
    preset: str,
    overrides: dict[str, Any],
    data: str | None,
    nats_url: str | None,
) -> tuple[RunCheckpoint | continuing.ContinuationSource | None, RunDirectory]:
    """Return the checkpoint or the run to go on from, if there is one, and the run's directory."""
    if nats_url is not None:
        checked(nats_url)
    if came_from.resume is None and came_from.resume_at is not None:
        raise SettingsError(f"--resume-at {came_from.resume_at}: needs --resume PATH, the checkpoint or the run to go on from")
    if came_from.resume is not None and came_from.continued is not None:
        raise SettingsError(f"--continue {came_from.continued}, --resume {came_from.resume}: leave one of them out")
    if any(key.partition(".")[0] == "continues" for key in overrides):
        raise SettingsError("--set continues: names the run that is continued; use --continue RUN")
    if came_from.resume is not None:
        return _resumed(came_from.resume, came_from.resume_at, path, preset, overrides, data, nats_url)
    if came_from.continued is not None:
        return _continued(came_from.continued, path, preset, overrides, data, nats_url)
    if not (path / "run.json").exists():
        overrides = settings_here(overrides, Path())
    settings = run_settings(preset, overrides, "diloco up")
    return None, directory_of(path, settings, bool(overrides) or preset != DEFAULT_PRESET, data, nats_url)


@contextmanager
def locked_run(
    directory: RunDirectory,
    source: RunCheckpoint | continuing.ContinuationSource | None,
    at: int | None,
    nats_url: str | None,
    *,
    quiet: bool,
) -> Iterator[tuple[RunDirectory, bool]]:
    """Lock a run's directory, after a run that begins there was checked and before it is written.

    Yield the directory, and whether there is a run to go on with. ``quiet``: print no lines about what takes long.

    Raises:
        SettingsError: another run publishes where this one is to.
        ObjectStoreError: nothing can be published there.
    """
    existed, resumed = directory.path.exists(), (directory.path / "run.json").exists()
    with compiling.kernels_compiled(quiet=quiet):
        if not resumed:
            memory_need.say(directory, quiet=quiet)
            with progress_line("checking the task and its data", quiet=quiet):
                directory = _checked(directory, source, nats_url)
    directory = origin.noted(directory)
    with rundir.locked(directory.path):
        with owner.claimed(directory):
            if not resumed:
                directory = _begun(directory, source, at, existed=existed, quiet=quiet)
        yield directory, resumed or source is not None


def _checked(
    directory: RunDirectory, source: RunCheckpoint | continuing.ContinuationSource | None, nats_url: str | None
) -> RunDirectory:
    """Check a run that is to begin in this directory; nothing is written.

    Return the directory, with the units of its loss and its mix of data.
    """
    check_time_limits(directory.settings, "diloco up")
    if directory.settings.task.name == model_options.TASK:  # its own check says so after half a minute of imports
        check_data(str(directory.settings.task.options.get("model")), directory.data)
    if directory.starts_learners and not isinstance(source, continuing.ContinuationSource):  # which is checked with its weights
        directory = task_check.check_task(directory)
    if source is None and nats_url is not None:
        asyncio.run(_check_name(directory.name, nats_url))
    return directory


def _begun(
    directory: RunDirectory,
    source: RunCheckpoint | continuing.ContinuationSource | None,
    at: int | None,
    *,
    existed: bool,
    quiet: bool,
) -> RunDirectory:
    """Write a new run's directory, which this process has locked, and what it goes on from.

    ``existed``: the directory, before it was locked.

    Raises:
        RunError: another process has begun a run there while this one checked its own.
    """
    if (directory.path / "run.json").exists():
        raise RunError(
            f"{directory.path}: another `diloco up` began a run here at the same time: go on with that one (diloco up "
            f"--run-dir {directory.path}), or choose another --run-dir"
        )
    if source is not None:
        with progress_line(f"copying the state of {source.path}", quiet=quiet):
            return _prepare(source, directory, at, existed=existed)
    directory.save()
    return directory


def _shaped(directory: RunDirectory, devices: int | None, processes: int | None, least: int | None) -> RunDirectory:
    """Return a run's directory whose learners have so many devices and processes, where these are given.

    Raises:
        SettingsError: the processes do not divide the devices; or ``least`` of them cannot go on alone.
    """
    devices, processes = devices or directory.devices_per_learner, processes or directory.processes_per_learner
    least = least or directory.least_processes
    per_process(devices, processes or 1)
    if least is not None:
        check_least(least, processes or 1, devices)
    return replace(directory, devices_per_learner=devices, processes_per_learner=processes, least_processes=least)


def _with_torch(directory: RunDirectory, tasks: Sequence[str], processes: int | None) -> RunDirectory:
    """Return a run's directory whose learners have torch ``tasks``, and so many processes each, where these are given.

    Raises:
        SettingsError: a task is given to no learner of the run.
    """
    found = task_check.torch_tasks(tasks, directory) or directory.torch
    return replace(directory, torch=found, torch_processes=processes or directory.torch_processes)


def tell_end(report: dict[str, Any] | None, directory: RunDirectory, json_: bool, failures: Iterable[ServiceFailed]) -> int:
    """Print how the run ended. Return the exit code.

    Raises:
        ServiceFailed: a service without which it went on had failed.
        DilocoError: no learner's newest steps changed anything.
    """
    if report is None:
        if not json_:
            print(local_runs.stopped_text(directory))
        return observe.EXIT_INTERRUPTED
    if json_:
        print(json.dumps(report))
    else:
        summarise(report, directory.path)
    for failure in failures:
        raise failure
    failed = {name: report["failures"][name] for name in report["learners"] if name in report["failures"]}
    if failed and len(failed) == len(report["learners"]):
        name, failure = next(iter(failed.items()))
        raise DilocoError(f"run {report['run']} has ended, but no learner trained to its end: {name}: {failure}")
    return 0


def directory_of(
    path: Path, settings: RunSettings, given: bool, data: str | None = None, nats_url: str | None = None
) -> RunDirectory:
    """Return the run's directory; a new one is not written yet."""
    if not (path / "run.json").exists():
        data = inputs.data_source(data, settings)
        rundir.check_free(path)
        if not _is_new(path):
            raise RunError(f"{path}: exists, is not empty, and is not a run's directory; choose another directory")
        return RunDirectory(path.resolve(), _name_of(path), nats_url or "", data, settings)
    directory = rundir.load(path.resolve())
    if directory.finished:
        raise RunError(
            f"{path}: this run is finished (its report is {directory.report}); choose another --run-dir, or for more "
            f"tokens continue it in a new one: diloco up --continue {path} --tokens N"
        )
    rundir.check_free(path)
    settings = settings.with_mix(directory.settings.task.mix)
    if given and directory.settings != settings:
        difference = creation.first_difference(directory.settings.model_dump(), settings.model_dump())
        raise RunError(f"{path}: this run was begun with other settings ({difference}); resume it without settings")
    if data is not None and inputs.data_source(data, directory.settings) != directory.data:
        raise RunError(f"{path}: this run was begun with data {directory.data}; resume it without --data")
    return directory


def _name_of(path: Path) -> str:
    """Return the name of the run whose directory this is to be."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in path.name.lower()).strip("-_")[:40] or "run"


async def _check_name(name: str, url: str) -> None:
    """Check that a server has no run of this name: the new services would take the places of that one's.

    Raises:
        RunError: it has.
        BrokerError: it does not answer, or cannot be used.
    """
    link = await NatsTransport.open(url, url, "up", observe.get_logger(), CONNECT_TIMEOUT_S)
    try:
        if await streams.exists(link, f"KV_{Subjects(name).bucket}"):
            raise RunError(
                f"run {name!r} exists at {shown(checked(url))}: resume it with the --run-dir that it was started with, or "
                "choose another --run-dir, whose last part becomes the run's name"
            )
    finally:
        await link.close()


def _resumed(
    source: str, at: int | None, path: Path, preset: str, overrides: dict[str, Any], data: str | None, nats_url: str | None
) -> tuple[RunCheckpoint, RunDirectory]:
    """Return the checkpoint to go on from, and the new run's directory, which is not written yet."""
    _check_new(path, "a checkpoint")
    found = resume.find(source, at)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    manifest = found.checkpoint.manifest
    settings = found.checkpoint.settings
    _check_preset(source, manifest.run, settings, preset)
    learners = _learners(overrides)
    settings = resume.changed(found.checkpoint, overrides)
    data = manifest.data if data is None else inputs.data_source(data, settings)
    directory = RunDirectory(path.resolve(), manifest.run, nats_url or "", data, settings, learners=learners)
    if (Path(source) / "run.json").exists():  # its learners' states are those of such learners
        directory = directory.with_learners_of(rundir.load(Path(source)))
    return found.checkpoint, directory


def _continued(
    path: Path, new: Path, preset: str, overrides: dict[str, Any], data: str | None, nats_url: str | None
) -> tuple[continuing.ContinuationSource, RunDirectory]:
    """Return the run to go on from, and the new run's directory, which is not written yet."""
    if "tokens" not in overrides:
        raise SettingsError(f"--continue {path}: needs --tokens N, the number of further tokens")
    _check_new(new, "a run that is over")
    learners = _learners(overrides)
    source = continuing.find(path, overrides)
    old = source.directory
    _check_preset(path, old.name, old.settings, preset)
    settings = source.changed(old.settings)
    if data is None and not (path / "services").is_dir():
        raise RunError(
            f"{path}: was not made by diloco up, and does not say which data the run's learners had; give them with --data"
        )
    given = old.data if data is None else inputs.data_source(data, settings)
    learners = old.learners if learners is None else learners
    directory = RunDirectory(new.resolve(), _name_of(new), nats_url or "", given, settings, learners=learners)
    return source, directory.with_learners_of(old)


def _check_new(path: Path, what: str) -> None:
    rundir.check_free(path)
    if not _is_new(path):
        raise RunError(f"{path}: exists and is not empty; {what} goes on in a new directory: choose another --run-dir")


def _is_new(path: Path) -> bool:
    """Return whether a directory is not there or is empty, except for the lock that a command which failed left there."""
    return not path.exists() or all(entry.name == rundir.LOCK for entry in path.iterdir())


def _check_preset(source: Path | str, run: str, settings: RunSettings, preset: str) -> None:
    if preset not in (DEFAULT_PRESET, settings.preset):
        raise RunError(f"{source}: run {run!r} has preset {settings.preset}; it cannot go on with --preset {preset}")


def _learners(overrides: dict[str, Any]) -> int | None:
    """Take the number of learners out of overrides: who trains is not a setting of the run, shares of the data are leased."""
    learners = overrides.pop("learners", None)
    if learners is not None and (not isinstance(learners, int) or not 1 <= learners <= MAX_LEARNERS):
        raise SettingsError(f"--learners {learners}: expected a number from 1 to {MAX_LEARNERS}")
    return learners


def _prepare(
    source: RunCheckpoint | continuing.ContinuationSource, directory: RunDirectory, at: int | None, *, existed: bool
) -> RunDirectory:
    try:
        if isinstance(source, RunCheckpoint):
            asyncio.run(resume.prepare(source, directory, at=at))
        else:
            directory = asyncio.run(continuing.prepare(source, directory, task_check.check_task))
            for note in source.notes:
                print(f"note: {note}", file=sys.stderr)
        return directory
    except BaseException as error:
        if not existed:
            shutil.rmtree(directory.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"{directory.path}: could not be made from {source.path}: {error}") from None
        raise
