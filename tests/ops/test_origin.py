"""A run's directory says by which command line, where and when the run was begun."""

from __future__ import annotations

import shlex
import socket
import sys
import time
from pathlib import Path

import pytest

from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco_ops.up import origin


def test_a_command_line_can_be_pasted_and_has_no_password() -> None:
    given = ["up", "--set", "regions.names=['us', 'eu']", "--nats", "nats://ann:secret@host:4222", "--slow", "learner-2=5"]
    said = origin.command_line(given)
    assert shlex.split(said) == ["diloco", *(each.replace("ann:secret", "***") for each in given)]
    assert len(origin.command_line(["x" * 10_000])) == origin.MAX_COMMAND
    assert "\ud800" not in origin.command_line(["\ud800"])


def test_a_run_that_goes_on_keeps_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/diloco", "up", "--learners", "2"])
    begun = origin.noted(RunDirectory(tmp_path, "run", "", None, RunSettings()))
    begun.save()
    assert (begun.command, begun.host) == ("diloco up --learners 2", socket.gethostname())
    assert begun.began_at_s == pytest.approx(time.time(), abs=60)
    monkeypatch.setattr(sys, "argv", ["diloco", "up", "--run-dir", "run"])
    later = origin.noted(rundir.load(tmp_path))
    assert (later.command, later.began_at_s) == ("diloco up --run-dir run", begun.began_at_s)
