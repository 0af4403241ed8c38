"""Which fragments a boundary may pass over: of most of them nothing is due for many steps, and looking at all takes time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NOW = -math.inf


@dataclass
class QuietFragments:
    """By fragment, until when it gives a boundary nothing to do, unless something happens to it before.

    It is looked at from the learner's own step in ``steps`` on, or from the time in ``times_s`` on, whichever comes first.
    """

    steps: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def add(self) -> None:
        """Begin the next fragment, which the next boundary looks at."""
        self.steps.append(NOW)
        self.times_s.append(NOW)

    def clear(self) -> None:
        """Forget all fragments."""
        self.steps.clear()
        self.times_s.clear()

    def wake(self, index: int) -> None:
        """Have the next boundary look at a fragment."""
        self.steps[index] = NOW

    def rest(self, index: int, step: float, at_s: float) -> None:
        """Have boundaries pass over a fragment before ``step`` own steps, and before ``at_s``."""
        self.steps[index], self.times_s[index] = step, at_s

    def due(self, step: int, soon_s: float) -> list[int]:
        """Return the fragments that a boundary looks at, after ``step`` own steps and before ``soon_s``."""
        return [
            index
            for index, (quiet_step, quiet_s) in enumerate(zip(self.steps, self.times_s, strict=True))
            if step >= quiet_step or soon_s >= quiet_s
        ]
