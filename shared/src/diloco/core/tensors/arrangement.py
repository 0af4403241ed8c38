"""The way of a model's tensor in the log: a row for each output unit, of all that goes into it.

The merge has a norm for each vector along the last axis (docs/protocol.md, section 6), which is one output unit's where the
output axes are first. A model may have them elsewhere: kernels of Flax and Haiku are (in, out). So a learner keeps such a
tensor as the log has it, and hands its task a view as the task has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Arrangement:
    """A tensor of ``shape`` in the model, of which the axes ``outputs``, in this order, are the rows of the log as one axis.

    The others are the log's columns as one axis. Without outputs the log has one row.
    """

    shape: Shape
    outputs: tuple[int, ...]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The model's axes in the log's order."""
        return (*self.outputs, *(axis for axis in range(len(self.shape)) if axis not in self.outputs))

    @cached_property
    def stored_shape(self) -> Shape:
        """The shape in the log."""
        lengths, count = [self.shape[axis] for axis in self.order], len(self.outputs)
        return math.prod(lengths[:count]), math.prod(lengths[count:])

    def stored(self, values: Any) -> Any:
        """Return an array of NumPy or JAX, any dtype [shape], as the log has it, [stored_shape]."""
        return values.transpose(self.order).reshape(self.stored_shape)

    def restored(self, values: Any) -> Any:
        """Return an array of NumPy or JAX, any dtype [stored_shape], as the model has it, [shape]."""
        lengths = [self.shape[axis] for axis in self.order]
        return values.reshape(lengths).transpose(tuple(int(axis) for axis in np.argsort(self.order)))

    def box(self, start: int, stop: int) -> tuple[tuple[slice, ...], Arrangement, slice]:
        """Return where rows of the log are in the model's tensor: a part, its arrangement, and the rows in that."""
        if not self.outputs:
            return (slice(None),) * len(self.shape), self, slice(start, stop)
        axis = self.outputs[0]
        inner = self.stored_shape[0] // self.shape[axis]
        first, last = start // inner, -(-stop // inner)
        index = tuple(slice(first, last) if each == axis else slice(None) for each in range(len(self.shape)))
        shape = (*self.shape[:axis], last - first, *self.shape[axis + 1 :])
        return index, Arrangement(shape, self.outputs), slice(start - first * inner, stop - first * inner)

    def replaced(self, values: Any, rows: slice, new: Any) -> Any:
        """Return an array of the model, any dtype [shape], in which ``new`` are the log's rows; ``values`` may change too."""
        stored = self.stored(values)
        stored[rows] = new
        return self.restored(stored)

    @property
    def is_sound(self) -> bool:
        """Whether the output axes are some of the tensor's, each once, and not all of them."""
        return len(set(self.outputs)) == len(self.outputs) < len(self.shape) and all(
            0 <= axis < len(self.shape) for axis in self.outputs
        )


def arranged(shape: Shape, outputs: Sequence[int]) -> Arrangement | None:
    """Return how the log has a tensor of the model with these output axes; None: as the model has it."""
    if len(shape) < 2 or tuple(outputs) == tuple(range(len(shape) - 1)):
        return None
    return Arrangement(shape, tuple(outputs))
