"""When a learner's next checkpoint is due: so late that saving slows its steps by two parts of a hundred at most.

Bytes a second differ by a factor of a hundred between machines, and with what else they do. So nothing is assumed of them: the
steps themselves say what a saving cost. Their mean time between two savings is the usual one. The time beyond it, from the
boundary of a copy to the first boundary after the saving has ended, is how long steps were held up: by the copy, or by a thread
that took cores, memory bandwidth or a lock from them. Loans pause likewise, each kind by itself:
or peers that ask could hold up all steps.
"""

from __future__ import annotations

import math

from diloco.wire.process_messages import Purpose

COST_SHARE = 0.02  # of the time, that steps may be held up
PAUSE_MAX_S = 3600.0  # also where a process was stopped while it saved


class Pacing:
    """Due every ``interval_s`` (0: never), or later where steps were held up. Times are seconds of one clock."""

    def __init__(self, interval_s: float, now_s: float, step: int) -> None:
        self.interval_s = interval_s
        self._due_s = now_s + interval_s
        self._since_s, self._step = now_s, step  # of the newest begin or end
        self._step_s: float | None = None  # usual time of a step; None: no step has been taken between two savings
        self._lending = False  # a loan is being saved
        self._lends_after_s = -math.inf

    def due(self, now_s: float) -> bool:
        """Whether the next own checkpoint is to be begun."""
        return self.interval_s > 0 and now_s >= self._due_s

    def may_lend(self, now_s: float) -> bool:
        """Whether a loan may be begun."""
        return now_s >= self._lends_after_s

    def begin(self, now_s: float, step: int, purpose: Purpose) -> None:
        """Note that a copy is made at the boundary after ``step`` steps; the interval counts from one of its own."""
        if purpose == "own":
            self._due_s = now_s + self.interval_s
        self._lending = purpose == "loan"
        if step > self._step:
            self._step_s = (now_s - self._since_s) / (step - self._step)
        self._since_s, self._step = now_s, step

    def end(self, now_s: float, step: int) -> tuple[float, float]:
        """Note at a boundary that the saving has ended; no checkpoint is due before its cost is a small enough share.

        Return how long steps were held up, and the pause that follows from it, in seconds.
        """
        usual_s = 0.0 if self._step_s is None else (step - self._step) * self._step_s
        held_up_s = 0.0 if self._step_s is None else max(0.0, now_s - self._since_s - usual_s)
        pause_s = min(held_up_s / COST_SHARE, PAUSE_MAX_S)
        self._due_s = max(self._due_s, now_s + pause_s)
        if self._lending:
            self._lends_after_s = now_s + pause_s
        self._since_s, self._step = now_s, step
        return held_up_s, pause_s
