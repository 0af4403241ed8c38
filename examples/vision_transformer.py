"""A vision transformer in plain JAX: patches of images, attention among them, their mean classified.

PYTHONPATH=examples diloco up --set task.name=vision_transformer:make --set fragments.count=8 --tokens 400000 --plain
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from drawn import CLASSES, SIDE, Images, cross_entropy

from diloco.settings.run import TaskSettings
from diloco_learner.tensors import Tensor

PATCH = 4
PATCHES = (SIDE // PATCH) ** 2


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@dataclass(frozen=True)
class Options:
    noise: float = Images.noise
    validation_batches: int = Images.validation_batches


class VisionTransformer(Images):
    def __init__(self, settings: TaskSettings, options: Options) -> None:
        self.noise, self.validation_batches = options.noise, options.validation_batches
        self.layers, self.width, self.heads = settings.layers, settings.width, settings.heads

    def init(self, key: jax.Array) -> Any:
        width, shapes = self.width, {}
        shapes["patch"], shapes["head"] = (width, PATCH * PATCH), (CLASSES, width)
        for layer in range(self.layers):
            shapes |= {f"{layer}/qkv": (3 * width, width), f"{layer}/out": (width, width)}
            shapes |= {f"{layer}/up": (4 * width, width), f"{layer}/down": (width, 4 * width)}
        keys = jax.random.split(key, len(shapes))
        drawn = zip(keys, shapes.items(), strict=True)
        made = {name: jax.random.normal(k, shape) / shape[1] ** 0.5 for k, (name, shape) in drawn}
        return made | {"position": jnp.zeros((PATCHES, width)), "head": 0 * made["head"]}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        rows, across = len(batch["x"]), SIDE // PATCH
        patches = batch["x"].reshape(rows, across, PATCH, across, PATCH).swapaxes(2, 3).reshape(rows, PATCHES, -1)
        x = patches @ params["patch"].T + params["position"]
        for layer in range(self.layers):
            q, k, v = jnp.split((norm(x) @ params[f"{layer}/qkv"].T).reshape(rows, PATCHES, -1, self.width // self.heads), 3, 2)
            mixed = jax.nn.dot_product_attention(q, k, v).reshape(rows, PATCHES, self.width)
            x = x + mixed @ params[f"{layer}/out"].T
            x = x + jax.nn.gelu(norm(x) @ params[f"{layer}/up"].T) @ params[f"{layer}/down"].T
        return cross_entropy(norm(x).mean(1) @ params["head"].T, batch["y"])

    def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
        if path in ("position", "head"):
            return Tensor(kind="embedding" if path == "position" else "head")
        return Tensor(kind="matrix", parts=(self.width,) * 3 if path.endswith("qkv") else ())


def make(settings: TaskSettings, data: str | None, options: Options) -> VisionTransformer:
    return VisionTransformer(settings, options)
