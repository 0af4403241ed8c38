"""The merges that pictures are drawn from: bounded, and each counted once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.made.monitors import entry_record

from diloco_coordinator import merges
from diloco_coordinator.merges import Merges


def test_of_many_merges_an_even_share_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "MAX_MERGES", 100)
    kept = Merges(2)
    for version in range(1, 1001):
        for fragment in (0, 1):
            kept.note(entry_record(fragment, version, "s", "ann"), float(version))
    assert len(kept.kept) <= 100
    assert kept.every * len(kept.kept) == pytest.approx(2000, rel=0.05)
    times = [merge["wall_s"] for merge in kept.kept]
    assert {after - before for before, after in pairwise(times)} == {0.0, float(kept.every)}
    assert {merge["fragment"] for merge in kept.kept} == {0, 1}
    assert kept.newest == [1000, 1000]


def test_merges_of_many_learners_are_kept_in_as_little_memory_as_those_of_few() -> None:
    learners = [f"learner-{number}" for number in range(64)]
    kept = Merges(1)
    sizes = []
    for version in range(1, 3001):
        kept.note(entry_record(0, version, "s", *learners), float(version))
        sizes.append(len(kept.kept))
    assert max(sizes) == merges.MAX_MEMBERS // 64 == 512
    assert sizes[-1] * kept.every == pytest.approx(3000, rel=0.01)
    assert kept.kept[-1]["version"] > 3000 - kept.every
    assert kept.every == 8  # 3000 versions of 64 members are 192,000, and 1/8 of these are fewer than 32,768


def test_more_merges_of_an_older_version_are_thinned_out_when_they_are_read() -> None:
    first = Merges(1)
    first.note(entry_record(0, 1, "s", "ann"), 1.0)
    older = [first.kept[0] | {"version": version} for version in range(1, 20_001)]
    found = Merges.load(1, first.dump() | {"merges": older, "newest": [20_000]})
    assert found.every == 4
    assert [merge["version"] for merge in found.kept] == list(range(4, 20_001, 4))


def test_a_successor_counts_no_version_twice_though_it_was_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "MAX_MERGES", 4)
    first = Merges(1)
    for version in range(1, 12):
        first.note(entry_record(0, version, "s", "ann"), float(version))
    second = Merges.load(1, first.dump())
    for version in range(1, 12):
        second.note(entry_record(0, version, "s", "ann"), 100.0)
    assert second.kept == first.kept


def test_series_of_an_older_version_name_their_newest_by_what_they_hold() -> None:
    first = Merges(2)
    first.note(entry_record(0, 1, "s", "ann"), 1.0)
    old = {"merges": first.kept}
    assert Merges.load(2, old).newest == [1, 0]
    with pytest.raises(ValueError, match="3 fragments, expected 2"):
        Merges.load(2, {"merges": [], "newest": [1, 1, 1]})


def test_versions_that_the_log_had_dropped_are_counted_and_told_of() -> None:
    kept = Merges(2)
    kept.note(entry_record(0, 11, "s", "ann"), 2.0)  # 1 to 10 were dropped before anybody read them
    kept.note(entry_record(0, 12, "s", "ann"), 3.0)
    kept.note(entry_record(1, 1, "s", "ann"), 3.5)
    assert (kept.missed, kept.missed_until_s) == (10, 2.0)
    later = Merges.load(2, kept.dump())
    later.note(entry_record(1, 5, "s", "ann"), 60.0)  # 2 to 4 were not noted
    assert (later.missed, later.missed_until_s) == (13, 60.0)
    assert merges.thinned(later.dump(), 1)["merges_missed"] == 13
