"""Facts of a report that several of its parts go by: who there was, in which order and colour, and until when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_report.colours import assigned, css
from diloco_report.units import finite

Report = Mapping[str, Any]


def learners_of(report: Report) -> dict[str, Mapping[str, Any]]:
    """Return the learners by name, in the order of the numbers in their names."""
    learners: Mapping[str, Mapping[str, Any]] = report.get("learners") or {}
    return {str(name): learners[name] for name in sorted(learners, key=natural)}


def colours(report: Report) -> dict[str, str]:
    """Return a colour of its own for each learner: a shade of its region's, in a run with regions."""
    learners = learners_of(report)
    regions = {name: str(learner.get("region") or "") for name, learner in learners.items()}
    order = [str(name) for name in report.get("regions") or {}]
    return {name: css(*place) for name, place in assigned(list(learners), regions, order).items()}


def natural(name: str) -> tuple[str, int, str]:
    """Return the key to sort a name by: a number at its end counts as a number."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number), name) if stem and number.isdecimal() and len(number) < 10 else (name, -1, name)


def until_s(report: Report) -> float:
    """Return the time at which the run ended, or until which it is known."""
    series = report.get("series") or {}
    ends = [float(span[1]) for spans in (series.get("activity") or {}).values() for span in spans]
    return max([float(report.get("wall_s") or 0.0), *ends, *(float(merged["wall_s"]) for merged in series.get("merges") or [])])


def ratio(part: object, whole: object) -> float | None:
    """Return a quotient, or None where it is not known."""
    return float(part) / float(whole) if finite(part) and finite(whole) and whole else None


def units_of(report: Report) -> str:
    """Return the units of the loss; empty where the task does not name them."""
    return str(report.get("units") or "")


def absences(report: Report) -> list[tuple[float, str]]:
    """Return when regions were cut off and came back, each in words."""
    found = []
    for name, region in (report.get("regions") or {}).items():
        for from_s, to_s in region.get("absences") or []:
            found.append((float(from_s), f"{name} away"))
            if to_s is not None:
                found.append((float(to_s), f"{name} back"))
    return sorted(found)
