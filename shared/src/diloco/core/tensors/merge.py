"""Merging outer gradients: weighted direct average, and radial-directional averaging (RDA).

Decoupled DiLoCo (arXiv 2604.21428; algorithm.md section 3), with ``phi(x) = x / ||x||``, ``phi(0) = 0`` and norms by segment:

* direct average: ``sum w v / sum w``
* RDA: ``(sum w ||v|| / sum w) * phi(sum w phi(v) / sum w)``, which keeps the merged norm where near-orthogonal outer
  gradients would shrink it as ``1 / sqrt(M)``. Where directions cancel, the segment falls back to the direct average.

Embedding-like tensors have a method of their own, the direct average unless ``merge.embedding`` says otherwise. State is always
averaged.

A merge is an accumulator, so that a region may merge its own learners first, and the owner adds up the regions' results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diloco.core.tensors import quantise
from diloco.core.tensors.compiled import kernels
from diloco.core.tensors.float_mode import exact
from diloco.core.tensors.fragments import Fragment
from diloco.settings.run import MergeSettings

Vector = NDArray[np.float32]
CHUNK = 1 << 17  # values merged at a time, so that their sum stays in the cache from the first learner to the last
# a mean direction shorter than this (1 for equal directions, 1/sqrt(M) for orthogonal ones) has no meaning
VANISHING = 1e-3
# A vector that is not longer than its weight over this has no direction, since its weight over its length is no float32. Rows
# that a learner does not train become so short: the quantisation error that is fed back to them shrinks from offer to offer.
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Accumulator:
    """Additive state of a merge of vectors float32 [size], with norm groups bounded by ``segments``, int64 [groups + 1].

    ``averaged``, bool [groups], says which groups are averaged directly where the method is ``rda``; None: none. The order of
    :meth:`add` decides the last bits of the result: add in the order of the learners' names.
    """

    def __init__(
        self,
        size: int,
        segments: NDArray[np.int64],
        method: Literal["rda", "average"],
        averaged: NDArray[np.bool_] | None = None,
    ) -> None:
        self.size, self.method = size, method
        # an average has one factor for all values; pieces of it are for the cache's sake
        self.segments = segments if method == "rda" else np.append(np.arange(0, size, CHUNK), size)
        groups = self.segments.size - 1
        self._averaged = np.zeros(groups, np.bool_) if method == "average" or averaged is None else averaged
        self.weight = 0.0
        self.norms = np.zeros(groups, np.float64)  # sum of weight * norm, by segment
        self._total: Vector | None = None  # sum of weight * direction (rda) or weight * vector (average)
        self._bodies: list[tuple[NDArray[np.uint16], NDArray[np.uint8], Vector]] = []  # to be added yet: int4, factors

    @classmethod
    def of(cls, fragment: Fragment, choice: MergeSettings) -> Accumulator:
        """Return the empty merge of a fragment."""
        segments, of_embeddings = fragment.segments(choice.granularity), fragment.embedding_groups(choice.granularity)
        averaged = np.where(of_embeddings, choice.embedding == "average", choice.method == "average")
        if averaged.all() or fragment.state:
            return cls(fragment.size, segments, "average")
        return cls(fragment.size, segments, "rda", averaged)

    @exact
    def add(self, body: NDArray[np.uint8], bits: int, weight: float) -> None:
        """Add an outer gradient from its quantised body, uint8 [bytes], which is kept until :meth:`result`."""
        if weight <= 0:
            return
        if bits > 4:
            self.add_values(quantise.dequantise(body, self.size, bits), weight)
            return
        scales, codes = quantise.as_int4(body, self.size, bits)
        squares = np.empty(self.norms.size, np.float64)
        if self.method == "rda":
            kernels.squares4(scales, codes, self.segments, squares)
        self._bodies.append((scales, codes, self._factors(squares, weight)))

    @exact
    def add_values(self, values: Vector, weight: float) -> None:
        """Add an outer gradient, float32 [size]."""
        if weight <= 0:
            return
        squares = np.empty(self.norms.size, np.float64)
        if self.method == "rda":
            kernels.squares32(values, self.segments, squares)
        kernels.add32(values, self.segments, self._factors(squares, weight), self._collect(scaled=False))

    @exact
    def combine(self, other: Accumulator) -> None:
        """Add the contents of another accumulator of the same segments and method."""
        total = self._collect(scaled=False)
        total += other._collect(scaled=False)
        self.weight += other.weight
        self.norms += other.norms

    @exact
    def result(self) -> Vector:
        """Return the merged outer gradient, float32 [size]; zeros if nothing had weight. The accumulator is used up."""
        return self._collect(scaled=self.weight > 0)

    def _collect(self, *, scaled: bool) -> Vector:
        """Return the sum of all gradients that were added, or the result if ``scaled``."""
        fresh = self._total is None
        total = np.empty(self.size, np.float32) if self._total is None else self._total
        if fresh or self._bodies or scaled:
            for first, last in _groups(self.segments):
                for bounds in _pieces(self.segments[first : last + 1]):
                    if fresh:
                        total[bounds[0] : bounds[-1]] = 0
                    for scales, codes, factors in self._bodies:
                        kernels.add4(scales, codes, bounds, factors[first:last], total)
                if scaled:
                    self._scale(total, first, last)
        self._total, self._bodies = total, []
        return total

    def _scale(self, total: Vector, first: int, last: int) -> None:
        """Turn the sums of some segments into their result."""
        segments, norms = self.segments[first : last + 1], self.norms[first:last]
        if self.method == "average":
            factors = np.full(norms.size, 1 / self.weight, np.float32)
        else:
            squares = np.empty(norms.size, np.float64)
            kernels.squares32(total, segments, squares)
            lengths = np.sqrt(squares)
            # where directions cancel, `sum w phi(v) * radius / sum w` is the direct average of vectors of the mean norm
            lengths = np.where(lengths > VANISHING * self.weight, lengths, self.weight)
            radial = norms / self.weight / lengths
            factors = np.where(self._averaged[first:last], 1 / self.weight, radial).astype(np.float32)
        kernels.scale32(total, segments, factors)

    def _factors(self, squares: NDArray[np.float64], weight: float) -> Vector:
        self.weight += weight
        if self.method == "average":
            return np.full(squares.size, weight, np.float32)
        norms = np.sqrt(squares)
        self.norms += weight * norms
        factors = np.divide(weight, norms, out=np.zeros_like(norms), where=norms > weight / FLOAT32_MAX)
        return np.where(self._averaged, weight, factors).astype(np.float32)


def _groups(segments: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of segments that fit into a chunk together; a larger segment stands alone."""
    first, count = 0, segments.size - 1
    while first < count:
        last = int(np.searchsorted(segments, segments[first] + CHUNK, "right")) - 1
        last = min(max(last, first + 1), count)
        yield first, last
        first = last


def _pieces(bounds: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield a group's bounds; bounds of slices if the group is one segment too large for a chunk."""
    if bounds[-1] - bounds[0] <= CHUNK:
        yield bounds
        return
    for start in range(int(bounds[0]), int(bounds[-1]), CHUNK):
        yield np.array([start, min(start + CHUNK, bounds[-1])])
