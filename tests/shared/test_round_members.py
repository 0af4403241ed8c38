"""Members of rounds: combined offers, interleavings of learners, and more than one record has room for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made.heartbeats import learner_heartbeat
from tests.made.rounds import STEPS, Learner, commit, hold, hold_combined, members_of, names, offer, open_at, round_of

from diloco.core.syncer.round import Merge
from diloco.wire.body import PART_BYTES, Body
from diloco.wire.entries import Record
from diloco.wire.framing import MAX_FRAME_BYTES, pack
from diloco.wire.offers import MergeMember, Offer


def test_every_member_of_a_combined_offer_is_an_answer() -> None:
    round_ = round_of("ann", "bob", "cat", **{"round.quorum": 3, "round.grace_factor": 0})
    open_at(round_, 0)
    assert hold_combined(round_, offer("ann"), offer("bob")) is None
    assert len(round_.answers()) == 2
    assert round_.poll(1) is None  # three are wanted
    assert hold(round_, offer("cat")) is None
    merge = round_.poll(2)
    assert names(merge) == [("ann", 1), ("bob", 1), ("cat", 1)]
    assert merge is not None
    assert len(merge.held) == 2


def test_a_combined_offer_with_anything_merged_already_is_refused_whole() -> None:
    round_ = round_of("ann", "bob")
    open_at(round_, 0)
    hold(round_, offer("ann"))
    merge = round_.poll(10)
    assert merge is not None
    commit(round_, merge, 10)
    assert "merged already" in str(hold_combined(round_, offer("ann"), offer("bob")))
    assert "without knowing" in str(hold_combined(round_, offer("ann", 2), offer("bob")))
    assert hold_combined(round_, offer("bob")) is None  # a late one by itself


@pytest.mark.parametrize(
    ("first", "then", "held"),
    [
        (["ann1", "bob1"], ["ann1", "bob1"], ["ann1", "bob1"]),  # two syncers at once, or an owner that reads it twice
        (["ann1"], ["ann1", "bob1"], ["ann1", "bob1"]),  # bob was late
        (["ann1", "bob1"], ["ann1"], ["ann1", "bob1"]),
        (["ann1", "bob1"], ["ann2", "bob1"], ["ann2", "bob1"]),
        (["ann2", "bob1"], ["ann1", "bob2"], ["ann2", "bob1"]),  # neither is newer
        (["ann1", "bob1"], ["ann2"], ["ann2"]),  # what is newer goes first: bob's is a part of what it replaces
        (["ann1", "bob1"], ["ann1", "cat1"], ["ann1", "bob1"]),
        (["ann1", "bob1"], ["cat1"], ["ann1", "bob1", "cat1"]),
    ],
)
def test_nothing_is_in_two_offers_that_are_held(first: list[str], then: list[str], held: list[str]) -> None:
    round_ = round_of("ann", "bob", "cat")
    for group in (first, then):
        hold_combined(round_, *(offer(name[:3], int(name[3])) for name in group))
    members = [f"{member.learner}{member.number}" for item in set(round_.held.values()) for member in item.offer.members]
    assert sorted(members) == held


@given(st.permutations(["ann", "bob", "cat", "dee"]))
def test_the_order_of_merging_is_not_that_of_arrival(order: list[str]) -> None:
    round_ = round_of("ann", "bob", "cat", "dee", learners=4, **{"round.quorum": 4})
    open_at(round_, 0)
    for learner in order:
        hold(round_, offer(learner))
    assert names(round_.poll(0)) == [("ann", 1), ("bob", 1), ("cat", 1), ("dee", 1)]


def interleave(seed: int, quorum: object, grace: float, staleness: int) -> list[Merge]:
    """Random events of three learners and a network that delays, repeats and reorders; the versions that came of it."""
    # drawn by a generator of its own: a schedule is long, and hypothesis would spend its time on drawing it
    draw = random.Random(seed)
    changes = {"round.quorum": quorum, "round.grace_factor": grace, "round.max_staleness_versions": staleness}
    round_ = round_of(tokens=10**9, **changes)
    learners = [Learner(name) for name in ("ann", "bob", "cat")]
    log: list[Merge] = []
    pending: Merge | None = None
    seen: set[tuple[str, int, int]] = set()
    now_s = 0.0
    for _ in range(1500):
        learner = draw.choice(learners)
        action = draw.choices(["step", "heartbeat", "offer", "deliver", "apply", "tick", "restart"], [6, 6, 4, 6, 4, 12, 0.15])[
            0
        ]
        if action == "step":
            learner.take_step()
        elif action == "heartbeat":
            round_.roster.hear(learner.heartbeat(), now_s)
        elif action == "offer" and learner.steps:
            learner.offer(draw.randint(learner.version + 1, max(learner.version, round_.chain.version) + 1))
        elif action == "deliver" and learner.mailbox:
            hold(round_, draw.choice(learner.mailbox[-4:]))
        elif action == "apply" and learner.version < round_.chain.version:
            learner.apply(log[learner.version])
        elif action == "restart":
            learner.restart(round_)
        elif action == "tick":
            now_s += draw.choice([0.0, 0.3, 1.0])
            if round_.due(now_s, STEPS):
                round_.open(now_s)
            merge = round_.poll(now_s)
            if merge is not None:
                assert pending is None
                pending = merge
            elif pending is not None and draw.random() < 0.2:
                round_.without(())
                pending = None
            elif pending is not None:
                offers = members_of(pending)
                assert offers
                assert [o.learner for o in offers] == sorted({o.learner for o in offers})
                for o in offers:
                    identity = (o.learner, o.incarnation, o.number)
                    assert identity not in seen
                    assert 0 <= round_.chain.version - o.base_version <= staleness
                    seen.add(identity)
                    next(other for other in learners if other.name == o.learner).merged += o.tokens
                commit(round_, pending, now_s)  # the chain's own rules hold, too
                log.append(pending)
                pending = None
        for other in learners:
            # offers are cumulative, so an offer merged although a later one was would count its tokens twice
            assert other.merged <= other.done
    return log


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, "all"]), st.sampled_from([0, 0.9]), st.integers(0, 3))
def test_no_interleaving_merges_anything_twice(seed: int, quorum: object, grace: float, staleness: int) -> None:
    interleave(seed, quorum, grace, staleness)


def test_such_interleavings_do_make_versions() -> None:
    # a guard of the property above, which would hold if nothing were ever merged
    logs = [interleave(seed, 1, grace, 3) for seed in range(10) for grace in (0.0, 0.9)]
    merged = [(merge.version, offer) for log in logs for merge in log for offer in members_of(merge)]
    assert sum(len(log) for log in logs) > 100
    assert sum(offer.round < version for version, offer in merged) > 10  # late answers
    assert sum(offer.incarnation > 1 for _, offer in merged) > 10  # restarted learners


LARGE = 2**62
BUDGET = 10**18  # the largest: of a run whose offers have the largest numbers that can be


def many_ranges() -> list[tuple[int, int, int]]:
    return [(share, 2**59, 2**32) for share in range(4000, 4064)]


def large(learner: str) -> Offer:
    """An offer that takes as much of a record as any may."""
    counts = dict.fromkeys(("steps", "tokens", "lost_tokens"), 2**59)
    return offer(learner, incarnation=LARGE, data=many_ranges(), **counts)


def test_a_round_merges_what_one_record_has_room_for_and_the_next_ones_the_rest() -> None:
    learners = [f"{'x' * 43}-{i:04}" for i in range(1000)]
    round_ = round_of(*learners, learners=1000, tokens=BUDGET)
    for learner in learners:
        assert hold(round_, large(learner)) is None
    round_.open(0.0)
    merge = round_.poll(0.0)
    assert merge is not None
    chosen = members_of(merge)
    assert 300 < len(chosen) < 400  # some 1,500 bytes each, nearly all in 64 ranges of 22
    assert [o.learner for o in chosen] == learners[: len(chosen)]
    members = [
        MergeMember(
            o.learner, o.incarnation, o.number, o.round, o.base_version, o.steps, o.tokens, o.lost_tokens, 1e300, o.data
        )
        for o in chosen
    ]
    record = Record(
        0, "version", LARGE, LARGE, "s" * 48, bytes(32), members, [], 32, 1e6, 1.0, LARGE, LARGE, bytes(32), False,
        1e12, 1e12, 1e12, Body(size_bytes=2**40, content_hash=bytes(32), parts=2**22, attempt=bytes(8)),
    )  # fmt: skip
    frame = pack(record, bytes(8), bytes(PART_BYTES))  # with as large a body in it as any head has
    assert MAX_FRAME_BYTES - 4096 < len(frame) <= MAX_FRAME_BYTES


def test_what_had_no_room_comes_first_in_the_next_round_and_closing_waits_for_all() -> None:
    learners = [f"x{i:03}" for i in range(400)]
    round_ = round_of(*learners, learners=400, tokens=BUDGET)
    round_.chain.tokens_merged = BUDGET
    for learner in learners:
        round_.roster.hear(learner_heartbeat(learner, STEPS, tokens=BUDGET, state="closing"), 0.0)
        assert hold(round_, small_but_many(learner)) is None
    round_.open(0.0)
    assert round_.closing
    merge = round_.poll(0.0)
    assert merge is not None
    assert not merge.closing
    first = [member.learner for member in members_of(merge)]
    assert 0 < len(first) < 400
    commit(round_, merge, 0.0)
    for learner in learners:  # all answer again: those whose offer was merged with nothing
        merged = learner in first
        round_.roster.hear(
            learner_heartbeat(learner, STEPS + 1, 1, tokens=BUDGET, state="closing", steps=[0 if merged else 4]), 1.0
        )
        if not merged:
            assert hold(round_, small_but_many(learner, version=2, number=2)) is None
    round_.open(1.0)
    merge = round_.poll(1.0)
    assert merge is not None
    assert merge.closing
    assert [member.learner for member in members_of(merge)] == learners[len(first) :]


def small_but_many(learner: str, version: int = 1, number: int = 1) -> Offer:
    return offer(learner, number, version, data=many_ranges(), steps=2**40, tokens=2**40)
