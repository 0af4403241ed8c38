"""Rates over the course of a run, from the series of its report: tokens a second, versions a second, versions behind.

Pure functions. A curve has at most ``PARTS`` points, each the mean over one of as many equal parts of the run's time.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_report.drawing.curves import Point
from diloco_report.facts import Report, learners_of, ratio, until_s
from diloco_report.units import finite

PARTS = 120
LEAST_PART_S = 2.0  # shorter ones show single steps and single merges


def part_s(end_s: float) -> float:
    """Return the length of a part of a run's time."""
    return max(LEAST_PART_S, end_s / PARTS)


def growth(points: Sequence[Point], end_s: float) -> list[Point]:
    """Return the rate at which a total grows, by part: a total that falls, as that of a new process, begins again there."""
    if len(points) < 2:
        return []
    times, risen = [points[0][0]], [0.0]
    for (_, before), (at_s, total) in itertools.pairwise(points):
        times.append(at_s)
        risen.append(risen[-1] + max(0.0, total - before))
    length_s = part_s(end_s)
    rates = []
    for number in range(int(times[0] / length_s), int(times[-1] / length_s) + 1):
        from_s, to_s = max(times[0], number * length_s), min(times[-1], (number + 1) * length_s)
        if to_s - from_s > length_s / 2:
            rate = (_between(times, risen, to_s) - _between(times, risen, from_s)) / (to_s - from_s)
            rates.append(((from_s + to_s) / 2, rate))
    return rates


def tokens_per_s(report: Report) -> tuple[dict[str, list[Point]], list[Point]]:
    """Return the rate of each learner, by its steps, and that of all, by the tokens of the whole run."""
    end_s, series = until_s(report), _learners_series(report)
    each: dict[str, list[Point]] = {}
    for name, learner in learners_of(report).items():
        step_tokens = ratio(learner.get("tokens_processed"), learner.get("steps"))
        rates = growth([(at_s, float(step)) for at_s, _, step, _ in series.get(name, ())], end_s)
        each[name] = [(at_s, rate * step_tokens) for at_s, rate in rates] if step_tokens else []
    together = sorted((at_s, float(tokens)) for points in series.values() for at_s, tokens, _, _ in points)
    return each, growth(together, end_s)


def versions_per_s(report: Report) -> list[Point]:
    """Return how many versions of fragments were merged a second."""
    series, end_s = report.get("series") or {}, until_s(report)
    every, length_s = int(series.get("merges_every") or 1), part_s(end_s)
    counts: dict[int, int] = {}
    for merged in series.get("merges") or []:
        part = int(float(merged["wall_s"]) / length_s)
        counts[part] = counts.get(part, 0) + every
    whole = int(end_s / length_s)  # the last part is not over
    first = min(counts, default=0)
    return [((part + 0.5) * length_s, counts.get(part, 0) / length_s) for part in range(first, whole)]


def versions_behind(report: Report) -> dict[str, list[Point]]:
    """Return by learner how many versions the bases of its merged offers were behind, as a mean."""
    length_s = part_s(until_s(report))
    sums: dict[str, dict[int, tuple[int, int]]] = {}
    for merged in (report.get("series") or {}).get("merges") or []:
        part = int(float(merged["wall_s"]) / length_s)
        for name, _, behind, _ in merged["members"]:
            parts = sums.setdefault(str(name), {})
            total, offers = parts.get(part, (0, 0))
            parts[part] = total + int(behind), offers + 1
    return {
        name: [((part + 0.5) * length_s, total / offers) for part, (total, offers) in sorted(parts.items())]
        for name, parts in sums.items()
    }


def _learners_series(report: Report) -> Mapping[str, Sequence[Any]]:
    series: Mapping[str, Sequence[Any]] = (report.get("series") or {}).get("learners") or {}
    return {str(name): [point for point in points if finite(point[0])] for name, points in series.items()}


def _between(times: Sequence[float], totals: Sequence[float], at_s: float) -> float:
    """Interpolate a total at a time within ``times``."""
    after = bisect_right(times, at_s)
    if after == len(times):
        return totals[-1]
    if after == 0:
        return totals[0]
    length = times[after] - times[after - 1]
    return totals[after - 1] + (totals[after] - totals[after - 1]) * (at_s - times[after - 1]) / length
