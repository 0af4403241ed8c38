"""When a learner says how far it is (:mod:`diloco.core.learner.heartbeats`); times worked out by hand."""

from __future__ import annotations

from diloco.core.learner.accounts import MemberTraffic, StepDone
from diloco.core.learner.heartbeats import HeartbeatSchedule
from diloco.core.learner.learner import Learner
from diloco.settings.run import RunSettings


class Pace:
    """A learner that takes steps of the same length, and its heartbeats."""

    def __init__(self, step_s: float, steps: int, heartbeat_s: float = 0.5) -> None:
        given = {"round": {"steps": steps}, "liveness": {"heartbeat_s": heartbeat_s}, "learners": 1, "tokens": 10**9}
        self.learner = Learner("a", "learner", "", 1, RunSettings.model_validate(given))
        self.learner.activity = "stepping"
        self.heartbeats, self.step_s, self.now_s = HeartbeatSchedule(), step_s, 0.0

    def send(self) -> None:
        self.heartbeats.note_sent(self.learner.heartbeat([], 1, MemberTraffic(0, 0, 0)), self.now_s)

    def step(self) -> bool:
        """Take a step; return whether a heartbeat follows it, which is sent at once."""
        self.learner.book(StepDone(1, None, 0, 1.0, self.step_s, 0.0))
        self.now_s += self.step_s
        asked = self.heartbeats.ask(self.learner, self.now_s)
        if asked:
            self.send()
        return asked

    def heard(self, steps: int) -> list[int]:
        return [number for number in range(1, steps + 1) if self.step()]


def test_long_steps_are_said_one_by_one() -> None:
    """Two more steps of 0.25 s would be over only at 0.75 s, later than a heartbeat is due."""
    pace = Pace(0.25, 100)
    pace.send()
    assert pace.heard(4) == [1, 2, 3, 4]


def test_short_steps_are_said_every_half_second() -> None:
    """After 0.375 s two more steps of 1/16 s are over at 0.5 s, in time; after 0.4375 s they are not."""
    pace = Pace(1 / 16, 1000)
    pace.send()
    assert pace.heard(21) == [7, 14, 21]


def test_a_short_cycle_is_said_four_times() -> None:
    """A cycle of 64 steps of 1/64 s is 1 s, and a quarter of it 16 steps: 15 after the last, two more would be 17."""
    pace = Pace(1 / 64, 64)
    pace.send()
    assert pace.heard(45) == [15, 30, 45]


def test_all_but_stepping_is_said_at_once() -> None:
    pace = Pace(1 / 64, 64)
    pace.send()
    assert not pace.step()
    pace.learner.activity = "waiting"
    assert pace.step()
    assert pace.step()
    pace.learner.activity = "stepping"
    assert pace.step()
    assert not pace.step()


def test_one_that_is_coming_is_not_asked_for_again() -> None:
    """The loop's thread makes it, with the steps as they are then."""
    pace = Pace(0.25, 100)
    assert pace.heartbeats.ask(pace.learner, 0.25)
    assert not pace.heartbeats.ask(pace.learner, 0.5)
    pace.send()
    assert pace.heartbeats.ask(pace.learner, 0.75)


def test_without_a_boundary_one_is_due_by_time() -> None:
    """A step of 60 s is said to be under way every half second."""
    pace = Pace(60.0, 100)
    assert pace.heartbeats.left_s(pace.learner, 3.0) < 0
    pace.now_s = 3.0
    pace.send()
    assert pace.heartbeats.left_s(pace.learner, 3.25) == 0.25
