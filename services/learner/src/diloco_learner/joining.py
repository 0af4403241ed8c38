"""Join a run from a training loop of one's own, which keeps its model, optimizer, data and steps.

    with diloco.join("nats://10.0.0.1:4222", run="mine", name="lab", params=params, tokens=4096) as run:
        params = run.params
        for batch in run.batches(make):
            params, optimizer_state, loss = step(params, optimizer_state, batch)
            params = run.step(params, loss=loss)

The loop's thread calls everything here. What talks to NATS runs in another one: :meth:`JoinedRun.step` waits for nothing, not
for the device either where the parameters are JAX arrays.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, get_args

from blake3 import blake3

from diloco.core.learner.accounts import STUCK_STEPS, StepDone
from diloco.core.tensors.fragments import FixedSpec, cut_model
from diloco.errors import DilocoError, RunError, SettingsError
from diloco.member.arrays import Boundary
from diloco.member.member import Member
from diloco.member.shares import OwnData
from diloco.process import observe, telemetry
from diloco.process.observe import Logger
from diloco.service import skeleton
from diloco.settings.run import MAX_NAME, NAME_PATTERN, TaskSettings
from diloco.settings.service import LearnerSettings
from diloco.settings.validation import nearest, parse
from diloco.transport import Transport
from diloco.wire.control import MarkerDeclined
from diloco_learner import frameworks
from diloco_learner.api.model import JoinedParameters
from diloco_learner.data.feed import Batch, BatchFeed
from diloco_learner.run.process import LoopThread
from diloco_learner.run.trainer import IDLE_S, carry_out
from diloco_learner.tensors import Tensor

Make = Callable[[int, int, int, int], Iterator[Any]]  # share, shares, seed, start
Say = Callable[[str, tuple[int, ...]], Tensor]  # path, shape
Data: TypeAlias = Literal["dealt", "own"]
T = TypeVar("T")


def parameters_of(params: Any) -> JoinedParameters:
    """Return the parameters that a loop hands over: those of a framework that knows them, or else a tree of arrays.

    Raises:
        SettingsError: there is no array, or one of another type or kind.
    """
    found = frameworks.parameters_of(params)
    if found is not None:
        return found
    from diloco_learner.api.trees import Tree

    return Tree(params)


@dataclass(frozen=True)
class _Said:
    """A loop's word on its tensors, as a task has it."""

    tensor: Say


@dataclass(frozen=True)
class _Loop:
    """The batches of a loop, as a task has them."""

    batches: Make


class Surroundings(Protocol):
    """The event loop, the connection and the clock of a joined loop: live ones, or those of :mod:`diloco.testing`."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work in the event loop, and wait for it."""

    async def connect(self, settings: LearnerSettings, log: Logger, within_s: float) -> Transport:
        """Return a connection to the run's server.

        Raises:
            BrokerError: it does not answer in time.
        """

    def wait(self, member: Member, timeout_s: float) -> None:
        """Wait until there is something new for a boundary, at most that long."""

    def end_step(self) -> None:
        """Hear that the loop has taken a step."""

    def now_s(self) -> float:
        """Return the time, by a clock that never goes back."""

    def close(self) -> None:
        """End the event loop."""


class _Live:
    """An event loop in a thread of its own, and NATS."""

    def __init__(self) -> None:
        self._thread = LoopThread()
        self.close = self._thread.close
        self.now_s = time.perf_counter

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work, lambda: False)

    async def connect(self, settings: LearnerSettings, log: Logger, within_s: float) -> Transport:
        return await skeleton.connect(settings, "learner", log, give_up_after_s=within_s)

    def wait(self, member: Member, timeout_s: float) -> None:
        member.wait(timeout_s)

    def end_step(self) -> None:
        pass  # it has taken its time


