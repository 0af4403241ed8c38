"""What a service does outside its own memory, as one interface: messages, streams, a bucket, clock and chance.

:mod:`diloco.nats.transport` is NATS; the tests' simulation is another. Every durable action of a service is one of
:meth:`Transport.append`, :meth:`Transport.purge`, :meth:`Bucket.create`, :meth:`Bucket.update`, :meth:`Bucket.put` and, on its
own disk, :func:`diloco.files.replace`. Threads and sleeping are the event loop's (``asyncio.to_thread``, ``asyncio.sleep``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diloco.core.bandwidth import Moved


@dataclass(frozen=True)
class Fence:
    """Append only if the last message on ``subject`` has this stream sequence (0: there is none)."""

    subject: str
    expected_sequence: int


@dataclass(frozen=True)
class Stored:
    """A message as the stream holds it."""

    subject: str
    sequence: int
    data: bytes


class Heard(Protocol):
    """A message that was not stored."""

    @property
    def subject(self) -> str: ...

    @property
    def data(self) -> bytes: ...

    async def respond(self, data: bytes) -> None:
        """Answer whoever asked."""


class Bucket(Protocol):
    """A small key-value bucket with compare-and-set. Calls are tried again while the server is silent, and give up then.

    All raise AppendUncertainError when there was no answer, and BrokerError when the server refuses.
    """

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """Value and revision, or None."""

    async def create(self, key: str, value: bytes) -> int:
        """Set a key that does not exist; its revision. FenceError if it exists."""

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Set a key that is at ``revision``; its new revision. FenceError if it is at another one."""

    async def put(self, key: str, value: bytes) -> int:
        """Set a key, whatever it was; its revision."""


class Transport(Protocol):
    """One service's way to the others. :mod:`diloco.nats` documents what each call raises."""

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
    def incoming(self) -> Moved:
        """What came in, as far as it could be seen how fast, where streams are read."""

    @property
    def founds(self) -> bool:
        """Whether this process may propose a run's fragment map and publish version 0."""

    def wall_s(self) -> float:
        """Unix time; it may jump, so nothing but a label follows from it."""

    def random_bytes(self, count: int) -> bytes:
        """Bytes that nobody else draws."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Tell whoever listens; nothing is stored, and it may be lost."""

    async def subscribe(self, subject: str, heard: Callable[[Heard], Awaitable[None]]) -> None:
        """Hear what is published on ``subject`` (wildcards allowed)."""

    async def serve(self, subject: str, heard: Callable[[Heard], Awaitable[None]]) -> None:
        """Hear what is asked with :meth:`request`, to answer it."""

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes | None:
        """The first answer to a message; None if there is none in time, or nobody serves it.

        Answers may be large: they pass the server that has the streams, so that they delay no sign of life, and in a run with
        regions only those of the same region hear each other.
        """

    async def ensure_stream(
        self, stream: str, subjects: list[str], *, max_msgs_per_subject: int = -1, max_bytes: int = -1, replicas: int = 1
    ) -> None:
        """Make a stream, or find that it exists as it should."""

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
        """Store ``parts`` and then ``data`` on ``subject``, all fenced; the stream sequence of ``data``."""

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The last message on a subject, or None."""

    async def get(self, stream: str, sequence: int) -> Stored | None:
        """The message with a stream sequence, or None if it is gone."""

    async def last_sequence(self, subject: str) -> int:
        """The stream sequence of the last message on a subject that this process writes to, 0 if there is none."""

    async def purge(self, stream: str, subject: str, below_sequence: int) -> None:
        """Drop a subject's messages (wildcards allowed) with a smaller sequence."""

    def pull(
        self, stream: str, subjects: Sequence[str], start_sequence: int, read: Stored | None = None
    ) -> AsyncIterator[Stored]:
        """Every message on ``subjects`` from ``start_sequence`` on, once, in order, for ever.

        ``read``: the last message that was read before, if any.

        Raises (while iterating):
            RewoundError: the stream lost what was read last.
        """

    async def bucket(self, name: str, *, create: bool, replicas: int = 1) -> Bucket:
        """The bucket, made if ``create``."""

    async def close(self) -> None:
        """Send what is buffered, and close."""
