"""A connection that finds out how a server treats an identity: answers, refusals and times. It leaves nothing there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from structlog.typing import EventDict

from diloco.errors import BrokerError
from diloco.nats.connection import subscribe
from diloco.nats.identity import Identity
from diloco.nats.opening import Opening
from diloco.nats.server_list import ServerList, ask_list
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco.process.tasks import end
from diloco.wire.plain import json_object

ANSWER_S = 3.0  # many round trips over the slowest link that a run bears
PING_S = 5.0  # likewise, behind other traffic
LOOK_S = 0.05  # a refusal is noticed after so long
_AWAY = (nats.errors.Error, TimeoutError)


class NotAllowedError(BrokerError):
    """The server forbids it to this identity."""


class ForbiddenReasons:
    """The reasons that a connection logs: nothing else tells that the server forbids something."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self.logger: Logger = structlog.wrap_logger(
            None, processors=[self._keep], wrapper_class=structlog.make_filtering_bound_logger(0)
        )

    def _keep(self, logger: Any, method: str, values: EventDict) -> EventDict:
        self._reasons.append(str(values.get("reason", values["event"])).lower())
        raise structlog.DropEvent

    def name(self, subject: str) -> bool:
        """Whether one of the reasons names a subject."""
        return any(f'"{subject.lower()}"' in reason for reason in self._reasons)


class Probe:
    """One connection to a server. Made by :meth:`open`. Its calls raise BrokerError where the server does not answer."""

    def __init__(self, client: Client, refusals: ForbiddenReasons, name: str, identity: Identity | None) -> None:
        self._client, self._refusals = client, refusals
        self.transport = NatsTransport(client, client, name, identity)

    @classmethod
    async def open(cls, urls: list[str], name: str, identity: Identity | None, give_up_after_s: float) -> Probe:
        """Connect.

        Raises:
            BrokerError: no answer in time, or the server turns us away.
        """
        refusals = ForbiddenReasons()
        client = await Opening(urls, name, refusals.logger, identity).open(give_up_after_s)
        return cls(client, refusals, name, identity)

    def forbids(self, subject: str) -> bool:
        """Whether the server has said that something on a subject is not allowed."""
        return self._refusals.name(subject)

    @property
    def lacks_limit(self) -> bool:
        """Whether the server's list of identities has no limit of this identity's messages, and should have one."""
        return bool(self._client.lacks_limit)

    def new_subject(self) -> str:
        """Return a subject that only this identity may listen to."""
        return str(self._client.new_inbox())

    async def round_trip_s(self) -> float:
        """Return the time of one ping."""
        try:
            return float(await self._client.rtt(PING_S))
        except _AWAY:
            raise BrokerError(f"no answer to a ping within {PING_S:g} s") from None

    async def server_list(self) -> ServerList | None:
        """Return the list of identities that the server goes by; None where it has no number. For a probe with an identity."""
        return await ask_list(self._client, self.transport.name)

    async def publish(self, subject: str, data: bytes) -> None:
        """Send a message."""
        try:
            await self._client.publish(subject, data)
        except _AWAY as error:
            raise BrokerError(f"{subject}: cannot be sent: {error!r}") from None

    @asynccontextmanager
    async def listening(self, subjects: Iterable[str], heard: Callable[[Any], Awaitable[None]]) -> AsyncIterator[None]:
        """Hear messages on subjects; the server knows of it, or has refused it, when this begins."""
        try:
            subscriptions = [await subscribe(self._client, subject, heard) for subject in subjects]
        except _AWAY as error:
            raise BrokerError(f"nothing can be heard: {error!r}") from None
        try:
            yield
        finally:
            for subscription in subscriptions:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()

    async def ask(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> bytes:
        """Return JetStream's answer to a request. A refusal comes as a complaint of the server, not as an answer.

        Raises:
            NotAllowedError: this identity may not ask.
            BrokerError: no answer.
        """
        asked = asyncio.ensure_future(self._client.request(subject, data, timeout=ANSWER_S, headers=headers))
        try:
            while not asked.done() and not self.forbids(subject):
                await asyncio.wait({asked}, timeout=LOOK_S)
            if not asked.done():
                raise NotAllowedError(f"{subject}: not allowed")
            return bytes(asked.result().data)
        except nats.errors.NoRespondersError:
            raise BrokerError("JetStream is not enabled for this account") from None
        except _AWAY as error:
            raise BrokerError(f"JetStream does not answer: {str(error) or type(error).__name__}") from None
        finally:
            await end(asked)

    async def api(self, subject: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return an answer of JetStream; with ``error`` in it where JetStream refuses.

        Raises:
            NotAllowedError: this identity may not ask.
            BrokerError: there is no answer, or it is no JSON object.
        """
        return answered(await self.ask(f"$JS.API.{subject}", b"" if request is None else json.dumps(request).encode()), subject)


def answered(data: bytes, subject: str) -> dict[str, Any]:
    """Return JetStream's answer.

    Raises:
        BrokerError: it is no JSON object.
    """
    answer = json_object(data)
    if answer is None:
        raise BrokerError(f"{subject}: the answer is not a JSON object")
    return answer
