"""A small GPT on the bytes of text files (--data), or of Python's standard library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from diloco.settings.run import TaskSettings
from diloco_learner.task import Units
from diloco_learner.text import TextData


@dataclass(frozen=True)
class Options:
    """Values that `diloco up --task KEY=VALUE` may change."""

    width: int = 64
    layers: int = 2
    heads: int = 4


class Task:
    units = Units(item="byte", loss="nats per byte")

    def __init__(self, settings: TaskSettings, data: str | None, options: Options) -> None:
        self.options, self.context = options, settings.context
        self.data = TextData(settings, data)
        self.tokens_per_batch = settings.batch * settings.context

    def init(self, key: jax.Array) -> Any:
        width, layers = self.options.width, self.options.layers
        keys = iter(jax.random.split(key, 3 + 4 * layers))

        def weight(rows: int, columns: int) -> jax.Array:  # (out, in): a row is one output unit
            return jax.random.normal(next(keys), (rows, columns)) * 0.02

        blocks = [
            {"qkv": weight(3 * width, width), "out": weight(width, width), "up": weight(4 * width, width)}
            | {"down": weight(width, 4 * width), "norm": jnp.ones((2, width))}
            for _ in range(layers)
        ]
        return {
            "embedding": weight(256, width),
            "position": weight(self.context, width),
            "blocks": blocks,
            "norm": jnp.ones(width),
            "head": weight(256, width),
        }

    def scores(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return scores of each next byte, float32 [rows, length, 256]."""
        rows, length = tokens.shape
        x = params["embedding"][tokens] + params["position"][:length]
        for block in params["blocks"]:
            split = (norm(x, block["norm"][0]) @ block["qkv"].T).reshape(rows, length, 3, self.options.heads, -1)
            mixed = jax.nn.dot_product_attention(split[:, :, 0], split[:, :, 1], split[:, :, 2], is_causal=True)
            x = x + mixed.reshape(x.shape) @ block["out"].T
            x = x + jax.nn.gelu(norm(x, block["norm"][1]) @ block["up"].T) @ block["down"].T
        return jnp.asarray(norm(x, params["norm"]) @ params["head"].T)

    def loss(self, params: Any, batch: jax.Array) -> jax.Array:
        log_shares = jax.nn.log_softmax(self.scores(params, batch[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(log_shares, batch[:, 1:, None], -1))

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[Any]:
        return self.data.batches(share, shares, seed, start, rows)

    def validation(self) -> Any:
        return self.data.validation()

    def sample(self, params: Any, key: jax.Array, count: int, prompt: str = "def ") -> str:
        """Return `count` bytes as text, which go on from the prompt: `diloco sample` prints them."""
        seen = list(prompt.encode()) or [ord("\n")]
        begun, scores = len(seen), jax.jit(self.scores)
        for each in jax.random.split(key, count):
            window = seen[-self.context :]
            padded = window + [0] * (self.context - len(window))  # of one shape, so that it is compiled once
            seen.append(int(jax.random.categorical(each, scores(params, jnp.array([padded]))[0, len(window) - 1])))
        return bytes(seen[begun:]).decode(errors="replace")

    def is_embedding(self, path: str) -> bool:
        return path in ("embedding", "position")

    def matrices(self, path: str) -> int:
        name = path.rpartition("/")[2]
        return {"qkv": 3, "norm": 0, "head": 0, "embedding": 0, "position": 0}.get(name, 1)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return float32 [..., width] over its root mean square, scaled."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def make(settings: TaskSettings, data: str | None, options: Options) -> Task:
    return Task(settings, data, options)
