"""Images of ten classes, drawn as they are needed: the data of the examples beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_learner.task import Units

SIDE, CLASSES = 16, 10
PROTOTYPES = np.random.default_rng(0).normal(size=(CLASSES, SIDE, SIDE, 1)).astype(np.float32)  # without noise


class Images:
    """The data of a task that classifies: ``x`` float32 [rows, SIDE, SIDE, 1], ``y`` int32 [rows]."""

    units = Units("image", "nats per image")
    tokens_per_batch = rows_per_batch = 64
    noise = 2.0  # standard deviation, where a prototype's is 1; with 8 classes overlap
    validation_batches = 4

    def images(self, seed: tuple[int, ...]) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        y = rng.integers(CLASSES, size=self.rows_per_batch)
        x = PROTOTYPES[y] + self.noise * rng.normal(size=(len(y), SIDE, SIDE, 1))
        return {"x": x.astype(np.float32), "y": y.astype(np.int32)}

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[dict[str, Any]]:
        return (self.images((seed, share, number)) for number in itertools.count(start))

    def validation(self) -> list[dict[str, Any]]:
        return [self.images((2**31, number)) for number in range(self.validation_batches)]


def cross_entropy(scores: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean of nats by row, from scores float32 [rows, CLASSES] and classes int32 [rows]."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], -1))
