"""A learner's process, whatever framework computes its steps: its threads, its run, and how it begins and ends."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from diloco.control.creation import KnownRun
from diloco.core.tensors.fragments import FragmentMap
from diloco.log.log import Log
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.process.tasks import end
from diloco.service import skeleton as service
from diloco.service.metrics import Exporter
from diloco.settings.service import LearnerSettings
from diloco_learner.api.model import Evaluated, Stepping
from diloco_learner.data.feed import Batch
from diloco_learner.run import weights
from diloco_learner.run.trainer import LookAhead, Steered, Trainer

T = TypeVar("T")


# for how long a training loop waits for Python's lock before the protocol's thread is asked for it; 5 ms is Python's own value,
# and a loop of PyTorch takes the lock again after each operation
LOCK_WAIT_S = 0.0002


class LoopThread:
    """An asyncio loop in a thread of its own, which hands Python's lock over soon while it is there."""

    def __init__(self) -> None:
        self._lock_wait_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._lock_wait_s, LOCK_WAIT_S))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="member", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], stopping: Callable[[], bool]) -> T:
        """Run ``work`` in the loop and wait for it; KeyboardInterrupt if this process is asked to end meanwhile."""
        return self.finish(self.begin(work), stopping)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin ``work`` in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def finish(self, future: Future[T], stopping: Callable[[], bool]) -> T:
        """Wait for work that has begun; KeyboardInterrupt if this process is asked to end meanwhile."""
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
        sys.setswitchinterval(self._lock_wait_s)


@dataclass(frozen=True, kw_only=True)
class LearnerProcess:
    """A learner's process that has found its run. What it opens is closed with ``stack``, in turn."""

    settings: LearnerSettings
    run: KnownRun
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
    process: LearnerProcess,
    tokens_per_batch: int,
    model: Stepping,
    member: Steered,
    batches: Iterator[Batch],
    at_boundary: Callable[[], None],
    *,
    look_ahead: LookAhead | None = None,
    changing: AbstractContextManager[object] | None = None,
) -> Trainer:
    """Return the trainer of a process, as its settings and its run's have it."""
    return Trainer(
        model,
        member,
        batches,
        process.run.created,
        process.log,
        tokens_per_batch=tokens_per_batch,
        slow=process.settings.slow,
        leave_s=process.settings.leave_s,
        stopping=process.stopping,
        at_boundary=at_boundary,
        look_ahead=look_ahead,
        changing=changing,
    )


def begin_with_file(process: LearnerProcess, model: Evaluated, fragments: FragmentMap) -> None:
    """Write the weights that the run begins with into a model, if a file has them and the run has no version yet.

    Raises:
        SettingsError: the file cannot be read, or its tensors are not the model's.
    """
    settings = process.settings
    if settings.init is None:
        return
    if settings.role == "evaluator" or not process.wait(_has_begun(process, fragments)):
        weights.begin(settings.init, model, fragments, settings.init_names, settings.cache_dir)
        process.log.info("weights_read", file=settings.init)


async def _has_begun(process: LearnerProcess, fragments: FragmentMap) -> bool:
    """Return whether the run has its first version: it is not made of a file any more."""
    run = process.run
    store = Log(process.transport, run.name, run.identity, fragments, run.created)
    return await until_available(store.reader.genesis, process.log) is not None


@contextmanager
def begun(settings: LearnerSettings, stopping: Callable[[], bool]) -> Iterator[LearnerProcess]:
    """Find the run, and yield this process; what it opened is closed at the end."""
    log, thread = observe.get_logger(), LoopThread()
    exporter = Exporter(settings, settings.role, log)
    with ExitStack() as stack:
        stack.callback(thread.close)
        stack.callback(lambda: thread.run(exporter.close(), lambda: False))
        transport, run = thread.run(_find(settings, exporter, log), stopping)
        stack.callback(lambda: thread.run(transport.close(), lambda: False))
        yield LearnerProcess(
            settings=settings,
            run=run,
            transport=transport,
            thread=thread,
            exporter=exporter,
            stack=stack,
            stopping=stopping,
            log=log,
        )


async def _find(settings: LearnerSettings, exporter: Exporter, log: Logger) -> tuple[NatsTransport, KnownRun]:
    await exporter.start()
    transport = exporter.transport = await service.connect(settings, settings.role, log, settings.processes)
    return transport, await service.find_run(transport, settings, log)


def until_asked(work: Callable[[Callable[[], bool]], None]) -> int:
    """Do a process's ``work``, which is given a way to see whether the process was asked to end; return the exit code."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    work(stop.is_set)
    observe.get_logger().info("stopped", asked=stop.is_set())
    return 0
