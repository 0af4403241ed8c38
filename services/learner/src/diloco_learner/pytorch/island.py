"""A ``torch.nn.Module`` as the model of a learner: :class:`diloco_learner.api.model.Model`.

Parameters stay where the module has them, and are read and written in place. A module with parameters in bfloat16 has float32
**masters** beside it, as :class:`diloco_learner.jax.island.Island` has: reads, writes, states and the optimizer concern masters
alone, and each step computes with masters rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.boxes import Box, Boxes, row_layouts
from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.fragments import FixedSpec, Fragment, FragmentMap, TensorSpec, cut_model
from diloco.core.tensors.rows import FragmentRows, RowLayout
from diloco.errors import SettingsError
from diloco.member.peer import Layout
from diloco.settings.run import RunSettings
from diloco_learner.api import members
from diloco_learner.api.evaluation import Evaluation
from diloco_learner.api.model import COPY_BYTES, Capture, Vector, rehearsed_loss
from diloco_learner.pytorch import names
from diloco_learner.pytorch.device import Queue
from diloco_learner.pytorch.frozen import fixed_specs
from diloco_learner.pytorch.holding import HeldState
from diloco_learner.pytorch.inner import Inner, clip
from diloco_learner.pytorch.module_evaluation import TorchEvaluating
from diloco_learner.pytorch.processes.process_mesh import OneProcess, Processes
from diloco_learner.pytorch.processes.spread import SpreadModule
from diloco_learner.pytorch.processes.step_tokens import StepTokens, weighted
from diloco_learner.pytorch.shards import local_of, shards_of
from diloco_learner.pytorch.task import TorchTask, loss_of
from diloco_learner.pytorch.tensors import TensorRows, TorchFragmentCopy, check_module, merged_buffers
from diloco_learner.pytorch.transfers import Transfers

T = TypeVar("T")


@dataclass(frozen=True)
class TorchStepOutput:
    """A step that was queued: its loss, NaN where it was not taken, the task's own metrics, and the norm of the gradients.

    ``counted`` is there once the loss is computed, and not its gradients.
    """

    outcome: Future[tuple[float, dict[str, float], float]]
    counted: StepTokens

    def wait(self) -> float:
        """Wait for the step to end; its loss, or NaN where loss or gradients were not finite and no step was taken."""
        return self.outcome.result()[0]

    def metric_values(self) -> dict[str, float]:
        """Wait for the step to end; the task's own metrics."""
        return self.outcome.result()[1]

    def gradient_norm(self) -> float:
        """Wait for the step to end; the norm of all gradients together, before clipping."""
        return self.outcome.result()[2]

    def tokens(self) -> int | None:
        """Wait until the tokens are known that the loss counts; None: the task does not count them.

        Raises:
            SettingsError: they are above ``tokens_per_batch``, or no whole number.
        """
        return self.counted.wait()


@dataclass(frozen=True)
class TorchReading:
    """A fragment's values, or those that one process hands over, as of when it was read: a copy, once its turn has come."""

    copy: Future[TorchFragmentCopy]
    is_on_host = False  # it is queued behind a step

    def to_host(self, out: Vector | None = None) -> Vector:
        """Wait for the values, and return them in their places, float32 [size of the fragment], in ``out`` if given.

        From any thread.
        """
        return self.copy.result().to_host(out)


