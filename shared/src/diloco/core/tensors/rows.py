"""Rows of a fragment that one process of a learner has, and how they travel: one vector after the other, without gaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.fragments import Piece

Vector = NDArray[np.float32]
Where = tuple[slice, ...]
VALUE_BYTES = 4
LEADER = 0  # place of the leader in its generation; its index among all processes is the smallest of the generation


@dataclass(frozen=True)
class FragmentRows:
    """Places in a fragment's vector, in an order that all processes know; a fragment may lie there in part, or not at all."""

    parts: tuple[tuple[Piece, Where], ...]

    @cached_property
    def size(self) -> int:
        """Number of values."""
        return sum(_size(_ranges(piece, where)) for piece, where in self.parts)

    def take(self, vector: Baseline | Vector) -> Vector:
        """Return these values of a fragment's vector, float32 [size of the fragment], as float32 [size].

        They may be a view of it. Of a reference no other rows are computed.
        """
        if len(self.parts) == 1:
            return np.ascontiguousarray(at(vector, *self.parts[0])).reshape(-1)
        values, place = np.empty(self.size, np.float32), 0
        for piece, where in self.parts:
            taken = at(vector, piece, where)
            values[place : place + taken.size].reshape(taken.shape)[...] = taken
            place += taken.size
        return values

    def put(self, values: Vector, vector: Vector) -> None:
        """Write values, float32 [size], to their places in a fragment's vector, float32 [size of the fragment].

        Raises:
            ValueError: there are more or fewer of them.
        """
        if values.size != self.size:
            raise ValueError(f"rows: {values.size} values came, expected {self.size}")
        place = 0
        for piece, where in self.parts:
            target = at(vector, piece, where)
            target[...] = values[place : place + target.size].reshape(target.shape)
            place += target.size

    def cut(self, most_bytes: int) -> Iterator[FragmentRows]:
        """Yield rows of at most so many bytes, one behind another, that are these together."""
        parts, size_bytes = list[tuple[Piece, Where]](), 0
        for piece, where in self.parts:
            for box in _cut(_ranges(piece, where), most_bytes // VALUE_BYTES):
                box_bytes = _size(box) * VALUE_BYTES
                if size_bytes + box_bytes > most_bytes:
                    yield FragmentRows(tuple(parts))
                    parts, size_bytes = [], 0
                if box_bytes:
                    parts.append((piece, tuple(slice(along.start, along.stop, along.step) for along in box)))
                    size_bytes += box_bytes
        if parts:
            yield FragmentRows(tuple(parts))


@dataclass(frozen=True)
class RowLayout:
    """By process, the rows of one fragment: those that it hands over when the fragment is read, and those that it has."""

    read: Sequence[FragmentRows]  # each value once
    held: Sequence[FragmentRows]


def at(vector: Baseline | Vector, piece: Piece, where: Where = ()) -> Vector:
    """Return the values at a place of a piece, float32 [their shape], of its fragment's vector, float32 [size]: a view of it.

    Of a reference the rows at this place are computed, and no others; they must not be written to.
    """
    if not where:
        return vector[piece.offset : piece.offset + piece.size].reshape(piece.shape)
    start, stop, step = where[0].indices(piece.shape[0])
    row_size = piece.size // piece.shape[0]
    rows = vector[piece.offset + start * row_size : piece.offset + max(start, stop) * row_size]
    return rows.reshape(-1, *piece.shape[1:])[(slice(None, None, step), *where[1:])]


def _ranges(piece: Piece, where: Where) -> tuple[range, ...]:
    """Return the places along each axis of a piece."""
    whole = (slice(None),) * (len(piece.shape) - len(where))
    return tuple(range(*part.indices(length)) for part, length in zip((*where, *whole), piece.shape, strict=True))


def _size(box: tuple[range, ...]) -> int:
    return math.prod(map(len, box))


def _cut(box: tuple[range, ...], most: int) -> Iterator[tuple[range, ...]]:
    """Yield boxes of at most so many values that make it up, one behind another in C order."""
    if _size(box) <= most:
        yield box
        return
    axis = next(axis for axis, along in enumerate(box) if len(along) > 1)
    step = max(1, most // _size(box[axis + 1 :]))
    for first in range(0, len(box[axis]), step):
        yield from _cut((*box[:axis], box[axis][first : first + step], *box[axis + 1 :]), most)


def carriers(sizes: Sequence[int], processes: int) -> list[int]:
    """Return by fragment the process that carries it: the largest first, each to the one that carries least so far."""
    carried = [0] * processes
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        least = min(range(processes), key=lambda process: (carried[process], process))
        found[index] = least
        carried[least] += sizes[index]
    return found
