"""Reading a stream: a windowed pull loop that survives whatever happens to the server or to its consumer.

Two requests of half a window overlap, so that the next messages are on their way while these are looked at; what is not
asked for is not sent, so memory is bounded by the window however slow the reader is. The consumer is ephemeral: if it is
lost, another one goes on behind the last sequence that was seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import nats.errors
import nats.js.api
import nats.js.errors

from diloco.errors import AppendUncertainError, BrokerError, RewoundError
from diloco.nats import streams
from diloco.nats.connection import Link, check_open, wait_connected
from diloco.transport import Stored

WINDOW_BYTES = 16 << 20
FAR_WINDOW_BYTES = 4 << 20  # of which more would only wait in front of a thin link, and again after a cut
OVERHEAD_BYTES = 1 << 16  # the server counts subject and reply subject of a message too
EXPIRES_S = 5.0
HEARTBEAT_S = 0.5
SILENCE_S = 2.0  # so long without message or heartbeat: the consumer, or the server, is gone
FAR_SILENCE_S = 20.0  # over thin links, where a part of 512 KiB may share one with others
LOOK_S = 0.1  # how soon it is seen that the connection was remade
INACTIVE_S = 30.0
RETRY_S = 0.25
CONNECTION_S = 5.0
REQUESTS = 2


@dataclass(frozen=True)
class Message(Stored):
    """A stored message; ``pending`` is how many that the reader wants still stood behind it."""

    pending: int


class Puller:
    """``async for message in Puller(...)``: every message on ``subjects`` from ``start_sequence`` on, once, in order, for ever.

    Messages that were purged before they could be read are simply not there; a reader that cares looks at the sequence.
    ``read`` is what was read last through another one, which this one goes on behind.

    Raises (while iterating):
        BrokerError: the stream does not exist, the filters overlap, or the connection was closed for good.
        RewoundError: the stream lost what was read last, without having purged it; sequences may mean other messages now.
    """

    def __init__(
        self,
        link: Link,
        stream: str,
        subjects: Sequence[str],
        start_sequence: int,
        window_bytes: int | None = None,
        read: Stored | None = None,
    ) -> None:
        self.link, self.stream, self.subjects = link, stream, list(subjects)
        self.next_sequence = max(1, start_sequence)
        self._newest = read  # of those that were read
        # a request that cannot hold the next message would be answered at once, for ever
        window_bytes = window_bytes or (FAR_WINDOW_BYTES if link.far else WINDOW_BYTES)
        self.half_bytes = max(link.bulk.max_payload + OVERHEAD_BYTES, window_bytes // REQUESTS)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            consumer = await self._consumer()
            queue: asyncio.Queue[Any] = asyncio.Queue()
            inbox = self.link.bulk.new_inbox()
            # no limits here: what is not asked for does not come
            subscription = await self.link.bulk.subscribe(
                f"{inbox}.*", cb=queue.put, pending_msgs_limit=0, pending_bytes_limit=0
            )
            try:
                async for message in self._read(consumer, inbox, queue):
                    self.next_sequence, self._newest = message.sequence + 1, message
                    yield message
            finally:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()
            await asyncio.sleep(RETRY_S)

    async def _consumer(self) -> str:
        config = nats.js.api.ConsumerConfig(
            ack_policy=nats.js.api.AckPolicy.NONE,
            deliver_policy=nats.js.api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.next_sequence,
            filter_subjects=self.subjects,
            inactive_threshold=INACTIVE_S,
            mem_storage=True,
            num_replicas=1,
        )
        while True:
            config.opt_start_seq = self.next_sequence
            try:
                await wait_connected(self.link.bulk, CONNECTION_S, f"stream {self.stream}")
                await self._check_kept()
                info = await self.link.bulk.jetstream(timeout=5).add_consumer(self.stream, config)
                return str(info.name)
            except nats.js.errors.NotFoundError:
                raise BrokerError(f"stream {self.stream}: does not exist on the server") from None
            except nats.js.errors.BadRequestError as error:
                raise BrokerError(f"stream {self.stream}: cannot be read: {error.description}") from None
            except (nats.errors.Error, TimeoutError, AppendUncertainError):
                check_open(self.link.bulk)
                await asyncio.sleep(RETRY_S)

    async def _check_kept(self) -> None:
        """Find out whether the stream still is what was read: a server that lost its disk's last writes goes back."""
        newest = self._newest
        if newest is None:
            return
        stored = await streams.get(self.link, self.stream, newest.sequence)
        if stored is None:
            info = await self.link.bulk.jetstream(timeout=5).stream_info(self.stream)
            kept = info.state.last_seq >= newest.sequence  # purged, or replaced by a newer one
        else:
            kept = (stored.subject, stored.data) == (newest.subject, newest.data)
        if not kept:
            raise RewoundError(f"stream {self.stream}: it lost message {newest.sequence}, which had been stored")

    async def _request(self, consumer: str, inbox: str, number: int) -> None:
        request = {
            "batch": self.half_bytes,  # never reached: only bytes and time end a request, and both are told
            "max_bytes": self.half_bytes,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{consumer}"
        await self.link.bulk.publish(subject, json.dumps(request).encode(), reply=f"{inbox}.{number}")

    async def _read(self, consumer: str, inbox: str, queue: asyncio.Queue[Any]) -> AsyncIterator[Message]:
        """Messages until the consumer seems lost."""
        reconnects = self.link.bulk.stats["reconnects"]
        try:
            for number in range(REQUESTS):
                await self._request(consumer, inbox, number)
            while True:
                raw = await self._wait(queue, reconnects) if queue.empty() else queue.get_nowait()
                status = (raw.headers or {}).get("Status")
                if status is None:
                    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>.<consumer sequence>.<time>.<pending>
                    tokens = raw.reply.split(".")
                    sequence, pending = int(tokens[-4]), int(tokens[-1])
                    if sequence >= self.next_sequence:
                        yield Message(raw.subject, sequence, raw.data, pending)
                elif status in ("408", "409") and "Consumer" not in (raw.headers.get("Description") or ""):
                    # this request has had its bytes or its time: ask again
                    await self._request(consumer, inbox, int(raw.subject.rsplit(".", 1)[-1]))
                elif status != "100":
                    return
        except (nats.errors.Error, TimeoutError):
            return

    async def _wait(self, queue: asyncio.Queue[Any], reconnects: int) -> Any:
        """What comes next.

        Raises:
            TimeoutError: nothing, for too long, or since the connection was remade: the server has forgotten what was asked.
        """
        for _ in range(math.ceil((FAR_SILENCE_S if self.link.far else SILENCE_S) / LOOK_S)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    return await queue.get()
            if self.link.bulk.stats["reconnects"] != reconnects:
                break
        raise TimeoutError
