"""Charts of lines: a quantity over time, tokens or bytes, each with what the page's script needs to draw it again.

Without the script a chart is a picture. The script (``charts.js``) draws it again at the width that there is, smoothed, within
a stretch of its axis, or with a logarithmic axis: all of it from the chart's ``data-chart``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from diloco_report.drawing.curves import CurveLine, Point, thinned
from diloco_report.drawing.frame import Frame, across, nice_ticks, spread, text_at, time_ticks, upright
from diloco_report.units import clock, count, duration, size

Axis = Literal["tokens", "time", "bytes"]
Form = Literal["number", "count", "bytes"]  # of the values of a quantity
_FORMS: dict[Axis, Callable[[object], str]] = {"tokens": count, "time": duration, "bytes": size}
_VALUES: dict[Form, Callable[[float], str]] = {"number": lambda value: f"{value:.4g}", "count": count, "bytes": size}

MAX_DOTS = 40  # of a strong line that are marked one by one
MAX_POINTS = 6400  # of all lines of a chart together
LEAST_POINTS = 60  # of a line, however many there are
REFERENCE_WIDTH = 96  # pixels beside the plot, for the names of references
REFERENCE_GAP = 17  # pixels between two of them, whose texts are larger on a phone


@dataclass(frozen=True)
class Quantity:
    """A quantity that a chart shows: its name, the form of its values, and a sentence for a chart without any."""

    name: str
    form: Form = "number"
    empty: str = "Nothing was recorded."
    from_zero: bool = True  # else the axis reaches over the values


LOSS = Quantity("loss", empty="No loss was recorded.", from_zero=False)


def loss_range(lines: Sequence[CurveLine], references: Mapping[str, float]) -> Point:
    """Return the lower and upper end of the loss axis.

    It reaches from just below the lowest value to the 90th percentile, and includes the reference lines.
    """
    values = sorted(y for line in lines for _, y in line.points)
    low, high = values[0], values[min(len(values) - 1, len(values) * 9 // 10)]
    wanted = [value for name, value in references.items() if name != "unigram"]
    low, high = min([low, *wanted]), max([high, *wanted])
    margin = max(0.04 * (high - low), 0.02)
    return max(0.0, low - margin), high + margin


def _range(lines: Sequence[CurveLine], references: Mapping[str, float], quantity: Quantity) -> Point:
    if not quantity.from_zero:
        return loss_range(lines, references)
    highest = max(y for line in lines for _, y in line.points)
    return 0.0, 1.06 * highest if highest > 0 else 1.0


def line_chart(
    lines: Sequence[CurveLine],
    references: Mapping[str, float],
    *,
    axis: Axis,
    label: str,
    name: str,
    moments: Sequence[tuple[float, str]] = (),
    quantity: Quantity = LOSS,
) -> str:
    """Draw a quantity over time (s), tokens or bytes, with dashed lines at the references, whose names are beside the plot.

    ``name``: of no other chart of the page. ``moments``: events of the whole run, by their place on the horizontal axis, which
    are named above the plot.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return f'<p class="empty">{escape(quantity.empty)}</p>'
    limit = max(LEAST_POINTS, MAX_POINTS // len(lines))
    lines = [thinned(line, min(limit, MAX_POINTS // 8)) for line in lines]
    frame = Frame(max(line.points[-1][0] for line in lines) or 1.0, *_range(lines, references, quantity))
    shown = {other: value for other, value in references.items() if frame.low <= value <= frame.high}
    label = f"{label} ({clock(frame.end)})" if axis == "time" else label
    frame = replace(frame, right=frame.right - (REFERENCE_WIDTH if shown else 0), top=frame.top + (14 if moments else 0))
    clip = f"clip-{name}"
    area = f'x="{frame.left}" y="{frame.top}" width="{frame.right - frame.left}" height="{frame.bottom - frame.top}"'
    parts = [f'<clipPath id="{escape(clip)}"><rect {area}/></clipPath>', *_axes(frame, axis, label, quantity)]
    parts += [*_references(shown, frame), *_moments(moments, frame)]
    parts += [_curve(line, frame, clip) for line in sorted(lines, key=lambda line: line.strong)]
    data = {
        "name": name,
        "axis": axis,
        "label": label,
        "quantity": quantity.name,
        "form": quantity.form,
        "low": _short(frame.low),
        "high": _short(frame.high),
        "end": frame.end,
        "references": {other: _short(value) for other, value in references.items()},
        "moments": [[at, said] for at, said in moments],
        "lines": [_data(line) for line in sorted(lines, key=lambda line: not line.strong)],
    }
    return (
        f'<div class="plot"><svg class="chart" viewBox="0 0 {frame.wide} {frame.tall}" role="img" '
        f'aria-label="{escape(quantity.name.capitalize())} over {escape(label)}" '
        f'data-chart="{escape(json.dumps(data, separators=(",", ":")))}">{"".join(parts)}</svg></div>'
    )


def _data(line: CurveLine) -> dict[str, object]:
    """Return a line as the script takes it; what is usual is left out."""
    unusual = {"strong": line.strong, "dash": line.dash, "breaks": list(line.breaks)}
    return {
        "name": line.name,
        "css": line.css,
        "x": [_short(x) for x, _ in line.points],
        "y": [_short(y) for _, y in line.points],
        **{key: value for key, value in unusual.items() if value},
    }


def _axes(frame: Frame, axis: Axis, label: str, quantity: Quantity) -> list[str]:
    parts = []
    for tick in nice_ticks(frame.low, frame.high, 6):
        parts.append(across("grid", frame.left, frame.right, frame.y(tick)))
        parts.append(text_at("tick", frame.left - 6, frame.y(tick) + 4, "end", _VALUES[quantity.form](tick)))
    ticks = time_ticks(frame.end, 6) if axis == "time" else nice_ticks(0, frame.end, 6)
    parts += [text_at("tick", frame.x(tick), frame.bottom + 18, "middle", _FORMS[axis](tick)) for tick in ticks]
    return [*parts, text_at("axis", frame.middle, frame.tall - 4, "middle", label)]


def _references(shown: Mapping[str, float], frame: Frame) -> list[str]:
    """Draw dashed lines over the plot, and their names beside it, none over another."""
    order = sorted(shown, key=lambda other: -shown[other])
    places = spread([frame.y(shown[other]) + 4 for other in order], REFERENCE_GAP, frame.top + 4, frame.bottom + 4)
    return [
        across("reference", frame.left, frame.right, frame.y(shown[other]))
        + text_at("reference", frame.right + 5, place, "start", f"{other} {shown[other]:.2f}")
        for other, place in zip(order, places, strict=True)
    ]


def _moments(moments: Sequence[tuple[float, str]], frame: Frame) -> list[str]:
    parts = []
    for at, event in moments:
        x = frame.x(at)
        parts.append(upright("reference", x, frame.top, frame.bottom))
        parts.append(text_at("reference", x, frame.top - 4, "end" if x > frame.middle else "start", event))
    return parts


def _curve(line: CurveLine, frame: Frame, clip: str) -> str:
    places = [(frame.x(x), frame.y(y)) for x, y in line.points]
    begins = {0, *line.breaks}
    path = "".join(f"{'M' if n in begins else 'L'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(places))
    dash = f";stroke-dasharray:{line.dash}" if line.dash else ""
    drawn = (
        f'<path class="{"line strong" if line.strong else "line"}" clip-path="url(#{escape(clip)})" d="{path}" '
        f'style="stroke:{line.css}{dash}" data-name="{escape(line.name)}"/>'
    )
    dots = places if (line.strong and len(places) <= MAX_DOTS) or len(places) == 1 else []
    return drawn + "".join(
        f'<circle class="dot" clip-path="url(#{escape(clip)})" cx="{x:.1f}" cy="{y:.1f}" r="3.5" '
        f'style="fill:{line.css}" data-name="{escape(line.name)}"/>'
        for x, y in dots
    )


def _short(value: float) -> float:
    return float(f"{value:.5g}")
