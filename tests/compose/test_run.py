"""The run over three regions of ``docker-compose.yml``, as a user has it: trained, cut, healed, killed, taken up again.

Runs where a docker daemon answers and the base images are there or can be pulled. Everything happens in a compose project of
its own, on ports of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.made.docker_commands import BASES, CONNECT, POLL_S, ROOT, docker, docker_works
from tests.pace import DEADLINE_S

from diloco.errors import DilocoError
from diloco.service import rundir
from diloco_ops.broker.server import free_ports
from diloco_ops.reading.inspect import ask

REGIONS = ("us", "eu", "ap")
LEARNERS = [f"learner-{region}-0" for region in REGIONS]
RUN_S = 5 * DEADLINE_S  # containers of a whole run begin and train
MORE_TOKENS = 100_000  # until the end, for a change to be known before


Status = dict[str, Any]


class Project:
    """A compose project, and the command line on this machine, attached to its run."""

    def __init__(self, directory: Path) -> None:
        self.name = f"diloco-test-{uuid.uuid4().hex[:8]}"
        self.directory = directory
        ports = dict(zip(("CONTROL_PORT", "NATS_PORT", "WAN_PORT", "PAGE_PORT"), map(str, free_ports(4)), strict=True))
        self.environment = ports
        self.wan = f"127.0.0.1:{ports['WAN_PORT']}"

    def compose(self, *arguments: str, timeout_s: float = 2 * DEADLINE_S) -> str:
        files = [part for name in ("docker-compose.yml", "tests/compose/override.yml") for part in ("-f", str(ROOT / name))]
        return docker("compose", "-p", self.name, *files, *arguments, timeout_s=timeout_s, **self.environment)

    def diloco(self, *arguments: str) -> str:
        """``diloco`` on this machine; empty if it fails."""
        ended = subprocess.run(
            [sys.executable, "-m", "diloco_ops.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return ended.stdout if ended.returncode == 0 else ""

    def attach(self) -> bool:
        nats, bulk = (f"nats://127.0.0.1:{self.environment[port]}" for port in ("CONTROL_PORT", "NATS_PORT"))
        return bool(self.diloco("attach", str(self.directory), "--nats", nats, "--bulk", bulk))

    def status(self) -> Status:
        """What the coordinator says; empty while it does not answer, or no learner trains yet."""
        status: Status = {}
        with contextlib.suppress(DilocoError):
            status = asyncio.run(ask(rundir.load(self.directory)))
        return status if "learners" in status else {}

    def until(self, what: str, holds: Callable[[Status], bool]) -> Status:
        """Wait for a status of which something holds."""
        end_s = time.monotonic() + RUN_S
        status: Status = {}
        while time.monotonic() < end_s:
            status = self.status()
            if status and holds(status):
                return status
            time.sleep(POLL_S)
        shown = {key: status.get(key) for key in ("state", "learners", "shards", "fragments")}
        raise AssertionError(f"{what}: not within {RUN_S:g} s; {shown}\n{self.compose('logs', '--tail', '15')[-12000:]}")

    def page(self, token: str | None) -> tuple[int, str]:
        """Status and text of the run's page, as this machine's browser gets it."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.environment['PAGE_PORT']}/")
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    def container(self, service: str, number: int = 1) -> str:
        return f"{self.name}-{service}-{number}"

    def health(self) -> dict[str, str]:
        """Health by container."""
        lines = self.compose("ps", "-a", "--format", "{{.Name}} {{.State}} {{.Health}}").splitlines()
        return {name: health or state for name, state, health in (line.split(" ", 2) for line in lines)}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    if shutil.which("docker") is None or not docker_works("info"):
        pytest.skip("no docker daemon answers")
    if not docker_works("compose", "version"):
        pytest.skip("docker has no compose plugin")
    for image in BASES:
        if not docker_works("image", "inspect", image) and not docker_works("pull", "-q", image, timeout_s=300):
            pytest.skip(f"the image {image} is not here and cannot be pulled")
    made = Project(tmp_path / "run")
    made.compose("build", timeout_s=15 * DEADLINE_S)
    try:
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "5")


def extended(project: Project) -> Callable[[Status], bool]:
    """Whether the budget could be set to a little more than was processed."""

    def set_so(status: Status) -> bool:
        tokens = status["tokens_processed"] + MORE_TOKENS
        return bool(project.diloco("set", str(project.directory), f"tokens={tokens}"))

    return set_so


def versions(status: Status) -> list[int]:
    return [fragment["version"] for fragment in status["fragments"]]


def merged(status: Status, learner: str) -> int:
    return int(status["learners"].get(learner, {}).get("rounds_merged", 0))


def all_past(before: Status, more: int = 2) -> Callable[[Status], bool]:
    """Every fragment has more versions than before."""
    old = versions(before)
    return lambda status: all(new >= version + more for new, version in zip(versions(status), old, strict=True))


def merged_again(before: Status, learner: str) -> Callable[[Status], bool]:
    return lambda status: merged(status, learner) > merged(before, learner) + 1


def trains_again(before: Status) -> Callable[[Status], bool]:
    """All learners train, and the coordinator has read as many versions as there were."""

    def holds(status: Status) -> bool:
        states = [status["learners"].get(name, {}).get("state") for name in LEARNERS]
        return set(states) <= {"stepping", "sending"} and all_past(before, 0)(status)

    return holds


