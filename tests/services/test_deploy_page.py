"""The section of ``docs/deploy.md`` on moving a syncer and removing a learner is typed as it stands, beside a run that goes on.

``tests/compose/test_deploy.py`` types the sections before it, in containers.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S
from tests.services.cluster import small, some_versions
from tests.services.data_centers import (
    DEPLOYMENT,
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
from tests.services.guarded import CONTROL, Guarded, in_regions
from tests.services.secured import put
from tests.services.toy import SAMPLES

from diloco.errors import BrokerError
from diloco.nats import identity
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco_ops.keys.permissions import Who

GIVE_UP_S = 2.0  # on a connection that is refused
HEADING = "Moving a syncer, removing a learner"
PAGE = ROOT / "docs" / "deploy.md"


def test_what_the_page_sets_for_a_syncer_elsewhere_is_what_compose_reads() -> None:
    read = set(re.findall(r"\$\{([A-Z_]+)", (DEPLOYMENT / "compose.yml").read_text())) | {"COMPOSE_PROFILES"}
    plain = re.search(r"^```\n(COMPOSE_PROFILES=.*?)^```$", section(), re.MULTILINE | re.DOTALL)
    assert plain is not None
    names = [line.partition("=")[0] for line in plain[1].splitlines()]
    assert "SYNCER_NAME" in names
    assert set(names) - {"DILOCO_NATS_BULK_URL"} <= read
    assert re.search(r"^ +DILOCO_NATS_BULK_URL:$", (DEPLOYMENT / "compose.yml").read_text(), re.MULTILINE)


def section() -> str:
    return PAGE.read_text().split(f"\n## {HEADING}\n")[1].split("\n## ")[0]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return make_hosts(tmp_path)


async def test_a_syncer_moves_and_a_learner_is_removed_for_good(nursery: Nursery, tmp_path: Path, hosts: Hosts) -> None:
    keys = operators_keys(hosts)
    for who in (Who("syncer-eu-1", "syncer", "eu"), Who("learner-eu-1", "learner", "eu")):
        put(keys, who)
    moving, removing = re.findall(r"^```sh\n(.*?)^```$", section(), re.MULTILINE | re.DOTALL)
    settings = small(shards=3, learners=4, tokens=4 * 100_000 * SAMPLES, round__steps=18, regions__names=list(REGIONS))
    async with in_regions(nursery, tmp_path / "servers", RUN, settings, REGIONS, keys, hosts.ports, server_name) as run:
        run.toy(REGIONS.index("eu"), name="learner-eu-1")
        await begin(run, hosts)
        lines = "".join(block for _, block in blocks(PAGE, "A second datacenter joins")).splitlines()
        await asyncio.to_thread(hosts.type, "us", next(line for line in lines if "diloco attach" in line))
        await moves(run, hosts, moving)
        await removed(run, hosts, removing)


async def moves(run: Guarded, hosts: Hosts, block: str) -> None:
    """The second syncer of eu works with its identity from another machine, whose folder this test makes."""
    unpacked = "cd diloco/deploy/datacenter && sudo tar -xp"
    await asyncio.to_thread(hosts.type, "us", f"./bundle 'syncer-eu-*' | ssh eu.example.org '{unpacked}'")
    where = {**run.place(REGIONS.index("eu")), "region_urls": {name: run.servers[name].url for name in ("ap", "us")}}

    def identity_in(folder: Path) -> str:
        return str(folder / "keys" / "syncer" / "syncer-eu-1.identity")

    first = run.start("syncer-eu-1", "diloco_syncer", identity=identity_in(hosts.deployment("eu")), **where)
    await run.until(lambda: bool(run.events("standing_by", "syncer-eu-1")), "it stands by")
    await asyncio.to_thread(hosts.type, "eu", block)
    assert hosts.typed == ["eu: up -d --no-deps --force-recreate syncer"]
    assert [path.name for path in (hosts.deployment("eu") / "keys" / "syncer").iterdir()] == ["syncer-eu-0.identity"]
    first.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(first.process.wait, DEADLINE_S)
    run.services.remove(first)

    other = hosts.path / "other"
    other.mkdir()
    await asyncio.to_thread(hosts.type, "us", "./bundle syncer-eu-1 | ssh other.example.org 'sudo tar -xp'")
    run.start("syncer-eu-1", "diloco_syncer", identity=identity_in(other), **where)
    await run.until(lambda: bool(run.events("standing_by", "syncer-eu-1")), "it stands by where it is now")
    [old] = [service for service in run.services if service.name == "syncer-eu-0"]
    old.kill()
    await run.until(lambda: bool(run.events("taken_over", "syncer-eu-1")), "it takes over")
    await some_versions(run, more=1)


async def removed(run: Guarded, hosts: Hosts, block: str) -> None:
    """A learner whose team has ended it: the others go on, the servers do not know it, and it counts no more."""
    [toy] = [toy for toy in run.toys if toy.settings.name == "learner-eu-1"]
    run.toys.remove(toy)
    await asyncio.to_thread(toy.stop)
    kept = hosts.path / "eu" / "learner-eu-1.identity"  # its team has it still
    shutil.copy2(run.keys.identity_file("learner-eu-1"), kept)
    own = identity.load(kept)
    await asyncio.to_thread(hosts.type, "us", block)
    for name in (CONTROL, "eu"):
        run.servers[name].reload()
        url = run.servers[name].url
        with pytest.raises(BrokerError):
            await NatsTransport.open(url, url, "learner-eu-1", get_logger(), GIVE_UP_S, identity=own)
    status = await run.status()
    assert status["learners"]["learner-eu-1"]["state"] == "ejected"
    run.heartbeats.pop("learner-eu-1", None)
    await some_versions(run, more=1)
