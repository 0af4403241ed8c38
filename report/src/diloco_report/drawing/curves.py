"""Curves of a chart: named points, thinned to what a picture shows, with gaps where nothing was recorded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

Point = tuple[float, float]

MAX_POINTS = 240  # of a line: means over as many parts of its extent
GAP_S, GAP_TIMES = 5.0, 5.0  # of a curve: at least so long, and so many times as long as two points are usually apart


@dataclass(frozen=True)
class CurveLine:
    """A named line of a chart; ``css`` is its colour, ``dash`` its pattern (``stroke-dasharray``), empty for a solid one."""

    name: str
    css: str
    points: Sequence[Point]
    strong: bool = False
    dash: str = ""
    breaks: Sequence[int] = ()  # indexes of points that the line does not join with the one before, in order


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most ``limit`` points, each the mean of those in one of as many equal parts of the line's extent."""
    if len(points) <= limit:
        return list(points)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / limit or 1.0
    parts: dict[int, list[Point]] = {}
    for point in points:
        parts.setdefault(min(limit - 1, max(0, int((point[0] - low) / width))), []).append(point)
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for _, part in sorted(parts.items())]


def gaps(times: Sequence[float]) -> list[int]:
    """Return the indexes of times (s) before which nothing was recorded for much longer than usual."""
    if len(times) < 3:
        return []
    apart = [later - earlier for earlier, later in itertools.pairwise(times)]
    least = max(GAP_S, GAP_TIMES * sorted(apart)[len(apart) // 2])
    return [index for index, length in enumerate(apart, 1) if length > least]


def pieces(line: CurveLine) -> list[Sequence[Point]]:
    """Return the points of a line in pieces, each of which is joined."""
    bounds = [0, *line.breaks, len(line.points)]
    return [line.points[start:stop] for start, stop in itertools.pairwise(bounds) if stop > start]


def thinned(line: CurveLine, limit: int = MAX_POINTS) -> CurveLine:
    """Return a line with about ``limit`` points at most, each piece of it thinned by itself as :func:`thin` does."""
    points: list[Point] = []
    breaks = []
    for piece in pieces(line):
        breaks += [len(points)] if points else []
        points += thin(piece, max(2, limit * len(piece) // len(line.points)))
    return replace(line, points=points, breaks=breaks)
