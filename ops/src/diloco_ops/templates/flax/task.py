"""A small convolutional network in Flax NNX, with dropout, that tells shapes in noisy images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from images import CLASSES, Images

from diloco.settings.run import TaskSettings
from diloco_learner import kernels
from diloco_learner.task import Aux


@dataclass(frozen=True)
class Options:
    """Values that `diloco up --task KEY=VALUE` may change."""

    channels: int = 32
    dropout: float = 0.1
    noise: float = 0.5
    batch: int = 64


class Net(nnx.Module):
    def __init__(self, options: Options, rngs: nnx.Rngs) -> None:
        n = options.channels
        self.first = nnx.Conv(1, n, (3, 3), strides=2, rngs=rngs)
        self.second = nnx.Conv(n, 2 * n, (3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(options.dropout)
        self.head = nnx.Linear(2 * n, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs, *, train: bool) -> Any:
        x = nnx.relu(self.second(nnx.relu(self.first(x[..., None]))))
        return self.head(self.dropout(x.mean((1, 2)), deterministic=not train, rngs=rngs))


class Task(Images):
    tensor = staticmethod(kernels.flax)  # kernels are (..., in, out)

    def __init__(self, options: Options) -> None:
        super().__init__(options.batch, options.noise)
        self.options = options
        self.graph = nnx.graphdef(nnx.eval_shape(lambda: Net(options, nnx.Rngs(0))))

    def init(self, key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(Net(self.options, nnx.Rngs(key)), nnx.Param))

    def loss(self, params: Any, batch: Any, *, key: jax.Array, train: bool) -> tuple[jax.Array, Aux]:
        scores = nnx.merge(self.graph, nnx.State(params))(batch["x"], nnx.Rngs(key), train=train)
        right = jnp.mean(jnp.argmax(scores, -1) == batch["y"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean(), Aux({"accuracy": right})


def make(settings: TaskSettings, data: str | None, options: Options) -> Task:
    return Task(options)
