"""``diloco lab``: list experiments, and play one or all of them."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from diloco.errors import SettingsError
from diloco.settings.loading import parse_assignments
from diloco.settings.validation import nearest
from diloco_lab.commands.files import write
from diloco_lab.commands.record import record
from diloco_lab.experiment import answer, curves, runner, spec, tuning
from diloco_lab.experiment import experiment_page as pages
from diloco_lab.experiment import record as record_files
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.record import ExperimentRecord
from diloco_lab.experiment.runner import Results, TrialJob
from diloco_lab.experiment.store import TrialStore, module_file
from diloco_learner.api.members import factory
from diloco_ops.report import reference as reference_files

lab = typer.Typer(no_args_is_help=True, help="Experiments on model quality: training runs in virtual time, over paired seeds.")
_console = Console(stderr=True)


@lab.command("list")
def list_() -> None:
    """List the experiments that come with the lab, and their questions."""
    table = Table(box=None)
    for column in ("experiment", "trials", "question"):
        table.add_column(column)
    for name in spec.named():
        experiment = spec.load(name)
        spread = curves.spread(experiment)
        trials = tuning.trials_of(experiment) + spread.seeds * len(spread.arms)
        table.add_row(name, str(trials), experiment.question)
    Console().print(table)


@lab.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|FILE.toml]...", help="Names of experiments; see diloco lab list.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All experiments of the lab whose tasks are found.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of results; trials whose results are there are not repeated.")] = Path(
        "runs/lab"
    ),
    arms: Annotated[list[str] | None, typer.Option("--arm", help="Only these arms; may be repeated.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="Number of seeds, instead of the file's.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, a setting of all arms; repeatable.")] = None,
    data: Annotated[str | None, typer.Option(help="File or folder of text; default: Python's standard library.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Trials at once, of one thread each.")] = os.cpu_count() or 1,
    max_hours: Annotated[float, typer.Option(min=0, help="Refuse experiments that are estimated to take longer.")] = 12.0,
    memory_gib: Annotated[
        float, typer.Option(min=0.1, help="Refuse experiments that are estimated to need more memory.")
    ] = 16.0,
    json_: Annotated[bool, typer.Option("--json", help="Verdicts as JSON.")] = False,
) -> None:
    """Run experiments, and write NAME.md and NAME.svg for each.

    An interrupted command continues where it stopped. Trials do not depend on the load: their time is virtual.
    """
    chosen = list(names or []) + (list(spec.named()) if all_ else [])
    if not chosen:
        raise SettingsError("lab run: name an experiment, or give --all; diloco lab list shows the experiments")
    said: dict[str, object] = {}
    with runner.pool(jobs) as pool:
        playing = _Playing(store=TrialStore(out), data=data, jobs=jobs, pool=pool, max_hours=max_hours, memory_gib=memory_gib)
        asked = {name: _narrowed(spec.load(name), arms, seeds, parse_assignments(set_ or [])) for name in chosen}
        for name, experiment in _with_tasks(asked, names or []).items():
            said[Path(name).stem] = _run(Path(name).stem, experiment, playing)
    if json_:
        typer.echo(json.dumps(said, indent=2))


lab.command()(record)


def _with_tasks(asked: dict[str, spec.Experiment], names: list[str]) -> dict[str, spec.Experiment]:
    """Return the experiments whose tasks are found here, and print which of ``--all`` are left out.

    Raises:
        SettingsError: the task of an experiment that is in ``names`` is not found.
    """
    missing = {name: module for name, experiment in asked.items() if (module := _missing_module(experiment)) is not None}
    for name in names:
        if name in missing:
            said = f"{name}: no module {missing[name]!r} of its task, here or where PYTHONPATH says"
            raise SettingsError(f"{said}; {_found_by([name])}")
    if missing:
        _console.print(
            f"left out: {', '.join(missing)}, whose tasks are not found here; {_found_by(list(missing))}", highlight=False
        )
    return {name: experiment for name, experiment in asked.items() if name not in missing}


def _missing_module(experiment: spec.Experiment) -> str | None:
    """Return the module of a task that an experiment needs and that is not found; None: all are found."""
    modules = (factory(experiment.settings_of(arm, experiment.first_seed).task.name)[0] for arm in experiment.arms)
    return next((module for module in modules if module and module_file(module) is None), None)


def _found_by(names: list[str]) -> str:
    """Return what to do to have the tasks of experiments found; those of the lab's own are examples of the repository."""
    if all(name in spec.named() for name in names):
        return f"in DiLoCo's checkout: PYTHONPATH=examples diloco lab run {' '.join(names)}"
    return "start the command in the folder of that module, or set PYTHONPATH to it"


