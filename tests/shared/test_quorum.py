"""Which entries of a log that several regions hold are committed, and which log a new owner goes on with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.log.quorum import MAX_UNCOMMITTED, LogHead, UncommittedEntries, best, majority


@dataclass(frozen=True)
class Entry:
    entry_hash: bytes
    previous: bytes
    sequence: int


def entry(name: str, previous: str, sequence: int) -> Entry:
    return Entry(name.encode(), previous.encode(), sequence)


def log_head(epoch: int, version: int, *, closing: bool = False) -> LogHead:
    return LogHead(epoch, version, closing, b"check", 1)


def names(entries: list[Entry]) -> list[str]:
    return [found.entry_hash.decode() for found in entries]


@pytest.mark.parametrize(("regions", "expected"), [(2, 2), (3, 2), (4, 3), (5, 3), (8, 5)])
def test_two_majorities_have_a_region_in_common(regions: int, expected: int) -> None:
    assert majority(regions) == expected
    assert 2 * majority(regions) > regions


def test_a_higher_epoch_wins_over_more_versions() -> None:
    assert best({"us": log_head(3, 9), "eu": log_head(4, 7)}, "us") == "eu"


def test_of_one_epoch_the_longer_log_wins_and_a_closed_one_is_longer() -> None:
    assert best({"us": log_head(3, 8), "eu": log_head(3, 9)}, "us") == "eu"
    assert best({"us": log_head(3, 9), "eu": log_head(3, 9, closing=True)}, "us") == "eu"


def test_of_equal_logs_the_own_is_gone_on_with_which_crosses_no_link() -> None:
    log_heads = {"ap": log_head(3, 8), "eu": log_head(3, 9), "us": log_head(3, 9)}
    assert best(log_heads, "us") == "us"
    assert best(log_heads, "ap") == "eu"


def test_nothing_is_given_out_before_its_notice_and_then_once() -> None:
    uncommitted: UncommittedEntries[Entry] = UncommittedEntries()
    uncommitted.add(entry("a", "genesis", 1))
    uncommitted.add(entry("b", "a", 2))
    assert names(uncommitted.commit(b"a")) == ["a"]
    assert uncommitted.commit(b"a") == []
    assert names(uncommitted.commit(b"b")) == ["b"]


def test_a_notice_commits_all_that_leads_up_to_its_entry() -> None:
    uncommitted: UncommittedEntries[Entry] = UncommittedEntries()
    for number, (name, previous) in enumerate([("a", "genesis"), ("b", "a"), ("c", "b")], start=1):
        uncommitted.add(entry(name, previous, number))
    assert names(uncommitted.commit(b"c")) == ["a", "b", "c"]


def test_what_a_region_stored_for_itself_is_passed_over() -> None:
    # x was appended by an owner that was cut off, after a; the next owner went on from a
    uncommitted: UncommittedEntries[Entry] = UncommittedEntries()
    uncommitted.add(entry("a", "genesis", 1))
    assert names(uncommitted.commit(b"a")) == ["a"]
    uncommitted.add(entry("x", "a", 3))
    uncommitted.add(entry("takeover", "a", 5))
    uncommitted.add(entry("b", "takeover", 6))
    assert names(uncommitted.commit(b"takeover")) == ["takeover"]
    assert names(uncommitted.commit(b"b")) == ["b"]
    assert uncommitted.commit(b"x") == []


def test_an_entry_that_is_stored_again_behind_a_dead_branch_is_one_entry() -> None:
    uncommitted: UncommittedEntries[Entry] = UncommittedEntries()
    uncommitted.add(entry("a", "genesis", 1))
    uncommitted.add(entry("x", "genesis", 2))
    uncommitted.add(entry("a", "genesis", 3))
    uncommitted.add(entry("b", "a", 4))
    assert [(found.entry_hash, found.sequence) for found in uncommitted.commit(b"b")] == [(b"a", 3), (b"b", 4)]


def test_no_more_is_held_back_than_can_be() -> None:
    uncommitted: UncommittedEntries[Entry] = UncommittedEntries()
    for number in range(MAX_UNCOMMITTED + 2):
        uncommitted.add(entry(f"e{number}", f"e{number - 1}", number + 1))
    given_out = names(uncommitted.commit(f"e{MAX_UNCOMMITTED + 1}".encode()))
    assert given_out == [f"e{number}" for number in range(2, MAX_UNCOMMITTED + 2)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
def test_whatever_branches_there_are_readers_see_the_committed_chain(steps: list[tuple[bool, int]]) -> None:
    """Each step stores some entries on top of what is committed, of which the last chain is committed, or none."""
    uncommitted: UncommittedEntries[Entry] = UncommittedEntries()
    committed, seen, sequence, head = [], [], 0, "genesis"
    for number, (commits, length) in enumerate(steps):
        chain, previous = [], head
        for index in range(length):
            sequence += 1
            name = f"{number}.{index}"
            uncommitted.add(entry(name, previous, sequence))
            chain.append(name)
            previous = name
        if commits and chain:
            committed += chain
            head = chain[-1]
            seen += names(uncommitted.commit(head.encode()))
    assert seen == committed