class TorchIsland:
    """A model begins as ``task.module`` makes it, with torch's random numbers from the run's seed.

    ``processes``: those of the learner, over which the module is spread. Each process has a part of the model, takes its rows
    of each batch, and calls everything that the others call, in the same order.

    Raises:
        SettingsError: a trained parameter is neither float32 nor bfloat16, or there are none; ``tensors`` are not views of all;
            the module cannot be spread over the processes.
    """

    apart = False

    def __init__(self, task: TorchTask, settings: RunSettings, processes: Processes | None = None) -> None:
        self.task, self._run, self._queue = task, settings, Queue()
        self._processes = OneProcess() if processes is None else processes
        source = f"task = {settings.task.name!r}"
        torch.manual_seed(settings.seed)
        with members.users_errors(settings.task, task.module):
            module = task.module()
            check_module(module, source, members.place(task.module))
        held = names.parameters_of(module)
        self._convolutions = {} if hasattr(task, "tensors") else names.convolutions(held)
        self._frozen = [each for each in held if not each.tensor.requires_grad]
        if self._processes.size > 1:
            self._fixed, self._frozen = fixed_specs(self._frozen), []  # while each is whole
        found = SpreadModule(task, settings, self._processes, module, source)
        self._module, self._masters, self._views = found.module, found.masters, found.views
        self.tables = found.tables
        transfers, views = Transfers(), {path: local_of(view) for path, view in found.views.items()}
        self._transfers = transfers
        self._rows = TensorRows(views, shards_of(found.views), transfers=transfers)
        self._inner = Inner(settings, task, found.trained, found.tables)
        self._buffers = {each.name: each.tensor for each in names.buffers_of(self._module) if each.persistent}
        self._state = TensorRows(merged_buffers(task, self._buffers, found.named_state, source), transfers=transfers)
        self._held, self._evaluating = HeldState(self._arrays), TorchEvaluating(task, settings)
        self._boxes: list[Boxes] = []  # by process, once they have told each other
        self._dealt: list[FragmentRows] = []  # by fragment: what this process hands over; none: it has all

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
        """Check that the task's loss of a batch is one number that can be differentiated, and that all keeps its shape.

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

    def whole_tensors(self) -> list[str]:
        """Return the paths of the trained tensors that this process has whole."""
        return [path for path, view in self._views.items() if local_of(view).shape == view.shape]

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
        loss, _ = self._queue.do(self._measure, batch, (0, 0), StepTokens(self.task, (0, 0)))
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
        loss = rehearsed_loss(self.begin_step(batch, 0.0))
        self._restore(kept)
        self._inner.learn_layout()
        self._inner.reset()
        self._held.learn()
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
        counted = StepTokens(self.task, at)
        outcome = self._queue.add(self._step, batch, learning_rate, at, counted)
        outcome.add_done_callback(lambda ended: None if (error := ended.exception()) is None else counted.fail(error))
        return TorchStepOutput(outcome, counted)

    def finish_step(self) -> None:
        """Do nothing: a step is one piece of work."""

    def _step(
        self, batch: Any, learning_rate: float, at: tuple[int, int], counted: StepTokens
    ) -> tuple[float, dict[str, float], float]:
        loss, metrics = self._measure(batch, at, counted)
        gradients = [gradient for gradient in self._gradients() if gradient is not None]
        found = self._processes.summary(loss, metrics, gradients)
        if not (math.isfinite(found.loss) and math.isfinite(found.length)) or counted.wait() == 0:
            counted.check_uncounted()
            return math.nan, found.metrics, found.length
        if self._inner.clips:
            clip(list(map(local_of, gradients)), self._run.inner.clip_norm, found.norm)
        with members.users_errors(self._run.task, getattr(self.task, "optimizer", None)), self._processes.computing():
            self._inner.step(learning_rate)
        return found.loss, found.metrics, found.length

    def _measure(self, batch: Any, at: tuple[int, int], counted: StepTokens) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss and metrics of this process's rows of a batch, and leave the gradients in the module.

        A mean of them over processes is one over the batch: over its tokens where the task counts them, which ``counted`` gets.
        """
        own, counts = self._processes.own_rows(self.task, batch)
        torch.manual_seed(_key(self._run.seed, *at, self._processes.row_part))
        self._round()
        self._module.train()
        self._module.zero_grad()
        with members.users_errors(self._run.task, self.task.loss), self._processes.computing():
            found = loss_of(self.task, self._module, own)
            total, counts = (None, counts) if found.tokens is None else self._processes.total(found.tokens)
            counted.note(None if total is None else self._transfers.whole_number(total), found.loss, counts)
            loss, metrics = weighted(found, counts)
            loss.backward()
        self._processes.average_buffers(self._buffers.values())
        return loss, metrics

    def _gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of masters, after a backward pass, averaged over the processes.

        Raises:
            SettingsError: the module has another parameter than it was made with.
        """
        if self._masters is not self._module:
            for master, parameter in zip(self._masters.parameters(), self._module.parameters(), strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self._processes.average(self._inner.masters.values())
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
                    local_of(parameter).copy_(local_of(master))

    # ---- fragments

    def read(self, fragment: Fragment) -> TorchReading:
        """Queue a copy of a fragment's values as of the steps and writes so far: all, or those dealt to this process."""
        rows = self._rows_of(fragment)
        if not self._dealt:
            return TorchReading(self._queue.add(rows.read, fragment))
        return TorchReading(self._queue.add(rows.read_rows, fragment, self._dealt[fragment.index]))

    snapshot = read  # an offer is made of the values

    def write(self, fragment: Fragment, theta: Vector, reference: Baseline | Vector | None = None, alpha: float = 0.0) -> None:
        """Queue a fragment for writing (:class:`~diloco_learner.api.model.SharedParameters`); vectors: float32 [its size]."""
        self._queue.add(self._rows_of(fragment).write, fragment, theta, reference, alpha)

    def exchange_parts(self) -> None:
        """Learn which parts of tensors and arrays each process has, once a step was rehearsed. All processes call it."""
        buffers = {path: Box.whole(tuple(view.shape)) for path, view in self._state.views.items()}
        said = self._queue.do(self._processes.exchange, (self._rows.boxes | buffers, self._held.parts))
        self._boxes = [boxes for boxes, _ in said]
        self._held.note_parts(self._processes.place, [parts for _, parts in said])

    def deal_rows(self, fragments: Sequence[Fragment], carriers: Sequence[int]) -> list[RowLayout]:
        """Return by fragment which rows each process has and hands over; from now on this one reads those that it does."""
        layouts = row_layouts(fragments, self._boxes, carriers)
        self._dealt = [layout.read[self._processes.place] for layout in layouts]
        return layouts

    def _rows_of(self, fragment: Fragment) -> TensorRows:
        return self._state if fragment.state else self._rows

    # ---- state

    def capture(self, *, optimizer_only: bool = False) -> Capture:
        """Return what this process has of the state as of the steps and writes so far, to be read in chunks.

        It is of a copy, where there is room for one. Of an optimizer's alone, which is lent, all processes together have each
        value once.
        """
        chunks = self._held.lent() if optimizer_only else self._held.wanted()
        held = sum(chunk.size_bytes for chunk in chunks) > min(map(spare_bytes, self._devices()))
        arrays = self._queue.add(partial(self._held.local, copied=not held))
        return Capture(self._held.content(chunks, arrays.result), held)

    def wanted(self, *, optimizer_only: bool = False) -> list[Chunk]:
        """Return the chunks of the state that :meth:`put` takes, in any order; a step has been rehearsed."""
        return self._held.wanted(optimizer_only=optimizer_only)

    def put(self, chunk: Chunk, values: NDArray[Any]) -> None:
        """Write a chunk of :meth:`wanted`: ``values``, any dtype [its lengths]."""
        self._queue.do(self._held.put, chunk, values)

    def optimizer_layout(self) -> Layout:
        """Return names, shapes and types of the optimizer state."""
        return self._held.layout()

    def optimizer_owners(self) -> Mapping[str, Sequence[tuple[int, Chunk]]]:
        """Return by array of the optimizer state, which process captures which chunk of it; all processes return the same."""
        return self._held.owners()

    def forget_optimizer(self) -> None:
        """Begin with a fresh optimizer state."""
        self._queue.do(self._inner.reset)

    def check_state(self, state: Mapping[str, Chunk]) -> None:
        """Check that a state of these arrays, by name, is one of this model.

        Raises:
            RunError: an array is missing, not known, or of another shape or type.
        """
        self._held.check(state)

    def _arrays(self) -> dict[str, torch.Tensor]:
        named = {f"params/{path}": view for path, view in self._views.items()}
        return named | {f"buffers/{name}": buffer for name, buffer in self._buffers.items()} | self._inner.arrays()

    def _devices(self) -> set[torch.device]:
        return {parameter.device for parameter in self._masters.parameters()}

    # ---- evaluation

    def evaluation(self) -> Evaluation:
        """Return how good the model is, by all that the task has to say it.

        Raises:
            SettingsError: validation sets, or values of the task's own, are not what they can be.
        """
        return self._asked(self._evaluating.evaluation)

    def check_evaluation(self) -> None:
        """Check that validation sets and values of the task's own are what they can be.

        Raises:
            SettingsError: they are not.
        """
        self._asked(self._evaluating.try_out, self._evaluating.first_batches())
        self._asked(self._evaluating.own_values)

    def sample(self, seed: int, count: int, prompt: str | None = None) -> str | None:
        """Return text of ``count`` characters from the model, behind a ``prompt`` if given; None if the task draws none."""
        return self._asked(self._evaluating.sample, seed, count, prompt)

    def _asked(self, question: Callable[..., T], *arguments: Any) -> T:
        """Return the answer to a question about the module as of the steps and writes so far."""

        def answer() -> T:
            self._round()
            return question(self._module, *arguments)

        return self._queue.ask(answer)


def _key(seed: int, share: int, index: int, row_part: int = 0) -> int:
    """Return the seed of torch's random numbers in the step on a batch: the same when the step is done again.

    ``row_part``: numbers the parts of the batch's rows, each of which has numbers of its own.
    """
    text = f"{seed} {share} {index}" + (f" {row_part}" if row_part else "")
    return int.from_bytes(blake3(text.encode()).digest()[:8], "little") >> 1


def spare_bytes(device: torch.device) -> int:
    """Return how much memory a device has to spare for a copy of a state, beside all that was needed at a time until now.

    A device of which PyTorch does not say it, a CPU for one, is taken to have :data:`COPY_BYTES`.
    """
    if device.type != "cuda":
        return COPY_BYTES
    free_bytes: int = torch.cuda.mem_get_info(device)[0]  # other processes have taken theirs
    unused_bytes: int = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return max(COPY_BYTES, free_bytes + unused_bytes)
