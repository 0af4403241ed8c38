"""``docs/backup.md`` is typed as it stands: a night's backup of three data centers, then everything is lost, and restored.

Servers, identities, ``diloco`` and ``deploy/datacenter/states`` are real. ``docker`` and ``ssh`` are stood in for: a volume
is a folder, the other machine is another folder, and services that ``docker compose up -d`` starts are this test's.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.made.pages import Block, blocks, sections
from tests.pace import DEADLINE_S
from tests.services.apart import demand_one_log
from tests.services.cluster import small, some_versions
from tests.services.forking import Nursery
from tests.services.guarded import CONTROL, Guarded, in_regions, places
from tests.services.secured import make_keys
from tests.services.toy import SAMPLES

from diloco_ops import manifest
from diloco_ops.broker.server import free_ports
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "backup.md"
DEPLOYMENT = ROOT / "deploy" / "datacenter"
RUN = "demo"
REGIONS = ("ap", "eu", "us")
DOCKER = """#!/bin/bash
host=${PWD#"$HOSTS"/}; host=${host%%/*}
case "$1 $2" in
  "compose run") while [ "$1" != -c ]; do shift; done; exec sh -c "${2//\\/state/$HOSTS/$host/state}" ;;
  "compose ps") ;;
  "compose up") echo "$host: ${*:2}" >> "$HOSTS/typed" ;;
  run*) while [ "$1" != diloco ]; do shift; done; shift; exec "$DILOCO" "$@" ;;
  *) echo "docker $*" >&2; exit 1 ;;
esac
"""
SSH = """#!/bin/bash
cd "$HOSTS/${1%%.*}" && exec sh -c "$2"
"""


def section(heading: str) -> list[Block]:
    return blocks(sections(PAGE)[heading])


@dataclass(frozen=True)
class Hosts:
    """The three data centers' machines."""

    path: Path
    bin: Path
    ports: dict[str, int]

    @property
    def typed(self) -> list[str]:
        """What was started by ``docker compose up``."""
        return (self.path / "typed").read_text().splitlines()

    def deployment(self, host: str) -> Path:
        return self.path / host / "diloco" / "deploy" / "datacenter"

    def type(self, host: str, block: str) -> str:
        """Type a block on a host; return what it prints."""
        for server, port in (("control", CONTROL), *((region, region) for region in REGIONS)):
            address = "us.example.org:4223" if server == "control" else f"{server}.example.org:4222"
            block = block.replace(f"tls://{address}", f"tls://127.0.0.1:{self.ports[port]}")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")} | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOSTS": str(self.path),
            "HOME": str(self.path / host),
            "DILOCO": str(Path(sys.executable).with_name("diloco")),
        }
        ended = subprocess.run(
            ["bash", "-c", f"set -euo pipefail\n{block}"], cwd=self.deployment(host), env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=10 * DEADLINE_S, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{host}: {block}\n{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
        return ended.stdout

    async def type_all(self, typed: list[Block]) -> list[str]:
        return [await asyncio.to_thread(self.type, host, block) for hosts, block in typed for host in hosts]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    made = Hosts(tmp_path / "hosts", tmp_path / "bin", dict(zip((CONTROL, *REGIONS), free_ports(4), strict=True)))
    for host in REGIONS:
        made.deployment(host).mkdir(parents=True)
        for script in ("states", "diloco"):
            shutil.copy(DEPLOYMENT / script, made.deployment(host))
    made.bin.mkdir()
    for name, text in (("docker", DOCKER), ("ssh", SSH)):
        (made.bin / name).write_text(text)
        (made.bin / name).chmod(0o755)
    (made.path / "typed").touch()
    return made


@pytest.fixture
def keys(hosts: Hosts) -> Folder:
    """As ``docs/deploy.md`` has the operator make them."""
    who = [Who("coordinator", "coordinator", REGIONS[0], True), Who("ada", "operator"), Who("test", "observer")]
    for number, region in enumerate(REGIONS):
        who += [Who(f"learner-{region}-0", "learner", region, region == "us"), Who(f"syncer-{number}", "syncer", region)]
    return make_keys(hosts.path / "us" / "diloco-keys", RUN, who, regions=REGIONS, servers=places(REGIONS))


def start_learners(run: Guarded, hosts: Hosts) -> None:
    for number, region in enumerate(REGIONS):
        state = hosts.path / region / "state"
        state.mkdir(exist_ok=True)
        run.toy(number, name=f"learner-{region}-0", state_dir=state)


async def test_a_night_and_a_disaster_typed_from_the_page(nursery: Nursery, tmp_path: Path, hosts: Hosts, keys: Folder) -> None:
    settings = small(shards=3, learners=3, tokens=3 * 100_000 * SAMPLES, round__steps=18, regions__names=list(REGIONS))
    *restoring, looking = section("Everything is lost")
    attach = looking[1].splitlines()[0]
    async with in_regions(nursery, tmp_path / "servers", RUN, settings, REGIONS, keys, hosts.ports) as run:
        start_learners(run, hosts)
        await run.begin()
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
    async with in_regions(nursery, tmp_path / "servers", RUN, settings, REGIONS, keys, hosts.ports) as run:
        assert "run demo is restored at versions" in (await hosts.type_all([restore]))[0]
        await hosts.type_all([put, start])
        assert hosts.typed[3:] == ["us: up -d", "eu: up -d", "ap: up -d"]
        start_learners(run, hosts)
        await run.begin()
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
