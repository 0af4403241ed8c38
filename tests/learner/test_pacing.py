"""When checkpoints are due, worked out by hand, in seconds of a clock that no test waits for."""

from __future__ import annotations

import pytest

from diloco_learner.run.pacing import Pacing


def test_checkpoints_that_hold_nothing_up_come_at_the_interval() -> None:
    pacing = Pacing(10.0, 100.0, 5)
    assert not pacing.due(109.9)
    assert pacing.due(110.0)
    pacing.begin(110.0, 25, "own")  # 20 steps in 10 s: half a second each
    assert pacing.end(114.0, 33) == (0.0, 0.0)  # 8 steps in 4 s
    assert not pacing.due(119.9)
    assert pacing.due(120.0)


def test_the_next_one_waits_for_fifty_times_what_steps_were_held_up() -> None:
    pacing = Pacing(10.0, 0.0, 0)
    pacing.begin(10.0, 20, "own")  # half a second a step
    assert pacing.end(14.0, 25) == (1.5, 75.0)  # 5 steps take 2.5 s of the 4 s
    assert not pacing.due(88.9)
    assert pacing.due(89.0)


def test_saving_for_others_is_paid_for_too() -> None:
    pacing = Pacing(10.0, 0.0, 0)
    pacing.begin(5.0, 5, "loan")  # lent to a peer: a second a step
    assert pacing.end(7.0, 6) == (1.0, 50.0)
    assert not pacing.due(56.0)
    assert pacing.due(57.0)
    assert not pacing.may_lend(56.0)
    assert pacing.may_lend(57.0)


def test_a_process_that_was_stopped_while_it_saved_saves_again_within_the_hour() -> None:
    pacing = Pacing(10.0, 0.0, 0)
    pacing.begin(10.0, 10, "own")
    assert pacing.end(10_011.0, 11) == (10_000.0, 3600.0)
    assert pacing.due(13_611.0)


def test_a_cost_that_is_not_known_puts_nothing_off() -> None:
    pacing = Pacing(1.0, 0.0, 7)
    pacing.begin(1.0, 7, "own")  # no step was taken before it
    assert pacing.end(50.0, 8) == (0.0, 0.0)
    assert pacing.due(50.0)
    pacing.begin(50.0, 8, "own")  # none between the two: what a step takes is still not known
    assert pacing.end(60.0, 9) == (0.0, 0.0)


def test_no_interval_is_never() -> None:
    assert not Pacing(0.0, 0.0, 0).due(10.0**9)


@pytest.mark.parametrize("held_up_s", [0.1, 1.0, 20.0])
def test_the_share_of_the_time_stays_within_two_parts_of_a_hundred(held_up_s: float) -> None:
    """A thousand savings, one a second wide save for what they hold up, with steps of a tenth of a second."""
    pacing, now_s, held_s, step = Pacing(10.0, 0.0, 0), 0.0, 0.0, 0
    for _ in range(1000):
        while not pacing.due(now_s):
            now_s, step = now_s + 0.1, step + 1
        pacing.begin(now_s, step, "own")
        now_s, step, held_s = now_s + 1.0 + held_up_s, step + 10, held_s + held_up_s
        pacing.end(now_s, step)
    assert held_s <= 0.02 * now_s + held_up_s  # the last one is not paid for yet
