"""The NATS library's client, with larger buffers, a check for TLS, an eye on all that comes in, and an end that is one."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from typing import Any

import nats.errors
from nats.aio import client as library
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from diloco.core.syncer.bandwidth import Moved
from diloco.nats.identity import Identity
from diloco.nats.received import Delivered, delivered, headers
from diloco.wire.plain import json_object

# the library reads into a buffer of 32 KiB; 1 MiB doubles the receive rate
READ_BUFFER_BYTES = 1 << 20
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
        self._transport: _Transport | None = None
        self._identity = identity
        self._public_nkey = None if identity is None else identity.public_key
        self._ends = False
        self.denied = 0  # requests that the server denied to this identity

    @property
    def incoming(self) -> Moved:
        """Bytes that came in in the middle of messages, and the time that they took."""
        return self._ps.incoming

    @property
    def has_jetstream(self) -> bool:
        """Whether the server's configuration has JetStream, which may still be starting."""
        return bool(self._server_info.get("jetstream"))

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

    async def close(self) -> None:
        """Close for good, at whatever moment.

        The library's task that remakes a connection may miss its cancellation (``asyncio.wait_for`` of Python 3.11 drops one
        that comes together with an answer), and would go on for ever: it makes no attempt once the end has begun.
        """
        self._ends = True
        closing = asyncio.ensure_future(super().close())  # of its own: the caller may be one of the tasks that it cancels
        _, late = await asyncio.wait({closing}, timeout=CLOSE_S)
        if late:
            closing.cancel()
        else:
            closing.result()
        remaking = self._reconnection_task
        if remaking is not None and remaking is not asyncio.current_task():
            remaking.cancel()
            await asyncio.wait({remaking}, timeout=CLOSE_S)
        self._status = library.Client.CLOSED  # that task may have written over it
        if self._transport is not None:
            self._transport.end()

    async def _attempt_reconnect(self) -> None:
        # a peer that is cut off never takes what waits to be sent, nor the end of TLS, for which asyncio waits 30 s
        if self._transport is not None:
            self._transport.abort()
        await super()._attempt_reconnect()

    async def _process_pong(self) -> None:
        # as the library's, which takes an answer to a flush that was cancelled for an error of the connection
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
        else:
            await super()._process_pong()

    async def _process_headers(self, block: bytes) -> dict[str, str] | None:
        return headers(block) if block else None

    async def _connect_to_server(self, server: library.Srv) -> None:
        if self._ends:
            raise asyncio.CancelledError
        # as the library's, which knows no other transport than its own
        server.last_attempt = time.monotonic()
        if not self._transport:
            self._transport = _Transport()
        await self._transport.connect(server.uri, READ_BUFFER_BYTES, self.options["connect_timeout"])

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # before anything is answered: an attacker on the way may have removed the offer of TLS
        if self._identity is not None and initial_connection and not info.get("tls_required"):
            raise nats.errors.Error(
                "the server offers no TLS, which an identity is never used without: add a tls block to its configuration"
            )
        await super()._process_info(info, initial_connection=initial_connection)


class _Protocol(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        super().eof_received()
        return False  # asyncio complains about anything else over TLS


class _Transport(TcpTransport):  # type: ignore[misc]  # nats-py is not typed
    """The library's transport, but every read takes as much as :data:`READ_BUFFER_BYTES`, also over TLS."""

    _handshaking = False

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: float) -> None:
        self.close()  # of an attempt before, which the library would leave to the garbage collector
        self._handshaking = False
        await super().connect(uri, buffer_size, connect_timeout)

    async def connect_tls(self, uri: str, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: float) -> None:
        loop, plain = asyncio.get_running_loop(), self._bare_io_writer.transport
        protocol = _Protocol(reader := asyncio.StreamReader(limit=READ_BUFFER_BYTES))
        self._handshaking = True
        async with asyncio.timeout(connect_timeout):
            secure: Any = await loop.start_tls(plain, protocol, ssl_context, server_hostname=uri)
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(secure, protocol, reader, loop)
        self._handshaking = False

    def abort(self) -> None:
        """Give the connection up, with what waits to be sent."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    def end(self) -> None:
        """Close the socket: an attempt that was cancelled while it closed left it open, under TLS that is half shut."""
        if self._bare_io_writer is not None:
            self._bare_io_writer.close()

    def writelines(self, payload: list[bytes]) -> None:
        if not self._io_writer.is_closing():  # else asyncio (of Python 3.11) fails, if TLS was closed twice
            super().writelines(payload)

    async def wait_closed(self) -> None:
        if not self._handshaking:  # else asyncio reports no close: the handshake has taken the protocol's place
            await super().wait_closed()

    async def read(self, buffer_size: int) -> bytes:
        data: bytes = await super().read(READ_BUFFER_BYTES)
        return data
