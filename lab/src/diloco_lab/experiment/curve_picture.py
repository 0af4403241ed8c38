"""The picture of fitted losses: a panel for each size, and in it each way of training's losses and law by tokens."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import numpy as np

from diloco_lab.experiment import drawn
from diloco_lab.experiment.curves import ScalingFit
from diloco_lab.experiment.spec import Experiment
from diloco_report.drawing.frame import across, nice_ticks, text_at
from diloco_report.units import count

COLOURS = ("#0f766e", "#c2410c", "#3b6fd4", "#7c3aed", "#a16207", "#be185d")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _BETWEEN = 900, 392, 46, 80, 40, 16
_STEPS = 24  # of a law's line


def picture(asked: Experiment, fit: ScalingFit) -> str:
    """Return an SVG: dots are mean losses over seeds, lines the fitted laws."""
    sizes = sorted({point.parameters for point in fit.points})
    budgets = sorted({point.tokens for point in fit.points})
    losses = [point.loss for point in fit.points]
    pad = 0.06 * (max(losses) - min(losses)) or 0.01
    low, high = min(losses) - pad, max(losses) + pad
    wide = (_WIDTH - _LEFT - _BETWEEN * len(sizes)) / len(sizes)
    base = _HEIGHT - _BOTTOM
    span = np.log(budgets[-1] / budgets[0]) or 1.0

    def x(panel: int, tokens: float) -> float:
        return float(_LEFT + panel * (wide + _BETWEEN) + wide * (0.06 + 0.88 * np.log(tokens / budgets[0]) / span))

    def y(loss: float) -> float:
        return base - (loss - low) / (high - low) * (base - _TOP)

    parts = [*_key(fit.arms), text_at("axis", 4, 44, "start", f"{drawn.loss_of(asked)}; dots: means over seeds; lines: fitted")]
    for panel, size in enumerate(sizes):
        left = _LEFT + panel * (wide + _BETWEEN)
        parts.append(text_at("label", left + wide / 2, _TOP - 8, "middle", f"{count(size)} parameters"))
        for tick in nice_ticks(low, high, 6):
            parts.append(across("grid", left, left + wide, y(tick)))
            if not panel:
                parts.append(text_at("tick", left - 6, y(tick) + 4, "end", f"{tick:.4g}"))
        parts += [text_at("tick", x(panel, tokens), base + 18, "middle", count(tokens)) for tokens in budgets]
        for colour, arm in zip(_colours(fit.arms), fit.arms, strict=True):
            law = fit.law(arm)
            at = np.geomspace(budgets[0], budgets[-1], _STEPS)
            path = "L".join(f"{x(panel, tokens):.1f} {y(law.loss(size, tokens)):.1f}" for tokens in at)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-opacity="0.7"/>')
            for point in fit.points:
                if (point.arm, point.parameters) == (arm, size):
                    said = f"{arm}, {count(size)} parameters, {count(point.tokens)} tokens: {point.loss:.4f}"
                    place = f'cx="{x(panel, point.tokens):.1f}" cy="{y(point.loss):.1f}"'
                    parts.append(f'<circle {place} r="3.5" fill="{colour}"><title>{escape(said)}</title></circle>')
    parts.append(text_at("axis", _LEFT + (_WIDTH - _LEFT) / 2, _HEIGHT - 6, "middle", "tokens, logarithmic"))
    return drawn.picture(parts, _WIDTH, _HEIGHT, asked.question)


def _key(arms: list[str]) -> Iterable[str]:
    left = 8.0
    for colour, arm in zip(_colours(arms), arms, strict=True):
        yield f'<circle cx="{left + 5:.1f}" cy="18" r="4" fill="{colour}"/>'
        yield text_at("label", left + 14, 22, "start", arm)
        left += 40 + 7 * len(arm)


def _colours(arms: list[str]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(arms))]
