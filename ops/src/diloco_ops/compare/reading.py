"""Runs' directories as entries of a page that compares them: from the report of a finished run, else from its series."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diloco.errors import RunError
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco_ops.reading.local_runs import standing_of
from diloco_ops.report.build import load_json
from diloco_report.side_by_side import FINISHED, ComparedRun, LossSample
from diloco_report.units import finite

WRITTEN_S = 30.0  # six times as long as a coordinator takes to write its series again
STANDARD_LIBRARY = "Python's standard library"


def read(path: Path) -> ComparedRun:
    """Read a run's directory.

    Raises:
        RunError: it is none, or its report or series are damaged.
    """
    directory = rundir.load(path)
    file = directory.report if directory.finished else path / "series.json"
    if not file.exists():
        return _entry(directory, "not begun", notes=(_no_series(path),))
    found = load_json(file)
    try:
        return _over(directory, found) if directory.finished else _going_on(directory, found, file)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        advice = (
            "check that its log is whole: diloco verify DIR"
            if directory.finished
            else "it is written again while the run goes on"
        )
        raise RunError(f"{file}: damaged, or written by another version ({error!r}); {advice}") from None


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def settled(entries: Sequence[tuple[ComparedRun, str | None]]) -> list[ComparedRun]:
    """Return entries, given with the hashes of their texts, such that texts have the same words where they are the same.

    A hash that is not known yet is taken to be that of a text with the same words, where only one is known.
    """
    hashes: dict[str, set[str]] = {}
    for entry, text in entries:
        hashes.setdefault(entry.text, set()).update([text] if text else [])
    made = []
    for entry, text in entries:
        if len(hashes[entry.text]) > 1:
            made.append(replace(entry, text=f"{entry.text} ({text[:8] if text else 'hash not known'})"))
        elif text is None and hashes[entry.text]:
            note = f"its text is assumed to be that of the other runs: {entry.text}; its hash is known at the end"
            made.append(replace(entry, notes=(*entry.notes, note)))
        else:
            made.append(entry)
    return made


def text_hash(path: Path) -> str | None:
    """Return the hash of the text that a run's evaluator has evaluated on; None: not known, or another task's data."""
    text = load_json(path / "evaluation.json").get("text")
    return text if isinstance(text, str) else None


def _state(directory: RunDirectory, series: Path) -> str:
    """Return whether a run that is not over goes on: by the lock of `diloco up`, or without one by the age of its series."""
    standing = standing_of(directory)
    if standing == "stopped":
        return "stopped"
    return "going on" if standing == "running" or time.time() - series.stat().st_mtime < WRITTEN_S else "stopped"


def _no_series(path: Path) -> str:
    return f"no losses yet: the coordinator with state_dir = {path} writes series.json there once learners have begun"


def _entry(directory: RunDirectory, state: str, **values: Any) -> ComparedRun:
    task = directory.settings.task
    usual = STANDARD_LIBRARY if task.name == "gpt" else f"the data of task {task.name}"
    return ComparedRun(
        name=directory.name,
        source=str(directory.path),
        state=state,
        text=usual if directory.data is None else str(directory.data),
        settings=dict(flat(directory.settings.model_dump())),
        **{"units": directory.units} | values,
    )


def _over(directory: RunDirectory, report: Mapping[str, Any]) -> ComparedRun:
    series, traffic = report["series"], report["traffic"]
    validation = [*series["global"], [report["wall_s"], report["tokens_merged"], report["val_loss"]]]
    processed, learners = report["tokens_processed"], report["learners"]
    bytes_ = series.get("traffic") or []
    notes = [] if bytes_ else ["an older version made it, so its bytes are known only at the end"]
    if not bytes_:
        bytes_ = [[report["wall_s"], traffic["bytes_up"], traffic["bytes_down"]]]
    return _entry(
        directory,
        FINISHED,
        units=report["units"] or directory.units,
        parameters=report["parameters"],
        validation=_samples([point[:3] for point in validation], bytes_),
        training=_samples(_points(series["learners"]), bytes_),
        ends={
            "loss": report["val_loss"],
            "loss_initial": report["val_loss_initial"],
            "tokens": processed,
            "merged": report["tokens_merged"] / processed if processed else None,
            "time_s": report["wall_s"],
            "rate": processed / report["wall_s"] if report["wall_s"] else None,
            "bytes_up": traffic["bytes_up"],
            "bytes_down": traffic["bytes_down"],
            "versions": report["versions"],
            "blocked": max((learner["blocked_fraction"] for learner in learners.values()), default=None),
            "parameters": report["parameters"],
        },
        values=dict(report["values"]),
        changes=[str(change["text"]) for change in report["changes"]],
        notes=notes,
    )


def _going_on(directory: RunDirectory, series: Mapping[str, Any], file: Path) -> ComparedRun:
    learners, bytes_, validation = series["learners"], series.get("traffic") or [], series["validation"]
    named = {name: heard["points"] for name, heard in learners.items()}
    totals = {
        key: sum(heard[key] for heard in learners.values()) for key in ("tokens", "tokens_merged", "bytes_up", "bytes_down")
    }
    wall_s = float(series["wall_s"])
    begun = any(named.values())
    return _entry(
        directory,
        _state(directory, file),
        validation=_samples(validation, bytes_),
        training=_samples(_points(named), bytes_),
        ends={
            "loss": validation[-1][2] if validation else None,
            "tokens": totals["tokens"],
            "merged": totals["tokens_merged"] / totals["tokens"] if totals["tokens"] else None,
            "time_s": wall_s,
            "rate": totals["tokens"] / wall_s if wall_s else None,
            "bytes_up": totals["bytes_up"],
            "bytes_down": totals["bytes_down"],
            "versions": sum(series.get("newest") or [len(series["merges"])]),  # an older version keeps all merges
            "blocked": max((heard["blocked_fraction"] for heard in learners.values()), default=None),
        },
        notes=() if begun else (_no_series(directory.path),),
    )


def _points(learners: Mapping[str, Sequence[Sequence[float]]]) -> list[list[float]]:
    """Return all learners' losses in the order of time, as (time, tokens, loss)."""
    return sorted([at_s, tokens, loss] for points in learners.values() for at_s, tokens, _, loss in points)


def _samples(points: Sequence[Sequence[Any]], traffic: Sequence[Sequence[float]]) -> list[LossSample]:
    """Return losses with the bytes by then: of ``traffic``, whose points are (time, bytes sent, bytes received).

    With a single point of traffic, the end's, only a loss of that time has bytes.

    Raises:
        ValueError: a time, or a count, is not finite.
    """
    if not all(finite(value) for numbers in (*traffic, *(point[:2] for point in points)) for value in numbers):
        raise ValueError("a time or a count is not finite")
    times = [float(at_s) for at_s, _, _ in traffic]
    both = [float(sent) + float(received) for _, sent, received in traffic]
    samples = []
    for at_s, tokens, loss in points:
        if finite(loss):
            known = len(times) > 1 or at_s in times
            by_then = float(np.interp(at_s, [0.0, *times], [0.0, *both])) if known else None
            samples.append(LossSample(float(loss), float(tokens), float(at_s), by_then))
    return samples


def checked(path: Path) -> Path:
    """Return the path of a run's directory or of a file of results.

    Raises:
        RunError: nothing is there.
    """
    if not path.exists():
        raise RunError(f"{path}: does not exist; give a run's directory, or the results of an experiment of the lab")
    return path
