"""A small convolutional network in Equinox, with an optimizer of its own, that tells shapes in noisy images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from images import CLASSES, Images

from diloco.settings.run import TaskSettings
from diloco_learner import kernels
from diloco_learner.task import Aux


@dataclass(frozen=True)
class Options:
    """Values that `diloco up --task KEY=VALUE` may change."""

    channels: int = 32
    noise: float = 0.5
    batch: int = 64


class Net(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, channels: int, key: jax.Array) -> None:
        a, b, c = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(1, channels, 3, stride=2, padding=1, key=a)
        self.second = eqx.nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, key=b)
        self.head = eqx.nn.Linear(2 * channels, CLASSES, key=c)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return scores, float32 [CLASSES], of one image, float32 [SIZE, SIZE]."""
        x = jax.nn.relu(self.second(jax.nn.relu(self.first(x[None]))))
        return self.head(x.mean((1, 2)))


class Task(Images):
    tensor = staticmethod(kernels.equinox)  # weights are (out, in, ...)

    def __init__(self, options: Options) -> None:
        super().__init__(options.batch, options.noise)
        self.options = options
        self.static = eqx.filter(
            eqx.filter_eval_shape(Net, options.channels, jax.random.key(0)), eqx.is_array_like, inverse=True
        )

    def init(self, key: jax.Array) -> Any:
        return eqx.filter(Net(self.options.channels, key), eqx.is_array)

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, Aux]:
        scores = jax.vmap(eqx.combine(params, self.static))(batch["x"])
        right = jnp.mean(jnp.argmax(scores, -1) == batch["y"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean(), Aux({"accuracy": right})

    def optimizer(self, rate: optax.Schedule) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def make(settings: TaskSettings, data: str | None, options: Options) -> Task:
    return Task(options)