def _narrowed(
    experiment: spec.Experiment, arms: list[str] | None, seeds: int | None, settings: dict[str, Any]
) -> spec.Experiment:
    changed: dict[str, object] = {"settings": experiment.settings | settings}
    if seeds is not None:
        changed["seeds"] = seeds
    if arms:
        for name in arms:
            if name not in experiment.arms:
                raise SettingsError(f"--arm {name}: no such arm{nearest(name, list(experiment.arms))}")
        kept = [claim for claim in experiment.claims if {claim.arm, claim.against} <= set(arms)]
        bars = [bar for bar in experiment.bars if bar in arms]
        changed |= {
            "arms": {name: experiment.arms[name] for name in experiment.arms if name in arms},
            "bars": bars,
            "claims": kept,
        }
    return experiment.model_copy(update=changed)


@lab.command()
def page(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PAGE.md...", help="Page with blocks <!-- lab: NAME --> ... <!-- end -->.")
    ],
    results: Annotated[
        Path | None, typer.Option(help="Folder of NAME.results.json; default: one named as the page, or the page's own.")
    ] = None,
) -> None:
    """Regenerate the tables, sentences and pictures of pages from raw results."""
    for path in paths:
        _remake(path, results)


def _remake(path: Path, results: Path | None) -> None:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    named = path.with_suffix("")
    folder = results or (named if named.is_dir() else path.parent)
    filled, drawn = pages.fill(text, path.parent, folder)
    for file, picture in drawn.items():
        write(file, picture)
    write(path, filled)


