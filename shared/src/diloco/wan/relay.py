"""The relay: sockets at both ends of the emulated links.

A connection is accepted where a route listens. Its opening travels to the other end of the link as a mark, and only there
the target is connected to; the acceptance travels back; then bytes go both ways. So nothing passes a cut link, not even a
connection, and opening one costs the round trip that it costs on a WAN. Ends and aborts travel behind the bytes.

What may be read, what goes first and when it arrives is :mod:`diloco.core.link`'s; here are sockets and one timer a link. A
socket is read only while its flow has room in the link, and the other socket takes what it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
from asyncio.trsock import TransportSocket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from diloco.core import impairments
from diloco.core.failures import Failure, Tape
from diloco.core.impairments import Turn
from diloco.core.link import PACKET_BYTES, UNLIMITED_PIECE_BYTES, Conditions, Delivery, Flow, Link, Mark
from diloco.errors import SettingsError, WanError
from diloco.observe import Counted, Logger
from diloco.settings import parse
from diloco.tasks import end
from diloco.wan.config import Config, LinkSettings, RouteSettings, split_address

MAX_CONNECTIONS = 4096
CONNECT_TIMEOUT_S = 10.0
PRELUDE_BYTES = 1 << 16
WRITE_BUFFER_BYTES = 1 << 20
UNLIMITED_BUFFER_BYTES = 4 << 20
HEADER_BYTES = 52  # IPv4 20, TCP 20, timestamps 12

_RESET = struct.pack("ii", 1, 0)  # linger for no time at all
_SCRATCH = memoryview(bytearray(UNLIMITED_PIECE_BYTES))  # every read ends here, and is copied at once


class Line:
    """One direction of a link at work: the core's link, its timer, and what holds for it now."""

    def __init__(self, name: str, conditions: Conditions, seed: int, log: Logger) -> None:
        self.name = name
        self.base = conditions  # as the file or an operator says
        self.slow = 1.0
        self.cut = False  # by an operator
        self.lasting: list[Failure] = []  # of the tape that is played, in the order in which they began
        self.link: Link[Side] = Link(conditions, random.Random(f"{seed}/{name}"))
        self.waiting: set[Side] = set()  # sides that may not read now
        self.sockets: set[socket.socket | TransportSocket] = set()  # that are read into it, or listen for such
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._fitted = False
        self._log = log

    def apply(self) -> None:
        """Bring about what holds now."""
        now_s = self._loop.time()
        before, conditions = self.link.conditions, impairments.slowed(impairments.left(self.base, self.lasting), self.slow)
        self.link.change(now_s, conditions)
        if before.rate_bits_per_s != conditions.rate_bits_per_s:
            for sock in self.sockets:
                self.fit_buffer(sock)
        if self.cut or impairments.is_cut(self.lasting):
            self.link.cut(now_s)
        else:
            self.link.heal(now_s)
        self._log.info(
            "link_changed",
            link=self.name,
            cut=self.link.is_cut,
            rate_bits_per_s=conditions.rate_bits_per_s,
            delay_s=conditions.delay_s,
            jitter_s=conditions.jitter_s,
        )
        self._pump()

    def fit_buffer(self, sock: socket.socket | TransportSocket) -> None:
        """Keep what the kernel has received and the link has not about as small as the queue: its delay is nowhere counted.

        As long as the link was never limited, the kernel's own choice stays, which is the fastest.
        """
        conditions = self.link.conditions
        self._fitted |= conditions.rate_bits_per_s is not None
        if self._fitted:
            size = UNLIMITED_BUFFER_BYTES if conditions.rate_bits_per_s is None else conditions.queue_limit_bytes
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    def enter(self, flow: Flow[Side], data: bytes) -> None:
        """Payload of a flow sets out."""
        self.link.enter(self._loop.time(), flow, data)
        self._pump()

    def mark(self, flow: Flow[Side], mark: Mark) -> None:
        """A mark of a flow sets out."""
        self.link.mark(self._loop.time(), flow, mark)
        self._pump()

    def _pump(self) -> None:
        """Hand over what has arrived, and come back when more does."""
        for delivery in self.link.poll(self._loop.time()):
            delivery.flow.receiver.deliver(delivery)
        next_s = self.link.next_s()
        if self._timer is not None and (next_s is None or next_s < self._timer.when()):
            self.close()
        if self._timer is None and next_s is not None:
            self._timer = self._loop.call_at(next_s, self._wake)
        for side in tuple(self.waiting):
            side.update_reading()

    def _wake(self) -> None:
        self._timer = None
        self._pump()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def status(self, back: Line, connections: int) -> dict[str, Any]:
        """All that is told of it. ``back`` is the other direction, whose packets are acknowledged on this one."""
        stats = self.link.statistics(self._loop.time())
        packets, acknowledged = (sum(carried.packets for carried in line.link.carried.values()) for line in (self, back))
        return {
            "state": "cut" if self.link.is_cut else "up",
            "rate_bits_per_s": self.link.conditions.rate_bits_per_s,
            "delay_s": self.link.conditions.delay_s,
            "jitter_s": self.link.conditions.jitter_s,
            "control_bytes": self.link.carried["control"].payload_bytes,
            "bulk_bytes": self.link.carried["bulk"].payload_bytes,
            "packets_estimated": packets,
            "header_bytes_estimated": HEADER_BYTES * (packets + math.ceil(acknowledged / 2)),
            "achieved_bits_per_s": stats.achieved_bits_per_s,
            "queued_bytes": stats.queued_bytes,
            "queue_age_s": stats.queue_age_s,
            "flying_bytes": stats.flying_bytes,
            "connections": connections,
            "disturbed_by": [failure.kind for failure in self.lasting],
        }


