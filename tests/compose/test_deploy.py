"""``docs/deploy.md`` is typed in, block by block: two datacenters that share nothing but what they publish.

Each machine is a home directory and a compose project with a network of its own; ``git``, ``sudo`` and ``ssh`` are stood in
for, so that "the other machine" is the other directory. Both have this machine's address, with ports of their own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.made.docker_commands import BASES, CONNECT, POLL_S, ROOT, docker, docker_works
from tests.pace import DEADLINE_S

from diloco_ops.broker.server import free_ports

PAGE = ROOT / "docs" / "deploy.md"
TEAMS = ROOT / "docs" / "teams.md"
BLOCK = re.compile(r"^```sh (us|eu)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOSTS = ("us", "eu")
STATUS = "./diloco status seen --json"
MAX_COMMANDS = 10
RUN_S = 5 * DEADLINE_S  # containers of a whole run begin and train
COMMAND_S = 10 * DEADLINE_S  # images may have to be built

# what stands in for programs that would leave this machine, or this user
STANDINS = {
    "git": 'test "$1" = clone && cp -r "$PUBLISHED" diloco',
    # the containers' user owns the keys then, anyone who runs the tests
    "sudo": 'exec docker run --rm -i --user 0 -v "$HOME:$HOME" -w "$PWD" --entrypoint "$1" python:3.11-slim-bookworm "${@:2}"',
    "ssh": 'cd "$HOSTS/${1%%.*}" && . ./.environment && exec bash -c "$2"',
}


def sections() -> dict[str, str]:
    """The page's text by heading."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands(block: str) -> list[str]:
    """What is typed: lines, without the text that some of them are given."""
    return re.sub(r"(<<'END'.*?)\n.*?^END$", r"\1", block, flags=re.MULTILINE | re.DOTALL).splitlines()


def test_a_learner_has_joined_after_at_most_ten_commands() -> None:
    by_heading = sections()
    first = [command for _, block in BLOCK.findall(by_heading["The first datacenter"]) for command in commands(block)]
    until_joined = by_heading["A second datacenter joins"].split("A minute later")[0]
    second = [command for _, block in BLOCK.findall(until_joined) for command in commands(block)]
    assert first[0] == "git clone https://example.org/diloco.git"
    assert [first[-1], second[-1]] == ["docker compose up -d", "docker compose up -d --build"]
    assert max(len(first), len(second)) <= MAX_COMMANDS
    numbers = {9: "Nine"}  # as the page counts
    for heading, found in (("The first datacenter", first), ("A second datacenter joins", second)):
        assert by_heading[heading].lstrip().startswith(f"{numbers[len(found)]} commands"), found


@dataclass
class Machine:
    """A host of one datacenter."""

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

    def until(self, what: str, block: str, holds: Callable[[str], bool]) -> str:
        """Type a block again and again until what it prints is so."""
        end_s = time.monotonic() + RUN_S
        while time.monotonic() < end_s:
            ended = self.type(block, check=False)
            if ended.returncode == 0 and holds(ended.stdout):
                return ended.stdout
            time.sleep(POLL_S)
        logs = self.type("docker compose logs --tail 25", check=False).stdout
        raise AssertionError(f"{what}: not within {RUN_S:g} s; {ended.stdout[-2000:]}\n{ended.stderr[-2000:]}\n{logs[-9000:]}")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    if shutil.which("docker") is None or not docker_works("info") or not docker_works("compose", "version"):
        pytest.skip("no docker daemon with compose answers")
    for image in BASES:
        if not docker_works("image", "inspect", image) and not docker_works("pull", "-q", image, timeout_s=300):
            pytest.skip(f"the image {image} is not here and cannot be pulled")
    published, bin_, hosts = tmp_path / "published", tmp_path / "bin", tmp_path / "hosts"
    published.mkdir()
    for name in ("Dockerfile", ".dockerignore"):
        shutil.copy(ROOT / name, published)
    for name in ("requirements", "shared", "services", "report", "ops"):
        shutil.copytree(ROOT / name, published / name, ignore=shutil.ignore_patterns("__pycache__"))
    left_out = shutil.ignore_patterns(".env", "run.toml", "keys", "operator", "data")
    shutil.copytree(ROOT / "deploy" / "images", published / "deploy" / "images")
    shutil.copytree(ROOT / "deploy" / "datacenter", published / "deploy" / "datacenter", ignore=left_out)
    bin_.mkdir()
    for name, text in STANDINS.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_ / name).chmod(0o755)
    address = docker("network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Gateway}}").strip()
    address = address or "172.17.0.1"  # a daemon that does not say has its own default
    marked, ports = uuid.uuid4().hex[:8], free_ports(6)
    places = dict(
        zip(
            ("us.example.org:4222", "us.example.org:4223", "eu.example.org:4222", "ap.example.org:4222"), ports[:4], strict=True
        )
    )

    def rewritten(block: str) -> str:
        for place, port in places.items():
            block = block.replace(place, f"{address}:{port}")
        return re.sub(r"(--host )\w+\.example\.org", rf"\g<1>{address}", block)

    made = {}
    for host, nats, control, page in (("us", ports[0], ports[1], ports[4]), ("eu", ports[2], 0, ports[5])):
        environment = {
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "PUBLISHED": str(published),
            "HOSTS": str(hosts),
            "COMPOSE_PROJECT_NAME": f"diloco-test-{marked}-{host}",
            "TAG": f"test-{marked}",
            "SYNCERS": "1",
            "PAGE_PORT": str(page),
            "NATS_PORT": str(nats),
        }
        made[host] = Machine(host, hosts / host, environment | ({"CONTROL_PORT": str(control)} if control else {}), rewritten)
    try:
        yield made
    finally:
        for machine in made.values():
            machine.type("docker compose down --volumes --timeout 5", check=False)
        for name in ("nats", "syncer", "learner", "coordinator"):
            docker_works("image", "rm", f"diloco-{name}:test-{marked}")
        # what belongs to the containers' user is theirs to remove
        docker_works(
            "run", "--rm", "--user", "0", "-v", f"{hosts}:/hosts", BASES[0], "rm", "-rf", *(f"/hosts/{host}" for host in HOSTS)
        )


