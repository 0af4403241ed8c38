"""The loops over values: encode, decode, merge, fold. Compiled, without the GIL, bit-identical on every machine.

Only addition, multiplication, division, square roots and rounding half to even are used, in float32 (norms in float64) and
in an order that the text of a loop fixes: numba compiles without fast-math and LLVM then neither reorders floating-point sums
nor contracts a product and a sum into one operation (``tests/shared/test_kernels.py`` looks at the machine code). Sums over
quantised codes are integer sums, which any order of additions leaves alike; sums over floats go to ``LANES`` accumulators.
A kernel that computes with floats sets the processor's mode that this is true in (:mod:`diloco.core.tensors.float_mode`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, njit, types
from numba.core.registry import CPUDispatcher

from diloco.core.tensors import float_mode
from diloco.core.tensors.compiled import BLOCK
from diloco.settings import folders

# indices are unsigned: for signed ones numba emits code for counting from the end, which keeps loops from being vectorised
U = np.uint64
HALF = 32
LANES = 16
ROWS = 8
# adding and subtracting it rounds a float32 of magnitude below 2**22 to an integer, half to even
_ROUND = np.float32(12582912.0)
MAX_SCALE8 = np.float32(2.6793884e36)  # 127 times the next float32 is infinite
MAX_SCALE4 = np.uint16(0x7E12)  # seven times the next bfloat16 is infinite
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}

# without a home directory numba would make a folder named ~ in the working directory
if folders.user_cache() is None and not getattr(config, "CACHE_LOCATOR_CLASSES", ""):
    config.CACHE_LOCATOR_CLASSES = "UserProvidedCacheLocator,InTreeCacheLocator"


def _kernel(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for a signature; its code is kept where numba finds a folder for it, else in memory alone."""

    def compile_kernel(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, cache=True, **_OPTIONS)(function)
        except Exception:  # no folder can be written, the disk is full, or a kept file is damaged; a wrong kernel raises again
            return njit(signature, **_OPTIONS)(function)

    return compile_kernel


class _ExactKernel(CPUDispatcher):  # type: ignore[misc] # numba has no types
    """A kernel that computes in the standard floating-point mode when Python calls it; other kernels call its machine code."""

    def __call__(self, *args: Any) -> Any:
        call = super().__call__
        return call(*args) if float_mode.is_standard() else float_mode.in_standard_mode(call, *args)


