"""Fewer points and spans of a series, for pictures: the ends stay, and what lies between is spread evenly.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
Span = tuple[float, float, str]  # from, to, state


def evenly(points: Sequence[T], most: int) -> list[T]:
    """Return about ``most`` of the points at most, evenly spaced, the last one included."""
    if len(points) <= most:
        return list(points)
    step = -(-len(points) // max(1, most))
    return [*points[:-1][::step], points[-1]]


def halved(spans: Sequence[Span]) -> list[Span]:
    """Return half as many spans: of two neighbours the state of the longer one. The last span stays as it is."""
    odd = (len(spans) - 1) % 2  # a first span without a neighbour stays too
    pairs = zip(spans[odd:-1:2], spans[odd + 1 : -1 : 2], strict=True)
    joined = ((a[0], b[1], a[2] if a[1] - a[0] >= b[1] - b[0] else b[2]) for a, b in pairs)
    return [*spans[:odd], *joined, spans[-1]]


def fewer(spans: Sequence[Span], most: int) -> list[Span]:
    """Return at most ``most`` spans, or two."""
    kept = list(spans)
    while len(kept) > max(2, most):
        kept = halved(kept)
    return kept
