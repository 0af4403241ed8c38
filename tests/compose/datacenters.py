"""Data centers as ``docs/deploy.md`` has them, all on one docker host.

Each machine is a home directory and a compose project with a network of its own; ``git``, ``sudo`` and ``ssh`` are stood in
for, so that "the other machine" is the other directory. All have this machine's address, with ports of their own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.made.docker_commands import BASES, POLL_S, ROOT, docker, docker_works
from tests.made.pages import block_with, blocks, sections
from tests.pace import DEADLINE_S

from diloco_ops.broker.server import free_ports

DEPLOY = ROOT / "docs" / "deploy.md"
ALL_HOSTS = ("us", "eu", "ap")  # that the page speaks of
STATUS = "./diloco status seen --json"
RUN_S = 5 * DEADLINE_S  # containers of a whole run begin and train
COMMAND_S = 10 * DEADLINE_S  # images may have to be built

# what stands in for programs that would leave this machine, or this user
STANDINS = {
    "git": 'test "$1" = clone && cp -r "$PUBLISHED" diloco',
    # the containers' user owns the keys then, anyone who runs the tests
    "sudo": 'exec docker run --rm -i --user 0 -v "$HOME:$HOME" -w "$PWD" --entrypoint "$1" python:3.11-slim-bookworm "${@:2}"',
    "ssh": 'cd "$HOSTS/${1%%.*}" && . ./.environment && exec bash -c "$2"',
}

# learners of a toy model would take all of the machine's cores
SLOW = ROOT / "tests" / "compose" / "slow.yml"

# a model that a busy machine trains fast enough for a test, in a run that does not end meanwhile
SMALL = """
[settings.task]
layers = 1
width = 32
heads = 2
context = 64
batch = 4
"""


@dataclass
class Machine:
    """A host of one data center."""

    name: str
    home: Path
    environment: dict[str, str]
    rewritten: Callable[[str], str]
    place: Path = field(init=False)  # where its shell is

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)
        self.place = self.home
        known = self.environment | {"HOME": str(self.home)}
        (self.home / ".environment").write_text("".join(f"export {key}={shlex.quote(value)}\n" for key, value in known.items()))

    def type(self, block: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a block as it stands on the page."""
        script = f"set -euo pipefail\n{self.rewritten(block)}\npwd > ~/.place\n"
        ended = subprocess.run(
            ["bash", "-c", script],
            cwd=self.place,
            env=os.environ | self.environment | {"HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert ended.returncode == 0 or not check, f"{self.name}: {block}\n{ended.stdout[-3000:]}\n{ended.stderr[-5000:]}"
        if ended.returncode == 0:
            self.place = Path((self.home / ".place").read_text().strip())
        return ended

    def until(self, what: str, block: str, holds: Callable[[str], bool], within_s: float = RUN_S) -> str:
        """Type a block again and again until what it prints is so."""
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            ended = self.type(block, check=False)
            if ended.returncode == 0 and holds(ended.stdout):
                return ended.stdout
            time.sleep(POLL_S)
        logs = self.type("docker compose logs --tail 25", check=False).stdout
        raise AssertionError(
            f"{what}: not within {within_s:g} s; {ended.stdout[-2000:]}\n{ended.stderr[-2000:]}\n{logs[-9000:]}"
        )

    def log_lines(self, *services: str) -> list[str]:
        """Return what the containers of services have said; compose begins lines with a code for terminals."""
        said = self.type(f"docker compose logs --no-log-prefix {' '.join(services)}").stdout
        return [line.removeprefix("\x1b[2K") for line in said.splitlines()]

    def events(self, *services: str) -> list[dict[str, Any]]:
        """Return the events of the structured logs of services, each container's in order."""
        return [json.loads(line) for line in self.log_lines(*services) if line.startswith('{"time"')]


def named(name: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of a name."""
    return [event for event in events if event["event"] == name]


@contextmanager
def datacenters(folder: Path, hosts: tuple[str, ...], **environment: str) -> Iterator[dict[str, Machine]]:
    """Make a machine a data center, and remove all that they leave. Skips the test where no docker can do that.

    ``environment`` is that of each machine's shell.
    """
    if shutil.which("docker") is None or not docker_works("info") or not docker_works("compose", "version"):
        pytest.skip("no docker daemon with compose answers")
    for image in BASES:
        if not docker_works("image", "inspect", image) and not docker_works("pull", "-q", image, timeout_s=300):
            pytest.skip(f"the image {image} is not here and cannot be pulled")
    published, bin_, homes = folder / "published", folder / "bin", folder / "hosts"
    _publish(published)
    bin_.mkdir()
    for name, text in STANDINS.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_ / name).chmod(0o755)
    address = docker("network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Gateway}}").strip()
    address = address or "172.17.0.1"  # a daemon that does not say has its own default
    marked, ports = uuid.uuid4().hex[:8], iter(free_ports(4 * len(ALL_HOSTS)))
    places: dict[str, int] = {}
    environments: dict[str, dict[str, str]] = {}
    for host in ALL_HOSTS:
        outside = {"NATS_PORT": 4222, "CONTROL_PORT": 4223, "PROMETHEUS_PORT": 9490}
        chosen = {name: next(ports) for name in (*outside, "PAGE_PORT")}
        places |= {f"{host}.example.org:{usual}": chosen[name] for name, usual in outside.items()}
        environments[host] = {
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "PUBLISHED": str(published),
            "HOSTS": str(homes),
            "COMPOSE_PROJECT_NAME": f"diloco-test-{marked}-{host}",
            "TAG": f"test-{marked}",
            "SYNCERS": "1",
            "COMPOSE_FILE": f"compose.yml:{SLOW}",
            **environment,
            **{name: str(port) for name, port in chosen.items()},
        }

    def rewritten(block: str) -> str:
        for place, port in places.items():
            block = block.replace(place, f"{address}:{port}")
        return re.sub(r"(--host )\w+\.example\.org", rf"\g<1>{address}", block)

    made = {host: Machine(host, homes / host, environments[host], rewritten) for host in hosts}
    try:
        yield made
    finally:
        for machine in made.values():
            machine.type("docker compose --profile '*' down --volumes --timeout 5", check=False)
        for name in ("nats", "syncer", "learner", "coordinator"):
            docker_works("image", "rm", f"diloco-{name}:test-{marked}")
        # what belongs to the containers' user is theirs to remove
        docker_works(
            "run", "--rm", "--user", "0", "-v", f"{homes}:/hosts", BASES[0], "rm", "-rf", *(f"/hosts/{host}" for host in hosts)
        )


def _publish(published: Path) -> None:
    """Put what ``git clone`` brings into a folder, with a small model as the example of a run."""
    published.mkdir()
    for name in ("Dockerfile", ".dockerignore"):
        shutil.copy(ROOT / name, published)
    for name in ("requirements", "shared", "services", "report", "ops"):
        shutil.copytree(ROOT / name, published / name, ignore=shutil.ignore_patterns("__pycache__"))
    left_out = shutil.ignore_patterns(".env", "run.toml", "keys", "operator", "data")
    for name in ("images", "metrics"):
        shutil.copytree(ROOT / "deploy" / name, published / "deploy" / name)
    shutil.copytree(ROOT / "deploy" / "datacenter", published / "deploy" / "datacenter", ignore=left_out)
    example = published / "deploy" / "datacenter" / "run.example.toml"
    text = re.sub(r"^tokens = .*", "tokens = 100_000_000_000", example.read_text(), flags=re.MULTILINE)
    example.write_text(text + SMALL)


def deploy(machines: dict[str, Machine]) -> None:
    """Bring up all machines by the page, and wait until the work of each one's learner is merged."""
    page = sections(DEPLOY)
    second = page["A second datacenter joins"]
    for (host,), block in [*blocks(page["The first datacenter"]), *blocks(second.split("A minute later")[0])]:
        machines[host].type(block)
    if "ap" in machines:
        machines["us"].type(block_with(page["More of everything"], "server nats-ap"))
        [joining] = [block for (host,), block in blocks(second.split("A minute later")[0]) if host == "eu"]
        machines["ap"].type(as_third(joining))
    machines["us"].until("the run is there", block_with(second, "--bulk tls://us.example.org:4222 "), bool)
    machines["us"].until("all are merged", STATUS, lambda said: all(merges(f"learner-{host}-0")(said) for host in machines))


def as_third(block: str) -> str:
    """Return what the third data center types where the second one types a block."""
    return re.sub(r"\b(eu|ap)\b", lambda found: {"eu": "ap", "ap": "eu"}[found[0]], block)


def status(machine: Machine) -> dict[str, Any]:
    """Return what the coordinator says of the run."""
    said: dict[str, Any] = json.loads(machine.type(STATUS).stdout)
    return said


def merges(learner: str) -> Callable[[str], bool]:
    """Tell whether work of a learner is merged."""

    def holds(said: str) -> bool:
        found: dict[str, Any] = json.loads(said)
        return bool(found.get("learners", {}).get(learner, {}).get("rounds_merged"))

    return holds


def steps_beyond(learner: str, step: int) -> Callable[[str], bool]:
    """Tell whether a learner is past a step, and merged."""

    def holds(said: str) -> bool:
        found = json.loads(said).get("learners", {}).get(learner, {})
        return bool(found.get("step", 0) > step and found.get("rounds_merged"))

    return holds
