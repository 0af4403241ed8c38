"""The NATS library's client, with larger buffers, a check for TLS, an eye on all that comes in, and an end that is one.

All that relies on the library's private members is in this module. nats-py is pinned to one minor version for it, and
``tests/shared/test_nats_client_contract.py`` checks each of them:

=======================  =====================================================================================================
member                   what for
=======================  =====================================================================================================
``_ps``                  reading of our own: the library's goes deaf at some messages, and measures no rate
``_process_msg``,        what that reading hands on, as the library's reading does
``_process_ping``,
``_process_pong``,
``_process_err``
``_process_headers``     headers of any bytes; the library's fails at some
``_process_info``        no byte is answered to a server that offers an identity no TLS
``_max_payload``         limit of this identity's account, which the server states once it knows the identity: the library
                         goes by the greeting, and the server closes the connection of a client that sends more
``_transport``           the way to a server (``tcp.py``); the library chooses between two of its own
``_public_nkey``         a key without the library's ``nkeys_seed_str``, which needs PyNaCl
``_pings_outstanding``   any packet is a sign of life, not only a pong, which waits behind all else on a thin link
``_attempt_reconnect``   a lost connection is aborted: a peer that is cut off would be waited for, 30 s with TLS; and readers
                         hear that it was remade
``_reconnection_task``   an end that waits for it
=======================  =====================================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import nats.errors
from nats.aio import client as library
from nats.protocol.parser import Parser

from diloco.core.syncer.bandwidth import Moved
from diloco.nats.identity import Identity
from diloco.nats.received import Delivered, delivered, headers
from diloco.nats.tcp import TcpTransport
from diloco.process.tasks import give_up, heeding
from diloco.wire.plain import json_object

CLOSE_S = 5.0  # for what waits to be sent; no peer can keep a connection from being closed for longer
MAX_LINE_BYTES = 1 << 20  # a cluster's addresses are in one
STALL_S = 1.0  # a longer pause in the middle of a message is a cut: a slow link goes on, packet by packet

_CRLF = b"\r\n"


class _Parser(Parser):  # type: ignore[misc]  # nats-py is not typed
    """Takes messages whatever their writers put into them, and measures how fast they come in, packet by packet.

    A packet that continues a message was on its way since the packet before it: the server sends whole messages. Between two
    messages it is not known whether there was anything to send.
    """

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.incoming = Moved()
        self._heard_s = -math.inf

    def reset(self) -> None:
        super().reset()
        self._expected: Delivered | None = None  # the message whose bytes are awaited

    async def parse(self, data: bytes = b"") -> None:
        now_s = asyncio.get_running_loop().time()
        pause_s, self._heard_s = now_s - self._heard_s, now_s
        if (self.buf or self._expected is not None) and pause_s < STALL_S:
            self.incoming = Moved(self.incoming.bytes + len(data), self.incoming.busy_s + pause_s)
        self.nc.heard()
        self.buf.extend(data)
        while await self._take():
            pass

    async def _take(self) -> bool:
        """Take one line or one message from what has come in; return False if it is not all there yet."""
        expected = self._expected
        if expected is not None:
            if len(self.buf) < expected.size + len(_CRLF):
                return False
            with memoryview(self.buf) as view:
                header, payload = bytes(view[: expected.header_size]), bytes(view[expected.header_size : expected.size])
            del self.buf[: expected.size + len(_CRLF)]
            self._expected = None
            await self.nc.deliver(expected, header, payload)
            return True
        end = self.buf.find(_CRLF)
        if end < 0:
            if len(self.buf) > MAX_LINE_BYTES:
                raise nats.errors.ProtocolError
            return False
        line = bytes(self.buf[:end])
        del self.buf[: end + len(_CRLF)]
        try:
            self._expected = delivered(line)
        except ValueError:
            raise nats.errors.ProtocolError from None
        if self._expected is None:
            await self.nc.hear(line)
        return True


class Client(library.Client):  # type: ignore[misc]  # nats-py is not typed
    """A client that takes every packet, not only a pong, for a sign that the server is there.

    Over a thin link a pong waits behind all that the server had to send before, for longer than a silent server is waited
    for; and a client that connects again has all of it sent again, without end.
    """

    def __init__(self, identity: Identity | None) -> None:
        super().__init__()
        self._ps = _Parser(self)
        self._transport = self._tcp = TcpTransport()
        self._identity = identity
        self._public_nkey = None if identity is None else identity.public_key
        self.has_jetstream = False  # by the server's configuration, which may still be starting it
        self.largest_bytes = library.DEFAULT_MAX_PAYLOAD_SIZE  # of a message of any client: this one's may be smaller
        self.told_of_reconnects: set[asyncio.Queue[Any]] = set()  # each gets a None when the connection was remade
        self.asked: set[asyncio.Future[Any]] = set()  # requests under way: their answers would come by this connection alone
        self.denied = 0  # requests that the server denied to this identity
        self._optional: dict[str, bool] = {}  # subjects that it may lack the right to: whether the server has denied one

    def may_try(self, subject: str) -> bool:
        """Let the server deny this identity a subject; return False if it has."""
        return not self._optional.setdefault(subject, False)

    def is_optional(self, denial: str) -> bool:
        """Whether a denial, in the server's words, is of a subject that this identity may lack the right to; remember it."""
        subject = next((subject for subject in self._optional if f'"{subject.lower()}"' in denial.lower()), None)
        if subject is not None:
            self._optional[subject] = True
        return subject is not None

    @property
    def lacks_limit(self) -> bool:
        """Whether the server takes as large messages of this identity as of any, and should not."""
        return self._identity is not None and self._identity.sends_little and self.max_payload >= self.largest_bytes

    @property
    def incoming(self) -> Moved:
        """Bytes that came in in the middle of messages, and the time that they took."""
        return self._ps.incoming

    def heard(self) -> None:
        """Note that a packet came."""
        self._pings_outstanding = 0

    async def deliver(self, line: Delivered, block: bytes, payload: bytes) -> None:
        """Take in a message with its block of headers."""
        await self._process_msg(line.sid, line.subject, line.reply, payload, block)

    async def hear(self, line: bytes) -> None:
        """Take in a line that stands before no message.

        Raises:
            nats.errors.ProtocolError: no server of NATS says that.
        """
        operation, _, rest = line.partition(b" ")
        match operation.rstrip():
            case b"PING":
                await self._process_ping()
            case b"PONG":
                with contextlib.suppress(asyncio.InvalidStateError):  # it answers a flush that was cancelled
                    await self._process_pong()
            case b"-ERR":
                await self._process_err(rest.decode(errors="replace").strip().lower())
            case b"INFO":
                info = json_object(rest)
                if info is None:
                    raise nats.errors.ProtocolError
                await self._process_info(info)
            case b"+OK" | b"":
                return
            case _:
                raise nats.errors.ProtocolError

    async def request(self, *request: Any, **options: Any) -> Any:
        return await heeding(super().request(*request, **options))

    async def flush(self, *given: Any, **options: Any) -> None:
        await heeding(super().flush(*given, **options))

    async def publish(self, *message: Any, **options: Any) -> None:
        await heeding(super().publish(*message, **options))

    async def close(self) -> None:
        """Close for good, at whatever moment.

        The library's task that remakes a connection may miss its cancellation (``asyncio.wait_for`` of Python 3.11 drops one
        that comes together with an answer), and would go on for ever: it makes no attempt once the end has begun.
        """
        self._tcp.ends = True
        self._give_up_asked()
        await self._close_in_time()
        remaking = self._reconnection_task
        if remaking is not None and remaking is not asyncio.current_task():
            remaking.cancel()
            await asyncio.wait({remaking}, timeout=CLOSE_S)
            await self._close_in_time()  # that task may have connected meanwhile
        self._tcp.end()

    async def _close_in_time(self) -> None:
        closing = asyncio.ensure_future(super().close())  # of its own: the caller may be one of the tasks that it cancels
        _, late = await asyncio.wait({closing}, timeout=CLOSE_S)
        if late:
            await give_up(closing)
        else:
            closing.result()

    async def _attempt_reconnect(self) -> None:
        # a peer that is cut off never takes what waits to be sent, nor the end of TLS, for which asyncio waits 30 s
        self._tcp.abort()
        self._give_up_asked()
        await super()._attempt_reconnect()
        for queue in self.told_of_reconnects:
            queue.put_nowait(None)

    def _give_up_asked(self) -> None:
        for request in self.asked:
            request.cancel()

    async def _process_headers(self, block: bytes) -> dict[str, str] | None:
        return headers(block) if block else None

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # before anything is answered: an attacker on the way may have removed the offer of TLS
        if self._identity is not None and initial_connection and not info.get("tls_required"):
            raise nats.errors.Error(
                "the server offers no TLS, which an identity requires: add a tls block to the server's configuration"
            )
        if initial_connection:
            self.has_jetstream = bool(info.get("jetstream"))
        most_bytes = info.get("max_payload")
        if type(most_bytes) is int and most_bytes > 0:
            self._max_payload = most_bytes
            if initial_connection:
                self.largest_bytes = most_bytes
        await super()._process_info(info, initial_connection=initial_connection)