@dataclass(frozen=True)
class _Playing:
    """How trials are played: where their results are kept, on which text, so many at once, and how long it may take."""

    store: TrialStore
    data: str | None
    jobs: int
    pool: ProcessPoolExecutor
    max_hours: float
    memory_gib: float

    def play(self, name: str, experiment: spec.Experiment, follows: int = 0) -> Results:
        """Play all trials that are not in the store; ``follows``: so many come after them, which count for the estimate.

        Raises:
            SettingsError: they would take longer, or more memory, than is allowed.
        """
        wanted = list(runner.jobs(experiment, self.store, self.data))
        missing = [job for job in wanted if not job.path.exists()]
        _console.print(f"{len(wanted)} trials, {len(wanted) - len(missing)} of them in {self.store.folder}")
        if missing:
            self._allow(name, experiment, missing, follows)
        began_s, left = time.monotonic(), len(missing)

        def done(job: TrialJob, result: Measured | str) -> None:
            nonlocal left
            left -= 1
            each_s = (time.monotonic() - began_s) / (len(missing) - left)
            ended = result if isinstance(result, str) else ("diverged" if result.loss is None else f"{result.loss:.4f}")
            _console.print(f"  {job.arm}, seed {job.seed}: {ended}; {left} left, {_long(left * each_s)}", highlight=False)

        return runner.play_all(experiment, self.store, self.data, self.pool, done)

    def play_arms(self, name: str, experiment: spec.Experiment) -> Results:
        """Play an experiment's arms; those that its first seeds stop are not played on the others.

        Raises:
            SettingsError: as :meth:`play`.
        """
        later = experiment.seeds - runner.STOP_SEEDS
        if experiment.stop_above is None or later <= 0:
            return self.play(name, experiment)
        first = experiment.model_copy(update={"seeds": runner.STOP_SEEDS})
        results = self.play(name, first, later * len(experiment.arms))
        out = runner.stopped(experiment, results)
        for sentence in answer.stops(experiment, results):
            _console.print(f"* {sentence}", highlight=False)
        kept = {arm: value for arm, value in experiment.arms.items() if arm not in out}
        begin = experiment.first_seed + runner.STOP_SEEDS
        rest = self.play(name, experiment.model_copy(update={"arms": kept, "first_seed": begin, "seeds": later}))
        return Results(results.measured | rest.measured, results.failed | rest.failed)

    def _allow(self, name: str, experiment: spec.Experiment, missing: list[TrialJob], follows: int) -> None:
        costs = runner.costs(experiment, self.data, self.pool)
        total_s = sum(costs[job.arm].trial_s for job in missing) / self.jobs
        total_s *= 1 + follows / len(missing)
        gib = self.jobs * max(costs[job.arm].memory_bytes for job in missing) / 2**30
        later = f", {follows} trials that follow included" if follows else ""
        _console.print(f"about {_long(total_s)} and {gib:.1f} GiB, {self.jobs} at once{later}")
        if total_s > 3600 * self.max_hours:
            raise SettingsError(
                f"{name}: about {_long(total_s)}, more than --max-hours {self.max_hours:g}; allow more, or fewer --seeds"
            )
        if gib > self.memory_gib:
            raise SettingsError(
                f"{name}: about {gib:.1f} GiB, more than --memory-gib {self.memory_gib:g}; allow more, or fewer --jobs"
            )


def _run(name: str, experiment: spec.Experiment, playing: _Playing) -> list[dict[str, object]]:
    _console.print(f"[bold]{name}[/]: {experiment.question}")
    found, asked = list[tuning.Tried](), experiment
    while (search := tuning.search(experiment, found)) is not None:
        left = tuning.trials_of(experiment) - (len(found) + len(search.arms)) * experiment.tuning_seeds
        played = playing.play(name, search, left + experiment.seeds * len(experiment.arms))
        found += tuning.tried(experiment, played, found)
    if found:
        choices = tuning.choose(experiment, found)
        for choice in choices:
            _console.print(f"* {choice.sentence()}", highlight=False)
        experiment = tuning.settled(experiment, choices)
    experiment = curves.spread(experiment)
    results = playing.play_arms(name, experiment)
    record = ExperimentRecord(
        name=name,
        asked=asked,
        tried=found,
        results=results,
        where=record_files.where(experiment),
        text=record_files.text_of(experiment, playing.data),
    )
    write(playing.store.folder / f"{name}{record_files.SUFFIX}", record.encode())
    reference = record.reference()
    if reference is not None:
        write(playing.store.folder / f"{name}-{reference.key}{reference_files.SUFFIX}", reference.encode())
    write(playing.store.folder / f"{name}.md", f"## {name}\n\n{answer.markdown(record)}")
    for picture in answer.pictures(asked, experiment, results):
        write(playing.store.folder / f"{name}{picture.suffix}.svg", picture.svg)
    table = Table(box=None)
    for column in answer.head(experiment, results):
        table.add_column(column)
    for row in answer.rows(experiment, results):
        table.add_row(*row)
    _console.print(table)
    judged = answer.verdicts(experiment, results)
    for verdict in judged:
        _console.print(f"* {verdict.sentence()}")
    for (arm, seed), reason in sorted(results.failed.items()):
        _console.print(f"[red]{arm}, seed {seed}, failed[/]: {reason}", highlight=False)
    return [{"claim": v.claim.model_dump(), "paired": asdict(v.paired), "holds": v.holds} for v in judged]


def _long(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
