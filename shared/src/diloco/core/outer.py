"""The outer step, SGD with Nesterov momentum, and the hash of its state.

``momentum = mu * momentum + delta``; ``theta -= learning_rate * (delta + mu * momentum)`` (algorithm.md section 3).
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core import kernels, quantise

Vector = NDArray[np.float32]
CHUNK = 1 << 16  # values folded and hashed at a time, so that they are still in the cache when they are hashed


def nesterov(theta: Vector, momentum: Vector, delta: Vector, learning_rate: float, mu: float) -> None:
    """One outer step, in place."""
    kernels.nesterov(theta, momentum, delta, np.float32(learning_rate), np.float32(mu))


def fold(
    theta: Vector,
    momentum: Vector,
    body: NDArray[np.uint8],
    bits: int,
    learning_rate: float,
    mu: float,
    *,
    theta_out: Vector | None = None,
) -> bytes:
    """Decode a valid body, take the outer step, and hash the result; returns the state hash (32 bytes).

    ``momentum`` changes in place, ``theta`` too unless ``theta_out`` is given.
    """
    out = theta if theta_out is None else theta_out
    theta_hash, momentum_hash = blake3(), blake3()
    delta = np.empty(min(CHUNK, theta.size), np.float32)
    rate, mu32 = np.float32(learning_rate), np.float32(mu)
    for start in range(0, theta.size, CHUNK):
        stop = min(start + CHUNK, theta.size)
        part = quantise.dequantise(body, theta.size, bits, delta[: stop - start], start=start)
        if theta_out is not None:
            out[start:stop] = theta[start:stop]
        kernels.nesterov(out[start:stop], momentum[start:stop], part, rate, mu32)
        theta_hash.update(out[start:stop].view(np.uint8).data)
        momentum_hash.update(momentum[start:stop].view(np.uint8).data)
    return blake3(theta_hash.digest() + momentum_hash.digest()).digest()


def state_hash(theta: Vector, momentum: Vector) -> bytes:
    """``BLAKE3(BLAKE3(theta) || BLAKE3(momentum))`` over little-endian float32 bytes."""
    return blake3(blake3(theta.view(np.uint8).data).digest() + blake3(momentum.view(np.uint8).data).digest()).digest()
