"""A small convolutional network that tells shapes in noisy images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from images import CLASSES, Images

from diloco.settings.run import TaskSettings
from diloco_learner.task import Aux


@dataclass(frozen=True)
class Options:
    """Values that `diloco up --task KEY=VALUE` may change."""

    channels: int = 32
    noise: float = 0.5
    batch: int = 64


class Task(Images):
    def __init__(self, options: Options) -> None:
        super().__init__(options.batch, options.noise)
        self.options = options

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


def make(settings: TaskSettings, data: str | None, options: Options) -> Task:
    return Task(options)
