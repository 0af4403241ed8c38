"""A relay on real sockets, and the servers that it leads to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.pace import DEADLINE_S

from diloco.process import observe
from diloco_ops.wan import control
from diloco_ops.wan.config import checked
from diloco_ops.wan.connection import address_of
from diloco_ops.wan.control import Control, asked
from diloco_ops.wan.relay import Relay

TRAFFIC = ("bulk", "control")
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Target:
    """A server in a region, and the connections that it accepted."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[Stream] = asyncio.Queue()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = address_of(self._server)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.put_nowait((reader, writer))

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()


@dataclass
class RelayWorld:
    """A relay between us and eu, with a route for bulk and one for control that lead to ``target``, and a third region."""

    relay: Relay
    at: str
    target: Target
    streams: list[Stream] = field(default_factory=list)  # to be closed at the end

    async def connect(self, traffic: str = "bulk") -> Stream:
        return self._kept(await asyncio.open_connection(*self.relay.addresses[TRAFFIC.index(traffic)].split(":")))

    async def accept(self) -> Stream:
        return self._kept(await asyncio.wait_for(self.target.connections.get(), DEADLINE_S))

    async def pair(self, traffic: str = "bulk") -> tuple[Stream, Stream]:
        """A connection: the client's end and the target's."""
        return await self.connect(traffic), await self.accept()

    async def command(self) -> Stream:
        return self._kept(await asyncio.open_connection(*self.at.split(":")))

    def _kept(self, stream: Stream) -> Stream:
        self.streams.append(stream)
        return stream

    def link(self, name: str) -> dict[str, Any]:
        links: dict[str, dict[str, Any]] = self.relay.status(self.relay.lines.values())["links"]
        return links[name]

    async def ask(self, request: control.Request) -> list[dict[str, Any]]:
        return await asyncio.to_thread(lambda: list(asked(self.at, request)))

    async def until(self, name: str, key: str, value: object) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.link(name)[key] != value:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def relay_world(address: str | None = None, **defaults: Any) -> AsyncIterator[RelayWorld]:
    target = Target()
    await target.start()
    ends = {"listen": "127.0.0.1:0", "target": address or target.address}
    routes = [{"from": "us", "to": "eu", "traffic": traffic} | ends for traffic in TRAFFIC]
    routes.append({"from": "us", "to": "ap", "traffic": "bulk"} | ends)
    made = Relay(checked({"defaults": defaults, "routes": routes}, "test"), observe.get_logger())
    commands = Control(made)
    await made.start()
    there = RelayWorld(made, await commands.start("127.0.0.1:0"), target)
    try:
        yield there
    finally:
        close_streams(*there.streams)
        await commands.close()
        await made.close()
        await target.close()


def close_streams(*streams: Stream) -> None:
    for _, writer in streams:
        writer.close()
