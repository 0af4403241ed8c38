"""The relay: sockets at both ends of the emulated links.

A connection is accepted where a route listens. Its opening travels to the other end of the link as a mark, and only there
the target is connected to; the acceptance travels back; then bytes go both ways. So nothing passes a cut link, not even a
connection, and opening one costs the round trip that it costs on a WAN. Ends and aborts travel behind the bytes.

What may be read, what goes first and when it arrives is :mod:`diloco_ops.wan.link`'s; here are sockets and one timer a link. A
socket is read only while its flow has room in the link, and the other socket takes what it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from diloco.errors import SettingsError, WanError
from diloco.process.observe import Counted, Logger
from diloco.settings.validation import parse
from diloco_ops.failures import FailureTape
from diloco_ops.wan import impairments
from diloco_ops.wan.config import Config, LinkSettings, RouteSettings
from diloco_ops.wan.connection import Connection, SocketSide, address_of, listening
from diloco_ops.wan.impairments import Turn
from diloco_ops.wan.line import WanLine

MAX_CONNECTIONS = 4096


class Relay:
    """All links and routes of a file. ``start`` listens; the methods below carry out commands."""

    def __init__(self, config: Config, log: Logger) -> None:
        self._config, self._log = config, log
        self.lines = {name: WanLine(name, link.conditions(), config.seed, log) for name, link in config.links.items()}
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

    def _factory(self, route: RouteSettings) -> Callable[[], SocketSide]:
        return lambda: Connection(self, route, self.lines[route.link], self.lines[route.back]).near

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
        """Drop a connection that is over."""
        self._connections.discard(connection)

    def unreachable(self, route: RouteSettings, error: OSError) -> None:
        """Count a target that did not accept a connection."""
        self._refused.note(route.link, "target_unreachable", target=route.target, reason=str(error) or "no answer")

    # ---- commands

    def status(self, lines: Iterable[WanLine]) -> dict[str, Any]:
        """Return what links carry, hold and have carried."""
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

    def meant(self, words: Iterable[str]) -> list[WanLine]:
        """Return the links that the words of a command mean.

        Raises:
            SettingsError: a word means none.
        """
        return [self.lines[name] for name in impairments.meant(words, list(self.lines))]

    def cut(self, lines: Iterable[WanLine]) -> None:
        """Cut links until they are healed."""
        for line in lines:
            line.cut = True
            line.apply()

    def heal(self, lines: Iterable[WanLine]) -> None:
        """End every cut that lasts, a schedule's too. Cuts that a schedule has yet to make will come."""
        for line in lines:
            line.cut = False
            line.lasting = [failure for failure in line.lasting if failure.kind != impairments.CUT]
            line.apply()

    def set(self, lines: Iterable[WanLine], changes: Mapping[str, Any], slow: float | None) -> None:
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

    async def play(self, tape: FailureTape, tell: Callable[[Turn, list[str]], Awaitable[None]]) -> None:
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
