"""LoRA on a frozen base: two matrices of low rank beside each of the base's, which no message has and no step changes.

PYTHONPATH=examples diloco up --set task.name=lora:make --task rank=4 --set fragments.count=8 --tokens 400000 --plain
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn import CLASSES, SIDE, Images, cross_entropy
from safetensors.numpy import load_file

from diloco.settings.run import TaskSettings

SHAPES = {"first": (128, SIDE * SIDE), "second": (128, 128), "head": (CLASSES, 128)}  # (out, in)


@dataclass(frozen=True)
class Options:
    rank: int = 4
    base: str = ""  # a safetensors file of tensors of these names; without it the base is drawn


class Lora(Images):
    def __init__(self, options: Options) -> None:
        self.options = options

    def constants(self) -> Any:
        if self.options.base:
            return load_file(self.options.base)
        rng = np.random.default_rng(0)  # of NumPy: the same bits on any machine, or the learners' hashes would differ
        return {name: (rng.normal(size=shape) / shape[1] ** 0.5).astype(np.float32) for name, shape in SHAPES.items()}

    def init(self, key: jax.Array) -> Any:
        keys, rank = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True)), self.options.rank
        return {
            name: {"a": jax.random.normal(keys[name], (rank, shape[1])) / shape[1] ** 0.5, "b": jnp.zeros((shape[0], rank))}
            for name, shape in SHAPES.items()
        }

    def loss(self, params: Any, batch: Any, *, constants: Any) -> jax.Array:
        weights = {name: constants[name] + p["b"] @ p["a"] for name, p in params.items()}
        hidden = jax.nn.relu(batch["x"].reshape(-1, SIDE * SIDE) @ weights["first"].T)
        hidden = hidden + jax.nn.relu(hidden @ weights["second"].T)
        return cross_entropy(hidden @ weights["head"].T, batch["y"])


def make(settings: TaskSettings, data: str | None, options: Options) -> Lora:
    return Lora(options)
