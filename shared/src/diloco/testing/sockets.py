"""Connections between processes in virtual time: what a buffered protocol asks of a loop, without sockets.

Bytes come in order, late by what the network says. A process that ends closes its connections, as its system does for it; a
host that is gone says nothing, and what is sent to it is lost. Where a way is cut, bytes wait for it, as TCP repeats them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

Address = tuple[str, int]
Factory = Callable[[], asyncio.BaseProtocol]

AGAIN_S = 0.2  # until bytes are repeated
FIRST_PORT = 50000


@dataclass
class Host:
    """One process's place in a network."""

    name: str
    loop: asyncio.AbstractEventLoop
    network: Network

    async def listen(self, factory: Factory, port: int) -> PortListener:
        """Have connections made to a port (0: any that is free).

        Raises:
            OSError: the address is in use.
        """
        return self.network.listen(self, factory, port)

    async def connect(self, factory: Factory, address: Address) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect.

        Raises:
            ConnectionRefusedError: no process listens there.
        """
        return await self.network.connect(self, factory, address)


@dataclass
class PortListener:
    """A port at which a process listens: as much of :class:`asyncio.Server` as is asked of one."""

    host: Host
    factory: Factory
    port: int

    @property
    def sockets(self) -> list[PortListener]:
        """Itself, which knows its name."""
        return [self]

    def getsockname(self) -> Address:
        """Return its address."""
        return self.host.name, self.port

    def close(self) -> None:
        """Refuse new connections; others stay."""
        self.host.network.listeners.pop(self.getsockname(), None)


class Network:
    """All hosts by name. ``delay_s`` draws how long bytes take; ``room`` is how many may be on their way before one waits."""

    def __init__(self, delay_s: Callable[[], float], room: int) -> None:
        self.delay_s, self.room = delay_s, room
        self.listeners: dict[Address, PortListener] = {}
        self.cut: set[frozenset[str]] = set()  # pairs of hosts whose way is cut
        self.silent: set[str] = set()  # hosts that are gone without a word, until they begin again
        self._ends: dict[str, list[ConnectionEnd]] = {}  # by host
        self._ports = itertools.count(FIRST_PORT)

    def begin(self, name: str, loop: asyncio.AbstractEventLoop) -> Host:
        """Return the place of a process that begins."""
        self.silent.discard(name)
        return Host(name, loop, self)

    def listen(self, host: Host, factory: Factory, port: int) -> PortListener:
        """Have connections made to a host."""
        listener = PortListener(host, factory, port or next(self._ports))
        if listener.getsockname() in self.listeners:
            raise OSError(98, f"port {port} is taken")
        self.listeners[listener.getsockname()] = listener
        return listener

    async def connect(self, host: Host, factory: Factory, address: Address) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect a host to an address."""
        await asyncio.sleep(self.delay_s())
        while address[0] in self.silent or frozenset((host.name, address[0])) in self.cut:
            await asyncio.sleep(AGAIN_S)
        listener = self.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(f"{address[0]}:{address[1]}: no process listens")
        near = ConnectionEnd(self, host, factory())
        far = ConnectionEnd(self, listener.host, listener.factory())
        near.peer, far.peer = far, near
        for end in (near, far):
            self._ends.setdefault(end.host.name, []).append(end)
            end.host.loop.call_soon(end.begin)
        await asyncio.sleep(self.delay_s())
        return near, near.protocol

    def end(self, host: Host, *, silently: bool = False) -> None:
        """Close all that a process had, which is no more; or have its host vanish."""
        for listener in [listener for listener in self.listeners.values() if listener.host is host]:
            listener.close()
        mine = [end for end in self._ends.get(host.name, []) if end.host is host]
        self._ends[host.name] = [end for end in self._ends.get(host.name, []) if end.host is not host]
        if silently:
            self.silent.add(host.name)
        for end in mine:
            end.closed = True
            if not silently:
                end.peer.arrive(None)

    def close(self) -> None:
        """Close whatever is left, so that nothing complains of it as it goes."""
        for ends in self._ends.values():
            for end in ends:
                end.closed = True


class ConnectionEnd(asyncio.Transport):
    """One end of a connection."""

    peer: ConnectionEnd

    def __init__(self, network: Network, host: Host, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self.network, self.host, self.protocol = network, host, cast(Any, protocol)
        self.closed = False
        self._incoming: deque[bytes | None] = deque()  # None: the other end is closed
        self._last_s = 0.0  # when the newest of these comes
        self._under_way = 0  # bytes that were sent, and have not come
        self._waits = False
        self._unread = bytearray()  # came, and the protocol has not taken them
        self._paused = self._ends = False  # the protocol takes nothing now; the other end is closed

    def begin(self) -> None:
        """Tell the protocol."""
        self.protocol.connection_made(self)

    def write(self, data: Any) -> None:
        """Send bytes."""
        if self.closed:
            return
        self._under_way += len(data)
        if self._under_way > self.network.room and not self._waits:
            self._waits = True
            self.protocol.pause_writing()
        self.peer.arrive(bytes(data))

    def arrive(self, data: bytes | None) -> None:
        """Have bytes come after those that were sent before."""
        loop = self.host.loop
        self._incoming.append(data)
        self._last_s = max(self._last_s, loop.time() + self.network.delay_s())
        loop.call_at(self._last_s, self._take)

    def _take(self) -> None:
        if frozenset((self.host.name, self.peer.host.name)) in self.network.cut:
            self.host.loop.call_later(AGAIN_S, self._take)
            return
        data = self._incoming.popleft()
        if data is not None:
            self.peer.came(len(data))
        if self.closed:
            return
        if data is None:
            self._ends = True
        else:
            self._unread += data
        self._hand_over()

    def _hand_over(self) -> None:
        """Have the protocol take what has come, as far as it does."""
        while self._unread and not self._paused and not self.closed:
            buffer = self.protocol.get_buffer(-1)
            size = min(len(buffer), len(self._unread))
            buffer[:size] = self._unread[:size]
            del self._unread[:size]
            self.protocol.buffer_updated(size)
        if self._ends and not self._unread and not self.closed:
            self.closed = True
            self.protocol.connection_lost(None)

    def pause_reading(self) -> None:
        """Keep what comes."""
        self._paused = True

    def resume_reading(self) -> None:
        """Hand over what was kept, and what comes."""
        if self._paused:
            self._paused = False
            self.host.loop.call_soon(self._hand_over)

    def came(self, size: int) -> None:
        """Note that bytes have come to the other end."""
        self._under_way -= size
        if self._waits and self._under_way <= self.network.room:
            self._waits = False
            self.host.loop.call_soon(self.protocol.resume_writing)

    def close(self) -> None:
        """Close this end; the other one hears of it after all that was sent."""
        if not self.closed:
            self.closed = True
            self.peer.arrive(None)
            self.host.loop.call_soon(self.protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        """Whether it is closed."""
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the addresses of both ends; ports of those who connect do not matter."""
        names = {"sockname": (self.host.name, 0), "peername": (self.peer.host.name, 0)}
        return names.get(name, default)
