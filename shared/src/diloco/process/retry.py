"""Retry while a server does not answer or has no room: a service never ends because of either."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from diloco.errors import AppendUncertainError, StorageFullError
from diloco.process.observe import Logger

RETRY_S = 0.25  # a server that is back is noticed at once, by a person's measure; four requests a second hurt none

T = TypeVar("T")


class Complaint:
    """Log the first of several failures in a row, and the first one after a success again."""

    def __init__(self, log: Logger) -> None:
        self._log, self._made = log, False

    def warn(self, event: str, **values: Any) -> None:
        """Log a warning unless a failure was logged since the last success."""
        self._once(self._log.warning, event, values)

    def error(self, event: str, **values: Any) -> None:
        """Log an error unless a failure was logged since the last success."""
        self._once(self._log.error, event, values)

    def _once(self, tell: Callable[..., Any], event: str, values: dict[str, Any]) -> None:
        if not self._made:
            tell(event, **values)
        self._made = True

    def over(self) -> bool:
        """Note a success. Return whether a warning had been logged before it."""
        made, self._made = self._made, False
        return made


async def until_available(work: Callable[[], Awaitable[T]], log: Logger) -> T:
    """Return the result of ``work``, which may be done twice; do it again while the server is silent or full.

    The first failure is logged as ``waiting_for_server``.
    """
    complaint = Complaint(log)
    while True:
        try:
            return await work()
        except (AppendUncertainError, StorageFullError) as error:
            complaint.warn("waiting_for_server", reason=str(error))
            await asyncio.sleep(RETRY_S)
