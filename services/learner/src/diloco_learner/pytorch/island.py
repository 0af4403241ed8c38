"""A ``torch.nn.Module`` as the model of a learner: :class:`diloco_learner.api.model.Model`.

Parameters stay where the module has them, and are read and written in place. A module with parameters in bfloat16 has float32
**masters** beside it, as :class:`diloco_learner.jax.island.Island` has: reads, writes, states and the optimizer concern masters
alone, and each step computes with masters rounded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.fragments import FixedSpec, Fragment, FragmentMap, TensorSpec, cut_model
from diloco.errors import SettingsError
from diloco.member.peer import Layout
from diloco.settings.run import RunSettings
from diloco.states.state import Content
from diloco_learner.api import members
from diloco_learner.api.evaluation import Evaluation, evaluated, own_values, validation_sets
from diloco_learner.api.model import COPY_BYTES, Capture, Vector, compare_states
from diloco_learner.pytorch import names
from diloco_learner.pytorch.device import Queue
from diloco_learner.pytorch.frozen import fixed_specs
from diloco_learner.pytorch.inner import Inner
from diloco_learner.pytorch.task import TorchTask, loss_of
from diloco_learner.pytorch.tensors import TensorRows, check_module, check_views, merged_buffers, on_host, paths_of
from diloco_learner.task_api import STATE


@dataclass(frozen=True)
class TorchStepOutput:
    """A step that was queued: its loss, NaN where it was not taken, the task's own metrics, and the norm of the gradients."""

    outcome: Future[tuple[float, dict[str, float], float]]

    def wait(self) -> float:
        """Wait for the step to end; its loss, or NaN where loss or gradients were not finite and no step was taken."""
        return self.outcome.result()[0]

    def metric_values(self) -> dict[str, float]:
        """Wait for the step to end; the task's own metrics."""
        return self.outcome.result()[1]

    def gradient_norm(self) -> float:
        """Wait for the step to end; the norm of all gradients together, before clipping."""
        return self.outcome.result()[2]


@dataclass(frozen=True)
class TorchReading:
    """A fragment's values as of when it was read: a copy on the device, once its turn has come."""

    values: Future[torch.Tensor]

    def to_host(self, out: Vector | None = None) -> Vector:
        """Wait for the values, and return them as float32 [size of the fragment], in ``out`` if given. From any thread."""
        return on_host(self.values.result(), out)


