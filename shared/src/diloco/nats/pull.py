"""Reading a stream: a windowed pull loop that survives the loss of the server or of its consumer.

Two requests of half a window overlap, so that the next messages are on their way while the reader works on these. The server
sends nothing without a request, so the window bounds memory, however slow the reader is. The window begins small and doubles
with each half that was read, since a process with little time to read loses its connection, and all that is on its way.

The consumer is ephemeral: when it is lost, another one continues behind the last sequence that was read. A consumer from which
nothing comes is given up after ever longer silences: the answers may wait in this process.

A process has a few names for its consumers of a stream, since a server grants it these alone. A reader takes one that is free;
with all of them in use it waits. A consumer that the process had before it was restarted, or that another process of its name
has, is left alone where another name is free, and replaced otherwise. A reader whose consumer was replaced makes another one.

A server takes an empty answer for the last one to a request that came from another account (docs/security.md), and
drops those that follow. So an empty message in the stream ends a request, and others are lost on the way. The numbers
of the consumer's deliveries tell. Until the reader has caught up, each of its requests is for one message: none can be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nats.errors
import nats.js.errors

from diloco.errors import AppendUncertainError, BrokerError, RewoundError
from diloco.nats import streams
from diloco.nats.connection import NatsLink, check_open, wait_connected
from diloco.nats.consumers import ConsumerNames
from diloco.process.retry import RETRY_S
from diloco.transport import Stored
from diloco.wire.plain import json_object

WINDOW_BYTES = 16 << 20
FAR_WINDOW_BYTES = 4 << 20  # more would only wait in front of a thin link, and again after a cut
OVERHEAD_BYTES = 1 << 16  # the server counts subject and reply subject of a message too
EXPIRES_S = 5.0  # of a request, which is then made again: one that a server lost is not waited for longer
HEARTBEAT_S = 0.5  # of an idle consumer: four fit into SILENCE_S
SILENCE_S = 2.0  # without message or heartbeat for so long, the consumer or the server is gone
MOST_SILENCE_S = 60.0  # of consumers from which nothing comes at all
FAR_SILENCE_S = 20.0  # over thin links, where a part of 512 KiB may share one with others
SILENCE_PARTS = 4  # waits of which a silence consists: between two of them a busy process takes in what came
INACTIVE_S = 30.0  # a consumer that is not read for so long is removed: longer than a connection needs to be remade
REQUESTS = 2

_NAME_IN_USE = 10148  # error code of the JetStream API


@dataclass(frozen=True)
class PulledMessage(Stored):
    """A stored message; ``pending`` is the number of messages for the reader that were stored behind it."""

    pending: int


class _AgainError(Exception):
    """Another consumer is to go on at once; ``singly``: by requests for one message each."""

    def __init__(self, *, singly: bool) -> None:
        self.singly = singly


class Puller:
    """``async for message in Puller(...)``: every message on ``subjects`` from ``start_sequence`` on, once, in order, for ever.

    Messages that were purged before they could be read are left out; their sequences are missing. ``read`` is the last message
    that another puller read; this one continues behind it. ``headers_only``: messages come without their data.

    Raises (while iterating):
        BrokerError: the stream does not exist, the filters overlap, or the connection was closed for good.
        RewoundError: the stream lost the last message read, without having purged it; sequences may mean other messages now.
    """

    def __init__(
        self,
        link: NatsLink,
        stream: str,
        subjects: Sequence[str],
        start_sequence: int,
        window_bytes: int | None = None,
        read: Stored | None = None,
        *,
        headers_only: bool = False,
    ) -> None:
        self.link, self.stream, self.subjects = link, stream, list(subjects)
        self.next_sequence = max(1, start_sequence)
        self._newest = read  # the last message read
        self._headers_only = headers_only
        # a request that cannot hold the next message would be answered at once, for ever
        window_bytes = window_bytes or (FAR_WINDOW_BYTES if link.far else WINDOW_BYTES)
        largest_bytes = link.bulk.largest_bytes + OVERHEAD_BYTES
        self._least_bytes, self._most_bytes = largest_bytes, max(largest_bytes, window_bytes // REQUESTS)
        self._half_bytes = self._least_bytes
        self._first_silence_s = self._silence_s = FAR_SILENCE_S if link.far else SILENCE_S
        self._heard = False  # something came from the present consumer
        self._singles = max(REQUESTS, window_bytes // largest_bytes)  # requests of one message each that fit into the window
        self._singly = False

    async def __aiter__(self) -> AsyncGenerator[PulledMessage, None]:
        names = self.link.consumer_names(self.stream)
        while True:
            consumer = await self._take(names)
            self._heard = False
            queue: asyncio.Queue[Any] = asyncio.Queue()
            inbox, first = self.link.bulk.new_inbox(), self.next_sequence
            subscription, pause = None, True
            self.link.bulk.told_of_reconnects.add(queue)
            try:
                # no limits here: requests have them
                subscription = await self.link.bulk.subscribe(
                    f"{inbox}.*", cb=queue.put, pending_msgs_limit=0, pending_bytes_limit=0
                )
                async for message in self._read(consumer, inbox, queue):
                    self.next_sequence = message.sequence + 1
                    if message.subject.isascii():  # any other is none of a run's, and may read otherwise when looked up
                        self._newest = message
                        yield message
                self._half_bytes = self._least_bytes
                self._silence_s = self._first_silence_s if self._heard else min(2 * self._silence_s, MOST_SILENCE_S)
            except _AgainError as error:
                self._singly, pause = error.singly, error.singly and self.next_sequence == first
            finally:
                self.link.bulk.told_of_reconnects.discard(queue)
                names.remove(consumer)
                if subscription is not None:
                    with contextlib.suppress(nats.errors.Error):
                        await subscription.unsubscribe()
            if pause:
                await asyncio.sleep(RETRY_S)

    async def _take(self, names: ConsumerNames) -> str:
        """Make a consumer; return its name."""
        tried: set[str] = set()
        while True:
            made, name = False, await names.take()
            try:
                made = await self._make(name, replace=name in tried)
            finally:
                if not made:
                    names.give_back(name)
            if made:
                return name
            tried.add(name)

    async def _make(self, name: str, *, replace: bool) -> bool:
        """Make a consumer, in the place of one that has its name if ``replace``.

        Return False if there is such a one, or there is no answer: the server that has just died may have been given the
        consumer, and then none comes for as long as it is dead.
        """
        subjects, attempt = self.subjects, uuid.uuid4().hex
        config = {
            "name": name,
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "inactive_threshold": int(INACTIVE_S * 1e9),
            "mem_storage": True,
            "num_replicas": 1,
            # two requests for the same consumer are answered alike: without this, two readers would share one, half each
            "metadata": {"attempt": attempt},
            "headers_only": self._headers_only,
        }
        config |= {"filter_subject": subjects[0]} if len(subjects) == 1 else {"filter_subjects": subjects}
        call = ".".join([f"CONSUMER.CREATE.{self.stream}.{name}", *(subjects if len(subjects) == 1 else [])])
        request = {"stream_name": self.stream, "config": config, "action": "create"}
        config["opt_start_seq"] = self.next_sequence
        try:
            await wait_connected(self.link.bulk, streams.TIMEOUT_S, f"stream {self.stream}")
            await self._check_kept()
            if replace:
                await self._ask(f"CONSUMER.DELETE.{self.stream}.{name}", {})
            code, error_code, text = await self._ask(call, request)
        except nats.js.errors.NotFoundError:
            raise BrokerError(f"stream {self.stream}: does not exist on the server") from None
        except (nats.errors.Error, TimeoutError, AppendUncertainError):
            check_open(self.link.bulk)
            code, error_code, text = 0, 0, "no answer"
        if code == 404:
            raise BrokerError(f"stream {self.stream}: does not exist on the server")
        if code == 400 and error_code != _NAME_IN_USE:
            raise BrokerError(f"stream {self.stream}: cannot be read: {text}")
        if code is None:
            return True
        await asyncio.sleep(RETRY_S)
        return False

    async def _ask(self, call: str, request: dict[str, Any]) -> tuple[int | None, int | None, str]:
        """Ask JetStream; return the code, the code of JetStream's own and the text of an error, else None for all."""
        reply = await self.link.bulk.request(f"$JS.API.{call}", json.dumps(request).encode(), timeout=streams.TIMEOUT_S)
        answer = json_object(reply.data)
        if answer is None:
            return 0, 0, "no answer of JetStream"
        error = answer.get("error")
        if not isinstance(error, dict):
            return None, None, ""
        return error.get("code", 0), error.get("err_code", 0), str(error.get("description"))

    async def _check_kept(self) -> None:
        """Find out whether the stream still holds the last message read: a server that lost its last writes goes back."""
        newest = self._newest
        if newest is None:
            return
        stored = await streams.get(self.link, self.stream, newest.sequence)
        if stored is None:
            info = await self.link.bulk.jetstream(timeout=streams.TIMEOUT_S).stream_info(self.stream)
            kept = info.state.last_seq >= newest.sequence  # purged, or replaced by a newer one
        else:
            kept = stored.subject == newest.subject and (self._headers_only or stored.data == newest.data)
        if not kept:
            raise RewoundError(f"stream {self.stream}: the server lost message {newest.sequence}, which it had acknowledged")

    async def _request(self, consumer: str, inbox: str, number: int) -> None:
        request = {
            # many are never reached: bytes or time end a request, and the server says so
            "batch": 1 if self._singly else self._half_bytes,
            "max_bytes": self._half_bytes,
            "expires": int(EXPIRES_S * 1e9),
        }
        if number == 0:  # all requests have the same consumer: one that says that it is idle is enough
            request["idle_heartbeat"] = int(HEARTBEAT_S * 1e9)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{consumer}"
        await self.link.bulk.publish(subject, json.dumps(request).encode(), reply=f"{inbox}.{number}")

    async def _read(self, consumer: str, inbox: str, queue: asyncio.Queue[Any]) -> AsyncIterator[PulledMessage]:
        """Yield messages until the consumer seems lost.

        Raises (while iterating):
            _AgainError: messages were lost on the way, or will be; or the reader has caught up.
        """
        delivered = 0
        try:
            for number in range(self._singles if self._singly else REQUESTS):
                await self._request(consumer, inbox, number)
            while True:
                raw = await self._wait(queue) if queue.empty() else queue.get_nowait()
                if raw is None:  # the connection was remade: the server has forgotten the requests
                    return
                self._heard = True
                if not raw.subject.startswith(f"{inbox}."):  # stored, whatever its headers say
                    delivered += 1
                    message = self._take_in(raw, delivered)
                    if self._singly:
                        await self._request(consumer, inbox, 0)
                    if message.sequence >= self.next_sequence:
                        yield message
                    if not (raw.data or raw.headers or self._singly):
                        raise _AgainError(singly=True)
                elif not self._goes_on(raw.headers or {}, delivered):
                    return
                elif (raw.headers or {}).get("Status") != "100":
                    if "MaxBytes" in (raw.headers or {}).get("Description", ""):  # it was all used
                        self._half_bytes = min(2 * self._half_bytes, self._most_bytes)
                    await self._request(consumer, inbox, int(raw.subject.rsplit(".", 1)[-1]))
        except (nats.errors.Error, TimeoutError):
            return

    def _take_in(self, raw: Any, delivered: int) -> PulledMessage:
        """Return a stored message, the consumer's delivery of this number.

        Raises:
            _AgainError: it is another one.
        """
        # $JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>.<consumer sequence>.<time>.<pending>
        tokens = raw.reply.split(".")
        if int(tokens[-3]) != delivered:  # also if another consumer has its name, or another process of this name reads it
            raise _AgainError(singly=True)
        return PulledMessage(raw.subject, int(tokens[-4]), raw.data, int(tokens[-1]), stored_at_s=int(tokens[-2]) / 1e9)

    def _goes_on(self, headers: Mapping[str, str], delivered: int) -> bool:
        """Whether the server's word, which is no message, leaves the consumer as it is: idle, or with a request less.

        Raises:
            _AgainError: so many deliveries did not come; or none is missing, and the reader has caught up.
        """
        if headers.get("Status") == "100":
            lost = headers.get("Nats-Last-Consumer", str(delivered)) != str(delivered)
            if lost or self._singly:
                raise _AgainError(singly=lost)
            return True
        # this request has had its bytes or its time
        return headers.get("Status") in ("408", "409") and "Consumer" not in (headers.get("Description") or "")

    async def _wait(self, queue: asyncio.Queue[Any]) -> Any:
        """Return the next message; None if the connection was remade.

        Raises:
            TimeoutError: nothing for too long.
        """
        for _ in range(SILENCE_PARTS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._silence_s / SILENCE_PARTS):
                    return await queue.get()
        raise TimeoutError
