"""What is passed on of a NATS server's answers, and what an answer may not do."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from diloco.errors import FormatError
from diloco.process.observe import get_logger
from diloco.settings.service import ServerWatchSettings
from diloco_coordinator.server_watch.figures import MAX_ANSWER_BYTES, ServerFigures, figures, read_answer
from diloco_coordinator.server_watch.server_metrics import METRICS
from diloco_coordinator.server_watch.service import ServerRestartedError, ServerWatch

VARZ: dict[str, Any] = {
    "server_id": "NAKA",
    "version": "2.15.1",
    "start": "2026-11-28T06:31:58.594539748Z",
    "mem": 15884288,
    "connections": 7,
    "max_connections": 4096,
    "max_subscriptions": 1024,
    "slow_consumers": 2,
    "in_bytes": 1000,
    "out_bytes": 4000,
    "tls_cert_not_after": "2027-11-28T00:00:00Z",
    "connect_urls": ["10.0.0.3:4222"],
}
JSZ: dict[str, Any] = {
    "streams": 3,
    "messages": 20,
    "storage": 5000,
    "api": {"total": 100, "errors": 4},
    "config": {"max_storage": 1 << 30, "store_dir": "/data/jetstream"},
    "meta_cluster": {"leader": "control-us"},
}
SEEN = ServerFigures(
    version="2.15.1",
    began_s=1795847518.594539,
    memory_bytes=15884288,
    connections=7,
    max_connections=4096,
    slow_consumers=2,
    received_bytes=1000,
    sent_bytes=4000,
    streams=3,
    messages=20,
    stored_bytes=5000,
    max_stored_bytes=1 << 30,
    api_errors=4,
    certificate_ends_s=1827360000.0,
)


def encoded(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode()


def test_named_figures_are_passed_on_alone() -> None:
    assert figures(encoded(VARZ), encoded(JSZ)) == SEEN
    plain = {name: value for name, value in VARZ.items() if name != "tls_cert_not_after"}
    assert figures(encoded(plain), encoded(JSZ)).certificate_ends_s is None


@pytest.mark.parametrize(
    ("varz", "missing"),
    [
        ({"max_connections": 65536}, ("max_connections",)),
        ({"max_connections": 65536, "max_subscriptions": 0}, ("max_connections", "max_subscriptions")),
        ({"max_subscriptions": None}, ("max_subscriptions",)),
    ],
)
def test_limits_that_a_server_s_configuration_lacks_are_named(varz: dict[str, Any], missing: tuple[str, ...]) -> None:
    assert figures(encoded(VARZ | varz), encoded(JSZ)).missing_limits == missing


@pytest.mark.parametrize(
    ("varz", "jsz", "said"),
    [
        ({"mem": -1}, {}, "mem is not a number"),
        ({"mem": True}, {}, "mem is not a number"),
        ({"mem": 1.5}, {}, "mem is not a number"),
        ({"mem": 1 << 63}, {}, "mem is not a number"),
        ({"connections": "7"}, {}, "connections is not a number"),
        ({"version": 'x"} 1\nup{'}, {}, "version is none"),
        ({"version": "2.15"}, {}, "version is none"),
        ({"start": "yesterday"}, {}, "start is not a time"),
        ({"start": 5}, {}, "start is not a time"),
        ({}, {"config": None}, "config.max_storage is not a number"),
        ({}, {"api": []}, "api.errors is not a number"),
    ],
)
def test_a_figure_that_is_none_is_named(varz: dict[str, Any], jsz: dict[str, Any], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        figures(encoded(VARZ | varz), encoded(JSZ | jsz))


def test_answers_of_http() -> None:
    assert read_answer(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}") == (200, b"{}")
    assert read_answer(b"HTTP/1.1 503 Service Unavailable\r\n\r\n") == (503, b"")
    for wrong in (b"", b"INFO {}\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{}"):
        with pytest.raises(FormatError):
            read_answer(wrong)
    with pytest.raises(FormatError, match="more than 262144 bytes"):
        read_answer(b"HTTP/1.0 200 OK\r\n\r\n" + MAX_ANSWER_BYTES * b" ")


@asynccontextmanager
async def monitoring(answers: dict[str, bytes]) -> AsyncIterator[str]:
    """A port that answers with these bytes, by path; None closes it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(answers[asked.split()[1].decode()])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + body


