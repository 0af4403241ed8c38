"""What the report says of regions, against sums made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_report import regions

PLACES = {"ann": "us", "bob": "eu", "bea": "eu", "s-us": "us", "s-eu": "eu"}


def series(absences: list[Any], crossing: list[Any] | None = None) -> dict[str, Any]:
    return {"places": PLACES, "learners": {"ann": {}, "bob": {}, "bea": {}}, "absences": absences, "crossing": crossing or []}


def merged(at_s: float, *learners: str) -> dict[str, Any]:
    return {"wall_s": at_s, "members": [[name, 1 / len(learners), 0, 24] for name in learners]}


def test_members_fragments_and_absences_of_each_region() -> None:
    described = regions.describe(["us", "eu", "ap"], series([["eu", 10.0, 20.0], ["eu", 50.0, None]]), ["s-us", "s-us", "s-eu"])
    assert described == {
        "us": {"learners": ["ann"], "syncers": ["s-us"], "fragments": 2, "absences": []},
        "eu": {"learners": ["bea", "bob"], "syncers": ["s-eu"], "fragments": 1, "absences": [[10.0, 20.0], [50.0, None]]},
        "ap": {"learners": [], "syncers": [], "fragments": 0, "absences": []},
    }


def test_who_was_merged_with_whom_before_during_and_after_an_absence() -> None:
    merges = [
        merged(1, "ann", "bea", "bob"),
        merged(5, "ann", "bob"),
        merged(9.9, "ann", "bea", "bob"),
        merged(10, "ann", "bea"),  # the offer was there before the cut
        merged(12, "ann"),
        merged(15, "ann"),
        merged(20, "bea", "bob"),
        merged(25, "ann", "bea", "bob"),
    ]
    periods = regions.together(regions.describe(["us", "eu"], series([["eu", 10.0, 20.0]]), []), merges, 30.0)
    assert [period["learners"] for period in periods] == [["ann", "bea", "bob"]] * 3
    assert [(period["from_s"], period["to_s"], period["away"], period["versions"]) for period in periods] == [
        (0.0, 10.0, [], 3),
        (10.0, 20.0, ["eu"], 3),
        (20.0, 30.0, [], 2),
    ]
    assert [period["together"] for period in periods] == [
        [[3, 2, 3], [2, 2, 2], [3, 2, 3]],
        [[3, 1, 0], [1, 1, 0], [0, 0, 0]],
        [[1, 1, 1], [1, 2, 2], [1, 2, 2]],
    ]


def test_absences_that_overlap_and_one_that_lasts() -> None:
    absences = [["us", 5.0, 15.0], ["eu", 10.0, None]]
    periods = regions.together(regions.describe(["us", "eu"], series(absences), []), [merged(16, "ann")], 20.0)
    assert [(period["from_s"], period["to_s"], period["away"]) for period in periods] == [
        (0.0, 5.0, []),
        (5.0, 10.0, ["us"]),
        (10.0, 15.0, ["eu", "us"]),
        (15.0, 20.0, ["eu"]),
    ]
    assert [period["versions"] for period in periods] == [0, 0, 0, 1]


@given(st.lists(st.tuples(st.floats(0, 100), st.sets(st.sampled_from(["ann", "bob", "bea"]), min_size=1)), max_size=30))
def test_every_version_is_in_one_period(versions: list[tuple[float, set[str]]]) -> None:
    merges = [merged(at_s, *sorted(members)) for at_s, members in versions]
    absences = [["eu", float(at_s), at_s + 3.0] for at_s in range(0, 90, 4)] + [["us", 1.0, 99.0]]
    periods = regions.together(regions.describe(["us", "eu"], series(absences), []), merges, 100.0)
    assert len(periods) <= 2 * regions.MAX_BOUNDS + 1
    assert sum(period["versions"] for period in periods) == len(merges)
    for place, name in enumerate(["ann", "bea", "bob"]):
        assert sum(period["together"][place][place] for period in periods) == sum(name in members for _, members in versions)


def test_bytes_over_each_border_by_both_sides_and_by_the_links() -> None:
    carried = {"control_bytes": 1, "bulk_bytes": 2, "header_bytes_estimated": 3}
    links = {name: carried | {"state": "up"} for name in ("us-eu", "eu-us", "us-control", "control-us")}
    counted = [["s-us", 1, "eu", 1000, 50], ["s-us", 2, "eu", 100, 5], ["s-eu", 1, "us", 300, 7]]
    assert regions.borders(["us", "eu"], series([], counted), links) == [
        {"from": "us", "to": "eu", "payload_bytes": 1107, "link": carried},
        {"from": "eu", "to": "us", "payload_bytes": 355, "link": carried},
        {"from": "us", "to": "control", "payload_bytes": None, "link": carried},
        {"from": "control", "to": "us", "payload_bytes": None, "link": carried},
    ]
    unknown = regions.borders(["us", "eu"], series([], counted), {})
    assert [(border["payload_bytes"], border["link"]) for border in unknown] == [(1107, None), (355, None)]
    with pytest.raises(KeyError):
        regions.borders(["us", "eu"], series([], [["unknown", 1, "eu", 1, 1]]), {})
    assert regions.borders([], series([]), {}) == []
