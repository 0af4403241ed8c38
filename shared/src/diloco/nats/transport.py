"""NATS as a :class:`diloco.transport.Transport`: a :class:`NatsLink` with the operations of this package's modules."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import nats.errors
from nats.aio.subscription import Subscription

from diloco.errors import AppendUncertainError
from diloco.nats import append, streams
from diloco.nats.connection import NatsLink, ask, subscribe, wait_connected
from diloco.nats.pull import Puller
from diloco.nats.registry import Registry
from diloco.process.tasks import give_up
from diloco.transport import Fence, Heard, Room, Stored
from diloco.wire.grants import SignedGrant

T = TypeVar("T")


class NatsSubscribed:
    """A subscription of the control connection."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def end(self) -> None:
        with contextlib.suppress(nats.errors.Error):  # it has ended, or the connection has: there is nothing to hear
            await self._subscription.unsubscribe()


class NatsTransport(NatsLink):
    """Heartbeats and the bucket go over the control connection, all else over the bulk connection."""

    alive_file: Path | None = None  # touched whenever something is published with both connections there
    published_s: float | None = None  # time of the last such publication, by the loop's clock
    clock_file: Path | None = None  # holds an error of the wall clock, in seconds (``diloco chaos``)

    @property
    def founds(self) -> bool:
        return self.identity is None or self.identity.founder

    @property
    def filters_many(self) -> bool:
        return self.identity is None or self.identity.role == "syncer"

    @property
    def authority(self) -> str | None:
        return None if self.identity is None else self.identity.authority

    @property
    def grant(self) -> SignedGrant | None:
        return None if self.identity is None else self.identity.grant

    @property
    def connected(self) -> bool:
        return bool(self.control.is_connected and self.bulk.is_connected)

    @property
    def connections(self) -> int:
        return int(self.bulk.stats["reconnects"])

    def wall_s(self) -> float:
        return time.time() + self._clock_offset_s()

    def _clock_offset_s(self) -> float:
        if self.clock_file is None:
            return 0.0
        try:
            return float(self.clock_file.read_text())
        except (OSError, ValueError):  # no offset: the usual case
            return 0.0

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    async def publish(self, subject: str, data: bytes, *, optional: bool = False) -> None:
        if optional and not self.control.may_try(subject):
            return
        await self.control.publish(subject, data)
        if not self.connected:
            return
        self.published_s = asyncio.get_running_loop().time()
        if self.alive_file is not None:
            with contextlib.suppress(OSError):  # no reason to be dead
                self.alive_file.touch()

    async def subscribe(
        self, subject: str, heard: Callable[[Heard], Awaitable[None]], *, optional: bool = False
    ) -> NatsSubscribed:
        if optional:
            self.control.may_try(subject)
        return NatsSubscribed(await subscribe(self.control, subject, heard))

    async def serve(self, subject: str, heard: Callable[[Heard], Awaitable[None]]) -> None:
        await subscribe(self.bulk, subject, heard)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes | None:
        return await ask(self.bulk, self.name, subject, data, timeout_s)

    async def ensure_stream(
        self, stream: str, subjects: list[str], *, max_msgs_per_subject: int = -1, max_bytes: int = -1, replicas: int = 1
    ) -> int | None:
        return await streams.ensure(
            self, stream, subjects, max_msgs_per_subject=max_msgs_per_subject, max_bytes=max_bytes, replicas=replicas
        )

    async def made_at(self, stream: str) -> str | None:
        return await self._asked(partial(streams.made_at, self, stream), stream)

    async def rooms(self, names: Sequence[str]) -> list[Room]:
        return await streams.rooms(self, names)

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        parts: Sequence[bytes | memoryview] = (),
        part_subject: Callable[[int], str] | None = None,
        message_id: str,
        fence: Fence | None,
        timeout_s: float,
    ) -> int:
        storing = append.append(
            self,
            subject,
            data,
            parts=parts,
            part_subject=part_subject,
            message_id=message_id,
            fence=fence,
            timeout_s=timeout_s,
        )
        return await self._answered(storing, subject)

    async def _answered(self, asking: Coroutine[Any, Any, T], what: str) -> T:
        """Await a request over the bulk connection, until that connection is lost."""
        asked = asyncio.ensure_future(asking)
        self.bulk.asked.add(asked)
        try:
            await asyncio.wait({asked})
            if asked.cancelled():
                # its answer died with the connection: a caller that tries again need not wait for the timeout
                raise AppendUncertainError(f"{what}: the connection was lost before the answer came")
            return asked.result()
        finally:
            self.bulk.asked.discard(asked)
            await give_up(asked)

    async def _asked(self, asking: Callable[[], Coroutine[Any, Any, T]], what: str) -> T:
        """Await a request as :meth:`_answered`, once there is a connection.

        Without one the client keeps the request, and sends it with all repetitions when there is one again. Then answers
        that no process reads may fill a thin link for a minute.
        """
        await wait_connected(self.bulk, streams.TIMEOUT_S, what)
        return await self._answered(asking(), what)

    async def last(self, stream: str, subject: str) -> Stored | None:
        return await self._asked(partial(streams.last, self, stream, subject), stream)

    async def get(self, stream: str, sequence: int) -> Stored | None:
        return await self._asked(partial(streams.get, self, stream, sequence), stream)

    async def first(self, stream: str, subject: str, start_sequence: int) -> Stored | None:
        return await self._asked(partial(streams.first, self, stream, subject, start_sequence), stream)

    async def last_sequence(self, subject: str) -> int:
        return await self._asked(partial(streams.last_sequence, self, subject), subject)

    async def purge(self, stream: str, subject: str, below_sequence: int) -> None:
        await self._asked(partial(streams.purge, self, stream, subject, below_sequence), stream)

    def pull(
        self,
        stream: str,
        subjects: Sequence[str],
        start_sequence: int,
        read: Stored | None = None,
        *,
        headers_only: bool = False,
    ) -> AsyncIterator[Stored]:
        return aiter(Puller(self, stream, subjects, start_sequence, read=read, headers_only=headers_only))

    async def bucket(self, name: str, *, create: bool, replicas: int = 1) -> Registry:
        return await Registry.open(self, name, create=create, replicas=replicas)
