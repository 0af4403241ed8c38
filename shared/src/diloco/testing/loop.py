"""Event loops in virtual time: one scheduler, one thread, and for each process a loop of its own.

A loop is what a process is: frozen, its callbacks are held back until it goes on; dead, they never run. Nothing sleeps, and
work for a thread (``asyncio.to_thread``) is done at once, or at the start or the end of a while drawn from the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from types import GeneratorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.testing.sockets import Factory, Host, PortListener
    from diloco.testing.threads import Thread

THREAD_S = 0.02  # longest that work in a thread takes, where it takes any time
SLOW_THREADS = 0.15  # share of such work
KEPT_TASKS = 32  # of a loop, before those that have ended are let go


class Call:
    """Something that a loop is to do: all that asyncio asks of a handle, at a third of its price."""

    __slots__ = ("args", "callback", "context", "loop")

    def __init__(
        self, loop: ProcessLoop, callback: Callable[..., object] | None, args: tuple[Any, ...], context: Context | None
    ) -> None:
        self.loop, self.callback, self.args, self.context = loop, callback, args, context

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


class Scheduler:
    """Time, and what happens next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stopped = False
        self.ready: deque[Call] = deque()
        self._later: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()

    def at(self, when_s: float, call: Call) -> None:
        heapq.heappush(self._later, (when_s, next(self._numbers), call))

    def run(self, limit_s: float) -> None:
        """Until :attr:`stopped`, or the end of that time, or there is nothing left to happen."""
        ready, later, current = self.ready, self._later, None
        try:
            while not self.stopped:
                if ready:
                    call = ready.popleft()
                elif later and later[0][0] <= limit_s:
                    when_s, _, call = heapq.heappop(later)
                    if call.callback is not None and when_s > self.now_s:
                        self.now_s = when_s
                else:
                    return
                callback, loop = call.callback, call.loop
                if callback is None or loop.dead:
                    continue
                if loop.held is not None:
                    loop.held.append(call)
                    continue
                if loop is not current:
                    asyncio._set_running_loop(loop)
                    current = loop
                try:
                    if call.context is None:
                        callback(*call.args)
                    else:
                        call.context.run(callback, *call.args)
                except Exception as error:
                    loop.failed(error)
        finally:
            asyncio._set_running_loop(None)


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one process."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, failed: Callable[[BaseException | str], None]) -> None:
        self.scheduler, self.rng, self.failed = scheduler, rng, failed
        self.dead = False
        self._crowded = KEPT_TASKS
        self.tasks: list[asyncio.Task[Any]] = []
        self.held: list[Call] | None = None  # what waits for the end of a freeze; None: not frozen
        self.host: Host | None = None  # its place in a network, if it has connections to other processes
        self.threads: list[Thread] = []

    def freeze(self) -> None:
        if self.held is None:
            self.held = []

    def thaw(self) -> None:
        self.scheduler.ready.extend(self.held or ())
        self.held = None

    def dispose(self) -> None:
        """Close what was left behind, so that its end comes at one known time; nothing that it still does has an effect."""
        self.dead = True
        self.end_threads()
        asyncio._set_running_loop(self)
        try:
            for task in self.tasks:
                if not task.done():
                    _close(task.get_coro())
        finally:
            asyncio._set_running_loop(None)

    def end_threads(self) -> None:
        """End the threads of a process that is dead."""
        for thread in self.threads:
            thread.end()

    # ---- what asyncio asks for

    def time(self) -> float:
        return self.scheduler.now_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Call:
        call = Call(self, callback, args, context)
        self.scheduler.ready.append(call)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Call:
        call = Call(self, callback, args, context)
        self.scheduler.at(self.scheduler.now_s + max(0.0, delay), call)
        return call

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Call:
        call = Call(self, callback, args, context)
        self.scheduler.at(when, call)
        return call

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:  # type: ignore[override]
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # who is killed leaves tasks behind
        self.tasks.append(task)
        if len(self.tasks) >= self._crowded:
            self.tasks = [task for task in self.tasks if not task.done()]
            self._crowded = 2 * len(self.tasks) + KEPT_TASKS
        return task

    async def create_server(self, factory: Factory, host: str, port: int, **options: Any) -> PortListener:  # type: ignore[override]
        assert self.host is not None
        return await self.host.listen(factory, port)

    async def create_connection(self, factory: Factory, host: str, port: int, **options: Any) -> Any:  # type: ignore[override]
        assert self.host is not None
        return await self.host.connect(factory, (host, port))

    draws_threads = True  # work for a thread is handed to one however small it is: what happens meanwhile is tried

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def settle() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        if self.rng.random() >= SLOW_THREADS:
            settle()
            return future
        seconds = THREAD_S * self.rng.random()
        if self.rng.random() < 0.5:
            self.call_later(seconds, settle)
            return future
        settle()
        waiting = self.create_future()
        self.call_later(seconds, _pass_on, future, waiting)
        return waiting

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self.failed(context.get("exception") or str(context.get("message")))


def _pass_on(done: asyncio.Future[Any], waiting: asyncio.Future[Any]) -> None:
    error = done.exception()
    if waiting.cancelled():
        return
    if error is None:
        waiting.set_result(done.result())
    else:
        waiting.set_exception(error)


def _close(coroutine: Any) -> None:
    # it may wait for something as it ends; an asynchronous generator's next item has no frame to close
    frame = "gi_frame" if isinstance(coroutine, GeneratorType) else "cr_frame"
    while getattr(coroutine, frame, None) is not None:
        with contextlib.suppress(RuntimeError, BaseExceptionGroup):
            coroutine.close()
