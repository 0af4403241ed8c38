"""Bytes of all learners over time."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from diloco_coordinator.traffic import EVERY_S, MAX_POINTS, TrafficTotals


def test_bytes_of_all_learners_add_up_over_their_processes() -> None:
    traffic = TrafficTotals()
    traffic.hear("ann", 5, 100, 10, 1.0)
    traffic.hear("bob", 7, 50, 5, 2.0)
    traffic.hear("ann", 5, 160, 20, 3.0)
    traffic.hear("ann", 8, 30, 40, 4.0)  # it began again: 30 more, though it counts 30 in all
    traffic.hear("ann", 5, 170, 20, 4.5)  # a late word of its last process counts for nothing
    traffic.hear("ann", 8, 31, 40, 5.0)
    assert traffic.until(6.0) == [
        [1.0, 100, 10],
        [2.0, 150, 15],
        [3.0, 210, 25],
        [4.0, 240, 65],
        [5.0, 241, 65],
        [6.0, 241, 65],
    ]


def test_another_coordinator_goes_on_with_the_totals_whether_learners_began_again_or_not() -> None:
    first = TrafficTotals()
    for learner in ("ann", "bob"):
        first.hear(learner, 5, 100, 10, 1.0)
    stored = json.loads(json.dumps(first.until(2.0)))
    second = TrafficTotals.resumed(stored, {key: {"bytes_up": 100, "bytes_down": 10} for key in ("ann", "bob")})
    second.hear("ann", 5, 130, 12, 3.0)  # the same process
    second.hear("bob", 9, 20, 1, 4.0)  # another one, which has sent less
    assert second.until(4.0)[-1] == [4.0, 250, 23]


def test_what_a_learner_sent_is_the_sum_over_its_processes() -> None:
    traffic = TrafficTotals()
    traffic.hear("ann", 5, 100, 10, 1.0)
    traffic.hear("ann", 8, 30, 40, 2.0)
    assert traffic.of("ann") == {"bytes_up": 130, "bytes_down": 50, "bytes_counted": [8, 30, 40]}
    assert traffic.of("eve") == {"bytes_up": 0, "bytes_down": 0, "bytes_counted": [0, 0, 0]}
    again = TrafficTotals.resumed(traffic.until(3.0), {"ann": json.loads(json.dumps(traffic.of("ann")))})
    again.hear("ann", 8, 35, 40, 4.0)  # the process that had begun again
    again.hear("ann", 9, 2, 1, 5.0)
    assert again.of("ann") == {"bytes_up": 137, "bytes_down": 51, "bytes_counted": [9, 2, 1]}
    assert again.until(5.0)[-1] == [5.0, 137, 51]


def test_before_any_learner_is_heard_nothing_is_known() -> None:
    assert TrafficTotals().until(9.0) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_totals_never_fall(heard: list[tuple[str, int, int, int]]) -> None:
    traffic = TrafficTotals()
    for number, (name, incarnation, sent, received) in enumerate(heard):
        traffic.hear(name, incarnation, sent, received, number * EVERY_S)
    points = traffic.until(len(heard))
    assert all(one[i] <= other[i] for one, other in itertools.pairwise(points) for i in range(3))


def test_points_are_few_however_long_a_run_is() -> None:
    traffic = TrafficTotals()
    for number in range(10 * MAX_POINTS):
        traffic.hear("ann", 1, number, number, number * EVERY_S)
    assert MAX_POINTS / 2 <= len(traffic.points) <= MAX_POINTS
    assert traffic.points[0] == (0.0, 0, 0)
    assert traffic.until(1e6)[-1] == [1e6, 10 * MAX_POINTS - 1, 10 * MAX_POINTS - 1]