class Side(asyncio.BufferedProtocol):
    """One of a connection's two sockets. What it reads goes into ``line``; what the other side read is written here."""

    def __init__(self, connection: Connection, line: Line) -> None:
        self.line = line
        self.flow: Flow[Side]  # of what it reads; the other side receives it
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

    @property
    def other(self) -> Side:
        """The other side."""
        return self.flow.receiver

    # ---- from the other side

    def deliver(self, delivery: Delivery[Side]) -> None:
        """What arrived."""
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
        """What it reads may go, and first what it has read."""
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

    def __init__(self, relay: Relay, route: RouteSettings) -> None:
        self.route = route
        self.near = Side(self, relay.lines[route.link])
        self.far = Side(self, relay.lines[route.back])
        self.near.flow = Flow(self.far, route.traffic)
        self.far.flow = Flow(self.near, route.traffic)
        self._relay = relay
        self._opened = False
        self._connecting: asyncio.Task[None] | None = None

    def made(self, side: Side) -> None:
        """A side has its socket."""
        if side is self.far:
            side.line.mark(side.flow, "accepted")
            side.establish()
        elif self._relay.admit(self):
            side.line.mark(side.flow, "open")
        else:
            side.abort()

    def connect(self) -> None:
        """The opening has arrived at the far end."""
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
        """The client leaves before anything was said. If its opening is still on its way, the target never hears of it."""
        if not self._opened:
            self.near.line.link.drop(self.near.flow)
            self.far.lost = True
            self.near.abort()

    def broken(self, side: Side) -> None:
        """A side's socket was closed, by somebody else and not in order."""
        if side is self.near and not self._opened:
            self.near.line.link.drop(self.near.flow)
            self.far.lost = True
        else:
            side.line.mark(side.flow, "abort")

    def stop_connecting(self) -> None:
        """The far side is not wanted any more."""
        if self._connecting is not None:
            self._connecting.cancel()

    def settle(self) -> None:
        """Be forgotten when both sides are gone."""
        if self.near.lost and self.far.lost:
            self._relay.forget(self)

    async def close(self) -> None:
        """Close both sides at once."""
        for side in (self.near, self.far):
            side.abort()
        await end(self._connecting)


