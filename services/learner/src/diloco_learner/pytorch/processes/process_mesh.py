"""The processes of a learner as PyTorch has them: what they compute together, by collectives of one process group.

A mesh has the axes of the setting ``mesh``. Rows of a batch are split over ``data`` and ``fsdp``. Processes along ``tensor``
take the same rows. Loss, metrics and gradients are means over all processes. A process with more rows than others counts more,
or, of a task that counts its tokens, one with more tokens, so that a mean over processes is the mean over the batch. FSDP2
averages the gradients of the parameters that it shards. Those of all other parameters are averaged here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import distributed, nn

from diloco.errors import IslandError, SettingsError
from diloco.settings.service import MeshSettings
from diloco_learner.api import members
from diloco_learner.pytorch.processes import batches, parallel
from diloco_learner.pytorch.shards import is_sharded, local_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
ROW_AXES = ("data", "fsdp")
LEAST_TORCH = (2, 15)  # with 2.8 the norm of sharded gradients is another one; those between have not been tested
GLOO = "gloo"  # is in the errors of its collectives, which have no type of their own


def axis_sizes(mesh: MeshSettings, count: int) -> dict[str, int]:
    """Return the processes along each axis of the mesh of so many.

    Raises:
        SettingsError: the axes are of more or fewer, or this PyTorch is too old for several processes.
    """
    check_version(torch.__version__, count)
    sizes = mesh.axes(count)
    if (product := math.prod(sizes.values())) != count:
        named = ", ".join(f"mesh.{axis} = {size}" for axis, size in sizes.items())
        raise SettingsError(
            f"mesh: {named} are {product} processes, and a torch learner of {count} (processes.count, --torch-processes) has "
            "one device in each: change the mesh, or the number of processes"
        )
    return sizes


def check_version(version: str, count: int) -> None:
    """Refuse a PyTorch that is too old for a task on several processes.

    Raises:
        SettingsError: it is.
    """
    found = tuple(int(number) for number in version.split(".")[:2])
    if count > 1 and found < LEAST_TORCH:
        raise SettingsError(
            f"a torch task on several processes (processes.count, --torch-processes) needs PyTorch {LEAST_TORCH[0]}."
            f"{LEAST_TORCH[1]} or newer, and {version} is installed here: install a newer one"
        )


class StepSummary(NamedTuple):
    """A step before its optimizer moves anything, over all processes: alike in all of them."""

    loss: float
    metrics: dict[str, float]
    length: float  # of all gradients together
    norm: torch.Tensor  # the same, float32 []


class OneProcess:
    """The only process of a learner: the module stays as it is, and each batch is its own."""

    size, place, row_part = 1, 0, 0

    def spread(self, task: Any, module: nn.Module, source: str) -> nn.Module:
        """Return the module as this process trains it."""
        return module

    def own_rows(self, task: object, batch: Any) -> tuple[Any, float]:
        """Return this process's rows of a batch, and how much their mean counts in a mean over processes."""
        return batch, 1.0

    def total(self, tokens: Any) -> tuple[Any, Any]:
        """Return the tokens of a whole batch, of which this process has counted these in its rows; numbers or tensors [].

        And how much the mean over this process's tokens counts in a mean over processes.
        """
        return tokens, 1.0

    def computing(self) -> AbstractContextManager[None]:
        """Return the context of code that computes with the module."""
        return nullcontext()

    def average(self, masters: Iterable[nn.Parameter]) -> None:
        """Average the gradients that nothing else averages."""

    def average_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Make buffers alike in all processes."""

    def summary(self, loss: torch.Tensor, metrics: Mapping[str, float], gradients: Sequence[torch.Tensor]) -> StepSummary:
        """Return what a step says of itself, from the loss and metrics of this process's rows; wait for the device."""
        norm = torch.nn.utils.get_total_norm(gradients)
        # read now: a question that comes after the optimizer's work waits for it, and holds up the next step
        return StepSummary(loss.item(), dict(metrics), norm.item(), norm)

    def exchange(self, said: T) -> list[T]:
        """Return by process what each has said."""
        return [said]


