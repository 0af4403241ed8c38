"""A convolutional network in Flax NNX with batch normalisation, whose statistics are merged: evaluated, saved and exported.

PYTHONPATH=examples diloco up --set task.name=flax_batchnorm:make --set fragments.count=8 --tokens 400000 --plain
"""

from __future__ import annotations

from typing import Any

import jax
from drawn import CLASSES, Images, cross_entropy
from flax import nnx

from diloco.settings.run import TaskSettings
from diloco_learner import kernels
from diloco_learner.task import Aux


class Net(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, width, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.head = nnx.Linear(64 * width, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array, *, train: bool) -> Any:
        hidden = nnx.relu(self.norm(self.conv(x), use_running_average=not train))
        return self.head(hidden.reshape(len(x), -1))


class Task(Images):
    tensor = staticmethod(kernels.flax)

    def __init__(self, width: int) -> None:
        self.width = width
        self.graph = nnx.graphdef(nnx.eval_shape(lambda: Net(width, nnx.Rngs(0))))

    def init(self, key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(Net(self.width, nnx.Rngs(key)), nnx.Param))

    def init_state(self, key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(Net(self.width, nnx.Rngs(key)), nnx.BatchStat))

    def loss(self, params: Any, batch: Any, *, state: Any, train: bool) -> Any:
        net = nnx.merge(self.graph, nnx.State(params), nnx.State(state))
        scores = net(batch["x"], train=train)
        return cross_entropy(scores, batch["y"]), Aux(state=nnx.to_pure_dict(nnx.state(net, nnx.BatchStat)))


def make(settings: TaskSettings, data: str | None) -> Task:
    return Task(settings.width)
