"""Values for TensorBoard and W&B: which points are taken from a run, and the files read again by the format's own classes."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from diloco.errors import RunError, SettingsError
from diloco.process.observe import get_logger
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops.track import trackers
from diloco_ops.track.track_command import track
from diloco_ops.track.tracking import Tracking
from diloco_ops.track.values import Statuses, Value, of_report

LEARNER = {
    "state": "stepping", "step": 3, "loss": 2.5, "step_s": 0.1, "tokens": 300, "tokens_merged": 200, "tokens_per_s": 1000.0,
    "busy_fraction": 0.99, "blocked_fraction": 0.01, "bytes_up": 10, "bytes_down": 20, "rounds_merged": 4, "rounds_missed": 1,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "wall_s": 5.0, "tokens_processed": 600, "tokens_merged": 400, "versions": 8, "rounds": 9,
    "validation": [[2.0, 100, 3.0], [4.0, 250, 2.75]],
    "learners": {"learner-0": LEARNER, "learner-1": LEARNER | {"state": "gone"}},
}  # fmt: skip


def test_values_of_a_status() -> None:
    found = {(value.owner, value.name, value.step): value.value for value in Statuses().read(STATUS)}
    assert found["run", "validation_loss", 100] == 3.0
    assert found["run", "validation_loss", 250] == 2.75
    assert found["run", "tokens_merged", 600] == 400
    assert found["run", "tokens_per_s", 600] == 2000.0
    assert found["run", "learners", 600] == 1
    assert found["learner-0", "loss", 3] == 2.5
    assert found["learner-1", "blocked_fraction", 3] == 0.01


def test_each_point_is_taken_once() -> None:
    statuses = Statuses()
    statuses.read(STATUS)
    assert statuses.read(STATUS) == []
    moved = STATUS | {"wall_s": 6.0, "learners": {"learner-0": LEARNER | {"step": 4, "loss": 2.25}}}
    moved["validation"] = [*STATUS["validation"], [5.5, 300, 2.5]]
    values = statuses.read(moved)
    assert Value("run", "validation_loss", 300, 2.5, 5.5) in values
    assert Value("learner-0", "loss", 4, 2.25, 6.0) in values
    assert {value.owner for value in values if value.name == "versions"} == set()  # at the same tokens


def test_what_is_no_number_is_left_out() -> None:
    status = STATUS | {"learners": {"learner-0": LEARNER | {"loss": float("nan"), "step_s": None}}}
    names = {value.name for value in Statuses().read(status) if value.owner == "learner-0"}
    assert "tokens" in names
    assert not names & {"loss", "step_s"}


REPORT = {
    "val_loss": 1.5, "tokens_merged": 900, "wall_s": 30.0,
    "series": {"global": [[10.0, 400, 2.0]], "learners": {"learner-0": [[5.0, 100, 1, 3.0], [20.0, 700, 7, 2.0]]}},
}  # fmt: skip


def test_losses_of_a_report_by_time() -> None:
    assert of_report(REPORT) == [
        Value("learner-0", "loss", 1, 3.0, 5.0),
        Value("run", "validation_loss", 400, 2.0, 10.0),
        Value("learner-0", "loss", 7, 2.0, 20.0),
        Value("run", "validation_loss", 900, 1.5, 30.0),
    ]


def _events(folder: Path) -> Iterator[Event]:
    """Yield the events of a folder's files: each record is a length, its checksum, the event and its checksum."""
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def _scalars(folder: Path) -> list[tuple[str, int, float, float]]:
    events = [event for event in _events(folder) if event.summary.value]
    return [(event.summary.value[0].tag, event.step, event.summary.value[0].simple_value, event.wall_time) for event in events]


def test_tensorboard_files(tmp_path: Path) -> None:
    [tracker] = trackers.begin(["tensorboard", "tensorboard"], tmp_path, "run", {})
    tracker.write([Value("learner-0", "loss", 3, 2.5, 7.0)], 1000.0)
    assert _scalars(tmp_path / "tensorboard") == [("learner-0/loss", 3, 2.5, 1007.0)]  # at once, not when it is closed
    tracker.close()


