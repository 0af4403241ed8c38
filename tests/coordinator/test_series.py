"""The file of a run's series: how long the run has gone on when another coordinator goes on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog import get_logger
from tests.made.monitors import monitor, story

from diloco_coordinator.alerts import Alerts
from diloco_coordinator.series import UNWATCHED_S, SeriesFile, as_text


def resumed_s(folder: Path, at_s: float, stored: dict[str, Any] | None = None) -> float | None:
    resumed = SeriesFile(folder, get_logger()).resume(monitor("us", "eu"), stored)
    return None if resumed is None else resumed.run_s(at_s)


@pytest.mark.parametrize(
    ("paused", "later_s", "run_s"),
    [
        (False, 7.0, 40.0),  # killed: the run went on without it
        (True, 7.0, 33.0),  # stopped, with its run
        (False, UNWATCHED_S + 1, 33.0),  # the machine was off
        (False, -5.0, 33.0),  # its clock was set back
    ],
)
def test_the_clock_of_a_run_goes_on_where_a_coordinator_was_killed(
    tmp_path: Path, paused: bool, later_s: float, run_s: float
) -> None:
    file = SeriesFile(tmp_path, get_logger())
    file.save(as_text(story(), Alerts(), 33.0, 1000.0, paused=paused))
    assert resumed_s(tmp_path, 1000.0 + later_s) == run_s


def test_a_standby_counts_from_what_was_stored(tmp_path: Path) -> None:
    assert resumed_s(tmp_path, 1004.0) is None
    stored = json.loads(json.dumps(story().curves(33.0)))
    assert resumed_s(tmp_path, 1004.0, stored | {"at_s": 1000.0}) == 37.0
    assert resumed_s(tmp_path, 1004.0, stored) == 33.0  # an older version's
    SeriesFile(tmp_path, get_logger()).save(as_text(story(), Alerts(), 35.0, 1002.0, paused=False))  # it covers more
    assert resumed_s(tmp_path, 1004.0, stored | {"at_s": 1000.0}) == 37.0
