"""Waiting for a server that does not answer, or has no room: a service never ends because of either."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from diloco.errors import AppendUncertainError, StorageFullError
from diloco.observe import Logger

RETRY_S = 0.25

T = TypeVar("T")


async def patiently(work: Callable[[], Awaitable[T]], log: Logger) -> T:
    """Do work that may be done twice, again and again while the server is silent or full; the first time it is logged."""
    complained = False
    while True:
        try:
            return await work()
        except (AppendUncertainError, StorageFullError) as error:
            if not complained:
                log.warning("waiting_for_server", reason=str(error))
            complained = True
            await asyncio.sleep(RETRY_S)
