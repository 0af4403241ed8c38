"""Moving averages, grace windows and first rounds, by hand."""

from __future__ import annotations

import pytest

from diloco.core.run.pace import MovingAverage, Recent, first_due_steps, grace_s
from diloco.settings.run import RoundSettings


def test_an_average_is_its_first_value_and_then_moves_by_a_fifth() -> None:
    average = MovingAverage()
    assert average.get() == 0
    assert average.get(7) == 7
    average.add(10)
    assert average.get(7) == 10
    average.add(20)
    assert average.get() == pytest.approx(12)  # 10 + 0.2 * 10
    average.add(2)
    assert average.get() == pytest.approx(10)  # 12 + 0.2 * -10


@pytest.mark.parametrize(
    ("factor", "tau", "step_s", "quorum_s", "sync_s", "expected"),
    [
        (0.9, 2, 1, 0.75, 0.5, 0.675),  # 0.9 * (2 - 1.25)
        (0.9, 2, 1, 0, 0, 1.8),
        (0.9, 20, 1, 0, 0, 12),  # at most half of a cycle of 24 steps
        (0.5, 5, 0.2, 0.5, 0.3, 0.1),  # 0.5 * (1 - 0.8)
        (0.9, 2, 1, 1.5, 0.5, 0),  # the budget is spent exactly
        (0.9, 2, 1, 5, 1, 0),  # and more than spent: never negative
        (0, 2, 1, 0, 0, 0),  # switched off
    ],
)
def test_the_grace_window(factor: float, tau: float, step_s: float, quorum_s: float, sync_s: float, expected: float) -> None:
    settings = RoundSettings(grace_factor=factor, overlap_steps=tau)
    assert grace_s(settings, step_s, quorum_s, sync_s) == pytest.approx(expected)


def test_a_capped_window_lasts_at_most_a_step() -> None:
    settings = RoundSettings(grace_factor=0.9, overlap_steps=2, grace_capped=True)
    assert grace_s(settings, 0.5, 0.0, 0.0) == 0.5  # and not 0.9 * 2 * 0.5
    assert grace_s(settings, 0.5, 0.75, 0.0) == pytest.approx(0.225)  # 0.9 * (1 - 0.75)


@pytest.mark.parametrize(
    ("steps", "fragments", "expected"),
    [
        (24, 24, list(range(1, 25))),
        (24, 3, [8, 16, 24]),
        (10, 4, [3, 5, 8, 10]),
        (1, 3, [1, 1, 1]),
        (7, 1, [7]),
    ],
)
def test_first_rounds_are_spread_over_one_interval(steps: int, fragments: int, expected: list[int]) -> None:
    settings = RoundSettings(steps=steps)
    assert [first_due_steps(settings, fragment, fragments) for fragment in range(fragments)] == expected


def test_nine_of_ten_recent_values_are_no_higher() -> None:
    recent = Recent()
    assert recent.high() is None
    recent.add(3.0)
    assert recent.high() == 3.0
    for value in (9.0, *range(1, 11)):
        recent.add(float(value))
    assert recent.high() == 9.0  # of 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 9, 10 the eleventh
    for _ in range(32):
        recent.add(0.5)
    assert recent.high() == 0.5
