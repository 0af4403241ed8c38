"""One learner's lifetime in simulated time: it steps, slices fail and come back, it reconfigures, it waits.

A lifetime is a sequence of :class:`Stretch`, asked for one after another. How many steps are asked for at once makes no
difference: what happens, and when, is the same. Its random draws come from one generator in the order of the interruptions.

Interruptions of chips are a Poisson process, at any time, whatever the learner does. An interrupted chip takes its slice
along, for a time drawn from the repair distribution. The learner notices at the end of the step, in which the other slices'
work counts; so failures within a step share one reconfiguration, as do those during one. What a change costs is in
:class:`~diloco_lab.simulator.cluster.Costs`.

Every slice is at any time in exactly one of the :class:`ChipTime` counts, so they add up to what was allocated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from diloco_lab.simulator.cluster import MICROS, NEVER_US, ClusterLearner, micros

SHORTEST = 0.1  # of its usual time, that a step may take where each one is drawn

Kind = Literal["stepping", "waiting", "reconfiguring", "absent"]
FaultKind = Literal["chip_loss", "slow", "freeze", "kill"]


@dataclass(frozen=True)
class Fault:
    """Something that a tape does to a learner. ``slice`` is lost (chip_loss), ``factor`` slows its steps (slow)."""

    at_us: int
    kind: FaultKind
    duration_us: int
    slice: int = 0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a lifetime. A stepping one is of ``steps`` steps, each of ``step_us``, the last one until ``end_us``.

    All steps are taken with ``slices``, but for the last one, of which ``last_slices`` count. The learner is not heard in
    ``silent_us`` (from, until). ``lost``: what it had not offered before is gone (it was killed).
    """

    kind: Kind
    start_us: int
    end_us: int
    steps: int = 0
    step_us: int = 0
    slices: int = 0
    last_slices: int = 0
    silent_us: tuple[int, int] | None = None
    lost: bool = False


