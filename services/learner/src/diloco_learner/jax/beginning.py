"""The start of a process that computes with JAX, of a learner with any number of processes: its task and its programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import IslandError, SettingsError
from diloco_learner.api import members
from diloco_learner.jax import programs
from diloco_learner.jax.island import Island
from diloco_learner.run.process import LearnerProcess, begin_with_file
from diloco_learner.task import Task, load_task
from diloco_learner.task_api import first_batch

FULL = "RESOURCE_EXHAUSTED"  # how JAX's errors begin where a device's memory is full
Turn = Callable[[str], AbstractContextManager[None]]  # waits until this process is to compile the programs of a name


def connect_jax(address: str, processes: int, place: int, within_s: float) -> None:
    """Make JAX connect this process with the others, whose devices it then has too. Place 0 listens at ``address``.

    Raises:
        RuntimeError: it cannot, or not within this time; or JAX has begun before.
    """
    update: Callable[[str, Any], None] = jax.config.update
    update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.distributed.initialize(
        address,
        processes,
        place,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address if place == 0 else None,
        initialization_timeout=int(within_s),
    )


@contextmanager
def room_for_steps(present: int, count: int) -> Iterator[None]:
    """Turn an out-of-memory error of a step into one that says so; ``present`` of the learner's ``count`` processes are there.

    Raises:
        SettingsError: they have none.
        IslandError: they have none, and would have more with the processes that are missing, which take rows of the batch.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said = str(error).partition("\n")[0]
        if not said.startswith(FULL):
            raise
        if present == count:
            raise SettingsError(
                f"the devices have no room for a step ({said}): take fewer rows a batch (task.batch of the built-in "
                "task), a smaller model, or more devices (mesh.fsdp)"
            ) from None
        raise IslandError(
            f"only {present} of {count} processes are present, so each takes more rows of the batch, and their devices "
            f"have no room for a step ({said}). They begin again, and continue once more processes are present; set "
            f"processes.least = {present + 1} to make them wait, or use fewer rows per batch"
        ) from None


def prepare_copies(island: Island) -> None:
    """Compile all that an island's captures need; values stay as they are."""
    for only in (False, True):
        for _ in island.capture(optimizer_only=only).content.values:
            pass


class Beginning:
    """The task and its island, made step by step. ``turn`` lets one process of a machine compile for the others."""

    def __init__(self, process: LearnerProcess, turn: Turn) -> None:
        self.process, self.turn = process, turn
        process.exporter.starting = "its programs to be compiled"
        self._began_s = time.monotonic()
        run = process.run.created
        with members.users_errors(run.task):
            self.task: Task = load_task(run.task, process.settings.data, process.settings.cache_dir)
            self.first = first_batch(self.task, run)

    def make_island(self, mesh: Mesh | None, *, copies: bool, apart: bool = False) -> tuple[Island, FragmentMap]:
        """Return an island that need not compile anything but its step, and its fragments.

        ``copies``: it will be copied. ``apart``: its step is two programs.
        """
        settings, run = self.process.settings, self.process.run.created
        about = run.task.model_dump_json(), run.fragments.model_dump_json(), run.inner.optimizer, run.outer.optimizer
        name = programs.name_of(settings.mesh.model_dump_json(), *about)
        with self.turn(name), members.users_errors(run.task):  # mostly those of ``task.init``
            island = Island(self.task, run, mesh, apart=apart)
            island.check(self.first)
            fragments = island.fragments()
            island.prepare(fragments)
        if copies:
            with self.turn(f"{name}-copies"):
                prepare_copies(island)
        begin_with_file(self.process, island, fragments)
        axes = {} if mesh is None else dict(mesh.shape)
        self.process.log.info("island_ready", devices=jax.device_count(), platform=jax.default_backend(), **axes)
        return island, fragments

    def compile_step(self, step: Sequence[jax.stages.Lowered]) -> None:
        """Compile the programs of the step that the island has traced."""
        for program in step:
            with self.turn(programs.name_of(program.as_text())):
                program.compile()

    def over(self) -> None:
        """Note that all is compiled."""
        seconds = {"compile_s": time.monotonic() - self._began_s, "process_cpu_s": time.process_time()}
        self.process.log.info("compiled", **{name: round(value, 1) for name, value in seconds.items()})
        self.process.exporter.starting = "the run's log to be read"
