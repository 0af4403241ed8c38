"""A connection through the relay: two sockets, and how each behaves while the link between them is slow, full or cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Protocol

from diloco.errors import WanError
from diloco.process.tasks import end
from diloco_ops.wan.config import RouteSettings, split_address
from diloco_ops.wan.line import Receiver, WanLine
from diloco_ops.wan.link import PACKET_BYTES, UNLIMITED_PIECE_BYTES, Delivery, Flow

CONNECT_TIMEOUT_S = 10.0  # a lost SYN is sent again after 1, 3 and 7 s
PRELUDE_BYTES = 1 << 16
WRITE_BUFFER_BYTES = 1 << 20

_RESET = struct.pack("ii", 1, 0)  # linger for no time at all
_SCRATCH = memoryview(bytearray(UNLIMITED_PIECE_BYTES))  # every read ends here, and is copied at once


class Connections(Protocol):
    """The relay's side of a connection: who may come in, and what is counted."""

    def admit(self, connection: Connection) -> bool:
        """Take a connection in, unless there are too many."""

    def forget(self, connection: Connection) -> None:
        """Drop a connection that is over."""

    def unreachable(self, route: RouteSettings, error: OSError) -> None:
        """Count a target that did not accept a connection."""


class SocketSide(asyncio.BufferedProtocol):
    """One of a connection's two sockets. Its bytes go into ``line``; the other side's bytes are written here."""

    def __init__(self, connection: Connection, line: WanLine) -> None:
        self.line = line
        self.flow: Flow[Receiver]  # of what it reads; the other side receives it
        self.other: SocketSide
        self.transport: asyncio.Transport | None = None
        self.congested = False  # its socket takes no more for now
        self.established = False  # what it reads may go
        self.ended = False  # it will read no more
        self.lost = False
        self._connection = connection
        self._finished = False  # the other side will send no more
        self._closed_by_us = False
        self._prelude: list[bytes] = []  # read before the other side had accepted
        self._reading = True

    # ---- from its socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self.lost:  # given up in the very moment
            transport.abort()
            return
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self.line.sockets.add(transport.get_extra_info("socket"))
        self._connection.made(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        # a packet at least: others may have taken the room since it was seen
        return _SCRATCH[: max(self._room(), PACKET_BYTES)]  # type: ignore[return-value]  # typeshed wants a bytearray

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(_SCRATCH[:nbytes])
        if self.established:
            self.line.enter(self.flow, data)
        else:
            self._prelude.append(data)
        self.update_reading()

    def eof_received(self) -> bool:
        self.ended = True
        self.line.waiting.discard(self)
        if self.established:
            self.line.mark(self.flow, "end")
        elif not self._prelude:
            self._connection.give_up()
        self._closed_by_us |= self._finished
        return not self._finished

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = self.ended = True
        self.line.waiting.discard(self)
        if self.transport is not None:
            self.line.sockets.discard(self.transport.get_extra_info("socket"))
        if not self._closed_by_us:
            self._connection.broken(self)
        self._connection.settle()

    def pause_writing(self) -> None:
        self.congested = True
        self.other.update_reading()

    def resume_writing(self) -> None:
        self.congested = False
        self.other.update_reading()

    # ---- from the other side

    def deliver(self, delivery: Delivery[Receiver]) -> None:
        """Take payload or a mark that arrived."""
        if delivery.mark == "open":
            self._connection.connect()
        elif delivery.mark == "abort":
            self.abort()
        elif self.transport is None or self.lost:
            return
        elif delivery.mark == "accepted":
            self.establish()
        elif delivery.mark == "end":
            self._finish()
        else:
            self.transport.write(delivery.data)

    def establish(self) -> None:
        """Let bytes go, first those that were read already."""
        self.established = True
        prelude, self._prelude = self._prelude, []
        for data in prelude:
            self.line.enter(self.flow, data)
        if self.ended:
            self.line.mark(self.flow, "end")
        self.update_reading()

    def _finish(self) -> None:
        assert self.transport is not None
        self._finished = True
        if self.ended:
            self._closed_by_us = True
            self.transport.close()
        else:
            with contextlib.suppress(OSError):  # it is gone, and connection_lost will say so
                self.transport.write_eof()

    def abort(self) -> None:
        """Close it at once, by a reset."""
        self._closed_by_us = True
        if self.transport is not None:
            if not self.lost:
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        else:
            self.lost = True
            self._connection.stop_connecting()
            self._connection.settle()

    # ---- reading or not

    def _room(self) -> int:
        if self.established:
            return min(self.line.link.room(self.flow), len(_SCRATCH))
        return PRELUDE_BYTES - sum(map(len, self._prelude))

    def update_reading(self) -> None:
        """Read if there is room for it and the other side takes it; wait if not."""
        if self.transport is None or self.ended:
            return
        may = not self.other.congested and self._room() > 0
        if may:
            self.line.waiting.discard(self)
        else:
            self.line.waiting.add(self)
        if may and not self._reading:
            self.transport.resume_reading()
        elif self._reading and not may:
            self.transport.pause_reading()
        self._reading = may


class Connection:
    """A connection through the relay: ``near`` was accepted from a client, ``far`` leads to the route's target."""

    def __init__(self, relay: Connections, route: RouteSettings, line: WanLine, back: WanLine) -> None:
        self.route = route
        self.near, self.far = SocketSide(self, line), SocketSide(self, back)
        self.near.other, self.far.other = self.far, self.near
        self.near.flow = Flow(self.far, route.traffic)
        self.far.flow = Flow(self.near, route.traffic)
        self._relay = relay
        self._opened = False
        self._connecting: asyncio.Task[None] | None = None

    def made(self, side: SocketSide) -> None:
        """Take note that a side has its socket."""
        if side is self.far:
            side.line.mark(side.flow, "accepted")
            side.establish()
        elif self._relay.admit(self):
            side.line.mark(side.flow, "open")
        else:
            side.abort()

    def connect(self) -> None:
        """Connect to the target: the opening has arrived at the far end."""
        self._opened = True
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                sock = await _connected(self.route.target, self.far.line)
            await loop.create_connection(lambda: self.far, sock=sock)
        except OSError as error:  # TimeoutError is one
            self._relay.unreachable(self.route, error)
            self.far.lost = True
            self.far.line.mark(self.far.flow, "abort")
            self.settle()

    def give_up(self) -> None:
        """End it where the client left before it sent a byte.

        If its opening is still on its way, the target never hears of it.
        """
        if not self._opened:
            self.near.line.link.drop(self.near.flow)
            self.far.lost = True
            self.near.abort()

    def broken(self, side: SocketSide) -> None:
        """Take note that a side's socket was closed from outside, and not in order."""
        if side is self.near and not self._opened:
            self.near.line.link.drop(self.near.flow)
            self.far.lost = True
        else:
            side.line.mark(side.flow, "abort")

    def stop_connecting(self) -> None:
        """Stop connecting to the target."""
        if self._connecting is not None:
            self._connecting.cancel()

    def settle(self) -> None:
        """Leave the relay's list when both sides are gone."""
        if self.near.lost and self.far.lost:
            self._relay.forget(self)

    async def close(self) -> None:
        """Close both sides at once."""
        for side in (self.near, self.far):
            side.abort()
        await end(self._connecting)


async def listening(address: str) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        WanError: the address cannot be listened at.
    """
    host, port = split_address(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise WanError(f"{address}: cannot listen there: {error.strerror or error}") from None
    return sock


def address_of(server: asyncio.Server) -> str:
    """Return the address where a server listens."""
    host, port = server.sockets[0].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _connected(address: str, line: WanLine) -> socket.socket:
    """Return a socket connected to a target, whose answers go into a line."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        line.fit_buffer(sock)
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock
