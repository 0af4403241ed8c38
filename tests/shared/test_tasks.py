"""Tasks end when they are cancelled, whatever the libraries do that they wait for."""

from __future__ import annotations

import asyncio

import pytest
from tests.pace import DEADLINE_S

from diloco.process.tasks import heeding


async def test_a_cancellation_that_a_library_swallows_ends_the_task_all_the_same() -> None:
    went_on = False

    async def swallowing() -> str:
        """What ``asyncio.wait_for`` of Python 3.11 does where the result comes together with the cancellation."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "the result"
        return "never"

    async def work() -> None:
        nonlocal went_on
        await heeding(swallowing())
        went_on = True
        await asyncio.Event().wait()

    async with asyncio.timeout(DEADLINE_S):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work())
            await asyncio.sleep(0)
            task.cancel()
    assert not went_on


async def test_a_result_and_an_error_come_through() -> None:
    async def failing() -> None:
        raise ValueError("of the library")

    assert await heeding(asyncio.sleep(0, "the result")) == "the result"
    with pytest.raises(ValueError, match="of the library"):
        await heeding(failing())


async def test_work_in_a_task_that_was_cancelled_before_is_done() -> None:
    """As what closes a connection does."""
    done: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            done.append(await heeding(asyncio.sleep(0, "closed")))

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert (done, task.cancelled()) == (["closed"], True)
