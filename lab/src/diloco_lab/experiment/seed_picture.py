"""The picture of losses by seed: a row for each arm, with its seeds, their mean, and its 95 % interval."""

from __future__ import annotations

import numpy as np

from diloco_lab.experiment import drawn
from diloco_lab.experiment.runner import Results
from diloco_lab.experiment.spec import Experiment
from diloco_lab.experiment.statistics import paired
from diloco_report.colours import cut_middle
from diloco_report.drawing.frame import nice_ticks, text_at, upright

WIDE, ROW, LEFT, RIGHT = 720, 30, 210, 28
NAME = 30  # characters of an arm's name that have room
_SEED, _MEAN = "var(--s0)", "var(--s1)"


def picture(experiment: Experiment, results: Results) -> str:
    """Return an SVG; empty, where no seed of any arm has a loss."""
    known = {arm: list(results.losses(arm).values()) for arm in experiment.arms}
    if not any(known.values()):
        return ""
    intervals = {arm: _interval(losses) for arm, losses in known.items() if len(losses) > 1}
    shown = [loss for losses in known.values() for loss in losses] + [end for ends in intervals.values() for end in ends]
    pad = 0.05 * (max(shown) - min(shown)) or 0.01
    low, high = min(shown) - pad, max(shown) + pad
    base = ROW * len(known) + 12

    def x(loss: float) -> float:
        return LEFT + (loss - low) / (high - low) * (WIDE - LEFT - RIGHT)

    parts = []
    for tick in nice_ticks(low, high, 6):
        parts += [upright("grid", x(tick), 4, base), text_at("tick", x(tick), base + 16, "middle", f"{tick:.5g}")]
    for place, (arm, losses) in enumerate(known.items()):
        y = 20 + place * ROW
        parts.append(text_at("label", LEFT - 12, y + 4, "end", cut_middle(arm, NAME)))
        parts += [f'<circle cx="{x(loss):.1f}" cy="{y}" r="3.5" style="fill:{_SEED};opacity:.55"/>' for loss in losses]
        if arm in intervals:
            ends = [x(end) for end in intervals[arm]]
            ink = f'style="stroke:{_MEAN};stroke-width:2"'
            parts.append(f'<line class="interval" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y}" y2="{y}" {ink}/>')
            mean = x(float(np.mean(losses)))
            parts.append(f'<rect x="{mean - 1.5:.1f}" y="{y - 7}" width="3" height="14" style="fill:{_MEAN}"/>')
    said = f"{drawn.loss_of(experiment)}; dots: seeds; upright: mean, with its 95 % interval"
    parts.append(text_at("axis", WIDE / 2, base + 36, "middle", said))
    return drawn.picture(parts, WIDE, base + 44, experiment.question)


def _interval(losses: list[float]) -> tuple[float, float]:
    found = paired(losses, [1.0] * len(losses)).interval
    assert found is not None
    return 1 + found[0], 1 + found[1]
