"""An encoder of quantised bodies in plain NumPy, that follows the documented layout, and vectors to try it on."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Raw = NDArray[np.uint8]
TINY = np.finfo(np.float32).tiny


def bfloat16(values: Vector) -> NDArray[np.uint16]:
    """Nearest bfloat16 of finite values, ties to the even one, by comparing distances in float64 (which is exact)."""
    below = (values.view(np.uint32) >> 16).astype(np.uint32)  # towards zero
    above = below + 1
    to_below = np.abs(values.astype(np.float64) - (below << 16).astype(np.uint32).view(np.float32))
    beyond = (above << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    to_above = np.abs(values.astype(np.float64) - beyond)
    up = (to_above < to_below) | ((to_above == to_below) & (below % 2 == 1))
    return np.where(up, above, below).astype(np.uint16)


def blocks_of(values: Vector) -> Vector:
    padded = np.zeros(-(-values.size // 64) * 64, np.float32)
    padded[: values.size] = values
    return padded.reshape(-1, 64)


def quantised_reference(values: Vector, bits: int) -> tuple[Raw, Vector]:
    """The body of int4 or int8, and the values that it stands for."""
    blocks = blocks_of(values)
    top = {4: 7, 8: 127}[bits]
    scales = np.abs(blocks).max(1) / np.float32(top)
    stored: NDArray[np.uint16] | Vector
    if bits == 4:
        halves = np.where(scales > 0, bfloat16(scales), 0).astype(np.uint16)
        halves[halves < 0x80] = 0
        scales = (halves.astype(np.uint32) << 16).view(np.float32)
        stored = halves
    else:
        scales = np.where(scales < TINY, np.float32(0), scales)
        stored = scales
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.clip(np.rint(blocks * inverse[:, None]), -top, top).astype(np.int8)
    decoded = (codes.astype(np.float32) * scales[:, None]).reshape(-1)[: values.size]
    if bits == 4:
        shifted = (codes + 8).astype(np.uint8)
        packed = shifted[:, :32] | (shifted[:, 32:] << 4)
    else:
        packed = codes.view(np.uint8)
    return np.concatenate([stored.view(np.uint8), packed.reshape(-1)]), decoded


@st.composite
def any_vectors(draw: st.DrawFn) -> Vector:
    """Any length; blocks with magnitudes of their own, from subnormal to nearly the largest; zeros of both signs."""
    n = draw(st.integers(0, 300))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    exponents = draw(st.lists(st.integers(-44, 37), min_size=5, max_size=5))
    magnitudes = np.repeat(np.array([10.0**e for e in exponents]), 64)[:n]
    values: Vector = (random.standard_normal(n) * magnitudes).astype(np.float32)
    values[random.random(n) < draw(st.sampled_from([0.0, 0.1, 1.0]))] = draw(st.sampled_from([0.0, -0.0]))
    return values
