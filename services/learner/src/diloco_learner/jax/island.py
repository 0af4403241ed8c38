"""An island of accelerators that trains one copy of the model: its parameters, its optimizer state, its one jitted step.

The trainer's thread calls everything here, save :meth:`Reading.to_host`, which is made for another thread. Nothing waits
for the device but what says so. Parameters and optimizer state are donated to the step; a fragment that is to be read is
therefore first copied on the device, which the device does between two steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.fragments import Fragment, FragmentMap, TensorSpec, cut_model
from diloco.core.tensors.rows import RowLayout, at
from diloco.errors import SettingsError
from diloco.member.peer import Layout
from diloco.settings.run import RunSettings
from diloco.states.state import Content
from diloco_learner.api import members
from diloco_learner.api.evaluation import BatchEvaluation, Evaluation
from diloco_learner.api.model import Capture, Vector, compare_states, rehearsed_loss
from diloco_learner.jax import holding, shards
from diloco_learner.jax.arithmetic import Arithmetic
from diloco_learner.jax.devices import OnDevices
from diloco_learner.jax.evaluating import Evaluating
from diloco_learner.jax.fixed import Fixed
from diloco_learner.jax.inner import BuiltIn, optimizer
from diloco_learner.jax.leaves import path_of, write_rows
from diloco_learner.jax.loss import Given, Loss, TokenCount
from diloco_learner.jax.mesh import Placement, copies
from diloco_learner.jax.own_optimizer import OwnOptimizer
from diloco_learner.jax.state import IslandState
from diloco_learner.task import Task


@dataclass(frozen=True)
class StepOutput:
    """A step that was dispatched: scalars that the device may still be working on."""

    loss: jax.Array  # float32, in the task's units
    grad_norm: jax.Array  # float32, before clipping
    finite: jax.Array  # bool: the step was taken
    metrics: Mapping[str, jax.Array]  # float32, by name: those that the task's loss returned
    counted: Callable[[], int] | None = None  # waits for the tokens; None: the task does not count them

    def wait(self) -> float:
        """Wait for the step to end; its loss, or NaN where loss or gradients were not finite and no step was taken."""
        loss, finite = jax.device_get((self.loss, self.finite))  # on their way at once, and not one after the other
        return float(loss) if finite else math.nan

    def metric_values(self) -> dict[str, float]:
        """Wait for the step to end; the task's own metrics."""
        return {name: float(value) for name, value in jax.device_get(dict(self.metrics)).items()}

    def gradient_norm(self) -> float:
        """Wait for the step to end; the norm of all gradients together, before clipping."""
        return float(jax.device_get(self.grad_norm))

    def tokens(self) -> int | None:
        """Wait until the tokens are known that the loss counts; None: the task does not count them.

        Raises:
            SettingsError: they are above ``tokens_per_batch``, or no whole number.
        """
        return None if self.counted is None else self.counted()


@dataclass(frozen=True)
class IslandReading:
    """A fragment's values as of when it was read, still on the device."""

    fragment: Fragment
    pieces: tuple[list[tuple[shards.Where, jax.Array]], ...]  # of each piece: its parts, and where they lie in it
    is_on_host = False  # NumPy arrays of a loop are, and are put together only when they are asked for

    def to_host(self, out: Vector | None = None) -> Vector:
        """Wait for the values and copy them to the host; return them as float32 [size of the fragment].

        They are written into ``out``, of that shape, if given. Callable from any thread.
        """
        vector = np.empty(self.fragment.size, np.float32) if out is None else out
        for parts in self.pieces:
            for _, values in parts:
                if isinstance(values, jax.Array):  # NumPy arrays are there already
                    values.copy_to_host_async()  # all on their way before the first one is waited for
        for piece, parts in zip(self.fragment.pieces, self.pieces, strict=True):
            for where, values in parts:
                at(vector, piece, where)[...] = np.asarray(values)
        return vector


