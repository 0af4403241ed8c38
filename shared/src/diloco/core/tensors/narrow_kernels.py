"""Loops that encode values in 1 and 2 bits, and that widen these codes to int4, which all other loops read.

The same rules hold as in :mod:`diloco.core.tensors.kernels`.
"""

from __future__ import annotations

import numpy as np

from diloco.core.tensors.compiled import BLOCK
from diloco.core.tensors.kernels import HALF, LANES, MAX_SCALE4, U, _bfloat16, _exact_kernel, _kernel

QUARTER = 16
EIGHTH = 8
_SPLIT = np.float64(0.7875)  # 0.855 leaves 1 % more error of normal values


@_kernel("uint32(float32[::1], uint64, uint64, float32[::1])")
def _load(values, start, count, block):
    """Copy ``count`` values into a block that zeros fill up; return the bits of their largest magnitude."""
    magnitudes = values.view(np.uint32)
    largest = np.uint32(0)
    if count == U(BLOCK):
        for j in range(U(BLOCK)):
            block[j] = values[start + j]
            largest = max(largest, magnitudes[start + j] & np.uint32(0x7FFFFFFF))
    else:
        for j in range(count):
            block[j] = values[start + j]
            largest = max(largest, magnitudes[start + j] & np.uint32(0x7FFFFFFF))
        for j in range(count, U(BLOCK)):
            block[j] = np.float32(0)
    return largest


@_kernel("uint16(uint32)")
def _scale_half(bits):
    """Return a scale as bfloat16, at most the largest that readers accept. A subnormal scale becomes 0."""
    half = min(_bfloat16(bits), MAX_SCALE4)
    return half if half >= np.uint16(0x0080) else np.uint16(0)


@_kernel("float64(float64[::1])")
def _lanes(lanes):
    """Return the sum of 16 lanes, the upper half added to the lower one until one is left. The lanes are overwritten."""
    for j in range(U(8)):
        lanes[j] += lanes[j + U(8)]
    for j in range(U(4)):
        lanes[j] += lanes[j + U(4)]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@_kernel("float32(float32[::1], uint64, float64[::1])")
