"""A convolutional network in Flax NNX, with dropout.

PYTHONPATH=examples diloco up --set task.name=flax_nnx:make --set fragments.count=8 --tokens 400000 --plain
"""

from __future__ import annotations

from typing import Any

import jax
from drawn import CLASSES, Images, cross_entropy
from flax import nnx

from diloco.settings.run import TaskSettings
from diloco_learner import kernels


class Net(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, width, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.head = nnx.Linear(64 * width, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs, *, train: bool) -> Any:
        hidden = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.dropout(hidden, deterministic=not train, rngs=rngs).reshape(len(x), -1))


class Task(Images):
    tensor = staticmethod(kernels.flax)

    def __init__(self, width: int) -> None:
        self.width = width
        self.graph = nnx.graphdef(nnx.eval_shape(lambda: Net(width, nnx.Rngs(0))))

    def init(self, key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(Net(self.width, nnx.Rngs(key)), nnx.Param))

    def loss(self, params: Any, batch: Any, *, key: jax.Array, train: bool) -> jax.Array:
        scores = nnx.merge(self.graph, nnx.State(params))(batch["x"], nnx.Rngs(key), train=train)
        return cross_entropy(scores, batch["y"])


def make(settings: TaskSettings, data: str | None) -> Task:
    return Task(settings.width)
