"""The servers' configurations of ``deploy/`` with keys of ``diloco keys``: real servers, started as compose.yml starts them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.services.secured import HOST, make_keys, put

from diloco import identity
from diloco.errors import BrokerError
from diloco.nats.server import find_binary, free_ports
from diloco.nats.transport import NatsTransport
from diloco.observe import get_logger
from diloco.patience import patiently
from diloco.supervise import Guard
from diloco.wire.subjects import Subjects
from diloco_coordinator.keys.folder import Folder
from diloco_coordinator.keys.permissions import CONTROL, Who

CONFIGURATIONS = Path(__file__).parents[2] / "deploy" / "datacenter"
REGIONS = ("us", "eu", "ap")
STARTS_S = 60.0


class Started:
    """A server in a folder of its own, which has its configuration and its keys."""

    def __init__(self, folder: Path, config: str, keys: Path, port: int, *arguments: str, route_port: int = 6222) -> None:
        health_port = free_ports(1)[0]
        folder.mkdir()
        shutil.copytree(keys, folder / "keys")
        for name in ("nats.conf", "control.conf"):
            text = (CONFIGURATIONS / name).read_text().replace("0.0.0.0:6222", f"{HOST}:{route_port}")
            (folder / name).write_text(text.replace("127.0.0.1:8222", f"127.0.0.1:{health_port}"))
        self.folder, self.keys, self.url = folder, keys, f"tls://{HOST}:{port}"
        self._log = (folder / "log").open("wb")
        # paths in the configuration are relative to where it is started
        command = [str(find_binary()), "-c", config, "-sd", "data", "-a", HOST, "-p", str(port), *arguments]
        self.process = subprocess.Popen(command, cwd=folder, stdout=self._log, stderr=self._log)
        self.guard = Guard()
        self.guard.watch([self.process.pid])

    def reload(self) -> None:
        """Give it the keys as they are now, as a bundle and SIGHUP do."""
        shutil.copytree(self.keys, self.folder / "keys", dirs_exist_ok=True)
        self.process.send_signal(signal.SIGHUP)
        end_s = time.monotonic() + STARTS_S
        while "Reloaded server configuration" not in (self.folder / "log").read_text():
            assert time.monotonic() < end_s, "the server has not read its configuration again"
            time.sleep(0.02)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.guard.release()
        self._log.close()


@pytest.fixture
def started() -> Iterator[list[Started]]:
    made: list[Started] = []
    yield made
    for server in made:
        server.end()


@contextlib.asynccontextmanager
async def connected(url: str, file: Path, give_up_after_s: float = STARTS_S) -> AsyncIterator[NatsTransport]:
    known = identity.load(file)
    link = await NatsTransport.open(url, url, known.name, get_logger(), give_up_after_s, known)
    yield link
    await link.close()


async def test_a_region_s_server_lets_in_who_was_added_since_it_started(tmp_path: Path, started: list[Started]) -> None:
    keys = make_keys(tmp_path / "operator", "demo", [Who("coordinator", "coordinator")], servers={"nats": []})
    server = Started(tmp_path / "nats", "nats.conf", keys.server_folder("nats"), free_ports(1)[0])
    started.append(server)
    async with connected(server.url, keys.identity_file("coordinator")) as link:
        bucket = await link.bucket(Subjects("demo").bucket, create=True)
        await bucket.put("run", b"{}")
    late = put(keys, Who("learner-0", "learner"))
    with pytest.raises(BrokerError, match="does not know the identity"):
        async with connected(server.url, late):
            pass
    server.reload()
    async with connected(server.url, late) as link:
        found = await link.bucket(Subjects("demo").bucket, create=False)
        assert await found.get("run") == (b"{}", 1)
    with pytest.raises(BrokerError):
        await NatsTransport.open(server.url, server.url, "plain", get_logger(), 3)


async def test_three_servers_make_one_control_store_over_routes_with_certificates(
    tmp_path: Path, started: list[Started]
) -> None:
    names = [f"control-{region}" for region in REGIONS]
    who = [Who("coordinator", "coordinator", "us"), Who("syncer-eu-0", "syncer", "eu")]
    keys: Folder = make_keys(tmp_path / "operator", "demo", who, regions=REGIONS, servers={name: [CONTROL] for name in names})
    ports, routes = free_ports(3), free_ports(3)
    for i, name in enumerate(names):
        others = ",".join(f"tls://{HOST}:{port}" for port in routes if port != routes[i])
        folder = keys.server_folder(name)
        arguments = ("--name", name, "--routes", others)
        started.append(Started(tmp_path / name, "control.conf", folder, ports[i], *arguments, route_port=routes[i]))
    urls = ",".join(server.url for server in started)
    async with connected(urls, keys.identity_file("coordinator")) as link:
        # a cluster that has no leader yet does not answer
        making = partial(link.bucket, Subjects("demo").bucket, create=True, replicas=3)
        bucket = await patiently(making, get_logger())
        await patiently(partial(bucket.put, "run", b"{}"), get_logger())
    started[0].end()
    # what one of them held, the others have
    async with connected(urls, keys.identity_file("syncer-eu-0")) as link:
        finding = partial(link.bucket, Subjects("demo").bucket, create=False)
        found = await patiently(finding, get_logger())
        stored = await patiently(partial(found.get, "run"), get_logger())
        assert stored is not None
        assert stored[0] == b"{}"
