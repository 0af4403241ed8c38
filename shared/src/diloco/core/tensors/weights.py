"""Weights of learners' outer gradients in a merge."""

from __future__ import annotations

from typing import Literal


def weight(tokens: int, steps: int, rule: Literal["quality", "tokens", "equal"]) -> float:
    """Return the weight of a displacement of ``tokens`` tokens in ``steps`` inner steps.

    ``quality``: tokens * tokens / steps, quantity times quality (Decoupled DiLoCo, arXiv 2604.21428, algorithm.md section
    3). Any rule gives 0 for no steps or no tokens: a learner that did nothing has no weight.
    """
    if steps == 0 or tokens == 0:
        return 0.0
    if rule == "quality":
        return tokens * tokens / steps
    return float(tokens) if rule == "tokens" else 1.0