class TorchIsland:
    """A model begins as ``task.module`` makes it, with torch's random numbers from the run's seed.

    Raises:
        SettingsError: a trained parameter is neither float32 nor bfloat16, or there are none; ``tensors`` are not views of all.
    """

    apart = False

    def __init__(self, task: TorchTask, settings: RunSettings) -> None:
        self.task, self._run, self._queue = task, settings, Queue()
        source = f"task = {settings.task.name!r}"
        torch.manual_seed(settings.seed)
        with members.users_errors(settings.task, task.module):
            self._module = task.module()
            check_module(self._module, source, members.place(task.module))
        rounds = any(tensor.dtype != torch.float32 for tensor in self._module.parameters() if tensor.requires_grad)
        self._masters = copy.deepcopy(self._module).float() if rounds else self._module
        views, of_state = paths_of(self._masters), {}
        if hasattr(task, "tensors"):
            with members.users_errors(settings.task, task.tensors):
                of_masters, of_module = task.tensors(self._masters), task.tensors(self._module)
            views = check_views(_of(of_masters, state=False), self._masters, source, members.place(task.tensors))
            of_state = _of(of_module, state=True)
        self._rows = TensorRows(views)
        self._inner = Inner(settings, task, _masters(self._masters, views))
        self._buffers = {each.name: each.tensor for each in names.buffers_of(self._module) if each.persistent}
        self._state = TensorRows(merged_buffers(task, self._buffers, of_state, source))
        held = names.parameters_of(self._module)
        self._convolutions = {} if hasattr(task, "tensors") else names.convolutions(held)
        self._frozen = [each for each in held if not each.tensor.requires_grad]
        self._layout: dict[str, Chunk] = {}

    def specs(self) -> list[TensorSpec]:
        """Return the tensors that are in the log, state among them."""
        state = [TensorSpec(path, tuple(buffer.shape), state=True) for path, buffer in self._state.views.items()]
        trained = self._rows.specs(self.task, "a torch task expresses by requires_grad_(False)", self._convolutions)
        return [*trained, *state]

    def fragments(self) -> FragmentMap:
        """Return the fragments that the run cuts the model into, and the parameters that are frozen."""
        return cut_model(self.specs(), self._run.fragments, self._fixed)

    @cached_property
    def _fixed(self) -> list[FixedSpec]:
        return fixed_specs(self._frozen)

    def check(self, batch: Any) -> None:
        """Find out that the task's loss of a batch is one number that can be differentiated, and that all keeps its shape.

        It takes a step, whose optimizer state stays: the step that is rehearsed behind it shows whether shapes do.

        Raises:
            SettingsError: it is something else; the module has other parameters after a step, or the optimizer's state has
                more than tensors.
        """
        kept, before = self._kept(steps=True), [each.name for each in names.parameters_of(self._module)]
        self.begin_step(batch, 0.0).wait()
        self._inner.learn_layout()
        for each in names.parameters_of(self._module):
            if each.name not in before:
                raise SettingsError(
                    f"task: parameter {each.name!r} came with the first step: make all of them in module(), or nothing "
                    f"trains it{members.place(self.task.module)}"
                )
        self._restore(kept)

    def rounded_tensors(self) -> list[str]:
        """Return the paths of the trained parameters that the module has in bfloat16."""
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        pairs = zip(self._inner.masters, trained, strict=True)
        return [path for path, parameter in pairs if parameter.dtype == torch.bfloat16]

    def without_gradient(self, batch: Any) -> list[str]:
        """Return the trained parameters on which a batch's loss does not depend, near the first values, where zeros hide none.

        The model has other values then, and is not to be trained.
        """

        def move() -> None:
            with torch.no_grad():
                for view in self._rows.views.values():
                    view.add_(torch.randn_like(view), alpha=0.01)

        self._queue.do(move)
        self.begin_step(batch, 0.0).wait()
        masters = self._inner.masters.items()
        return [path for path, master in masters if master.grad is None or not bool(master.grad.any())]

    # ---- steps

    def measured(self, batch: Any) -> tuple[float, list[str]]:
        """Return a batch's loss, finite or not, and the paths of the parameters whose gradients are not finite.

        Raises:
            SettingsError: the task's loss is no float32 scalar that can be differentiated.
        """
        kept = self._kept(steps=False)
        loss, _ = self._queue.do(self._measure, batch, (0, 0))
        pairs = zip(self._inner.masters, self._gradients(), strict=True)
        self._restore(kept)
        return loss.item(), [path for path, each in pairs if each is not None and not bool(each.isfinite().all())]

    def rehearse(self, batch: Any) -> float:
        """Take a step that changes nothing, so that the first one takes no longer than others, and all arrays are known.

        Return its loss, NaN where loss or gradients were not finite.

        Raises:
            SettingsError: the task's loss is no float32 scalar that can be differentiated; its optimizer's state has more
                than tensors, or other shapes than after a step that was checked.
        """
        kept = self._kept(steps=True)
        loss = self.begin_step(batch, 0.0).wait()
        self._restore(kept)
        self._inner.learn_layout()
        self._inner.reset()
        self._layout = {name: _chunk(name, array) for name, array in self._arrays().items()}
        return loss

    def _kept(self, *, steps: bool) -> dict[str, torch.Tensor]:
        """Return copies of what a loss changes, or a step at a rate of 0.

        These are buffers, and the parameters where an optimizer of the task's own steps, which may have a rate of its own. Of a
        model that fills its device no copy of the parameters has room beside a step.
        """
        changed = self._rows.views if steps and not self._inner.clips else {}
        return {name: tensor.clone() for name, tensor in [*changed.items(), *self._buffers.items()]}

    def _restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        held = self._rows.views | self._buffers
        for name, values in kept.items():
            held[name].copy_(values)

    @property
    def device(self) -> str:
        """Its device or devices, in words."""
        place = next(iter(self._inner.masters.values())).device
        return str(torch.cuda.get_device_name(place)) if place.type == "cuda" else str(place.type)

    def device_bytes(self) -> int | None:
        """Return the memory in use on its device; None where it is not known, as on CPUs. From any thread."""
        place = next(iter(self._inner.masters.values())).device
        return torch.cuda.memory_allocated(place) if place.type == "cuda" else None

    def begin_step(self, batch: Any, learning_rate: float, at: tuple[int, int] = (0, 0)) -> TorchStepOutput:
        """Queue a step. Where loss or gradients are not finite, nothing changes but what the output says."""
        return TorchStepOutput(self._queue.add(self._step, batch, learning_rate, at))

    def finish_step(self) -> None:
        """Do nothing: a step is one piece of work."""

    def _step(self, batch: Any, learning_rate: float, at: tuple[int, int]) -> tuple[float, dict[str, float], float]:
        loss, metrics = self._measure(batch, at)
        found = self._gradients()
        norm = torch.nn.utils.get_total_norm([gradient for gradient in found if gradient is not None])
        # read now: a question that comes after the optimizer's work waits for it, and holds up the next step
        value, length = loss.item(), norm.item()
        if not (math.isfinite(value) and math.isfinite(length)):
            return math.nan, metrics, length
        if self._inner.clips:
            torch.nn.utils.clip_grads_with_norm_(list(self._inner.masters.values()), self._run.inner.clip_norm, norm)
        with members.users_errors(self._run.task, getattr(self.task, "optimizer", None)):
            self._inner.step(learning_rate)
        return value, metrics, length

    def _measure(self, batch: Any, at: tuple[int, int]) -> tuple[torch.Tensor, dict[str, float]]:
        """Return a batch's loss and metrics, and leave the gradients in the module."""
        torch.manual_seed(_key(self._run.seed, *at))
        self._round()
        self._module.train()
        self._module.zero_grad()
        with members.users_errors(self._run.task, self.task.loss):
            loss, metrics = loss_of(self.task, self._module, batch)
            loss.backward()
        return loss, metrics

    def _gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of masters, after a backward pass.

        Raises:
            SettingsError: the module has another parameter than it was made with.
        """
        if self._masters is not self._module:
            for master, parameter in zip(self._masters.parameters(), self._module.parameters(), strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        gradients = [master.grad for master in self._inner.masters.values()]
        if any(gradient is None for gradient in gradients):  # so it is of a parameter that something else has replaced
            own = {id(parameter) for parameter in self._masters.parameters()}
            for path, master in self._inner.masters.items():
                if id(master) not in own:
                    raise SettingsError(
                        f"task: parameter {path!r} was replaced after module() created it, so it is not trained: change "
                        f"its values instead, under torch.no_grad() with copy_(){members.place(self.task.module)}"
                    )
        return gradients

    def _round(self) -> None:
        """Have the module compute with the masters, rounded to its types."""
        with torch.no_grad():
            if self._masters is not self._module:
                for master, parameter in zip(self._masters.parameters(), self._module.parameters(), strict=True):
                    parameter.copy_(master)

    # ---- fragments

    def read(self, fragment: Fragment) -> TorchReading:
        """Queue a copy of a fragment's values, as of the steps and writes so far."""
        return TorchReading(self._queue.add(self._rows_of(fragment).read, fragment))

    snapshot = read  # an offer is made of the values

    def write(self, fragment: Fragment, theta: Vector, reference: Baseline | Vector | None = None, alpha: float = 0.0) -> None:
        """Queue a fragment for writing (:class:`~diloco_learner.api.model.SharedParameters`); vectors: float32 [its size]."""
        self._queue.add(self._rows_of(fragment).write, fragment, theta, reference, alpha)

    def _rows_of(self, fragment: Fragment) -> TensorRows:
        return self._state if fragment.state else self._rows

    # ---- state

    def capture(self, *, optimizer_only: bool = False) -> Capture:
        """Return the state as of the steps and writes so far, to be read in chunks; a copy, where there is room for one."""
        chunks = self.wanted(optimizer_only=optimizer_only)
        held = sum(chunk.size_bytes for chunk in chunks) > min(map(spare_bytes, self._devices()))
        arrays = self._queue.add(self._copied, not held)

        def values() -> Iterator[NDArray[Any]]:
            for chunk in chunks:
                yield np.asarray(_on_host(arrays.result()[chunk.name][chunk.where]), order="C")

        return Capture(Content(chunks, values()), held)

    def wanted(self, *, optimizer_only: bool = False) -> list[Chunk]:
        """Return the chunks of the state that :meth:`put` takes, in any order; a step has been rehearsed."""
        kinds = ("optimizer/",) if optimizer_only else ("params/", "buffers/", "optimizer/")
        return [chunk for name in sorted(self._layout) if name.startswith(kinds) for chunk in self._layout[name].cut()]

    def put(self, chunk: Chunk, values: NDArray[Any]) -> None:
        """Write a chunk of :meth:`wanted`: ``values``, any dtype [its lengths]."""
        self._queue.do(self._put, chunk, values)

    def optimizer_layout(self) -> Layout:
        """Return names, shapes and types of the optimizer state."""
        wholes = {chunk.name: self._layout[chunk.name] for chunk in self.wanted(optimizer_only=True)}
        return Layout(tuple((name, wholes[name].shape, wholes[name].dtype) for name in sorted(wholes)))

    def forget_optimizer(self) -> None:
        """Begin with a fresh optimizer state."""
        self._queue.do(self._inner.reset)

    def check_state(self, state: Mapping[str, Chunk]) -> None:
        """Check that a state of these arrays, by name, is one of this model.

        Raises:
            RunError: an array is missing, not known, or of another shape or type.
        """
        compare_states(self._layout, state)

    def _arrays(self) -> dict[str, torch.Tensor]:
        named = {f"params/{path}": view for path, view in self._rows.views.items()}
        return named | {f"buffers/{name}": buffer for name, buffer in self._buffers.items()} | self._inner.arrays()

    def _devices(self) -> set[torch.device]:
        return {parameter.device for parameter in self._masters.parameters()}

    def _copied(self, copies: bool) -> dict[str, torch.Tensor]:
        return {name: array.clone() if copies else array for name, array in self._arrays().items()}

    def _put(self, chunk: Chunk, values: NDArray[Any]) -> None:
        with torch.no_grad():
            array = self._arrays()[chunk.name]
            array[chunk.where].copy_(torch.from_numpy(np.array(values)))

    # ---- evaluation

    def evaluation(self) -> Evaluation:
        """Return how good the model is, by all that the task has to say it.

        Raises:
            SettingsError: validation sets, or values of the task's own, are not what they can be.
        """
        return self._queue.ask(self._evaluation)

    def check_evaluation(self) -> None:
        """Find out that validation sets and values of the task's own are what they can be.

        Raises:
            SettingsError: they are not.
        """
        with members.users_errors(self._run.task):
            sets = validation_sets(self.task, self._run.task)
        self._queue.ask(self._tried, [batches[0] for batches in sets.values()])
        self._queue.ask(self._own_values)

    def sample(self, seed: int, count: int, prompt: str | None = None) -> str | None:
        """Return text of ``count`` characters from the model, behind a ``prompt`` if given; None if the task draws none."""
        return self._queue.ask(self._sample, seed, count, prompt)

    def _evaluation(self) -> Evaluation:
        with torch.no_grad(), members.users_errors(self._run.task):
            self._begin_to_evaluate(self._run.seed)
            sets = validation_sets(self.task, self._run.task)
            found = {name: [self._loss_and_metrics(batch) for batch in batches] for name, batches in sets.items()}
            return evaluated(found, self._own_values, self._run.task)

    def _tried(self, batches: Sequence[Any]) -> None:
        with torch.no_grad(), members.users_errors(self._run.task, self.task.loss):
            self._begin_to_evaluate(self._run.seed)
            for batch in batches:
                self._loss_and_metrics(batch)

    def _own_values(self) -> dict[str, float]:
        with torch.no_grad(), members.users_errors(self._run.task):
            self._begin_to_evaluate(self._run.seed)
            return own_values(self.task, {}, self._module) if hasattr(self.task, "evaluate") else {}

    def _loss_and_metrics(self, batch: Any) -> tuple[float, dict[str, float]]:
        loss, metrics = loss_of(self.task, self._module, batch)
        return loss.item(), metrics

    def _sample(self, seed: int, count: int, prompt: str | None) -> str | None:
        with torch.no_grad():
            draw, given = getattr(self.task, "sample", None), {} if prompt is None else {"prompt": prompt}
            self._begin_to_evaluate(seed)
            return None if draw is None else str(draw(self._module, count, **given))

    def _begin_to_evaluate(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._round()
        self._module.eval()


def _of(named: Any, *, state: bool) -> Any:
    """Return those of a task's ``tensors`` that are of its state, or the others; what is no mapping as it is."""
    if not isinstance(named, Mapping):
        return {} if state else named
    return {path: view for path, view in named.items() if str(path).startswith(STATE) is state}


def _masters(module: torch.nn.Module, views: Mapping[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by path: that of their view, if they have one, or else by their name."""
    paths: dict[int, list[str]] = {}
    for path, view in views.items():
        paths.setdefault(view.untyped_storage().data_ptr(), []).append(path)
    found = {}
    for each in names.parameters_of(module):
        if each.tensor.requires_grad:
            own = paths[each.tensor.untyped_storage().data_ptr()]
            found[own[0] if len(own) == 1 else each.path] = each.tensor
    return found


def _key(seed: int, share: int, index: int) -> int:
    """Return the seed of torch's random numbers in the step on a batch: the same when the step is done again."""
    return int.from_bytes(blake3(f"{seed} {share} {index}".encode()).digest()[:8], "little") >> 1


def spare_bytes(device: torch.device) -> int:
    """Return how much memory a device has to spare for a copy of a state, beside all that was needed at a time until now.

    A device of which PyTorch does not say it, a CPU for one, is taken to have :data:`COPY_BYTES`.
    """
    if device.type != "cuda":
        return COPY_BYTES
    free_bytes: int = torch.cuda.mem_get_info(device)[0]  # other processes have taken theirs
    unused_bytes: int = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return max(COPY_BYTES, free_bytes + unused_bytes)


def _chunk(name: str, array: torch.Tensor) -> Chunk:
    return Chunk.whole(name, tuple(array.shape), _on_host(array[(slice(0, 0),) * array.ndim]).dtype.name)


def _on_host(array: torch.Tensor) -> NDArray[Any]:
    """Return values on the host; those of bfloat16, which NumPy does not have, as float32."""
    found: NDArray[Any] = (array.float() if array.dtype == torch.bfloat16 else array).detach().cpu().numpy()
    return found
