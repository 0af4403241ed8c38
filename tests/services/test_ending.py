"""What ends a service is an event with a code and a reason, whatever ends it and however early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.pace import DEADLINE_S
from tests.services.secured import make_keys, members, put, serving

from diloco.process.logs import FIXED_KEYS
from diloco_ops.broker.server import free_port
from diloco_ops.keys.permissions import Who

RUN = "ending"
MODULES = {"syncer": "diloco_syncer", "coordinator": "diloco_coordinator", "learner": "diloco_learner"}


def ended(
    role: str, settings: dict[str, Any], folder: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a service as a container does, to its end; nothing is a terminal."""
    config = folder / f"{role}.toml"
    config.write_text(tomli_w.dumps({"run": RUN, "state_dir": str(folder / "state"), **settings}))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")} | variables
    command = [sys.executable, "-m", MODULES[role], *(arguments or ("--config", str(config)))]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=2 * DEADLINE_S, check=False
    )


def end_of(lines: str) -> dict[str, Any]:
    events = [json.loads(line) for line in lines.splitlines()]
    assert all(tuple(event)[: len(FIXED_KEYS)] == FIXED_KEYS for event in events)
    assert [event["event"] for event in events].count("process_ended") == 1
    end: dict[str, Any] = events[-1]
    assert (end["event"], end["level"], end["run"]) == ("process_ended", "critical", RUN)
    return end


@pytest.mark.parametrize("role", MODULES)
def test_wrong_settings_end_a_service_by_an_event_with_the_names_that_it_was_given(role: str, tmp_path: Path) -> None:
    settings = {"name": f"{role}-eu-0", "region": "eu", "log_to": "stderr", "metrics_addres": "127.0.0.1:1"}
    done = ended(role, settings, tmp_path)
    end = end_of(done.stderr)
    assert done.returncode == end["code"] == 2
    assert (end["service"], end["role"], end["region"]) == (f"{role}-eu-0", role, "eu")
    assert "metrics_addres" in end["reason"]
    assert "did you mean 'metrics_address'" in end["reason"]


def test_a_folder_of_another_run_ends_a_service_by_an_event(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "volume.json").write_text(json.dumps({"format": 1, "run": "another", "software": "0"}))
    done = ended("syncer", {"name": "syncer-0", "log_to": "stderr"}, tmp_path)
    end = end_of(done.stderr)
    assert done.returncode == end["code"] == 5
    assert "holds the files of run 'another'" in end["reason"]
    assert not (tmp_path / "state" / "logs").exists()


def test_an_identity_that_the_server_does_not_know_ends_a_service_by_an_event(tmp_path: Path) -> None:
    known = make_keys(tmp_path / "known", RUN, members(1, 1))
    with serving(known, tmp_path / "server") as server:
        put(known, Who("syncer-0", "syncer"))  # made again after the server has read its list
        settings = {"name": "syncer-0", "nats_url": server.url, "identity": str(known.identity_file("syncer-0"))}
        done = ended("syncer", settings | {"log_to": "stderr"}, tmp_path)
    end = end_of(done.stderr)
    assert done.returncode == end["code"] != 0
    assert (end["service"], end["role"]) == ("syncer-0", "syncer")
    assert "Authorization Violation" in end["reason"]


def test_with_a_log_in_a_file_stderr_has_a_sentence_and_the_file_the_event(tmp_path: Path) -> None:
    """The identity is missing, which is found when the log is there already."""
    url = f"tls://127.0.0.1:{free_port()}"
    done = ended("syncer", {"name": "syncer-0", "nats_url": url, "identity": str(tmp_path / "missing")}, tmp_path)
    end = end_of((tmp_path / "state" / "logs" / "syncer-0.jsonl").read_text())
    assert done.returncode == end["code"] == 2
    assert done.stderr == f"diloco-syncer: {end['reason']}\n"


@pytest.mark.parametrize("log_to", ["stderr", "file"])
def test_wrong_arguments_end_a_service_by_an_event_or_where_the_log_is_a_file_by_a_sentence(
    log_to: str, tmp_path: Path
) -> None:
    done = ended("syncer", {}, tmp_path, "--confg", "x", DILOCO_LOG_TO=log_to, DILOCO_RUN=RUN)
    if log_to == "stderr":
        end = end_of(done.stderr)
        assert (end["service"], end["code"]) == ("diloco-syncer", 2)
        assert "unrecognized arguments: --confg x" in end["reason"]
    else:
        assert done.stderr.startswith("diloco-syncer: unrecognized arguments: --confg x; usage: ")
        assert done.stderr.count("\n") == 1
    assert done.returncode == 2
