"""A learner's training replayed: the model that ``diloco replay --learners`` drives by a tape."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from diloco.core.learner.delta import VersionWrite
from diloco.core.learner.schedule import Moment, learning_rate
from diloco.core.run import tape
from diloco.core.run.leases import data_of
from diloco.errors import RunError
from diloco.processes.meeting import free_port
from diloco.settings import folders
from diloco.settings.run import RunSettings
from diloco.settings.service import MeshSettings
from diloco_learner.api.model import parameters_digest
from diloco_learner.jax import programs
from diloco_learner.jax.beginning import connect_jax
from diloco_learner.jax.island import Island
from diloco_learner.jax.mesh import AXES, make_mesh
from diloco_learner.task import load_task

LOOPBACK = "127.0.0.1"
CONNECT_S = 60.0  # of a process with itself: only ends what hangs


def machine() -> tape.Machine:
    """Return all that this process's bits depend on besides the program, the mesh, and the number of its learner's processes.

    A process with these flags has as many devices as the learner, whether they were given by flags or by JAX_NUM_CPU_DEVICES.
    """
    device = jax.devices()[0]
    flags, count = os.environ.get(tape.XLA_FLAGS, ""), f"{tape.CPU_DEVICES}={jax.device_count()}"
    if device.platform == "cpu" and tape.CPU_DEVICES in flags:
        flags = re.sub(rf"{tape.CPU_DEVICES}=\d+", count, flags)
    elif device.platform == "cpu" and jax.device_count() > 1:
        flags = f"{count} {flags}".rstrip()  # XLA reads no further than a word without dashes
    text = f"{device.platform} {device.device_kind}, {_processor()}, jax {jax.__version__}, {jax.device_count()} devices"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get(tape.THREADS) or str(cores)
    return tape.Machine.of(text, threads, flags)


def mesh_event(mesh: Mesh | None) -> tape.Mesh:
    """Return a mesh as tapes have it."""
    return tape.Mesh(*(1 if mesh is None else mesh.shape[axis] for axis in AXES))


def add_up_as_processes() -> None:
    """Have this process's devices add up as those of several processes do, from here on, before JAX begins.

    A sum over a CPU's devices is taken in another order within a process than between processes, where Gloo takes it around a
    ring of all devices. A process that JAX connects with others does the latter, even where it is the only one.
    """
    if not jax.distributed.is_initialized():
        connect_jax(f"{LOOPBACK}:{free_port(LOOPBACK)}", 1, 0, CONNECT_S)


class Redo:
    """An island, driven by a tape instead of a trainer (:class:`diloco_ops.audit.retraining.TrainableModel`).

    ``apart``: a step is two programs. ``processes``: the learner was so many, and this process has the devices of all.

    Raises:
        RunError: there are too few devices for the ``mesh`` on the tape.
    """

    def __init__(
        self, settings: RunSettings, data: str | None, mesh: tape.Mesh | None, apart: bool, processes: int = 1
    ) -> None:
        programs.keep_if_possible(folders.cache_dir())
        if processes > 1:
            add_up_as_processes()
        self.settings = settings
        self.task = load_task(settings.task, data)
        self.island = Island(self.task, settings, _mesh(mesh), apart=apart)
        self.map = self.island.fragments()
        self._streams: dict[int, tuple[int, Iterator[Any]]] = {}  # by share: index of the next batch, and the batches

    @property
    def machine(self) -> tape.Machine:
        return machine()

    @property
    def tokens_per_batch(self) -> int:
        return self.task.tokens_per_batch

    def step(self, share: int, batch: int, at: Moment) -> None:
        rate = learning_rate(self.settings, at)
        self.island.step(self._batch(share, batch), rate, (share, batch)).wait()

    def write(self, fragment: int, applied: VersionWrite) -> None:
        alpha = 0.0 if applied.reset else self.settings.apply.alpha
        self.island.write(self.map.fragments[fragment], applied.theta, applied.reference, alpha)

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


def _mesh(event: tape.Mesh | None) -> Mesh | None:
    if event is None:
        return None
    count = event.devices
    if count > jax.device_count():
        raise RunError(
            f"it was trained on a mesh of {count} devices, but there are {jax.device_count()} here: replay it where there are "
            f"enough, on a CPU with JAX_NUM_CPU_DEVICES={count} in the environment"
        )
    return make_mesh(MeshSettings(data=event.data, fsdp=event.fsdp, tensor=event.tensor), jax.devices()[:count])


def _processor() -> str:
    """Return the processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
