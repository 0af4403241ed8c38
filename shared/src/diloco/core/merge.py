"""Merging outer gradients: weighted direct average, and radial-directional averaging (RDA).

Decoupled DiLoCo (arXiv 2604.21428; algorithm.md section 3), with ``phi(x) = x / ||x||``, ``phi(0) = 0`` and norms by segment:

* direct average: ``sum w v / sum w``
* RDA: ``(sum w ||v|| / sum w) * phi(sum w phi(v) / sum w)``, which keeps the merged norm where near-orthogonal outer
  gradients would shrink it as ``1 / sqrt(M)``. Where directions cancel, the segment falls back to the direct average.

A merge is an accumulator, so that a region may merge its own learners first and others add up what regions made.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diloco.core import kernels, quantise

Vector = NDArray[np.float32]
# a mean direction shorter than this (1 for equal directions, 1/sqrt(M) for orthogonal ones) has no meaning
VANISHING = 1e-3


class Accumulator:
    """Additive state of a merge of vectors of ``size`` values whose norm groups are bounded by ``segments``.

    The order of :meth:`add` decides the last bits of the result: add in the order of the learners' names.
    """

    def __init__(self, size: int, segments: NDArray[np.int64], method: Literal["rda", "average"]) -> None:
        self.size, self.method = size, method
        self.segments = segments if method == "rda" else np.array([0, size], np.int64)
        self.weight = 0.0
        self.norms = np.zeros(self.segments.size - 1, np.float64)  # sum of weight * norm, by segment
        self.total = np.zeros(size, np.float32)  # sum of weight * direction (rda) or weight * vector (average)

    def add(self, body: NDArray[np.uint8], bits: int, weight: float) -> None:
        """Add an outer gradient straight from its quantised body."""
        if weight <= 0:
            return
        if bits != 4:
            self.add_values(quantise.dequantise(body, self.size, bits), weight)
            return
        scales, codes = quantise.split4(body, self.size)
        squares = np.empty(self.norms.size, np.float64)
        if self.method == "rda":
            kernels.squares4(scales, codes, self.segments, squares)
        kernels.add4(scales, codes, self.segments, self._factors(squares, weight), self.total)

    def add_values(self, values: Vector, weight: float) -> None:
        """Add an outer gradient."""
        if weight <= 0:
            return
        squares = np.empty(self.norms.size, np.float64)
        if self.method == "rda":
            kernels.squares32(values, self.segments, squares)
        kernels.add32(values, self.segments, self._factors(squares, weight), self.total)

    def combine(self, other: Accumulator) -> None:
        """Add what another accumulator of the same segments and method has collected."""
        self.weight += other.weight
        self.norms += other.norms
        self.total += other.total

    def result(self) -> Vector:
        """The merged outer gradient; zeros if nothing had weight. The accumulator is used up."""
        merged = self.total
        if self.weight == 0:
            return merged
        if self.method == "average":
            factors = np.array([np.float32(1 / self.weight)])
        else:
            squares = np.empty(self.norms.size, np.float64)
            kernels.squares32(merged, self.segments, squares)
            lengths = np.sqrt(squares)
            meaningful = lengths > VANISHING * self.weight
            radii = self.norms / self.weight
            # where directions cancel, `sum w phi(v) * radius / sum w` is the direct average of vectors of the mean norm
            lengths = np.where(meaningful, lengths, self.weight)
            factors = (radii / lengths).astype(np.float32)
        kernels.scale32(merged, self.segments, factors)
        return merged

    def _factors(self, squares: NDArray[np.float64], weight: float) -> Vector:
        self.weight += weight
        if self.method == "average":
            return np.array([np.float32(weight)])
        norms = np.sqrt(squares)
        self.norms += weight * norms
        return np.divide(weight, norms, out=np.zeros_like(norms), where=norms > 0).astype(np.float32)
