"""Disturb a server on purpose: change a stream's limit, cut connections."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from diloco.errors import BrokerError
from diloco.nats.connection import NatsLink
from diloco.wire.plain import json_object

# raised by a connection's calls while its server is away
SERVER_AWAY = (BrokerError, nats.errors.Error, TimeoutError)

ATTEMPTS_S = 30.0  # a server that was killed is back by then
RETRY_S = 0.5  # between two attempts
T = TypeVar("T")
ANSWER_S = 2.0  # a server on this machine answers in milliseconds
MAX_CONNECTIONS = 4096


async def limit_bytes(link: NatsLink, stream: str) -> int:
    """Return a stream's ``max_bytes``; -1 is no limit. Raises one of :data:`SERVER_AWAY`."""
    info = await link.bulk.jetstream(timeout=5).stream_info(stream)
    return int(info.config.max_bytes or -1)


async def set_limit(link: NatsLink, stream: str, limit: Callable[[int], int]) -> None:
    """Set a stream's ``max_bytes`` to ``limit`` of the bytes that it holds now.

    Raises:
        BrokerError: the server refuses, or does not answer for half a minute.
    """
    give_up_s = time.monotonic() + ATTEMPTS_S
    while True:
        try:
            api = link.bulk.jetstream(timeout=5)
            info = await api.stream_info(stream)
            info.config.max_bytes = limit(int(info.state.bytes))
            await api.update_stream(info.config)
            return
        except nats.js.errors.APIError as error:
            raise BrokerError(f"stream {stream}: its limit cannot be set: {error.description}") from None
        except (nats.errors.Error, TimeoutError):
            if time.monotonic() > give_up_s:
                raise BrokerError(f"stream {stream}: its limit cannot be set: no answer for {ATTEMPTS_S:g} s") from None
            await asyncio.sleep(RETRY_S)


class Admin:
    """A connection of the system account, which may cut others. Made by :func:`administrator`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def cut(self, names: Collection[str]) -> None:
        """Make the server close the connections with these names.

        Raises:
            BrokerError: the server does not answer, or its answer is not a list of connections.
        """

        def doomed(answer: Mapping[str, Any]) -> tuple[str, list[int]]:
            found = [each["cid"] for each in answer["data"]["connections"] if each.get("name") in names]
            return answer["server"]["id"], found

        server, connections = await self.of_connections(doomed)
        for connection in connections:
            await self._ask(f"$SYS.REQ.SERVER.{server}.KICK", {"cid": connection})

    async def of_connections(self, read: Callable[[Mapping[str, Any]], T]) -> T:
        """Return what ``read`` finds in the server's answer to CONNZ, its list of connections.

        Raises:
            BrokerError: the server does not answer, or its answer is not a list of connections.
        """
        answer = await self._ask("$SYS.REQ.SERVER.PING.CONNZ", {"limit": MAX_CONNECTIONS})
        try:
            return read(answer)
        except (LookupError, TypeError, AttributeError) as error:
            raise BrokerError(f"the server's list of connections cannot be read: {error!r}") from None

    async def _ask(self, subject: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = await self._client.request(subject, json.dumps(request).encode(), timeout=ANSWER_S)
        except (nats.errors.Error, TimeoutError) as error:
            raise BrokerError(f"{subject}: no answer: {error!r}") from None
        return json_object(bytes(reply.data)) or {}


@asynccontextmanager
async def administrator(url: str) -> AsyncIterator[Admin]:
    """Connect to a server's system account.

    Raises:
        BrokerError: the server is away.
    """
    try:
        client = await nats.connect(url, allow_reconnect=False, connect_timeout=2, error_cb=_ignore)
    except (OSError, nats.errors.Error, TimeoutError) as error:
        raise BrokerError(f"the server's system account does not answer: {error!r}") from None
    try:
        yield Admin(client)
    finally:
        await client.close()


async def _ignore(error: Exception) -> None:
    """Expect errors: the server may be killed meanwhile."""
