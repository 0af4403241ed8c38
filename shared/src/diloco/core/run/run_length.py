"""The rounds that a run's token budget is enough for, known once the tokens of a learner's step are."""

from __future__ import annotations

from diloco.settings.run import RunSettings

# of a run's tokens: an evaluator draws text there, which the run's summary shows beside the last text
SAMPLE_PARTS = (0.1, 0.5)
FEW_ROUNDS = 10  # an outer momentum of 0.9, the papers' value, gathers over ten versions


def steps_each(settings: RunSettings, step_tokens: int) -> int:
    """Return the steps that each learner takes, if all take as many, of ``step_tokens`` tokens each."""
    return settings.tokens // (settings.learners * step_tokens)


def rounds_each(settings: RunSettings, step_tokens: int) -> int:
    """Return the rounds that each fragment has; the closing one, which a shorter interval may end, is not counted."""
    return steps_each(settings, step_tokens) // settings.round.steps


def too_short(settings: RunSettings, step_tokens: int) -> str | None:
    """Return what to tell a user whose run has few rounds; None: it has enough of them."""
    steps, rounds = steps_each(settings, step_tokens), rounds_each(settings, step_tokens)
    if rounds >= FEW_ROUNDS:
        return None
    plural = "" if rounds == 1 else "s"
    return (
        f"the run has {rounds} full round{plural} of each fragment: tokens = {settings.tokens} are {steps} steps of each "
        f"learner, and a round comes every round.steps = {settings.round.steps}; set more tokens or fewer round.steps, "
        f"for {FEW_ROUNDS} rounds or more"
    )
