"""A mixture of experts in plain JAX: each image goes to the expert that its router prefers, and all are kept busy.

PYTHONPATH=examples diloco up --set task.name=mixture_of_experts:make --set fragments.count=8 --tokens 400000 --plain
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from drawn import CLASSES, SIDE, Images, cross_entropy

from diloco.settings.run import TaskSettings
from diloco_learner.task import Aux
from diloco_learner.tensors import Tensor


@dataclass(frozen=True)
class Options:
    experts: int = 4
    width: int = 64
    noise: float = Images.noise
    validation_batches: int = Images.validation_batches


class MixtureOfExperts(Images):
    def __init__(self, options: Options) -> None:
        self.options, self.noise, self.validation_batches = options, options.noise, options.validation_batches

    def init(self, key: jax.Array) -> Any:
        count, width, size = self.options.experts, self.options.width, SIDE * SIDE
        up, down, router = jax.random.split(key, 3)
        return {
            "router": jax.random.normal(router, (count, size)) / size**0.5,
            "up": jax.random.normal(up, (count, size, width)) / size**0.5,  # (expert, in, out)
            "down": jax.random.normal(down, (count, width, CLASSES)) / width**0.5,
        }

    def loss(self, params: Any, batch: Any) -> tuple[jax.Array, Aux]:
        x = batch["x"].reshape(-1, SIDE * SIDE)
        odds = jax.nn.softmax(x @ params["router"].T)
        chosen = jax.nn.one_hot(odds.argmax(-1), self.options.experts)
        hidden = jax.nn.relu(jnp.einsum("ri,eio->reo", x, params["up"]))
        scores = jnp.einsum("rew,ewc,re->rc", hidden, params["down"], chosen * odds)
        balance = self.options.experts * jnp.sum(chosen.mean(0) * odds.mean(0))  # 1 where all are as busy
        return cross_entropy(scores, batch["y"]) + 0.01 * balance, Aux({"busiest": chosen.mean(0).max()})

    def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
        return Tensor(kind="head") if path == "router" else Tensor(kind="matrix", output_axis=(0, -1))


def make(settings: TaskSettings, data: str | None, options: Options) -> MixtureOfExperts:
    return MixtureOfExperts(options)
