"""``diloco doctor`` at real servers: what is fine, what is named, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.made.fixtures import MakeServer
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.pace import DEADLINE_S
from tests.services.secured import make_keys, put, serving

from diloco.control import creation
from diloco.control.changes import append_changes
from diloco.control.creation import KnownRun
from diloco.core.run.changes import Action, Eject, Set
from diloco.core.run.tape import Header
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, build_map
from diloco.nats.identity import load
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.service import ProcessesSettings
from diloco.wire import framing
from diloco.wire.subjects import Subjects
from diloco_ops import cli
from diloco_ops.broker.server import Server, find_binary, free_port
from diloco_ops.doctor.check import Check, Role
from diloco_ops.doctor.doctor_command import doctor
from diloco_ops.doctor.examination import DoctorSettings, ServiceExamination
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import CONTROL, Who
from diloco_ops.wan.config import checked
from diloco_ops.wan.relay import Relay

RATE_BITS_PER_S, DELAY_S = 2e6, 0.02

# of runs that are short to listen to
QUICK: dict[str, Any] = {"liveness.heartbeat_s": 0.1, "liveness.takeover_s": 0.6, "log.keep_bytes": 0}
# 1000 blocks of 64 values, which take 34 bytes each in four bits
MAP = build_map([TensorSpec("w", (1000, 64))], 4)


@pytest.fixture
def name() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


async def create(
    transport: NatsTransport, name: str, settings: RunSettings | None = None, model: FragmentMap = MAP
) -> KnownRun:
    """A run that its first learner has joined."""
    run = await creation.create(transport, name, settings or run_settings(overrides=QUICK))
    await run.registry.create("map", model.pack())
    return run


async def examined(settings: DoctorSettings, step_s: float | None = None) -> dict[str, Check]:
    found = [check async for check in ServiceExamination(settings, None, step_s).checks()]
    assert len({check.name for check in found}) == len(found)
    return {check.name: check for check in found}


def named(found: dict[str, Check], verdict: str) -> list[str]:
    return [name for name, check in found.items() if check.verdict == verdict]


@contextlib.asynccontextmanager
async def alive(transport: NatsTransport, run: KnownRun, **steps_s: float) -> AsyncIterator[None]:
    """Learners that are heard, by name with the time of their steps; and a syncer."""
    subjects = Subjects(run.name)

    async def heartbeat() -> None:
        while True:
            for learner, step_s in steps_s.items():
                said: dict[str, Any] = {"incarnation": 0, "loss": 1.0, "software": "0.2.0", "step_s": step_s, "busy_s": 1.0}
                frame = framing.pack(learner_heartbeat(learner, **said), run.identity)
                await transport.publish(subjects.heartbeat(learner), frame)
            shard = shard_heartbeat("syncer-0", software="0.1.0")
            await transport.publish(subjects.shard("syncer-0"), framing.pack(shard, run.identity))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(heartbeat())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_process_of_a_learner_of_two_whose_mesh_does_not_divide_its_batches(
    link: NatsTransport, nats_server: Server, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    task = {"task.batch": 6, "task.layers": 1, "task.width": 64, "task.heads": 2, "task.context": 16}
    await create(link, name, run_settings(overrides=QUICK | task))
    processes = {"count": 2, "index": 0, "address": f"127.0.0.1:{free_port()}"}
    settings = DoctorSettings(
        name="learner-9", run=name, nats_url=nats_server.url, state_dir=tmp_path, processes=ProcessesSettings(**processes)
    )
    found = await examined(settings, step_s=1.0)
    assert named(found, "failed") == ["mesh"]
    assert found["mesh"].found.startswith("2 devices (cpu) here, 4 of 2 processes: task: a batch has 6 rows")
    assert "take a multiple of 4 rows a batch" in found["mesh"].found
    assert found["meeting"].verdict == "warning", "an address of this host alone"
    assert "jax " in found["facts"].found
    # of 64,000 parameters it carries half
    assert "32.0k values" in found["memory"].needed


async def test_a_learner_that_may_join(link: NatsTransport, nats_server: Server, name: str, tmp_path: Path) -> None:
    run = await create(link, name)
    before = {info.config.name: info.state.messages for info in await link.bulk.jetstream().streams_info()}
    settings = DoctorSettings(name="learner-9", run=name, nats_url=nats_server.url, state_dir=tmp_path / "state")
    async with alive(link, run, a=1.0, b=30.0, c=4.0):
        found = await examined(settings)
    assert named(found, "failed") == []
    assert re.fullmatch("4 members heard in .* s, of diloco 0.1.0, 0.2.0", found["members"].found)
    assert found["name"].found == "no process is called learner-9"
    assert found["run"].found == f"{name}: preset decoupled, 4 fragments, 64.0k parameters"
    # 34,000 bytes in 0.8 of 24 steps of 4 s, the median
    assert found["nats link"].needed == "0.00354 Mbit/s there, 0.00354 Mbit/s back, at 4 s a step"
    assert {found[check].verdict for check in ("nats link", "nats round", "nats storage", "nats room", "memory")} == {"ok"}
    assert found["nats clock"].verdict == "ok"  # it is this machine's own
    assert found["nats permissions"].found == "10 things that its role does are allowed"
    log = Subjects(name).log_stream
    assert found["nats limits"].verdict == "ok"
    api = link.bulk.jetstream()
    await api.update_stream((await api.stream_info(log)).config.evolve(max_msg_size=-1))  # as an older version made it
    older = (await examined(settings))["nats limits"]
    assert (older.verdict, older.found) == ("warning", f"{log}: max_msg_size = no limit, expected at most 1048576")
    # nothing is left: no message, no stream, no file
    assert {info.config.name: info.state.messages for info in await link.bulk.jetstream().streams_info()} == before
    assert os.listdir(tmp_path) == []


async def test_a_name_that_is_taken(link: NatsTransport, nats_server: Server, name: str, tmp_path: Path) -> None:
    run = await create(link, name)
    async with alive(link, run, a=0.1):
        for taken, role, said in (("a", "learner", "learner, stepping"), ("syncer-0", "syncer", "syncer, owner")):
            settings = DoctorSettings(name=taken, role=role, run=name, nats_url=nats_server.url, state_dir=tmp_path)
            found = await examined(settings)
            assert named(found, "failed") == ["name"]
            assert found["name"].found == f"{taken} is there already: {said}"


async def test_members_of_another_protocol(link: NatsTransport, nats_server: Server, name: str, tmp_path: Path) -> None:
    await create(link, name)
    frame = msgspec.msgpack.encode((framing.MAGIC, framing.VERSION + 1, "heartbeat", b"", b"", b"", b""))

    async def heartbeat() -> None:
        while True:
            await link.publish(Subjects(name).heartbeat("newer"), frame)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(heartbeat())
    found = await examined(DoctorSettings(name="a", run=name, nats_url=nats_server.url, state_dir=tmp_path))
    task.cancel()
    assert found["members"].verdict == "warning"
    assert (
        f"protocol version {framing.VERSION + 1}, expected {framing.VERSION}; update the older member" in found["members"].found
    )


async def test_a_run_that_is_another_one(link: NatsTransport, nats_server: Server, name: str, tmp_path: Path) -> None:
    run = await create(link, name)
    shared: dict[str, Any] = {"nats_url": nats_server.url, "state_dir": tmp_path}
    missing = await examined(DoctorSettings(name="a", run="nowhere", **shared))
    assert (missing["run"].verdict, missing["memory"].verdict) == ("warning", "skipped")
    assert "bucket DILOCO_nowhere: does not exist" in missing["run"].found
    new = await examined(DoctorSettings(name="a", role="coordinator", run="nowhere", **shared))
    assert new["run"].verdict == "ok"
    elsewhere = await examined(DoctorSettings(name="a", run=name, region="us", **shared))
    assert named(elsewhere, "failed") == ["run"]
    assert "not a region of run" in elsewhere["run"].found
    other = await examined(DoctorSettings(name="a", role="coordinator", run=name, settings=run_settings("diloco"), **shared))
    assert named(other, "failed") == ["run"]

    (tmp_path / "tapes").mkdir()
    (tmp_path / "tapes" / "a.tape").write_bytes(Header(framing.run_id("another", run.created.digest()), "a").pack())
    foreign = await examined(DoctorSettings(name="a", run=name, **shared))
    assert named(foreign, "failed") == ["state_dir"]
    assert "tapes/a.tape belongs to another run" in foreign["state_dir"].found


async def test_servers_that_are_none(tmp_path: Path) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    other = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    settings = DoctorSettings(
        name="syncer-0",
        role="syncer",
        nats_url=f"nats://127.0.0.1:{free_port()}",
        nats_bulk_url=f"nats://127.0.0.1:{port}",
        region="us",
        region_urls={"eu": "nats://no-such-host.invalid:4222", "ap": "http://127.0.0.1:4222"},
        state_dir=tmp_path,
    )
    found = await examined(settings)
    other.close()
    assert named(found, "failed") == ["control reach", "us server", "eu reach", "ap reach"]
    assert "Connection refused" in found["control reach"].found
    assert "not a NATS server: it answers b'220 mail.example ESMTP" in found["us server"].found
    assert "the name 'no-such-host.invalid' is not resolved" in found["eu reach"].found
    assert "not the address of a server" in found["ap reach"].found
    assert found["run"].verdict == "skipped"
    assert found["state_dir"].verdict == "ok"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """``start(configuration)``: the address of a server with just that, which listens."""
    running: list[subprocess.Popen[bytes]] = []

    def make(text: str) -> str:
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            if not running or running[-1].poll() is not None:  # it has ended: another one came to its port first
                port, config, said = free_port(), tmp_path / "nats.conf", tmp_path / "nats.log"
                config.write_text(f'listen: "127.0.0.1:{port}"\n{text}')
                with said.open("wb") as output:
                    running.append(subprocess.Popen([find_binary(), "-c", config], stderr=output))
            if "Server is ready" in said.read_text():
                return f"127.0.0.1:{port}"
            time.sleep(0.02)
        raise AssertionError(f"no server with {text}")

    yield make
    for process in running:
        process.kill()
        process.wait()


async def test_a_server_without_jetstream(start: Callable[[str], str], tmp_path: Path) -> None:
    url = start("")
    found = await examined(DoctorSettings(name="a", nats_url=url, state_dir=tmp_path / "state"))
    assert named(found, "failed") == ["nats server"]
    assert found["nats server"].remedy == "start it with -js, or put a jetstream block into its configuration"
    assert found["nats storage"].verdict == "skipped"
    assert found["nats link"].found.startswith("round trip ")  # what can be seen is looked at


async def test_what_a_server_forbids(start: Callable[[str], str], name: str, tmp_path: Path) -> None:
    subjects = Subjects(name)
    forbidden = f'["{subjects.offer(0, "a")}", "$JS.API.STREAM.CREATE.>"]'
    listening = f'["{subjects.heartbeat()}", "{subjects.marker}"]'
    url = start(
        f'jetstream {{ store_dir: "{tmp_path / "js"}" }}\n'
        "authorization { users: [ { user: boss, password: b }, { user: a, password: a, permissions: {\n"
        f"publish: {{ deny: {forbidden} }}, subscribe: {{ deny: {listening} }} }} }} ] }}\n"
    )
    boss = await NatsTransport.open(f"boss:b@{url}", f"boss:b@{url}", "boss", get_logger(), give_up_after_s=DEADLINE_S)
    await create(boss, name)
    await boss.close()
    found = await examined(DoctorSettings(name="a", run=name, nats_url=f"a:a@{url}", state_dir=tmp_path / "state"))
    assert named(found, "failed") == ["nats permissions"]
    said = found["nats permissions"].found
    listen = f"to listen to {subjects.heartbeat()}, to listen to {subjects.marker}"
    assert said == f"refused: {listen}, to write to {subjects.offer(0, 'a')}"
    # who may not hear others, nor make streams, cannot know
    assert named(found, "skipped") == ["identity", "metrics", "name", "nats room", "nats sync"]
    wrong = await examined(DoctorSettings(name="a", run=name, nats_url=f"a:wrong@{url}", state_dir=tmp_path / "state"))
    assert named(wrong, "failed") == ["nats login"]
    assert "wrong" not in wrong["nats login"].found


async def test_permissions_of_an_older_version(tmp_path: Path) -> None:
    """They allow consumers that the server names, and none of the own names."""
    keys, log = make_keys(tmp_path / "keys", "demo", [Who("a", "learner")]), Subjects("demo").log_stream
    [entry] = keys.roster.identities
    own, unnamed = f"$JS.API.CONSUMER.CREATE.{log}.{entry.who.consumers[0]}", f"$JS.API.CONSUMER.CREATE.{log}"
    file = keys.server_folder("nats") / "auth.conf"
    server = Server(tmp_path / "nats", keys=keys.server_folder("nats"))
    settings = DoctorSettings(name="a", run="demo", state_dir=tmp_path / "state", identity=str(keys.identity_file("a")))
    settings = settings.model_copy(update={"nats_url": server.url})
    server.start()
    try:
        assert (await examined(settings))["nats permissions"].verdict == "ok"
        text = file.read_text()
        file.write_text(text.replace(f'        "{own}.>"', f'        "{own}.>"\n        "{unnamed}"'))
        server.reload()
        wide = (await examined(settings))["nats permissions"]
        assert (wide.verdict, wide.found) == ("warning", f"too wide: to write to {unnamed}")
        file.write_text(text.replace(f'        "{own}.>"', f'        "{unnamed}"'))
        server.reload()
        missing = (await examined(settings))["nats permissions"]
        assert (missing.verdict, missing.found) == (
            "failed",
            f"refused: to write to {own}.diloco.demo.fragment.*.>; {wide.found}",
        )
        bucket = Subjects("demo").bucket
        claims = f"$KV.{bucket}.share.a"
        file.write_text("".join(line for line in text.splitlines(keepends=True) if claims not in line))
        server.reload()
        lacking = (await examined(settings))["nats permissions"]
        assert (lacking.verdict, lacking.found) == ("failed", f"refused: to write to {claims}")
        assert "newest auth.conf" in lacking.remedy
        file.write_text(text.replace(claims, f"$KV.{bucket}.share.*"))  # those of all learners
        server.reload()
        others = (await examined(settings))["nats permissions"]
        assert (others.verdict, others.found) == ("warning", f"too wide: to write to $KV.{bucket}.share.doctor")
    finally:
        server.kill()


async def test_a_server_that_is_too_small(make_server: MakeServer, name: str, tmp_path: Path) -> None:
    server = make_server(max_file_bytes=20_000_000)
    transport = await NatsTransport.open(server.url, server.url, "test", get_logger(), give_up_after_s=DEADLINE_S)
    # two keyframes of 12 bytes a parameter with their records, and the next one: 5 x 768 kB; with the bucket 14 MB
    await create(transport, name)
    settings = DoctorSettings(name="a", run=name, nats_url=server.url, state_dir=tmp_path / "state")
    assert (await examined(settings))["nats room"].verdict == "ok"
    await transport.bulk.jetstream().delete_key_value(Subjects(name).bucket)
    await create(transport, name, run_settings())
    await transport.close()
    found = await examined(settings)
    assert named(found, "failed") == ["nats room"]
    assert "insufficient storage" in found["nats room"].found


@pytest.mark.slow
async def test_a_link_between_regions(make_server: MakeServer, name: str, tmp_path: Path) -> None:
    """A syncer of us: its own server is near, that of eu is behind 2 Mbit/s and a round trip of 40 ms."""
    here, there = make_server(), make_server()
    route = {"from": "us", "to": "eu", "listen": "127.0.0.1:0", "target": there.url.removeprefix("nats://"), "traffic": "bulk"}
    conditions = {"rate_bits_per_s": RATE_BITS_PER_S, "delay_s": DELAY_S}
    relay = Relay(checked({"defaults": conditions, "routes": [route]}, "test"), get_logger())
    await relay.start()
    transport = await NatsTransport.open(here.url, here.url, "test", get_logger(), give_up_after_s=DEADLINE_S)
    await create(transport, name, run_settings(overrides=QUICK | {"regions.names": ["us", "eu"]}))
    settings = DoctorSettings(
        name="syncer-us",
        role="syncer",
        run=name,
        region="us",
        nats_url=here.url,
        region_urls={"eu": f"nats://{relay.addresses[0]}"},
        state_dir=tmp_path / "state",
    )
    try:
        found = await examined(settings, 1.0)
        assert named(found, "failed") == []
        round_trip, up, down = (
            float(part.split()[-2]) for part in found["eu link"].found.replace(" there", "").replace(" back", "").split(", ")
        )
        assert round_trip >= 2000 * DELAY_S
        assert all(0 < rate <= 1.1e-6 * RATE_BITS_PER_S for rate in (up, down)), found["eu link"]
        # entries of its half, 17,000 bytes, and the offers of two learners there, in 19.2 s
        assert found["eu link"].needed == "0.00708 Mbit/s there, 0.0142 Mbit/s back, at 1 s a step"
    finally:
        await transport.close()
        await relay.close()


# ---- with identities


@dataclass(frozen=True)
class Guarded:
    """A server that accepts no process without an identity of ``keys``, and a run at it, which has changed a little."""

    url: str
    keys: Folder

    def settings(self, name: str, role: Role, tmp_path: Path, **changes: Any) -> DoctorSettings:
        values = {"nats_url": self.url, "run": "demo", "identity": str(self.keys.path / "identities" / "{name}.identity")}
        return DoctorSettings(name=name, role=role, state_dir=tmp_path / "state", **(values | changes))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    path = tmp_path_factory.mktemp("guarded")
    services = [Who("coordinator", "coordinator", None, True), Who("syncer-0", "syncer"), Who("evaluator", "evaluator")]
    members = [Who("a", "learner", None, founder=True), Who("b", "learner"), Who("me", "operator")]
    keys = make_keys(path / "keys", "demo", [*services, *members])
    server = Server(path / "server", keys=keys.server_folder("nats"))
    server.start()
    asyncio.run(begin(server, keys))
    yield Guarded(server.url, keys)
    server.kill()


async def begin(server: Server, keys: Folder) -> None:
    """Make the run, each by whom it has to be made."""

    async def connected(name: str) -> NatsTransport:
        return await NatsTransport.open(server.url, server.url, name, get_logger(), DEADLINE_S, load(keys.identity_file(name)))

    coordinator, founder, operator = [await connected(name) for name in ("coordinator", "a", "me")]
    made = await creation.create(coordinator, "demo", run_settings(overrides=QUICK))
    await (await founder.bucket(Subjects("demo").bucket, create=False)).create("map", MAP.pack())
    run = KnownRun("demo", made.created, await operator.bucket(Subjects("demo").bucket, create=False))
    actions: list[Action] = [Eject("b"), Set("round.overlap_steps", 3.0)]
    await append_changes(operator, run, lambda _: actions, author="me")
    for transport in (coordinator, founder, operator):
        await transport.close()


@pytest.mark.parametrize(
    ("name", "role", "unknown"),
    [
        ("a", "learner", []),
        ("evaluator", "evaluator", ["name"]),
        ("syncer-0", "syncer", []),
        ("coordinator", "coordinator", []),
    ],
)
async def test_services_with_their_identities(
    guarded: Guarded, name: str, role: Role, unknown: list[str], tmp_path: Path
) -> None:
    settings = guarded.settings(name, role, tmp_path, settings=run_settings(overrides=QUICK))
    found = [check async for check in ServiceExamination(settings, None, 1.0).checks()]
    by_name = {check.name: check for check in found}
    assert named(by_name, "failed") == [], by_name
    assert [check for check in named(by_name, "skipped") if check != "metrics"] == [*unknown, "nats room", "nats sync"]
    assert by_name["nats tls"].verdict == "warning"  # its certificate is made for an hour
    assert by_name["nats link"].found.count("Mbit/s") == 2
    assert re.match(r"list \d+ of server nats; 'diloco keys status' says", by_name["nats list"].found)
    assert by_name["nats round"].needed == "3 s (round.overlap_steps of 1 s)"  # as it was changed
    given = ServiceExamination(settings.model_copy(update={"role": "syncer"}), None, 1.0)
    assert (await anext(given.checks())).verdict == "warning"  # whose role is the identity's
    assert given.role == role


async def test_a_server_with_the_lists_of_an_older_version(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "demo", [Who("a", "learner"), Who("coordinator", "coordinator", None, True)])
    file = keys.server_folder("nats") / "auth.conf"
    text = file.read_text().replace('"_R_.>"', '"diloco.demo.answer.*.*"')  # as version 0.1.0 had it
    file.write_text(re.sub(r'\n      "_INBOX_.*', "", text))
    server = Server(tmp_path / "server", keys=keys.server_folder("nats"))
    server.start()
    try:
        roles: dict[str, Role] = {"a": "learner", "coordinator": "coordinator"}
        for name, role in roles.items():
            settings = run_settings(overrides=QUICK)
            found = await examined(Guarded(server.url, keys).settings(name, role, tmp_path, settings=settings))
            assert found["nats list"].verdict == "warning"
            check = found["nats permissions"]
            assert check.verdict == "failed"
            assert check.found == f"refused: to write to _R_.doctor; too wide: to write to diloco.demo.answer.{name}.doctor"
            assert "auth.conf" in check.remedy
            assert "diloco keys refresh" in check.remedy
    finally:
        server.kill()


async def test_a_coordinator_and_the_servers_of_all_regions(tmp_path: Path) -> None:
    """It shortens the logs of all regions. The server of ap has a list of before coordinators might, and that of eu is away."""
    regions = ("us", "eu", "ap")
    names = {"control": [CONTROL]} | {f"nats-{region}": [region] for region in regions}
    members = [Who("coordinator", "coordinator", "us", True), Who("a", "learner", "us", founder=True)]
    keys = make_keys(tmp_path / "keys", "demo", members, regions=regions, servers=names)
    older = keys.server_folder("nats-ap") / "auth.conf"
    older.write_text(older.read_text().replace("STREAM.PURGE.DILOCO_demo_LOG", "STREAM.NAMES"))
    settings, log = run_settings(overrides=QUICK | {"regions.names": list(regions)}), Subjects("demo").log_stream
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(serving(keys, tmp_path / name, name)).url for name in names if name != "nats-eu"}
        urls["nats-eu"] = f"tls://127.0.0.1:{free_port()}"
        link, founder = [
            await NatsTransport.open(
                urls["control"], urls["nats-us"], name, get_logger(), DEADLINE_S, load(keys.identity_file(name))
            )
            for name in ("coordinator", "a")
        ]
        await creation.create(link, "demo", settings)
        await founder.bulk.jetstream().publish(Subjects("demo").genesis, b"kept")
        guarded = Guarded(urls["control"], keys)
        others = {region: urls[f"nats-{region}"] for region in ("eu", "ap")}
        values: dict[str, Any] = {"settings": settings, "region": "us", "nats_bulk_url": urls["nats-us"]}
        asked = guarded.settings("coordinator", "coordinator", tmp_path, region_urls=others, **values)
        before = await link.bulk.jetstream().stream_info(log)
        found = await examined(asked)
        assert named(found, "failed") == ["eu reach"], found
        assert found["us shortening"].verdict == found["region_urls"].verdict == "ok"
        assert found["ap shortening"].verdict == "warning"
        assert "may not drop old entries" in found["ap shortening"].found
        of_ap = [name for name in found if name.startswith("ap ")]
        assert of_ap == [f"ap {what}" for what in ("reach", "server", "tls", "login", "list", "permissions", "shortening")]
        assert before.state.messages == 1
        assert (await link.bulk.jetstream().stream_info(log)).state == before.state

        # without one of them, and with one that the run does not have
        without = asked.model_copy(update={"region_urls": {"ap": urls["nats-ap"]}})
        assert (await examined(without))["region_urls"].verdict == "warning"
        await link.close()
        await founder.close()


async def test_a_learner_that_was_ejected(guarded: Guarded, tmp_path: Path) -> None:
    found = await examined(guarded.settings("b", "learner", tmp_path))
    assert named(found, "failed") == ["run"]
    assert found["run"].found == "demo: b was ejected, or quarantined"


async def test_identities_that_are_none(guarded: Guarded, nats_server: Server, tmp_path: Path) -> None:
    stolen = tmp_path / "a.identity"
    stolen.write_bytes(guarded.keys.identity_file("a").read_bytes())
    stolen.chmod(0o644)
    other = make_keys(tmp_path / "other", "demo", [Who("a", "learner")])
    put(guarded.keys, Who("newer", "learner"))  # the server has not been told
    port = guarded.url.rpartition(":")[2]
    for changes, failed, said in (
        ({"identity": str(stolen)}, ["identity"], "mode is 0644"),
        ({"run": "another"}, ["identity"], "is for run 'demo', not 'another'"),
        ({"identity": str(tmp_path / "none")}, ["identity"], "cannot be read: No such file"),
        ({"identity": str(other.identity_file("a"))}, ["nats tls"], "certificate is not accepted: "),
        ({"nats_url": f"nats://localhost:{port}"}, ["nats tls"], "Hostname mismatch"),
        ({"nats_url": nats_server.url}, ["nats tls"], "offers no TLS"),
        ({"name": "newer"}, ["nats login"], "the server does not know the identity"),
        ({"identity": None}, ["nats login"], "set an identity"),
    ):
        found = await examined(guarded.settings("a", "learner", tmp_path).model_copy(update=changes))
        assert named(found, "failed") == failed, (changes, found)
        assert said in found[failed[0]].found, (changes, found[failed[0]])


# ---- the command


@dataclass(frozen=True)
class _Point:
    """Its entry point."""

    name: str = "doctor"

    def load(self) -> Callable[..., int]:
        return doctor


Diloco = Callable[..., tuple[int, str, str]]


@pytest.fixture
def diloco(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Diloco]:
    """``diloco doctor ...`` in this process: its code, what it prints, and what it complains of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "entry_points", lambda group: [_Point()])
    monkeypatch.delenv("DILOCO_TEST_PACE", raising=False)  # no setting of a service

    def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        for variable, value in environment.items():
            monkeypatch.setenv(f"DILOCO_{variable}", value)
        monkeypatch.setattr(sys, "argv", ["diloco", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        seen = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, seen.out, seen.err

    yield run
    observe.reset()


def test_the_command(diloco: Diloco, nats_server: Server, tmp_path: Path) -> None:
    (tmp_path / "learner.toml").write_text(
        f'name = "learner-0"\nrun = "none-yet"\nnats_url = "{nats_server.url}"\ncheckpoint_s = 5\n'
    )
    code, out, err = diloco("--config", "learner.toml", "--role", "coordinator")
    assert (code, err) == (0, "")
    *checks, summary = out.splitlines()
    assert {line.split()[0] for line in checks} <= {"ok", "warning", "skipped"}
    assert " 0 failed" in summary
    assert "ok      run              none-yet is not there yet; this coordinator will create it" in out
    code, out, err = diloco("--config", "learner.toml", "--json", NATS_URL=f"nats://127.0.0.1:{free_port()}")
    assert (code, err) == (1, "")
    found = [json.loads(line) for line in out.splitlines()]
    assert [check["name"] for check in found if check["verdict"] == "failed"] == ["nats reach"]
    assert set(found[0]) == {"name", "verdict", "found", "needed", "remedy"}


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (
            ["--role", "learner"],
            {},
            "diloco: environment: name is missing: give it as DILOCO_NAME, or as name in the TOML file of --config",
        ),
        ([], {"NAME": "a", "ROLL": "syncer"}, "diloco: environment: no setting DILOCO_ROLL (did you mean 'DILOCO_ROLE'?)"),
        (["--step-s", "0"], {"NAME": "a"}, "diloco: --step-s 0: expected a number of seconds above 0"),
        (["--config", "none.toml"], {}, "diloco: none.toml: cannot be read: No such file or directory"),
    ],
)
def test_what_it_cannot_be_told(diloco: Diloco, arguments: list[str], environment: dict[str, str], said: str) -> None:
    code, out, err = diloco(*arguments, **environment)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(said)