class Relay:
    """All links and routes of a file. ``start`` listens; what is commanded is done by the methods below."""

    def __init__(self, config: Config, log: Logger) -> None:
        self._config, self._log = config, log
        self.lines = {name: Line(name, link.conditions(), config.seed, log) for name, link in config.links.items()}
        self._connections: set[Connection] = set()
        self.addresses: list[str] = []  # where each route listens
        self._servers: list[asyncio.Server] = []
        self._playing = False
        self._refused = Counted(log, "connection_refused")
        self._began_s = asyncio.get_running_loop().time()

    async def start(self) -> None:
        """Listen for all routes.

        Raises:
            WanError: an address cannot be listened at.
        """
        for route in self._config.routes:
            sock = await listening(route.listen)
            self.lines[route.link].sockets.add(sock)
            self.lines[route.link].fit_buffer(sock)  # what it accepts inherits that
            server = await asyncio.get_running_loop().create_server(self._factory(route), sock=sock)
            self._servers.append(server)
            self.addresses.append(address_of(server))
            about = {"link": route.link, "target": route.target, "traffic": route.traffic}
            self._log.info("route_open", listen=self.addresses[-1], **about)

    def _factory(self, route: RouteSettings) -> Callable[[], Side]:
        return lambda: Connection(self, route).near

    async def close(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        for connection in tuple(self._connections):
            await connection.close()
        for line in self.lines.values():
            line.close()

    # ---- connections

    def admit(self, connection: Connection) -> bool:
        """Take a connection in, unless there are too many."""
        if len(self._connections) >= MAX_CONNECTIONS:
            self._refused.note(connection.route.link, "too_many", connections=MAX_CONNECTIONS)
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        """A connection is over."""
        self._connections.discard(connection)

    def unreachable(self, route: RouteSettings, error: OSError) -> None:
        """A target did not accept a connection."""
        self._refused.note(route.link, "target_unreachable", target=route.target, reason=str(error) or "no answer")

    # ---- commands

    def status(self, lines: Iterable[Line]) -> dict[str, Any]:
        """What links carry, hold and have carried."""
        links = {}
        for line in lines:
            back = self.lines["-".join(reversed(line.name.split("-")))]
            connections = sum(line in (each.near.line, each.far.line) for each in self._connections)
            links[line.name] = line.status(back, connections)
        return {
            "uptime_s": asyncio.get_running_loop().time() - self._began_s,
            "playing": self._playing,
            "connections_refused": self._refused.total,
            "links": links,
        }

    def meant(self, words: Iterable[str]) -> list[Line]:
        """The links that the words of a command mean.

        Raises:
            SettingsError: a word means none.
        """
        return [self.lines[name] for name in impairments.meant(words, list(self.lines))]

    def cut(self, lines: Iterable[Line]) -> None:
        """Cut links until they are healed."""
        for line in lines:
            line.cut = True
            line.apply()

    def heal(self, lines: Iterable[Line]) -> None:
        """End every cut that lasts, a schedule's too. Cuts that a schedule has yet to make will come."""
        for line in lines:
            line.cut = False
            line.lasting = [failure for failure in line.lasting if failure.kind != impairments.CUT]
            line.apply()

    def set(self, lines: Iterable[Line], changes: Mapping[str, Any], slow: float | None) -> None:
        """Change links' own conditions, all of them or, if a value does not fit one, none.

        Raises:
            SettingsError: a value is out of bounds, or there is no rate to slow.
        """
        wanted = []
        for line in lines:
            before = {name: getattr(line.base, name) for name in LinkSettings.model_fields}
            conditions = parse(LinkSettings, before | dict(changes), line.name).conditions()
            factor = line.slow if slow is None else slow
            if not 1 <= factor <= impairments.MAX_FACTOR:
                raise SettingsError(f"{line.name}: slow = {factor:g}, expected 1 to {impairments.MAX_FACTOR:g}")
            if factor > 1 and conditions.rate_bits_per_s is None:
                raise SettingsError(f"{line.name}: its rate is unlimited, so it cannot be slowed; set a rate")
            wanted.append((line, conditions, factor))
        for line, conditions, factor in wanted:
            line.base, line.slow = conditions, factor
            line.apply()

    async def play(self, tape: Tape, tell: Callable[[Turn, list[str]], Awaitable[None]]) -> None:
        """Bring a tape about, telling each turn and the links it meets. However it ends, nothing of it lasts.

        Raises:
            WanError: another one is being played.
        """
        if self._playing:
            raise WanError("another schedule is being played on this relay; wait for its end, or end it")
        self._playing = True
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            for turn in impairments.timeline(tape):
                await asyncio.sleep(began_s + turn.at_s - loop.time())
                await tell(turn, self._turn(turn))
            await asyncio.sleep(began_s + tape.duration_s - loop.time())
        finally:
            self._playing = False
            for line in self.lines.values():
                if line.lasting:
                    line.lasting = []
                    line.apply()

    def _turn(self, turn: Turn) -> list[str]:
        met = impairments.targets(turn.failure, list(self.lines))
        for line in map(self.lines.__getitem__, met):
            if not turn.begins:
                line.lasting = [failure for failure in line.lasting if failure is not turn.failure]
            elif turn.failure.duration_s > 0:
                line.lasting.append(turn.failure)
            else:
                line.base = impairments.changed(line.base, turn.failure)
            line.apply()
        return met


async def listening(address: str) -> socket.socket:
    """A socket bound to an address.

    Raises:
        WanError: nobody can listen there.
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
    """Where a server listens."""
    host, port = server.sockets[0].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _connected(address: str, line: Line) -> socket.socket:
    """A socket connected to a target, whose answers go into a line."""
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
