"""Moving averages of a run's pace, and what follows from them: when a round is due, how long its grace window is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.settings import RoundSettings


@dataclass
class Average:
    """Exponential moving average, exact for the first value; ``weight`` is the newest value's share."""

    weight: float = 0.2
    value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self.weight * (value - self.value)

    def get(self, default: float = 0.0) -> float:
        """The average so far, or ``default`` before the first value."""
        return default if self.value is None else self.value


def grace_s(settings: RoundSettings, step_s: float, quorum_s: float, sync_s: float) -> float:
    """How long a round may stay open after its quorum, in seconds.

    ``gamma * (tau * xi_step - xi_quorum - xi_sync)``, never negative (Decoupled DiLoCo, arXiv 2604.21428; algorithm.md
    section 3): what is left of the overlap budget once the quorum is there and the version still has to travel.
    """
    return max(0.0, settings.grace_factor * (settings.overlap_steps * step_s - quorum_s - sync_s))


def first_due_steps(settings: RoundSettings, fragment: int, fragments: int) -> int:
    """Inner steps before a fragment's first round: spread over one interval, so that traffic is even from the start."""
    return max(1, math.ceil(settings.steps * (fragment + 1) / fragments))
