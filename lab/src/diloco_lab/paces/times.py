"""A learner's times in a trial: how long its steps and its offers take, when it begins, and when it is away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from diloco_lab.simulator.lifetime import SHORTEST

if TYPE_CHECKING:
    from diloco_lab.paces.slices import SlicedMachine

AT_ONCE = (0.0,)
DRAWN = 4096  # times of a kind, before they are repeated


@dataclass(frozen=True)
class TimedStep:
    """How long a step takes, and how much of that is work: ``useful_s``, less the part of slices that are lost.

    ``share``: of the learner's slices, those whose rows count.
    """

    step_s: float
    useful_s: float
    share: float = 1.0


@dataclass(frozen=True)
class VirtualPace:
    """All in virtual seconds. Steps and offers go through their times in order, and begin again after the last.

    Attributes:
        steps: of one step after another, waits for others left out.
        offers: how much longer an offer takes from its learner to the server than any other message.
        begins_s: when its process joins the run.
        away: times (from, until), in order: its process is killed, and another one of its name joins.
        stalls: (from, for so long), in order: the step under way takes that much longer.
        machine: slices that fail, whose times are those of its steps; None: it has none.
    """

    steps: Sequence[float]
    offers: Sequence[float] = AT_ONCE
    begins_s: float = 0.0
    away: Sequence[tuple[float, float]] = ()
    stalls: Sequence[tuple[float, float]] = ()
    machine: SlicedMachine | None = None


def steady(step_s: float) -> VirtualPace:
    """Return the pace of a machine whose every step takes as long."""
    return VirtualPace([step_s])


def varying(step_s: float, spread: float, offers_s: float, seed: Sequence[int]) -> VirtualPace:
    """Return the pace of a machine whose times vary by chance.

    Its steps are drawn from a normal distribution, of which ``spread`` is the relative deviation, and its offers evenly
    between 0 and ``offers_s``.
    """
    if not spread and not offers_s:
        return steady(step_s)
    rng = np.random.default_rng(seed)
    factors = np.maximum(rng.normal(1.0, spread, DRAWN if spread else 1), SHORTEST)
    offers = rng.uniform(0.0, offers_s, DRAWN if offers_s else 1)
    return VirtualPace(tuple((step_s * factors).tolist()), tuple(offers.tolist()))


@dataclass(frozen=True)
class Paces:
    """The times of all of a trial's processes; of ``learners`` there is one each.

    ``commits``: how much longer a syncer's record takes to the server than any other message, one after another.
    ``dropped``: the share of offers that are lost on their way, at random.
    ``whole``: the slices of all learners as one machine, which data-parallel training needs; None: there are none.
    """

    learners: Sequence[VirtualPace]
    commits: Sequence[float] = AT_ONCE
    whole: SlicedMachine | None = None
    dropped: float = 0.0


class Clock:
    """Gives out times one after another, without end, across the lives of a process."""

    def __init__(self, times_s: Sequence[float]) -> None:
        self._times_s: Iterator[float] = cycle(times_s)

    def next_s(self) -> float:
        """Return the next of the times."""
        return next(self._times_s)
