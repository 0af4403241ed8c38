"""Join a run from your own training loop, which keeps its model, optimizer, data and steps.

    with diloco.join("nats://10.0.0.1:4222", run="mine", name="lab", params=params, tokens=4096) as run:
        params = run.params
        for batch in run.batches(make):
            params, optimizer_state, loss = step(params, optimizer_state, batch)
            params = run.step(params, loss=loss)

The loop's thread calls everything in this module. Another thread communicates with NATS, so :meth:`JoinedRun.step` does not
wait for the network. With JAX arrays it does not wait for the device either.
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
    """Return the parameters of a loop: those of the framework that recognises them, or else a tree of arrays.

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
    """A loop's declarations about its tensors, in the form of a task."""

    tensor: Say


@dataclass(frozen=True)
class _Loop:
    """The batches of a loop, in the form of a task."""

    batches: Make


class JoinedRun:
    """A run in which this loop is a learner, inside the ``with`` statement (:func:`join`)."""

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
        """Begin. ``address``: where the other ranks reach the first one. ``is_named``: the loop has chosen the name."""
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
        """The settings of this learner."""
        return self._entrance.settings

    @property
    def _run(self) -> KnownRun:
        return self._entrance.run

    @property
    def params(self) -> Any:
        """The parameters as of the last boundary; initially those of the run."""
        return self._parameters.tree

    @property
    def task(self) -> TaskSettings:
        """The run's task settings. ``Mix(run.task, "mix.toml")`` gives the run's batches, or refuses another mix."""
        return self._run.created.task

    @property
    def steps(self) -> int:
        """Steps that this learner has taken in the run. Ranks other than the first count from the time at which they joined."""
        return self._side.steered.step

    @property
    def progress(self) -> float:
        """The share of the token budget that all learners together have used up, 0 to 1, as far as this learner knows."""
        at = self._side.steered.moment()
        return min(max(at.tokens / at.budget, 0.0), 1.0)

    @property
    def learning_rate_factor(self) -> float:
        """The factor of the next step's learning rate by the run's schedule: warm-up, then a cosine over the budget.

        A loop applies it with ``torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: run.learning_rate_factor)``.
        """
        created = self._run.created
        return learning_rate(created, self._side.steered.moment()) / created.inner.learning_rate

    @property
    def refused(self) -> dict[str, int]:
        """The number of offers of this process that the run has refused for good, by reason (docs/user-guide.md).

        With several ranks, only the first one knows it.
        """
        member = self._side.member
        return {} if member is None else member.refusals.offers

    @property
    def missed(self) -> int:
        """The number of versions made without this learner, because its offer was late or missing.

        With several ranks, only the first one knows it.
        """
        member = self._side.member
        return 0 if member is None else member.learner.rounds_missed

    def __enter__(self) -> Self:
        """Join the run, and take over its model.

        Raises:
            BrokerError: the server does not answer in time.
            RunError: there is no such run.
            SettingsError: the run's learners offer gradients, or the identity does not fit.
            AdmissionError: the model differs from the run's, or the steps are too large.
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
        """Book each step of the loop's optimizer, if the loop has passed one, when it has been taken."""
        if self._optimizer is None:
            return

        def book(*of_step: object) -> None:
            if not self.over:
                self.step(self._parameters.tree, loss=self._steps.take_noted())

        handle = self._optimizer.register_step_post_hook(book)
        self._stack.callback(handle.remove)

    def batches(self, make: Make, *, read_ahead: bool = False) -> Iterator[Any]:
        """Yield batches of this learner's shares of the data until the run is over. Call :meth:`step` after each.

        ``make(share, shares, seed, start)`` yields a share's batches without end, beginning with the ``start``-th. The k-th
        batch depends only on share, shares, seed and k. Shares change: those of lost learners are dealt to the others. With
        ``read_ahead`` one further batch may be fetched before the step on the last one, as loaders do.

        Raises:
            DataError: none of the shares has data here.
            SettingsError: a share's batches ended, the last batch was not followed by a step, the loop has its own data, or
                ``read_ahead`` is used with several ranks.
            RunError: the run is not joined.
        """
        self._check_joined()
        if self._own_data:
            raise SettingsError('batches: this loop joined with data="own", so it holds no share: leave out data="own"')
        if read_ahead and self._parameters.ranked is not None:
            raise SettingsError("batches: read_ahead does not work with several ranks: leave it out")
        feed = self._side.feed(_Loop(make), self.tokens)
        while not self.over:
            yield self._steps.open(feed, 2 if read_ahead else 1)

    def step(self, params: Any, *, loss: Any = None, tokens: int | None = None) -> Any:
        """Book an inner step that led to ``params``. Return the parameters, with the versions that have arrived.

        The call takes ``params`` over: JAX arrays are donated, and NumPy arrays are written in place. ``loss`` is a number, or
        a scalar of any framework. It is read one step later, so it may still be on a device. ``tokens`` are the tokens of this
        step, if they vary. The default, and the maximum, are the tokens of ``diloco.join``.

        Raises:
            SettingsError: the parameters are of another model, the loss is not one number, or the tokens are out of range.
            RunError: the run is not joined.
            EjectedError: an operator has ejected this learner.
            RefusedError: the run refuses this learner's work. The message has the reasons and their remedies.
            DilocoError: the losses of ten steps in a row are not finite (without losses: the parameters), or the run cannot
                continue here. The message has the reason.
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
        """Note the loss of the optimizer's next step: a number, or a scalar of any framework.

        Raises:
            SettingsError: the loss is not one number.
        """
        self._steps.note_loss(loss)

    def report(self, *, val_loss: Any) -> None:
        """Show a loss on the loop's own validation data as the run's validation loss. No decision depends on it.

        ``val_loss`` is a number, or a scalar of any framework; the call waits for it. With several ranks the first one's loss
        is shown. A loss that is not finite is not shown.

        Raises:
            SettingsError: the loss is not one number.
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
        """Put averaged weights (EMA) into the loop's parameters inside the ``with`` statement, for an evaluation. PyTorch only.

        ``weights`` are a ``torch.optim.swa_utils.AveragedModel``, another module with the same parameters, or tensors by
        name. They are written in place. Buffers do not change.

        Raises:
            SettingsError: a parameter has no averaged weights, or the parameters are not PyTorch tensors.
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
        """Return the learner's state, for the loop's own checkpoint: its accounts and its unmerged work.

        Call it in all ranks between the same two steps, and save the model and the optimizer there too. Before the ``with``
        statement it returns the keys that can be loaded, which ``torch.distributed.checkpoint`` requests.

        Raises:
            RunError: the run has been left.
            DilocoError: the run cannot continue here, or some rank did not ask for its state.
        """
        if not self._joined and not self._left:
            return self._entrance.expected()
        self._check_joined()
        return self._entrance.packed(*self._wait(self._side.copy_state()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, as the same learner.

        Call it before the ``with`` statement, after loading the model of the same checkpoint. Work that was merged since then
        counts as merged, and is not offered again.

        Raises:
            RunError: the run is joined already.
            SettingsError: the state is invalid, or of another run, learner or model.
        """
        if self._joined:
            raise RunError(f"run {self.settings.run!r}: is joined already: call load_state_dict before the with statement")
        self._entrance.load(state)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait until the last work is merged, at most ``leave_s``, and leave the run. After an error, leave it at once.

        Raises:
            RefusedError: the run has refused offers of this process, and merged none.
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
        """Pass boundaries until a step may be taken, or the run is over."""
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
        """Pass boundaries until no work is unmerged, or, if the run is over, until its last versions have arrived."""
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
    """Return a run, for a ``with`` statement inside which this loop is a learner.

    In a PyTorch process group of several ranks, all ranks call it, and together they are one learner.

    Args:
        url: URL of the run's NATS server. In a run with regions, that of the control store.
        bulk_url: in a run with regions, URL of the region's own server.
        run: the run's name.
        params: a pytree of float32 arrays of JAX or NumPy; or a torch module, or its tensors by name. A run without a model
            starts from them. They must not share memory. For a module, frozen parameters are compared with those of the run's
            other learners, and float32 buffers are averaged.
        tokens: tokens of each step, over all ranks, for the run's budget and for the weight of the work.
        data: "dealt": :meth:`JoinedRun.batches` gives the batches of this learner's shares. "own": the loop has its own
            loader. It then holds no share, and the run's ledger reports its data as not accounted for.
        name: the learner's name, of lower-case letters, digits, - and _. Default: made from host and process.
        tensor: ``tensor(path, shape)`` declares how an array is merged, as in a task (docs/task-api.md, Tensors), such as
            ``diloco_learner.kernels.flax``. Default: by its shape. All learners of a run must declare the same.
        share: the data share that this learner takes if it is free.
        region: this learner's region, in a run with regions.
        identity: identity file that ``diloco keys`` made.
        leave_s: longest wait at the end, for the last work to be merged or for the run's last versions.
        within_s: longest wait at the beginning, for the server, the run and the other ranks.
        address: HOST:PORT at which the other ranks reach the first one, the same in all. Default: a free port of
            ``MASTER_ADDR``.
        optimizer: a PyTorch optimizer, each of whose steps is booked. The loop then does not call ``run.step``.

    Raises:
        SettingsError: an argument or a parameter is invalid.
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
    """Return a run in virtual surroundings; everything else is as in :func:`join`."""
    joined = join("nats://virtual", params=params, **more)
    joined.surround = surround
    return joined
