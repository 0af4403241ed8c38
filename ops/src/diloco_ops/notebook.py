"""How a run shows itself in a notebook and at Python's prompt: a sentence, and a picture of its loss.

No notebook library is imported: what IPython has loaded already is used, and there is none in a script.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_ops.live.curve import known_points
from diloco_ops.live.parts import learner_colours, mean
from diloco_ops.reading.local_runs import LocalRun, stands
from diloco_report.drawing.curves import CurveLine, gaps, pieces
from diloco_report.units import count, decimal, duration

WIDTH, HEIGHT, LEFT, BELOW = 560, 180, 44, 18  # of the picture, and its margins, in pixels
STYLE = "font: 13px system-ui, sans-serif"


def sentence(run: LocalRun, page: str | None) -> str:
    """Return where a run stands, in one line."""
    parts = [f"run {run.name!r} in {run.path}: {stands(run)}", *_facts(run.status)]
    return ", ".join([*parts, *([f"page {page}"] if page else [])])


def picture(run: LocalRun, page: str | None) -> str:
    """Return the same as HTML, with the loss over time as an SVG."""
    link = f' · <a href="{escape(page)}" target="_blank">open its page</a>' if page else ""
    facts = "".join(f" · {escape(fact)}" for fact in _facts(run.status))
    head = f"<b>run {escape(run.name)}</b> · {escape(stands(run))}{facts}{link}"
    return f'<div style="{STYLE}"><div>{head}</div>{_loss(run.status)}</div>'


def display_handle(shown: object) -> Any:
    """Show an object in the running cell of a notebook and return what updates it there; None: this is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return ipython.display.display(shown, display_id=True) if ipython is not None and hasattr(shell, "kernel") else None


def _facts(status: Mapping[str, Any]) -> list[str]:
    learners: Mapping[str, Any] = status.get("learners") or {}
    loss = mean(learner.get("loss") for learner in learners.values())
    validation = known_points(status.get("validation") or ())
    return [
        *([f"{count(status.get('tokens_processed'))} of {count(status.get('tokens_budget'))} tokens"] if learners else []),
        *([f"loss {decimal(loss)}"] if loss is not None else []),
        *([f"validation loss {decimal(validation[-1][1])}"] if validation else []),
    ]


def _loss(status: Mapping[str, Any]) -> str:
    """Draw the losses of a status: each learner's in its colour, and the global model's on top."""
    losses: Mapping[str, Sequence[Any]] = status.get("loss") or {}
    colours = learner_colours(status)
    curves = [_curve(name, colours.get(name, "gray"), points) for name, points in sorted(losses.items())]
    curves = [
        curve for curve in (*curves, _curve("", "currentColor", status.get("validation") or (), strong=True)) if curve.points
    ]
    if not curves:
        return "<div>no loss yet</div>"
    values = sorted(value for curve in curves for _, value in curve.points)
    low, high = values[0], values[(len(values) - 1) * 9 // 10]  # the steep beginning would flatten the rest
    margin = 0.05 * (high - low or 1.0)
    low, high = low - margin, high + margin
    end_s = max(curve.points[-1][0] for curve in curves) or 1.0

    def line(curve: CurveLine, points: Sequence[tuple[float, float]]) -> str:
        y = [max(0.0, (HEIGHT - BELOW) * (high - value) / (high - low)) for _, value in points]
        places = " ".join(
            f"{LEFT + (WIDTH - LEFT) * at_s / end_s:.1f},{high:.1f}" for (at_s, _), high in zip(points, y, strict=True)
        )
        return f'<polyline fill="none" stroke="{curve.css}" stroke-width="{2 if curve.strong else 1}" points="{places}"/>'

    drawn = "".join(line(curve, piece) for curve in curves for piece in pieces(curve))
    texts = ((0, 12, decimal(high, 2)), (0, HEIGHT - BELOW, decimal(low, 2)), (LEFT, HEIGHT - 4, "0:00"))
    labels = "".join(f'<text x="{x}" y="{y}">{text}</text>' for x, y, text in texts)
    labels += f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{duration(end_s)}</text>'
    units = f", {escape(status['units'])}" if status.get("units") else ""
    axis = f'<path d="M{LEFT} 0V{HEIGHT - BELOW}H{WIDTH}" fill="none" stroke="gray"/>'
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="11" fill="currentColor">'
        f"<title>loss{units}: each learner, and the global model as the thick line</title>{axis}{labels}{drawn}</svg>"
    )


def _curve(name: str, colour: str, points: Sequence[Any], *, strong: bool = False) -> CurveLine:
    known = known_points(points)
    return CurveLine(name, colour, known, strong, breaks=gaps([at_s for at_s, _ in known]))
