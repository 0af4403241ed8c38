"""A learner's main loop: inner steps, and at each boundary the work that the member asks for. It waits for the device alone.

The device must not wait either. A boundary therefore begins a little before the step in flight is expected to end: reads and
writes are queued behind that step, and the next step behind them, so that the device goes from one to the next by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from diloco.core.learner.accounts import LEAST_TOKENS, STUCK_STEPS, StepDone
from diloco.core.learner.fragment_state import HostReader, Reader
from diloco.core.learner.schedule import Moment, learning_rate
from diloco.core.run.pace import MovingAverage
from diloco.core.tensors.fragments import FragmentMap
from diloco.member.arrays import Boundary
from diloco.member.instruments import Instruments
from diloco.process.observe import Logger
from diloco.settings.run import RunSettings
from diloco_learner.api import members
from diloco_learner.api.model import Output, SharedParameters, Stepping, counted_tokens
from diloco_learner.data.feed import Batch
from diloco_learner.run.meter import Meter, MeteredSpan

IDLE_S = 0.5  # news wake it earlier; it then looks whether it is asked to end
LOG_EVERY_S = 10.0  # a line for people who watch
SHOW_EVERY_S = 4.0  # between two steps whose gradients' norm is read from the device, to be shown
# A boundary begins before the step's expected end by so many times its own usual length and the usual error of the
# expectation, but by this share of the step at most: what is learned after it reaches the model a step later.
LEAD_BOUNDARIES = 2.0
LEAD_ERRORS = 2.0
LEAD_SHARE_MAX = 0.3
LOOK_AHEAD_SHARE = 0.5  # of a step: the other half is for the decision's way, and for others to make their batch

LookAhead: TypeAlias = Callable[[StepDone | None, tuple[int, int]], None]


@dataclass(frozen=True)
class _End:
    """How a step ended."""

    loss: float
    metrics: dict[str, float]
    ended_s: float
    gradient_norm: float | None = None  # where it was asked for


@dataclass(frozen=True)
class _Flight:
    """A step that was dispatched and has not been accounted for."""

    batch: Batch
    made: MeteredSpan  # when its batch was made
    called_s: float
    rate: float  # of learning
    output: Output
    end: Future[_End]


class Steered(Protocol):
    """A trainer is steered by it: a member, or one process's part in one."""

    @property
    def map(self) -> FragmentMap:
        """The run's fragments."""

    @property
    def step(self) -> int:
        """Steps taken."""

    def boundary(self, done: StepDone | None) -> Boundary:
        """Book the step that ended, and return the work before the next one."""

    def submit(self, fragment: int, reader: Reader) -> None:
        """Take a way to read a fragment as it is at this boundary."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something new."""

    def moment(self) -> Moment:
        """Return what the learning rate goes by."""

    def leave(self, within_s: float) -> None:
        """Take no further step, and end within this time."""


def carry_out(boundary: Boundary, parameters: SharedParameters, member: Steered, settings: RunSettings) -> None:
    """Write the versions of a boundary into the parameters, and hand readers to the member.

    Versions are taken out of the boundary: it would keep the parameters before them during the whole next step.
    """
    while boundary.applies:
        fragment, applied = boundary.applies.pop(0)
        alpha = 0.0 if applied.reset else settings.apply.alpha
        parameters.write(member.map.fragments[fragment], applied.theta, applied.reference, alpha)
    for fragment in boundary.reads:
        copy = parameters.snapshot(member.map.fragments[fragment])
        member.submit(fragment, HostReader(copy.to_host) if copy.is_on_host else copy.to_host)


def counted_step(output: Output, batch: Batch, most: int) -> StepDone:
    """Wait until the tokens of a step are known, at ``most`` so many; return the step with nothing else of its outcome.

    Raises:
        SettingsError: its loss counts what cannot be.
    """
    tokens = max(LEAST_TOKENS, counted_tokens(output, most))
    return StepDone(tokens=tokens, share=batch.share, batch=batch.index, loss=None, busy_s=0.0, blocked_s=0.0, most=most)


