"""Fixtures over a real nats-server; there is no stand-in for it anywhere in the tests."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.made.fixtures import MakeServer
from xdist.scheduler import LoadScopeScheduling

from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import get_logger
from diloco_ops.broker.server import Server

# how fast a machine is, is no test's matter; `make test-all` tries the usual number of examples
settings.register_profile("some", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=20)
settings.register_profile("all", settings.get_profile("some"), max_examples=100)
settings.load_profile("some")

TESTS = Path(__file__).parent
SPREAD = ("services", "simulation")  # their tests take long, and begin first; what is short fills the gaps at the end
# services' files whose tests share what takes long to make
TOGETHER = ("damage", "doctor", "insider_limits", "security", "up", "verify")
LONGEST_S = 1800  # of a test that is slow or makes containers
EARLIER_S = 40  # an event loop ends its test so much before pytest-timeout would


class Spread(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist is not typed
    """Gives a worker whole files, but tests that take long one by one.

    ``--dist loadgroup`` would do, but for pytest 9.2, which no longer lets pytest-xdist 3.8 rename tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        *_, folder, name = ("", *file.split("/"))
        alone = folder in SPREAD and name.removeprefix("test_").removesuffix(".py") not in TOGETHER
        return nodeid if alone else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread:
    return Spread(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        import diloco.core.kernels  # noqa: F401 - compiled here, once, and not by every worker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] not in SPREAD)
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("compose"):
            item.add_marker(pytest.mark.timeout(LONGEST_S))
        own = item.get_closest_marker("timeout")
        limit_s = float(item.config.getini("timeout") if own is None else own.args[0]) - EARLIER_S
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _limited(item.obj, limit_s)


def _limited(test: Callable[..., Awaitable[None]], limit_s: float) -> Callable[..., Awaitable[None]]:
    """End a test in its own event loop: an error that pytest-timeout raises from a signal is lost if a callback runs."""

    @functools.wraps(test)
    async def limited(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(limit_s):
            await test(*args, **kwargs)

    return limited


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Take back the destination and level of events that a command has set: the next test reads them all."""
    yield
    observe.reset()


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