@dataclass
class ChipTime:
    """Where allocated chip-time went, in chips times microseconds.

    ``useful``: steps that count. ``redone``: steps that did not, because a learner began again before them. ``idle``: nothing
    to do, as for a learner that waits and a slice that is back and not taken in yet. ``repairing``: a slice is away, since the
    beginning of the step in which it failed.
    """

    useful: int = 0
    redone: int = 0
    idle: int = 0
    reconfiguring: int = 0
    repairing: int = 0

    @property
    def allocated(self) -> int:
        """Return the sum of all."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: ChipTime) -> ChipTime:
        return ChipTime(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __rmul__(self, chips: int) -> ChipTime:
        return ChipTime(*(chips * getattr(self, f.name) for f in fields(self)))


class Lifetime:
    """The lifetime of ``learner``, from time 0 on. ``faults`` are a tape's, in order; ``note`` gets those that are drawn."""

    def __init__(
        self, learner: ClusterLearner, seed: int, faults: Sequence[Fault] = (), note: Callable[[Fault], None] | None = None
    ) -> None:
        self.learner, self._note = learner, note
        self.now_us = 0
        self.failures = 0  # interruptions that cost a slice
        self._chance = random.Random(f"{seed}/{learner.name}/chips")
        self._rate_per_us = learner.slices * learner.chips / learner.between_s / MICROS
        self._failure_us = self._next_failure(0)
        self._faults = [fault for fault in faults if fault.kind != "slow"][::-1]
        self._paces = _Paces(learner, seed, [fault for fault in faults if fault.kind == "slow"])
        self._present = [(micros(begin), micros(end)) for begin, end in learner.present or ((0.0, float("inf")),)][::-1]
        costs = learner.costs
        self._elastic = costs.elastic
        self._downscale_us, self._upscale_us = micros(costs.downscale_s), micros(costs.upscale_s)
        self._gather_us, self._restart_us = micros(costs.gather_s), micros(costs.restart_s)
        self._checkpoint_us = micros(costs.checkpoint_s)
        self._part = learner.slices  # slices that take part
        self._away: dict[int, int] = {}  # slice: since when its time counts as repairing
        self._returns: list[tuple[int, int]] = []  # (when, slice)
        self._back: dict[int, int] = {}  # slice: since when it waits to be taken in
        self._failed = False  # slices that took part are missing: to be noticed at the next boundary
        self._killed_us: int | None = None
        self._unsaved = self._unsaved_steps = 0  # since the last checkpoint: useful slice-time, and steps
        self._slice_time = ChipTime()

    @property
    def chip_time(self) -> ChipTime:
        """Return where the time until now went."""
        open_ = ChipTime(
            idle=sum(self.now_us - since for since in self._back.values()),
            repairing=sum(self.now_us - since for since in self._away.values()),
        )
        return self.learner.chips * (self._slice_time + open_)

    def advance(self, steps: int, until_us: int) -> Stretch:
        """Return the next stretch: of at most ``steps`` steps, and of none that begins at ``until_us`` or later."""
        begin_us, end_us = self._present[-1] if self._present else (NEVER_US, NEVER_US)
        if self.now_us < begin_us:
            return self._stay_away(min(begin_us, max(until_us, self.now_us + 1)))
        if self.now_us >= end_us:
            self._present.pop()
            return self.advance(steps, until_us)
        if self._killed_us is not None:
            return self._restart_killed()
        if self._failed:
            return self._reconfigure(self._downscale_us) if self._elastic else self._restart()
        if self._part == 0:
            return self._reconfigure(self._returns[0][0] - self.now_us + self._upscale_us)
        if self._back and self.now_us >= self._gathered_us():
            return self._reconfigure(self._upscale_us)
        return self._step(steps, min(until_us, end_us))

    def wait(self, until_us: int) -> Stretch:
        """Take no step before ``until_us``."""
        start_us, silent_us = self.now_us, None
        if self._killed_us is not None:  # in the step that it does not take now
            until_us = min(until_us, self._killed_us)
        while (at_us := self._event_us()) <= until_us:
            if at_us == self._returns_us():
                self._return()
            elif at_us == self._failure_us:
                if self._fail(*self._draw(), since_us=at_us):
                    self._slice_time.idle += at_us - start_us
                    self._failed = True
            else:
                fault = self._faults.pop()
                if fault.kind == "kill":
                    self._killed_us = until_us = at_us
                    break
                if fault.kind == "freeze" and self._killed_us is None:
                    until_us = max(until_us, at_us + fault.duration_us)
                    silent_us = (silent_us[0] if silent_us else at_us, at_us + fault.duration_us)
                elif fault.kind == "chip_loss" and self._fail(fault.slice, fault.duration_us, at_us, since_us=at_us):
                    self._slice_time.idle += at_us - start_us
                    self._failed = True
        self._slice_time.idle += self._part * (until_us - start_us)
        self.now_us = until_us
        return Stretch("waiting", start_us, until_us, silent_us=silent_us)

    # ---- stretches

    def _step(self, most: int, until_us: int) -> Stretch:
        start_us, before = self.now_us, self._part
        step_us, edge_us = self._paces.at(start_us)
        steps = min(most, _steps(until_us - start_us, step_us), _steps(edge_us - start_us, step_us))
        if self._back:
            steps = min(steps, _steps(self._gathered_us() - start_us, step_us))
        extra_us, silent_us = 0, None
        while (at_us := self._event_us()) <= start_us + steps * step_us + extra_us:
            noticed = min(steps, _steps(at_us - start_us, step_us))
            begun_us = start_us + (noticed - 1) * step_us
            if at_us == self._returns_us():
                self._return()
                if self._back:
                    steps = min(steps, max(noticed, _steps(self._gathered_us() - start_us, step_us)))
            elif at_us == self._failure_us:
                if self._fail(*self._draw(), since_us=begun_us):
                    steps, self._failed = noticed, True
            else:
                fault = self._faults.pop()
                if fault.kind == "kill":
                    steps, self._killed_us = noticed - 1, at_us
                    break
                if fault.kind == "freeze":
                    steps, extra_us = noticed, extra_us + fault.duration_us
                    silent_us = (silent_us[0] if silent_us else at_us, at_us + fault.duration_us)
                elif self._fail(fault.slice, fault.duration_us, at_us, since_us=begun_us):
                    steps, self._failed = noticed, True
        last = self._part
        if self._killed_us is not None:
            last, extra_us, silent_us = before, 0, None  # what failed did so in the step that is not finished
            if not steps:
                return self._restart_killed()
        end_us = start_us + steps * step_us + extra_us
        self._slice_time.useful += step_us * ((steps - 1) * before + last)
        self._slice_time.idle += extra_us * last
        self._note_unsaved(steps, step_us, before, last)
        self.now_us = end_us
        return Stretch(
            kind="stepping",
            start_us=start_us,
            end_us=end_us,
            steps=steps,
            step_us=step_us,
            slices=before,
            last_slices=last,
            silent_us=silent_us,
        )

    def _reconfigure(self, duration_us: int) -> Stretch:
        start_us = self.now_us
        self._take_in(start_us)
        end_us, lost = start_us + duration_us, False
        while (at_us := self._event_us()) <= end_us:
            if at_us == self._returns_us():
                self._return()
            elif at_us == self._failure_us:
                if self._fail(*self._draw(), since_us=at_us):
                    self._slice_time.reconfiguring += at_us - start_us
            else:
                fault = self._faults.pop()
                if fault.kind == "kill":
                    end_us, lost = max(end_us, at_us + self._restart_us), True
                elif fault.kind == "freeze":
                    end_us += fault.duration_us
                elif self._fail(fault.slice, fault.duration_us, at_us, since_us=at_us):
                    self._slice_time.reconfiguring += at_us - start_us
        self._slice_time.reconfiguring += self._part * (end_us - start_us)
        self._take_in(end_us)
        self._failed, self.now_us = False, end_us
        return Stretch("reconfiguring", start_us, end_us, silent_us=(start_us, end_us), lost=lost)

    def _restart(self) -> Stretch:
        """Begin again on spare slices, from the last checkpoint."""
        self._take_in(self.now_us)
        for since_us in self._away.values():
            self._slice_time.repairing += self.now_us - since_us
        self._away, self._returns, self._part = {}, [], self.learner.slices
        self._slice_time.useful -= self._unsaved
        self._slice_time.redone += self._unsaved
        self._unsaved = self._unsaved_steps = 0
        stretch = self._reconfigure(self._restart_us)
        if self._away:  # what failed meanwhile has been replaced as well
            for since_us in self._away.values():
                self._slice_time.reconfiguring += self.now_us - since_us
            self._away, self._returns, self._part = {}, [], self.learner.slices
        return stretch

    def _restart_killed(self) -> Stretch:
        """Begin again after the process died in the middle of a step, or while it waited."""
        assert self._killed_us is not None
        start_us, killed_us = self.now_us, self._killed_us
        self._slice_time.redone += self._part * (killed_us - start_us)
        # what failed in the step that was not finished is away since it began
        self.now_us, self._killed_us = killed_us, None
        end = self._reconfigure(self._restart_us)
        return Stretch("reconfiguring", start_us, end.end_us, silent_us=(killed_us, end.end_us), lost=True)

    def _stay_away(self, until_us: int) -> Stretch:
        """Be away, not allocated; a learner that comes back has all slices."""
        start_us = self.now_us
        for since_us in self._away.values():
            self._slice_time.repairing += start_us - since_us
        for since_us in self._back.values():
            self._slice_time.idle += start_us - since_us
        self._away, self._back, self._returns, self._part = {}, {}, [], self.learner.slices
        self._failed, self._killed_us, self.now_us = False, None, until_us
        while self._failure_us <= until_us:
            self._draw()
        while self._faults and self._faults[-1].at_us <= until_us:
            self._faults.pop()
        return Stretch("absent", start_us, until_us, silent_us=(start_us, until_us))

    # ---- slices

    def _event_us(self) -> int:
        fault_us = self._faults[-1].at_us if self._faults else NEVER_US
        return min(self._returns_us(), self._failure_us, fault_us)

    def _returns_us(self) -> int:
        return self._returns[0][0] if self._returns else NEVER_US

    def _gathered_us(self) -> int:
        """Return when the slices that are back have waited long enough."""
        return next(iter(self._back.values())) + self._gather_us

    def _next_failure(self, after_us: int) -> int:
        if not self._rate_per_us:
            return NEVER_US
        return after_us + 1 + int(self._chance.expovariate(self._rate_per_us))

    def _draw(self) -> tuple[int, int, int]:
        """Draw the next interruption: slice, for how long, when. One of a slice that is away changes nothing."""
        at_us, chance = self._failure_us, self._chance
        index = int(chance.random() * self.learner.slices)
        away_us = max(1, micros(self.learner.repair.quantile_s(chance.random())))
        self._failure_us = self._next_failure(at_us)
        if self._note is not None and index not in self._away:
            self._note(Fault(at_us, "chip_loss", away_us, index))
        return index, away_us, at_us

    def _fail(self, index: int, away_us: int, at_us: int, *, since_us: int) -> bool:
        """Take a slice away; return whether it took part: its time then counts as repairing since ``since_us``."""
        if index in self._away:
            return False
        self.failures += 1
        heapq.heappush(self._returns, (at_us + away_us, index))
        waiting_us = self._back.pop(index, None)
        if waiting_us is not None:
            self._slice_time.idle += at_us - waiting_us
            self._away[index] = at_us
            return False
        self._away[index] = since_us
        self._part -= 1
        return True

    def _return(self) -> None:
        at_us, index = heapq.heappop(self._returns)
        self._slice_time.repairing += at_us - self._away.pop(index)
        self._back[index] = at_us

    def _take_in(self, at_us: int) -> None:
        """Slices that are back take part from now on."""
        for since_us in self._back.values():
            self._slice_time.idle += at_us - since_us
        self._part += len(self._back)
        self._back.clear()

    def _note_unsaved(self, steps: int, step_us: int, slices: int, last: int) -> None:
        """Work that a restart would repeat: of the steps since the last checkpoint."""
        if self._elastic or not self._checkpoint_us:
            return
        every = _steps(self._checkpoint_us, step_us)
        unsaved = (self._unsaved_steps + steps) % every
        work = step_us * ((min(steps, unsaved) - 1) * slices + last) if unsaved else 0
        self._unsaved = work if unsaved <= steps else self._unsaved + work
        self._unsaved_steps = unsaved


