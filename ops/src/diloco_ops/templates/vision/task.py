"""A small convolutional network that tells shapes in noisy images, which are drawn as they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.settings.run import TaskSettings
from diloco_learner.task import Aux, Units

SIZE, CLASSES = 16, 4  # pixels of a side; square, cross, diagonal cross, ring


@dataclass(frozen=True)
class Options:
    """Values that `diloco up --task KEY=VALUE` may change."""

    channels: int = 16
    noise: float = 0.5
    batch: int = 64


class Task:
    units = Units(item="image", loss="nats per image")

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tokens_per_batch = options.batch

    def init(self, key: jax.Array) -> Any:
        a, b, c = jax.random.split(key, 3)
        n = self.options.channels
        return {  # kernels as matrices (out, in * 3 * 3): a row is one output unit
            "first": jax.random.normal(a, (n, 9)) / 3,
            "second": jax.random.normal(b, (2 * n, n * 9)) / (3 * n**0.5),
            "head": jax.random.normal(c, (CLASSES, 2 * n)) / (2 * n) ** 0.5,
            "bias": jnp.zeros(CLASSES),
        }

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, Aux]:
        x = batch["x"][:, None]
        for name in ("first", "second"):
            kernel = params[name].reshape(len(params[name]), -1, 3, 3)
            x = jax.nn.relu(jax.lax.conv(x, kernel, window_strides=(2, 2), padding="SAME"))
        scores = x.mean((2, 3)) @ params["head"].T + params["bias"]
        right = jnp.mean(jnp.argmax(scores, -1) == batch["y"])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), batch["y"][:, None], -1)), Aux({"accuracy": right})

    def images(self, seed: tuple[int, ...]) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        y = rng.integers(CLASSES, size=self.options.batch)
        x = rng.normal(0, self.options.noise, (len(y), SIZE, SIZE))
        for image, kind in zip(x, y, strict=True):
            row, column = rng.integers(SIZE - 7, size=2)
            image[row : row + 7, column : column + 7] += SHAPES[kind]
        return {"x": x.astype(np.float32), "y": y.astype(np.int32)}

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        return (self.images((seed, share, number)) for number in itertools.count(start))

    def validation(self) -> list[Any]:
        return [self.images((2**32, number)) for number in range(8)]


def shapes() -> Any:
    """Return the shapes to tell, float32 [4, 7, 7]."""
    square, cross, diagonal = np.ones((7, 7)), np.zeros((7, 7)), np.eye(7)
    cross[3], cross[:, 3] = 1, 1
    ring = square.copy()
    ring[2:5, 2:5] = 0
    return 2 * np.stack([square, cross, np.maximum(diagonal, diagonal[::-1]), ring])


SHAPES = shapes()


def make(settings: TaskSettings, data: str | None, options: Options) -> Task:
    return Task(options)
