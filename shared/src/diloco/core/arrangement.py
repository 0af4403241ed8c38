"""The way of a model's tensor in the log: output axes first, all others as one axis behind them.

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
    """A tensor of ``shape`` in the model, of which the axes ``outputs`` are the first ones in the log, in this order.

    Without any, the log has it as one row.
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
        lengths = [self.shape[axis] for axis in self.order]
        count = len(self.outputs)
        return (*(lengths[:count] or [1]), math.prod(lengths[count:]))

    def stored(self, values: Any) -> Any:
        """Return an array of NumPy or JAX, any dtype [shape], as the log has it, [stored_shape]."""
        return values.transpose(self.order).reshape(self.stored_shape)

    def restored(self, values: Any) -> Any:
        """Return an array of NumPy or JAX, any dtype [stored_shape], as the model has it, [shape]."""
        lengths = [self.shape[axis] for axis in self.order]
        return values.reshape(lengths).transpose(tuple(int(axis) for axis in np.argsort(self.order)))

    def rows(self, start: int, stop: int) -> tuple[slice, ...]:
        """Return where rows of the log are in the model's tensor."""
        first = self.outputs[0] if self.outputs else None
        return tuple(slice(start, stop) if axis == first else slice(None) for axis in range(len(self.shape)))

    def part(self, start: int, stop: int) -> Arrangement:
        """Return the arrangement of these rows alone, cut out of the model's tensor by :meth:`rows`."""
        lengths = [len(range(*where.indices(n))) for where, n in zip(self.rows(start, stop), self.shape, strict=True)]
        return Arrangement(tuple(lengths), self.outputs)

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
