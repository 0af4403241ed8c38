"""A task whose step takes a set time and hardly any processor, as it does for a service whose accelerators do the work.

    BENCH_STEP_S=0.25 PYTHONPATH=bench diloco up --set task.name=harness.asleep:make --set task.layers=24 --set task.width=256

It has ``task.layers`` tensors of ``task.width`` squared, which learn to turn noise into other noise. A benchmark of
links asks what the services send and when; the time that two cores need for three models at once would hide it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco.settings.run import TaskSettings
from harness.live_run import ASLEEP_TOKENS

TICK_S = 0.005
STOPPED_S = 0.05  # a tick that takes longer was stopped: a busy machine wakes a sleeper later than it asked for, too


class SquareTensors:
    """Square tensors, by ``task.layers`` and ``task.width``; ``step_s``: what a step takes at least, asleep in ``rest``.

    A batch is so many ``pairs`` of noise and the other noise that it is to be turned into: float32 [2 * pairs, width].
    """

    tokens_per_batch = ASLEEP_TOKENS

    def __init__(self, settings: TaskSettings, step_s: float, rest: Callable[[float], None], pairs: int = 1) -> None:
        self.settings, self.step_s, self.rest, self.pairs = settings, step_s, rest, pairs

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        width = self.settings.width
        keys = jax.random.split(key, self.settings.layers)
        return {f"layer_{i:03}": 0.02 * jax.random.normal(k, (width, width)) for i, k in enumerate(keys)}

    def loss(self, params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        def sleep(_: Any) -> NDArray[np.float32]:
            self.rest(self.step_s)
            return np.zeros((), np.float32)

        slept = jax.pure_callback(sleep, np.zeros((), np.float32), batch)
        inputs, wanted = batch.reshape(self.pairs, 2, -1).transpose(1, 2, 0)  # float32 [width, pairs] each
        errors = [jnp.mean((tensor @ inputs - wanted) ** 2) for tensor in params.values()]
        return sum(errors, start=slept) / len(errors)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[NDArray[np.float32]]:
        number, shape = start, (2 * self.pairs, self.settings.width)
        while True:
            yield np.random.default_rng((seed, share, number)).standard_normal(shape).astype(np.float32)
            number += 1

    def validation(self) -> list[NDArray[np.float32]]:
        return [next(self.batches(0, 1, 2**31, 0))]

    def is_embedding(self, path: str) -> bool:
        return False


def doze(duration_s: float) -> None:
    """Sleep for so long, not counting the time in which this process is stopped: who computes does not go on then either."""
    ends_s = time.monotonic() + duration_s
    while (left_s := ends_s - (began_s := time.monotonic())) > 0:
        tick_s = min(TICK_S, left_s)
        time.sleep(tick_s)
        slept_s = time.monotonic() - began_s
        if slept_s > STOPPED_S:
            ends_s += slept_s - tick_s / 2  # where in the tick it was stopped is not known


def make(settings: TaskSettings, data: str | None) -> SquareTensors:
    """Return the task that ``task.name`` names."""
    return SquareTensors(settings, float(os.environ["BENCH_STEP_S"]), doze)


def make_unstopped(settings: TaskSettings, data: str | None) -> SquareTensors:
    """Return the same for processes that are not stopped in mid-step: a busy machine's late wakings do not add up."""
    return SquareTensors(settings, float(os.environ["BENCH_STEP_S"]), time.sleep)


def make_paired(settings: TaskSettings, data: str | None) -> SquareTensors:
    """Return the same with a pair for each row of ``task.batch``, which more devices than two divide."""
    return SquareTensors(settings, float(os.environ["BENCH_STEP_S"]), time.sleep, settings.batch)
