"""Bytes to and from a NATS server over TCP, with TLS from the server's greeting on.

The one place that knows of a socket: another way to a server, such as a websocket through a proxy, is another implementation
of the library's public ``nats.aio.transport.Transport`` with :meth:`TcpTransport.abort` and :meth:`TcpTransport.end`.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from nats.aio.transport import Transport

# the library reads into a buffer of 32 KiB; 1 MiB doubles the receive rate
READ_BUFFER_BYTES = 1 << 20


class _Protocol(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        super().eof_received()
        return False  # asyncio complains about anything else over TLS


class TcpTransport(Transport):  # type: ignore[misc]  # nats-py is not typed
    """One client's connection to a server, made again where it is lost. Every read takes up to :data:`READ_BUFFER_BYTES`."""

    def __init__(self) -> None:
        self.ends = False  # no connection is made any more
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._plain: asyncio.StreamWriter | None = None  # below TLS; kept, or the socket would be closed with it
        self._handshaking = False

    def __bool__(self) -> bool:
        return True  # the client would replace one that is false

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: float) -> None:
        if self.ends:
            raise asyncio.CancelledError  # any error would be a reason to try again
        self.close()  # of an attempt before, which would be left to the garbage collector
        self._handshaking = False
        async with asyncio.timeout(connect_timeout):
            self._reader, self._plain = await asyncio.open_connection(uri.hostname, uri.port, limit=READ_BUFFER_BYTES)
        self._writer = self._plain

    async def connect_tls(self, uri: Any, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: float) -> None:
        assert self._plain is not None
        loop, plain = asyncio.get_running_loop(), self._plain.transport
        protocol = _Protocol(reader := asyncio.StreamReader(limit=READ_BUFFER_BYTES))
        self._handshaking = True
        async with asyncio.timeout(connect_timeout):
            secure: Any = await loop.start_tls(plain, protocol, ssl_context, server_hostname=uri)
        self._reader, self._writer = reader, asyncio.StreamWriter(secure, protocol, reader, loop)
        self._handshaking = False

    def abort(self) -> None:
        """Give the connection up, with what waits to be sent."""
        if self._writer is not None:
            self._writer.transport.abort()

    def end(self) -> None:
        """Close the socket: an attempt that was cancelled while it closed left it open, under TLS that is half shut."""
        if self._plain is not None:
            self._plain.close()

    def write(self, payload: bytes) -> None:
        assert self._writer is not None
        self._writer.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        if self._writer is not None and not self._writer.is_closing():  # else asyncio (of Python 3.11) fails, if TLS was closed
            self._writer.writelines(payload)

    async def read(self, buffer_size: int) -> bytes:
        assert self._reader is not None
        return await self._reader.read(READ_BUFFER_BYTES)

    async def readline(self) -> bytes:
        assert self._reader is not None
        return await self._reader.readline()

    async def drain(self) -> None:
        if self._writer is not None and not self._writer.is_closing():  # else it fails, and the client's end is left half done
            await self._writer.drain()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def wait_closed(self) -> None:
        if self._writer is not None and not self._handshaking:  # else asyncio reports no close: TLS has the protocol's place
            await self._writer.wait_closed()

    def at_eof(self) -> bool:
        return self._reader is None or self._reader.at_eof()
