"""Work that comes in bursts: how many versions it makes, whatever the number of learners."""

from __future__ import annotations

import pytest

from diloco.testing import VirtualRun

STEP_S = 0.8
WATCHED_STEPS = 20
STEP_TOKENS = 16


@pytest.mark.parametrize("learners", [2, 8])
def test_learners_whose_steps_end_one_after_another_share_versions(learners: int) -> None:
    """A version of the only fragment is due in each step: as many are made with eight learners as with two."""
    settings = {"learners": learners, "fragments.count": 1, "round.steps": 1, "tokens": 10**9}
    with VirtualRun(settings) as run:
        for index in range(learners):
            run.add_toy(f"learner-{index}", step_s=STEP_S, tokens=STEP_TOKENS, founds=not index)
            run.advance(STEP_S / learners)
        run.advance(until=lambda: min(run.versions(), default=0) >= 3)
        names = [f"learner-{index}" for index in range(learners)]
        before, merged_before = run.versions()[0], [int(run.merged(name)[0]) for name in names]
        run.advance(WATCHED_STEPS * STEP_S)
        made = run.versions()[0] - before
        assert WATCHED_STEPS / 2 <= made <= WATCHED_STEPS + 1
        merged = [int(run.merged(name)[0]) - tokens for name, tokens in zip(names, merged_before, strict=True)]
        assert min(merged) >= STEP_TOKENS * WATCHED_STEPS / 2  # also of one whose steps end just as rounds are merged
        assert sum(merged) >= 0.9 * learners * STEP_TOKENS * WATCHED_STEPS


def test_a_learner_whose_steps_take_longer_than_a_cycle_is_merged() -> None:
    """A version comes in each of its steps, and each of its steps is in one."""
    cycle_s, watched = 4 * STEP_S, 12
    settings = {"learners": 2, "fragments.count": 1, "round.steps": 4, "tokens": 10**9}
    with VirtualRun(settings) as run:
        run.add_toy("fast", step_s=STEP_S, tokens=STEP_TOKENS, founds=True)
        run.add_toy("slow", step_s=1.1 * cycle_s, tokens=STEP_TOKENS)
        run.advance(until=lambda: min(run.versions(), default=0) >= 5)
        before = int(run.merged("slow")[0])
        run.advance(watched * 1.1 * cycle_s)
        assert run.merged("slow")[0] - before >= 0.8 * watched * STEP_TOKENS
