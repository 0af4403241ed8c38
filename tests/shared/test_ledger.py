"""The ledger: every batch's history, by hand and against a count batch by batch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.made.log_entries import record_of

from diloco.core.run.ledger import BatchRange, Ledger, Process, ShareSummary
from diloco.core.tensors import ranges
from diloco.wire.entries import Record
from diloco.wire.fields import Range
from diloco.wire.offers import MergeMember

ANN, ANN_AGAIN, BOB = ("ann", 1), ("ann", 2), ("bob", 1)


def version(fragment: int, number: int, **data: Sequence[Range]) -> Record:
    """A version with members such as ``ann_1=[(share, first, count)]``: the learner and its incarnation."""
    members = []
    for process, held in sorted(data.items()):
        learner, incarnation = process.split("_")
        members.append(MergeMember(learner, int(incarnation), number, number, 0, 1, 1, 0, 1.0, list(held)))
    return record_of(number, *members, fragment=fragment, syncer="s")


def example() -> Ledger:
    """Two fragments. ann dies after 10 batches of share 0, returns behind the 6 merged; bob's share goes without a break."""
    ledger = Ledger(2)
    ledger.train(ANN, [(0, 0, 10)], 100)
    ledger.train(ANN_AGAIN, [(0, 6, 6)], 100)
    ledger.train(BOB, [(1, 0, 8)], 100)
    ledger.merge(version(0, 1, ann_1=[(0, 0, 6)], bob_1=[(1, 0, 4)]))
    ledger.merge(version(0, 2, ann_2=[(0, 6, 6)], bob_1=[(1, 4, 4)]))
    ledger.merge(version(1, 1, ann_1=[(0, 0, 5)], bob_1=[(1, 0, 3)]))
    ledger.merge(version(1, 2, ann_2=[(0, 8, 3)]))
    return ledger


def test_the_history_of_each_range() -> None:
    ledger = example()
    assert list(ledger.lines(0)) == [
        BatchRange(0, 0, 6, (ANN,), (ANN,)),
        BatchRange(0, 6, 4, (ANN, ANN_AGAIN), (ANN_AGAIN,)),
        BatchRange(0, 10, 2, (ANN_AGAIN,), (ANN_AGAIN,)),
        BatchRange(1, 0, 8, (BOB,), (BOB,)),
    ]
    lines = list(ledger.lines(1))
    assert [(line.share, line.first, line.count) for line in lines if line.lost] == [
        (0, 5, 1), (0, 6, 2), (0, 11, 1), (1, 3, 5)
    ]  # fmt: skip
    assert [(line.share, line.first, line.count) for line in lines if line.repeated] == [(0, 6, 2), (0, 8, 2)]


def test_the_shares_in_all_fragments_together() -> None:
    # share 0: 12 batches, 4 trained again; 0..4 and 8..10 are in both fragments, none in neither. Share 1: 3 in both.
    assert example().shares() == [ShareSummary(0, ("ann",), 12, 8, 0, 4), ShareSummary(1, ("bob",), 8, 3, 0, 0)]
    ledger = example()
    ledger.train(BOB, [(1, 0, 9)])
    assert ledger.shares()[1] == ShareSummary(1, ("bob",), 9, 3, 1, 0)


def test_the_tokens_of_all_that_was_trained() -> None:
    assert example().processed() == 100 * (10 + 6 + 8)
    assert (example().processed("ann"), example().processed("bob"), example().processed("cat")) == (1600, 800, 0)


def test_work_merged_twice_is_an_error_by_name() -> None:
    ledger = example()
    assert not ledger.errors
    ledger.merge(version(1, 3, bob_1=[(1, 2, 4)], ann_2=[(0, 5, 3)]))
    assert ledger.errors == [
        "fragment 1, version 3: merges batches of bob (incarnation 1) that an earlier version already contains: share 1: 2 to 2"
    ]


def test_work_merged_and_never_trained_is_an_error_by_name() -> None:
    ledger = example()
    # ann restored what it had trained before, and offers it in its new incarnation; the other way round cannot be
    ledger.merge(version(1, 3, ann_2=[(0, 5, 3)]))
    assert ledger.untrained() == []
    ledger.merge(version(1, 4, ann_1=[(0, 10, 2)], bob_1=[(2, 4, 1)]))
    assert ledger.untrained() == [
        "fragment 1: versions hold batches of ann (incarnation 1) that it never trained: share 0: 10 to 11",
        "fragment 1: versions hold batches of bob (incarnation 1) that it never trained: share 2: 4 to 4",
    ]


def test_tokens_that_vary_are_the_growth_of_what_a_learner_says() -> None:
    ledger = Ledger(1)
    ledger.train(ANN, [], 100, 500)  # of a process before
    ledger.train(ANN, [(0, 0, 10)], 100, 500 + 123)
    assert (ledger.processed("ann"), ledger.batches("ann"), ledger.steps("ann", 623, 9)) == (123, 10, 10)
    ledger.train(ANN_AGAIN, [(0, 10, 2)], 100, 700)  # heard for the first time after 2 batches, then after 4 more of 30 each
    ledger.train(ANN_AGAIN, [(0, 10, 6)], 100, 700 + 120)
    ledger.train(ANN_AGAIN, [(0, 10, 5)], 100, 700 + 90)  # a heartbeat that another one has overtaken
    assert ledger.processed("ann") == 123 + 6 * 30
    ledger.train(BOB, [(1, 0, 8)], 100, 800)
    ledger.train(BOB, [(1, 0, 9)], 100, 900)
    assert (ledger.processed("bob"), ledger.steps("bob", 900, 5)) == (900, 9)
    again = Ledger.load(1, json.loads(json.dumps(ledger.dump())))
    assert again == ledger
    again.train(ANN_AGAIN, [(0, 10, 7)], 100, 700 + 121)
    assert again.processed("ann") == 123 + 121 + round(2 * 121 / 5)


