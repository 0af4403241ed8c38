"""A model and data of one's own: a small recurrent network that adds up the bits it has seen. Any JAX code will do.

PYTHONPATH=examples diloco up --set task.name=own_model:make --tokens 400000 --plain
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.settings.run import TaskSettings
from diloco_learner.tensors import Kind, Tensor

CLASSES = 8  # the network says how many ones it has seen, modulo this


class CountOnes:
    """Sequences of random bits; after each one, the number of ones so far modulo 8."""

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        self.tokens_per_batch = settings.batch * settings.context

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        width = self.settings.width
        a, b, c = jax.random.split(key, 3)
        return {
            "embedding": jax.random.normal(a, (2, width)),
            "recurrent": jax.random.normal(b, (width, width)) / width**0.5,
            "head": jax.random.normal(c, (CLASSES, width)) / width**0.5,
        }

    def loss(self, params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        def step(state: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(state @ params["recurrent"].T + params["embedding"][bits])
            return state, state @ params["head"].T

        start = jnp.zeros((batch.shape[0], self.settings.width))
        scores = jax.lax.scan(step, start, batch.T)[1].swapaxes(0, 1)
        counts = jnp.cumsum(batch, axis=1) % CLASSES
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), counts[..., None], axis=-1)
        return -jnp.mean(chosen)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[np.ndarray[Any, np.dtype[np.int32]]]:
        number = start
        while True:
            bits = np.random.default_rng((seed, share, number)).integers(0, 2, (self.settings.batch, self.settings.context))
            yield bits.astype(np.int32)
            number += 1

    def validation(self) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        fixed = self.batches(0, 1, 2**31, 0)
        return [next(fixed) for _ in range(4)]

    def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
        kinds: dict[str, Kind] = {"embedding": "embedding", "head": "head"}
        return Tensor(kind=kinds.get(path, "matrix"))


def make(settings: TaskSettings, data: str | None) -> CountOnes:
    """Return the task that `task.name` names; called with the run's task settings and the value of `--data`."""
    return CountOnes(settings)
