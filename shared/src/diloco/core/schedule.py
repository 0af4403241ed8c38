"""The learning rate over a run's tokens."""

from __future__ import annotations

import math

from diloco.settings import InnerSettings


def scheduled_rate(settings: InnerSettings, tokens_done: int, tokens_budget: int) -> float:
    """Linear warm-up from 0, then a cosine to ``final_fraction`` of the peak at the end of the budget, and flat beyond it.

    ``tokens_done`` counts the tokens of all learners.
    """
    progress = min(max(tokens_done / tokens_budget, 0.0), 1.0)
    if progress < settings.warmup_fraction:
        return settings.learning_rate * progress / settings.warmup_fraction
    phase = (progress - settings.warmup_fraction) / (1 - settings.warmup_fraction)
    final = settings.final_fraction
    return settings.learning_rate * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * phase)))
