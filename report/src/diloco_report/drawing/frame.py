"""The parts that all pictures share: round numbers at axes, texts and lines of the style sheet, and the plot of a chart.

Positions are in the pixels of the picture's own ``viewBox``. Names are escaped, colours are CSS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# round times between two ticks
_TIME_STEPS_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return about ``wanted`` round numbers within [low, high]: steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    return [round(step * index, 12) for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def time_ticks(end_s: float, wanted: int) -> list[float]:
    """Return about ``wanted`` round times from 0 to ``end_s``."""
    step = next((step for step in _TIME_STEPS_S if end_s / step <= wanted), None)
    if step is None:
        step = 86400 * math.ceil(end_s / wanted / 86400)
    return [float(step * index) for index in range(math.floor(end_s / step + 1e-9) + 1)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places in [low, high] near the ``wanted`` ones, in order, ``gap`` apart; closer where there is no room."""
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap if places else low))
    for index in reversed(range(len(places))):  # places beyond the end push the others back
        places[index] = min(places[index], places[index + 1] - gap if index + 1 < len(places) else high)
    return places


@dataclass(frozen=True)
class Frame:
    """The plotting area of a chart in its picture, and the values at its edges: 0 to ``end``, ``low`` to ``high``."""

    end: float
    low: float
    high: float
    wide: int = 560
    tall: int = 320
    left: int = 48
    right: int = 548
    top: int = 14
    bottom: int = 280

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * value / self.end

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * (value - self.low) / (self.high - self.low)


def text_at(kind: str, x: float, y: float, anchor: str, text: str) -> str:
    """Draw ``text``, escaped, in the style sheet's class ``kind``."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def across(kind: str, left: float, right: float, y: float) -> str:
    """Draw a horizontal line in the style sheet's class ``kind``."""
    return f'<line class="{kind}" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'


def upright(kind: str, x: float, top: float, bottom: float) -> str:
    """Draw an upright line in the style sheet's class ``kind``."""
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