class Island(OnDevices):
    """Parameters begin as ``task.init`` makes them from the run's seed; the optimizer state comes with the first step.

    Where the outer optimizer is AdamW, a step leaves the parameters as they are and adds its gradient to those held.
    Offers are made of them, and a version that is written drops them.

    On a ``mesh`` parameters and all that belongs to them are split over its devices (:mod:`diloco_learner.jax.mesh`).

    A tensor that the task has in bfloat16 is a **master** here, float32, like any other. The model is computed with masters
    rounded, and their gradients move the masters. Reads, writes, states and optimizers concern masters alone, so no rounding is
    in a displacement, and a version is in the master to the last bit.

    A step is one program. With ``apart`` it is two: :meth:`begin_step` makes the gradients, with all devices of all processes,
    and changes nothing; :meth:`finish_step` uses them, with those of one replica alone. So where a process is lost in between,
    the others have the values of before.

    Raises:
        SettingsError: a parameter is neither float32 nor bfloat16, or there are none; a partition does not fit the mesh.
    """

    def __init__(self, task: Task, settings: RunSettings, mesh: Mesh | None = None, *, apart: bool = False) -> None:
        self.task, self._settings, self._cut, self._alpha = task, settings.task, settings.fragments, settings.apply.alpha
        self._placement = Placement(task, mesh, jax.random.key(settings.seed))
        self._model = self._placement.tree
        self._index = {each.path: i for i, each in enumerate(self._model.trained)}
        self._leaves, frozen = self._placement.init()
        if not self._leaves:
            where = members.place(task.init)
            raise SettingsError(f"task {settings.task.name!r}: the model has no parameters that are trained{where}")
        self._fixed = Fixed(task, self._placement, frozen)
        self.task_state = IslandState(task, self._placement)
        if hasattr(task, "optimizer"):
            inner: BuiltIn | OwnOptimizer = OwnOptimizer(task, settings, self._model)
        else:
            matrices = [each.tensor.matrices(each.shape) for each in self._model.trained]
            inner = BuiltIn(optimizer(settings, matrices), len(self._leaves))
        self._does = Arithmetic(Loss(task, settings.seed), inner, self._placement)
        self._evaluating, self.apart = Evaluating(task, settings), apart
        self._optimizer_state: Any = None
        self._gradients = [jnp.zeros_like(leaf) for leaf in self._leaves] if settings.offers_gradients else None
        self._held: bool | None = None  # whether a step has to wait for a capture; None: none was taken yet
        self._fresh_state = self._placement.optimizer_init(inner, self._leaves)
        self._begun: tuple[Any, ...] | None = None  # gradients, state, whether they are finite, and rate
        about = inner, self._leaves, self._gradients is not None
        self._step = self._placement.step(self._does.step, *about)
        self._measure, self._move = self._placement.step_apart(self._does.measure, self._does.move, *about)
        self._loss = jax.jit(self._does.evaluate)
        self._count = TokenCount(self._does.loss, self._placement.count(self._does.count))

    def twin(self) -> Island:
        """Return an island of the same model that shares this one's compiled programs, with values of its own.

        They are this one's values; its optimizer begins afresh.
        """
        other = copy.copy(self)
        gradients = None if self._gradients is None else [jnp.zeros_like(leaf) for leaf in self._leaves]
        state = self.task_state.twin()
        vars(other).update(_leaves=copies(self._leaves), _optimizer_state=None, _gradients=gradients, task_state=state)
        return other

    def tensors(self) -> list[TensorSpec]:
        """Return the tensors that are trained, as the log has them, in the order in which JAX flattens the task's tree."""
        return self._model.specs()

    def specs(self) -> list[TensorSpec]:
        """Return the tensors that are in the log, state among them."""
        return [*self.tensors(), *self.task_state.specs()]

    def fragments(self) -> FragmentMap:
        """Return the fragments that the run cuts the model into, state among them, and the tensors that are in none."""
        return cut_model(self.specs(), self._cut, self._fixed.specs())

    def rounded_tensors(self) -> list[str]:
        """Return the paths of the tensors that the task has in bfloat16."""
        return [each.path for each in self._model.trained if each.dtype == jnp.bfloat16]

    def check(self, batch: Any) -> None:
        """Check that the task's loss of a batch is one number that can be differentiated, and that the mesh fits a batch.

        Raises:
            SettingsError: it is something else, or does not.
        """
        self._placement.check_batch(batch)
        for program in (self._does.measure, self._does.evaluate):
            jax.eval_shape(program, self._leaves, self.task_state.values, batch, self._given((0, 0)))

    @property
    def own_rows(self) -> range:
        """The rows of a batch that the devices of this process take, on a mesh; one was checked before."""
        return self._placement.own_rows

    def params(self) -> Any:
        """Return the parameters as the task has them, in its pytree; they are valid until the next step or write."""
        return self._does.tree(self._does.rounded(self._leaves), self._fixed.given)

    def prepare(self, fragment_map: FragmentMap) -> None:
        """Compile all that :meth:`read` and :meth:`write` need; values stay as they are."""
        for fragment in fragment_map.fragments:
            theta = self.read(fragment).to_host()
            for reference, alpha in ((theta, 0.0), (None, self._alpha), (None, 0.0)):
                self.write(fragment, theta, reference, alpha)

    def trace(self, batch: Any) -> list[jax.stages.Lowered]:
        """Trace the programs of :meth:`step` with such batches. Once these are compiled, no step is traced or compiled."""
        batch, given, rate = self._placement.batch(batch), self._given((0, 0)), np.float32(0)
        read = self._leaves, self.task_state.values, batch, given
        if self.apart:
            measured = self._placement.measured(self._leaves, self.task_state.values)
            programs = [self._measure.lower(*read), self._move.lower(*self._values(), *measured, rate)]
        else:
            programs = [self._step.lower(*self._values(), batch, given, rate)]
        return [*programs, *self._count.lower(programs[0], *read)]

    def rehearse(self, batch: Any) -> float:
        """Take a step that changes no parameter, so that the first one takes no longer than others: memory is touched.

        Optimizer and task's state begin afresh, but for state that is merged, and no gradient is held. What the step needed
        says if a copy of all may be made. Return as :meth:`StepOutput.wait`.
        """
        merged = self.task_state.copies()
        own = isinstance(self._does.optimizer, OwnOptimizer)  # it may have a rate of its own, and step all the same
        kept = copies(self._leaves) if own else None
        loss = rehearsed_loss(self.step(batch, 0.0))
        self._leaves = self._leaves if kept is None else kept
        self._optimizer_state = None
        self.task_state.begin_again(merged)
        self._gradients = None if self._gradients is None else [jnp.zeros_like(leaf) for leaf in self._leaves]
        self._held = not holding.fits(list(self.arrays().values()))
        return loss

    def measured(self, batch: Any) -> tuple[float, list[str]]:
        """Return a batch's loss, finite or not, and the paths of the tensors whose gradients are not finite."""
        arguments = self._leaves, self.task_state.values, self._placement.batch(batch), self._given((0, 0))
        gradients, _, output = jax.jit(self._does.measure)(*arguments)
        pairs = zip(self._index, gradients, strict=True)
        return float(output[0]), [path for path, gradient in pairs if not bool(jnp.isfinite(gradient).all())]

    @property
    def holds(self) -> bool:
        """Whether a step has to wait until a capture has been read, as far as a rehearsal has shown."""
        return bool(self._held)

    def hold(self) -> None:
        """Make steps wait for captures even if there is room here, because another process of the learner has none."""
        self._held = True

    def step(self, batch: Any, learning_rate: float, at: tuple[int, int] = (0, 0)) -> StepOutput:
        """Dispatch one inner step. Where loss or gradients are not finite, nothing changes but what the output says.

        ``at`` is the share of the batch, and its index in it: the task's random key is made of them. It raises SettingsError
        where the batch has other arrays than the one that was checked.
        """
        output = self.begin_step(batch, learning_rate, at)
        self.finish_step()
        return output

    def begin_step(self, batch: Any, learning_rate: float, at: tuple[int, int] = (0, 0)) -> StepOutput:
        """Dispatch the first program of a step; one that is not :attr:`apart` has no other. It raises as :meth:`step` does."""
        self._placement.check_alike(batch)
        placed, given, rate = self._placement.batch(batch), self._given(at), np.float32(learning_rate)
        read = self._leaves, self.task_state.values, placed, given
        ahead = self._count.begin(*read)
        if self.apart:
            gradients, after, output = self._measure(*read)
            self._begun = gradients, after, output[2], rate
        else:
            *values, output = self._step(*self._values(), placed, given, rate)
            self._leaves, self._gradients, self._optimizer_state, self.task_state.values = values
        return StepOutput(*output[:-1], **self._count.waiting(ahead, output[-1], at))

    def finish_step(self) -> None:
        """Dispatch the second program of the step that was begun, if there is one."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        moved = self._move(*self._values(), *begun)
        self._leaves, self._gradients, self._optimizer_state, self.task_state.values = moved

    def _values(self) -> tuple[Any, ...]:
        """Return what a step takes for its own."""
        return self._leaves, self._gradients, self._current_optimizer_state(), self.task_state.values

    def _given(self, at: tuple[int, int]) -> Given:
        return self._does.loss.given(at) | self._fixed.given

    def read(self, fragment: Fragment) -> IslandReading:
        """Queue a copy of a fragment's values on the device, as of the steps and writes so far."""
        return _reading(fragment, self._leaf)

    def snapshot(self, fragment: Fragment) -> IslandReading:
        """Queue a copy of what an offer is made of: the values; for an outer AdamW the gradients since they were written."""
        held = None if fragment.state else self._gradients
        return _reading(fragment, self._leaf if held is None else lambda path: held[self._index[path]])

    def write(self, fragment: Fragment, theta: Vector, reference: Baseline | Vector | None = None, alpha: float = 0.0) -> None:
        """Queue ``alpha * value + (1 - alpha) * kept``, where ``kept`` is ``theta + (value - reference)``, else ``theta``.

        ``alpha`` is the mixing of Decoupled DiLoCo (arXiv 2604.21428) on receipt. Without ``reference`` and ``alpha`` the value
        becomes ``theta`` whatever it was, NaN too; without ``reference`` gradients that are held are dropped.
        Both are float32 [size of the fragment], and made of what must not change until the next step has ended.
        """
        for piece in fragment.pieces:
            written = write_rows(self._leaf(piece.path), piece, theta, reference, alpha)
            assert isinstance(written, jax.Array)
            if fragment.state:
                self.task_state[piece.path] = written
                continue
            at = self._index[piece.path]
            self._leaves[at] = written
            if self._gradients is not None and reference is None:
                self._gradients[at] = shards.clear(self._gradients[at], piece)

    def deal_rows(self, fragments: Sequence[Fragment], carriers: Sequence[int]) -> list[RowLayout]:
        """Return by fragment which rows each process of this learner has and hands over; all processes return the same."""
        return [shards.layout(fragment, self._leaf, jax.process_count()) for fragment in fragments]

    def evaluate(self) -> float:
        """Return the mean loss over the task's validation batches, in the task's units; raise SettingsError if it has none."""
        loss = self.evaluation().loss
        if loss is None:
            raise SettingsError(f"task.name = {self._settings.name!r}: it has no validation(), so there is no validation loss")
        return loss

    def evaluation(self) -> Evaluation:
        """Return how good the model is, by all that the task has to say it."""
        return self._evaluating.evaluation(self._batch_evaluation, self.params(), self.company())

    def check_evaluation(self) -> None:
        """Check that validation sets and values of the task's own are what they can be; no loss is computed.

        Raises:
            SettingsError: they are not.
        """

        def trace(batch: Any) -> object:
            return jax.eval_shape(self._does.evaluate, self._leaves, self.task_state.values, batch, self._fixed.given)

        self._evaluating.check(trace, self.params(), self.company())

    @property
    def constants(self) -> Any:
        """The task's constants; None if it has none."""
        return self._fixed.given.get("constants")

    def company(self) -> dict[str, Any]:
        """Return the state and the constants that the task has beside its parameters; None for what it has not."""
        return {"state": self.task_state.values, "constants": self.constants}

    def _batch_evaluation(self, batch: Any) -> BatchEvaluation:
        placed = self._placement.batch(batch)
        found = self._loss(self._leaves, self.task_state.values, placed, self._fixed.given)
        return BatchEvaluation.of(*jax.device_get(found))

    def sample(self, seed: int, count: int, prompt: str | None = None) -> str | None:
        """Return text of ``count`` characters from the model, behind a ``prompt`` if given; None if the task draws none."""
        return self._evaluating.sample(self.params(), self.company(), seed, count, prompt)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return parameters (``params/...``), gradients held and optimizer state by name, any dtype [...] on the host."""
        return {name: np.array(leaf) for name, leaf in self.arrays().items()}

    def arrays(self, *, optimizer_only: bool = False) -> dict[str, jax.Array]:
        """Return the arrays of :meth:`state` by name, or the optimizer's alone; they are valid until the next step or write."""
        keyed, _ = jax.tree_util.tree_flatten_with_path(self._current_optimizer_state())
        named = {f"optimizer/{path_of(keys)}": leaf for keys, leaf in keyed}
        if not optimizer_only:
            named |= {f"params/{path}": leaf for path, leaf in zip(self._index, self._leaves, strict=True)}
            named |= {f"gradients/{path}": leaf for path, leaf in zip(self._index, self._gradients or (), strict=False)}
            named |= self.task_state.arrays()
        return named

    def capture(self, *, optimizer_only: bool = False) -> Capture:
        """Return what :meth:`arrays` has in this process's shards, as of the steps and writes so far, to be read in chunks.

        Of the optimizer's alone, which are lent, all processes together have each value once.
        Where the devices have room for it, a copy is queued on them, and training may go on. Where they have not, the next
        step or write has to wait until all has been read.
        """
        arrays = self.arrays(optimizer_only=optimizer_only)
        held = not holding.fits(list(arrays.values())) if self._held is None else self._held
        if not held:
            arrays = dict(zip(arrays, copies(list(arrays.values())), strict=True))
        return Capture(holding.content(arrays, firsts=optimizer_only), held)

    def settled(self) -> Content:
        """Return what :meth:`arrays` has in this process's shards, read without any program: devices may hang."""
        return holding.settled(self.arrays())

    def wanted(self, *, optimizer_only: bool = False) -> list[Chunk]:
        """Return the chunks that the shards of this process are made of: what :meth:`put` takes, in any order."""
        return holding.wanted(self.arrays(optimizer_only=optimizer_only))

    def put(self, chunk: Chunk, values: NDArray[Any]) -> None:
        """Write a chunk of :meth:`wanted`: ``values``, any dtype [its lengths]."""
        kind, _, path = chunk.name.partition("/")
        if kind == "optimizer":
            self._optimizer_state = holding.written(kind, self._current_optimizer_state(), chunk, values)
            return
        if kind == "state":
            self.task_state.values = holding.written(kind, self.task_state.values, chunk, values)
            return
        leaves = self._leaves if kind == "params" else self._gradients
        assert leaves is not None
        at = self._index[path]
        leaves[at] = holding.write(leaves[at], chunk, values)

    def forget_optimizer(self) -> None:
        """Begin with a fresh optimizer state."""
        self._optimizer_state = None

    def optimizer_layout(self) -> Layout:
        """Return names, shapes and types of the optimizer state."""
        return Layout.of(self.arrays(optimizer_only=True))

    def optimizer_owners(self) -> Mapping[str, Sequence[tuple[int, Chunk]]]:
        """Return by array of the optimizer state, which process captures which chunk of it; all processes return the same."""
        return holding.owners(self.arrays(optimizer_only=True))

    def check_state(self, state: Mapping[str, Chunk]) -> None:
        """Check that a state of these arrays, by name, is one of this model.

        Raises:
            RunError: an array is missing, not known, or of another shape or type.
        """
        own = {name: Chunk.whole(name, leaf.shape, leaf.dtype.name) for name, leaf in self.arrays().items()}
        compare_states(own, state)

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over the arrays of :meth:`state`, any dtype [...], by name.

        Raises:
            RunError: an array is missing, not known, or of another shape or type; nothing has changed.
        """
        self.check_state({name: Chunk.whole(name, values.shape, values.dtype.name) for name, values in state.items()})
        for chunk in self.wanted():
            self.put(chunk, state[chunk.name][chunk.where])

    def load_optimizer(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over an optimizer state: arrays by name, any dtype [...], of :meth:`optimizer_layout`."""
        for chunk in self.wanted(optimizer_only=True):
            self.put(chunk, state[chunk.name][chunk.where])

    def _current_optimizer_state(self) -> Any:
        if self._optimizer_state is None:
            self._optimizer_state = self._fresh_state(self._leaves)
        return self._optimizer_state

    def _leaf(self, path: str) -> jax.Array:
        """Return the array of a tensor of the log: a master, or one of the task's state."""
        return self.task_state[path] if path in self.task_state else self._leaves[self._index[path]]


def _reading(fragment: Fragment, leaf: Callable[[str], jax.Array]) -> IslandReading:
    return IslandReading(fragment, tuple(shards.read(leaf(piece.path), piece) for piece in fragment.pieces))
