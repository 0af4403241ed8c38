"""The servers' configurations of ``deploy/`` with keys of ``diloco keys``: real servers, started as compose.yml starts them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.pace import DEADLINE_S
from tests.services.secured import HOST, make_keys, put

from diloco.errors import BrokerError
from diloco.nats import identity
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.process.retry import until_available
from diloco.wire.subjects import Subjects
from diloco_ops.broker.server import find_binary, free_ports
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import CONTROL, Who
from diloco_ops.up.supervise import OrphanGuard

pytestmark = pytest.mark.services

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIGURATIONS = DEPLOY / "datacenter"
REGIONS = ("us", "eu", "ap")


class Started:
    """A server in a folder of its own, which has its configuration and its keys."""

    def __init__(
        self, folder: Path, config: str, keys: Path, port: int, *arguments: str, route_port: int = 6222, in_image: bool = False
    ) -> None:
        """``in_image``: by the script with which its container begins, which logs to a file."""
        self.health_port = health_port = free_ports(1)[0]
        folder.mkdir()
        shutil.copytree(keys, folder / "keys")
        for name in ("nats.conf", "control.conf"):
            text = (CONFIGURATIONS / name).read_text().replace("0.0.0.0:6222", f"{HOST}:{route_port}")
            (folder / name).write_text(text.replace("127.0.0.1:8222", f"127.0.0.1:{health_port}"))
        self.folder, self.keys, self.url = folder, keys, f"tls://{HOST}:{port}"
        self._log = (folder / "log").open("wb")
        # paths in the configuration are relative to where it is started
        command = [str(find_binary()), "-c", config, "-sd", "data", "-a", HOST, "-p", str(port), *arguments]
        if in_image:
            script = (DEPLOY / "images" / "serve").read_text().replace("/data/", f"{folder}/data/")
            (folder / "data").mkdir()
            command = ["sh", "-c", script.replace("exec nats-server", f"exec {command[0]}"), "serve", *command[1:]]
        # a group of its own, in which the script's `tail` ends, too
        self.process = subprocess.Popen(command, cwd=folder, stdout=self._log, stderr=self._log, process_group=0)
        self.guard = OrphanGuard()
        self.guard.watch([self.process.pid])

    def reload(self) -> None:
        """Give it the keys as they are now, as a bundle and SIGHUP do."""
        shutil.copytree(self.keys, self.folder / "keys", dirs_exist_ok=True)
        self.process.send_signal(signal.SIGHUP)
        end_s = time.monotonic() + DEADLINE_S
        while "Reloaded server configuration" not in (self.folder / "log").read_text():
            assert time.monotonic() < end_s, "the server has not read its configuration again"
            time.sleep(0.02)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
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
async def connected(url: str, file: Path, give_up_after_s: float = DEADLINE_S) -> AsyncIterator[NatsTransport]:
    known = identity.load(file)
    link = await NatsTransport.open(url, url, known.name, get_logger(), give_up_after_s, known)
    yield link
    await link.close()


async def test_a_region_s_server_lets_in_who_was_added_since_it_started(tmp_path: Path, started: list[Started]) -> None:
    keys = make_keys(tmp_path / "operator", "demo", [Who("coordinator", "coordinator", None, True)], servers={"nats": []})
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


async def test_what_a_server_denies_is_counted_by_the_name_of_the_identity(tmp_path: Path, started: list[Started]) -> None:
    """A server as its container starts it, whose log is rotated every few lines, and ``diloco-server-watch`` beside it."""
    keys = make_keys(tmp_path / "operator", "demo", [Who("learner-0", "learner")], servers={"nats": []})
    port, metrics_port = free_ports(2)
    arguments = ("--log_size_limit", "4000")
    server = Started(tmp_path / "nats", "nats.conf", keys.server_folder("nats"), port, *arguments, in_image=True)
    started.append(server)
    with watching(server, metrics_port) as told:
        async with connected(server.url, keys.identity_file("learner-0")) as link:
            async with asyncio.timeout(DEADLINE_S):
                while not await asyncio.to_thread(told):  # it counts what is denied from then on
                    await asyncio.sleep(0.1)
                for number in range(40):
                    await link.publish(Subjects("demo").shard("syncer-0"), str(number).encode())
                wanted = {("learner-0", "publish", Subjects("demo").shard("syncer-0")): 40.0}
                while violations(found := await asyncio.to_thread(told)) != wanted:
                    assert not violations(found).keys() - wanted.keys()
                    await asyncio.sleep(0.1)
    assert len(list((server.folder / "data").glob("server.log.*"))) > 1
    assert (server.folder / "log").read_text().count("Publish Violation") > 20  # `tail` may miss what is rotated away at once


def violations(metrics: str) -> dict[tuple[str, str, str], float]:
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    return {
        (sample.labels["identity"], sample.labels["action"], sample.labels["subject"]): sample.value
        for sample in samples
        if sample.name == "diloco_server_violations_total"
    }


@contextlib.contextmanager
def watching(server: Started, metrics_port: int) -> Iterator[Callable[[], str]]:
    """``diloco-server-watch`` beside a server; what is returned gets its metrics, or nothing while it does not answer yet."""
    values = {
        "NAME": "nats-us",
        "RUN": "demo",
        "LOG_TO": "stderr",
        "METRICS_ADDRESS": f"{HOST}:{metrics_port}",
        "MONITOR_ADDRESS": f"127.0.0.1:{server.health_port}",
        "STORE_DIR": str(server.folder / "data"),
        "LOG_FILE": str(server.folder / "data" / "server.log"),
        "LISTS_FILE": str(server.folder / "keys" / "auth.conf"),
    }
    environment = os.environ | {f"DILOCO_{name}": value for name, value in values.items()}
    watch = subprocess.Popen([Path(sys.executable).parent / "diloco-server-watch"], env=environment)

    def told() -> str:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{metrics_port}/metrics", timeout=DEADLINE_S) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    try:
        yield told
    finally:
        watch.terminate()
        assert watch.wait(DEADLINE_S) == 0


async def pass_signals(urls: list[str], keys: Folder) -> None:
    """Have processes at three servers of a cluster hear, ask and answer one another."""
    names, heard = Subjects("demo"), asyncio.Event()
    async with (
        connected(urls[0], keys.identity_file("coordinator")) as coordinator,
        connected(urls[1], keys.identity_file("syncer-eu-0")) as syncer,
        connected(urls[2], keys.identity_file("ada")) as operator,
    ):

        async def answer(message: Any) -> None:
            await message.respond(b"all is well")

        async def note(message: Any) -> None:
            heard.set()

        await coordinator.serve(names.status, answer)
        await coordinator.subscribe(names.shard(), note)
        async with asyncio.timeout(DEADLINE_S):
            while not heard.is_set():  # the others' interest is told along the routes
                await syncer.publish(names.shard("syncer-eu-0"), b"alive")
                await asyncio.sleep(0.05)
            while await operator.request(names.status, b"", 1.0) != b"all is well":
                await asyncio.sleep(0.05)


async def test_three_servers_make_one_control_store_over_routes_with_certificates(
    tmp_path: Path, started: list[Started]
) -> None:
    names = [f"control-{region}" for region in REGIONS]
    who = [Who("coordinator", "coordinator", "us", True), Who("syncer-eu-0", "syncer", "eu"), Who("ada", "operator")]
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
        bucket = await until_available(making, get_logger())
        await until_available(partial(bucket.put, "run", b"{}"), get_logger())
    await pass_signals([server.url for server in started], keys)
    started[0].end()
    # what one of them held, the others have
    async with connected(urls, keys.identity_file("syncer-eu-0")) as link:
        finding = partial(link.bucket, Subjects("demo").bucket, create=False)
        found = await until_available(finding, get_logger())
        stored = await until_available(partial(found.get, "run"), get_logger())
        assert stored is not None
        assert stored[0] == b"{}"


INTRUDER = """
listen: "{host}:{port}"
cluster {{
  name: control, listen: "{host}:{route}", no_advertise: true, routes: [ {routes} ]
  tls {{ cert_file: "own.pem", key_file: "own.key", ca_file: "ca.pem", verify: true, timeout: 5 }}
}}
accounts {{ RUN {{ users: [ {{ user: "x", password: "x" }} ] }} }}
"""


def disguise(folder: Path, keys: Folder, name: str) -> None:
    """Put the certificate of an identity or of a server, its key and its authority where a server of one's own looks."""
    folder.mkdir()
    if keys.roster.server(name) is None:
        values = tomllib.loads(keys.identity_file(name).read_text())
        found = [values[what] for what in ("certificate", "private_key", "ca")]
    else:
        found = [(keys.server_folder(name) / file).read_text() for file in ("server.pem", "server.key", "ca.pem")]
    for file, text in zip(("own.pem", "own.key", "ca.pem"), found, strict=True):
        (folder / file).write_text(text)


