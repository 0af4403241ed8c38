"""The port of a service: all that it does outside its own memory. Messages, streams, a bucket, clock and chance.

:mod:`diloco.nats.transport` is NATS; the tests' simulation is another. Every durable action of a service is one of
:meth:`Transport.append`, :meth:`Transport.purge`, :meth:`Bucket.create`, :meth:`Bucket.update`, :meth:`Bucket.put` and, on its
own disk, :func:`diloco.process.files.replace`. Threads and sleeping are the event loop's
(``asyncio.to_thread``, ``asyncio.sleep``).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from diloco.core.syncer.bandwidth import Moved
from diloco.wire.grants import SignedGrant


@dataclass(frozen=True)
class Fence:
    """Append only if the last message on ``subject`` has this stream sequence (0: there is none)."""

    subject: str
    expected_sequence: int


@dataclass(frozen=True)
class Stored:
    """A message in a stream."""

    subject: str
    sequence: int
    data: bytes
    stored_at_s: float = field(default=math.inf, kw_only=True, compare=False)  # Unix time of its server; inf: not known


@dataclass(frozen=True)
class Room:
    """Bytes that a stream, or all streams of an account, holds, and may hold."""

    name: str
    size_bytes: int
    max_bytes: int


class Heard(Protocol):
    """A message that is not stored."""

    @property
    def subject(self) -> str: ...

    @property
    def data(self) -> bytes: ...

    async def respond(self, data: bytes) -> None:
        """Answer a request."""


class Subscribed(Protocol):
    """A subscription that can be ended."""

    async def end(self) -> None:
        """Hear nothing more of it; once is enough, and more does no harm."""


class Bucket(Protocol):
    """A small key-value bucket with compare-and-set. Calls are tried again while the server is silent, and give up then.

    All raise AppendUncertainError when there was no answer, and BrokerError when the server refuses.
    """

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """Return value and revision, or None."""

    async def after(self, keys: str, revision: int) -> tuple[str, bytes, int] | None:
        """Return key, value and revision of the first value set after ``revision`` under ``keys`` (wildcards allowed), or None.

        A value that was deleted is empty.
        """

    async def create(self, key: str, value: bytes) -> int:
        """Set a key that does not exist; return its revision. FenceError if it exists."""

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Set a key that is at ``revision``; return its new revision. FenceError if it is at another one."""

    async def put(self, key: str, value: bytes) -> int:
        """Set a key without a condition; return its revision."""


class Transport(Protocol):
    """One service's way to the others. :mod:`diloco.nats` documents the errors of each call."""

    @property
    def bytes_in(self) -> int:
        """Payload bytes received."""

    @property
    def bytes_out(self) -> int:
        """Payload bytes sent."""

    @property
    def connected(self) -> bool:
        """Whether messages can come and go right now, as far as is known."""

    @property
    def connections(self) -> int:
        """How often the connection to the server that has the streams was made: that server may be another one each time."""

    @property
    def incoming(self) -> Moved:
        """Bytes of streams that came in at a measurable rate, and the time that they took."""

    @property
    def founds(self) -> bool:
        """Whether this process may propose a run's fragment map and publish version 0."""

    @property
    def filters_many(self) -> bool:
        """Whether this process may read several subjects of a stream by one consumer."""

    @property
    def authority(self) -> str | None:
        """Public key of the authority that signs the run's grants; None: the run has no identities."""

    @property
    def grant(self) -> SignedGrant | None:
        """The grant of this process, a learner."""

    def wall_s(self) -> float:
        """Return Unix time; it may jump, so use it for labels alone."""

    def random_bytes(self, count: int) -> bytes:
        """Draw bytes that no other process draws."""

    async def publish(self, subject: str, data: bytes, *, optional: bool = False) -> None:
        """Send a message to all subscribers; it is not stored, and may be lost.

        ``optional``: an identity may lack the right, as one that was made before there was the subject. A denial is no error
        then, and later messages there are not sent.
        """

    async def subscribe(self, subject: str, heard: Callable[[Heard], Awaitable[None]], *, optional: bool = False) -> Subscribed:
        """Hear messages on ``subject`` (wildcards allowed), until the subscription is ended.

        ``optional``: an identity may lack the right, and hears nothing then; a denial is no error.
        """

    async def serve(self, subject: str, heard: Callable[[Heard], Awaitable[None]]) -> None:
        """Hear requests of :meth:`request`, to answer them."""

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes | None:
        """Return the first answer to a message, or None if there is none in time, or no process serves it.

        Answers may be large: they pass the server that has the streams, so that they delay no heartbeat. In a run with regions
        only members of the same region hear each other.
        """

    async def ensure_stream(
        self, stream: str, subjects: list[str], *, max_msgs_per_subject: int = -1, max_bytes: int = -1, replicas: int = 1
    ) -> int | None:
        """Make a stream, or find that it exists as it should; return the bytes it may hold if fewer than asked for."""

    async def made_at(self, stream: str) -> str | None:
        """Return when a stream was made, as its server says it: no other stream of the name has the same. None: it is missing.

        AppendUncertainError: the server is silent.
        """

    async def rooms(self, names: Sequence[str]) -> list[Room]:
        """Return how full those of these streams are that have a bound, and the account of this process if it has one.

        Streams that do not exist are left out. AppendUncertainError: the server is silent.
        """

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
        """Store ``parts`` and then ``data`` on ``subject``, all fenced; return the stream sequence of ``data``."""

    async def last(self, stream: str, subject: str) -> Stored | None:
        """Return the last message on a subject, or None."""

    async def get(self, stream: str, sequence: int) -> Stored | None:
        """Return the message with a stream sequence, or None if it is gone."""

    async def first(self, stream: str, subject: str, start_sequence: int) -> Stored | None:
        """Return the first message on a subject from a stream sequence on, or None."""

    async def last_sequence(self, subject: str) -> int:
        """Return the stream sequence of the last message on a subject that this process writes to, 0 if there is none."""

    async def purge(self, stream: str, subject: str, below_sequence: int) -> None:
        """Drop a subject's messages (wildcards allowed) with a smaller sequence."""

    def pull(
        self,
        stream: str,
        subjects: Sequence[str],
        start_sequence: int,
        read: Stored | None = None,
        *,
        headers_only: bool = False,
    ) -> AsyncIterator[Stored]:
        """Yield every message on ``subjects`` from ``start_sequence`` on, once, in order, for ever.

        ``read``: the last message that was read before, if any. ``headers_only``: messages come without their data.

        Raises (while iterating):
            RewoundError: the stream lost the last message read.
        """

    async def bucket(self, name: str, *, create: bool, replicas: int = 1) -> Bucket:
        """Open the bucket, and make it if ``create``."""

    async def close(self) -> None:
        """Send what is buffered, and close."""


Connect: TypeAlias = Callable[[], Awaitable[Transport]]  # opens a connection to a server, however long that takes
