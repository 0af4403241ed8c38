"""The names of one process's consumers of a stream: a server lets it use these alone, and only so many (docs/security.md)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import nats.errors

from diloco.nats.client import Client
from diloco.process.tasks import give_up

REMOVED_S = 5.0  # for the answer that a consumer is removed; without one, the server drops it when it is idle
LAST_REMOVED_S = 1.0  # for the same when the connection is closed next


class ConsumerNames:
    """The names that no reader of this process has. The one that was given back first is taken first."""

    def __init__(self, client: Client, names: Iterable[str], stream: str) -> None:
        self._client, self._stream = client, stream
        self._free: asyncio.Queue[str] = asyncio.Queue()
        self._removing: set[asyncio.Task[None]] = set()
        self._closed = False
        for name in names:
            self._free.put_nowait(name)

    async def take(self) -> str:
        """Take a name, as soon as there is one."""
        return await self._free.get()

    def give_back(self, name: str) -> None:
        """Give a name back that was not used."""
        self._free.put_nowait(name)

    def remove(self, name: str) -> None:
        """Remove a consumer, and give its name back: not before the server has answered, which works on several requests.

        A reader may end after the connection, as late as with the event loop. The server drops an idle consumer.
        """
        if self._closed:
            self.give_back(name)
            return
        task = asyncio.get_running_loop().create_task(self._remove(name))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def close(self) -> None:
        """Wait for consumers that are being removed, no longer than ``LAST_REMOVED_S``; from now on none is removed."""
        self._closed = True
        if self._removing:
            await asyncio.wait(self._removing, timeout=LAST_REMOVED_S if self._client.is_connected else 0.0)
        await give_up(*self._removing)

    async def _remove(self, name: str) -> None:
        try:
            with contextlib.suppress(nats.errors.Error, OSError):  # a timeout is one of these
                await self._client.request(f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}", b"", timeout=REMOVED_S)
        finally:
            self.give_back(name)
