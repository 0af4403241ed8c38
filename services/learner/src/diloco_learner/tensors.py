"""A task's declarations about its tensors: how each is merged, optimized and split over a mesh, or that it is frozen.

A task of an earlier version says so by ``is_embedding``, ``matrices`` and ``partition``; :func:`tensor_of` alone reads these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from diloco.core.tensors.arrangement import Arrangement, arranged
from diloco.core.tensors.fragments import TensorSpec
from diloco.errors import SettingsError
from diloco.settings.validation import nearest
from diloco_learner.api import members

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

Kind = Literal["matrix", "embedding", "head", "vector", "frozen"]
KINDS: tuple[str, ...] = get_args(Kind)
EARLIER = ("is_embedding", "matrices", "partition")
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of a model, as its task sees it (docs/task-api.md, Tensors)."""

    kind: Kind
    output_axis: int | tuple[int, ...] = 0  # the axis of output units, or several; -1 for kernels of shape (in, out)
    parts: tuple[int, ...] = ()  # sizes along the last output axis of matrices fused into one; (): one matrix
    partition: PartitionSpec | None = None  # over the axes "data", "fsdp", "tensor"; None: the mesh's default
    stacked: bool = False  # the first axis is an axis of layers, as in jax.lax.scan

    def spec(self, path: str, shape: Shape) -> TensorSpec:
        """Return the tensor as the log has it, of this path and shape in the model."""
        kept = self.arrangement(shape)
        stored = shape if kept is None else kept.stored_shape
        return TensorSpec(path, stored, self.kind == "embedding", kept, layers=shape[0] if self.stacked else 0)

    def arrangement(self, shape: Shape) -> Arrangement | None:
        """Return how the log has the tensor, of this shape in the model; None: alike."""
        if self.kind in ("embedding", "frozen") or len(shape) < 2:
            return None
        vector: Shape = (0,) if self.stacked else ()
        return arranged(shape, vector if self.kind == "vector" else self.outputs(shape))

    def outputs(self, shape: Shape) -> Shape:
        """Return the output axes, counted from the first."""
        said = (self.output_axis,) if isinstance(self.output_axis, int) else self.output_axis
        return tuple(axis % len(shape) for axis in said)

    def matrices(self, shape: Shape) -> tuple[int, ...]:
        """Return the rows of each matrix that an optimizer of matrices treats by itself, one below the other; none: ()."""
        if self.kind != "matrix":
            return ()
        lengths = [shape[axis] for axis in self.outputs(shape)]
        return (self.parts or (lengths[-1],)) * math.prod(lengths[:-1])


def tensor_of(task: object, path: str, shape: Shape) -> Tensor:
    """Return a task's declaration of a tensor; the same each time.

    Raises:
        SettingsError: it says what cannot be.
    """
    say: Callable[[str, Shape], Any] | None = getattr(task, "tensor", None)
    if say is None:
        return _said_earlier(task, path, shape)
    tensor = say(path, shape)
    refuse = functools.partial(_refused, f"task: tensor({path!r}, {shape})", members.place(say))
    if not isinstance(tensor, Tensor):
        raise refuse(f"is {tensor!r}, expected a Tensor(kind=...)")
    if tensor.kind not in KINDS:
        raise refuse(f"has the kind {tensor.kind!r}{nearest(str(tensor.kind), KINDS)}; the kinds are {', '.join(KINDS)}")
    if tensor.kind in ("matrix", "head"):
        _check_axes(tensor, shape, refuse)
    elif tensor.parts:
        raise refuse(f"has parts, which a {tensor.kind} must not have")
    if tensor.stacked and not shape:
        raise refuse("is stacked, but has no axes: a stack has the axis of its layers first")
    return tensor


def trained(said: object, path: str, shape: Shape, instead: str) -> Tensor:
    """Return what a task, or a user's own loop, says of a tensor that is trained.

    Raises:
        SettingsError: it says what cannot be, or that the tensor is frozen, which it says by ``instead``.
    """
    tensor = tensor_of(said, path, shape)
    if tensor.kind == "frozen":
        raise SettingsError(f"task: tensor({path!r}) is frozen, which {instead}")
    return tensor


def check_members(task: object) -> None:
    """Check that a task declares its tensors in one way only.

    Raises:
        SettingsError: it says so in two.
    """
    both = [name for name in EARLIER if hasattr(task, name)]
    if both and hasattr(task, "tensor"):
        place = members.place(task.tensor)
        raise SettingsError(f"task: has tensor() and {both[0]}(), which tensor() replaces: remove {both[0]}(){place}")


def _refused(asked: str, place: str, reason: str) -> SettingsError:
    return SettingsError(f"{asked} {reason}{place}")


def _check_axes(tensor: Tensor, shape: Shape, refuse: Callable[[str], SettingsError]) -> None:
    if len(shape) < 2:
        raise refuse(f"is a {tensor.kind}, which has two axes or more: call it a 'vector'")
    said = (tensor.output_axis,) if isinstance(tensor.output_axis, int) else tensor.output_axis
    if not isinstance(said, tuple) or not all(isinstance(axis, int) and -len(shape) <= axis < len(shape) for axis in said):
        raise refuse(f"has output_axis = {tensor.output_axis!r}, expected one of its {len(shape)} axes, or a tuple of them")
    outputs = tensor.outputs(shape)
    if not 0 < len(set(outputs)) == len(outputs) < len(shape):
        raise refuse(
            f"has output_axis = {tensor.output_axis!r}, expected each axis at most once, and at least one other axis as input"
        )
    if tensor.stacked and outputs[0] != 0:
        raise refuse(f"is stacked, and has output_axis = {tensor.output_axis!r}: name the axis of layers, 0, before the others")
    length = shape[outputs[-1]]
    if tensor.parts and (not all(isinstance(rows, int) and rows > 0 for rows in tensor.parts) or sum(tensor.parts) != length):
        raise refuse(f"has parts = {tensor.parts!r}, expected numbers that add up to the {length} of its output axis")


def _said_earlier(task: object, path: str, shape: Shape) -> Tensor:
    """Return what members of an earlier version say; every axis but the last is one of output units there."""
    embedding, matrices, partition = (getattr(task, name, None) for name in EARLIER)
    split = None if partition is None else partition(path, shape)
    if embedding is not None and embedding(path):
        return Tensor(kind="embedding", partition=split)
    if len(shape) < 2:
        return Tensor(kind="vector", partition=split)
    outputs = tuple(range(len(shape) - 1))
    count = 0 if len(shape) > 2 else 1 if matrices is None else matrices(path)
    if not isinstance(count, int) or count < 0 or (count and shape[0] % count):
        raise SettingsError(
            f"task: matrices({path!r}) is {count!r}, expected a divisor of its {shape[0]} rows, or 0{members.place(matrices)}"  # type: ignore[arg-type]
        )
    if not count:
        return Tensor(kind="head", output_axis=outputs, partition=split)
    return Tensor(kind="matrix", output_axis=outputs, parts=(shape[0] // count,) * count, partition=split)
