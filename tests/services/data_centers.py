"""Machines of data centers on which a page of ``docs/`` is typed as it stands.

Servers, identities, ``diloco`` and the scripts of ``deploy/datacenter`` are real. ``docker``, ``ssh`` and ``sudo`` are stood
in for: a volume is a folder, the other machine is another folder, and what ``docker compose`` starts, stops and reloads are a
test's services and servers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.made import pages
from tests.made.pages import Block
from tests.pace import DEADLINE_S
from tests.services.guarded import CONTROL, Guarded, places
from tests.services.secured import make_keys

from diloco_ops.broker.server import free_ports
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import Who

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "deploy" / "datacenter"
RUN = "demo"
REGIONS = ("ap", "eu", "us")
LATER = "sa"  # a region that is added
DOCKER = """#!/bin/bash
host=${PWD#"$HOSTS"/}; host=${host%%/*}
case "$1 $2" in
  "compose run") while [ "$1" != -c ]; do shift; done; exec sh -c "${2//\\/state/$HOSTS/$host/state}" ;;
  "compose ps") ;;
  "compose up" | "compose stop" | "compose kill") echo "$host: ${*:2}" >> "$HOSTS/typed" ;;
  run*) while [ "$1" != diloco ]; do shift; done; shift; exec "$DILOCO" "$@" ;;
  *) echo "docker $*" >&2; exit 1 ;;
esac
"""
SSH = """#!/bin/bash
cd "$HOSTS/${1%%.*}" && HOME=$PWD exec sh -c "$2"
"""
SUDO = """#!/bin/bash
exec "$@"
"""


def server_name(place: str) -> str:
    """The name that the pages have for a server."""
    return "control-us" if place == CONTROL else f"nats-{place}"


def blocks(page: Path, heading: str) -> list[Block]:
    """Return the blocks of a section: on which hosts each is typed, and its lines without indentation."""
    return pages.blocks(pages.sections(page)[heading])


@dataclass(frozen=True)
class Hosts:
    """The data centers' machines."""

    path: Path
    bin: Path
    ports: dict[str, int]

    @property
    def typed(self) -> list[str]:
        """What ``docker compose`` started, stopped and reloaded."""
        return (self.path / "typed").read_text().splitlines()

    def deployment(self, host: str) -> Path:
        return self.path / host / "diloco" / "deploy" / "datacenter"

    def type(self, host: str, block: str) -> str:
        """Type a block on a host; return what it prints."""
        for place, port in self.ports.items():
            address = "us.example.org:4223" if place == CONTROL else f"{place}.example.org:4222"
            if "DILOCO_REGION_URLS" not in block:
                block = block.replace(f"tls://{address}", f"tls://127.0.0.1:{port}")
        block = block.replace(f"--host {LATER}.example.org", "--host 127.0.0.1")
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


def make_hosts(tmp_path: Path) -> Hosts:
    """The machines, with the scripts of ``deploy/datacenter``."""
    made = Hosts(tmp_path / "hosts", tmp_path / "bin", dict(zip((CONTROL, *REGIONS, LATER), free_ports(5), strict=True)))
    for host in (*REGIONS, LATER):
        made.deployment(host).mkdir(parents=True)
        for script in ("states", "diloco", "bundle"):
            shutil.copy(DEPLOYMENT / script, made.deployment(host))
    made.bin.mkdir()
    for name, text in (("docker", DOCKER), ("ssh", SSH), ("sudo", SUDO)):
        (made.bin / name).write_text(text)
        (made.bin / name).chmod(0o755)
    (made.path / "typed").touch()
    return made


def operators_keys(hosts: Hosts) -> Folder:
    """The operator's folder, as ``docs/deploy.md`` has it made."""
    who = [Who("coordinator", "coordinator", REGIONS[0], True), Who("ada", "operator"), Who("test", "observer")]
    for region in REGIONS:
        who += [Who(f"learner-{region}-0", "learner", region, region == "us"), Who(f"syncer-{region}-0", "syncer", region)]
    servers = {server_name(name): serves for name, serves in places(REGIONS).items()}
    return make_keys(hosts.path / "us" / "diloco-keys", RUN, who, regions=REGIONS, servers=servers)


async def begin(run: Guarded, hosts: Hosts) -> None:
    """Start services as the pages call them."""
    run.named_by_region = True
    for number, region in enumerate(run.regions):
        state = hosts.path / region / "state"
        state.mkdir(exist_ok=True)
        run.toy(number, name=f"learner-{region}-0", state_dir=state)
    await run.begin()
