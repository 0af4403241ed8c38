"""The live view's loss curves, drawn in braille dots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from diloco_ops.live.parts import FRAME, Status, learner_colours, panel
from diloco_report.drawing.curves import gaps
from diloco_report.drawing.frame import nice_ticks
from diloco_report.units import duration

_GLOBAL = "bold default"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class _Canvas:
    """Braille dots, 2 by 4 a cell; a cell has the colour of the line drawn last through it."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._bits = [[0] * columns for _ in range(rows)]
        self._styles = [[""] * columns for _ in range(rows)]

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Join points, the origin at the bottom left and (1, 1) at the top right; what lies above is left out.

        The cells it goes through lose what was drawn in them before, so that the line on top stays thin.
        """
        mine: set[tuple[int, int]] = set()
        wide, high = self.columns * 2 - 1, self.rows * 4 - 1
        dots = [(round(x * wide), round((1 - y) * high)) for x, y in points]
        for start, end in zip(dots, dots[1:] or dots, strict=False):
            steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
            for step in range(steps + 1):
                x = round(start[0] + (end[0] - start[0]) * step / steps)
                y = round(start[1] + (end[1] - start[1]) * step / steps)
                if y < 0:
                    continue
                if (y // 4, x // 2) not in mine:
                    mine.add((y // 4, x // 2))
                    self._bits[y // 4][x // 2] = 0
                self._bits[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
                self._styles[y // 4][x // 2] = style

    def text(self, row: int) -> Text:
        line = Text()
        for bits, style in zip(self._bits[row], self._styles[row], strict=True):
            line.append(chr(0x2800 + bits) if bits else " ", style)
        return line


def loss_curve(status: Status, width: int, lines: int) -> RenderableType:
    units, validation = status.get("units"), status.get("validation") or []
    body = loss_lines(status.get("loss") or {}, validation, learner_colours(status), width - 4, lines - 2)
    legend = Text().append("● each learner  ", "default dim").append("━ global", _GLOBAL) if known_points(validation) else ""
    return panel(body, f"loss, {units}" if units else "loss", width, legend)


def loss_lines(
    loss: Mapping[str, Sequence[Any]], points: Sequence[Any], colours: Mapping[str, str], width: int, lines: int
) -> list[Text]:
    """Draw learners' losses by name in their ``colours``, and the global model's ``points``, over time.

    A point is (seconds, tokens, loss).
    """
    learners, validation = {name: known_points(each) for name, each in sorted(loss.items())}, known_points(points)
    drawn = [each for each in (*learners.values(), validation) if each]
    rows, columns = lines - 1, width - 6
    if not drawn:
        body = [Text("")] * (rows // 2) + [Text("no loss yet", "dim", justify="center")]
        return body + [Text("")] * (lines - len(body))
    end_s = max(max(each[-1][0] for each in drawn), 1e-9)
    low, high = _range(drawn)
    canvas = _Canvas(columns, rows)
    for name, each in learners.items():
        bounds = [0, *gaps([at_s for at_s, _ in each]), len(each)]
        for start, stop in pairwise(bounds):
            canvas.line([_place(point, end_s, low, high) for point in each[start:stop]], colours.get(name, "default"))
    canvas.line([_place(point, end_s, low, high) for point in validation], _GLOBAL)
    ticks = nice_ticks(low, high, 4 if rows > 4 else 2)
    labelled = {round((rows - 1) * (high - tick) / (high - low)): tick for tick in ticks}
    body = []
    for row in range(rows):
        label = f"{labelled[row]:5.4g}" if row in labelled else " " * 5
        body.append(Text(label, "dim").append("┤" if row in labelled else "│", FRAME).append_text(canvas.text(row)))
    axis = f"{' ' * 5}└0:00"
    body.append(Text(axis + f"{duration(end_s):>{width - len(axis)}}", "dim"))
    return body


def known_points(points: Iterable[Sequence[float | None]]) -> list[tuple[float, float]]:
    """Return (seconds, loss) of those points (seconds, tokens, loss) whose loss is known and finite."""
    return [
        (float(point[0]), float(point[2]))
        for point in points
        if point[0] is not None and point[2] is not None and math.isfinite(point[2])
    ]


def _range(drawn: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Return the lowest value and the 90th percentile: the steep beginning would flatten the rest."""
    values = sorted(value for points in drawn for _, value in points)
    low, high = values[0], values[min(len(values) - 1, len(values) * 9 // 10)]
    margin = max(0.02 * (high - low), 0.01)
    return max(0.0, low - margin), high + margin


def _place(point: tuple[float, float], end_s: float, low: float, high: float) -> tuple[float, float]:
    return min(1.0, max(0.0, point[0] / end_s)), max(0.0, (point[1] - low) / (high - low))