def _exact_kernel(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that computes with floats, as :func:`_kernel` compiles others."""

    def compile_kernel(function: Callable[..., Any]) -> Any:
        kernel = _kernel(signature)(function)
        kernel.__class__ = _ExactKernel
        return kernel

    return compile_kernel


@_kernel("float32(float32[::1])")
def absmax(values):
    """Return the largest magnitude; NaN and infinity give infinity."""
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        largest = max(largest, magnitude)
    if largest >= np.uint32(0x7F800000):
        return np.float32(np.inf)
    out = np.empty(1, np.uint32)
    out[0] = largest
    return out.view(np.float32)[0]


@_kernel("uint16(uint32)")
def _bfloat16(bits):
    """Upper half of a float32, rounded half to even."""
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@_kernel("int32(uint8[::1], uint64, uint64)")
def _code(codes, at, j):
    """Code of element ``j`` of the int4 block whose bytes begin at ``at``."""
    byte = codes[at + j % U(HALF)]
    nibble = byte & np.uint8(15) if j < U(HALF) else byte >> np.uint8(4)
    return np.int32(nibble) - np.int32(8)


@_exact_kernel("boolean(float32[::1], uint16[::1], uint8[::1], boolean)")
def encode4(values, scales, codes, keep_error):
    """Encode int4: per block the scale absmax/7 as bfloat16, and two codes q + 8 a byte (element j low, element j + 32 high).

    With ``keep_error`` the quantisation error takes the place of the values. Return False if a value is not finite; the output
    is then invalid.
    """
    n = values.size
    magnitudes = values.view(np.uint32)
    tail = np.zeros(BLOCK, np.float32)
    q = np.empty(BLOCK, np.float32)
    word = np.empty(1, np.float32)
    bits = word.view(np.uint32)
    most = np.uint32(0)
    for b in range(U(scales.size)):
        start = b * U(BLOCK)
        whole = start + U(BLOCK) <= U(n)
        largest = np.uint32(0)
        if whole:
            for j in range(U(BLOCK)):
                largest = max(largest, magnitudes[start + j] & np.uint32(0x7FFFFFFF))
        else:
            for j in range(U(n) - start):
                tail[j] = values[start + j]
                largest = max(largest, magnitudes[start + j] & np.uint32(0x7FFFFFFF))
        most = max(most, largest)
        bits[0] = largest
        word[0] = word[0] / np.float32(7)
        half = _bfloat16(bits[0])
        if half < np.uint16(0x0080) or half > np.uint16(0x7E80):  # subnormal, or its inverse would be
            half = np.uint16(0)
        scales[b] = half
        bits[0] = np.uint32(half) << np.uint32(16)
        scale = word[0]
        inverse = np.float32(1) / scale if half else np.float32(0)
        if whole:
            for j in range(U(BLOCK)):
                y = min(max(values[start + j] * inverse, np.float32(-7)), np.float32(7))
                q[j] = (y + _ROUND) - _ROUND
        else:
            for j in range(U(BLOCK)):
                y = min(max(tail[j] * inverse, np.float32(-7)), np.float32(7))
                q[j] = (y + _ROUND) - _ROUND
        at = b * U(HALF)
        for j in range(U(HALF)):
            low = np.uint8(np.int32(q[j]) + np.int32(8))
            high = np.uint8(np.int32(q[j + U(HALF)]) + np.int32(8))
            codes[at + j] = low | np.uint8(high << np.uint8(4))
        if keep_error:
            for j in range(min(U(BLOCK), U(n) - start)):
                values[start + j] -= q[j] * scale
    return most < np.uint32(0x7F800000)


@_exact_kernel("void(uint16[::1], uint8[::1], float32[::1], int64)")
def decode4(scales, codes, out, first_block):
    """Decode int4 to float32, from ``first_block`` on; ``out`` begins at that block."""
    n = U(out.size)
    word = np.empty(1, np.uint32)
    value = word.view(np.float32)
    for b in range((n + U(BLOCK - 1)) // U(BLOCK)):
        word[0] = np.uint32(scales[U(first_block) + b]) << np.uint32(16)
        scale = value[0]
        at, start = (U(first_block) + b) * U(HALF), b * U(BLOCK)
        if start + U(BLOCK) <= n:
            for j in range(U(HALF)):
                byte = codes[at + j]
                out[start + j] = np.float32(np.int32(byte & np.uint8(15)) - np.int32(8)) * scale
                out[start + U(HALF) + j] = np.float32(np.int32(byte >> np.uint8(4)) - np.int32(8)) * scale
        else:
            for j in range(n - start):
                out[start + j] = np.float32(_code(codes, at, j)) * scale


@_kernel("boolean(uint16[::1], uint8[::1])")
def valid4(scales, codes):
    """Whether no scale is negative, subnormal, or infinite seven times over, and no nibble is 0 (which is no code)."""
    bad = np.uint32(0)
    for b in range(scales.size):
        bad |= np.uint32(scales[b] > MAX_SCALE4) | np.uint32((scales[b] != 0) & (scales[b] < np.uint16(0x0080)))
    zero = np.uint8(0)
    for i in range(codes.size):
        zero |= np.uint8((codes[i] & np.uint8(15)) == np.uint8(0)) | np.uint8((codes[i] >> np.uint8(4)) == np.uint8(0))
    return bad == 0 and zero == 0


@_kernel(types.int64(types.Array(types.uint8, 1, "C", readonly=True), types.int64))
def zstd_blocks_end(piece, at):
    """Return ``-1 - end`` of a zstd frame's blocks (RFC 8878, 3.1.1.2), of which one begins at ``at`` of this piece of it.

    Where the last one does not begin in this piece, return where the first block begins whose header is not whole here.
    """
    while at + 3 <= piece.size:
        head = np.int64(piece[at]) | np.int64(piece[at + 1]) << 8 | np.int64(piece[at + 2]) << 16
        run = head >> 1 & 3 == 1  # of one byte
        at += 3 + (1 if run else head >> 3)
        if head & 1 == 1:
            return -1 - at
    return at


@_exact_kernel("void(float32[::1], float32[::1], int8[::1], boolean)")
def encode8(values, scales, codes, keep_error):
    """Encode int8: per block the scale absmax/127 as float32, and a code a byte. ``keep_error`` as in :func:`encode4`."""
    n = U(values.size)
    for b in range(U(scales.size)):
        start = b * U(BLOCK)
        count = min(U(BLOCK), n - start)
        largest = np.float32(0)
        for j in range(count):
            largest = max(largest, abs(values[start + j]))
        scale = largest / np.float32(127)
        if scale < np.float32(1.1754944e-38):
            scale = np.float32(0)
        scale = min(scale, MAX_SCALE8)
        scales[b] = scale
        inverse = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
        for j in range(count):
            x = values[start + j]
            y = min(max(x * inverse, np.float32(-127)), np.float32(127))
            q = (y + _ROUND) - _ROUND
            codes[start + j] = np.int8(np.int32(q))
            if keep_error:
                values[start + j] = x - q * scale
        for j in range(count, U(BLOCK)):
            codes[start + j] = np.int8(0)


@_exact_kernel("void(float32[::1], int8[::1], float32[::1], int64)")
def decode8(scales, codes, out, first_block):
    """Decode int8 to float32, from ``first_block`` on; ``out`` begins at that block."""
    n = U(out.size)
    for b in range((n + U(BLOCK - 1)) // U(BLOCK)):
        scale, start = scales[U(first_block) + b], b * U(BLOCK)
        at = (U(first_block) + b) * U(BLOCK)
        for j in range(min(U(BLOCK), n - start)):
            out[start + j] = np.float32(codes[at + j]) * scale


@_exact_kernel("void(float32[::1], uint16[::1], boolean)")
def encode16(values, codes, keep_error):
    """Encode float32 as bfloat16, half to even; a value that would round to infinity becomes the largest finite one.

    ``keep_error`` as in :func:`encode4`.
    """
    bits = values.view(np.uint32)
    word = np.empty(1, np.uint32)
    value = word.view(np.float32)
    for i in range(values.size):
        half = np.uint32(bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        if (half & np.uint32(0x7FFF)) >= np.uint32(0x7F80):
            half = (half & np.uint32(0x8000)) | np.uint32(0x7F7F)
        codes[i] = np.uint16(half)
        if keep_error:
            word[0] = half << np.uint32(16)
            values[i] -= value[0]


@_kernel("void(uint16[::1], uint32[::1])")
def decode16(codes, out):
    """Decode bfloat16 to the bits of float32."""
    for i in range(out.size):
        out[i] = np.uint32(codes[i]) << np.uint32(16)


@_exact_kernel("void(uint16[::1], uint8[::1], int64[::1], float64[::1])")
def squares4(scales, codes, segments, out):
    """Compute the squared norm of each segment of an int4 body: integer sums of squared codes, times squared scales."""
    word = np.empty(1, np.uint32)
    value = word.view(np.float32)
    for s in range(U(out.size)):
        start, stop = U(segments[s]), U(segments[s + U(1)])
        total = np.float64(0)
        b = start // U(BLOCK)
        while b * U(BLOCK) < stop:
            word[0] = np.uint32(scales[b]) << np.uint32(16)
            scale = np.float64(value[0])
            base, at = b * U(BLOCK), b * U(HALF)
            squares = np.int32(0)
            if start <= base and base + U(BLOCK) <= stop:
                for j in range(U(HALF)):
                    low = np.int32(codes[at + j] & np.uint8(15)) - np.int32(8)
                    high = np.int32(codes[at + j] >> np.uint8(4)) - np.int32(8)
                    squares += low * low + high * high
            else:
                for i in range(max(start, base), min(stop, base + U(BLOCK))):
                    code = _code(codes, at, i - base)
                    squares += code * code
            total += scale * scale * np.float64(squares)
            b += U(1)
        out[s] = total


@_exact_kernel("void(uint16[::1], uint8[::1], int64[::1], float32[::1], float32[::1])")
def add4(scales, codes, segments, factors, out):
    """Compute ``out += factor * value`` with one factor a segment, from an int4 body."""
    word = np.empty(1, np.uint32)
    value = word.view(np.float32)
    for s in range(U(factors.size)):
        start, stop, factor = U(segments[s]), U(segments[s + U(1)]), factors[s]
        b = start // U(BLOCK)
        while b * U(BLOCK) < stop:
            word[0] = np.uint32(scales[b]) << np.uint32(16)
            scale = value[0] * factor
            base, at = b * U(BLOCK), b * U(HALF)
            if start <= base and base + U(BLOCK) <= stop:
                for j in range(U(HALF)):
                    byte = codes[at + j]
                    out[base + j] += np.float32(np.int32(byte & np.uint8(15)) - np.int32(8)) * scale
                    out[base + U(HALF) + j] += np.float32(np.int32(byte >> np.uint8(4)) - np.int32(8)) * scale
            else:
                for i in range(max(start, base), min(stop, base + U(BLOCK))):
                    out[i] += np.float32(_code(codes, at, i - base)) * scale
            b += U(1)


@_exact_kernel("void(float32[::1], int64[::1], float64[::1])")
def squares32(values, segments, out):
    """Compute the squared norm of each segment in float64, in ``LANES`` lanes that are then added from first to last."""
    lanes = np.empty(LANES, np.float64)
    for s in range(U(out.size)):
        i, stop = U(segments[s]), U(segments[s + U(1)])
        for j in range(U(LANES)):
            lanes[j] = np.float64(0)
        # each lane adds up its values in their order; ROWS of them at a time keep the lanes in registers
        while i + U(ROWS * LANES) <= stop:
            for j in range(U(LANES)):
                lane = lanes[j]
                for k in range(ROWS):
                    x = np.float64(values[i + U(k) * U(LANES) + j])
                    lane += x * x
                lanes[j] = lane
            i += U(ROWS * LANES)
        while i < stop:
            for j in range(min(U(LANES), stop - i)):
                x = np.float64(values[i + j])
                lanes[j] += x * x
            i += U(LANES)
        total = np.float64(0)
        for j in range(U(LANES)):
            total += lanes[j]
        out[s] = total


@_exact_kernel("void(float32[::1], int64[::1], float32[::1], float32[::1])")
def add32(values, segments, factors, out):
    """Compute ``out += factor * values`` with one factor a segment."""
    for s in range(U(factors.size)):
        factor = factors[s]
        for i in range(U(segments[s]), U(segments[s + U(1)])):
            out[i] += values[i] * factor


@_exact_kernel("void(float32[::1], int64[::1], float32[::1])")
def scale32(values, segments, factors):
    """Compute ``values *= factor`` with one factor a segment."""
    for s in range(U(factors.size)):
        factor = factors[s]
        for i in range(U(segments[s]), U(segments[s + U(1)])):
            values[i] *= factor


@_exact_kernel("void(float32[::1], float32[::1], float32[::1], float32, float32)")
def nesterov(theta, momentum, delta, learning_rate, mu):
    """Compute ``momentum = mu * momentum + delta``, ``theta -= learning_rate * (delta + mu * momentum)``, in place."""
    for i in range(U(theta.size)):
        buffer = mu * momentum[i] + delta[i]
        momentum[i] = buffer
        theta[i] = theta[i] - learning_rate * (delta[i] + mu * buffer)


@_exact_kernel(
    "void(float32[::1], float32[::1], float32[::1], float32[::1], float32, float32[::1], float32[::1], float32[::1], float32, "
    "float32)"
)
def adamw(theta, mean, square, gradient, learning_rate, kept, taken, unbiased, epsilon, decay):
    """Take a step of AdamW, in place. Pairs of constants are for the mean of gradients and for that of their squares.

    ``mean = kept[0] * mean + taken[0] * gradient``, ``square = kept[1] * square + taken[1] * gradient * gradient``, and then
    ``theta -= learning_rate * (mean / unbiased[0] / (sqrt(square / unbiased[1]) + epsilon) + decay * theta)``.
    """
    for i in range(U(theta.size)):
        first = kept[0] * mean[i] + taken[0] * gradient[i]
        second = kept[1] * square[i] + taken[1] * (gradient[i] * gradient[i])
        mean[i] = first
        square[i] = second
        update = (first / unbiased[0]) / (np.sqrt(second / unbiased[1]) + epsilon)
        theta[i] = theta[i] - learning_rate * (update + decay * theta[i])
