"""What the images and the compose file are made from says what the code says; no daemon is needed."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from itertools import permutations
from pathlib import Path

import pytest
import yaml

from diloco.nats.connection import malloc_environment
from diloco.settings.loading import read_toml
from diloco.settings.run import RunSettings
from diloco.settings.validation import parse
from diloco_ops.broker.server import GO_ENVIRONMENT, find_binary
from diloco_ops.up.embedded import JITTER_S, ONE_WAY_S, RATE_BITS_PER_S
from diloco_ops.wan.config import load

ROOT = Path(__file__).parents[2]
REGIONS = ("us", "eu", "ap")


def test_the_links_are_the_default_ones_and_each_port_is_reached_from_one_region_only() -> None:
    config = load(ROOT / "compose" / "wan.toml")
    for (a, b), delay_s in ONE_WAY_S.items():
        for name in (f"{a}-{b}", f"{b}-{a}"):
            link = config.links[name]
            assert (link.rate_bits_per_s, link.delay_s, link.jitter_s) == (RATE_BITS_PER_S, delay_s, JITTER_S)
    ways = {(route.from_, route.to, route.traffic): (route.listen, route.target) for route in config.routes}
    assert len(config.routes) == len(ways) == 12
    for a, b in permutations(REGIONS, 2):
        assert ways[a, b, "bulk"] == (f"wan-{a}:420{REGIONS.index(b) + 1}", f"nats-{b}:4222")
        assert ways[a, b, "control"] == (f"wan-{a}:620{REGIONS.index(b) + 1}", f"control-{b}:6222")


def test_the_compose_file_names_the_ports_of_the_relay() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for route in load(ROOT / "compose" / "wan.toml").routes:
        assert f"nats://{route.listen}" in text


@pytest.mark.parametrize("path", [ROOT / "compose" / "run.toml", ROOT / "tests" / "compose" / "run.toml"], ids=str)
def test_the_run_is_one_of_three_regions_whose_control_store_outlives_each(path: Path) -> None:
    settings = parse(RunSettings, read_toml(path)["settings"], str(path))
    assert settings.regions.names == list(REGIONS)
    assert settings.regions.control_replicas == 3
    assert settings.shards == settings.learners == 3


@pytest.mark.tool
@pytest.mark.parametrize("name", ["nats.conf", "control.conf"])
def test_the_servers_take_their_files(name: str) -> None:
    checked = subprocess.run(
        [find_binary(), "-t", "-c", ROOT / "compose" / name, "--name", "one"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "configuration file" in checked.stderr


def test_the_images_have_the_allocator_settings_of_the_code() -> None:
    found = dict(re.findall(r"\b(MALLOC_\w+)=(\d+)", (ROOT / "Dockerfile").read_text()))
    assert found == malloc_environment()
    stage = (ROOT / "Dockerfile").read_text().partition("\nFROM server AS nats\n")[2]
    assert dict(re.findall(r"^ENV (GO\w+)=(\S+)$", stage, re.MULTILINE)) == GO_ENVIRONMENT


@pytest.mark.parametrize("path", [ROOT / "docker-compose.yml", ROOT / "deploy" / "datacenter" / "compose.yml"], ids=str)
def test_each_container_has_bounds_on_memory_and_processes_and_base_images_can_be_pinned(path: Path) -> None:
    tags = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert tags == {"PYTHON_IMAGE": "python:3.11-slim-bookworm", "NATS_IMAGE": "nats:2-alpine"}
    for name, service in yaml.safe_load(path.read_text())["services"].items():
        assert service["pids_limit"] >= 512, name
        assert service["mem_limit"], name
        if "build" in service:
            arguments = service["build"]["args"]
            assert arguments.keys() == {*tags, "REVISION"}
            assert {arguments[argument] for argument in tags} == {f"${{{name}:-{tag}}}" for name, tag in tags.items()}


def test_the_images_state_the_version_of_the_code() -> None:
    text = (ROOT / "Dockerfile").read_text()
    version = tomllib.loads((ROOT / "shared" / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^ARG VERSION=(\S+)$", text, re.MULTILINE) == [version] * 4
    assert len(re.findall(r"^LABEL .*version=\$VERSION .*revision=\$REVISION$", text, re.MULTILINE)) == 4


def test_the_images_have_the_versions_that_the_tests_run_with() -> None:
    def pinned(path: Path) -> set[str]:
        return set(re.findall(r"^([\w.-]+==\S+)", path.read_text(), re.MULTILINE))

    tested = pinned(ROOT / "requirements.txt")
    for name in ("services", "learner", "coordinator", "build"):
        packages = pinned(ROOT / "requirements" / f"{name}.txt")
        assert packages
        assert packages <= tested
    light = (ROOT / "requirements" / "services.txt").read_text()
    assert "jax" not in light


def test_prometheus_asks_every_service_at_the_port_that_it_listens_at() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    ours = ["coordinator", *re.findall(r"^  ([\w-]+):\n    <<: \*(?:learner|syncer)$", text, re.MULTILINE)]
    asked = (ROOT / "compose" / "prometheus.yml").read_text()
    names = re.search(r"names: \[(.*)\]", asked)
    port = re.search(r"port: (\d+)", asked)
    assert names is not None
    assert port is not None
    assert sorted(names[1].split(", ")) == sorted(ours)
    assert len(ours) == 8
    assert text.count(f"DILOCO_METRICS_ADDRESS: 0.0.0.0:{port[1]}\n") == len(REGIONS) + 1  # and that of the servers' watches
    watched = re.findall(r'^    network_mode: "service:([\w-]+)"$', text, re.MULTILINE)
    assert sorted(watched) == sorted(f"{kind}-{region}" for kind in ("control", "nats") for region in REGIONS)
    targets = re.search(r"targets: \[(.*)\]", asked)
    assert targets is not None
    assert sorted(json.loads(f"[{targets[1]}]")) == sorted(f"{server}:{port[1]}" for server in watched)


def test_the_log_of_compose_has_the_link_of_the_page_and_no_lines_of_servers() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    coordinator = services["coordinator"]
    assert coordinator["environment"]["DILOCO_PAGE_URL"] == "http://127.0.0.1:${PAGE_PORT:-8420}/"
    assert coordinator["ports"] == ["127.0.0.1:${PAGE_PORT:-8420}:8420"]
    quiet = {name for name, service in services.items() if service.get("attach") is False}
    assert quiet == {f"{kind}-{region}" for kind in ("control", "nats") for region in ("us", "eu", "ap")}
    readme = (ROOT / "README.md").read_text()
    assert "docker compose logs coordinator | grep page_link" in readme
