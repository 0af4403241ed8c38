"""Ending tasks, and not ending them too early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

CANCEL_AGAIN_S = 0.1  # a swallowed cancellation delays an end by no more than this

T = TypeVar("T")


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended; one that failed fails its task group, not the caller.

    They are cancelled again until they end: before Python 3.12, ``asyncio.wait_for`` may swallow a cancellation that comes
    together with its result.
    """
    running = {task for task in tasks if task is not None}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


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
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio logs it: nobody asks for the result any more
    raise cancelled
