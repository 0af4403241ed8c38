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

import math
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from diloco.control.creation import KnownRun
from diloco.core.learner.accounts import STUCK_STEPS, StepDone
from diloco.core.learner.schedule import learning_rate
from diloco.errors import DilocoError, RunError, SettingsError
from diloco.member.arrays import Boundary
from diloco.settings.run import TaskSettings
from diloco.settings.service import LearnerSettings
from diloco_learner import frameworks
from diloco_learner.api.model import JoinedParameters
from diloco_learner.run.loop_arguments import Data, check_loss, check_said, default_name, settings_of
from diloco_learner.run.loop_entrance import LoopEntrance
from diloco_learner.run.loop_sides import LoopSide, flight_of
from diloco_learner.run.loop_steps import LoopSteps
from diloco_learner.run.surroundings import LiveSurroundings, Surroundings
from diloco_learner.run.trainer import IDLE_S, carry_out
from diloco_learner.tensors import Tensor

Make = Callable[[int, int, int, int], Iterator[Any]]  # share, shares, seed, start
Say = Callable[[str, tuple[int, ...]], Tensor]  # path, shape
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


class JoinedRun:
    """A run that this loop is a learner of, while it is entered (:func:`join`)."""

    def __init__(
        self,
        settings: LearnerSettings,
        params: Any,
        tokens: int,
        *,
        tensor: Say | None,
        within_s: float,
        data: Data,
        optimizer: Any = None,
        address: str | None = None,
        is_named: bool = True,
    ) -> None:
        """Begin; ``address``: where the first of several ranks has the others come. ``is_named``: a name was given."""
        self._optimizer, self.tokens, self._own_data = optimizer, tokens, data == "own"
        self.over = False  # whether the run's budget is used up: take no further step
        self.changed = False  # whether the last step ended with versions written into the parameters
        self._parameters = parameters_of(params)
        self._entrance = LoopEntrance(
            settings=settings,
            parameters=self._parameters,
            tensors=self._parameters.tensors(None if tensor is None else _Said(tensor)),
            tokens=tokens,
            own_data=self._own_data,
            within_s=within_s,
            address=address,
            is_named=is_named,
        )
        self.surround: Callable[[], Surroundings] = LiveSurroundings
        self._stack = ExitStack()
        self._around: Surroundings
        self._side: LoopSide
        self._steps = LoopSteps(tokens, dealt=not self._own_data)
        self._joined = self._left = False  # whether it is entered, and whether it was
        self._swapped = False  # whether averaged weights are swapped in

    @property
    def settings(self) -> LearnerSettings:
        """The settings of the learner that this loop is."""
        return self._entrance.settings

    @property
    def _run(self) -> KnownRun:
        return self._entrance.run

    @property
    def params(self) -> Any:
        """The parameters as of the last boundary; at first those of the run."""
        return self._parameters.tree

    @property
    def task(self) -> TaskSettings:
        """The run's settings of its task: with them ``Mix(run.task, "mix.toml")`` has the run's batches, or is refused."""
        return self._run.created.task

    @property
    def steps(self) -> int:
        """Steps that this learner has taken in the run; of several ranks, all but the first count from when they joined."""
        return self._side.steered.step

    @property
    def progress(self) -> float:
        """The part of the run's token budget that all learners together have used up, as far as known here, 0 to 1."""
        at = self._side.steered.moment()
        return min(max(at.tokens / at.budget, 0.0), 1.0)

    @property
    def learning_rate_factor(self) -> float:
        """The factor of the next step's learning rate by the run's own schedule: warm-up, then a cosine over its budget.

        ``torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: run.learning_rate_factor)`` is the schedule of a loop.
        """
        created = self._run.created
        return learning_rate(created, self._side.steered.moment()) / created.inner.learning_rate

    @property
    def refused(self) -> dict[str, int]:
        """Offers of this process that the run has refused for good, by reason (docs/user-guide.md).

        Of several ranks, the first one has them.
        """
        member = self._side.member
        return {} if member is None else member.refusals.offers

    @property
    def missed(self) -> int:
        """Versions that were made without this learner: its offers to them came late, or there were none.

        Of several ranks, the first one has their number.
        """
        member = self._side.member
        return 0 if member is None else member.learner.rounds_missed

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
        self._side = self._entrance.enter(self._around, self._stack)
        self._pass(None)
        self._book_with_optimizer()
        now_s = self._around.now_s()
        self._steps.go_on(now_s, now_s)

    def _book_with_optimizer(self) -> None:
        """Have each step of the loop's optimizer, if it was handed over, booked when it has been taken."""
        if self._optimizer is None:
            return

        def book(*of_step: object) -> None:
            if not self.over:
                self.step(self._parameters.tree, loss=self._steps.take_noted())

        handle = self._optimizer.register_step_post_hook(book)
        self._stack.callback(handle.remove)

    def batches(self, make: Make, *, read_ahead: bool = False) -> Iterator[Any]:
        """Yield batches of this learner's shares of the data until the run is over; each is to be followed by a :meth:`step`.

        ``make(share, shares, seed, start)`` yields a share's batches without end from the ``start``-th on; the k-th depends on
        nothing but share, shares, seed and k. Shares come and go: those of learners that are gone are dealt to the others.
        With ``read_ahead`` one more batch may be fetched before the step on the last one, as loaders do.

        Raises:
            DataError: none of the shares has data here.
            SettingsError: a share's batches ended, the last batch was not followed by a step, the loop has data of its own, or
                it is to read ahead and has several ranks.
            RunError: the run is not joined.
        """
        self._check_joined()
        if self._own_data:
            raise SettingsError('batches: this loop joined with data="own", so it holds no share: leave out data="own"')
        if read_ahead and self._parameters.ranked is not None:
            raise SettingsError("batches: several ranks hear of each batch when its step begins: leave out read_ahead")
        feed = self._side.feed(_Loop(make), self.tokens)
        while not self.over:
            yield self._steps.open(feed, 2 if read_ahead else 1)

    def step(self, params: Any, *, loss: Any = None, tokens: int | None = None) -> Any:
        """Book an inner step that has led to ``params``; return them with the versions that have arrived, for the next one.

        The parameters that are handed over are given away: JAX arrays are donated, NumPy arrays are written in place. ``loss``
        is a number, or a scalar of any framework, which is read one step later, so that it may be on its way from a device.
        ``tokens`` are those of this step, where they vary; by default those of ``diloco.join``, the most that a step may have.

        Raises:
            SettingsError: they are of another model, the loss is no single number, or the tokens cannot be those of a step.
            RunError: the run is not joined.
            EjectedError: an operator has ejected this learner.
            RefusedError: the run refuses its work: the reasons and their remedies are named.
            DilocoError: the losses of ten steps in a row are not finite, or, of a loop that gives none, its parameters; or the
                run cannot go on here; the message says why.
        """
        self._check_joined()
        self._around.end_step()
        called_s = self._around.now_s()
        counted = self._steps.check(loss, tokens)
        self._parameters.take(params)
        done, member = self._steps.end(called_s, counted), self._side.member
        sample = self._parameters.sample() if loss is None and member is not None else None
        self._steps.keep(*(None if each is None else self._parameters.number(each) for each in (loss, sample)))
        self._pass(done)
        if member is not None and member.learner.accounts.is_stuck:
            raise DilocoError(
                f"run {self.settings.run!r}: the losses or parameters of the last {STUCK_STEPS} or more steps are NaN or "
                "infinite: check the data, or begin again from the run's model with a fresh optimizer and a lower "
                "learning rate"
            )
        self._steps.go_on(called_s, self._around.now_s())
        return self.params

    def note_loss(self, loss: Any) -> None:
        """Note the loss of the next step that the optimizer takes: a number, or a scalar of any framework.

        Raises:
            SettingsError: it is no single number.
        """
        self._steps.note_loss(loss)

    def report(self, *, val_loss: Any) -> None:
        """Show people a loss on validation data of the loop's own, as the run's validation loss; nothing goes by it.

        ``val_loss`` is a number, or a scalar of any framework, which is waited for. Of several ranks the first one's is shown.
        One that is not finite is not shown.

        Raises:
            SettingsError: it is no single number.
            RunError: the run is not joined.
        """
        self._check_joined()
        check_loss(val_loss, "report: val_loss")
        if val_loss is None:
            raise SettingsError("report: val_loss is None, expected one number, the mean loss on validation data")
        loss = float(val_loss)
        if self._side.member is not None and math.isfinite(loss):
            self._side.member.report_validation(loss)

    @contextmanager
    def averaged(self, weights: Any) -> Iterator[None]:
        """Have the loop's parameters hold averaged weights (EMA) within, for an evaluation: of PyTorch, in place.

        ``weights`` are a ``torch.optim.swa_utils.AveragedModel`` or another module with the same parameters, or tensors by
        name. Buffers stay as they are.

        Raises:
            SettingsError: they are not those of all parameters, or the parameters are no tensors of PyTorch.
            RunError: the run is not joined.
        """
        self._check_joined()
        with self._parameters.swapped(weights):
            self._swapped = True
            try:
                yield
            finally:
                self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the learner's state, for the loop's own checkpoint: its accounts, and what it holds that is not merged.

        Call it between two steps, in all ranks, and save model and optimizer of the same moment. Before the run is entered it
        says what there will be to load, as ``torch.distributed.checkpoint`` asks for.

        Raises:
            RunError: the run has been left.
            DilocoError: the run cannot go on here, or not all ranks ask for their state.
        """
        if not self._joined and not self._left:
            return self._entrance.expected()
        self._check_joined()
        return self._entrance.packed(*self._wait(self._side.copy_state()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict` when the run is entered, as the learner that it is of.

        Call it before the ``with`` statement, with the model of the same moment loaded. What the log has merged since counts as
        merged, and is not offered again.

        Raises:
            RunError: the run is entered.
            SettingsError: it is no such state, or that of another run, learner or model.
        """
        if self._joined:
            raise RunError(f"run {self.settings.run!r}: is joined already: call load_state_dict before the with statement")
        self._entrance.load(state)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait until the last work is merged, at most ``leave_s``, and leave the run. After an error, leave it at once.

        Raises:
            RefusedError: nothing of this process was merged, and the run has refused offers of it.
        """
        try:
            if error is None:
                self._leave()
                self._wait(self._side.farewell())
                if self._side.member is not None:
                    self._wait(self._side.member.refusals.check())
        finally:
            self._joined, self._left = False, True
            self._stack.close()

    def _check_joined(self) -> None:
        if not self._joined:
            raise RunError(f"run {self.settings.run!r}: is not joined: take steps within the with statement, before its end")
        if self._swapped:
            raise RunError(
                f"run {self.settings.run!r}: averaged weights are swapped in: end the with statement of run.averaged first"
            )

    def _pass(self, done: StepDone | None) -> None:
        """Go through boundaries until a step may be taken, or none any more."""
        self.changed = False
        boundary = self._boundary(done)
        while boundary.wait and not self.over:
            self._around.wait(self._side.steered, IDLE_S)
            boundary = self._boundary(None)
        if self._own_data and not self.over:
            taken = self._steps.taken
            self._side.look_ahead(flight_of(self.tokens, None, taken), (0, taken + 1))

    def _boundary(self, done: StepDone | None) -> Boundary:
        boundary = self._side.boundary(done)
        self.changed |= bool(boundary.applies)
        carry_out(boundary, self._parameters, self._side.steered, self._run.created)
        self.over = boundary.stop or boundary.finished or boundary.ended
        return boundary

    def _leave(self) -> None:
        """Go through boundaries until nothing is unmerged; of a run that is over, until its last versions are there."""
        by_s = self._around.now_s() + self.settings.leave_s
        boundary, leaving = self._boundary(None), False
        while not boundary.finished and not boundary.ended:
            if not leaving and (not boundary.stop or self._around.now_s() > by_s):
                self._side.steered.leave(self.settings.leave_s)
                leaving = True
            self._around.wait(self._side.steered, IDLE_S)
            boundary = self._boundary(None)
        member = self._side.member
        if leaving and boundary.stop and not boundary.finished and member is not None:
            member.log.warning("last_versions_missing", waited_s=self.settings.leave_s, remedy="give join a longer leave_s")

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
    address: str | None = None,
    optimizer: Any = None,
) -> JoinedRun:
    """Return a run to be entered, in which this loop is a learner.

    In a process group of PyTorch of several ranks, all of them call it, and are one learner together.

    Args:
        url: of the run's NATS server; in a run with regions, of its control store, and ``bulk_url`` of the region's own.
        run: the run's name.
        params: a pytree of float32 arrays, JAX's or NumPy's; or a torch module, or its tensors by name. Where the run has no
            model yet, it begins with these. No two share memory. Of a module, frozen parameters are compared with those of the
            run's other learners, and float32 buffers are averaged.
        tokens: of each step, for the run's budget and as the weight of its work; those of all ranks together.
        data: "dealt": :meth:`JoinedRun.batches` gives the batches of shares that are this learner's; "own": it has a loader of
            its own. Then it holds no share, and the run's ledger says that its data are not accounted for.
        name: of this learner, lower-case letters, digits, - and _; by default that of the host and process.
        tensor: ``tensor(path, shape)`` says of each array what a task says of it (docs/task-api.md, Tensors), such as
            ``diloco_learner.kernels.flax``; by default its shape does. All learners of a run say the same.
        share: of the data, that this learner takes if it is free.
        region: in which this learner is, in a run with regions.
        identity: file that ``diloco keys`` made.
        leave_s: so long it waits at the end until its last work is merged, and of a run that is over for the last versions.
        within_s: so long it waits at the beginning for the server, the run, and the other ranks.
        address: HOST:PORT at which the first of several ranks is reached by the others, the same in all; by default a free port
            of ``MASTER_ADDR``.
        optimizer: of PyTorch; each step that it takes is booked by itself, so the loop calls no ``run.step``.

    Raises:
        SettingsError: something is wrong with these, or the parameters.
    """
    check_said(tokens, data, optimizer)
    settings = settings_of(
        name=name or default_name(os.uname().nodename, os.getpid()),
        run=run,
        nats_url=url,
        share=share,
        region=region,
        nats_bulk_url=bulk_url,
        identity=None if identity is None else str(identity),
        leave_s=leave_s,
    )
    more: dict[str, Any] = {"optimizer": optimizer, "address": address, "is_named": name is not None}
    return JoinedRun(settings, params, tokens, tensor=tensor, within_s=within_s, data=data, **more)


def join_virtual(params: Any, *, surround: Callable[[], Surroundings], **more: Any) -> JoinedRun:
    """Return a run to be entered in other surroundings than live ones; all else is as for :func:`join`."""
    joined = join("nats://virtual", params=params, **more)
    joined.surround = surround
    return joined
