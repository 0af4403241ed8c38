"""Limits of connections per source address in front of a server: a stranger, a member and a server, each in a network."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S
from tests.services.secured import put

from diloco_ops.broker.server import find_binary
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who

pytestmark = pytest.mark.services

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVER, MEMBER, STRANGER = "10.213.7.1", "10.213.7.2", "10.213.7.3"
MOST = 200  # connections that the server may have: as many as two addresses' limits, so that one cannot use them up
STRANGERS = 400
FULL = "maximum connections exceeded"  # in a server's log

HOLD = textwrap.dedent(
    """
    import select, socket, sys, time

    held = []
    def more():
        one = socket.socket()
        one.setblocking(False)
        one.bind((sys.argv[1], 0))
        one.connect_ex((sys.argv[2], 4222))
        held.append(one)

    for _ in range(int(sys.argv[3])):
        more()
    print("trying", flush=True)
    while True:  # the server closes those that say nothing
        for one in select.select(held, [], [], 0.05)[0]:
            try:
                if one.recv(4096):
                    continue
            except OSError:
                pass
            held.remove(one)
            one.close()
            more()
    """
)
COME = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from diloco.nats import identity
    from diloco.nats.transport import NatsTransport
    from diloco.process.observe import get_logger

    async def come():
        own = identity.load(Path(sys.argv[2]))
        link = await NatsTransport.open(sys.argv[1], sys.argv[1], own.name, get_logger(), float(sys.argv[3]), own)
        await link.close()

    asyncio.run(come())
    """
)

ACCEPT = """
import socket

server, held = socket.create_server(("", 4222), backlog=512), []
print("ready", flush=True)
while True:
    held.append(server.accept())
"""
CONNECT = """
import socket, sys

held = [socket.create_connection((sys.argv[1], 4222), 3) for _ in range(int(sys.argv[2]))]
print(len(held))
"""


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=DEADLINE_S)


class Networks:
    """Networks of this machine's kernel, on one switch: each has an address and no other way out."""

    def __init__(self) -> None:
        self.names = {place: f"dlc{os.getpid()}{place}" for place in ("switch", "server", "member", "stranger")}

    def make(self) -> bool:
        """Make them; return False if this process may not."""
        if any(run("ip", "netns", "add", name).returncode for name in self.names.values()):
            return False
        made = [("switch", "link", "add", "bridge", "type", "bridge"), ("switch", "link", "set", "bridge", "up")]
        for place, address in (("server", SERVER), ("member", MEMBER), ("stranger", STRANGER)):
            made += [
                ("switch", "link", "add", place, "type", "veth", "peer", "name", "eth0", "netns", self.names[place]),
                ("switch", "link", "set", place, "master", "bridge", "up"),
                (place, "link", "set", "lo", "up"),
                (place, "addr", "add", f"{address}/24", "dev", "eth0"),
                (place, "link", "set", "eth0", "up"),
            ]
        return not any(run("ip", "-n", self.names[place], *command).returncode for place, *command in made)

    def within(self, place: str) -> list[str]:
        """Return how a command is run in a network."""
        return ["ip", "netns", "exec", self.names[place]]

    def remove(self) -> None:
        for name in self.names.values():
            run("ip", "netns", "del", name)


@pytest.fixture
def networks() -> Iterator[Networks]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "nft"))):
        pytest.skip("needs root, ip and nft")
    made = Networks()
    try:
        if not made.make():
            pytest.skip("the kernel grants no networks")
        yield made
    finally:
        made.remove()


def until_said(log: Path, said: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until a log has a text; fails at once if the process that writes it has ended."""
    until = datetime.now(UTC) + timedelta(seconds=DEADLINE_S)
    while said not in log.read_text():
        assert process is None or process.poll() is None, log.read_text()
        assert datetime.now(UTC) < until, log.read_text()
        time.sleep(0.05)


@contextlib.contextmanager
def running(*command: str | Path, said: str, log: Path) -> Iterator[None]:
    """Run a process until the block ends, from when it has said something on."""
    with log.open("wb") as file:
        process = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file)
    try:
        until_said(log, said, process)
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("limited", [True, False], ids=["with the rules", "without"])
def test_a_stranger_s_connections_keep_no_member_out(networks: Networks, tmp_path: Path, limited: bool) -> None:
    keys = Folder.make(tmp_path / "keys", "demo", [])
    keys.put_server("nats", [SERVER], [], datetime.now(UTC) + timedelta(hours=1))
    identity = put(keys, Who("learner-0", "learner"))
    folder = tmp_path / "server"
    shutil.copytree(keys.server_folder("nats"), folder / "keys")
    text = (DEPLOY / "datacenter" / "nats.conf").read_text()
    assert "max_connections: 4096" in text
    (folder / "nats.conf").write_text(text.replace("max_connections: 4096", f"max_connections: {MOST}"))
    in_server, in_stranger = networks.within("server"), networks.within("stranger")
    if limited:
        loaded = run(*in_server, "nft", "-f", DEPLOY / "firewall" / "servers.nft")
        assert loaded.returncode == 0, loaded.stderr
    server = ["sh", "-c", f"cd {folder} && exec {find_binary()} -c nats.conf -sd {folder}/data"]
    hold = [sys.executable, "-c", HOLD, STRANGER, SERVER, str(STRANGERS)]
    with (
        running(*in_server, *server, said="Server is ready", log=tmp_path / "server.log"),
        running(*in_stranger, *hold, said="trying", log=tmp_path / "stranger.log"),
    ):
        log = tmp_path / "server.log"
        come = [sys.executable, "-c", COME, f"tls://{SERVER}:4222", identity, 10.0 if limited else 3.0]
        if not limited:
            until_said(log, FULL)
        # a server without the rules ends silent connections after a while, so a member may come in by luck
        for _ in range(1 if limited else 5):
            came = run(*networks.within("member"), *come)
            if came.returncode:
                break
    assert (came.returncode == 0) == limited, came.stderr
    if limited:
        assert FULL not in log.read_text()
        counted = run(*in_server, "nft", "list", "chain", "inet", "diloco", "servers").stdout
        assert "drop" in counted


def test_members_of_one_address_connect_again_at_once(networks: Networks, tmp_path: Path) -> None:
    """64 services behind one address have 128 connections, and all of them come at once when their server is back."""
    in_server = networks.within("server")
    assert run(*in_server, "nft", "-f", DEPLOY / "firewall" / "servers.nft").returncode == 0
    with running(*in_server, sys.executable, "-c", ACCEPT, said="ready", log=tmp_path / "server.log"):
        came = run(*networks.within("member"), sys.executable, "-c", CONNECT, SERVER, 128)
        too_many = run(*networks.within("stranger"), sys.executable, "-c", CONNECT, SERVER, 129)
    assert came.stdout == "128\n", came.stderr
    assert "timed out" in too_many.stderr
