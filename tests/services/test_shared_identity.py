"""A learner of several processes in a run with identities: all share the learner's, and no other process is one of them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import tomli_w
from tests.made.fixtures import Launch
from tests.made.island_checks import check_left, stepping
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, Events, small
from tests.services.secured import Guest, guest, make_keys, members, serving

from diloco.control import creation
from diloco.nats import identity
from diloco.nats.pull import Puller
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco.processes.meeting import free_port
from diloco.wire.subjects import Subjects
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who

RUN = "shared"
NAMES = Subjects(RUN)
LOG = NAMES.log_stream
PAIR, OTHER_PAIR, ALONE = "learner-0", "learner-1", "toy-1"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    pairs = [Who(PAIR, "learner", founder=True, processes=2), Who(OTHER_PAIR, "learner", processes=2)]
    return make_keys(tmp_path_factory.mktemp("keys") / "run", RUN, [*members(2, 1), *pairs])


@pytest.fixture(scope="module")
def server(keys: Folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(keys, tmp_path_factory.mktemp("shared")) as server:
        yield server


@asynccontextmanager
async def process(server: Server, keys: Folder, name: str, index: int) -> AsyncIterator[Guest]:
    """Connect as a process of a learner."""
    events, own = Events(), identity.load(keys.identity_file(name))
    link = await NatsTransport.open(
        server.url, server.url, f"{name}-p{index}", cast(Logger, events), DEADLINE_S, identity=own, process=index
    )
    try:
        yield Guest(link, events)
    finally:
        await link.close()


async def read(visitor: Guest, fragment: int) -> bytes:
    """The first entry of a fragment; it reads on until it is cancelled, and so keeps its consumer."""
    async for message in Puller(visitor.link, LOG, [NAMES.record_tree(fragment)], 1):
        return message.data
    raise AssertionError


async def test_each_process_has_consumers_of_its_own_and_offers_in_the_learners_name(server: Server, keys: Folder) -> None:
    """As many as eight readers each at a time, none of which takes another's place."""
    async with guest(server, keys, "coordinator") as coordinator:
        await creation.create(coordinator.link, RUN, small())
    async with AsyncExitStack() as stack:
        syncer = await stack.enter_async_context(guest(server, keys, "syncer-0"))
        both = [await stack.enter_async_context(process(server, keys, PAIR, index)) for index in range(2)]
        readers = [aiter(Puller(each.link, LOG, [NAMES.record_tree(fragment)], 1)) for each in both for fragment in range(8)]
        waiting = [asyncio.ensure_future(anext(reader)) for reader in readers]
        for fragment in range(8):
            entry = bytes([fragment])
            await syncer.link.append(NAMES.record(fragment), entry, message_id=f"{fragment}", fence=None, timeout_s=DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            heard = [(await one).data for one in waiting]
        assert heard == [bytes([fragment]) for _ in both for fragment in range(8)]
        for index, each in enumerate(both):
            head = NAMES.offer(index, PAIR)
            await each.link.append(head, b"offer", message_id=f"offer-{index}", fence=None, timeout_s=DEADLINE_S)
            others = NAMES.offer(index, OTHER_PAIR)
            await each.link.bulk.publish(others, b"in another's name")
            assert await each.refused(others) == []
            assert each.count("permission_denied") == 1
        for reader in readers:
            await cast(Any, reader).aclose()


async def test_an_identity_of_one_process_has_no_consumers_for_a_second(server: Server, keys: Folder) -> None:
    async with guest(server, keys, "coordinator") as coordinator:
        await creation.create(coordinator.link, RUN, small())
    async with process(server, keys, ALONE, 1) as second:
        reading = asyncio.ensure_future(read(second, 0))
        async with asyncio.timeout(DEADLINE_S):
            while not re.search(r"consumer\.create\.diloco_shared_log\.toy-1-[a-z2-7]{20}-8\.", second.told):
                await asyncio.sleep(0.02)
        reading.cancel()


# ---- real learners


def learner(cluster: Cluster, folder: Path, keys: Folder, name: str, index: int, address: str) -> subprocess.Popen[str]:
    """Start a process of a learner, as on a host of its own."""
    own: dict[str, Any] = {"name": name, "run": RUN, "nats_url": cluster.url, "state_dir": str(cluster.directory)}
    own |= {"identity": str(keys.identity_file(name)), "leave_s": DEADLINE_S}
    patience = {"start_s": 3600.0, "silent_s": 600.0}  # what it may be at most: other processes are waited for before
    own["processes"] = {"count": 2, "index": index, "address": address} | patience
    settings = folder / f"{name}-{index}.toml"
    settings.write_text(tomli_w.dumps(own))
    return subprocess.Popen(
        [sys.executable, "-m", "diloco_learner", "--config", str(settings)],
        env={key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")} | {"OPENBLAS_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
async def test_two_processes_train_under_one_identity_and_nobody_else_is_one_of_them(
    launch: Launch, keys: Folder, tmp_path: Path
) -> None:
    """A process of another learner comes first. It ends by itself, and the learner begins without it."""
    task: dict[str, Any] = {"name": "gpt", "layers": 1, "width": 64, "heads": 2, "context": 16, "batch": 4}
    named = {f"task__{key}": value for key, value in task.items()}
    settings = small(tokens=10**9, learners=1, inner__optimizer="adamw", **named)
    with serving(keys, tmp_path / "server") as server:
        cluster = launch(settings, server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        cluster.coordinator()
        cluster.syncer(0)
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        leader = learner(cluster, tmp_path, keys, PAIR, 0, address)
        started = [leader]
        try:
            stolen = learner(cluster, tmp_path, keys, OTHER_PAIR, 1, address)
            started.append(stolen)
            _, said = await asyncio.to_thread(stolen.communicate, timeout=2 * DEADLINE_S)
            assert stolen.returncode == 2
            assert "does not have the key of this process's identity: give all processes of a learner one identity file" in said
            follower = learner(cluster, tmp_path, keys, PAIR, 1, address)
            started.append(follower)
            await cluster.link()
            await cluster.until(lambda: stepping(cluster, 60), "the learner trains", 2 * DEADLINE_S)
            follower.terminate()
            for each in (leader, follower):
                _, said = await asyncio.to_thread(each.communicate, timeout=2 * DEADLINE_S)
                assert each.returncode == 0, said
        finally:
            for each in started:
                if each.poll() is None:
                    each.kill()
                    each.communicate()
        check_left(cluster)
        assert len(cluster.events("connection_refused", PAIR)) == 1
        denied = [event for name in (PAIR, f"{PAIR}-p1") for event in cluster.events("permission_denied", name)]
        assert denied == [], "they need nothing that they may not"
        await cluster.close()  # before their server ends