def test_learners_whose_batches_differ_have_each_its_own_tokens() -> None:
    ledger = Ledger(1)
    ledger.train(ANN, [(0, 0, 10)], 64, 640)
    ledger.train(BOB, [(1, 0, 20)], 16, 320)
    ledger.train(ANN_AGAIN, [(0, 10, 1)])  # by its tape alone
    assert (ledger.processed("ann"), ledger.processed("bob"), ledger.batch_tokens, ledger.varies) == (11 * 64, 320, 64, True)
    assert (ledger.steps("ann", 640, 3), ledger.steps("bob", 320, 3), ledger.steps("cat", 640, 3)) == (10, 20, 10)
    assert Ledger.load(1, json.loads(json.dumps(ledger.dump()))) == ledger


def test_tokens_of_an_earlier_processs_offer_make_no_constant_batches_vary() -> None:
    ledger = Ledger(1)
    ledger.train(ANN, [], 100, 0)
    ledger.train(ANN, [(0, 0, 10)], 100, 1000 + 300)  # an offer of 300, made before a restart, was merged after all
    assert (ledger.processed("ann"), ledger.counted) == (1000, {})


def test_a_ledger_goes_on_from_what_it_was_saved_as() -> None:
    again = Ledger.load(2, json.loads(json.dumps(example().dump())))
    assert again == example()
    again.merge(version(0, 2, ann_2=[(0, 6, 6)]))  # told again: neither entered nor an error
    again.train(BOB, [(1, 0, 8)], 100)
    assert again == example()
    for wrong in ({}, example().dump() | {"trained": [["ann"]]}, example().dump() | {"merged": [[]]}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Ledger.load(2, wrong)
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        Ledger.load(3, example().dump())


PROCESSES = st.sampled_from([ANN, ANN_AGAIN, BOB])
RANGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 5)), max_size=3).map(ranges.normal)


@given(st.lists(st.tuples(PROCESSES, RANGES)), st.lists(st.lists(st.tuples(PROCESSES, RANGES), max_size=3)))
def test_every_batch_as_counted_one_by_one(
    trained: list[tuple[Process, list[Range]]], merged: list[list[tuple[Process, list[Range]]]]
) -> None:
    ledger = Ledger(1)
    trainers = defaultdict[tuple[int, int], set[Process]](set)
    twice = False
    for process, held in trained:
        ledger.train(process, held)
        for share, first, count in held:
            for batch in range(first, first + count):
                trainers[share, batch].add(process)
    mergers = defaultdict[tuple[int, int], set[Process]](set)
    for number, members in enumerate(merged, 1):
        by_process = {f"{learner}_{incarnation}": held for (learner, incarnation), held in members}
        ledger.merge(version(0, number, **by_process))
        for (learner, incarnation), held in dict(members).items():
            for share, first, count in held:
                for batch in range(first, first + count):
                    twice = twice or (learner, incarnation) in mergers[share, batch]
                    mergers[share, batch].add((learner, incarnation))
    lines = {(line.share, batch): line for line in ledger.lines(0) for batch in range(line.first, line.first + line.count)}
    assert lines.keys() == {batch for batch in {*trainers, *mergers} if trainers[batch] or mergers[batch]}
    for at, line in lines.items():
        assert (set(line.trained), set(line.merged)) == (trainers[at], mergers[at])
    assert bool(ledger.errors) == twice
    for summary in ledger.shares():
        mine = [batch for batch in trainers if batch[0] == summary.share and trainers[batch]]
        assert summary.trained == len(mine)
        assert summary.merged == sum(bool(mergers[batch]) for batch in mine)
        assert summary.lost == summary.trained - summary.merged
        assert summary.repeated == sum(len(trainers[batch]) - 1 for batch in mine)
        assert summary.learners == tuple(sorted({learner for batch in mine for learner, _ in trainers[batch]}))
    assert {s.share for s in ledger.shares()} == {share for share, batch in trainers if trainers[share, batch]}


def test_merged_work_on_data_of_a_learners_own_is_counted_as_not_accounted_for() -> None:
    ledger = example()
    assert ledger.own_tokens([3, 1]) == {}
    ledger.merge(version(0, 3, lab_1=[], bob_1=[(1, 8, 2)]))
    ledger.merge(version(1, 3, lab_1=[]))
    ledger.merge(version(0, 4, lab_1=[]))
    tokens = ledger.own[1]["lab"]
    assert ledger.own == [{"lab": 2 * tokens}, {"lab": tokens}]
    assert ledger.own_tokens([3, 1]) == {"lab": round((3 * 2 * tokens + tokens) / 4)}
    assert not any("lab" in reason for reason in ledger.untrained())  # it is unknown whether it trained it
    assert Ledger.load(2, json.loads(json.dumps(ledger.dump()))) == ledger
