"""Quantisation: float32 vectors as fewer bits, and back.

Body layouts, little endian, for ``n`` values in blocks of 64 (``nb = ceil(n / 64)``; the last block is padded with zeros):

==== ======================================================================================================
bits body
==== ======================================================================================================
1    ``nb`` scales (bfloat16, the mean magnitude), then ``nb * 8`` bytes: elements j, j + 8, ..., j + 56 of a block in byte
     j, from its lowest bit on; 0 and 1 are the codes -1 and 1
2    ``nb`` scales (bfloat16), then ``nb * 16`` bytes: elements j, j + 16, j + 32 and j + 48 of a block in byte j, from
     its lowest bits on; 0 to 3 are the codes -7, -2, 2 and 7
4    ``nb`` scales (bfloat16, absmax / 7), then ``nb * 32`` bytes: element j of a block in the low nibble of
     byte j, element j + 32 in its high nibble, each as code + 8 with codes from -7 to 7
8    ``nb`` scales (float32, absmax / 127), then ``nb * 64`` codes (int8, -127 to 127)
16   ``n`` bfloat16
32   ``n`` float32
==== ======================================================================================================

A value is ``code * scale``. Where the scale would be subnormal, it is 0. Then codes are 0 in 4 and 8 bits, and have no meaning
in 1 and 2 bits.

Why 2 bits are so. Each entry is the squared error of a block, relative to its squares, for normal, Laplace and Student t (3)
values and for the outer gradients of a run of the lab with Muon:

=================================================  ======  =======  ====  =====
codes, and their scale                             normal  Laplace  t(3)  outer
=================================================  ======  =======  ====  =====
-3, -1, 1, 3; absmax / 3                           0.257   0.599    1.51  0.251
-1, 0, 1; the best one                             0.184   0.249    0.31  0.169
-3, -1, 1, 3; as below                             0.114   0.186    0.30  0.106
-4, -1, 1, 4; as below                             0.115   0.165    0.26  0.105
-7, -2, 2, 7; least squares after a first split    0.113   0.171    0.27  0.104
=================================================  ======  =======  ====  =====

No four codes are better than 0.117 for normal values if all blocks have one scale (Lloyd and Max). Because the scale is of
least squares, no block's error is longer than the block, so errors that are fed back stay bounded. And the four codes are
codes of int4: what reads int4 reads 2 bits. Both properties also hold for 1 bit. Its error is 0.36 for normal
values.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from diloco.core.tensors.compiled import BLOCK, kernels
from diloco.core.tensors.float_mode import exact
from diloco.errors import FormatError, NonFiniteError

Vector = NDArray[np.float32]
Raw = NDArray[np.uint8]
NOT_FINITE = "a value to send is NaN or infinite"


def body_bytes(n: int, bits: int) -> int:
    """Return the size of the body of ``n`` values."""
    blocks = -(-n // BLOCK)
    return {1: blocks * 10, 2: blocks * 18, 4: blocks * 34, 8: blocks * 68, 16: 2 * n, 32: 4 * n}[bits]


def quantise(values: Vector, bits: int, *, error: Vector | None = None) -> Raw:
    """Return the body of ``values``, float32 [n], as uint8 [bytes].

    ``error``, float32 [n], which may be ``values`` itself, receives the quantisation error.

    Raises:
        NonFiniteError: a value is NaN or infinite; nothing has changed.
    """
    # without `error` no input can be destroyed, and the loops of 1, 2 and 4 bits find values that are not finite themselves
    finite = (bits <= 4 and error is None) or np.isfinite(kernels.absmax(values))
    if not finite:
        raise NonFiniteError(NOT_FINITE)
    body = np.empty(body_bytes(values.size, bits), np.uint8)
    if error is not None and error is not values and bits != 32:
        error[:] = values
        values = error
    if bits <= 4:
        scales, codes = _split(body, values.size, np.uint16)
        encode = {1: kernels.encode1, 2: kernels.encode2, 4: kernels.encode4}[bits]
        finite = encode(values, scales, codes, error is not None)
    elif bits == 8:
        scales, codes = _split(body, values.size, np.float32)
        kernels.encode8(values, scales, codes.view(np.int8), error is not None)
    elif bits == 16:
        kernels.encode16(values, body.view(np.uint16), error is not None)
    else:
        body.view(np.float32)[:] = values
        if error is not None:
            error[:] = 0
    if not finite:
        raise NonFiniteError(NOT_FINITE)
    return body


def dequantise(body: Raw, n: int, bits: int, out: Vector | None = None, *, start: int = 0) -> Vector:
    """Return the values, float32 [n], of a valid body, uint8 [bytes].

    With ``out`` given, return those from ``start`` (a multiple of 64) that fit into it.
    """
    values = np.empty(n, np.float32) if out is None else out
    if bits < 4:
        scales, codes = _split(body, n, np.uint16)
        first, last = start // BLOCK, -(-(start + values.size) // BLOCK)
        wide = _widened(codes[first * BLOCK * bits // 8 : last * BLOCK * bits // 8], bits)
        kernels.decode4(scales[first:last], wide, values, 0)
    elif bits == 4:
        scales, codes = _split(body, n, np.uint16)
        kernels.decode4(scales, codes, values, start // BLOCK)
    elif bits == 8:
        scales, codes = _split(body, n, np.float32)
        kernels.decode8(scales, codes.view(np.int8), values, start // BLOCK)
    elif bits == 16:
        kernels.decode16(body.view(np.uint16)[start : start + values.size], values.view(np.uint32))
    else:
        values[:] = body.view(np.float32)[start : start + values.size]
    return values


@exact
def validate(body: Raw, n: int, bits: int) -> None:
    """Refuse a body, uint8 [bytes], that no encoder writes; all other functions trust bodies.

    Raises:
        FormatError: wrong size, or a code out of range.
        NonFiniteError: a value or scale is NaN or infinite.
    """
    if body.size != body_bytes(n, bits):
        raise FormatError(f"body of {body.size} bytes, expected {body_bytes(n, bits)} for {n} values with bits = {bits}")
    if bits < 4:
        scales, codes = _split(body, n, np.uint16)
        if not kernels.valid4(scales, codes[:0]):  # any codes are some
            raise FormatError(f"body with bits = {bits}: a scale is negative, subnormal, or too large for int4")
    elif bits == 4:
        if not kernels.valid4(*_split(body, n, np.uint16)):
            raise FormatError("int4 body: a scale is not finite with its largest code, or a code is out of range")
    elif bits == 8:
        scales, codes = _split(body, n, np.float32)
        if not kernels.absmax(scales) <= kernels.MAX_SCALE8 or (scales.size and scales.min() < 0):
            raise NonFiniteError("int8 body: a scale is NaN, negative, or with its largest code infinite")
        if codes.size and (codes == 0x80).any():
            raise FormatError("int8 body: a code is out of range")
    elif bits == 16:
        if ((body.view(np.uint16) & np.uint16(0x7F80)) == np.uint16(0x7F80)).any():
            raise NonFiniteError("bfloat16 body: a value is NaN or infinite")
    elif not np.isfinite(kernels.absmax(body.view(np.float32))):
        raise NonFiniteError("float32 body: a value is NaN or infinite")


def norm_of(body: Raw, n: int, bits: int) -> float:
    """Return the norm of the values of a body, uint8 [bytes]."""
    return math.sqrt(squares_of(body, np.array([0, n], np.int64), bits)[0])


def squares_of(body: Raw, segments: NDArray[np.int64], bits: int) -> NDArray[np.float64]:
    """Return the squared norms, float64 [groups], of the values of a body, uint8 [bytes].

    ``segments``, int64 [groups + 1], are the groups' bounds, from 0 to the number of values.
    """
    n, squares = int(segments[-1]), np.empty(segments.size - 1, np.float64)
    if bits <= 4:  # without making the values
        kernels.squares4(*as_int4(body, n, bits), segments, squares)
    else:
        kernels.squares32(dequantise(body, n, bits), segments, squares)
    return squares


def as_int4(body: Raw, n: int, bits: int) -> tuple[NDArray[np.uint16], Raw]:
    """Return scales, uint16 [blocks], and codes, uint8 [blocks * 32], of the int4 body of these values.

    ``bits`` are 1, 2 or 4.
    """
    scales, codes = _split(body, n, np.uint16)
    return scales, (codes if bits == 4 else _widened(codes, bits))


def _widened(codes: Raw, bits: int) -> Raw:
    wide = np.empty(4 * codes.size // bits, np.uint8)
    (kernels.widen1 if bits == 1 else kernels.widen2)(codes, wide)
    return wide


def _split(body: Raw, n: int, scale: type[np.uint16] | type[np.float32]) -> tuple[NDArray[np.uint16], Raw]:
    at = -(-n // BLOCK) * np.dtype(scale).itemsize
    return body[:at].view(scale), body[at:]
