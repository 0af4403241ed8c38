"""The picture of losses by time: a line for each arm that notes its losses along the way, the mean over its seeds."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from diloco_lab.experiment import drawn
from diloco_lab.experiment.curve_picture import COLOURS
from diloco_lab.experiment.runner import Results
from diloco_lab.experiment.spec import Experiment
from diloco_lab.loss_history import LossPoint
from diloco_report.drawing.frame import across, nice_ticks, text_at, upright

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM, ROW = 900, 440, 52, 230, 12, 50, 20
DASHES = ("", "7 4", "2 3")  # of the first arms, of as many others, and so on

Line = list[tuple[float, float]]


def picture(experiment: Experiment, results: Results) -> str:
    """Return an SVG; empty, where no arm notes its losses. Time is logarithmic, as arms may take many times as long as others.

    Losses are shown from the one at half of the fastest arm's time on: all of them would leave no room for the ends.
    """
    lines = {arm: line for arm in experiment.arms if len(line := mean_line(_histories(arm, results))) > 1}
    if not lines:
        return ""
    ends = [line[-1][0] for line in lines.values()]
    begin, end = min(ends) / 4, max(ends)
    shown = [loss for line in lines.values() for at_s, loss in line if at_s >= min(ends) / 2]
    low, high = min(shown), max(shown)
    low -= 0.05 * (high - low) or 0.01
    base, wide = HIGH - BOTTOM, WIDE - LEFT - RIGHT

    def x(at_s: float) -> float:
        return LEFT + math.log(at_s / begin) / math.log(end / begin) * wide

    def y(loss: float) -> float:
        return base - (loss - low) / (high - low) * (base - TOP)

    parts = [f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{wide}" height="{base - TOP}"/></clipPath>']
    for tick in nice_ticks(low, high, 6):
        parts += [across("grid", LEFT, LEFT + wide, y(tick)), text_at("tick", LEFT - 6, y(tick) + 4, "end", f"{tick:.4g}")]
    for tick in _ticks(begin, end):
        parts += [upright("grid", x(tick), TOP, base), text_at("tick", x(tick), base + 18, "middle", f"{tick:g}")]
    for place, (arm, line) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        ink = f'stroke="{colour}" stroke-dasharray="{DASHES[place // len(COLOURS) % len(DASHES)]}"'
        path = "L".join(f"{x(at_s):.1f} {y(loss):.1f}" for at_s, loss in line)
        said = f"<title>{escape(arm)}: {line[-1][1]:.4f} after {line[-1][0]:.1f} s</title>"
        parts.append(f'<path d="M{path}" clip-path="url(#plot)" fill="none" stroke-width="1.8" {ink}>{said}</path>')
        parts.append(f'<circle cx="{x(line[-1][0]):.1f}" cy="{y(line[-1][1]):.1f}" r="3.5" fill="{colour}"/>')
        key = TOP + 8 + ROW * place
        parts.append(f'<path d="M{LEFT + wide + 14} {key}h26" fill="none" stroke-width="1.8" {ink}/>')
        parts.append(text_at("label", LEFT + wide + 46, key + 4, "start", arm))
    said = f"{drawn.loss_of(experiment)}, mean over seeds; across: virtual seconds, logarithmic; dots: the end of the budget"
    parts.append(text_at("axis", WIDE / 2, HIGH - 8, "middle", said))
    return drawn.picture(parts, WIDE, HIGH, experiment.question)


def mean_line(histories: list[list[LossPoint]]) -> Line:
    """Return times and losses, means over histories: point by point, and of their ends; none where a loss is not finite."""
    if not histories:
        return []
    inner = min(map(len, histories)) - 1
    points = [*zip(*(history[:inner] for history in histories), strict=True), tuple(history[-1] for history in histories)]
    means: Line = []
    for together in points:
        losses = [point.loss for point in together if point.loss is not None]
        if len(losses) == len(together):
            means.append((float(np.mean([point.at_s for point in together])), float(np.mean(losses))))
    return means


def _histories(arm: str, results: Results) -> list[list[LossPoint]]:
    return [measured.history for (name, _), measured in sorted(results.measured.items()) if name == arm and measured.history]


def _ticks(begin: float, end: float) -> list[float]:
    """Return powers of two, and where there are few of them also half as much again."""
    first, last = math.floor(math.log2(begin)), math.floor(math.log2(end))
    powers = [2.0**power for power in range(first, last + 1)]
    more = [1.5 * power for power in powers] if len(powers) < 5 else []
    return sorted(tick for tick in [*powers, *more] if begin <= tick <= end)
