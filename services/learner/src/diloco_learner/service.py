"""``diloco-learner``: one island as a process, or (role ``evaluator``) one that only watches the global model.

Two threads: JAX steps in the main one, everything that talks to NATS in the other, which runs the asyncio loop.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from diloco.control.creation import Run
from diloco.core import tape as events
from diloco.core.fragments import FragmentMap, TensorSpec, build_map
from diloco.member.member import Member
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.process.tape import TapeFile
from diloco.process.tasks import end
from diloco.service import skeleton as service
from diloco.service.metrics import Exporter
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.transport import Transport
from diloco_learner import checkpoint, programs, replay
from diloco_learner.evaluator import Evaluator
from diloco_learner.feed import Feed
from diloco_learner.island import Island
from diloco_learner.mesh import make_mesh
from diloco_learner.metrics import ObservedMember
from diloco_learner.task import Task, first_batch, load_task
from diloco_learner.trainer import Trainer

T = TypeVar("T")


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


async def _find(settings: LearnerSettings, exporter: Exporter, log: Logger) -> tuple[NatsTransport, Run]:
    await exporter.start()
    transport = exporter.transport = await service.connect(settings, settings.role, log)
    return transport, await service.find_run(transport, settings, log)


async def _member(
    transport: Transport, run: Run, fragments: FragmentMap, settings: LearnerSettings, log: Logger, tape: TapeFile | None
) -> Member:
    return Member(transport, run, fragments, settings, log, tape)


def _set_up_jax(settings: LearnerSettings) -> None:
    update: Callable[[str, Any], None] = jax.config.update
    update("jax_compilation_cache_dir", str(settings.cache_dir))
    update("jax_persistent_cache_min_compile_time_secs", 0.02)
    update("jax_persistent_cache_min_entry_size_bytes", -1)


def _island(
    settings: LearnerSettings, task: Task, run: RunSettings, mesh: Mesh | None, first: Any, stopping: Callable[[], bool]
) -> tuple[Island, FragmentMap]:
    """Return an island that need not compile anything but its step, and its fragments."""
    about = run.task.model_dump_json(), run.fragments.model_dump_json(), run.inner.optimizer, run.outer.optimizer
    name = programs.name_of(settings.role, settings.mesh.model_dump_json(), *about)
    with programs.compiled_once(settings.cache_dir, name, stopping):  # mostly those of ``task.init``
        island = Island(task, run, mesh)
        island.check(first)
        tensors = [TensorSpec(*tensor) for tensor in island.tensors()]
        fragments = build_map(tensors, run.fragments.count, run.fragments.strategy)
        island.prepare(fragments, trains=settings.role == "learner")
    return island, fragments


def _prepare_step(island: Island, first: Any, cache_dir: Path, stopping: Callable[[], bool]) -> None:
    step = island.trace(first)  # by each process for itself, while one compiles: so its name is that of this very program
    with programs.compiled_once(cache_dir, programs.name_of(step.as_text()), stopping):
        step.compile()
    island.rehearse(first)


def _train(
    settings: LearnerSettings, task: Task, island: Island, mesh: Mesh | None, member: Member, stopping: Callable[[], bool]
) -> None:
    """Train until the run is over or this process is asked to end; its state is saved then."""
    log, run = observe.get_logger(), member.run
    member.tape.record(replay.machine())
    if mesh is not None:
        member.tape.record(replay.mesh_event(mesh))
    keeper = checkpoint.Keeper(island, member, settings, log)
    trainer = Trainer(
        island,
        member,
        Feed(task, run.created, member.leased, log),
        run.created,
        log,
        tokens_per_batch=task.tokens_per_batch,
        slow=settings.slow,
        leave_s=settings.leave_s,
        stopping=stopping,
        at_boundary=keeper.at_boundary,
    )
    try:
        finished = trainer.run()
    finally:
        keeper.close()
    member.tape.record(events.End(finished, replay.parameters_digest(island, member.map)))
    if not finished:
        keeper.save_last()


def work(settings: LearnerSettings, stopping: Callable[[], bool]) -> None:
    """Join the run and train, or evaluate, until it is over or this process is asked to end."""
    _set_up_jax(settings)
    mesh = make_mesh(settings.mesh)
    log, learns = observe.get_logger(), settings.role == "learner"
    thread, exporter = LoopThread(), Exporter(settings, settings.role, log)
    with ExitStack() as stack:

        def at_end(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
            stack.callback(lambda: thread.run(close(), lambda: False))

        stack.callback(thread.close)
        at_end(exporter.close)
        transport, run = thread.run(_find(settings, exporter, log), stopping)
        at_end(transport.close)
        exporter.starting = "its programs to be compiled"
        task = load_task(run.created.task, settings.data)
        started_s = time.monotonic()
        first = first_batch(task, run.created)
        island, fragments = _island(settings, task, run.created, mesh, first, stopping)
        axes = {} if mesh is None else dict(mesh.shape)
        log.info("island_ready", devices=jax.local_device_count(), platform=jax.default_backend(), **axes)
        tape = TapeFile(settings.state_dir, settings.name, run.identity, log) if learns else None
        member = thread.run(_member(transport, run, fragments, settings, log, tape), stopping)
        at_end(member.close)
        if learns:
            member.admission.check_batch(task.tokens_per_batch)
            _prepare_step(island, first, settings.cache_dir, stopping)
        seconds = {"compile_s": time.monotonic() - started_s, "process_cpu_s": time.process_time()}
        log.info("compiled", **{name: round(value, 1) for name, value in seconds.items()})
        exporter.starting = "the run's log to be read"
        thread.run(member.join(lambda: [island.read(fragment).to_host() for fragment in member.map.fragments]), stopping)
        exporter.observed = ObservedMember(member, transport, exporter.labels())
        if not learns:
            Evaluator(island, member, run.created, settings.state_dir, log, stopping=stopping).run()
            return
        if not checkpoint.restore(settings, island, member, log):
            member.count_steps(task.tokens_per_batch)
            loan = thread.run(member.borrow(island.optimizer_layout()), stopping)
            if loan is not None:
                island.load_optimizer(loan.arrays)
        _train(settings, task, island, mesh, member, stopping)


def _main() -> int:
    settings = service.parse_settings(LearnerSettings, "diloco-learner")
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    work(settings, stop.is_set)
    observe.get_logger().info("stopped", asked=stop.is_set())
    return 0


def main() -> None:
    """Console script."""
    sys.exit(observe.run_main(_main, "diloco-learner"))


if __name__ == "__main__":
    main()
