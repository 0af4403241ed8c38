"""A small residual network in Haiku.

PYTHONPATH=examples diloco up --set task.name=haiku_resnet:make --set fragments.count=8 --tokens 400000 --plain
"""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
from drawn import CLASSES, SIDE, Images, cross_entropy
from jax import numpy as jnp

from diloco.settings.run import TaskSettings
from diloco_learner import kernels


class Task(Images):
    tensor = staticmethod(kernels.haiku)

    def __init__(self, width: int) -> None:
        self.width = width
        self.net = hk.without_apply_rng(hk.transform(self.scores))

    def scores(self, x: jax.Array) -> Any:
        hidden = hk.Conv2D(self.width, 3, stride=2)(x)
        for _ in range(2):
            normed = hk.LayerNorm(-1, create_scale=True, create_offset=True)(hidden)
            hidden = hidden + hk.Conv2D(self.width, 3)(jax.nn.relu(normed))
        return hk.Linear(CLASSES, name="head")(hidden.mean((1, 2)))

    def init(self, key: jax.Array) -> Any:
        return self.net.init(key, jnp.zeros((1, SIDE, SIDE, 1)))

    def loss(self, params: Any, batch: Any) -> jax.Array:
        return cross_entropy(self.net.apply(params, batch["x"]), batch["y"])


def make(settings: TaskSettings, data: str | None) -> Task:
    return Task(settings.width)
