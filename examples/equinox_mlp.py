"""A perceptron in Equinox, trained by an optimizer of the task's own.

PYTHONPATH=examples diloco up --set task.name=equinox_mlp:make --set fragments.count=8 --tokens 400000 --plain
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import optax
from drawn import CLASSES, SIDE, Images, cross_entropy

from diloco.settings.run import TaskSettings
from diloco_learner import kernels


class Task(Images):
    tensor = staticmethod(kernels.equinox)

    def __init__(self, width: int) -> None:
        self.width = width
        self.static = eqx.filter(eqx.filter_eval_shape(self.model, jax.random.key(0)), eqx.is_array_like, inverse=True)

    def model(self, key: jax.Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(SIDE * SIDE, CLASSES, self.width, depth=2, key=key)

    def init(self, key: jax.Array) -> Any:
        return eqx.filter(self.model(key), eqx.is_array)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        model = eqx.combine(params, self.static)
        return cross_entropy(jax.vmap(model)(batch["x"].reshape(len(batch["x"]), -1)), batch["y"])

    def optimizer(self, rate: optax.Schedule) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.lion(lambda count: rate(count) / 3))


def make(settings: TaskSettings, data: str | None) -> Task:
    return Task(settings.width)
