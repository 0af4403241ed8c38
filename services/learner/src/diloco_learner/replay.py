"""A learner's training replayed: the model that ``diloco replay --learners`` drives by a tape."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core import tape
from diloco.core.delta import Apply
from diloco.core.fragments import FragmentMap, TensorSpec, build_map
from diloco.core.leases import data_of
from diloco.core.schedule import Moment
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco_learner.inner import learning_rate
from diloco_learner.island import Island
from diloco_learner.task import load_task


def machine() -> tape.Machine:
    """Return all that this process's bits depend on besides the program."""
    device = jax.devices()[0]
    text = f"{device.platform} {device.device_kind}, {_processor()}, jax {jax.__version__}, {jax.device_count()} devices"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get(tape.THREADS) or str(cores)
    return tape.Machine.of(text, threads, os.environ.get(tape.XLA_FLAGS, ""))


def parameters_digest(island: Island, fragment_map: FragmentMap) -> bytes:
    """Return the digest of the parameters as of the steps and writes so far; wait for the device."""
    vectors = {str(fragment.index): island.read(fragment).to_host() for fragment in fragment_map.fragments}
    return tape.state_digest({name: blake3(vector.tobytes()).digest() for name, vector in vectors.items()})


class Redo:
    """An island, driven by a tape instead of a trainer (:class:`diloco_ops.replay.Model`)."""

    def __init__(self, settings: RunSettings, data: str | None) -> None:
        update: Callable[[str, Any], None] = jax.config.update
        update("jax_compilation_cache_dir", str(LearnerSettings.model_fields["cache_dir"].default))
        self.settings = settings
        self.task = load_task(settings.task, data)
        self.island = Island(self.task, settings)
        self.map = build_map(
            [TensorSpec(*tensor) for tensor in self.island.tensors()], settings.fragments.count, settings.fragments.strategy
        )
        self._streams: dict[int, tuple[int, Iterator[Any]]] = {}  # by share: index of the next batch, and the batches

    @property
    def machine(self) -> tape.Machine:
        return machine()

    @property
    def tokens_per_batch(self) -> int:
        return self.task.tokens_per_batch

    def step(self, share: int, batch: int, at: Moment) -> None:
        rate = learning_rate(self.settings, at)
        self.island.step(self._batch(share, batch), rate).wait()

    def write(self, fragment: int, applied: Apply) -> None:
        keep = None if applied.reference is None else (applied.reference, applied.factor)
        alpha = 0.0 if applied.reset else self.settings.apply.alpha
        self.island.write(self.map.fragments[fragment], applied.theta, keep, alpha)

    def snapshot(self, fragment: int) -> NDArray[np.float32]:
        """Return what an offer is made of, float32 [size of the fragment]."""
        return self.island.snapshot(self.map.fragments[fragment]).to_host()

    def parameters_digest(self) -> bytes:
        return parameters_digest(self.island, self.map)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return parameters and optimizer state by name, any dtype [...]."""
        return self.island.state()

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over parameters and optimizer state by name, any dtype [...]."""
        self.island.load_state(state)

    def load_optimizer(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over optimizer state by name, any dtype [...]."""
        self.island.load_optimizer(state)

    def _batch(self, share: int, index: int) -> Any:
        following, batches = self._streams.get(share, (-1, iter(())))
        if following != index:
            of, seed = data_of(share, self.settings.learners, self.settings.seed)
            batches = self.task.batches(of, self.settings.learners, seed, index)
        self._streams[share] = (index + 1, batches)
        return next(batches)


def _processor() -> str:
    """Return the processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
