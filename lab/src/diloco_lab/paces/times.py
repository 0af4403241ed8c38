"""A learner's times in a trial: how long its steps and its offers take, when it begins, and when it is away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

AT_ONCE = (0.0,)


@dataclass(frozen=True)
class VirtualPace:
    """All in virtual seconds. Steps and offers go through their times in order, and begin again after the last.

    Attributes:
        steps: of one step after another, waits for others left out.
        offers: how much longer an offer takes from its learner to the server than any other message.
        begins_s: when its process joins the run.
        away: times (from, until), in order: its process is killed, and another one of its name joins.
        stalls: (from, for so long), in order: the step under way takes that much longer.
    """

    steps: Sequence[float]
    offers: Sequence[float] = AT_ONCE
    begins_s: float = 0.0
    away: Sequence[tuple[float, float]] = ()
    stalls: Sequence[tuple[float, float]] = ()


def steady(step_s: float) -> VirtualPace:
    """Return the pace of a machine whose every step takes as long."""
    return VirtualPace([step_s])


@dataclass(frozen=True)
class Paces:
    """The times of all of a trial's processes; of ``learners`` there is one each.

    ``commits``: how much longer a syncer's record takes to the server than any other message, one after another.
    """

    learners: Sequence[VirtualPace]
    commits: Sequence[float] = AT_ONCE


class Clock:
    """Gives out times one after another, without end, across the lives of a process."""

    def __init__(self, times_s: Sequence[float]) -> None:
        self._times_s: Iterator[float] = cycle(times_s)

    def next_s(self) -> float:
        """Return the next of the times."""
        return next(self._times_s)
