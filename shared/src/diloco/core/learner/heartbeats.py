"""When a learner says how far it is: often enough for rounds to open in time, and not after each of many short steps."""

from __future__ import annotations

import math

from diloco.core.learner.learner import Learner
from diloco.wire.control import Heartbeat

A_CYCLE = 4  # heartbeats within the steps between two rounds of a fragment: owners see in time that it may open
SPARE_STEPS = 2.0  # a heartbeat is sent this many steps early, before the timer sends one in the middle of a step


class HeartbeatSchedule:
    """The heartbeats of one learner.

    While it steps, they are sent at boundaries, so that each says when a step has ended, and owners extrapolate in between
    (:mod:`diloco.core.learner.slots`). One that does anything else says so at each boundary.
    """

    def __init__(self) -> None:
        self._sent_s = -math.inf
        self._state = ""  # as it was sent last
        self._is_coming = False  # one is about to be made

    def note_sent(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Note that a heartbeat was made, which is sent now."""
        self._sent_s, self._state, self._is_coming = now_s, heartbeat.state, False

    def ask(self, learner: Learner, now_s: float) -> bool:
        """Return whether a heartbeat is to be made after the boundary that has just passed: it is due, and none is coming."""
        if self._is_coming or not self._is_due(learner, now_s):
            return False
        self._is_coming = True
        return True

    def _is_due(self, learner: Learner, now_s: float) -> bool:
        step_s = learner.accounts.step_average.get()
        if not step_s or self._state != "stepping" or learner.activity != "stepping":
            return True
        settings = learner.in_force.settings
        interval_s = min(settings.liveness.heartbeat_s, settings.round.steps * step_s / A_CYCLE)
        return now_s + SPARE_STEPS * step_s > self._sent_s + interval_s

    def left_s(self, learner: Learner, now_s: float) -> float:
        """Return the seconds until a heartbeat is due without a boundary, 0 or less if it is."""
        return self._sent_s + learner.in_force.settings.liveness.heartbeat_s - now_s
