"""Rounds that a budget is enough for, by hand."""

from __future__ import annotations

import pytest

from diloco.core.run.run_length import rounds_each, steps_each, too_short
from diloco.settings.presets import run_settings

STEP_TOKENS = 16 * 128  # of the built-in task's default
BUDGET = 7_500_000  # by default, of four learners: 7,500,000 / (4 * 2048) = 915.5 steps each


@pytest.mark.parametrize(("preset", "rounds"), [("decoupled", 38), ("streaming", 9), ("diloco", 1), ("data-parallel", 915)])
def test_the_rounds_of_each_preset_with_the_default_budget(preset: str, rounds: int) -> None:
    settings = run_settings(preset, {"tokens": BUDGET})
    assert steps_each(settings, STEP_TOKENS) == 915
    assert rounds_each(settings, STEP_TOKENS) == rounds
    assert (too_short(settings, STEP_TOKENS) is None) == (rounds >= 10)


def test_a_short_run_is_told_its_rounds_and_what_to_set() -> None:
    said = too_short(run_settings("diloco", {"tokens": BUDGET}), STEP_TOKENS)
    assert said == (
        "the run has 1 full round of each fragment: tokens = 7500000 are 915 steps of each learner, and a round comes every "
        "round.steps = 500; set more tokens or fewer round.steps, for 10 rounds or more"
    )


def test_ten_rounds_are_enough() -> None:
    exactly = run_settings("diloco", {"tokens": 10 * 500 * 4 * STEP_TOKENS})
    assert too_short(exactly, STEP_TOKENS) is None
    assert too_short(exactly.model_copy(update={"tokens": exactly.tokens - 1}), STEP_TOKENS) is not None
