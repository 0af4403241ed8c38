"""Running tasks side by side, ending them, and not ending them too early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

CANCEL_AGAIN_S = 0.1  # a swallowed cancellation delays an end by no more than this
SMALL_VALUES = 1 << 16  # work on so many takes about as long as to hand it to a thread, 0.2 ms

T = TypeVar("T")


async def computed(values: int, work: Callable[[], T]) -> T:
    """Return what ``work`` on so many values returns: it is done in a thread, and at once where a thread would cost more."""
    if values <= SMALL_VALUES and not getattr(asyncio.get_running_loop(), "draws_threads", False):
        return work()
    return await asyncio.to_thread(work)


async def side_by_side(count: int, most: int, work: Callable[[int], Awaitable[T]]) -> list[T]:
    """Return the results of ``work`` for 0 to ``count`` - 1, in this order; at most ``most`` are under way, begun in order.

    The first error ends all others, and is raised when they have ended. So does a cancellation.
    """
    indexes, results = iter(range(count)), dict[int, T]()

    async def go_on() -> None:
        for index in indexes:
            results[index] = await work(index)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, most)):
                group.create_task(go_on())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[index] for index in range(count)]


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until they have ended; one that failed fails its task group, not the caller.

    They are cancelled again until they end: before Python 3.12, ``asyncio.wait_for`` may swallow a cancellation that comes
    together with its result.
    """
    running = {task for task in tasks if task is not None}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


async def give_up(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended; neither their results nor their errors are asked for."""
    for task in tasks:
        task.add_done_callback(_retrieve)
    await end(*tasks)


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # or asyncio logs that it was never retrieved


class Tasks:
    """The tasks of one owner, who is told of the errors they end by. Construct it in the loop's thread, and call it there."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed, self._loop = failed, asyncio.get_running_loop()
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task."""
        task = self._loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    async def end(self) -> None:
        """Cancel all tasks and wait for their end."""
        await end(*self._running)


async def heeding(work: Awaitable[T]) -> T:
    """Await a library's work in this task. Raise CancelledError if a cancellation came meanwhile and was swallowed.

    Before Python 3.12, ``asyncio.wait_for`` swallows a cancellation that arrives together with the result. A task group
    cancels each task once, so it would wait for ever for a task that goes on.
    """
    task = asyncio.current_task()
    assert task is not None  # else nothing could be awaited
    before = task.cancelling()
    try:
        return await work
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def unbroken(work: Awaitable[T]) -> T:
    """Await work that must not be left half done: if this task is cancelled meanwhile, it ends when the work has ended."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    _retrieve(task)
    raise cancelled
