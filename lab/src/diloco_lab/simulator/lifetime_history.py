"""A learner's lifetime as far as it has been played: when its steps end, and how much is done by a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from diloco.core.run.pace import MovingAverage
from diloco_lab.simulator.cluster import MICROS, NEVER_US, ClusterLearner
from diloco_lab.simulator.lifetime import Stretch
from diloco_lab.simulator.outcome import LearnerOutcome, Scenario, Uptime

AHEAD_US = 3600 * MICROS  # how much of a lifetime is played at once
SETTLED_STEPS = 256  # after so many equal steps a moving average is their time to the last bit


class LifetimeTotals:
    """A learner's lifetime, of which only the totals are remembered."""

    def __init__(self, scenario: Scenario, index: int, learner: ClusterLearner, uptime: Uptime) -> None:
        self.scenario, self.index, self.learner, self._uptime = scenario, index, learner, uptime
        self.lifetime = scenario.lifetime(learner)
        self.steps = self.tokens = 0
        self.limit = NEVER_US  # steps after which it waits for a version
        self._last: tuple[Stretch, int, int] | None = None  # with steps and tokens done before

    def outcome(self) -> LearnerOutcome:
        """Return the learner's part of the outcome; the steps after the scenario's end do not count."""
        steps, tokens = self.steps, self.tokens
        if self._last is not None and self.lifetime.now_us > self.scenario.duration_us:
            stretch, steps, tokens = self._last
            if stretch.steps:
                done = min((self.scenario.duration_us - stretch.start_us) // stretch.step_us, stretch.steps - 1)
                steps, tokens = steps + done, tokens + done * stretch.slices * self.learner.tokens
        return LearnerOutcome(self.learner.name, self.lifetime.chip_time, steps, tokens, self.lifetime.failures)

    def extend(self, until_us: int) -> None:
        """Play the lifetime up to a time, or to the step after which the learner waits, or to the scenario's end."""
        until_us = min(until_us, self.scenario.duration_us)
        while self.lifetime.now_us <= until_us and self.steps < self.limit:
            self._add(self.lifetime.advance(self.limit - self.steps, self.scenario.duration_us + 1))

    def _add(self, stretch: Stretch) -> None:
        self._last = stretch, self.steps, self.tokens
        if stretch.steps:
            self.steps += stretch.steps
            self.tokens += ((stretch.steps - 1) * stretch.slices + stretch.last_slices) * self.learner.tokens
        self._uptime.add(self.index, stretch)
        if self.scenario.on_stretch:
            self.scenario.on_stretch(self.learner, stretch)


class Steps(LifetimeTotals):
    """A learner's lifetime, of which the near past and future can be looked up."""

    def __init__(self, scenario: Scenario, index: int, learner: ClusterLearner, uptime: Uptime) -> None:
        super().__init__(scenario, index, learner, uptime)
        self.silences: list[tuple[Stretch, tuple[int, int]]] = []  # (from, until) each, added since they were taken away
        self.loads: list[tuple[int, bool]] = []  # likewise: when the log is loaded, and whether the process began again
        self.unsteady_until_us = 0  # its average of step times changes up to here
        self._starts: list[int] = []
        self._stretches: list[_Known] = []
        self._average = MovingAverage()
        self._booked, self._booked_steps = 0, 0  # the stretch whose steps are being booked, and how many of them are

    def _add(self, stretch: Stretch) -> None:
        each = self.learner.tokens
        self._starts.append(stretch.start_us)
        known = _Known(stretch, stretch.slices * each, stretch.last_slices * each, self.steps, self._average.get())
        self._stretches.append(known)
        if stretch.steps:
            self._note_pace(stretch)
        if stretch.silent_us is not None:
            self.silences.append((stretch, stretch.silent_us))
        if stretch.lost or (stretch.kind == "absent" and stretch.end_us < self.scenario.duration_us):
            self.loads.append((stretch.end_us, stretch.lost))
        super()._add(stretch)

    def _note_pace(self, stretch: Stretch) -> None:
        step_s, average = stretch.step_us / MICROS, self._average
        last_s = (stretch.end_us - stretch.start_us - (stretch.steps - 1) * stretch.step_us) / MICROS
        if average.value != step_s or last_s != step_s:
            self.unsteady_until_us = stretch.end_us + SETTLED_STEPS * stretch.step_us
        if average.value != step_s and stretch.steps > 1:
            apart_s = 0.0 if average.value is None else average.value - step_s
            average.value = step_s + apart_s * (1 - average.weight) ** (stretch.steps - 1)
        average.add(last_s)

    def wait(self, until_us: int) -> None:
        """Play on with the learner waiting until a time, or until it is killed."""
        self._add(self.lifetime.wait(until_us))

    def forget(self, before_us: int) -> None:
        """Forget all that ended before a time."""
        over = 0
        while over < self._booked and self._stretches[over].end_us < before_us:
            over += 1
        del self._starts[:over], self._stretches[:over]
        self._booked -= over

    def book(self, now_us: int) -> Iterator[tuple[int, int]]:
        """Yield (steps, tokens of each) for the steps that have ended by now and were not booked before, in order."""
        while self._booked < len(self._stretches):
            stretch, before = self._stretches[self._booked], self._booked_steps
            done = stretch.done(now_us)
            self._booked_steps = done
            whole = min(done, stretch.steps - 1) - before
            if whole > 0:
                yield whole, stretch.tokens
            if before < done == stretch.steps:
                yield 1, stretch.last_tokens
            if now_us < stretch.end_us or self._booked == len(self._stretches) - 1:
                return
            self._booked, self._booked_steps = self._booked + 1, 0

    def boundary_us(self, after_us: int) -> int:
        """Return the first boundary after a time; never, if the learner waits before it, or the scenario ends."""
        if self.lifetime.now_us <= after_us:
            self.extend(after_us + AHEAD_US)
            if self.lifetime.now_us <= after_us:
                return NEVER_US
        index = bisect_right(self._starts, after_us) - 1
        if index < 0:
            return self._starts[0]
        stretch = self._stretches[index]
        done = (after_us - stretch.start_us) // stretch.step_us + 1 if stretch.steps else 0
        return stretch.start_us + done * stretch.step_us if 0 < done < stretch.steps else stretch.end_us

    def step_us(self, step: int) -> int:
        """Return when so many steps are done; never, if the learner waits before it, or the scenario ends."""
        while self.steps < step:
            known_us = self.lifetime.now_us
            self.extend(known_us + AHEAD_US)
            if self.lifetime.now_us == known_us:
                return NEVER_US
        index = bisect_right(self._stretches, step - 1, key=_steps_before) - 1
        stretch = self._stretches[index]
        done = step - stretch.steps_before
        return stretch.end_us if done == stretch.steps else stretch.start_us + done * stretch.step_us

    def done(self, at_us: int) -> int:
        """Return how many steps are done by a time that is not forgotten."""
        index = max(0, bisect_right(self._starts, at_us) - 1)
        return self._stretches[index].steps_before + self._stretches[index].done(at_us) if self._stretches else 0

    def average_s(self, at_us: int) -> float:
        """Return the moving average of step times as of the last boundary by then; 0 before the first step."""
        index = bisect_right(self._starts, at_us) - 1
        if index < 0:
            return 0.0
        stretch = self._stretches[index]
        done = min(stretch.done(at_us), max(0, stretch.steps - 1))
        if not done:
            return stretch.average_s
        step_s = stretch.step_us / MICROS
        apart_s = stretch.average_s - step_s if stretch.average_s else 0.0
        return step_s + apart_s * (1 - self._average.weight) ** done


class _Known:
    """A stretch, with the tokens of a step and of the last one, and what came before it."""

    __slots__ = (
        "absent",
        "average_s",
        "end_us",
        "last_tokens",
        "silent_us",
        "start_us",
        "step_us",
        "steps",
        "steps_before",
        "tokens",
    )

    def __init__(self, stretch: Stretch, tokens: int, last_tokens: int, steps_before: int, average_s: float) -> None:
        self.start_us, self.end_us = stretch.start_us, stretch.end_us
        self.steps, self.step_us = stretch.steps, stretch.step_us
        self.tokens, self.last_tokens = tokens, last_tokens
        self.steps_before, self.average_s = steps_before, average_s

    def done(self, at_us: int) -> int:
        """Return how many of its steps have ended by a time."""
        if at_us >= self.end_us:
            return self.steps
        return min((at_us - self.start_us) // self.step_us, self.steps - 1) if self.steps else 0


def _steps_before(stretch: _Known) -> int:
    return stretch.steps_before
