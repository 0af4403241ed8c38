"""``diloco serve``: what it prints for loops that join, and what it refuses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from diloco.errors import SettingsError
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops.broker.server import Server
from diloco_ops.learner_programs import programs_of
from diloco_ops.up.launch import service_count
from diloco_ops.up.serve import serve
from diloco_ops.up.serving import joining_text


def test_the_line_names_a_server_that_the_loop_reaches() -> None:
    here = joining_text("mine", "nats://127.0.0.1:4222", None)
    assert 'diloco.join("nats://127.0.0.1:4222", run="mine", params=model' in here
    assert "on this machine; --listen 0.0.0.0:4222" in here
    everywhere = joining_text("mine", "nats://127.0.0.1:4222", ("0.0.0.0", 4222))
    assert f'diloco.join("nats://{socket.gethostname()}:4222", run="mine"' in everywhere
    assert "no identity" in everywhere
    one = joining_text("mine", "nats://10.0.0.5:4222", ("10.0.0.5", 4222))
    assert 'diloco.join("nats://10.0.0.5:4222"' in one


def test_a_server_that_listens_everywhere_is_reached_on_this_machine_by_its_services(tmp_path: Path) -> None:
    assert Server(tmp_path, 4222, host="0.0.0.0").url == "nats://127.0.0.1:4222"
    assert Server(tmp_path, 4222, host="10.0.0.5").url == "nats://10.0.0.5:4222"
    assert Server(tmp_path, 4222, host="fd00::5").url == "nats://[fd00::5]:4222"


def test_neither_learners_nor_an_evaluator_are_started() -> None:
    settings = run_settings("decoupled", {"learners": 3, "shards": 2})
    directory = RunDirectory(Path("mine"), "mine", "", None, settings, learners=0)
    assert directory.learner_names == []
    assert programs_of(directory) == {}
    assert service_count(directory, standbys=1, coordinators=2) == 2 + 2 + 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"listen": "everywhere"}, "--listen everywhere: expected HOST:PORT"),
        ({"set_": ["regions.names=['eu', 'us']"]}, "diloco serve: starts one server, and the run has regions"),
        ({"run": "My run"}, "--run My run: expected lower-case letters, digits, - and _, at most 48 characters"),
        ({"preset": "data-parallel"}, "learners of the preset data-parallel offer gradients"),
    ],
)
def test_what_it_cannot_serve_is_refused(tmp_path: Path, given: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        serve(**({"run": "mine", "run_dir": tmp_path / "mine", "page": "none"} | given))  # type: ignore[arg-type]


def test_a_run_that_is_there_keeps_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    RunDirectory(path, "mine", "", None, run_settings("decoupled", {}), learners=0).save()
    before = (path / "run.json").read_bytes()
    with pytest.raises(SettingsError, match=r"--run other: .*mine has the run mine; go on with it without --run"):
        serve(run="other", run_dir=path, page="none")
    assert (path / "run.json").read_bytes() == before
