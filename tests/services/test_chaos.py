"""``diloco chaos`` on a live run: what was broken is healed, and no process outlives a launcher that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.made.fixtures import Diloco
from tests.made.up_command import DILOCO, TINY_MODEL
from tests.pace import DEADLINE_S

from diloco.process import logs

# one of each kind that can be told apart; which syncer owns is not known beforehand, so both are met, one after the other
TAPE: list[dict[str, Any]] = [
    {"format": "diloco-failures", "version": 1, "duration_s": 15},
    {"at_s": 0.0, "kind": "corrupt", "target": "*s", "duration_s": 1.0, "messages": 20},
    {"at_s": 0.5, "kind": "kill", "target": "learner-0"},
    {"at_s": 0.5, "kind": "clock", "target": "learner-1", "duration_s": 12.0, "offset_s": -3600},
    {"at_s": 1.0, "kind": "kill", "target": "coordinator"},
    {"at_s": 1.5, "kind": "duplicate", "target": "records", "duration_s": 0.5, "messages": 5},
    {"at_s": 2.0, "kind": "kill", "target": "syncer-0"},
    {"at_s": 2.5, "kind": "chip_loss", "target": "learner-1/chip-0"},
    {"at_s": 6.0, "kind": "freeze", "target": "syncer-1", "duration_s": 4.0},
    {"at_s": 7.0, "kind": "full", "target": "log", "duration_s": 1.0},
    {"at_s": 11.0, "kind": "nats_kill", "target": "nats"},
    {"at_s": 13.0, "kind": "cut", "target": "learner-1", "duration_s": 0.5},
]
MET = {"clock": 1, "corrupt": 3, "cut": 1, "duplicate": 1, "freeze": 1, "full": 1, "kill": 3, "nats_kill": 1}


def pids(directory: Path) -> dict[str, psutil.Process]:
    return {file.stem: psutil.Process(int(file.read_text())) for file in (directory / "services").glob("*.pid")}


def restarts(directory: Path) -> list[str]:
    entries = logs.merge(directory, ["up"])
    return [str(entry.values["restarted"]) for entry in entries if entry.event == "service_restarted"]


@pytest.mark.slow  # 40 s; each of the faults has a test of its own in the gate
def test_a_run_heals_from_whatever_is_done_to_it(tmp_path: Path) -> None:
    directory, text, tape = tmp_path / "run", tmp_path / "text.txt", tmp_path / "tape.jsonl"
    text.write_text("one two three four five six seven eight nine ten\n" * 2000)
    tape.write_text("".join(json.dumps(line) + "\n" for line in TAPE))
    begin = [DILOCO, "up", "--plain", "--run-dir", str(directory), "--data", str(text), "--tokens", str(5_000_000)]
    begin += ["--learners", "2", "--shards", "1", "--standbys", "1", "--slow", "learner-0=50", "--slow", "learner-1=50"]
    for name, value in TINY_MODEL.items():
        begin += ["--set", f"{name}={value}"]
    up = subprocess.Popen(begin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (directory / "services" / "evaluator.pid").exists(), up)
        chaos = subprocess.run(
            [DILOCO, "chaos", str(directory), "--tape", str(tape), "--lead-in", "2", "--json"],
            capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False,
        )  # fmt: skip
        assert chaos.stderr == ""
        verdict = json.loads(chaos.stdout)
        assert (verdict["violations"], verdict["holds"], chaos.returncode) == ([], True, 0)
        assert verdict["failures"] == MET
        assert verdict["left_out"] == {"chip_loss": 1}
        seen = verdict["versions"].pop("seen")
        assert seen > 0
        assert verdict["versions"] == {"lost": 0, "doubled": 0, "changed": 0}
        assert verdict["tokens_unaccounted"] == 0
        assert verdict["refused"]["honest"] == 0
        assert verdict["refused"]["made"] > 0
        assert verdict["takeovers"] >= 4  # four fragments had their owner killed or frozen
        assert {"kill learner", "kill coordinator", "nats_kill nats", "cut learner", "full log"} <= verdict["recovery"].keys()
        assert all(times["max_s"] < DEADLINE_S for times in verdict["recovery"].values())
        assert sorted(restarts(directory)) == ["coordinator", "learner-0", "nats", "syncer-0"]
        assert not list((directory / "services").glob("*.clock"))
        assert not (directory / "chaos-journal.json").exists()
        assert up.poll() is None
        # and now the launcher itself, with one service frozen
        running = pids(directory)
        assert {"nats", "coordinator", "learner-0", "learner-1", "syncer-0", "syncer-1", "evaluator"} == running.keys()
        running["learner-1"].suspend()
        up.kill()
        up.wait()
        # the ones that outlive their parent may be left to a process that does not collect them
        ends_s = time.monotonic() + DEADLINE_S
        while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in running.values()):
            assert time.monotonic() < ends_s, running
            time.sleep(0.05)
    finally:
        up.send_signal(signal.SIGINT)
        out, err = up.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in out + err


def wait_for(predicate: Any, up: subprocess.Popen[str]) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not predicate():
        assert up.poll() is None
        assert time.monotonic() < ends_s
        time.sleep(0.05)


@pytest.fixture
def begun(tmp_path: Path, diloco: Diloco) -> Path:
    """A run's directory whose services are not there: all that is checked before anything is broken."""
    from diloco.service.rundir import RunDirectory
    from diloco.settings.presets import run_settings

    directory = tmp_path / "run"
    RunDirectory(directory, "run", "nats://127.0.0.1:4", None, run_settings()).save()
    (directory / "services").mkdir()
    (directory / "services" / "learner-0.pid").write_text(f"{os.getpid()}\n")
    return directory


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--kinds", "kill,flood"], 2, "--kinds flood: no such kind of failure; there are kill,"),
        (["--kinds", "nats_kill"], 2, "only where the server is the run's own"),
        (["--tape", "missing.jsonl"], 2, "missing.jsonl: cannot be read"),
        (["--tape", "foreign.jsonl"], 7, "foreign.jsonl: not a failure tape"),
        (["--tape", "endless.jsonl"], 7, "endless.jsonl, line 1: longer than"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_broken(
    begun: Path, diloco: Diloco, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "foreign.jsonl").write_text('{"format": "else"}\n')
    (tmp_path / "endless.jsonl").write_text("[" * 1_000_000)
    ended = diloco("chaos", str(begun), *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err


def test_a_run_that_is_not_running_is_named(begun: Path, diloco: Diloco) -> None:
    (begun / "services" / "learner-0.pid").unlink()
    ended = diloco("chaos", str(begun))
    assert ended.code == 5
    assert "no service of this run is running" in ended.err
    (begun / "report.json").write_text("{}")
    assert "this run is finished" in diloco("chaos", str(begun)).err