@pytest.mark.compose
def test_three_regions_train_through_cuts_kills_and_a_restart(project: Project) -> None:
    project.compose("up", "-d", timeout_s=3 * DEADLINE_S)
    end_s = time.monotonic() + RUN_S
    while not project.attach():
        assert time.monotonic() < end_s, project.compose("logs", "--tail", "20")
        time.sleep(POLL_S)
    began = project.until("all learners are merged", lambda s: all(merged(s, name) > 1 for name in LEARNERS))

    check_isolated(project)
    check_page(project)
    while set(project.health().values()) != {"healthy"}:
        assert time.monotonic() < end_s + RUN_S, project.health()
        time.sleep(POLL_S)

    # a region is cut off: the others go on, with its fragments too; healed, it is in the merges again
    project.compose("exec", "-T", "wan", "diloco", "wan", "cut", "eu")
    states = json.loads(project.diloco("wan", "status", "--json", "--at", project.wan))["links"]
    assert {name: link["state"] for name, link in states.items() if "eu" in name} == dict.fromkeys(
        ("us-eu", "eu-us", "eu-ap", "ap-eu"), "cut"
    )
    cut = project.until("the others have merged since the cut", all_past(began))
    cut = project.until("the others go on without eu", all_past(cut, 5))
    project.compose("exec", "-T", "wan", "diloco", "wan", "heal")
    project.until("eu is merged again", merged_again(cut, "learner-eu-0"))

    # one of a region's two syncers is killed, and its server: fragments go on in other hands, and both come back
    healed = project.until(
        "ap's syncers have their share", lambda s: bool(owners(s, "ap"))
    )  # shares move when a region is back
    owner = owning(project, "ap", healed)
    docker("kill", owner)
    killed = project.until("its fragments have versions by others", all_past(healed))
    docker("kill", project.container("nats-eu"))
    away = project.until("the others go on without eu's server", all_past(killed, 5))
    project.compose("up", "-d")
    back = project.until("eu is merged again", merged_again(away, "learner-eu-0"))

    # everything is stopped and begun again: nothing that was committed is lost, and every learner goes on where it was
    project.compose("down", timeout_s=3 * DEADLINE_S)
    project.compose("up", "-d", timeout_s=3 * DEADLINE_S)
    again = project.until("all learners train again", trains_again(back))
    for name in LEARNERS:
        assert again["learners"][name]["step"] >= back["learners"][name]["step"]
    assert "log_rewound" not in project.compose("logs")
    project.until("all fragments go on", all_past(again))
    project.until("all are merged again", lambda s: all(merged_again(again, name)(s) for name in LEARNERS))

    # from outside, with the tapes of all regions
    project.compose("exec", "-T", "coordinator", "diloco", "attach", "/state")
    verdict = json.loads(project.compose("exec", "-T", "coordinator", "diloco", "verify", "/state", "--json"))
    found = {check["name"]: (check["state"], check["found"]) for check in verdict["checks"]}
    assert verdict["holds"], found
    assert verdict["live"]
    for name in ("log", "tapes", "offers", "data"):
        assert found[name][0] == "holds", found

    # the run ends, and its report is in the coordinator's volume
    project.until("a busy coordinator has answered that the budget is larger", extended(project))
    end_s = time.monotonic() + RUN_S
    while project.health()[project.container("coordinator")] != "exited":
        assert time.monotonic() < end_s, project.compose("logs", "--tail", "20", "coordinator")
        time.sleep(POLL_S)
    project.compose("cp", "coordinator:/state/report.html", str(project.directory))
    report = (project.directory / "report.html").read_text()
    assert all(name in report for name in LEARNERS)
    assert "Steps blocked" in report  # a figure of a run that is over
    assert "Preliminary" not in report  # no diloco up writes another one


def check_isolated(project: Project) -> None:
    """From one region no other is reached, but for the ways through the relay that are this region's."""

    def reached(host: str, port: int) -> str:
        return docker("exec", project.container("learner-eu"), "python", "-c", CONNECT, host, str(port)).strip()

    def address(service: str, network: str) -> str:
        networks = json.loads(docker("inspect", project.container(service)))[0]["NetworkSettings"]["Networks"]
        return str(networks[f"{project.name}_{network}"]["IPAddress"])

    assert reached("nats-eu", 4222) == reached("wan-eu", 4201) == "connected"
    for host in ("nats-us", "control-ap", "wan-us", "wan-control"):
        assert reached(host, 4222) == "gaierror"
    assert reached(address("nats-us", "us"), 4222) == "TimeoutError"
    assert reached(address("nats-ap", "ap"), 4222) == "TimeoutError"
    assert reached(address("nats-us", "operator"), 4222) != "connected"
    assert reached(address("wan", "us"), 4202) != "connected"
    assert reached(address("wan", "operator"), 4300) != "connected"


def check_page(project: Project) -> None:
    """The page shows the run to this machine, with the token that this deployment made."""
    assert project.page(None)[0] == project.page("0123456789abcdef0123456789abcdef")[0] == 401
    token = project.compose("exec", "-T", "coordinator", "cat", "/state/page.token").strip()
    assert len(token) == 32
    [link] = re.findall(r"page_link\s+link=(\S+)", project.compose("logs", "--no-color", "coordinator"))
    assert link.endswith(f"/#{token}")
    status, shown = project.page(token)
    assert status == 200
    assert all(name in shown for name in (*LEARNERS, *REGIONS, "data-chart"))


def owners(status: Status, region: str) -> list[str]:
    """A region's syncers that have fragments."""
    return [name for name, shard in status["shards"].items() if name.startswith(f"syncer-{region}-") and shard["fragments"]]


def owning(project: Project, region: str, status: Status) -> str:
    """The container of a region's syncer that has fragments."""
    names = owners(status, region)
    for number in (1, 2):
        container = project.container(f"syncer-{region}", number)
        said = subprocess.run(["docker", "logs", container], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        if any(f" {name} " in said.stderr for name in names):
            return container
    raise AssertionError(f"no container of {names}")
