"""Rows of a fragment that one process of a learner has, and how they travel: one vector after the other, without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from diloco.core.delta import Reference
from diloco.core.fragments import Piece

Vector = NDArray[np.float32]
Where = tuple[slice, ...]


@dataclass(frozen=True)
class Rows:
    """Places in a fragment's vector, in an order that all processes know; a fragment may lie there in part, or not at all."""

    parts: tuple[tuple[Piece, Where], ...]

    @cached_property
    def size(self) -> int:
        """Number of values."""
        return sum(_shape_size(piece, where) for piece, where in self.parts)

    def take(self, vector: Reference | Vector) -> Vector:
        """Return these values of a fragment's vector, float32 [size of the fragment], as float32 [size]."""
        values, at = np.empty(self.size, np.float32), 0
        for piece, where in self.parts:
            taken = _part(vector, piece)[where]
            values[at : at + taken.size].reshape(taken.shape)[...] = taken
            at += taken.size
        return values

    def put(self, values: Vector, vector: Vector) -> None:
        """Write values, float32 [size], to their places in a fragment's vector, float32 [size of the fragment].

        Raises:
            ValueError: there are more or fewer of them.
        """
        if values.size != self.size:
            raise ValueError(f"rows: {values.size} values came, expected {self.size}")
        at = 0
        for piece, where in self.parts:
            target = _part(vector, piece)[where]
            count = target.size
            _part(vector, piece)[where] = values[at : at + count].reshape(target.shape)
            at += count


@dataclass(frozen=True)
class RowLayout:
    """By process, the rows of one fragment: those that it hands over when the fragment is read, and those that it has."""

    read: Sequence[Rows]  # each value once
    held: Sequence[Rows]


def _part(vector: Reference | Vector, piece: Piece) -> Vector:
    return vector[piece.offset : piece.offset + piece.size].reshape(piece.shape)


def _shape_size(piece: Piece, where: Where) -> int:
    size = 1
    for axis, part in enumerate(where):
        size *= len(range(*part.indices(piece.shape[axis])))
    for length in piece.shape[len(where) :]:
        size *= length
    return size


def carriers(sizes: Sequence[int], processes: int) -> list[int]:
    """Return by fragment the process that carries it: the largest first, each to the one that carries least so far."""
    carried = [0] * processes
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least = min(range(processes), key=lambda process: (carried[process], process))
        found[index] = least
        carried[least] += sizes[index]
    return found
