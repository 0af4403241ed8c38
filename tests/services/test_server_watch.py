"""``diloco-server-watch`` beside a real server: it tells what the server says, and says once that its port is closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.pace import DEADLINE_S

from diloco_ops.broker.server import find_binary, free_ports

LIMIT_BYTES = 64 << 20


class Watched:
    """A server with its monitoring port, and the process that watches it."""

    def __init__(self, folder: Path) -> None:
        self.folder, (self.port, self.monitor, self.metrics) = folder, free_ports(3)
        (folder / "nats.conf").write_text(
            f'listen: "127.0.0.1:{self.port}"\nhttp: "127.0.0.1:{self.monitor}"\n'
            f'jetstream {{ store_dir: "{folder}/data", max_file_store: {LIMIT_BYTES} }}\n'
        )
        (folder / "data").mkdir()
        self.server: subprocess.Popen[bytes] | None = None
        told = {
            "NAME": "nats-us",
            "RUN": "demo",
            "REGION": "us",
            "LOG_TO": "stderr",
            "METRICS_ADDRESS": f"127.0.0.1:{self.metrics}",
            "MONITOR_ADDRESS": f"127.0.0.1:{self.monitor}",
            "STORE_DIR": str(folder / "data"),
        }
        with (folder / "watch.log").open("wb") as log:
            self.watch = subprocess.Popen(
                [Path(sys.executable).parent / "diloco-server-watch"],
                env=os.environ | {f"DILOCO_{name}": value for name, value in told.items()},
                stderr=log,
            )

    def start(self) -> None:
        with (self.folder / "nats.log").open("ab") as log:
            self.server = subprocess.Popen([find_binary(), "-c", self.folder / "nats.conf"], stderr=log, stdout=log)

    def kill(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    def told(self) -> dict[str, float]:
        """Metrics by name; empty while the process does not answer yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=DEADLINE_S) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        labels = {(sample.labels["run"], sample.labels["name"], sample.labels["region"]) for sample in samples if sample.labels}
        assert labels == {("demo", "nats-us", "us")}
        return {sample.name: sample.value for sample in samples}

    def until(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        ends_s = time.monotonic() + DEADLINE_S
        while not holds(found := self.told()):
            assert self.watch.poll() is None, (self.folder / "watch.log").read_text()
            assert time.monotonic() < ends_s, found
            time.sleep(0.1)
        return found

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in (self.folder / "watch.log").read_text().splitlines()]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    try:
        yield made
    finally:
        made.watch.terminate()
        assert made.watch.wait(DEADLINE_S) == 0
        if made.server is not None:
            made.kill()


def test_a_server_is_watched_through_its_death_and_return(watched: Watched) -> None:
    silent = watched.until(lambda told: told.get("diloco_server_up") == 0)
    assert silent["diloco_ready"] == 0
    watched.start()
    found = watched.until(lambda told: told.get("diloco_server_up") == 1)
    assert found["diloco_server_healthy"] == found["diloco_ready"] == found["diloco_healthy"] == 1
    assert found["diloco_server_stored_limit_bytes"] == LIMIT_BYTES
    assert found["diloco_server_streams"] == found["diloco_server_connections"] == 0
    assert abs(found["diloco_server_start_timestamp_seconds"] - time.time()) < DEADLINE_S
    assert 1e6 < found["diloco_server_memory_bytes"] < found["diloco_server_memory_limit_bytes"]
    assert 0 < found["diloco_server_disk_free_bytes"] < found["diloco_server_disk_size_bytes"]
    assert not {name for name in found if name.startswith("diloco_broker")}  # it has no connection that could be lost
    watched.kill()
    gone = watched.until(lambda told: told["diloco_server_up"] == 0)
    assert "diloco_server_memory_bytes" not in gone
    assert gone["diloco_server_disk_free_bytes"] > 0
    watched.start()
    again = watched.until(lambda told: told["diloco_server_up"] == 1)
    assert again["diloco_server_start_timestamp_seconds"] > found["diloco_server_start_timestamp_seconds"]
    states = [event for event in watched.events() if event.startswith("server_")]
    silent_and_back = ["server_silent", "server_answers"]
    assert states == [*silent_and_back, "server_without_limits", *silent_and_back]  # its configuration is none of deploy/