def _scale1(block, count, sums):
    """Return the scale of a block's ``count`` values in 1 bit, as :func:`encode1` has it; the last one is scratch."""
    for j in range(U(LANES)):
        total = np.float64(0)
        for k in range(BLOCK // LANES):
            total += np.float64(abs(block[U(k * LANES) + j]))
        sums[j] = total
    return np.float32(_lanes(sums) / np.float64(count))


@_exact_kernel("boolean(float32[::1], uint16[::1], uint8[::1], boolean)")
def encode1(values, scales, codes, keep_error):
    """Encode in 1 bit: per block a bfloat16 scale, and a bit for each value: 1 for the scale, 0 for its negative.

    The scale is the mean magnitude, which has the least squared error of all. ``keep_error`` and the result are as in
    :func:`encode4`.
    """
    n = U(values.size)
    block, positive = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint8)
    sums = np.empty(LANES, np.float64)
    word = np.empty(1, np.float32)
    bits = word.view(np.uint32)
    most = np.uint32(0)
    for b in range(U(scales.size)):
        start = b * U(BLOCK)
        count = min(U(BLOCK), n - start)
        most = max(most, _load(values, start, count, block))
        word[0] = _scale1(block, count, sums)
        scales[b] = _scale_half(bits[0])
        bits[0] = np.uint32(scales[b]) << np.uint32(16)
        scale = word[0]
        for j in range(U(BLOCK)):
            positive[j] = np.uint8(block[j] >= np.float32(0))
        at = b * U(EIGHTH)
        for j in range(U(EIGHTH)):
            byte = np.uint8(0)
            for k in range(BLOCK // EIGHTH):
                byte |= np.uint8(positive[U(k * EIGHTH) + j] << np.uint8(k))
            codes[at + j] = byte
        if keep_error:
            for j in range(count):
                values[start + j] -= scale if positive[j] else -scale
    return most < np.uint32(0x7F800000)


@_kernel("void(uint8[::1], uint8[::1])")
def widen1(codes, out):
    """Turn bits into int4 codes of the same values: 0 and 1 into -1 and 1. ``out`` is as in :func:`widen2`."""
    for b in range(U(out.size) // U(HALF)):
        at, to = b * U(EIGHTH), b * U(HALF)
        for k in range(HALF // EIGHTH):
            for j in range(U(EIGHTH)):
                byte = codes[at + j] >> np.uint8(k)
                out[to + U(k * EIGHTH) + j] = np.uint8(0x77) + np.uint8((byte & np.uint8(0x11)) << np.uint8(1))


@_kernel("float32(float32[::1], uint64, float64[::1], float64[::1])")
def _scale2(block, count, sums, squares):
    """Return the scale of a block's ``count`` values in 2 bits, as :func:`encode2` has it; the last two are scratch."""
    for j in range(U(LANES)):
        total, square = np.float64(0), np.float64(0)
        for k in range(BLOCK // LANES):
            x = np.float64(abs(block[U(k * LANES) + j]))
            total += x
            square += x * x
        sums[j], squares[j] = total, square
    total, square = _lanes(sums), _lanes(squares)
    split = _SPLIT * square / total if total > np.float64(0) else np.float64(0)
    for j in range(U(LANES)):
        above, many = np.float64(0), np.float64(0)
        for k in range(BLOCK // LANES):
            x = np.float64(abs(block[U(k * LANES) + j]))
            far = np.float64(x > split)
            above += far * x
            many += far
        sums[j], squares[j] = above, many
    # least squares: sum(m x) / sum(m m) of the magnitudes m, 7 beyond the split and 2 before it
    scale64 = (np.float64(2) * total + np.float64(5) * _lanes(sums)) / (
        np.float64(4) * np.float64(count) + np.float64(45) * _lanes(squares)
    )
    return np.float32(scale64)


@_exact_kernel("boolean(float32[::1], uint16[::1], uint8[::1], boolean)")
def encode2(values, scales, codes, keep_error):
    """Encode in 2 bits: per block a bfloat16 scale, and a code of -7, -2, 2 or 7 times it as 0 to 3, four codes a byte.

    The scale has the least squared error when magnitudes above ``_SPLIT * sum(x**2) / sum(|x|)`` get -7 and 7. Then each
    value gets the nearest code. ``keep_error`` and the result are as in :func:`encode4`.
    """
    n = U(values.size)
    block, q = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    code = np.empty(BLOCK, np.uint8)
    sums, squares = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
    word = np.empty(1, np.float32)
    bits = word.view(np.uint32)
    most = np.uint32(0)
    for b in range(U(scales.size)):
        start = b * U(BLOCK)
        count = min(U(BLOCK), n - start)
        most = max(most, _load(values, start, count, block))
        word[0] = _scale2(block, count, sums, squares)
        half = _scale_half(bits[0])
        scales[b] = half
        bits[0] = np.uint32(half) << np.uint32(16)
        scale = word[0]
        inverse = np.float32(1) / scale if half else np.float32(0)
        for j in range(U(BLOCK)):
            y = block[j] * inverse
            large, below = np.uint8(abs(y) > np.float32(4.5)), np.uint8(y < np.float32(0))
            code[j] = (np.uint8(2) + large) ^ np.uint8(np.uint8(3) * below)
            magnitude = np.float32(2) + np.float32(5) * np.float32(large)
            q[j] = magnitude - np.float32(2) * np.float32(below) * magnitude
        at = b * U(QUARTER)
        for j in range(U(QUARTER)):
            codes[at + j] = (
                code[j]
                | np.uint8(code[j + U(QUARTER)] << np.uint8(2))
                | np.uint8(code[j + U(2 * QUARTER)] << np.uint8(4))
                | np.uint8(code[j + U(3 * QUARTER)] << np.uint8(6))
            )
        if keep_error:
            for j in range(count):
                values[start + j] -= q[j] * scale
    return most < np.uint32(0x7F800000)


@_kernel("void(uint8[::1], uint8[::1])")
def widen2(codes, out):
    """Turn codes of 2 bits into int4 codes of the same values: 0 to 3 into -7, -2, 2 and 7.

    ``out`` begins at the same block, and has as many blocks.
    """
    for b in range(U(out.size) // U(HALF)):
        at, to = b * U(QUARTER), b * U(HALF)
        for j in range(U(QUARTER)):
            byte = codes[at + j]
            # of both nibbles at once: 1 + 5 code, less 1 for the upper two
            low, high = byte & np.uint8(0x33), (byte >> np.uint8(2)) & np.uint8(0x33)
            out[to + j] = np.uint8(0x11) + np.uint8(5) * low - ((low >> np.uint8(1)) & np.uint8(0x11))
            out[to + U(QUARTER) + j] = np.uint8(0x11) + np.uint8(5) * high - ((high >> np.uint8(1)) & np.uint8(0x11))
