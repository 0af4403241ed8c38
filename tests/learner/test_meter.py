"""A learner's time, dealt out: every case worked out by hand, in seconds of a clock that no test waits for."""

from __future__ import annotations

import random

import pytest

from diloco_learner.run.meter import Meter, MeteredSpan, Times

READY = MeteredSpan(0.0, 0.0)  # the batch was there


def measured(*steps: tuple[float, float, MeteredSpan]) -> Times:
    meter = Meter()
    for called_s, ended_s, batch in steps:
        meter.add(called_s, ended_s, batch)
    return meter.take()


def test_steps_that_are_queued_leave_nothing_between_them() -> None:
    # called at 0, 8 and 18, while the one before runs; they end at 10, 20 and 30
    assert measured((0, 10, READY), (8, 20, READY), (18, 30, READY)) == Times(busy_s=30, blocked_s=0, data_s=0)


def test_a_late_boundary_is_blocked_time() -> None:
    # the device is idle from 10 to 13
    assert measured((0, 10, READY), (13, 23, READY)) == Times(busy_s=20, blocked_s=3, data_s=0)


def test_a_step_that_runs_inside_its_dispatch_is_busy_all_the_while() -> None:
    # The call at 11 returns at 21, when the step has ended: only from 10 to 11 nothing ran. Counted from its return,
    # the step would have taken no time, and 11 s would be blocked.
    assert measured((0, 10, READY), (11, 21, READY)) == Times(busy_s=20, blocked_s=1, data_s=0)


def test_a_dispatch_that_waits_for_the_step_before_is_not_counted_twice() -> None:
    # the call at 4 returns at 10 or later, wherever the first step keeps it; the second runs from 10 to 20
    assert measured((0, 10, READY), (4, 20, READY)) == Times(busy_s=20, blocked_s=0, data_s=0)


def test_waiting_for_a_version_is_blocked_and_waiting_for_a_batch_is_not() -> None:
    # the first ends at 10; its successor's batch is made from 1 to 16; the boundary takes until 17
    assert measured((0, 10, READY), (17, 27, MeteredSpan(1, 16))) == Times(busy_s=20, blocked_s=1, data_s=6)
    # the batch was ready at 2; no step was allowed until 40
    assert measured((0, 10, READY), (40, 50, MeteredSpan(1, 2))) == Times(busy_s=20, blocked_s=30, data_s=0)


def test_a_pause_is_nobodys() -> None:
    meter = Meter()
    meter.add(0, 10, READY)
    meter.pause()
    meter.add(70, 80, READY)
    assert meter.take() == Times(busy_s=20, blocked_s=0, data_s=0)
    assert meter.take() == Times()


def test_a_step_takes_the_time_since_the_one_before_it() -> None:
    meter = Meter()
    assert meter.began_s(3) == 3
    assert meter.add(3, 10, READY) == 7
    assert (meter.began_s(8), meter.began_s(12)) == (10, 12)
    assert meter.add(8, 15, READY) == 5
    assert meter.add(16, 20, READY) == 4


@pytest.mark.parametrize("seed", range(20))
def test_all_kinds_together_are_the_time_that_passed(seed: int) -> None:
    """Whatever the order of calls, returns, ends and batches is."""
    chance, meter, at_s, ended_s, busy_s = random.Random(seed), Meter(), 0.0, 0.0, 0.0
    for _ in range(100):
        batch = MeteredSpan(at_s, at_s + chance.choice([0.0, 0.5, 3.0]))
        called_s = batch.ended_s + chance.choice([0.0, 0.1, 4.0])
        if not ended_s:
            first_s = called_s
        returned_s = called_s + chance.choice([0.001, 1.0, 2.0])
        began_s = max(called_s, ended_s)
        ended_s = began_s + chance.uniform(0.1, 2.0)
        meter.add(called_s, ended_s, batch)
        busy_s += ended_s - began_s
        at_s = max(returned_s, ended_s - 1.0)
    times = meter.take()
    assert times.busy_s == pytest.approx(busy_s)
    assert min(times.blocked_s, times.data_s) >= 0
    assert times.busy_s + times.blocked_s + times.data_s == pytest.approx(ended_s - first_s)
