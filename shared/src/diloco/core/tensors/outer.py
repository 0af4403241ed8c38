"""The outer step, and the hash of its state: SGD with Nesterov momentum, or AdamW.

Nesterov: ``momentum = mu * momentum + delta``; ``theta -= learning_rate * (delta + mu * momentum)`` (algorithm.md section 3).
AdamW (arXiv 1711.05101): ``delta`` is a gradient, and the momentum two vectors, one after the other: the running means of
gradients and of their squares.

State that is merged takes no step: its new value is the average of the learners' (:class:`Average`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.tensors import quantise
from diloco.core.tensors.compiled import kernels
from diloco.core.tensors.float_mode import exact
from diloco.core.tensors.fragments import Fragment
from diloco.settings.run import RunSettings

Vector = NDArray[np.float32]
CHUNK = 1 << 16  # values folded and hashed at a time, so that they are still in the cache when they are hashed
EPSILON = 1e-8  # of AdamW, outer and inner alike


class OuterStep(Protocol):
    """One version's outer step, in place, on the slice of a fragment that begins at ``start``."""

    def __call__(self, start: int, theta: Vector, moments: list[Vector], delta: Vector) -> None: ...


class OuterOptimizer(Protocol):
    """A fragment's outer optimizer; the momentum is one array of ``moments`` vectors of the fragment's size."""

    @property
    def moments(self) -> int: ...

    def at(self, version: int, learning_rate: float, momentum: float) -> OuterStep:
        """Return the step of a version, with the learning rate and momentum of its record."""

    def moved(self, momentum: Vector) -> float:
        """Return the norm of the merges that the momentum, float32 [moments * size], remembers; 0: of none."""


@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum."""

    moments = 1

    def moved(self, momentum: Vector) -> float:
        """Return the norm of the momentum, float32 [size]."""
        return norm(momentum)

    @exact
    def at(self, version: int, learning_rate: float, momentum: float) -> OuterStep:
        rate, mu = np.float32(learning_rate), np.float32(momentum)

        def step(start: int, theta: Vector, moments: list[Vector], delta: Vector) -> None:
            kernels.nesterov(theta, moments[0], delta, rate, mu)

        return step


@dataclass(frozen=True)
class AdamW:
    """AdamW. A record states the learning rate and, as momentum, beta1; the fields here are the same for all versions."""

    beta2: float
    decays: tuple[tuple[int, float], ...]  # weight decay by element: (end of the range, decay)

    moments = 2

    def moved(self, momentum: Vector) -> float:
        """Return the root of the sum of squares that the momentum, float32 [2 * size], has in its second half."""
        return math.sqrt(float(np.sum(momentum[momentum.size // 2 :], dtype=np.float64)))

    @classmethod
    def of(cls, settings: RunSettings, fragment: Fragment) -> AdamW:
        """Return the optimizer with the settings in ``inner``; tensors of two or more axes decay, norms and biases do not."""
        decays: list[tuple[int, float]] = []
        for piece in fragment.pieces:
            decay = settings.inner.weight_decay if len(piece.shape) > 1 else 0.0
            if decays and decays[-1][1] == decay:
                decays.pop()
            decays.append((piece.offset + piece.size, decay))
        return cls(settings.inner.beta2, tuple(decays))

    @exact
    def at(self, version: int, learning_rate: float, momentum: float) -> OuterStep:
        betas = momentum, self.beta2
        kept = np.array(betas, np.float32)
        taken = np.array([1 - beta for beta in betas], np.float32)
        unbiased = np.array([1 - power(beta, version) for beta in betas], np.float32)
        rate, epsilon = np.float32(learning_rate), np.float32(EPSILON)

        def step(start: int, theta: Vector, moments: list[Vector], delta: Vector) -> None:
            mean, square = moments
            begin = 0
            for until, decay in self.decays:
                end = min(until - start, theta.size)
                if end > begin:
                    part = slice(begin, end)
                    constants = rate, kept, taken, unbiased, epsilon, np.float32(decay)
                    kernels.adamw(theta[part], mean[part], square[part], delta[part], *constants)
                    begin = end

        return step


@dataclass(frozen=True)
class Average(Nesterov):
    """The rule of state that is merged: Nesterov's at a rate of 1 without momentum, which the owner states in each record.

    So a version is the parameters before less the body, and the moment is the last body.
    """

    rates = 1.0, 0.0


NESTEROV, AVERAGE = Nesterov(), Average()


def optimizer(settings: RunSettings, fragment: Fragment) -> OuterOptimizer:
    """Return the outer optimizer of a fragment."""
    if fragment.state:
        return AVERAGE
    return AdamW.of(settings, fragment) if settings.outer.optimizer == "adamw" else NESTEROV


def power(base: float, exponent: int) -> float:
    """Return ``base ** exponent`` by squaring: products have the same bits on every machine, ``pow`` has not."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def fold(
    theta: Vector, momentum: Vector, body: NDArray[np.uint8], bits: int, step: OuterStep, *, theta_out: Vector | None = None
) -> bytes:
    """Decode a valid body, uint8 [bytes], take the outer step, and hash the result; return the state hash (32 bytes).

    ``momentum``, float32 [moments * size], changes in place; ``theta``, float32 [size], too unless ``theta_out`` is given.
    """
    moments = _moments(theta, momentum)

    def slices(start: int, stop: int) -> list[Vector]:
        if theta_out is None:
            return [vector[start:stop] for vector in (theta, *moments)]
        theta_out[start:stop] = theta[start:stop]
        return [vector[start:stop] for vector in (theta_out, *moments)]

    return _stepped(theta.size, slices, body, bits, step)


