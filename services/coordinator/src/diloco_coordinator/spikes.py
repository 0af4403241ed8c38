"""Spikes of a learner's loss: far above what it was, by the spread of what it was.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median

NEWEST = 5  # steps that say where a loss is: their median, so two that are high are no spike
USUAL = 50  # steps before them that say what is usual, of which there have to be LEAST
LEAST = 10
BEGINS = 6.0  # spreads above the usual loss that a spike begins at
ENDS = 3.0  # and those at which it is over
LEAST_SPREAD = 1 / 20  # of the usual loss: however even it was, a spike is 30 % above


class Spike:
    """Whether one learner's loss is in a spike.

    The usual loss is a mean, and the spread a standard deviation: where losses are of two kinds, as those of a mix of data may
    be, both kinds count. A spike is over when the loss is back near what was usual before it, however long it lasts.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=USUAL + NEWEST)
        self._over_at: float | None = None  # while there is a spike: the loss at which it is over

    def __bool__(self) -> bool:
        return self._over_at is not None

    def note(self, loss: float) -> None:
        """Take in the loss of a step."""
        self._losses.append(loss)
        losses = list(self._losses)
        before, newest = losses[:-NEWEST], median(losses[-NEWEST:])
        if self._over_at is not None:
            self._over_at = self._over_at if newest > self._over_at else None
        elif len(before) >= LEAST:
            usual = fmean(before)
            deviation = math.sqrt(fmean((each - usual) ** 2 for each in before))  # statistics.pstdev takes eight times as long
            spread = max(deviation, LEAST_SPREAD * abs(usual))
            self._over_at = usual + ENDS * spread if newest > usual + BEGINS * spread else None