def watching(address: str, folder: Path, **settings: Any) -> ServerWatch:
    about = ServerWatchSettings(name="nats-us", monitor_address=address, store_dir=folder, **settings)
    return ServerWatch(about, get_logger(), {"run": "r", "name": "nats-us", "region": "us"})


def values(watch: ServerWatch) -> dict[str, Any]:
    return {metric.name: metric.value(watch.newest) for metric in METRICS}


async def test_a_look_has_what_the_server_says_and_its_disk(tmp_path: Path) -> None:
    answers = {"/varz": ok(encoded(VARZ)), "/jsz": ok(encoded(JSZ)), "/healthz": ok(b'{"status":"ok"}')}
    async with monitoring(answers) as address:
        watch = watching(address, tmp_path, memory_bytes=1 << 30, alive_file=tmp_path / "alive")
        assert watch.waits_for() == f"the server's monitoring port {address}"
        await watch.look()
        assert watch.waits_for() is None
        found = values(watch)
        assert (found["diloco_server_up"], found["diloco_server_healthy"]) == (1, 1)
        assert found["diloco_server_memory_limit_bytes"] == 1 << 30
        assert 0 <= found["diloco_server_disk_free_bytes"] <= found["diloco_server_disk_size_bytes"]
        assert found["diloco_server_info"] == {("2.15.1",): 1}
        assert (tmp_path / "alive").exists()
        answers["/healthz"] = b'HTTP/1.0 503 Service Unavailable\r\n\r\n{"status":"unavailable"}'
        await watch.look()
        assert (values(watch)["diloco_server_up"], values(watch)["diloco_server_healthy"]) == (1, 0)


async def test_a_closed_port_and_a_wrong_answer_are_logged_once_until_it_answers_again(tmp_path: Path) -> None:
    answers = {"/varz": ok(b"[]"), "/jsz": ok(encoded(JSZ)), "/healthz": ok(b"")}
    with capture_logs() as logged:
        async with monitoring(answers) as address:
            watch = watching(address, tmp_path)
            for _ in range(3):
                await watch.look()
            answers["/varz"] = ok(encoded(VARZ))
            await watch.look()
        for _ in range(3):
            await watch.look()
    told = [(event["event"], event.get("reason")) for event in logged]
    assert told == [
        ("server_silent", "/varz: not a JSON object"),
        ("server_answers", None),
        ("server_silent", "Connection refused"),
    ]
    assert values(watch)["diloco_server_up"] == 0
    assert values(watch)["diloco_server_connections"] is None  # nothing old is passed on


async def test_it_ends_to_follow_a_server_that_was_started_again_out_of_reach(tmp_path: Path) -> None:
    pid_file = tmp_path / "nats.pid"
    pid_file.write_text("1")
    async with monitoring({"/varz": b""}) as address:
        watch = watching(address, tmp_path, pid_file=pid_file)
        assert watch._began_s == pytest.approx(time.time(), abs=3600)
        os.utime(pid_file, (watch._began_s + 1, watch._began_s + 1))
        with pytest.raises(ServerRestartedError):
            await watch.work()
        os.utime(pid_file, (watch._began_s - 1, watch._began_s - 1))  # it has not been started again
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await watch.work()


def test_an_address_that_is_none_is_named_with_its_variable() -> None:
    with pytest.raises(ValueError, match=r"monitor_address \(DILOCO_MONITOR_ADDRESS\) = 'http://x': expected HOST:PORT"):
        ServerWatchSettings(name="nats", monitor_address="http://x")
