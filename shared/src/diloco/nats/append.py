"""Appending to a stream: one message, or a body's parts and then its head as one fenced batch.

A batch is ADR-50's fast ingest: parts are published without waiting for each, the server acknowledges every few of them, a
gap or a failed fence ends it, and the head is its last message. The fence stands on every message: with it on the head
alone, a process that lost its ownership would still store parts. A stream with replicas lets no two messages with a fence on
one subject be on their way (error 10164), so there it does stand on the head alone; such parts are never read.

On nats-server 2.15.1 a retry of a stored single message with the same id is answered as a duplicate, unless its fence has
moved meanwhile, which is reported first: an unsure caller reads the head back and compares. The answer to a batch that was
stored before carries no sequence. It is looked up; without a fence, by a caller who may not read the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import nats.errors
from nats.aio.client import Client

from diloco.errors import AppendUncertainError, BrokerError, FenceError, StorageFullError
from diloco.nats import streams
from diloco.nats.connection import NatsLink, wait_connected
from diloco.transport import Fence
from diloco.wire.plain import json_object

ID_HEADER = "Nats-Msg-Id"
HEADER_BYTES = 1 << 10  # the server counts headers as payload
FENCE_RETRY_S = 0.02  # a little longer than a replicated stream needs to store the message on its way
# parts between two of the server's acknowledgements; over thin links fewer, so that something comes back before long
FLOW_MESSAGES, FAR_FLOW_MESSAGES = 16, 2
FLOWS_AHEAD = 2  # so at most 16 MiB of parts of 512 KiB are in flight, 2 MiB between regions

# error codes of the JetStream API
_WRONG_LAST_SEQUENCE = (10071, 10164)
_FENCE_ON_ITS_WAY = 10164
_STORAGE_FULL = (10077, 10047, 10023, 10119)
_ON_ITS_WAY = 10158  # a message of this id: a replicated stream has taken it up, and not yet stored it
_BATCH_UNKNOWN = 10208  # the server was restarted, or has given up a batch of which nothing came for 10 s
_FIRST, _MIDDLE, _LAST = 0, 1, 2


async def append(
    link: NatsLink,
    subject: str,
    data: bytes,
    *,
    parts: Sequence[bytes | memoryview] = (),
    part_subject: Callable[[int], str] | None = None,
    message_id: str,
    fence: Fence | None,
    timeout_s: float,
) -> int:
    """Store ``parts`` and then ``data`` on ``subject``; return the stream sequence of ``data``.

    Args:
        part_subject: subject of a part by its index; needed with ``parts``.
        message_id: of this append, the same when it is tried again: the server stores it once.
        timeout_s: longest silence of the server.

    Returns 0 if an earlier attempt had stored the batch and its head is no longer the last message on ``subject``; without a
    fence, it returns the sequence of the last message there.

    Raises:
        FenceError: another process appended; nothing was stored.
        StorageFullError: nothing was stored (of a batch, perhaps some parts).
        AppendUncertainError: no answer; it may or may not be stored.
        BrokerError: the server refuses, or the connection was closed for good.
    """
    await wait_connected(link.bulk, timeout_s, subject)
    largest_bytes = max(len(data), *map(len, parts)) if parts else len(data)
    if largest_bytes + HEADER_BYTES > link.bulk.max_payload:
        raise _too_large(subject, largest_bytes, link.bulk)
    clock = asyncio.get_running_loop().time
    began_s = clock()
    while True:
        try:
            if not parts:
                return await append_one(link.bulk, subject, data, message_id=message_id, fence=fence, timeout_s=timeout_s)
            assert part_subject is not None
            return await _append_batch(
                link, subject, data, parts, part_subject, message_id=message_id, fence=fence, timeout_s=timeout_s
            )
        except _FenceOnItsWayError:
            if link.fences_heads_only and clock() - began_s >= timeout_s:
                raise
            link.fences_heads_only = True
            await asyncio.sleep(FENCE_RETRY_S)


async def _append_batch(
    link: NatsLink,
    subject: str,
    data: bytes,
    parts: Sequence[bytes | memoryview],
    part_subject: Callable[[int], str],
    *,
    message_id: str,
    fence: Fence | None,
    timeout_s: float,
) -> int:
    batch = _Batch(link.bulk, subject, timeout_s, FAR_FLOW_MESSAGES if link.far else FLOW_MESSAGES)
    part_fence = None if link.fences_heads_only else fence
    try:
        await batch.start()
        for index, part in enumerate(parts):
            await batch.add(part_subject(index), part, _headers(f"{message_id}/{index}", part_fence))
        sequence = await batch.add(subject, data, _headers(message_id, fence), last=True)
    except (nats.errors.Error, TimeoutError) as error:
        raise _silence(subject, error, timeout_s) from None
    finally:
        await batch.stop()
    if sequence:
        return sequence
    if fence is None:  # no other process writes there
        return await streams.last_sequence(link, subject)
    stored = await streams.last(link, batch.stream, subject)
    return stored.sequence if stored is not None and stored.data == data else 0


class _FenceOnItsWayError(FenceError):
    """Another message with a fence on the same subject has not been stored yet."""


def _headers(message_id: str, fence: Fence | None) -> dict[str, str]:
    headers = {ID_HEADER: message_id}
    if fence is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(fence.expected_sequence)
        headers["Nats-Expected-Last-Subject-Sequence-Subject"] = fence.subject
    return headers


async def append_one(
    client: Client, subject: str, data: bytes, *, message_id: str, fence: Fence | None, timeout_s: float
) -> int:
    """Store one message; return its stream sequence and raise as :func:`append`."""
    if len(data) + HEADER_BYTES > client.max_payload:  # the server would close the connection for good
        raise _too_large(subject, len(data), client)
    try:
        reply = await client.request(subject, data, timeout=timeout_s, headers=_headers(message_id, fence))
    except (nats.errors.Error, TimeoutError) as error:
        raise _silence(subject, error, timeout_s) from None
    answer = _parse(subject, reply.data)
    if "error" in answer:
        raise _translate(subject, answer["error"])
    return int(answer["seq"])


class _Batch:
    """One fast-ingest batch."""

    def __init__(self, client: Client, head: str, timeout_s: float, flow: int) -> None:
        self.client, self.head, self.timeout_s, self.flow = client, head, timeout_s, flow
        self.sent = self.acknowledged = 0
        self.started = False
        self.prefix, self.identifier = client.new_inbox(), uuid.uuid4().hex
        self.news = asyncio.Event()
        self.error: BrokerError | None = None
        self.result: Mapping[str, Any] | None = None
        self.subscription: Any = None
        self.stream = ""

    async def start(self) -> None:
        self.subscription = await self.client.subscribe(f"{self.prefix}.{self.identifier}.>", cb=self._hear)

    async def stop(self) -> None:
        if self.subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self.subscription.unsubscribe()

    async def _hear(self, message: Any) -> None:
        if self.error is not None:
            return  # the first error is the cause; later parts only learn that their batch is unknown
        try:
            self._take(message)
        except BrokerError as error:
            self.error = error
        self.news.set()

    def _take(self, message: Any) -> None:
        if message.headers and message.headers.get("Status") == "503":
            raise AppendUncertainError(f"{self.head}: no stream stores this subject, or its stream has no leader")
        answer = _parse(self.head, message.data)
        kind = answer.get("type")
        if kind == "ack":
            self.started = True
            self.acknowledged, self.flow = max(self.acknowledged, int(answer["seq"])), int(answer["msgs"])
        elif "error" in answer:
            raise _translate(self.head, answer["error"])
        elif kind in ("gap", "err"):
            raise AppendUncertainError(f"{self.head}: the server ended the batch early: {answer}")
        else:
            self.result = answer

    async def add(self, subject: str, data: bytes | memoryview, headers: dict[str, str], *, last: bool = False) -> int:
        """Publish the next message; return its stream sequence if it is the last one, else 0."""
        self.sent += 1
        operation = _LAST if last else _FIRST if self.sent == 1 else _MIDDLE
        reply = f"{self.prefix}.{self.identifier}.{self.flow}.fail.{self.sent}.{operation}.$FI"
        await self.client.publish(subject, data, headers=headers, reply=reply)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # nats-py swallows it when it comes while a full buffer is flushed
        while self.error is None and self.result is None:
            behind = self.acknowledged + self.flow * FLOWS_AHEAD <= self.sent
            if not last and not behind and (self.started or self.sent > 1):
                return 0
            self.news.clear()
            async with asyncio.timeout(self.timeout_s):  # nothing else reports a dead server
                await self.news.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        if not last or int(self.result.get("count", 0)) != self.sent:
            raise AppendUncertainError(
                f"{self.head}: the server closed the batch with {self.result}, but {self.sent} messages were sent"
            )
        self.stream = str(self.result["stream"])
        return int(self.result["seq"])


def _too_large(subject: str, size_bytes: int, client: Client) -> BrokerError:
    return BrokerError(
        f"{subject}: {size_bytes} bytes in one message; the server's max_payload is {client.max_payload} for this process"
    )


def _silence(subject: str, error: Exception, timeout_s: float) -> AppendUncertainError:
    if isinstance(error, TimeoutError):
        # a server whose disk is full says so in its log only, and stores nothing more until it is restarted
        return AppendUncertainError(
            f"{subject}: no answer within {timeout_s:g} s; if the server runs, its log says why; if its disk is full, "
            "free space and restart it"
        )
    return AppendUncertainError(f"{subject}: no answer: {str(error) or type(error).__name__}")


def _parse(subject: str, data: bytes) -> dict[str, Any]:
    answer = json_object(data)
    if answer is None or not _makes_sense(answer):
        raise AppendUncertainError(f"{subject}: the server answered {data[:80]!r}, expected a publish acknowledgement")
    return answer


def _makes_sense(answer: Mapping[str, Any]) -> bool:
    error = answer.get("error", {})
    if not isinstance(error, dict):
        return False
    numbers = [answer.get(name, 0) for name in ("seq", "msgs", "count")] + [error.get(name, 0) for name in ("code", "err_code")]
    return all(isinstance(number, int) for number in numbers)


def _translate(subject: str, error: Mapping[str, Any]) -> BrokerError:
    code, text = int(error.get("err_code", 0)), str(error.get("description", error))
    if code in _WRONG_LAST_SEQUENCE:
        kind = _FenceOnItsWayError if code == _FENCE_ON_ITS_WAY else FenceError
        return kind(f"{subject}: another process appended first: {text}")
    if code in _STORAGE_FULL:
        return StorageFullError(f"{subject}: storage is full: {text}; free space, or raise the stream's or server's limit")
    if int(error.get("code", 0)) == 503 or code in (_ON_ITS_WAY, _BATCH_UNKNOWN):
        return AppendUncertainError(f"{subject}: {text}")
    return BrokerError(f"{subject}: the server refuses: {text} (code {code})")
