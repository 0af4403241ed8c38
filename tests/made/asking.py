"""Requests to a NATS server whose answers may be lost when a connection is made again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors
from tests.pace import DEADLINE_S

T = TypeVar("T")
AGAIN_S = 0.1


async def asked(request: Callable[[], Awaitable[T]]) -> T:
    """Return the answer to a request that may be made twice; it is made again while none comes."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await request()
            except (nats.errors.TimeoutError, nats.errors.OutboundBufferLimitError, OSError):
                await asyncio.sleep(AGAIN_S)
