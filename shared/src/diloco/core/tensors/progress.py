"""The kernel that writes a version into a learner's values: what was done since an offer stays, in one pass over memory.

The same rules hold as in :mod:`diloco.core.tensors.kernels`. The operations and their order are those of
:class:`diloco.core.learner.delta.Baseline` and of a write of its value, so both ways give the same bits.
"""

from __future__ import annotations

import numpy as np

from diloco.core.tensors.compiled import BLOCK
from diloco.core.tensors.kernels import HALF, U, _exact_kernel, decode4, decode8, decode16
from diloco.core.tensors.narrow_kernels import widen1, widen2

PART = 1024  # values that are decoded at a time, a multiple of the block: they stay in the nearest cache
_READ = "Array(float32, 1, 'C', readonly=True)"  # versions may be of memory that others read


@_exact_kernel("void(uint8[::1], int64, int64, int64, float32[::1], uint8[::1])")
def _decode(body, bits, size, start, out, wide):
    """Decode values of a body of ``size`` values in ``bits`` from ``start`` on, a multiple of the block.

    ``wide``, uint8 [``PART`` / 2], is overwritten.
    """
    blocks = (size + BLOCK - 1) // BLOCK
    first = start // BLOCK
    last = first + (out.size + BLOCK - 1) // BLOCK
    if bits < 4:
        packed_bytes = bits * BLOCK // 8  # of a block's codes
        codes = body[2 * blocks + packed_bytes * first : 2 * blocks + packed_bytes * last]
        if bits == 1:
            widen1(codes, wide[: HALF * (last - first)])
        else:
            widen2(codes, wide[: HALF * (last - first)])
        decode4(body[2 * first : 2 * last].view(np.uint16), wide, out, 0)
    elif bits == 4:
        decode4(body[: 2 * blocks].view(np.uint16), body[2 * blocks :], out, first)
    elif bits == 8:
        decode8(body[: 4 * blocks].view(np.float32), body[4 * blocks :].view(np.int8), out, first)
    elif bits == 16:
        decode16(body[2 * start : 2 * (start + out.size)].view(np.uint16), out.view(np.uint32))
    else:
        out[:] = body[4 * start : 4 * (start + out.size)].view(np.float32)


@_exact_kernel(
    f"void(float32[::1], {_READ}, {_READ}, int64, UniTuple(uint8[::1], 3), UniTuple(int64, 2), UniTuple(float64, 2))"
)
def keep_progress(values, theta, base, start, encoded, bits, shares):
    """Write ``theta + (values - reference)`` over values that begin at ``start`` of a fragment.

    The reference is the ``base`` and the displacement that an offer states: ``error - (body + rest)``, of which ``encoded`` has
    body, rest and error; an error without bytes is none. ``bits`` are those of the body, and of rest and error. Where the first
    of the ``shares`` is not 0, the values become that share of theirs, and the second one of what they would be.
    """
    body, rest, error = encoded
    body_bits, error_bits = bits
    kept, taken = np.float32(shares[0]), np.float32(shares[1])
    moved, more = np.empty(PART, np.float32), np.empty(PART, np.float32)
    wide = np.empty(PART // 2, np.uint8)
    stop, size = start + values.size, base.size
    first = start - start % BLOCK
    while first < stop:
        last = min(first + PART, stop)
        known = max(first, start)
        _decode(body, body_bits, size, first, moved[: last - first], wide)
        _decode(rest, error_bits, size, first, more[: last - first], wide)
        for j in range(U(last - first)):
            moved[j] = moved[j] + more[j]
        if error.size:
            _decode(error, error_bits, size, first, more[: last - first], wide)
            for j in range(U(last - first)):
                moved[j] = more[j] - moved[j]
        else:
            for j in range(U(last - first)):
                moved[j] = -moved[j]
        own, new, old = values[known - start : last - start], theta[known:last], base[known:last]
        shift = moved[known - first :]
        if kept == np.float32(0):
            for j in range(U(last - known)):
                own[j] = new[j] + (own[j] - (old[j] + shift[j]))
        else:
            for j in range(U(last - known)):
                own[j] = kept * own[j] + taken * (new[j] + (own[j] - (old[j] + shift[j])))
        first = last
