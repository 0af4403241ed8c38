"""Which entries of a log that several regions hold are committed, and which log a new owner goes on with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.quorum import MAX_UNDECIDED, Tip, Undecided, best, majority


@dataclass(frozen=True)
class Entry:
    check: bytes
    previous: bytes
    sequence: int


def entry(name: str, previous: str, sequence: int) -> Entry:
    return Entry(name.encode(), previous.encode(), sequence)


def tip(epoch: int, version: int, *, closing: bool = False) -> Tip:
    return Tip(epoch, version, closing, b"check", 1)


def names(entries: list[Entry]) -> list[str]:
    return [found.check.decode() for found in entries]


@pytest.mark.parametrize(("regions", "expected"), [(2, 2), (3, 2), (4, 3), (5, 3), (8, 5)])
def test_two_majorities_have_a_region_in_common(regions: int, expected: int) -> None:
    assert majority(regions) == expected
    assert 2 * majority(regions) > regions


def test_a_higher_epoch_wins_over_more_versions() -> None:
    assert best({"us": tip(3, 9), "eu": tip(4, 7)}, "us") == "eu"


def test_of_one_epoch_the_longer_log_wins_and_a_closed_one_is_longer() -> None:
    assert best({"us": tip(3, 8), "eu": tip(3, 9)}, "us") == "eu"
    assert best({"us": tip(3, 9), "eu": tip(3, 9, closing=True)}, "us") == "eu"


def test_of_equal_logs_the_own_is_gone_on_with_which_crosses_no_link() -> None:
    tips = {"ap": tip(3, 8), "eu": tip(3, 9), "us": tip(3, 9)}
    assert best(tips, "us") == "us"
    assert best(tips, "ap") == "eu"


def test_nothing_is_given_out_before_its_notice_and_then_once() -> None:
    undecided: Undecided[Entry] = Undecided()
    undecided.add(entry("a", "genesis", 1))
    undecided.add(entry("b", "a", 2))
    assert names(undecided.commit(b"a")) == ["a"]
    assert undecided.commit(b"a") == []
    assert names(undecided.commit(b"b")) == ["b"]


def test_a_notice_commits_all_that_leads_up_to_its_entry() -> None:
    undecided: Undecided[Entry] = Undecided()
    for number, (name, previous) in enumerate([("a", "genesis"), ("b", "a"), ("c", "b")], start=1):
        undecided.add(entry(name, previous, number))
    assert names(undecided.commit(b"c")) == ["a", "b", "c"]


def test_what_a_region_stored_for_itself_is_passed_over() -> None:
    # x was appended by an owner that was cut off, after a; the next owner went on from a
    undecided: Undecided[Entry] = Undecided()
    undecided.add(entry("a", "genesis", 1))
    assert names(undecided.commit(b"a")) == ["a"]
    undecided.add(entry("x", "a", 3))
    undecided.add(entry("takeover", "a", 5))
    undecided.add(entry("b", "takeover", 6))
    assert names(undecided.commit(b"takeover")) == ["takeover"]
    assert names(undecided.commit(b"b")) == ["b"]
    assert undecided.commit(b"x") == []


def test_an_entry_that_is_stored_again_behind_a_dead_branch_is_one_entry() -> None:
    undecided: Undecided[Entry] = Undecided()
    undecided.add(entry("a", "genesis", 1))
    undecided.add(entry("x", "genesis", 2))
    undecided.add(entry("a", "genesis", 3))
    undecided.add(entry("b", "a", 4))
    assert [(found.check, found.sequence) for found in undecided.commit(b"b")] == [(b"a", 3), (b"b", 4)]


def test_no_more_is_held_back_than_can_be() -> None:
    undecided: Undecided[Entry] = Undecided()
    for number in range(MAX_UNDECIDED + 2):
        undecided.add(entry(f"e{number}", f"e{number - 1}", number + 1))
    given_out = names(undecided.commit(f"e{MAX_UNDECIDED + 1}".encode()))
    assert given_out == [f"e{number}" for number in range(2, MAX_UNDECIDED + 2)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
def test_whatever_branches_there_are_readers_see_the_committed_chain(steps: list[tuple[bool, int]]) -> None:
    """Each step stores some entries on top of what is committed, of which the last chain is committed, or none."""
    undecided: Undecided[Entry] = Undecided()
    committed, seen, sequence, head = [], [], 0, "genesis"
    for number, (commits, length) in enumerate(steps):
        chain, previous = [], head
        for index in range(length):
            sequence += 1
            name = f"{number}.{index}"
            undecided.add(entry(name, previous, sequence))
            chain.append(name)
            previous = name
        if commits and chain:
            committed += chain
            head = chain[-1]
            seen += names(undecided.commit(head.encode()))
    assert seen == committed
