"""A coordinator's tape becomes a failure tape."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.core.run.tape import Back, Gone, Start, TapeEvent
from diloco.errors import DataError, RunError
from diloco.process.observe import get_logger
from diloco.process.tape import TapeFile
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco.wire import framing
from diloco_lab.recorded import of_run, recorded
from diloco_ops.failures import Failure

START_MS = 1_790_000_000_000


def at(time_s: float) -> int:
    return START_MS + round(1000 * time_s)


def test_an_absence_begins_with_the_last_sign_of_life() -> None:
    events: list[TapeEvent] = [
        Start(at(0), 0, ()),
        Back(at(3), "learner-0"),
        Back(at(4), "learner-1"),
        Back(at(4), "syncer-0"),
        Gone(at(60), "learner-1"),
        Gone(at(61), "syncer-0"),
        Back(at(90), "learner-1"),
        Gone(at(95), "learner-0"),
        Back(at(96), "syncer-0"),
    ]
    tape = recorded(events, 120.0, 10.0)
    assert tape.duration_s == 120.0
    assert list(tape.failures) == [Failure(50.0, "freeze", "learner-1", 40.0), Failure(85.0, "freeze", "learner-0", 35.0)]


def test_a_coordinator_that_starts_again_brings_nobody_back() -> None:
    events: list[TapeEvent] = [
        Start(at(0), 0, ()),
        Back(at(1), "learner-0"),
        Gone(at(30), "learner-0"),
        Start(at(40), 0, ()),
        Back(at(55), "learner-0"),
    ]
    assert list(recorded(events, 60.0, 10.0).failures) == [Failure(20.0, "freeze", "learner-0", 35.0)]


def test_what_is_after_the_end_is_left_out_or_cut_off() -> None:
    events: list[TapeEvent] = [
        Start(at(0), 0, ()),
        Gone(at(30), "learner-0"),
        Back(at(50), "learner-0"),
        Gone(at(90), "learner-1"),
    ]
    assert list(recorded(events, 40.0, 10.0).failures) == [Failure(20.0, "freeze", "learner-0", 20.0)]


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([], "does not begin with its start"),
        ([Gone(at(1), "learner-0")], "does not begin with its start"),
        ([Start(at(5), 0, ()), Back(at(3), "learner-0")], "goes back by 2 s"),
    ],
)
def test_what_makes_no_sense_is_named(events: list[TapeEvent], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        recorded(events, 10.0, 10.0)


def test_a_run_is_read_by_its_directory(tmp_path: Path) -> None:
    """Two coordinators, one after the other; what learners' tapes say is nothing to it."""
    run = RunDirectory(
        tmp_path / "mine", "mine", "nats://127.0.0.1:1", None, run_settings("decoupled", {"liveness.dead_s": 10})
    )
    run.save()
    identity = framing.run_id(run.name, run.settings.digest())
    noted: dict[str, list[TapeEvent]] = {
        "coordinator-0": [Start(at(0), 0, ()), Back(at(1), "learner-0")],
        "coordinator-1": [Start(at(20), 0, ()), Gone(at(30), "learner-0"), Back(at(50), "learner-0")],
        "learner-0": [Start(at(5), 1, ())],
    }
    for name, events in noted.items():
        tape = TapeFile(run.path, name, identity, get_logger())
        for event in events:
            tape.record(event)
        tape.flush()
        tape.close()
    assert list(of_run(run.path, 100.0).failures) == [Failure(20.0, "freeze", "learner-0", 30.0)]
    with pytest.raises(RunError, match="not a run's directory"):
        of_run(tmp_path, 100.0)
