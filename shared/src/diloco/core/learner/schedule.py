"""The learning rate over a run's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.settings.run import InnerSettings, RunSettings


@dataclass(frozen=True)
class Moment:
    """The place of a learner's step in its run."""

    tokens: int  # of all learners so far
    budget: int  # of the run, at present
    warming_steps: int | None = None  # since its optimizer state was reset in mid-run; None: it was not


def scheduled_rate(settings: InnerSettings, tokens_done: int, tokens_budget: int) -> float:
    """Return the learning rate after ``tokens_done`` tokens of all learners.

    Linear warm-up from 0, then a cosine to ``final_fraction`` of the peak at the end of the budget, and flat beyond it.
    """
    progress = min(max(tokens_done / tokens_budget, 0.0), 1.0)
    if progress < settings.warmup_fraction:
        return settings.learning_rate * progress / settings.warmup_fraction
    phase = (progress - settings.warmup_fraction) / (1 - settings.warmup_fraction)
    final = settings.final_fraction
    return settings.learning_rate * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * phase)))


def learning_rate(settings: RunSettings, at: Moment) -> float:
    """Return the rate of a step; 1 where learners offer gradients, since the outer rule has a rate of its own.

    Where a learner's optimizer state began fresh in mid-run, its rate rises over ``restart_warmup_steps`` of its own.
    """
    if settings.offers_gradients:
        return 1.0
    inner = settings.inner
    rate = scheduled_rate(inner, at.tokens, at.budget)
    if at.warming_steps is None or at.warming_steps >= inner.restart_warmup_steps:
        return rate
    return rate * (at.warming_steps + 1) / (inner.restart_warmup_steps + 1)