def started_by_hand(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([str(find_binary()), "-c", "nats.conf"], cwd=folder, stdout=log, stderr=log)


@pytest.mark.parametrize(
    "intruder", ["learner-us-0", "nats-us", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ada", "stranger"))]
)
async def test_nobody_but_a_control_server_is_a_route_of_the_control_store(
    tmp_path: Path, started: list[Started], intruder: str
) -> None:
    """A route has every right in every account: a server of one's own overwrites the run's settings."""
    people = [Who("coordinator", "coordinator", "us", True), Who("learner-us-0", "learner", "us"), Who("ada", "operator")]
    places = {f"control-{region}": [CONTROL] for region in REGIONS} | {"nats-us": ["us"]}
    keys = make_keys(tmp_path / "operator", "demo", people, regions=REGIONS, servers=places)
    strangers = make_keys(tmp_path / "other", "demo", [], regions=REGIONS, servers={"stranger": [CONTROL]})
    own, ports, routes = tmp_path / "own", free_ports(4), free_ports(4)
    for i, region in enumerate(REGIONS):
        others = ",".join(f"tls://{HOST}:{port}" for port in routes[:3] if port != routes[i])
        arguments = ("--name", f"control-{region}", "--routes", others)
        folder = keys.server_folder(f"control-{region}")
        started.append(Started(tmp_path / region, "control.conf", folder, ports[i], *arguments, route_port=routes[i]))
    disguise(own, strangers if intruder == "stranger" else keys, intruder)
    (own / "ca.pem").write_text((keys.path / "ca.pem").read_text())  # it has nothing against the others
    listed = ", ".join(f'"tls://{HOST}:{port}"' for port in routes[:3])
    (own / "nats.conf").write_text(INTRUDER.format(host=HOST, port=ports[3], route=routes[3], routes=listed))
    async with connected(",".join(server.url for server in started), keys.identity_file("coordinator")) as link:
        making = partial(link.bucket, Subjects("demo").bucket, create=True, replicas=3)
        bucket = await until_available(making, get_logger())
        await until_available(partial(bucket.put, "run", b"{}"), get_logger())
        server = started_by_hand(own)
        try:
            client = await nats.connect(f"nats://x:x@{HOST}:{ports[3]}", max_reconnect_attempts=-1, reconnect_time_wait=0.1)
            refused = re.compile(r"certificate not pinned|unknown authority")
            async with asyncio.timeout(DEADLINE_S):
                while not all(refused.search((one.folder / "log").read_text()) for one in started):
                    await client.publish(f"$KV.{Subjects('demo').bucket}.run", b"spoilt")
                    await client.flush()
                    found = await bucket.get("run")
                    assert found is not None
                    assert found[0] == b"{}"
            await client.close()
        finally:
            server.kill()
            server.wait()