class ProcessMesh:
    """One of several processes of a learner, which are the ranks of torch's process group.

    ``sizes``: of the axes ``data``, ``fsdp`` and ``tensor``, whose product is the number of processes.
    """

    def __init__(self, sizes: Mapping[str, int], place: int) -> None:
        self.sizes, self.place, self.size = dict(sizes), place, math.prod(sizes.values())
        self._row_parts, self._tensor = math.prod(sizes[axis] for axis in ROW_AXES), sizes[parallel.TENSOR]
        self.row_part = place // self._tensor
        self._metrics: list[str] | None = None  # their names, once a step was taken
        self._to_average: tuple[list[nn.Parameter], list[nn.Parameter]] | None = None  # likewise: whole ones, and sharded ones

    def spread(self, task: Any, module: nn.Module, source: str) -> nn.Module:
        """Return the module as this process trains it: its part of each parameter that is spread over several.

        Raises:
            SettingsError: the module cannot be spread, or what the task's ``parallelize`` returned cannot be trained.
        """
        self._device = parallel.device_of(module, source, members.place(task.module))
        return parallel.spread(task, module, self.device_mesh, self._row_ranks, source)

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that ``parallelize`` is given, without axes of one process."""
        from torch.distributed.device_mesh import init_device_mesh  # a learner of one process does not need it

        axes = {axis: size for axis, size in self.sizes.items() if size > 1}
        return init_device_mesh(self._device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    @property
    def _row_ranks(self) -> range:
        """The ranks that take other rows than this one does, and this one."""
        return range(self.place % self._tensor, self.size, self._tensor)

    def own_rows(self, task: object, batch: Any) -> tuple[Any, float]:
        """Return this process's rows of a batch, and how much their mean counts in a mean over processes.

        Raises:
            SettingsError: the batch has fewer rows than processes take of it.
        """
        rows = self.range_of(task, batch)
        count = batches.rows_of(task, batch)
        return batches.cut(batch, count, rows), len(rows) * self._row_parts / count

    def range_of(self, task: object, batch: Any) -> range:
        """Return which rows of a batch this process takes, one behind another; raise as :meth:`own_rows` does."""
        count, parts = batches.rows_of(task, batch), self._row_parts
        if count < parts:
            raise SettingsError(
                f"task: a batch has {count} rows (the first axis of its largest array, or rows_per_batch), and {parts} "
                f"processes of the learner each take some: make batches of at least {parts} rows, or start fewer processes "
                f"(processes.count, --torch-processes){members.place(task.batches)}"  # type: ignore[attr-defined]
            )
        return range(self.row_part * count // parts, (self.row_part + 1) * count // parts)

    def total(self, tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of a whole batch, [], of which this process has counted these in its rows.

        And how much the mean over this process's tokens counts in a mean over processes, float32 []; nothing if it has none.
        """
        with torch.no_grad(), collective_errors():
            own = torch.as_tensor(tokens.full_tensor() if is_sharded(tokens) else tokens, device=self._device)
            own = own.double() if own.is_floating_point() else own.long()
            together = own.clone()
            distributed.all_reduce(together)
            total = together.div(self._tensor, rounding_mode=None if own.is_floating_point() else "floor")
            return total, (own.double() * self._row_parts / total.clamp(min=1)).float()

    def computing(self) -> AbstractContextManager[None]:
        """Return the context of code that computes with the module, whose errors may be those of collectives."""
        return collective_errors()

    def average(self, masters: Iterable[nn.Parameter]) -> None:
        """Average the gradients that FSDP2 does not average."""
        if self._to_average is None:
            self._to_average = self._not_averaged(masters)
        whole, sharded = self._to_average
        with torch.no_grad(), collective_errors():
            _average(whole, [None], self.size)
            _average(sharded, [self.device_mesh.get_group(axis) for axis in ROW_AXES if self.sizes[axis] > 1], self._row_parts)

    def _not_averaged(self, masters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the masters that each process has whole, and those that are split over processes of the same rows alone."""
        whole, sharded = list[nn.Parameter](), list[nn.Parameter]()
        for master in masters:
            if not is_sharded(master):
                whole.append(master)
            elif self._row_parts > 1 and len(parallel.ranks_of(master) & {*self._row_ranks}) == 1:
                sharded.append(master)
        return whole, sharded

    def average_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Make buffers alike in all processes: floats become their average, and others are the first process's."""
        floats = []
        with torch.no_grad(), collective_errors():
            for buffer in buffers:
                if buffer.is_floating_point():
                    floats.append(buffer)
                else:
                    distributed.broadcast(buffer, 0)
            _sum(floats, [None], self.size)

    def summary(self, loss: torch.Tensor, metrics: Mapping[str, float], gradients: Sequence[torch.Tensor]) -> StepSummary:
        """Return what a step says of itself, from the loss and metrics of this process's rows; wait for the device."""
        if self._metrics is None:
            self._metrics = sorted(metrics)
        with torch.no_grad(), collective_errors():
            square = torch.zeros((), dtype=torch.float64, device=self._device)
            lengths = torch._foreach_norm(list(map(local_of, gradients))) if gradients else []  # noqa: SLF001
            for length, gradient in zip(lengths, gradients, strict=True):
                square += length.double().square() / self._copies(gradient)
            own = [loss.detach().double().to(self._device) / self.size, square]
            own += [square.new_tensor(metrics.get(name, math.nan) / self.size) for name in self._metrics]
            together = torch.stack(own)
            distributed.all_reduce(together)
            value, squares, *means = together.tolist()
        length = math.sqrt(squares)
        return StepSummary(value, dict(zip(self._metrics, means, strict=True)), length, square.new_tensor(length).float())

    def _copies(self, tensor: Any) -> int:
        """Return how many processes have each value of a tensor."""
        if not is_sharded(tensor):
            return self.size
        placed = enumerate(tensor.placements)  # a shard of a shard is not is_shard()
        split = (tensor.device_mesh.size(axis) for axis, placement in placed if not placement.is_replicate())
        parts: int = math.prod(split)
        return self.size // parts

    def exchange(self, said: T) -> list[T]:
        """Return by process what each has said."""
        found: list[Any] = [None] * self.size
        with collective_errors():
            distributed.all_gather_object(found, said)
        return found


Processes: TypeAlias = OneProcess | ProcessMesh


@contextmanager
def collective_errors() -> Iterator[None]:
    """Have an error of a collective say that a process may be gone, and one of a parameter in parts what to do.

    Raises:
        IslandError: a collective failed.
    """
    try:
        yield
    except RuntimeError as error:
        said = (str(error).splitlines() or [""])[0]
        if isinstance(error, distributed.DistError) or GLOO in said:
            raise IslandError(f"a collective operation failed, perhaps because a process is gone: {said}") from None
        if parallel.MIXED in said:
            error.args = (
                "a part of a parameter meets a whole tensor. FSDP2 makes parameters whole while module(...) runs: have loss() "
                "call the module, or a block that is sharded, and not its layers one by one; give an optimizer of whole and "
                f"sharded parameters foreach=False ({said})",
            )
        raise


def _average(masters: Sequence[nn.Parameter], groups: Sequence[Any], count: int) -> None:
    """Average gradients over groups, one after the other; a parameter that has none in any process keeps none."""
    absent = [index for index, master in enumerate(masters) if master.grad is None]
    for index in absent:
        masters[index].grad = torch.zeros_like(masters[index])
    present = [0.0 if index in absent else 1.0 for index in range(len(masters))]
    if not masters:
        return
    counted = masters[0].grad.new_tensor(present) if not is_sharded(masters[0]) else local_of(masters[0]).new_tensor(present)
    _sum([*(local_of(master.grad) for master in masters), counted], groups, count)
    for index in absent:
        if not counted[index]:
            masters[index].grad = None


def _sum(tensors: Sequence[torch.Tensor], groups: Sequence[Any], count: int) -> None:
    """Replace tensors by their sums over groups, one after the other, divided by a ``count``; each in one message."""
    if not tensors:
        return
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for group in groups:
        distributed.all_reduce(together, group=group)
    together /= count
    for tensor, values in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))
