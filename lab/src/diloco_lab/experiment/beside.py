"""Results of an experiment as entries of a page that compares runs: an arm each, with its means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diloco_lab.experiment import record
from diloco_lab.experiment.curves import parameters_of
from diloco_lab.experiment.generation import GENERATION, remark
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.record import ExperimentRecord
from diloco_learner.text import UNITS
from diloco_ops.compare.reading import STANDARD_LIBRARY, flat
from diloco_report.side_by_side import ComparedRun, LossSample


def read(path: Path) -> list[tuple[ComparedRun, str | None]]:
    """Return the arms of an experiment that have ended, each with the hash of its text.

    Raises:
        FormatError: it is no file of results.
        SettingsError: its experiment is not one of this version.
    """
    found = record.read(path)
    return [(_arm(found, name, path), found.text) for name in found.played.arms if found.results.losses(name)]


def _arm(found: ExperimentRecord, name: str, path: Path) -> ComparedRun:
    played = found.played
    arm, settings = played.arms[name], played.settings_of(name, played.first_seed)
    measured = [one for (arm_name, _), one in found.results.measured.items() if arm_name == name and one.loss is not None]
    losses = [float(one.loss) for one in measured if one.loss is not None]
    loss, built_in = float(np.mean(losses)), settings.task.name == "gpt"
    tokens, time_s, sent = (_mean(measured, key) for key in ("tokens", "virtual_s", "bytes_up"))
    merged = _mean(measured, "merged")
    reached = None if tokens is None else tokens * (1.0 if merged is None else merged)  # the global model, as in a run's curve
    all_sent = None if sent is None else sent * settings.learners
    values = dict(flat(settings.model_dump()))
    values |= {"lab.method": arm.method, "lab.pace": arm.pace.said()}
    old = [] if found.generation == GENERATION else [remark(found.generation)]
    return ComparedRun(
        name=f"{found.name}: {name}",
        source=str(path),
        state=f"experiment, {len(losses)} seed{'s' if len(losses) > 1 else ''}",
        units=UNITS if built_in else None,
        text=STANDARD_LIBRARY if built_in else f"the data of task {settings.task.name}",
        parameters=parameters_of(settings) if built_in else None,
        validation=[LossSample(loss, reached, time_s, None)],
        ends={
            "loss": loss,
            "spread": float(np.std(losses, ddof=1)) if len(losses) > 1 else None,
            "seeds": len(losses),
            "tokens": tokens,
            "merged": merged,
            "time_s": time_s,
            "bytes_up": all_sent,
            "parameters": parameters_of(settings) if built_in else None,
        },
        settings=values,
        changes=[f"after {100 * change.after:.0f} % of the tokens: {change.settings}" for change in arm.changes],
        notes=["an experiment keeps the ends of its trials alone, not their curves, and no bytes received", *old],
        arm=True,
    )


def _mean(measured: Sequence[Measured], key: str) -> float | None:
    known = [float(value) for one in measured if (value := getattr(one, key)) is not None]
    return float(np.mean(known)) if known else None
