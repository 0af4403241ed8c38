"""Which list of identities a server goes by: its ``auth.conf``, of which ``diloco keys`` counts the changes.

The server itself answers, and to every identity, by a mapping in the identity's own account (``diloco_ops.keys.accounts``): a
message that the identity sends itself arrives on another subject, which ends in the server's name, the list's number and its
digest. A reload changes the answer on connections that are open. A list of a version before these numbers maps nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from dataclasses import dataclass

import nats.errors
from nats.aio.msg import Msg

from diloco.errors import BrokerError
from diloco.nats.client import Client
from diloco.process.observe import Logger
from diloco.wire.subjects import list_request

ANSWER_S = 3.0  # many round trips over the slowest link that a run bears
ASK_S = 15.0  # a new list is seen after so long
DIGEST_LETTERS = 8
_ANSWER = re.compile(rf"([a-z0-9][a-z0-9_-]{{0,63}})\.([1-9][0-9]{{0,17}})\.([0-9a-f]{{{DIGEST_LETTERS}}})")


@dataclass(frozen=True)
class ServerList:
    """The list that a server goes by."""

    server: str  # its name in the folder of ``diloco keys``
    number: int
    digest: str  # of its content: tells apart lists of two folders that count alike

    def __str__(self) -> str:
        return f"list {self.number} of server {self.server}"


async def ask_list(client: Client, name: str) -> ServerList | None:
    """Ask the server of a connection for its list, as the identity ``name``.

    Returns:
        None where the list has no number: a version before wrote it.

    Raises:
        BrokerError: no answer came in time.
    """
    request = list_request(name, uuid.uuid4().hex)
    came: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def heard(message: Msg) -> None:
        if not came.done():
            came.set_result(message.subject)

    subscriptions = []
    try:
        subscriptions.append(await client.subscribe(request, cb=heard))
        subscriptions.append(await client.subscribe(f"{request}.>", cb=heard))
        await client.publish(request, b"")
        subject = await asyncio.wait_for(came, ANSWER_S)
    except (nats.errors.Error, TimeoutError) as error:
        raise BrokerError(f"the server does not answer for its list: {str(error) or type(error).__name__}") from None
    finally:
        for subscription in subscriptions:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
    return _answered(subject.removeprefix(request).removeprefix("."))


def _answered(text: str) -> ServerList | None:
    """Return the list that an answer states.

    Raises:
        BrokerError: it is no answer of a list.
    """
    if not text:
        return None
    found = _ANSWER.fullmatch(text)
    if found is None:
        raise BrokerError(f"the server answers {text[:80]!r} when asked for its list: that text is not from diloco keys")
    return ServerList(found[1], int(found[2]), found[3])


class ListWatch:
    """The list of one connection's server, asked for every ``ASK_S``."""

    def __init__(self, client: Client, name: str, connection: str, log: Logger) -> None:
        """``name``: of the identity; ``connection``: what it is for, as events say it."""
        self.known = False  # the server that is connected now has answered
        self._client, self._name, self._connection, self._log = client, name, connection, log
        self._list: ServerList | None = None

    @property
    def number(self) -> int | None:
        """The number of the list; 0 where it has none, and None while no server has answered."""
        if not self.known or not self._client.is_connected:
            return None
        return 0 if self._list is None else self._list.number

    @property
    def server(self) -> str:
        """The server's name in the folder of ``diloco keys``; empty where its list has no number."""
        return "" if self._list is None else self._list.server

    async def watch(self) -> None:
        """Ask again and again, for ever, and log each change."""
        while True:
            try:
                self._note(await ask_list(self._client, self._name))
            except BrokerError:
                self.known = False
            await asyncio.sleep(ASK_S)

    def _note(self, found: ServerList | None) -> None:
        before, self._list = self._list, found
        known, self.known = self.known, True
        if not known or before == found:
            return
        number, last = (0 if one is None else one.number for one in (found, before))
        same = found is None or before is None or found.server == before.server
        tell = self._log.warning if number < last and same else self._log.info
        tell("server_list_changed", connection=self._connection, server=self.server, number=number, before=last)
