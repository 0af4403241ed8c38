"""A run's validation loss beside that of other models: n-gram models of the same text, and data-parallel training.

Pure functions of the report dictionary, for the page and for a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_report.units import decimal, finite, share

Report = Mapping[str, Any]


def baselines(report: Report) -> dict[str, float]:
    """Return the losses of n-gram models of the same text, by name."""
    return _known(report.get("baselines") or {})


def references(report: Report) -> dict[str, float]:
    """Return the mean losses of data-parallel training under the run's conditions, by arm; empty if it was not measured."""
    arms: Mapping[str, Mapping[str, Any]] = (report.get("comparison") or {}).get("arms") or {}
    return _known({name: arm.get("loss") for name, arm in arms.items()})


def sentences(report: Report, *, brief: bool = False) -> list[str]:
    """Return how the loss compares, a sentence for each other model, and where the comparison comes from.

    ``brief``: without what was measured where, for a terminal's width.
    """
    loss, comparison = report.get("val_loss"), report.get("comparison") or {}
    if not finite(loss):
        return []
    said = []
    counted = baselines(report)
    if counted:
        best = min(counted, key=lambda name: counted[name])
        said.append(f"{above(loss, counted[best])} the best model that only counts bytes, {best} ({decimal(counted[best])})")
    for name, other in references(report).items():
        said.append(f"{above(loss, other)} {name} ({_of(comparison['arms'][name], brief=brief)})")
    if brief and references(report):
        said.append("data-parallel: the same model, tokens, global batch and text, its best rate; conditions are in the report")
    elif references(report):
        where = ", ".join(f"{key} {value}" for key, value in (comparison.get("where") or {}).items())
        said.append(f"data-parallel: the same model, tokens, global batch and text, its best rate; {where}")
    elif comparison.get("missing"):
        command = f"; this does it: {comparison['command']}" if comparison.get("command") else ""
        said.append(f"{comparison['missing']}{command}")
    return said


def above(loss: float, other: float) -> str:
    """Return how far a loss is above or below another one, in words."""
    gap = loss / other - 1
    return f"{share(abs(gap), 1)} {'above' if gap > 0 else 'below'}"


def _of(arm: Mapping[str, Any], *, brief: bool) -> str:
    seeds, spread = arm.get("seeds"), arm.get("spread")
    over = f" ± {decimal(spread, 4)}, {seeds} seeds" if spread is not None else ", one seed"
    return f"{decimal(arm.get('loss'), 4)}{over}" + ("" if brief else f"; {arm.get('tuned')}")


def _known(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items() if finite(value)}
