"""The steps of learners in virtual time: each by its own clock, or all together, as in data-parallel training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diloco_lab.paces.slices import SlicedClock
from diloco_lab.paces.stalls import lengthened
from diloco_lab.paces.times import Clock, Paces, TimedStep, VirtualPace


class StepClock(Protocol):
    """Gives out a learner's steps one after another."""

    def step(self, now_s: float) -> TimedStep:
        """Return the step that begins now."""


class PaceClock:
    """Gives out the steps of a pace: its times in order, lengthened by the stalls that they meet."""

    def __init__(self, pace: VirtualPace) -> None:
        self._clock, self._stalls = Clock(pace.steps), pace.stalls

    def step(self, now_s: float) -> TimedStep:
        """Return the step that begins now."""
        useful_s = self._clock.next_s()
        return TimedStep(lengthened(useful_s, now_s, self._stalls), useful_s)


def clock_of(pace: VirtualPace) -> StepClock:
    """Return the clock of a learner's steps."""
    return PaceClock(pace) if pace.machine is None else SlicedClock(pace.machine)


@dataclass(frozen=True)
class JointStep:
    """A step that learners take together, as long as the slowest one's; ``present``: the learners that take part."""

    timed: TimedStep
    present: Sequence[int]


class JointClock:
    """Gives out the steps that all learners which are there take together, and wait for each other.

    A stall of one stops all. So does a slice that fails: all slices are one machine.
    """

    def __init__(self, paces: Paces) -> None:
        self._paces = paces.learners
        self._whole = None if paces.whole is None else SlicedClock(paces.whole)
        self._clocks = [clock_of(pace) for pace in paces.learners]

    def step(self, now_s: float) -> JointStep:
        """Return the step that begins now, or when the next learner is there."""
        present = self._present(now_s)
        if not present:
            return self._step_later(now_s)
        if self._whole is not None:
            return JointStep(self._whole.step(now_s), present)
        steps = [self._clocks[index].step(now_s) for index in present]
        useful_s, share = (sum(getattr(step, of) for step in steps) / len(steps) for of in ("useful_s", "share"))
        return JointStep(TimedStep(max(step.step_s for step in steps), useful_s, share), present)

    def _step_later(self, now_s: float) -> JointStep:
        begins = [pace.begins_s for pace in self._paces] + [until_s for pace in self._paces for _, until_s in pace.away]
        next_s = min(at_s for at_s in begins if at_s > now_s)
        later = self.step(next_s)
        timed = later.timed
        return JointStep(TimedStep(timed.step_s + next_s - now_s, timed.useful_s, timed.share), later.present)

    def _present(self, now_s: float) -> list[int]:
        return [index for index, pace in enumerate(self._paces) if _is_there(pace, now_s)]


def _is_there(pace: VirtualPace, now_s: float) -> bool:
    return pace.begins_s <= now_s and not any(from_s <= now_s < until_s for from_s, until_s in pace.away)


def present_s(pace: VirtualPace, until_s: float) -> float:
    """Return how long a learner is there in the first ``until_s``."""
    away_s = sum(max(0.0, min(back_s, until_s) - min(from_s, until_s)) for from_s, back_s in pace.away)
    return max(0.0, until_s - pace.begins_s) - away_s
