"""The beginning of a learner's process, however many processes the learner is: threads, JAX, the task, its programs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from diloco.control.creation import Run
from diloco.core.fragments import FragmentMap
from diloco.log.log import Log
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.process.tasks import end
from diloco.service.metrics import Exporter
from diloco.settings.service import LearnerSettings
from diloco_learner import programs, weights
from diloco_learner.feed import Batch
from diloco_learner.island import Island
from diloco_learner.task import Task, first_batch, load_task
from diloco_learner.trainer import LookAhead, Steered, Trainer

T = TypeVar("T")
Turn = Callable[[str], AbstractContextManager[None]]  # waits until this process is to compile the programs of a name


class LoopThread:
    """An asyncio loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="member", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], stopping: Callable[[], bool]) -> T:
        """Run ``work`` in the loop and wait for it; KeyboardInterrupt if this process is asked to end meanwhile."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        while True:
            try:
                return future.result(timeout=0.2)
            except TimeoutError:
                if future.done():
                    raise
                if stopping():
                    future.cancel()
                    raise KeyboardInterrupt from None

    def close(self) -> None:
        """Cancel what is left, and end the thread."""

        async def cancel() -> None:
            await end(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))

        asyncio.run_coroutine_threadsafe(cancel(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


@dataclass(frozen=True)
class Process:
    """A learner's process that has found its run. What it opens is closed with ``stack``, in turn."""

    settings: LearnerSettings
    run: Run
    transport: NatsTransport
    thread: LoopThread
    exporter: Exporter
    stack: ExitStack
    stopping: Callable[[], bool]
    log: Logger

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work in the loop's thread, and wait for it; KeyboardInterrupt if this process is asked to end meanwhile."""
        return self.thread.run(work, self.stopping)

    def at_end(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have this run in the loop's thread at the end."""
        self.stack.callback(lambda: self.thread.run(close(), lambda: False))


def make_trainer(
    process: Process,
    task: Task,
    island: Island,
    member: Steered,
    batches: Iterator[Batch],
    at_boundary: Callable[[], None],
    look_ahead: LookAhead | None = None,
    changing: AbstractContextManager[object] | None = None,
) -> Trainer:
    """Return the trainer of a process, as its settings and its run's have it."""
    return Trainer(
        island,
        member,
        batches,
        process.run.created,
        process.log,
        tokens_per_batch=task.tokens_per_batch,
        slow=process.settings.slow,
        leave_s=process.settings.leave_s,
        stopping=process.stopping,
        at_boundary=at_boundary,
        look_ahead=look_ahead,
        changing=changing,
    )


def set_up_jax(settings: LearnerSettings) -> None:
    """Have JAX keep compiled programs."""
    update: Callable[[str, Any], None] = jax.config.update
    update("jax_compilation_cache_dir", str(settings.cache_dir))
    update("jax_persistent_cache_min_compile_time_secs", 0.02)
    update("jax_persistent_cache_min_entry_size_bytes", -1)


class Beginning:
    """The task and its island, made step by step. ``turn`` lets one process of a machine compile for the others."""

    def __init__(self, process: Process, turn: Turn) -> None:
        self.process, self.turn = process, turn
        process.exporter.starting = "its programs to be compiled"
        self._began_s = time.monotonic()
        self.task: Task = load_task(process.run.created.task, process.settings.data)
        self.first = first_batch(self.task, process.run.created)

    def make_island(self, mesh: Mesh | None, *, copies: bool, apart: bool = False) -> tuple[Island, FragmentMap]:
        """Return an island that need not compile anything but its step, and its fragments.

        ``copies``: it will be copied. ``apart``: its step is two programs.
        """
        settings, run = self.process.settings, self.process.run.created
        about = run.task.model_dump_json(), run.fragments.model_dump_json(), run.inner.optimizer, run.outer.optimizer
        name = programs.name_of(settings.role, settings.mesh.model_dump_json(), *about)
        with self.turn(name):  # mostly those of ``task.init``
            island = Island(self.task, run, mesh, apart=apart)
            island.check(self.first)
            fragments = island.fragments()
            island.prepare(fragments, trains=copies)
        if settings.init is not None and (settings.role == "evaluator" or not self.process.wait(self._has_begun(fragments))):
            weights.put(settings.init, island, fragments, settings.init_names)
            self.process.log.info("weights_read", file=str(settings.init))
        axes = {} if mesh is None else dict(mesh.shape)
        self.process.log.info("island_ready", devices=jax.device_count(), platform=jax.default_backend(), **axes)
        return island, fragments

    async def _has_begun(self, fragments: FragmentMap) -> bool:
        """Return whether the run has its first version: it is not made of a file any more."""
        run = self.process.run
        store = Log(self.process.transport, run.name, run.identity, fragments, run.created)
        return await until_available(store.reader.genesis, self.process.log) is not None

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
