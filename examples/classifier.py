"""A classifier with dropout, an accuracy, two validation sets, and options of its own; its images are drawn as they are needed.

PYTHONPATH=examples diloco up --set task.name=classifier:make --task width=128 --tokens 400000 --plain
"""

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

PIXELS, CLASSES = 64, 10
PROTOTYPES = (
    np.random.default_rng(0).normal(size=(CLASSES, PIXELS)).astype(np.float32)
)  # one image of each class, without noise

LEVELS = {"usual": 1, "noisy": 2}  # validation sets, and how many times the noise they have


@dataclass(frozen=True)
class Options:
    width: int = 64
    dropout: float = 0.1
    noise: float = 1.5  # added to each pixel


class Classifier:
    units = Units(item="image", loss="nats per image")
    tokens_per_batch = 64

    def __init__(self, options: Options) -> None:
        self.options = options

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        width = self.options.width
        return {"hidden": jax.random.normal(key, (width, PIXELS)) / 8, "head": jnp.zeros((CLASSES, width))}

    def loss(self, params: Any, batch: Any, *, key: jax.Array, train: bool) -> tuple[jax.Array, Aux]:
        hidden = jax.nn.relu(batch["x"] @ params["hidden"].T)
        if train:
            kept = jax.random.bernoulli(key, 1 - self.options.dropout, hidden.shape)
            hidden = hidden * kept / (1 - self.options.dropout)
        scores = jax.nn.log_softmax(hidden @ params["head"].T)
        right = jnp.mean(jnp.argmax(scores, -1) == batch["y"])
        return -jnp.mean(jnp.take_along_axis(scores, batch["y"][:, None], -1)), Aux({"accuracy": right})

    def images(self, seed: tuple[int, ...], noise: float) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        y = rng.integers(CLASSES, size=self.tokens_per_batch)
        x = PROTOTYPES[y] + noise * rng.normal(size=(len(y), PIXELS))
        return {"x": x.astype(np.float32), "y": y.astype(np.int32)}

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        return (self.images((seed, share, number), self.options.noise) for number in itertools.count(start))

    def validation(self) -> dict[str, list[Any]]:
        noise = self.options.noise
        return {name: [self.images((2**32, number), times * noise) for number in range(4)] for name, times in LEVELS.items()}


def make(settings: TaskSettings, data: str | None, options: Options) -> Classifier:
    """Return the task that `task.name` names."""
    return Classifier(options)
