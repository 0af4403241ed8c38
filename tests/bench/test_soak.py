"""Growth and bounds as `bench/chaos.py soak` reports them."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from harness import soak

MB = 10**6


def life(service: str, uss_mb: list[float], every_s: float = 10.0) -> soak.Life:
    """Return a life whose memory was this, in a sample each 10 s; it says no tasks."""
    made = soak.Life(service, 7, [every_s * index for index in range(len(uss_mb))])
    for name in soak.COUNTS:
        made.values[name] = [1.0] * len(uss_mb)
    made.values["uss_bytes"] = [MB * value for value in uss_mb]
    made.values["tasks"] = [math.nan] * len(uss_mb)
    return made


def test_a_steady_growth_is_told_by_the_hour_and_in_all() -> None:
    found = soak.trend([(float(at_s), 100.0 + at_s / 36) for at_s in range(0, 361, 36)])
    assert (found.first, found.last) == (100, 110)
    assert found.slope_per_h == pytest.approx(100)  # 10 in 360 s
    assert found.growth == pytest.approx(10)


def test_what_a_process_takes_while_it_warms_up_is_no_growth() -> None:
    rising, flat = [10.0 * index for index in range(10)], [100.0] * 91  # of 1000 s the first tenth
    assert soak.exceeded(soak.summarise([life("syncer-0", rising + flat)], victims=())) == []
    assert soak.exceeded(soak.summarise([life("syncer-0", [100.0] * 50 + [200.0] * 51)], victims=())) == ["syncer-0 uss_bytes"]


def test_only_processes_that_are_never_killed_have_bounds_and_short_lives_no_row() -> None:
    doubling = [100.0 + index for index in range(101)]
    rows = soak.summarise(
        [life("learner-0", doubling), life("learner-1", doubling), life("learner-1", [1.0] * 3)], ["learner-1"]
    )
    assert {row["service"] for row in rows} == {"learner-0", "learner-1"}
    assert all(row["life_s"] == 1000 for row in rows)
    assert {row["count"] for row in rows} == set(soak.COUNTS) - {"tasks"}
    assert soak.exceeded(rows) == ["learner-0 uss_bytes"]


def test_a_process_is_counted_as_the_system_counts_it() -> None:
    before = soak.counts_of(os.getpid(), None)
    with Path(os.devnull).open("rb"), Path(os.devnull).open("rb"):
        during = soak.counts_of(os.getpid(), None)
    assert before is not None
    assert during is not None
    assert during["open_files"] == before["open_files"] + 2
    assert before["threads"] >= 1
    assert 1 * MB < before["uss_bytes"] <= before["rss_bytes"]
    assert math.isnan(before["tasks"])
    assert soak.counts_of(2**22 + 1, None) is None  # above the largest number of a process