def folded_hash(theta: Vector, momentum: Vector, body: NDArray[np.uint8], bits: int, step: OuterStep) -> bytes:
    """Return the state hash that :func:`fold` would give, of ``theta`` float32 [size] and the rest alike; nothing changes."""
    vectors = theta, *_moments(theta, momentum)
    return _stepped(theta.size, lambda start, stop: [vector[start:stop].copy() for vector in vectors], body, bits, step)


@exact
def _stepped(
    size: int, slices: Callable[[int, int], list[Vector]], body: NDArray[np.uint8], bits: int, step: OuterStep
) -> bytes:
    """Take the outer step on slices of theta and moments, one after another; return the state hash of the results."""
    hashes: list[blake3] = []
    delta = np.empty(min(CHUNK, size), np.float32)
    for start in range(0, size, CHUNK):
        stop = min(start + CHUNK, size)
        part = quantise.dequantise(body, size, bits, delta[: stop - start], start=start)
        stepped = slices(start, stop)
        step(start, stepped[0], stepped[1:], part)
        hashes = hashes or [blake3() for _ in stepped]
        for hashed, values in zip(hashes, stepped, strict=True):
            hashed.update(values.view(np.uint8).data)
    return state_hash_of([hashed.digest() for hashed in hashes])


def state_hash(theta: Vector, momentum: Vector) -> bytes:
    """Return ``BLAKE3(BLAKE3(theta) || BLAKE3(momentum))`` over little-endian float32 bytes; of two moments, each one's hash.

    ``theta`` is float32 [size], ``momentum`` float32 [moments * size].
    """
    return state_hash_of([blake3(vector.view(np.uint8).data).digest() for vector in (theta, *_moments(theta, momentum))])


def _moments(theta: Vector, momentum: Vector) -> list[Vector]:
    return [momentum[at : at + theta.size] for at in range(0, momentum.size, theta.size)]


def norm(values: Vector) -> float:
    """Return the norm of a vector, float32 [size]."""
    squares = np.empty(1, np.float64)
    kernels.squares32(values, np.array([0, values.size], np.int64), squares)
    return math.sqrt(squares[0])


def state_hash_of(digests: list[bytes]) -> bytes:
    """Return the state hash, by the hashes of Theta and of each moment."""
    return blake3(b"".join(digests)).digest()
