"""Names of hosts, resolved in threads that no process waits for.

asyncio resolves names in the loop's executor. A resolver without an answer takes up to a minute, as where a container is gone.
Meanwhile it holds the executor's threads, which encode and fold, and a process that ends waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

Addresses = list[tuple[Any, ...]]


def use_own_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Have a loop resolve names here, from now on."""
    loop.getaddrinfo = _Resolver(loop).resolve  # type: ignore[method-assign]


class _Resolver:
    """Resolves each name in one thread at a time, for all that ask meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked: dict[tuple[Any, ...], asyncio.Future[Addresses]] = {}

    async def resolve(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Addresses:
        """Return what ``socket.getaddrinfo`` does.

        Raises:
            OSError: the name is unknown.
        """
        question = (host, port, family, type, proto, flags)
        answer = self._asked.get(question)
        if answer is None:
            answer = self._asked[question] = self._loop.create_future()
            threading.Thread(target=self._ask, args=(question, answer), name="resolver", daemon=True).start()
        return await asyncio.shield(answer)

    def _ask(self, question: tuple[Any, ...], answer: asyncio.Future[Addresses]) -> None:
        found: Addresses | Exception
        try:
            found = socket.getaddrinfo(*question)
        except (OSError, UnicodeError) as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no task waits
            self._loop.call_soon_threadsafe(self._take, question, answer, found)

    def _take(self, question: tuple[Any, ...], answer: asyncio.Future[Addresses], found: Addresses | Exception) -> None:
        del self._asked[question]
        if isinstance(found, Exception):
            answer.set_exception(found)
            answer.exception()  # every task that asked may have given up
        else:
            answer.set_result(found)
