"""Goodput: of all learners' time, a step was in flight; a learner that is down counts."""

from __future__ import annotations

import json

import pytest
from tests.made.heartbeats import learner_heartbeat
from tests.made.monitors import monitor

from diloco_coordinator.goodput import TrainedTime, goodput


def test_a_learner_that_is_down_counts_and_starting_does_too() -> None:
    made = monitor()
    assert made.goodput(0.0) is None
    for at_s in range(41):
        made.hear(learner_heartbeat("ann", at_s, busy_s=float(at_s)), float(at_s))
        if at_s <= 20:  # then it is killed
            made.hear(learner_heartbeat("bob", at_s, busy_s=float(at_s)), float(at_s))
    # 40 s of each: ann trained in all of them, bob in 20
    assert made.goodput(40.0) == 60 / 80
    # bob is back as another process, restored from a checkpoint of 15 s; it starts for 10 s, then trains for 10 s
    for at_s in range(40, 61):
        made.hear(learner_heartbeat("ann", at_s, busy_s=float(at_s)), float(at_s))
        state = "starting" if at_s < 50 else "stepping"
        busy_s = 15.0 + max(0, at_s - 50)
        made.hear(learner_heartbeat("bob", at_s, incarnation=2, state=state, busy_s=busy_s), float(at_s))
    assert made.goodput(60.0) == (60 + 20 + 10) / 120


def test_a_learner_that_trained_unheard_tells_it_when_it_is_back() -> None:
    made = monitor()
    made.hear(learner_heartbeat("ann", 0, busy_s=100.0), 0.0)  # what it did before it was heard is not of this time
    made.hear(learner_heartbeat("ann", 10, busy_s=110.0), 10.0)
    assert made.goodput(20.0) == 0.5  # its region is cut off
    made.hear(learner_heartbeat("ann", 38, busy_s=138.0), 40.0)
    assert made.goodput(40.0) == 38 / 40


def test_the_time_of_a_learner_ends_when_it_leaves() -> None:
    made = monitor()
    made.hear(learner_heartbeat("ann", 0), 0.0)
    made.hear(learner_heartbeat("ann", 10, busy_s=9.0, state="left"), 10.0)
    assert made.goodput(1000.0) == 0.9


def test_another_coordinator_goes_on_with_the_time() -> None:
    first, second = monitor(), monitor()
    first.hear(learner_heartbeat("ann", 0), 0.0)
    first.hear(learner_heartbeat("ann", 10, busy_s=10.0), 10.0)
    second.resume(json.loads(json.dumps(first.series(10.0))))
    assert second.goodput(20.0) == 0.5
    second.hear(learner_heartbeat("ann", 30, busy_s=30.0), 30.0)
    assert second.goodput(30.0) == 1.0


def test_series_of_an_older_version_have_the_activity() -> None:
    spans = [[0.0, 4.0, "starting"], [4.0, 9.0, "stepping"], [9.0, 10.0, "sending"], [15.0, 20.0, "stepping"]]
    time = TrainedTime.load({"activity": spans, "busy_fraction": 0.5})
    assert (time.first_s, time.last_s, time.trained_s, time.ended) == (0.0, 20.0, 5.5, False)
    assert goodput([time], 22.0) == 0.25
    assert TrainedTime.load({"activity": []}) == TrainedTime(0.0, 0.0)
    with pytest.raises(TypeError):
        TrainedTime.load({"activity": 3})


def test_a_learner_that_is_not_heard_has_no_rate_and_its_mean_step_is_trained_time_over_steps() -> None:
    made = monitor()
    for step in range(11):
        heartbeat = learner_heartbeat(
            "ann", step, tokens=100 * (step + 5), batch_tokens=100, step_s=3.0, busy_s=2.0 * step, blocked_s=0.5 * step
        )
        made.hear(heartbeat, 2.5 * step)
    ann = made.status(25.0)["learners"]["ann"]
    assert ann["tokens_per_s"] == pytest.approx(40.0)
    assert (ann["step_s"], ann["mean_step_s"]) == (3.0, 2.5)
    # it lost its checkpoint: its state has taken 10 steps, all its processes 15
    assert (ann["step"], ann["steps"]) == (10, 15)
    gone = made.status(25.0 + made.gone_s + 1)["learners"]["ann"]
    assert (gone["state"], gone["tokens_per_s"]) == ("gone", None)