class _Paces:
    """How long a learner's steps take at a time."""

    def __init__(self, learner: ClusterLearner, seed: int, faults: Sequence[Fault]) -> None:
        self._step_us, self._spread = micros(learner.step_s), learner.step_spread
        self._drawn = random.Random(f"{seed}/{learner.name}/steps")
        self._slowdowns = learner.slowdowns
        self._chance = random.Random(f"{seed}/{learner.name}/slowdowns")
        self._windows = [(fault.at_us, fault.at_us + fault.duration_us, fault.factor) for fault in faults]
        if self._slowdowns:
            self._draw(0)

    def _draw(self, after_us: int) -> None:
        assert self._slowdowns is not None
        start_us = after_us + 1 + int(self._chance.expovariate(1 / self._slowdowns.between_s) * MICROS)
        end_us = start_us + 1 + int(self._chance.expovariate(1 / self._slowdowns.lasting_s) * MICROS)
        self._windows.append((start_us, end_us, self._slowdowns.factor))

    def at(self, now_us: int) -> tuple[int, int]:
        """Return the time of a step that begins now, and until when steps begin that take as long."""
        step_us, edge_us = self._usual(now_us)
        if not self._spread:
            return step_us, edge_us
        return round(step_us * max(SHORTEST, self._drawn.gauss(1.0, self._spread))), now_us + 1

    def _usual(self, now_us: int) -> tuple[int, int]:
        if not self._windows:
            return self._step_us, NEVER_US
        if self._slowdowns:
            # the newest drawn one is the last to end of those that were drawn
            while (drawn := self._windows[-1])[1] <= now_us:
                self._windows.pop()
                self._draw(drawn[1])
        factor, edge_us = 1.0, NEVER_US
        for start_us, end_us, slower in self._windows:
            if start_us <= now_us < end_us:
                factor *= slower
            edge_us = min(edge_us, *(edge for edge in (start_us, end_us) if edge > now_us), NEVER_US)
        return round(self._step_us * factor), edge_us


def _steps(duration_us: int, step_us: int) -> int:
    """Return the number of steps that begin within a time; at least one."""
    return max(1, -(-duration_us // step_us))
