"""The picture of fitted losses: a panel for each size, and in it each way of training's losses and law by tokens."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import numpy as np

from diloco_lab.experiment.curves import ScalingFit
from diloco_report.units import count

COLOURS = ("#0f766e", "#c2410c", "#3b6fd4", "#7c3aed", "#a16207", "#be185d")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _BETWEEN = 900, 380, 46, 62, 40, 16
_STEPS = 24  # of a law's line


def picture(fit: ScalingFit) -> str:
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

    parts = list(_key(fit.arms))
    for panel, size in enumerate(sizes):
        left = _LEFT + panel * (wide + _BETWEEN)
        parts.append(_text(left + wide / 2, _TOP - 8, f"{count(size)} parameters", "middle"))
        for tick in np.linspace(low, high, 6)[1:-1]:
            parts.append(f'<line x1="{left:.1f}" x2="{left + wide:.1f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
            if not panel:
                parts.append(_text(left - 6, y(tick) + 4, f"{tick:.2f}", "end"))
        parts += [_text(x(panel, tokens), base + 18, count(tokens), "middle") for tokens in budgets]
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
    parts.append(_text(_LEFT + (_WIDTH - _LEFT) / 2, _HEIGHT - 6, "tokens", "middle"))
    opened = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">'
    )
    return "".join([opened, f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>', *parts, "</svg>\n"])


def _key(arms: list[str]) -> Iterable[str]:
    left = float(_LEFT)
    for colour, arm in zip(_colours(arms), arms, strict=True):
        yield f'<circle cx="{left + 5:.1f}" cy="18" r="4" fill="{colour}"/>'
        yield _text(left + 14, 22, arm, "start")
        left += 40 + 7 * len(arm)


def _colours(arms: list[str]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(arms))]


def _text(x: float, y: float, said: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333">{escape(said)}</text>'
