"""The time that is left of a run."""

from __future__ import annotations

import pytest

from diloco_coordinator.time_left import EVERY_S, WINDOW_S, RecentPace


def test_nothing_is_known_before_there_is_a_pace() -> None:
    pace = RecentPace()
    assert pace.left_s(100) is None
    pace.note(10, 0.0)
    assert pace.left_s(100) is None
    pace.note(10, 5.0)  # nothing goes on
    assert pace.left_s(100) is None


def test_the_pace_is_that_of_the_last_minute() -> None:
    pace = RecentPace()
    for at_s in range(301):  # 10 tokens a second for 240 s, then 20
        pace.note(10 * at_s + 10 * max(0, at_s - 240), float(at_s))
    assert pace.left_s(1000) == pytest.approx(50.0)


def test_a_failure_changes_the_time_that_is_left_by_little_at_a_time() -> None:
    """Of four learners one is gone from 100 s on: the time that is left rises to 4/3 of itself within a minute."""
    pace, before = RecentPace(), 0.0
    for at_s in range(161):
        pace.note(4 * at_s - max(0, at_s - 100), float(at_s))
        left_s = pace.left_s(300)
        if at_s >= 100:
            assert left_s is not None
            assert before == 0.0 or before <= left_s <= before * 1.02
            before = left_s
    assert before == pytest.approx(100.0)


def test_it_counts_no_more_often_than_it_has_to() -> None:
    pace = RecentPace()
    assert pace.is_due(0.0)
    pace.note(0, 0.0)
    assert not pace.is_due(0.9 * EVERY_S)
    assert pace.is_due(EVERY_S)
    for at_s in range(1000):
        pace.note(at_s, float(at_s))
    assert len(pace._marks) <= WINDOW_S / EVERY_S + 2
