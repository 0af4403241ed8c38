"""Appending to a stream: one message, or a body's parts and then its head as one fenced batch.

A batch is ADR-50's fast ingest: parts are published without waiting for each, the server acknowledges every few of them, a
gap or a failed fence ends it, and the head is its last message. The fence stands on every message: with it on the head
alone, a process that lost its ownership would still store parts.

On nats-server 2.15.1 a retry of a stored single message with the same id is answered as a duplicate, unless its fence has
moved meanwhile, which is reported first: a caller who is not sure reads the head back and compares. The answer to a batch
that was stored before carries no sequence; it is looked up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.client import Client

from diloco.errors import AppendUncertainError, BrokerError, FenceError, StorageFullError
from diloco.nats import streams
from diloco.nats.connection import Link, check_open

FLOW_MESSAGES = 16  # parts between two of the server's acknowledgements
HEADER_BYTES = 1 << 10  # the server counts headers as payload
FLOWS_AHEAD = 2  # so at most 16 MiB of parts of 512 KiB are in flight

# error codes of the JetStream API
_WRONG_LAST_SEQUENCE = (10071, 10164)
_STORAGE_FULL = (10077, 10047, 10023, 10119)
_FIRST, _MIDDLE, _LAST = 0, 1, 2


@dataclass(frozen=True)
class Fence:
    """Append only if the last message on ``subject`` has this stream sequence (0: there is none)."""

    subject: str
    expected_sequence: int

    def headers(self) -> dict[str, str]:
        """What a fenced message carries."""
        return {
            "Nats-Expected-Last-Subject-Sequence": str(self.expected_sequence),
            "Nats-Expected-Last-Subject-Sequence-Subject": self.subject,
        }


async def append(
    link: Link,
    subject: str,
    data: bytes,
    *,
    parts: Sequence[bytes | memoryview] = (),
    part_subject: Callable[[int], str] | None = None,
    message_id: str,
    fence: Fence | None,
    timeout_s: float,
) -> int:
    """Store ``parts`` and then ``data`` on ``subject``; returns the stream sequence of ``data``.

    Args:
        part_subject: subject of a part by its index; needed with ``parts``.
        message_id: of this append, the same when it is tried again: the server stores it once.
        timeout_s: how long the server may be silent.

    Returns 0 if an earlier attempt had stored a batch and its head is no longer the last message on ``subject``.

    Raises:
        FenceError: somebody else appended; nothing was stored.
        StorageFullError: nothing was stored (of a batch, perhaps some parts).
        AppendUncertainError: no answer; it may or may not be stored.
        BrokerError: the server refuses, or the connection was closed for good.
    """
    check_open(link.bulk)
    largest_bytes = max(len(data), *map(len, parts)) if parts else len(data)
    if largest_bytes + HEADER_BYTES > link.bulk.max_payload:
        raise BrokerError(
            f"{subject}: {largest_bytes} bytes in one message; the server's max_payload is {link.bulk.max_payload}"
        )
    if not parts:
        return await _append_one(link.bulk, subject, data, message_id, fence, timeout_s)
    assert part_subject is not None
    batch = _Batch(link.bulk, timeout_s)
    try:
        await batch.start()
        for index, part in enumerate(parts):
            await batch.add(part_subject(index), part, _headers(f"{message_id}/{index}", fence))
        sequence = await batch.add(subject, data, _headers(message_id, fence), last=True)
    except (nats.errors.Error, TimeoutError) as error:
        raise AppendUncertainError(f"{subject}: no answer to a batch: {error!r}") from None
    finally:
        await batch.stop()
    if sequence:
        return sequence
    stored = await streams.last(link, batch.stream, subject)
    return stored.sequence if stored is not None and stored.data == data else 0


def _headers(message_id: str, fence: Fence | None) -> dict[str, str]:
    return {"Nats-Msg-Id": message_id} | (fence.headers() if fence else {})


async def _append_one(client: Client, subject: str, data: bytes, message_id: str, fence: Fence | None, timeout_s: float) -> int:
    try:
        reply = await client.request(subject, data, timeout=timeout_s, headers=_headers(message_id, fence))
    except (nats.errors.Error, TimeoutError) as error:
        raise AppendUncertainError(f"{subject}: no answer: {error!r}") from None
    answer = _parse(reply.data)
    if "error" in answer:
        raise _translate(subject, answer["error"])
    return int(answer["seq"])


class _Batch:
    """One fast-ingest batch."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.client, self.timeout_s = client, timeout_s
        self.sent = self.acknowledged = 0
        self.flow = FLOW_MESSAGES
        self.started = False
        self.prefix, self.identifier = client.new_inbox(), uuid.uuid4().hex
        self.news = asyncio.Event()
        self.error: Exception | None = None
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
            return  # the first one is the cause; every later part is only told that its batch is unknown
        if message.headers and message.headers.get("Status") == "503":
            self.error = AppendUncertainError("the stream has no leader")
        else:
            answer = _parse(message.data)
            kind = answer.get("type")
            if kind == "ack":
                self.started = True
                self.acknowledged, self.flow = max(self.acknowledged, int(answer["seq"])), int(answer["msgs"])
            elif "error" in answer:
                self.error = _translate("batch", answer["error"])
            elif kind in ("gap", "err"):
                self.error = AppendUncertainError(f"the batch was broken off: {answer}")
            else:
                self.result = answer
        self.news.set()

    async def add(self, subject: str, data: bytes | memoryview, headers: dict[str, str], *, last: bool = False) -> int:
        """Publish the next message; the last one returns its stream sequence."""
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
            raise AppendUncertainError(f"{subject}: the server closed the batch after {self.result} of {self.sent}")
        self.stream = str(self.result["stream"])
        return int(self.result["seq"])


def _parse(data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise AppendUncertainError(f"the server answered {data[:80]!r}, not a publish acknowledgement")
    return answer


def _translate(subject: str, error: Mapping[str, Any]) -> Exception:
    code, text = int(error.get("err_code", 0)), str(error.get("description", error))
    if code in _WRONG_LAST_SEQUENCE:
        return FenceError(f"{subject}: somebody else appended first: {text}")
    if code in _STORAGE_FULL:
        return StorageFullError(f"{subject}: storage is full: {text}; free space, or raise the stream's or server's limit")
    if int(error.get("code", 0)) == 503:
        return AppendUncertainError(f"{subject}: {text}")
    return BrokerError(f"{subject}: the server refuses: {text} (code {code})")
