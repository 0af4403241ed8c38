"""The runs whose directories are on this machine: where each one stands, and which one is the newest.

A run that ``diloco up`` started stands by its directory alone: a report, or a lock that ``diloco up`` holds while it works.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from diloco.errors import RunError
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco_ops.report.build import load_json
from diloco_report.units import finite, share

RUNS = Path("runs")  # where `diloco up` makes directories
Standing = Literal["finished", "running", "stopped", "elsewhere", "not begun", "damaged"]
NewestDirectory = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="The run's directory. Default: the newest one in runs/.", show_default=False),
]


@dataclass(frozen=True)
class LocalRun:
    """A run's directory, and where its run stands.

    Attributes:
        standing: ``elsewhere`` for a run that others started, whose directory ``diloco attach`` made.
        fraction: the part of the token budget that is processed, from 0 to 1; None: not known.
        at_s: Unix time of its last sign.
        status: the last status that was kept.
    """

    path: Path
    name: str
    standing: Standing
    fraction: float | None
    at_s: float
    status: Mapping[str, Any]


def standing_of(directory: RunDirectory) -> Standing:
    """Return where the run of a directory stands, by its files and the lock of ``diloco up``."""
    if directory.finished:
        return "finished"
    if rundir.is_locked(directory.path):
        return "running"
    if (directory.path / "services").is_dir() and (directory.path / "run.json").exists():  # a run that a URL names has no files
        return "stopped"
    return "elsewhere" if directory.nats_url else "not begun"


def local_run(path: Path) -> LocalRun:
    """Return what a run's directory says of its run; a damaged one is one too."""
    signs = (path / "run.json", path / "status.json", path / "report.json")
    at_s = max((sign.stat().st_mtime for sign in signs if sign.exists()), default=0.0)
    try:
        directory = rundir.load(path)
    except RunError:
        return LocalRun(path=path, name=path.name, standing="damaged", fraction=None, at_s=at_s, status={})
    status = load_json(path / "status.json")
    return LocalRun(
        path=path, name=directory.name, standing=standing_of(directory), fraction=_fraction(status), at_s=at_s, status=status
    )


def local_runs(folder: Path = RUNS) -> list[LocalRun]:
    """Return the runs whose directories are in a folder, the one with the newest sign first."""
    try:
        paths = [Path(entry.path) for entry in os.scandir(folder) if (Path(entry.path) / "run.json").exists()]
    except OSError:
        return []
    return sorted(map(local_run, paths), key=lambda run: (-run.at_s, run.path.name))


def newest_run(command: str) -> Path:
    """Return the directory of the newest run in ``runs/``, for a command without one, and print which it is to stderr.

    Raises:
        RunError: there is none.
    """
    newest = next((run for run in local_runs() if run.standing != "damaged"), None)
    if newest is None:
        raise RunError(
            f"{command}: there is no run in {RUNS}/ of this folder; name a run's directory, or start a run: diloco up"
        )
    print(f"{command}: {newest.path}, the newest run, which is {stands(newest)}", file=sys.stderr)
    return newest.path


def stands(run: LocalRun) -> str:
    """Return where a run stands, with its progress where it has not ended: ``stopped at 61 %``."""
    at = f" at {share(run.fraction)}" if run.fraction is not None and run.standing in ("running", "stopped") else ""
    return run.standing + at


def stopped_text(directory: RunDirectory) -> str:
    """Return how far a stopped run came, and how to continue it."""
    fraction, path = local_run(directory.path).fraction, directory.path
    typed = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path  # as a user in this folder names it
    at = "" if fraction is None else f" at {share(fraction)}"
    command = "up" if directory.starts_learners else "serve"
    return f"run {directory.name!r} is stopped{at}; go on with: diloco {command} --run-dir {typed}"


def _fraction(status: Mapping[str, Any]) -> float | None:
    processed, budget = status.get("tokens_processed"), status.get("tokens_budget")
    return min(1.0, processed / budget) if finite(processed) and finite(budget) and budget > 0 else None
