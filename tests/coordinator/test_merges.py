"""The merges that pictures are drawn from: bounded, and each counted once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.coordinator.test_monitor import record

from diloco_coordinator import merges
from diloco_coordinator.merges import Merges


def test_of_many_merges_an_even_share_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "MAX_MERGES", 100)
    kept = Merges(2)
    for version in range(1, 1001):
        for fragment in (0, 1):
            kept.note(record(fragment, version, "s", "ann"), float(version))
    assert len(kept.kept) <= 100
    assert kept.every * len(kept.kept) == pytest.approx(2000, rel=0.05)
    times = [merge["wall_s"] for merge in kept.kept]
    assert {after - before for before, after in pairwise(times)} == {0.0, float(kept.every)}
    assert {merge["fragment"] for merge in kept.kept} == {0, 1}
    assert kept.newest == [1000, 1000]


def test_a_successor_counts_no_version_twice_though_it_was_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "MAX_MERGES", 4)
    first = Merges(1)
    for version in range(1, 12):
        first.note(record(0, version, "s", "ann"), float(version))
    second = Merges.load(1, first.dump())
    for version in range(1, 12):
        second.note(record(0, version, "s", "ann"), 100.0)
    assert second.kept == first.kept


def test_series_of_an_older_version_name_their_newest_by_what_they_hold() -> None:
    first = Merges(2)
    first.note(record(0, 1, "s", "ann"), 1.0)
    old = {"merges": first.kept}
    assert Merges.load(2, old).newest == [1, 0]
    with pytest.raises(ValueError, match="3 fragments, expected 2"):
        Merges.load(2, {"merges": [], "newest": [1, 1, 1]})