class JoinedRun:
    """A run that this loop is a learner of, while it is entered (:func:`join`)."""

    def __init__(
        self,
        settings: LearnerSettings,
        params: Any,
        tokens: int,
        tensor: Say | None,
        within_s: float,
        data: Data,
    ) -> None:
        self.settings, self.tokens, self.log = settings, tokens, observe.get_logger()
        self.over = False  # whether the run's budget is used up: take no further step
        self._parameters, self._within_s = parameters_of(params), within_s
        self._tensors = self._parameters.tensors(None if tensor is None else _Said(tensor))
        self.surround: Callable[[], Surroundings] = _Live
        self._stack = ExitStack()
        self._around: Surroundings
        self._member: Member
        self._own_data = data == "own"
        self._steps = 0  # on data of its own
        self._joined = False  # whether it is entered
        self._batch: Batch | None = None
        self._loss: Any = None
        self._sample: Any = None  # of the parameters' values, after a step without a loss
        self._returned_s, self._blocked_s = 0.0, 0.0

    @property
    def params(self) -> Any:
        """The parameters as of the last boundary; at first those of the run."""
        return self._parameters.tree

    @property
    def task(self) -> TaskSettings:
        """The run's settings of its task: with them ``Mix(run.task, "mix.toml")`` has the run's batches, or is refused."""
        return self._member.run.created.task

    @property
    def steps(self) -> int:
        """Steps that this learner has taken in the run."""
        return self._member.step

    @property
    def refused(self) -> dict[str, int]:
        """Offers of this process that the run has refused for good, by reason (docs/user-guide.md)."""
        return self._member.refusals.offers

    @property
    def missed(self) -> int:
        """Versions that were made without this learner: its offers to them came late, or there were none."""
        return self._member.learner.rounds_missed

    def __enter__(self) -> Self:
        """Join the run, and take over its model.

        Raises:
            BrokerError: the server does not answer in time.
            RunError: there is no such run.
            SettingsError: its learners offer gradients, or the identity does not fit.
            AdmissionError: its model is another one, or its steps are to be smaller.
        """
        if self._joined:
            raise RunError(f"run {self.settings.run!r}: is joined already")
        try:
            self._join()
        except BaseException:
            self._stack.close()
            raise
        self._joined = True
        return self

    def _join(self) -> None:
        self._around = self.surround()
        self._stack.callback(self._around.close)
        fixed = self._parameters.fixed()
        self._member = self._wait(self._make_member(fixed))
        self._stack.callback(lambda: self._wait(self._member.close()))
        self._member.admission.check_batch(self.tokens)
        read = self._parameters.snapshot
        self._wait(self._member.join(lambda fragment: read(fragment).to_host()))
        self._member.count_steps(self.tokens)
        self._pass(None)
        self._returned_s = self._around.now_s()

    async def _make_member(self, fixed: Sequence[FixedSpec]) -> Member:
        transport = await self._around.connect(self.settings, self.log, self._within_s)
        self._stack.callback(lambda: self._wait(transport.close()))
        try:
            async with asyncio.timeout(self._within_s):
                run = await skeleton.find_run(transport, self.settings, self.log)
        except TimeoutError:
            raise RunError(
                f"run {self.settings.run!r}: {self.settings.nats_url} has had no such run for {self._within_s:g} s: check "
                "the name, and start the run's coordinator (diloco up, or diloco-coordinator)"
            ) from None
        if run.created.offers_gradients:
            raise SettingsError(
                f"run {run.name!r}: its learners offer gradients of single steps (outer.optimizer = adamw), and a loop "
                "takes its own steps: join a run of another preset"
            )
        fragments = cut_model(self._tensors, run.created.fragments, fixed)
        kept = telemetry.begin(self.settings, "learner", self.log)
        if kept is not None:
            self._stack.callback(kept.close)
        member = Member(transport, run, fragments, self.settings, self.log, telemetry=kept)
        if self._own_data:
            member.shares = OwnData(member.admission.incarnation)
        return member

    def batches(self, make: Make) -> Iterator[Any]:
        """Yield batches of this learner's shares of the data until the run is over; each is to be followed by a :meth:`step`.

        ``make(share, shares, seed, start)`` yields a share's batches without end from the ``start``-th on; the k-th depends on
        nothing but share, shares, seed and k. Shares come and go: those of learners that are gone are dealt to the others.

        Raises:
            DataError: none of the shares has data here.
            SettingsError: a share's batches ended, the last batch was not followed by a step, or the loop has data of its own.
            RunError: the run is not joined.
        """
        self._check_joined()
        if self._own_data:
            raise SettingsError('batches: this loop joined with data="own", so it holds no share: leave out data="own"')
        feed = BatchFeed(_Loop(make), self._member.run.created, self._member.leased, self.log)
        while not self.over:
            if self._batch is not None:
                raise SettingsError("batches: no step was booked for the last batch: call run.step once for each batch")
            self._batch = next(feed)
            yield self._batch.data

    def step(self, params: Any, *, loss: Any = None) -> Any:
        """Book an inner step that has led to ``params``; return them with the versions that have arrived, for the next one.

        The parameters that are handed over are given away: JAX arrays are donated, NumPy arrays are written in place. ``loss``
        is a number, or a scalar of any framework, which is read one step later, so that it may be on its way from a device.

        Raises:
            SettingsError: they are of another model, or the loss is no single number.
            RunError: the run is not joined.
            EjectedError: an operator has ejected this learner.
            RefusedError: the run refuses its work: the reasons and their remedies are named.
            DilocoError: the losses of ten steps in a row are not finite, or, of a loop that gives none, its parameters; or the
                run cannot go on here; the message says why.
        """
        self._check_joined()
        self._around.end_step()
        called_s = self._around.now_s()
        _check_loss(loss)
        share, index = self._take_batch()
        self._parameters.take(params)
        known, finite = _number(self._loss), _is_finite(self._sample)
        done = StepDone(
            tokens=self.tokens,
            share=share,
            batch=index,
            loss=known,
            busy_s=called_s - self._returned_s,
            blocked_s=self._blocked_s,
            finite=finite,
        )
        # of PyTorch without what it was computed from, which would be kept for a step
        self._loss = loss.detach() if hasattr(loss, "detach") else loss
        self._sample = self._parameters.sample() if loss is None else None
        self._pass(done)
        if self._member.learner.accounts.is_stuck:
            raise DilocoError(
                f"run {self.settings.run!r}: the losses or parameters of the last {STUCK_STEPS} or more steps are NaN or "
                "infinite: check the data, or begin again from the run's model with a fresh optimizer and a lower "
                "learning rate"
            )
        self._returned_s = self._around.now_s()
        self._blocked_s = self._returned_s - called_s
        return self.params

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait until the last work is merged, at most ``leave_s``, and leave the run. After an error, leave it at once.

        Raises:
            RefusedError: nothing of this process was merged, and the run has refused offers of it.
        """
        try:
            if error is None:
                self._leave()
                self._wait(self._member.refusals.check())
        finally:
            self._joined = False
            self._stack.close()

    def _check_joined(self) -> None:
        if not self._joined:
            raise RunError(f"run {self.settings.run!r}: is not joined: take steps within the with statement, before its end")

    def _take_batch(self) -> tuple[int | None, int]:
        """Return share and index of the batch that a step was on, which is booked once; no share of data of its own."""
        if self._own_data:
            self._steps += 1
            return None, self._steps - 1
        if self._batch is None:
            raise SettingsError(
                "step: no batch is open: call run.step once for each batch of run.batches; a loop with its own loader "
                'joins with data="own"'
            )
        batch, self._batch = self._batch, None
        return batch.share, batch.index

    def _pass(self, done: StepDone | None) -> None:
        """Go through boundaries until a step may be taken, or none any more."""
        boundary = self._boundary(done)
        while boundary.wait and not self.over:
            self._around.wait(self._member, IDLE_S)
            boundary = self._boundary(None)

    def _boundary(self, done: StepDone | None) -> Boundary:
        boundary = self._member.boundary(done)
        carry_out(boundary, self._parameters, self._member, self._member.run.created)
        marker = self._member.marker_due()
        if marker is not None:  # of a whole run's checkpoint: the state of this loop is its own affair
            self._member.answer_marker(MarkerDeclined(self.settings.name, marker.number, "keeps_own", ""))
        self.over = boundary.stop or boundary.finished or boundary.ended
        return boundary

    def _leave(self) -> None:
        """Go through boundaries until nothing is unmerged; of a run that is over, until its last versions are there."""
        by_s = self._around.now_s() + self.settings.leave_s
        boundary, leaving = self._boundary(None), False
        while not boundary.finished and not boundary.ended:
            if not leaving and (not boundary.stop or self._around.now_s() > by_s):
                self._member.leave(self.settings.leave_s)
                leaving = True
            self._around.wait(self._member, IDLE_S)
            boundary = self._boundary(None)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._around.run(work)


def join(
    url: str,
    *,
    run: str,
    params: Any,
    tokens: int,
    data: Data = "dealt",
    name: str | None = None,
    tensor: Say | None = None,
    share: int | None = None,
    region: str | None = None,
    bulk_url: str | None = None,
    identity: Path | str | None = None,
    leave_s: float = 30.0,
    within_s: float = 60.0,
) -> JoinedRun:
    """Return a run to be entered, in which this loop is a learner.

    Args:
        url: of the run's NATS server; in a run with regions, of its control store, and ``bulk_url`` of the region's own.
        run: the run's name.
        params: a pytree of float32 arrays, JAX's or NumPy's; or a torch module, or its tensors by name. Where the run has no
            model yet, it begins with these. No two share memory. Of a module, frozen parameters are compared with those of the
            run's other learners, and float32 buffers are averaged.
        tokens: of each step, for the run's budget and as the weight of its work.
        data: "dealt": :meth:`JoinedRun.batches` gives the batches of shares that are this learner's; "own": it has a loader of
            its own. Then it holds no share, and the run's ledger says that its data are not accounted for.
        name: of this learner, lower-case letters, digits, - and _; by default that of the host and process.
        tensor: ``tensor(path, shape)`` says of each array what a task says of it (docs/task-api.md, Tensors), such as
            ``diloco_learner.kernels.flax``; by default its shape does. All learners of a run say the same.
        share: of the data, that this learner takes if it is free.
        region: in which this learner is, in a run with regions.
        identity: file that ``diloco keys`` made.
        leave_s: so long it waits at the end until its last work is merged, and of a run that is over for the last versions.
        within_s: so long it waits at the beginning for the server, and for the run.

    Raises:
        SettingsError: something is wrong with these, or the parameters.
    """
    if tokens < 1:
        raise SettingsError(f"join: tokens = {tokens}: expected the number of tokens of each step, at least 1")
    if data not in get_args(Data):
        raise SettingsError(f"join: data = {data!r}: expected 'dealt' or 'own'{nearest(str(data), get_args(Data))}")
    name = name or default_name(os.uname().nodename, os.getpid())
    for what, said in (("name", name), ("run", run)):
        if not re.fullmatch(NAME_PATTERN, said):
            raise SettingsError(
                f"join: {what} = {said!r}: expected lower-case letters, digits, - and _, at most {MAX_NAME} characters, of "
                "which the first is a letter or digit"
            )
    given = {
        "name": name, "run": run, "nats_url": url, "share": share,
        "region": region, "nats_bulk_url": bulk_url, "identity": None if identity is None else str(identity),
        "leave_s": leave_s,
    }  # fmt: skip
    settings = parse(LearnerSettings, {key: value for key, value in given.items() if value is not None}, "join")
    return JoinedRun(settings=settings, params=params, tokens=tokens, tensor=tensor, within_s=within_s, data=data)


def join_virtual(params: Any, *, surround: Callable[[], Surroundings], **more: Any) -> JoinedRun:
    """Return a run to be entered in other surroundings than live ones; all else is as for :func:`join`."""
    joined = join("nats://virtual", params=params, **more)
    joined.surround = surround
    return joined


def default_name(host: str, process: int) -> str:
    """Return a learner's name of a host's and a process's; a hash of the host's is in it where that does not fit as it is."""
    plain = f"loop-{host}-{process}".lower()
    if re.fullmatch(NAME_PATTERN, plain):
        return plain
    end = f"-{blake3(host.encode()).hexdigest()[:8]}-{process}"
    return f"loop-{re.sub('[^a-z0-9_-]+', '-', host.lower())}"[: MAX_NAME - len(end)] + end


def _check_loss(loss: Any) -> None:
    """Find out that a loss is one number, on a device or not, without waiting for it.

    Raises:
        SettingsError: it is something else.
    """
    shape = getattr(loss, "shape", None)
    if loss is None or isinstance(loss, int | float) or (shape is not None and not len(shape)):
        return
    came = f"a {type(loss).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
    raise SettingsError(f"step: loss is {came}, expected one number, the mean loss of the batch")


def _is_finite(sample: Any) -> bool | None:
    return None if sample is None else math.isfinite(float(sample))


def _number(loss: Any) -> float | None:
    return None if loss is None else float(loss)
