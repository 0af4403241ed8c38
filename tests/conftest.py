"""Fixtures over a real nats-server; there is no stand-in for it anywhere in the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from diloco.nats.server import Server
from diloco.nats.transport import NatsTransport
from diloco.observe import get_logger

# how fast a machine is, is no test's matter
settings.register_profile("diloco", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("diloco")

MakeServer = Callable[..., Server]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests share: they use names of their own, and leave it running."""
    server = Server(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """``make_server()``: a server of the test's own, to be frozen, killed or filled; its arguments are those of Server."""
    servers: list[Server] = []

    def make(*, start: bool = True, port: int | None = None, max_file_bytes: int | None = None) -> Server:
        server = Server(tmp_path / f"nats-{len(servers)}", port, max_file_bytes=max_file_bytes)
        servers.append(server)
        if start:
            server.start()
        return server

    yield make
    for server in servers:
        server.kill()  # also ends a frozen one


@pytest.fixture
async def link(nats_server: Server) -> AsyncIterator[NatsTransport]:
    """Connections to the shared server."""
    opened = await NatsTransport.open(nats_server.url, nats_server.url, "test", get_logger(), give_up_after_s=10)
    yield opened
    await opened.close()
