"""``diloco eval`` and ``diloco sample``: a run's weights, or those in a file, as its evaluator sees them.

The weights of a run, going on, stopped or over, are written to a temporary file, as ``diloco export`` does. A process of the
distribution diloco-learner evaluates the file.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import SafetensorError, safe_open

from diloco.errors import RunError, SettingsError
from diloco.settings import folders
from diloco.settings.loading import parse_assignments
from diloco.settings.places import has_scheme, parse_place
from diloco.settings.presets import changed_settings
from diloco.settings.run import RunSettings
from diloco.storage.fetching import fetched
from diloco_ops.inputs import data_source
from diloco_ops.reading import run_reader
from diloco_ops.reading.asking import ask
from diloco_ops.reading.local_runs import newest_run
from diloco_ops.up.environment import learner_environment
from diloco_ops.up.run_summary import printable
from diloco_ops.weights import export, scratch
from diloco_ops.weights.export import TASK
from diloco_ops.weights.versions import LATEST, ChosenVersions, WantedVersion, choose_versions, parsed_version
from diloco_report.samples import trimmed
from diloco_report.units import decimal

Weights = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR|FILE]",
        help="A run's directory, or a file written by diloco export, or its place. Default: the newest directory in runs/.",
        show_default=False,
    ),
]
Version = Annotated[
    str,
    typer.Option(
        help="For a run: number of a version that all fragments have; or a percentage such as 50%, the versions "
        "when that part of the tokens was merged; or latest."
    ),
]
Average = Annotated[int, typer.Option(min=1, help="For a run: average over this many versions, up to --version.")]
Data = Annotated[str | None, typer.Option(help="Data other than the run's, as for diloco up --data.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="For a file without task metadata: task.KEY=VALUE; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


def evaluate(
    weights: Weights = None,
    version: Version = LATEST,
    average: Average = 1,
    data: Data = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Evaluate a run's model, or one in a file, on the task's held-out data."""
    found = result(EvaluationRequest(_chosen(weights, "diloco eval"), version, average, data, set_ or []), None)
    _tell_versions(found)
    if json_:
        print(json.dumps(found))
        return
    units = f" {found['units']}" if found["units"] else ""
    print(f"loss {decimal(found['loss'], 4)}{units}")
    for name, value in found["values"].items():
        print(f"  {name} {decimal(value, 4)}")


def sample(
    weights: Weights = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue, which is also printed; default: the task's own.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of characters to generate.")] = 400,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the generated text.")] = 0,
    version: Version = LATEST,
    average: Average = 1,
    data: Data = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Generate text with a run's model, or with one in a file."""
    wanted = {"seed": seed, "count": count, "prompt": prompt, "early": True}
    found = result(EvaluationRequest(_chosen(weights, "diloco sample"), version, average, data, set_ or []), wanted)
    _tell_versions(found)
    if found["early"] is not None:
        print(f"diloco: note: {found['early']}", file=sys.stderr)
    print(json.dumps(found) if json_ else printable(trimmed(found["prompt"] + found["sample"])))


def _chosen(weights: str | None, command: str) -> Path:
    """Return the run's directory, or the file of weights, which is brought here from its place."""
    if weights is None:
        return newest_run(command)
    return fetched(str(parse_place(weights, command))) if has_scheme(weights) else Path(weights)


def _tell_versions(found: Mapping[str, Any]) -> None:
    """Print which part of a run ``--version 10%`` is: its model may be less trained than one expects."""
    if found.get("versions") is not None:
        print(f"diloco: note: {found['versions']}", file=sys.stderr)


@dataclass(frozen=True)
class EvaluationRequest:
    """Which weights are asked for, and with which task and data."""

    path: Path
    version: str
    average: int
    data: str | None
    assignments: list[str]


def result(asked: EvaluationRequest, drawn: dict[str, Any] | None) -> dict[str, Any]:
    """Return what ``python -m diloco_learner.evaluate`` says.

    Raises:
        RunError: there is no such run, or its log does not have a version.
        SettingsError: the file is none of weights, or the options do not fit together.
        ServiceFailed: the weights could not be evaluated.
    """
    wanted = parsed_version(asked.version)
    if asked.path.is_file():
        if wanted is not None or asked.average > 1:
            raise SettingsError(
                f"{asked.path}: is a file with a single state of a model: --version and --average require a run's directory"
            )
        settings = task_of(asked.path, asked.assignments)
        return _evaluated(settings, asked.data, asked.path, drawn, other=asked.data is not None)
    if asked.assignments:
        raise SettingsError(f"{asked.path}: a run has its own settings: --set is for a file")
    with folders.temporary() as folder:
        file = Path(folder) / "weights.safetensors"
        settings, own_data, chosen = asyncio.run(_write(asked, wanted, file))
        data = own_data if asked.data is None else asked.data
        found = _evaluated(settings, data, file, drawn, other=asked.data is not None)
        return found | {"versions": chosen.sentence}


async def _write(asked: EvaluationRequest, wanted: WantedVersion, file: Path) -> tuple[RunSettings, str | None, ChosenVersions]:
    """Write a run's weights to a file; return its settings, its data, and which versions they are."""
    async with run_reader.opened(asked.path) as seen:
        chosen = await choose_versions(seen, wanted)
        try:
            with export.in_one_file(seen, file, chosen.versions, asked.average) as weights:
                await export.write(seen, weights, chosen.versions, asked.average, scratch.in_folder(file.parent))
        except OSError as error:
            raise RunError(f"{file}: was not written: {error}") from None
        return seen.run.created, seen.directory.data, chosen


def task_of(file: Path, assignments: list[str]) -> RunSettings:
    """Return settings with the task of which a file of weights is.

    Raises:
        SettingsError: the file does not say it, and the assignments do not; or one is of something else.
    """
    try:
        with safe_open(file, "numpy") as opened:
            metadata = opened.metadata() or {}
        stated = json.loads(metadata.get(TASK, "{}"))
        if not isinstance(stated, dict):
            raise ValueError(f"its {TASK} is {metadata[TASK]!r}")
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{file}: cannot be read as a safetensors file of weights: {error}") from None
    given = parse_assignments(assignments)
    for key in given:
        if key.partition(".")[0] != "task":
            raise SettingsError(f"--set {key}: of a file only its task can be set: task.KEY=VALUE")
    if not stated and not given:
        raise SettingsError(
            f"{file}: does not state its task (its metadata lacks {TASK}, which diloco export writes); give the task with "
            "--set task.name=..., --set task.width=... and so on"
        )
    return changed_settings(RunSettings(), {"task": stated} | given, str(file))


def _evaluated(
    settings: RunSettings, data: str | None, file: Path, drawn: dict[str, Any] | None, *, other: bool
) -> dict[str, Any]:
    """Return what the evaluation of a file says; ``other``: the data is not that of the run."""
    place = data_source(data, settings)
    if other:
        settings = settings.with_mix(None)
    request = {"settings": settings.model_dump(), "data": place, "weights": str(file), "sample": drawn}
    return ask("evaluate", request, learner_environment(0, 1, None))
