"""Moving averages of a run's pace, and the times of rounds that follow from them: first rounds, grace windows."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from diloco.settings.run import RoundSettings

RECENT = 32  # steps of a learner that say how long its long ones are
HIGH = 0.9  # so many of them are no longer


@dataclass
class MovingAverage:
    """Exponential moving average, exact for the first value; ``weight`` is the newest value's share."""

    weight: float = 0.2
    value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self.weight * (value - self.value)

    def get(self, default: float = 0.0) -> float:
        """Return the average so far, or ``default`` before the first value."""
        return default if self.value is None else self.value


@dataclass
class Recent:
    """The newest values, and how long the longest of them usually are."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, value: float) -> None:
        self.values.append(value)

    def median(self) -> float | None:
        """Return the lower median; None before the first value."""
        return sorted(self.values)[(len(self.values) - 1) // 2] if self.values else None

    def high(self) -> float | None:
        """Return the value that nine of ten do not exceed; None before the first one."""
        known = sorted(self.values)
        return known[math.ceil(HIGH * len(known)) - 1] if known else None


def grace_s(settings: RoundSettings, step_s: float, quorum_s: float, sync_s: float) -> float:
    """Return the grace window of a round, in seconds: the longest time that it stays open after its quorum.

    It is ``gamma * (tau * xi_step - xi_quorum - xi_sync)``, the part of the overlap budget that the quorum and the
    synchronisation leave (Decoupled DiLoCo, arXiv 2604.21428, equation 3). It is never negative. With ``grace_capped`` it is
    at most one step (section 5.1). It is at most half of a cycle, since a longer one would miss the fragment's next slot.
    ``sync_s`` is the time of the merge, of storing the version, and of its way to the learners. The paper's xi_step is a moving
    average. Here ``step_s`` is to be a *long* step: where steps change in length, as on a machine that is shared, a learner
    that is in the middle of one answers too late for a window made of mean steps.
    """
    slack_s = settings.overlap_steps * step_s - quorum_s - sync_s
    half_cycle = settings.steps / 2
    most_steps = min(1.0, half_cycle) if settings.grace_capped else half_cycle
    return min(max(0.0, settings.grace_factor * slack_s), most_steps * step_s)


def first_due_steps(settings: RoundSettings, fragment: int, fragments: int) -> int:
    """Return the inner steps before a fragment's first round: spread over one interval, so that traffic is even at once."""
    return max(1, math.ceil(settings.steps * (fragment + 1) / fragments))
