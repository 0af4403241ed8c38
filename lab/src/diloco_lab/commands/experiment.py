"""``diloco lab``: list experiments, and play one or all of them."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from diloco.errors import SettingsError
from diloco.settings.validation import nearest
from diloco_lab.commands.files import write
from diloco_lab.commands.record import record
from diloco_lab.experiment import answer, runner, spec
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import Job
from diloco_lab.experiment.store import Store, code_digest

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
        table.add_row(name, str(experiment.seeds * len(experiment.arms)), experiment.question)
    Console().print(table)


@lab.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME|FILE.toml]...", help="See diloco lab list.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All that come with the lab.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of results: what is there is not played again.")] = Path("runs/lab"),
    arms: Annotated[list[str] | None, typer.Option("--arm", help="These arms alone; may be repeated.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="So many seeds, in place of the file's.")] = None,
    data: Annotated[str | None, typer.Option(help="File or folder of text; default: Python's standard library.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Trials at once, of one thread each.")] = os.cpu_count() or 1,
    max_hours: Annotated[float, typer.Option(min=0, help="Refuse what is estimated to take longer.")] = 12.0,
    memory_gib: Annotated[float, typer.Option(min=0.1, help="Refuse what is estimated to need more.")] = 16.0,
    json_: Annotated[bool, typer.Option("--json", help="Verdicts as JSON.")] = False,
) -> None:
    """Play experiments; write NAME.md and NAME.svg for each.

    A run that was interrupted goes on where it was. Trials are the same on a busy machine: their time is virtual.
    """
    chosen = list(names or []) + (list(spec.named()) if all_ else [])
    if not chosen:
        raise SettingsError("lab run: name an experiment, or say --all; diloco lab list shows them")
    said: dict[str, object] = {}
    for name in dict.fromkeys(chosen):
        experiment = _narrowed(spec.load(name), arms, seeds)
        said[Path(name).stem] = _run(Path(name).stem, experiment, Store(out), data, jobs, max_hours, memory_gib)
    if json_:
        typer.echo(json.dumps(said, indent=2))


lab.command()(record)


def _narrowed(experiment: spec.Experiment, arms: list[str] | None, seeds: int | None) -> spec.Experiment:
    changed: dict[str, object] = {} if seeds is None else {"seeds": seeds}
    if arms:
        for name in arms:
            if name not in experiment.arms:
                raise SettingsError(f"--arm {name}: no such arm{nearest(name, list(experiment.arms))}")
        kept = [claim for claim in experiment.claims if {claim.arm, claim.against} <= set(arms)]
        changed |= {"arms": {name: arm for name, arm in experiment.arms.items() if name in arms}, "claims": kept}
    return experiment.model_copy(update=changed)


def _run(
    name: str, experiment: spec.Experiment, store: Store, data: str | None, jobs: int, max_hours: float, memory_gib: float
) -> list[dict[str, object]]:
    wanted = list(runner.jobs(experiment, store, data))
    missing = [job for job in wanted if not job.path.exists()]
    _console.print(f"[bold]{name}[/]: {experiment.question}")
    _console.print(f"{len(wanted)} trials, {len(wanted) - len(missing)} of them in {store.folder}")
    if missing:
        costs = runner.costs(experiment, data)
        total_s = sum(costs[job.arm].trial_s for job in missing) / jobs
        gib = jobs * max(costs[job.arm].memory_bytes for job in missing) / 2**30
        _console.print(f"about {_long(total_s)} and {gib:.1f} GiB, {jobs} at once")
        if total_s > 3600 * max_hours:
            raise SettingsError(
                f"{name}: about {_long(total_s)}, more than --max-hours {max_hours:g}; allow more, or fewer --seeds"
            )
        if gib > memory_gib:
            raise SettingsError(
                f"{name}: about {gib:.1f} GiB, more than --memory-gib {memory_gib:g}; allow more, or fewer --jobs"
            )
    began_s, left = time.monotonic(), len(missing)

    def done(job: Job, result: Measured | str) -> None:
        nonlocal left
        left -= 1
        each_s = (time.monotonic() - began_s) / (len(missing) - left)
        ended = result if isinstance(result, str) else ("diverged" if result.loss is None else f"{result.loss:.4f}")
        _console.print(f"  {job.arm}, seed {job.seed}: {ended}; {left} left, {_long(left * each_s)}")

    results = runner.play_all(experiment, store, data, jobs, done)
    where = {
        "measured": datetime.now(UTC).date().isoformat(),
        "code": code_digest()[:12],
        "jax": metadata.version("jax"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    page = answer.markdown(name, experiment, results, where)
    write(store.folder / f"{name}.md", page)
    write(store.folder / f"{name}.svg", answer.picture(experiment, results))
    table = Table(box=None)
    for column in answer.HEAD:
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