class _Slow:
    """Takes its time, and may fail; it says which values it took."""

    def __init__(self, failures: int = 0) -> None:
        self.took, self.closed, self.failures = list[Value](), False, failures
        self.begun, self.let = threading.Event(), threading.Event()

    def write(self, values: Sequence[Value], began_s: float) -> None:
        self.begun.set()
        self.let.wait()
        if self.failures:
            self.failures -= 1
            raise OSError("no space left")
        self.took += values

    def close(self) -> None:
        self.closed = True


async def test_nothing_waits_for_a_tracker_and_the_newest_status_counts() -> None:
    slow = _Slow()
    async with Tracking([slow], get_logger()) as tracking:
        tracking.note(STATUS)
        await asyncio.to_thread(slow.begun.wait)
        for step in range(4, 1000):
            tracking.note(STATUS | {"learners": {"learner-0": LEARNER | {"step": step}}})
        assert not slow.took  # nor has it been let yet
        slow.let.set()
        tracking.conclude(REPORT)
    steps = {value.step for value in slow.took if (value.owner, value.name) == ("learner-0", "loss")}
    assert steps == {3, 999}
    assert slow.took[-1] == Value("run", "validation_loss", 900, 1.5, 30.0)
    assert slow.closed


async def test_a_tracker_that_fails_is_tried_again() -> None:
    failing, other = _Slow(failures=1), _Slow()
    failing.let.set()
    other.let.set()
    async with Tracking([failing, other], get_logger()) as tracking:
        tracking.note(STATUS)
        while not other.took:
            await asyncio.sleep(0)
        tracking.note(STATUS | {"learners": {"learner-0": LEARNER | {"step": 4}}})
    assert {value.step for value in failing.took if value.name == "loss"} == {4}
    assert {value.step for value in other.took if value.name == "loss"} == {3, 4}


async def test_a_damaged_status_ends_nothing() -> None:
    tracker = _Slow()
    tracker.let.set()
    async with Tracking([tracker], get_logger()) as tracking:
        tracking.note({"learners": 3})
        while tracking._noted.is_set():
            await asyncio.sleep(0)
        tracking.note(STATUS)
    assert {value.step for value in tracker.took if value.name == "loss"} == {3}


def _finished(folder: Path, report: object) -> Path:
    RunDirectory(folder, "mine", "nats://127.0.0.1:4222", None, run_settings("decoupled", {}, "a test")).save()
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def test_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    track(_finished(tmp_path, REPORT), ["tensorboard"], tmp_path / "mine", 2.0)
    assert [scalar[:3] for scalar in _scalars(tmp_path / "mine" / "tensorboard")] == [
        ("learner-0/loss", 1, 3.0),
        ("run/validation_loss", 400, 2.0),
        ("learner-0/loss", 7, 2.0),
        ("run/validation_loss", 900, 1.5),
    ]
    assert "4 losses" in capsys.readouterr().out


@pytest.mark.parametrize("report", [{}, [], REPORT | {"series": {"global": [[1]], "learners": {}}}, REPORT | {"wall_s": "x"}])
def test_a_damaged_report_is_refused(tmp_path: Path, report: object) -> None:
    with pytest.raises(RunError, match=r"report\.json: damaged"):
        track(_finished(tmp_path, report), ["tensorboard"], None, 2.0)
    assert not (tmp_path / "tracking").exists()


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--to tensorbord: no such tracker.*'tensorboard'"):
        track(_finished(tmp_path, REPORT), ["tensorbord"], None, 2.0)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(SettingsError, match=r"--track wandb: needs wandb, .* pip install 'diloco-ops\[wandb\]'"):
        trackers.check(["wandb"], "--track")


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="file"):
        trackers.begin(["tensorboard"], tmp_path / "file", "run", {})
