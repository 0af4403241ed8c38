"""Counts by sender and reason: bounded, since both may come from the wire."""

from __future__ import annotations

from diloco.process.sender_counts import OTHERS, SenderCounts


def test_each_pair_is_counted_and_more_pairs_than_the_limit_count_together() -> None:
    counts = SenderCounts(limit=2)
    assert [counts.add(sender, "late")[1] for sender in ("ann", "ann", "bob", "cat", "dan")] == [1, 2, 1, 1, 2]
    assert counts.counts() == {("ann", "late"): 2, ("bob", "late"): 1, OTHERS: 2}
    assert counts.total == 5


def test_the_age_of_a_sender_is_that_of_its_last() -> None:
    now_s = 0.0
    counts = SenderCounts(clock=lambda: now_s)
    counts.add("ann", "late")
    now_s = 5.0
    counts.add("ann", "damaged")
    counts.add("bob", "late")
    now_s = 7.0
    assert counts.ages_s() == {"ann": 2.0, "bob": 2.0}
