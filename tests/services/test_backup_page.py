"""``docs/backup.md`` is typed as it stands: a night's backup of three data centers, their loss, and a region that is added."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.pace import DEADLINE_S
from tests.services.apart import demand_one_log
from tests.services.cluster import small, some_versions
from tests.services.data_centers import (
    DEPLOYMENT,
    LATER,
    REGIONS,
    ROOT,
    RUN,
    Hosts,
    begin,
    blocks,
    make_hosts,
    operators_keys,
    server_name,
)
from tests.services.forking import Nursery
from tests.services.guarded import Guarded, at_servers, in_regions
from tests.services.toy import SAMPLES

from diloco_ops.broker.server import Server
from diloco_ops.checkpoints import manifest
from diloco_ops.keys.folder import Folder

PAGE = ROOT / "docs" / "backup.md"


def section(heading: str) -> list[tuple[list[str], str]]:
    return blocks(PAGE, heading)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return make_hosts(tmp_path)


@pytest.fixture
def keys(hosts: Hosts) -> Folder:
    return operators_keys(hosts)


async def test_a_night_and_a_disaster_typed_from_the_page(nursery: Nursery, tmp_path: Path, hosts: Hosts, keys: Folder) -> None:
    settings = small(shards=3, learners=3, tokens=3 * 100_000 * SAMPLES, round__steps=18, regions__names=list(REGIONS))
    *restoring, looking = section("Everything is lost")
    attach = looking[1].splitlines()[0]
    async with in_regions(nursery, tmp_path / "servers", RUN, settings, REGIONS, keys, hosts.ports, server_name) as run:
        await begin(run, hosts)
        await some_versions(run, more=1)
        await asyncio.to_thread(hosts.type, "us", attach)
        with run.slowly():
            taken, *_, collected = await hosts.type_all(section("Each night"))
        assert "not here yet: learner-eu-0" in taken
        assert re.search(r"whole/\d+: whole, with 3 learners' states", collected)
        await some_versions(run, more=1)
        directory = run.directory
    shutil.rmtree(directory)
    shutil.rmtree(tmp_path / "servers")
    for host in REGIONS:
        shutil.rmtree(hosts.path / host / "state")

    *servers, restore, put, start = restoring
    await hosts.type_all(servers)
    assert hosts.typed == ["us: up -d nats control", "eu: up -d nats", "ap: up -d nats"]
    async with in_regions(nursery, tmp_path / "servers", RUN, settings, REGIONS, keys, hosts.ports, server_name) as run:
        assert "run demo is restored at versions" in (await hosts.type_all([restore]))[0]
        await hosts.type_all([put, start])
        assert hosts.typed[3:] == ["us: up -d", "eu: up -d", "ap: up -d"]
        await begin(run, hosts)
        await some_versions(run, more=1)
        said = await hosts.type_all([looking])
        assert "holds" in said[0]
        source = manifest.load(max((hosts.deployment("us") / "seen" / "whole").iterdir(), key=lambda path: int(path.name)))
        for region in REGIONS:
            saved, beats = source.manifest.learners[f"learner-{region}-0"], run.heartbeats[f"learner-{region}-0"]
            assert saved.step is not None
            assert next(beat.step for beat in beats if beat.state == "stepping") >= saved.step
        run.gate.close()
        demand_one_log(*[await run.read(region, closed=False) for region in REGIONS])


async def test_a_region_later_typed_from_the_page(nursery: Nursery, tmp_path: Path, hosts: Hosts, keys: Folder) -> None:
    values: dict[str, Any] = {"learners": 3, "tokens": 3 * 100_000 * SAMPLES, "round__steps": 18}
    settings = small(shards=3, regions__names=list(REGIONS), **values)
    making, lists, sa, names, urls, taking, *stopping, removing, restoring, starting = section("A region later")
    _, *collecting = section("Each night")
    *_, putting, _, looking = section("Everything is lost")
    (hosts.deployment("us") / "run.toml").write_text((DEPLOYMENT / "run.example.toml").read_text())
    for host in REGIONS:
        (hosts.deployment(host) / ".env").write_text('DILOCO_REGION_URLS={"xx": "tls://xx.example.org:4222"}\n')
    async with in_regions(nursery, tmp_path / "servers", RUN, settings, REGIONS, keys, hosts.ports, server_name) as run:
        await begin(run, hosts)
        await some_versions(run, more=1)
        await asyncio.to_thread(hosts.type, "us", looking[1].splitlines()[0])
        await hosts.type_all([making, lists])
        assert hosts.typed == ["us: kill -s HUP nats control", "eu: kill -s HUP nats", "ap: kill -s HUP nats"]
        for server in run.servers.values():
            server.reload()
        await hosts.type_all([sa, names, urls])
        assert hosts.typed[3:] == ["sa: up -d nats"]
        written = tomllib.loads((hosts.deployment("us") / "run.toml").read_text())["settings"]
        assert (written["regions"]["names"], written["shards"]) == (["us", "eu", "ap", "sa"], 4)
        assert '{"sa": "tls://sa.example.org:4222", "xx":' in (hosts.deployment("eu") / ".env").read_text()
        later = Server(tmp_path / "servers" / LATER, hosts.ports[LATER], keys=Folder.open(keys.path).server_folder("nats-sa"))
        later.start()
        try:
            with run.slowly():
                await hosts.type_all([taking])
            stopped_s, before = time.monotonic(), run.heartbeats["learner-us-0"][-1].versions
            await hosts.type_all(stopping)
            for toy in run.toys:
                await asyncio.to_thread(toy.stop)
            for service in run.services:
                service.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(service.process.wait, DEADLINE_S)
            await hosts.type_all([*collecting, removing])
            assert "run demo is restored at versions" in (await hosts.type_all([restoring]))[0]
            await hosts.type_all([putting, starting])
            assert hosts.typed[-4:] == ["us: up -d", "eu: up -d", "ap: up -d", "sa: up -d"]
            regions, servers = (*REGIONS, LATER), {**run.servers, LATER: later}
            settings = small(shards=4, regions__names=["us", "eu", "ap", "sa"], **values)
            async with at_servers(nursery, tmp_path / "servers" / "later", RUN, settings, regions, keys, servers) as again:
                await goes_on(again, hosts, before, stopped_s)
                again.gate.close()
                demand_one_log(*[await again.read(region, closed=False) for region in regions])
        finally:
            later.kill()


async def goes_on(run: Guarded, hosts: Hosts, before: Sequence[int], stopped_s: float) -> None:
    """Wait until a run has versions in all of its regions, the one that is new among them; print for how long it had none."""
    await begin(run, hosts)
    first = sum(run.heartbeats["learner-us-0"][-1].versions)
    await run.until(lambda: sum(run.heartbeats["learner-us-0"][-1].versions) > first, "a version")
    print(f"a region later: no version for {time.monotonic() - stopped_s:.1f} s; {sum(before) - first} versions are lost")
    await some_versions(run, more=1, of=[f"learner-{region}-0" for region in run.regions])