class Trainer:
    """Trains an island in step with a member.

    A step is booked with the tokens that its loss counts, or with ``tokens_per_batch``, the most. Where they vary they are
    known in the middle of the step, so the boundary that books it does not wait for its end.

    ``stopping`` says whether this process was asked to end; it then waits at most ``leave_s`` for its last work to be merged.
    ``at_boundary`` is called when all that a boundary asks for has been queued. ``look_ahead``, if given, is called in the
    middle of each step, with what is known of the step in flight (None: there is none) and the batch of the next one.
    ``changing`` is entered while model and accounts go from one boundary to the next: of an island whose steps are two programs
    nothing is begun there that another process could hold up.
    """

    def __init__(
        self,
        island: Stepping,
        member: Steered,
        batches: Iterator[Batch],
        settings: RunSettings,
        log: Logger,
        *,
        tokens_per_batch: int,
        slow: float,
        leave_s: float,
        stopping: Callable[[], bool],
        at_boundary: Callable[[], None],
        look_ahead: LookAhead | None = None,
        changing: AbstractContextManager[object] | None = None,
    ) -> None:
        self._changing = changing or nullcontext()
        self.island, self.member, self.batches, self.settings, self.log = island, member, batches, settings, log
        self.look_ahead = look_ahead
        self.tokens_per_batch, self.slow, self.stopping = tokens_per_batch, slow, stopping
        self.leave_s, self.at_boundary = leave_s, at_boundary
        self._leaving = False
        self._busy, self._error, self._boundary = MovingAverage(), MovingAverage(), MovingAverage()  # seconds
        self.instruments = Instruments(island.device, island.device_bytes)
        self._shown_s = time.perf_counter()
        self._meter = Meter()
        self._ended: _End | None = None  # of the last step whose loss counted something
        self._empty_steps = 0  # since then
        self._logged_s = time.perf_counter()

    def run(self) -> bool:
        """Step until the run is over (True) or this process is asked to end (False)."""
        with ThreadPoolExecutor(1, "step-end") as watcher:
            return self._run(watcher)

    def _run(self, watcher: ThreadPoolExecutor) -> bool:
        flight: _Flight | None = None
        batch, made = self._make_batch()
        self._look_ahead(None, batch)
        while True:
            done = None
            if flight is not None:
                self._await_boundary(flight)
                done = self._step_done(flight)
            opened_s = time.perf_counter()
            if not self._leaving and self.stopping():
                self._leaving = True
                self.member.leave(self.leave_s)
            with self._changing:
                self.island.finish_step()
                boundary = self.member.boundary(done)
                carry_out(boundary, self.island, self.member, self.settings)
            queued_s = time.perf_counter()
            self.at_boundary()
            opened_s += time.perf_counter() - queued_s  # a state that steps have to wait for is no usual boundary
            if boundary.finished or boundary.ended:
                return boundary.finished
            if boundary.stop or boundary.wait:
                if flight is not None:
                    self._land(flight)
                    flight = None
                self.member.wait(IDLE_S)
                if boundary.stop:
                    self._meter.pause()  # time after the budget is not blocked time
                continue
            rate = learning_rate(self.settings, self.member.moment())
            called_s = time.perf_counter()
            output = self.island.begin_step(batch.data, rate, (batch.share, batch.index))
            self._boundary.add(time.perf_counter() - opened_s)
            asks = called_s - self._shown_s >= SHOW_EVERY_S
            self._shown_s = called_s if asks else self._shown_s
            landing, flight = (
                flight,
                _Flight(
                    batch=batch,
                    made=made,
                    called_s=called_s,
                    rate=rate,
                    output=output,
                    end=watcher.submit(self._watch, output, asks),
                ),
            )
            batch, made = self._make_batch()  # while the step runs
            if landing is not None:
                self._land(landing)
            self._look_ahead(flight, batch)
            if called_s - self._logged_s >= LOG_EVERY_S and self._ended is not None and math.isfinite(self._ended.loss):
                self._logged_s, end = called_s, self._ended
                metrics = {name: float(f"{value:.4g}") for name, value in end.metrics.items() if math.isfinite(value)}
                about = {"loss": round(end.loss, 4), "learning_rate": round(rate, 6)} | (
                    {"metrics": metrics} if metrics else {}
                )
                self.log.debug("stepping", step=self.member.step, **about)

    def _make_batch(self) -> tuple[Batch, MeteredSpan]:
        began_s = time.perf_counter()
        with members.users_errors(self.settings.task):
            return next(self.batches), MeteredSpan(began_s, time.perf_counter())

    def _look_ahead(self, flight: _Flight | None, batch: Batch) -> None:
        """Have what follows the step in flight decided, so long before its end that this is known everywhere by then."""
        if self.look_ahead is None:
            return
        if flight is None:
            self.look_ahead(None, (batch.share, batch.index))
            return
        middle_s = self._meter.began_s(flight.called_s) + LOOK_AHEAD_SHARE * self._busy.get()
        wait([flight.end], max(0.0, middle_s - time.perf_counter()))
        in_flight = counted_step(flight.output, flight.batch, self.tokens_per_batch)
        self.look_ahead(in_flight, (batch.share, batch.index))

    def _watch(self, output: Output, shown: bool) -> _End:
        """Wait for a step's end; a slow learner is asleep for the rest of its step. ``shown``: with its gradients' norm."""
        began_s = time.perf_counter()
        loss = output.wait()
        if self.slow > 1:
            time.sleep((time.perf_counter() - began_s) * (self.slow - 1))
        ended_s = time.perf_counter()
        return _End(loss, output.metric_values(), ended_s, output.gradient_norm() if shown else None)

    def _await_boundary(self, flight: _Flight) -> None:
        """Wait until the step in flight is about to end, or has ended."""
        usual_s = self._busy.value
        if self.island.apart:
            flight.end.result()  # what is queued behind it would take the values that it leaves if it fails
            return
        if usual_s is None or self.slow > 1:  # what is queued while a slow learner sleeps would not be slow
            wait([flight.end])
            return
        lead_s = LEAD_BOUNDARIES * self._boundary.get() + LEAD_ERRORS * self._error.get()
        lead_s = min(lead_s, LEAD_SHARE_MAX * usual_s)
        wait([flight.end], max(0.0, self._meter.began_s(flight.called_s) + usual_s - lead_s - time.perf_counter()))

    def _land(self, flight: _Flight) -> None:
        """Account for a step, waiting for its end."""
        end = flight.end.result()
        busy_s = self._meter.add(flight.called_s, end.ended_s, flight.made)
        if self._busy.value is not None:
            self._error.add(abs(busy_s - self._busy.value))
        self._busy.add(busy_s)
        if not counted_tokens(flight.output, self.tokens_per_batch):
            self._note_empty()
            return
        self._ended, self._empty_steps = end, 0
        if end.gradient_norm is not None:
            self.instruments.note_step(flight.rate, end.gradient_norm)
        if not math.isfinite(end.loss):
            self.log.warning("step_not_finite", step=self.member.step, loss=str(end.loss))

    def _note_empty(self) -> None:
        """Note a step whose loss counted nothing: it changed nothing, and its loss is no number to be shown."""
        self._empty_steps += 1
        if self._empty_steps == STUCK_STEPS:
            self.log.warning("steps_without_tokens", step=self.member.step, steps=self._empty_steps)

    def _step_done(self, flight: _Flight) -> StepDone:
        counted, times = counted_step(flight.output, flight.batch, self.tokens_per_batch), self._meter.take()
        return replace(
            counted,
            loss=None if self._ended is None else self._ended.loss,
            busy_s=times.busy_s,
            blocked_s=times.blocked_s,
            data_s=times.data_s,
            metrics={} if self._ended is None else self._ended.metrics,
        )
