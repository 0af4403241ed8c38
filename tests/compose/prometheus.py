"""The Prometheus of data centers, as ``docs/deploy.md`` has them watch the whole run, and what it says of alerts."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.compose.datacenters import DEPLOY, Machine, as_third
from tests.made.docker_commands import BASES, docker, docker_works
from tests.made.pages import block_with, sections
from tests.pace import DEADLINE_S

IMAGE = "prom/prometheus:v3.5.0"  # of deploy/datacenter/compose.yml
STANDIN = "local/prometheus"
POLL_S = 2.0


def image(folder: Path) -> str:
    """Return an image of Prometheus: the one of the page, or one of this machine's program."""
    if docker_works("image", "inspect", IMAGE) or docker_works("pull", "-q", IMAGE, timeout_s=DEADLINE_S):
        return IMAGE
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip(
            f"the image {IMAGE} cannot be pulled, and there is no program prometheus (Debian: apt-get install prometheus)"
        )
    folder.mkdir()
    shutil.copy(program, folder / "prometheus")
    (folder / "Dockerfile").write_text(
        f'FROM {BASES[0]}\nCOPY prometheus /bin/prometheus\nRUN mkdir -m 777 /prometheus\nENTRYPOINT ["/bin/prometheus"]\n'
    )
    docker("build", "-q", "-t", STANDIN, str(folder), timeout_s=10 * DEADLINE_S)
    return STANDIN


def watch_all(machines: dict[str, Machine]) -> None:
    """Type what the page says of watching the whole run, which shows it for two data centers, in all three."""
    section = sections(DEPLOY)["Watching the whole run"]
    keys, start = block_with(section, "keys add page"), block_with(section, "mkdir -p teams")
    bundle = next(line for line in keys.splitlines() if line.startswith("./bundle metrics-eu"))
    machines["us"].type(keys)
    machines["us"].type("./diloco keys add page metrics-ap --host ap.example.org\n./diloco keys add observer watch-ap")
    machines["us"].type(as_third(bundle).replace("metrics-ap", "metrics-ap watch-ap"))
    team = next(line for line in start.splitlines() if "teams/eu.yml" in line)
    for host, machine in machines.items():
        teams = "\n".join(re.sub(r"\beu\b", other, team) for other in machines if other != host)
        machine.type(start.replace(team, teams).replace("watch-us", f"watch-{host}"))


@dataclass(frozen=True)
class Prometheus:
    """The Prometheus of one data center, asked over TLS by an identity of the run."""

    url: str
    identity: Path
    authority: Path

    def _ask(self, path: str) -> Any:
        context = ssl.create_default_context(cafile=str(self.authority))
        context.load_cert_chain(self.identity)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=DEADLINE_S, context=context) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask(f"query?query={urllib.parse.quote(expression)}")["result"]
        return found

    def firing(self) -> set[tuple[str, str]]:
        """Return the alerts that fire: each one's name, and whom it is about."""
        alerts = [alert["labels"] for alert in self._ask("alerts")["alerts"] if alert["state"] == "firing"]
        about = ("sender", "place", "name", "other_region", "instance", "run")
        return {(labels["alertname"], next(labels[what] for what in about if what in labels)) for labels in alerts}

    def until_firing(self, expected: Iterable[tuple[str, str]], within_s: float) -> dict[tuple[str, str], float]:
        """Wait until alerts fire; return after how many seconds each did."""
        began_s, seen, missing = time.monotonic(), {}, set(expected)
        while missing:
            took_s = time.monotonic() - began_s
            assert took_s < within_s, f"not within {within_s:g} s: {missing}; firing: {self.firing()}"
            for alert in missing & self.firing():
                seen[alert] = took_s
                missing.discard(alert)
                print(f"{took_s:.0f} s: {alert[0]} of {alert[1]}")
            time.sleep(POLL_S)
        return seen


def of_operator(us: Machine) -> Prometheus:
    """Return the operator's own one; its port is as the page's address is typed here."""
    address = us.rewritten("us.example.org:9490")
    keys = us.home / "diloco-keys"
    assert re.fullmatch(r"[\d.]+:\d+", address)
    return Prometheus(f"https://{address}", keys / "identities" / "watch-us.identity", keys / "ca.pem")
