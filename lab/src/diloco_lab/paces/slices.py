"""Slices that a tape takes from learners in a trial: a learner goes on with the others, and its batches shrink.

The simulator's :class:`~diloco_lab.simulator.lifetime.Lifetime` is the clock, with the costs that were fitted to the published
goodput (:data:`~diloco_lab.published.published.FITTED`). So a trial loses the same time as a simulation of the same tape, and
its batches are as large as the slices that are left.

A tape is of all slices, whatever learners have them: it is recorded with ``diloco simulate run --learners 1``. So arms of any
number of learners, and data-parallel ones, meet the same failures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diloco.errors import SettingsError
from diloco_lab.paces import stalls
from diloco_lab.paces.times import TimedStep
from diloco_lab.published.published import FITTED
from diloco_lab.simulator.cluster import MICROS, NEVER_US, ClusterLearner, Costs, micros
from diloco_lab.simulator.lifetime import Fault, Lifetime
from diloco_ops.failures import Failure

KIND: Final = "chip_loss"
TIMES = 64  # that a tape is played: an arm that stands still for long needs more steps than a tape has
TARGET = re.compile(r"learner-0/slice-([0-9]{1,9})(/.+)?")


@dataclass(frozen=True)
class SlicedMachine:
    """Slices that take steps together, and what a tape does to them.

    ``scale``: virtual seconds for a second of the tape.
    """

    learner: ClusterLearner
    faults: tuple[Fault, ...]
    scale: float


class SlicedClock:
    """Gives out the steps of a machine of slices, across the lives of a process."""

    def __init__(self, machine: SlicedMachine) -> None:
        self._scale, self._slices = machine.scale, machine.learner.slices
        self._life = Lifetime(machine.learner, 0, machine.faults)

    def step(self, now_s: float) -> TimedStep:
        """Return the step that begins now, or once the machine has been put together again."""
        now_us = micros(now_s / self._scale)
        if now_us > self._life.now_us:
            self._life.wait(now_us)
        while (stretch := self._life.advance(1, NEVER_US)).kind != "stepping":
            pass
        share = stretch.last_slices / self._slices
        return TimedStep(
            step_s=max(0.0, self._scale * stretch.end_us / MICROS - now_s),
            useful_s=self._scale * stretch.step_us / MICROS * share,
            share=share,
        )


def machines(
    text: str, name: str, slices: int, steps_s: Sequence[float], scale: float, *, elastic: bool
) -> list[SlicedMachine]:
    """Return the machines that share ``slices`` evenly, one for each of ``steps_s``: its step, in seconds of the tape.

    What makes no whole slice for each of them is left out. A tape begins again after its end.

    Raises:
        SettingsError: the tape is damaged, or takes something else than slices that there are; there are too few slices.
    """
    each = slices // len(steps_s)
    if not each:
        raise SettingsError(f"pace.slices = {slices}: fewer than the {len(steps_s)} learners; each has at least one")

    def complaint(failure: Failure) -> str | None:
        index = _index(failure)
        if index is not None and index < slices:
            return None
        return (
            f"target {failure.target!r} is none of learner-0/slice-0 to learner-0/slice-{slices - 1}: record the tape of all "
            "slices with --learners 1, and set pace.slices to their number"
        )

    tape = stalls.decoded(text, name, {KIND}, complaint)
    faults: list[list[Fault]] = [[] for _ in steps_s]
    for again in range(TIMES):
        for failure in tape.failures:
            owner, index = divmod(_index(failure) or 0, each)
            if owner < len(steps_s):
                at_us = micros(again * tape.duration_s + failure.at_s)
                faults[owner].append(Fault(at_us, KIND, micros(failure.duration_s), index))
    costs = Costs(elastic, FITTED.downscale_s, FITTED.upscale_s, FITTED.gather_s, FITTED.restart_s)
    return [
        SlicedMachine(ClusterLearner(f"learner-{i}", slices=each, chips=1, step_s=step_s, costs=costs), tuple(own), scale)
        for i, (step_s, own) in enumerate(zip(steps_s, faults, strict=True))
    ]


def _index(failure: Failure) -> int | None:
    """Return the slice that a failure takes; None: its target is not one slice."""
    found = TARGET.fullmatch(failure.target)
    return None if found is None else int(found[1])
