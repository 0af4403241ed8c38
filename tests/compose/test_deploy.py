"""``docs/deploy.md`` is typed in, block by block: two datacenters that share nothing but what they publish.

Each machine is a home directory and a compose project with a network of its own; ``git``, ``sudo`` and ``ssh`` are stood in
for, so that "the other machine" is the other directory. Both have this machine's address, with ports of their own.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.compose.datacenters import DEPLOY, STATUS, Machine, datacenters, merges, status, steps_beyond
from tests.made.docker_commands import CONNECT, ROOT, docker
from tests.made.pages import blocks, sections
from tests.pace import DEADLINE_S

TEAMS = ROOT / "docs" / "teams.md"
MAX_COMMANDS = 10


def commands(block: str) -> list[str]:
    """What is typed: lines, without the text that some of them are given."""
    return re.sub(r"(<<'END'.*?)\n.*?^END$", r"\1", block, flags=re.MULTILINE | re.DOTALL).splitlines()


def test_a_learner_has_joined_after_at_most_ten_commands() -> None:
    by_heading = sections(DEPLOY)
    first = [command for _, block in blocks(by_heading["The first datacenter"]) for command in commands(block)]
    until_joined = by_heading["A second datacenter joins"].split("A minute later")[0]
    second = [command for _, block in blocks(until_joined) for command in commands(block)]
    assert first[0] == "git clone https://example.org/diloco.git"
    assert [first[-1], second[-1]] == ["docker compose up -d", "docker compose up -d --build"]
    assert max(len(first), len(second)) <= MAX_COMMANDS
    numbers = {9: "Nine"}  # as the page counts
    for heading, found in (("The first datacenter", first), ("A second datacenter joins", second)):
        assert by_heading[heading].lstrip().startswith(f"{numbers[len(found)]} commands"), found


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    with datacenters(tmp_path, ("us", "eu")) as made:
        yield made


@pytest.mark.compose
def test_what_the_page_says_brings_a_learner_of_a_second_datacenter_into_the_merges(machines: dict[str, Machine]) -> None:
    us, eu = machines["us"], machines["eu"]
    typed = []
    for [host], block in blocks(DEPLOY.read_text()):
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
    typed = [(host, block) for [host], block in blocks(sections(TEAMS)["An evening and a morning"])]
    alone, evening, morning = typed[:2], typed[2:-2], typed[-2:]
    assert [host for host, _ in alone + morning] == ["eu", "eu", "us", "eu"]

    for host, block in alone:
        machines[host].type(block)
        if "stop" in block:
            check_ends(machines[host])
            before = status(us)["learners"]  # only who takes steps after this has started again
    for name, learner in before.items():  # us's was restarted too, with new keys
        us.until(f"{name} is back", STATUS, steps_beyond(name, learner["step"]))

    for host, block in evening:
        machines[host].type(block)
        if block == "docker compose stop learner\n" and host == "eu":
            held = status(us)["learners"]
            assert all(learner["step"] > before[name]["step"] for name, learner in held.items())
    check_ends(us)
    check_ends(eu)

    for host, block in morning:
        machines[host].type(block)
    for name, learner in held.items():
        us.until(f"{name} goes on where it was", STATUS, steps_beyond(name, learner["step"]))


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