@pytest.mark.compose
def test_what_the_page_says_brings_a_learner_of_a_second_datacenter_into_the_merges(machines: dict[str, Machine]) -> None:
    us, eu = machines["us"], machines["eu"]
    typed = []
    for host, block in BLOCK.findall(PAGE.read_text()):
        machine = machines[host]
        if "logs learner" in block:
            machine.until("the learner joins", block, lambda said: '"event":"joined"' in said)
        elif "diloco attach" in block:
            machine.until("the coordinator has made the run", block, bool)
            merged = machine.until("its work is merged", STATUS, merges("learner-eu-0"))
            assert json.loads(merged)["learners"]["learner-us-0"]["region"] == "us"
            check_apart(us, eu)
        elif "page.token" in block:
            check_page(machine, machine.type(block).stdout.strip())
        else:
            machine.type(block)
        typed.append(commands(block)[0].split()[0])
    assert typed.count("git") == 2
    check_evening(machines)
    check_nothing_secret(us, eu)


def check_evening(machines: dict[str, Machine]) -> None:
    """What the other page says about an evening ends all services by themselves, and a morning finds their work."""
    us, eu = machines["us"], machines["eu"]
    section = TEAMS.read_text().split("\n## An evening and a morning\n")[1]
    blocks = BLOCK.findall(section)
    alone, evening, morning = blocks[:2], blocks[2:-2], blocks[-2:]
    assert [host for host, _ in alone + morning] == ["eu", "eu", "us", "eu"]

    before = learners_of(us)
    for host, block in alone:
        machines[host].type(block)
        if "stop" in block:
            check_ends(machines[host])
    for name, learner in before.items():  # us's was restarted too, with new keys
        us.until(f"{name} is back", STATUS, steps_beyond(name, learner["step"]))

    for host, block in evening:
        machines[host].type(block)
        if block == "docker compose stop learner\n" and host == "eu":
            held = learners_of(us)
            assert all(learner["step"] > before[name]["step"] for name, learner in held.items())
    check_ends(us)
    check_ends(eu)

    for host, block in morning:
        machines[host].type(block)
    for name, learner in held.items():
        us.until(f"{name} goes on where it was", STATUS, steps_beyond(name, learner["step"]))


def learners_of(machine: Machine) -> dict[str, Any]:
    learners: dict[str, Any] = json.loads(machine.type(STATUS).stdout)["learners"]
    return learners


def steps_beyond(learner: str, step: int) -> Callable[[str], bool]:
    def holds(said: str) -> bool:
        found = json.loads(said).get("learners", {}).get(learner, {})
        return bool(found.get("step", 0) > step and found.get("rounds_merged"))

    return holds


def check_ends(machine: Machine) -> None:
    """All containers have ended, and none was killed."""
    for line in machine.type("docker compose ps -a --format '{{.Service}} {{.State}} {{.ExitCode}}'").stdout.splitlines():
        service, state, code = line.split()
        assert state == "exited", line
        assert code == "0" if service not in ("nats", "control") else code != "137", line


def check_page(machine: Machine, token: str) -> None:
    """The page shows the run to this machine, to those who have the token that the coordinator made."""
    address = f"http://127.0.0.1:{machine.environment['PAGE_PORT']}/"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(address, timeout=DEADLINE_S)
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        shown = answer.read().decode()
    assert "learner-eu-0" in shown
    assert token not in machine.type("docker compose logs; docker compose ps -aq | xargs docker inspect").stdout


def merges(learner: str) -> Callable[[str], bool]:
    def holds(said: str) -> bool:
        status: dict[str, Any] = json.loads(said)
        return bool(status.get("learners", {}).get(learner, {}).get("rounds_merged"))

    return holds


def check_apart(us: Machine, eu: Machine) -> None:
    """From one datacenter the other is reached at its servers' ports alone."""
    project = us.environment["COMPOSE_PROJECT_NAME"]
    [network] = json.loads(docker("inspect", f"{project}-learner-1"))[0]["NetworkSettings"]["Networks"].values()
    script = CONNECT.replace("sys.argv[1], int(sys.argv[2])", f"'{network['IPAddress']}', 9464")
    said = eu.type(f'docker compose exec -T learner python -c "{script}"').stdout.strip()
    assert said in ("TimeoutError", "OSError"), said


def check_nothing_secret(*machines: Machine) -> None:
    """No seed or private key is in a log, an argument, or what a container was told."""
    for machine in machines:
        said = machine.type("docker compose logs; docker compose ps -aq | xargs docker inspect").stdout
        assert "PRIVATE KEY" not in said
        assert not re.search(r"\bSU[A-Z2-7]{56}\b", said)
