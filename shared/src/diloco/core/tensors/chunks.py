"""Chunks: boxes of arrays, of bounded size, as which a learner's state is saved and lent.

An array may lie in shards on several devices and hosts. Each shard is cut into chunks of :data:`CHUNK_BYTES` at most, so that a
host never has to hold a whole array, and each chunk says where in the array it lies. Another mesh cuts the same array
otherwise: its shards take the parts of these chunks that overlap them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

CHUNK_BYTES = 16 << 20

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """The values of array ``name``, of ``shape`` and ``dtype`` (NumPy's name), from ``start`` to ``stop`` along each axis."""

    name: str
    shape: Shape
    dtype: str
    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], dtype: str) -> Chunk:
        """Return all of an array."""
        return cls(name, tuple(shape), dtype, (0,) * len(shape), tuple(shape))

    @property
    def lengths(self) -> Shape:
        """The shape of its values."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size_bytes(self) -> int:
        return math.prod(self.lengths) * np.dtype(self.dtype).itemsize

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its array."""
        return self.lengths == self.shape

    @property
    def where(self) -> tuple[slice, ...]:
        """Where it lies in its array."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def within(self, outer: Chunk) -> tuple[slice, ...]:
        """Return where it lies in the values of another chunk of the same array, which holds all of it."""
        places = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(start - begin, stop - begin) for start, stop, begin in places)

    def overlap(self, other: Chunk) -> Chunk | None:
        """Return the values that both have of the same array; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(first >= last for first, last in zip(start, stop, strict=True)):
            return None
        return replace(self, start=start, stop=stop)

    def cut(self, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Yield chunks of at most ``most_bytes`` that make it up, one behind another in C order.

        Each is contiguous in this chunk's values.
        """
        lengths, itemsize = self.lengths, np.dtype(self.dtype).itemsize
        if self.size_bytes <= max(most_bytes, itemsize):
            yield self
            return
        axis = next(axis for axis, length in enumerate(lengths) if length > 1)
        step = max(1, most_bytes // (math.prod(lengths[axis + 1 :]) * itemsize))
        for first in range(self.start[axis], self.stop[axis], step):
            start, stop = list(self.start), list(self.stop)
            start[axis], stop[axis] = first, min(first + step, self.stop[axis])
            part = replace(self, start=tuple(start), stop=tuple(stop))
            if step == 1:
                yield from part.cut(most_bytes)
            else:
                yield part
