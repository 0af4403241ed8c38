"""A fragment's rounds under a clock of the test's own: when they open, whose offers are in them, when they close."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core.chain import Chain
from diloco.core.round import Held, Merge, Roster, Round
from diloco.settings import RunSettings, run_settings
from diloco.wire.messages import (
    MAX_FRAME_BYTES,
    PART_BYTES,
    Answer,
    Body,
    Combined,
    Cursor,
    Member,
    Offer,
    Pulse,
    Record,
    RolledBack,
    pack,
)

BODY = Body(size_bytes=0, content_hash=b"c" * 32, parts=0, attempt=b"attempt.")
RAW = np.zeros(0, np.uint8)
STEPS = 4  # H of these tests


def hash_of(version: int) -> bytes:
    return version.to_bytes(32, "big")


def settings_of(**changes: Any) -> RunSettings:
    """Three learners, one fragment, H = 4; liveness ends after 5 s."""
    defaults = {"learners": 3, "shards": 1, "fragments.count": 1, "round.steps": STEPS, "tokens": 1000}
    return run_settings("decoupled", defaults | changes)


def pulse(learner: str, step: int = 0, version: int = 0, **changes: Any) -> Pulse:
    values: dict[str, Any] = {
        "learner": learner,
        "region": "",
        "incarnation": 1,
        "role": "learner",
        "state": "stepping",
        "sending": False,
        "step": step,
        "tokens": 0,
        "step_s": 1.0,
        "loss": None,
        "versions": [version],
        "steps": [step],
        "fragment_tokens": [0],
        "lost_tokens": [0],
        "trained": [],
        "batch_tokens": 0,
        "busy_s": 0.0,
        "blocked_s": 0.0,
        "bytes_up": 0,
        "bytes_down": 0,
        "refused": 0,
        "software": "",
    }
    return Pulse(**(values | changes))


def offer(learner: str, number: int = 1, version: int = 1, **changes: Any) -> Offer:
    """An offer of version - 1 as its base, in answer to the round of ``version``."""
    base = changes.get("base_version", version - 1)
    values: dict[str, Any] = {
        "fragment": 0,
        "learner": learner,
        "incarnation": 1,
        "number": number,
        "after": (0, 0),
        "round": version,
        "base_version": base,
        "base_hash": hash_of(base),
        "bits": 4,
        "steps": 4,
        "tokens": 40,
        "lost_tokens": 0,
        "data": [(0, 4 * (version - 1), 4)],
        "body": BODY,
    }
    return Offer(**(values | changes))


def round_of(*learners: str, **changes: Any) -> Round:
    """A round of version 1 over learners that were heard at ``now_s`` (0) when they had taken ``step`` (H) steps."""
    now_s, step = changes.pop("now_s", 0.0), changes.pop("step", STEPS)
    roster = Roster(settings_of(**changes))
    for learner in learners:
        roster.hear(pulse(learner, step), now_s)
    return Round(roster, Chain(0, 0, 0, bytes(32), 0, hash_of(0)), 1)


def hold(round_: Round, sent: Offer) -> str | None:
    return round_.hold(Held(sent, RAW))


def names(merge: Merge | None) -> list[tuple[str, int]] | None:
    return None if merge is None else [(member.learner, member.number) for member in members_of(merge)]


def members_of(merge: Merge) -> list[Offer | Answer]:
    return sorted((member for held in merge.held for member in held.offer.members), key=lambda member: member.learner)


def commit(round_: Round, merge: Merge, now_s: float) -> None:
    """Let the merge become a version, through the log's own rules."""
    chain = round_.chain
    offers = members_of(merge)
    members = [
        Member(o.learner, o.incarnation, o.number, o.round, o.base_version, o.steps, o.tokens, o.lost_tokens, 1.0, o.data)
        for o in offers
    ]
    lost = {name: cursor.lost_tokens for name, cursor in chain.cursors.items()}
    lost |= {o.learner: o.lost_tokens for o in offers}
    record = Record(
        fragment=0,
        entry="version" if members else "close",
        version=merge.version if members else chain.version,
        epoch=0,
        syncer="syncer-0",
        previous=chain.head,
        members=members,
        combined=[],
        bits=4,
        learning_rate=0.5,
        momentum=0.0,
        tokens_merged=chain.tokens_merged + sum(o.tokens for o in offers),
        tokens_lost=sum(lost.values()),
        state_hash=hash_of(merge.version) if members else chain.state_hash,
        closing=merge.closing,
        committed_at_s=now_s,
        quorum_s=0.0,
        round_s=0.0,
        body=BODY if members else None,
    )
    chain.check(record)
    chain.advance(record, hash_of(10_000 + merge.version), merge.version)
    round_.committed(now_s)


def open_at(round_: Round, now_s: float) -> None:
    assert round_.due(now_s, STEPS)
    round_.open(now_s)


def test_a_round_is_due_when_the_quorum_took_h_steps() -> None:
    round_ = round_of("ann", "bob", "cat", step=STEPS - 1, **{"round.quorum": 2})
    assert not round_.due(0, STEPS)
    round_.roster.hear(pulse("ann", STEPS), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(pulse("bob", STEPS), 0)
    assert round_.due(0, STEPS)
    round_.open(0)
    assert not round_.due(0, STEPS)


def test_a_round_is_due_too_when_nobody_takes_a_step_any_more() -> None:
    """Learners that wait for versions, ann for this fragment's and bob for another one's: neither would come."""
    round_ = round_of("ann", "bob", step=STEPS - 1, **{"round.quorum": "all", "liveness.pulse_s": 0.5})
    round_.roster.hear(pulse("ann", STEPS, state="waiting"), 1.0)
    assert not round_.due(3.5, STEPS), "bob steps on"
    for learner, step in (("ann", STEPS), ("bob", STEPS - 1)):
        round_.roster.hear(pulse(learner, step, state="waiting"), 4.0)
    assert not round_.due(4.0, STEPS)
    assert not round_.due(5.9, STEPS)
    assert round_.due(6.0, STEPS)
    round_.open(6.0)
    hold(round_, offer("ann"))
    assert round_.poll(6.1) is None, "it needs its quorum"
    hold(round_, offer("bob"))
    assert names(round_.poll(6.2)) == [("ann", 1), ("bob", 1)]


def test_all_means_all_that_are_alive() -> None:
    round_ = round_of("ann", "bob", "cat", step=STEPS - 1, **{"round.quorum": "all"})
    round_.roster.hear(pulse("ann", STEPS), 4)
    round_.roster.hear(pulse("bob", STEPS), 4)
    assert not round_.due(4, STEPS)
    assert round_.due(5, STEPS)  # cat has not been heard for 5 s


def test_nobody_alive_no_round() -> None:
    round_ = round_of("ann", **{"round.quorum": "all"})
    assert round_.due(4.9, STEPS)
    assert not round_.due(5, STEPS)


@pytest.mark.parametrize(
    "changes", [{"role": "evaluator"}, {"state": "starting"}, {"state": "recovering"}, {"state": "left"}, {"state": "finished"}]
)
def test_who_takes_no_part_makes_no_round_due(changes: dict[str, Any]) -> None:
    round_ = round_of()
    round_.roster.hear(pulse("ann", STEPS, **changes), 0)
    assert not round_.due(0, STEPS)
    assert round_.roster.live(0) == []


def leaving(learner: str, unmerged: int, version: int = 0) -> Pulse:
    return pulse(learner, 2 * STEPS, version, state="leaving", steps=[unmerged])


def test_a_learner_that_leaves_makes_a_round_due_while_it_holds_something() -> None:
    round_ = round_of("ann", "bob", step=1)
    assert not round_.due(0, STEPS)
    round_.roster.hear(leaving("bob", 0), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(leaving("cat", 2), 0)
    assert round_.due(0, STEPS)
    assert not round_.due(5, STEPS)  # it has died meanwhile


def test_what_a_leaving_learner_holds_of_an_older_version_waits_until_it_knows_the_newest() -> None:
    round_ = round_of("ann")
    open_at(round_, 0)
    hold(round_, offer("ann"))
    merge = round_.poll(0)
    assert merge is not None
    commit(round_, merge, 0)
    round_.roster.hear(leaving("bob", 2, version=0), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(leaving("bob", 2, version=1), 0)
    assert round_.due(0, STEPS)


def test_a_leaving_learner_is_waited_for_while_it_holds_something_and_counts_for_a_quorum_that_it_makes_smaller() -> None:
    round_ = round_of("ann", "bob", **{"round.quorum": 3, "round.grace_factor": 0.9})
    round_.roster.hear(leaving("bob", 2), 0)
    assert round_.quorum(0) == 2  # of three, of whom two are there
    open_at(round_, 0)
    hold(round_, offer("ann"))
    assert round_.poll(0.1) is None
    hold(round_, offer("bob", steps=2))
    assert names(round_.poll(0.2)) == [("ann", 1), ("bob", 1)]
    round_ = round_of("ann", "bob", **{"round.quorum": "all"})
    round_.roster.hear(leaving("bob", 0), 0)
    open_at(round_, 0)
    hold(round_, offer("ann"))
    assert names(round_.poll(0.1)) == [("ann", 1)]  # nobody waits for one that holds nothing


def test_h_counts_from_the_step_at_which_the_version_was_applied() -> None:
    round_ = round_of("ann")
    open_at(round_, 0)
    assert hold(round_, offer("ann")) is None
    merge = round_.poll(0)
    assert merge is not None
    commit(round_, merge, 0)
    round_.roster.hear(pulse("ann", 9, 0), 0)  # 9 steps, but none of them since version 1
    assert not round_.due(0, STEPS)
    round_.roster.hear(pulse("ann", 10, 1), 0)
    round_.roster.hear(pulse("ann", 13, 1), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(pulse("ann", 14, 1), 0)
    assert round_.due(0, STEPS)
    assert not round_.due(0, 2 * STEPS)  # where a link is slow more steps lie between two rounds
    round_.roster.hear(pulse("ann", 18, 1), 0)
    assert round_.due(0, 2 * STEPS)


@pytest.mark.parametrize(("fragment", "due_at"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_first_rounds_are_staggered(fragment: int, due_at: int) -> None:
    roster = Roster(settings_of(**{"fragments.count": 4}))
    round_ = Round(roster, Chain(fragment, 0, 0, bytes(32), 0, hash_of(0)), 4)
    roster.hear(pulse("ann", due_at - 1, versions=[0] * 4), 0)
    assert not round_.due(0, STEPS)
    roster.hear(pulse("ann", due_at, versions=[0] * 4), 0)
    assert round_.due(0, STEPS)


def test_a_newcomer_alone_cannot_make_a_version_before_it_has_applied() -> None:
    round_ = round_of("ann")
    open_at(round_, 0)
    hold(round_, offer("ann"))
    merge = round_.poll(0)
    assert merge is not None
    commit(round_, merge, 0)
    # ann is gone; zoe has stepped for long, on version 0
    now_s = 100.0
    round_.roster.hear(pulse("zoe", 50, 0), now_s)
    assert not round_.due(now_s, STEPS)
    round_.roster.hear(pulse("zoe", 60, 1), now_s)  # applied: its H steps begin now
    assert not round_.due(now_s, STEPS)
    round_.roster.hear(pulse("zoe", 60 + STEPS, 1), now_s)
    assert round_.due(now_s, STEPS)


def test_pulses_out_of_order_are_ignored() -> None:
    roster = Roster(settings_of())
    assert roster.hear(pulse("ann", 5), 0)
    assert not roster.hear(pulse("ann", 4), 1)
    assert roster.hear(pulse("ann", 5), 2)
    assert roster.hear(pulse("ann", 1, incarnation=2), 3)  # restarted
    assert not roster.hear(pulse("ann", 99), 4)
    assert not roster.hear(pulse("eva", 9, role="evaluator"), 4)
    assert [(seen.pulse.step, seen.at_s) for seen in roster.live(4)] == [(1, 3)]


def test_a_restart_counts_its_steps_anew() -> None:
    round_ = round_of()
    round_.chain.version = 1
    round_.roster.hear(pulse("ann", 10, 1), 0)
    round_.roster.hear(pulse("ann", 14, 1, incarnation=2), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(pulse("ann", 18, 1, incarnation=2), 0)
    assert round_.due(0, STEPS)


def test_the_step_time_is_the_median_of_the_living() -> None:
    roster = Roster(settings_of())
    assert roster.step_s(0) == 1
    for learner, step_s in {"ann": 0.1, "bob": 0.3, "cat": 9.0, "new": 0.0}.items():
        roster.hear(pulse(learner, step_s=step_s), 0)
    assert roster.step_s(0) == 0.3
    roster.hear(pulse("ann", step_s=0.1), 4)
    assert roster.step_s(6) == 0.1


def test_tokens_of_the_dead_count() -> None:
    roster = Roster(settings_of(tokens=100))
    roster.hear(pulse("ann", tokens=60), 0)
    assert not roster.used_up(0)
    roster.hear(pulse("bob", tokens=40), 100)
    assert roster.tokens_processed() == 100
    assert roster.used_up(100)


def test_the_budget_is_used_up_when_all_who_live_have_stopped() -> None:
    # ann was killed: of its 60 tokens 50 count again. bob and ann had stopped before, and take no step any more
    roster = Roster(settings_of(tokens=100))
    roster.hear(pulse("ann", tokens=50, state="closing"), 0)
    roster.hear(pulse("bob", tokens=40, state="stepping"), 0)
    assert not roster.used_up(0)
    roster.hear(pulse("bob", tokens=40, state="closing"), 1)
    assert roster.used_up(1)
    assert not roster.used_up(100)  # nobody lives: whoever comes may take the missing steps


def test_a_round_is_due_for_learners_that_wait_whatever_an_owner_has_heard_of_their_steps() -> None:
    # an owner that begins after they took their steps sees none of them
    settings = settings_of(**{"round.quorum": 2})
    round_ = Round(Roster(settings), Chain(0, 3, 0, bytes(32), 9, hash_of(3)), 1)
    for learner in ("ann", "bob"):
        round_.roster.hear(pulse(learner, 20, version=3, steps=[STEPS], state="stepping"), 0)
    assert not round_.due(0, STEPS)
    for learner in ("ann", "bob"):
        round_.roster.hear(pulse(learner, 20, version=3, steps=[STEPS - 1], state="waiting"), 1)
    assert not round_.due(1, STEPS)  # it is another fragment that they wait for
    for learner in ("ann", "bob"):
        round_.roster.hear(pulse(learner, 20, version=3, steps=[STEPS], state="waiting"), 2)
    assert round_.due(2, STEPS)


def test_in_lockstep_a_round_is_open_before_the_step_that_it_is_for() -> None:
    lockstep = {"round.steps": 1, "round.learners_wait": True, "round.quorum": "all", "round.grace_factor": 0}
    round_ = round_of(**lockstep)
    assert not round_.due(0, STEPS)  # nobody lives
    for learner in ("ann", "bob"):
        round_.roster.hear(pulse(learner, 0), 0)
    open_at(round_, 0)
    assert hold(round_, offer("ann", steps=1)) is None
    assert round_.poll(1) is None
    assert hold(round_, offer("bob", steps=1)) is None
    merge = round_.poll(2)
    assert names(merge) == [("ann", 1), ("bob", 1)]
    assert merge is not None
    commit(round_, merge, 2)
    # bob does not come to the next step, and is left out when it has been silent for long
    open_at(round_, 2)
    assert hold(round_, offer("ann", 2, 2, steps=1, after=(1, 1))) is None
    round_.roster.hear(pulse("ann", 2, version=1), 4.9)
    assert round_.poll(4.9) is None
    assert names(round_.poll(5)) == [("ann", 2)]


def test_a_learner_that_is_out_of_step_is_not_waited_for() -> None:
    lockstep = {"round.steps": 1, "round.learners_wait": True, "round.quorum": "all", "round.grace_factor": 0}
    round_ = round_of("ann", **lockstep)
    round_.roster.hear(pulse("bob", 5, state="recovering"), 0)
    open_at(round_, 0)
    assert hold(round_, offer("ann", steps=1)) is None
    assert names(round_.poll(1)) == [("ann", 1)]


@pytest.mark.parametrize(("quorum", "closes_with"), [(1, 1), (2, 2), (3, 3), ("all", 3)])
def test_without_a_grace_window_a_round_closes_at_its_quorum(quorum: object, closes_with: int) -> None:
    round_ = round_of("ann", "bob", "cat", **{"round.quorum": quorum, "round.grace_factor": 0})
    open_at(round_, 0)
    for count, learner in enumerate(["cat", "ann", "bob"], start=1):
        assert round_.poll(1) is None
        assert hold(round_, offer(learner)) is None
        if count == closes_with:
            break
    merge = round_.poll(1.5)
    assert names(merge) == sorted((learner, 1) for learner in ["cat", "ann", "bob"][:closes_with])
    assert merge is not None
    assert (merge.version, merge.closing, merge.quorum_s, merge.round_s) == (1, False, 1.5, 1.5)


def test_the_grace_window_by_hand() -> None:
    # gamma 0.9, tau 2, xi_step 1. First round: xi_quorum 0.5, xi_sync 0: 0.9 * (2 - 0.5) = 1.35 after the quorum
    round_ = round_of("ann", "bob", "cat", now_s=100)
    open_at(round_, 100)
    assert round_.remaining_s(100.2) == pytest.approx(1.6)  # 0.9 * 2 - 0.2
    hold(round_, offer("ann"))
    assert round_.poll(100.5) is None
    assert round_.remaining_s(101) == pytest.approx(0.85)
    assert round_.poll(101.84) is None
    hold(round_, offer("cat"))  # within the window
    merge = round_.poll(101.86)
    assert names(merge) == [("ann", 1), ("cat", 1)]
    assert merge is not None
    assert merge.quorum_s == pytest.approx(0.5)
    assert merge.round_s == pytest.approx(1.86)
    commit(round_, merge, 102.11)  # xi_sync 0.25
    assert round_.remaining_s(102.11) == 0
    # second round, quorum after 0.5 again: 0.9 * (2 - 0.5 - 0.25) = 1.125
    for learner in ("ann", "bob", "cat"):
        round_.roster.hear(pulse(learner, 10, 1), 110)
        round_.roster.hear(pulse(learner, 14, 1), 110)
    open_at(round_, 110)
    hold(round_, offer("ann", 2, 2, after=(1, 1)))
    assert round_.poll(110.5) is None
    assert round_.poll(111.62) is None
    assert round_.poll(111.63) is not None


def test_a_round_closes_early_when_all_that_live_have_answered() -> None:
    round_ = round_of("ann", "bob")
    open_at(round_, 0)
    hold(round_, offer("bob"))
    assert round_.poll(0.1) is None
    hold(round_, offer("ann"))
    assert names(round_.poll(0.1)) == [("ann", 1), ("bob", 1)]


def test_a_learner_that_dies_does_not_block() -> None:
    round_ = round_of("ann", "bob", **{"round.quorum": "all", "round.grace_factor": 0})
    open_at(round_, 0)
    hold(round_, offer("ann"))
    round_.roster.hear(pulse("ann", 5), 4)
    assert round_.poll(4.9) is None
    assert names(round_.poll(5)) == [("ann", 1)]


def test_the_offer_of_a_learner_that_died_since_is_merged() -> None:
    round_ = round_of("ann", "bob")
    open_at(round_, 0)
    hold(round_, offer("bob"))
    round_.roster.hear(pulse("ann", 5), 8)
    hold(round_, offer("ann"))
    assert names(round_.poll(8)) == [("ann", 1), ("bob", 1)]


def test_offers_without_steps_make_no_version() -> None:
    round_ = round_of("ann", **{"round.grace_factor": 0})
    open_at(round_, 0)
    hold(round_, offer("ann", steps=0, tokens=0))
    assert round_.poll(50) is None
    round_.roster.hear(pulse("ann", 5), 50)
    hold(round_, offer("ann", 2))
    assert names(round_.poll(50)) == [("ann", 2)]


def test_an_answer_to_an_earlier_round_is_merged_but_is_no_quorum() -> None:
    round_ = round_of("ann", "bob", **{"round.grace_factor": 0})
    open_at(round_, 0)
    hold(round_, offer("ann"))
    merge = round_.poll(1)
    assert merge is not None
    assert hold(round_, offer("bob")) is None  # came while the merge was being made
    commit(round_, merge, 1)
    round_.open(2)
    assert round_.poll(3) is None
    round_.roster.hear(pulse("ann", 9, 1), 3)
    assert hold(round_, offer("ann", 2, 2, after=(1, 1))) is None
    merge = round_.poll(3)
    assert names(merge) == [("ann", 2), ("bob", 1)]


def test_one_merge_at_a_time_and_again_if_it_came_to_nothing() -> None:
    round_ = round_of("ann")
    open_at(round_, 0)
    hold(round_, offer("ann"))
    first = round_.poll(0)
    assert round_.poll(1) is None
    round_.abandoned()
    second = round_.poll(2)
    assert names(first) == names(second) == [("ann", 1)]


def test_an_older_offer_comes_never_after_a_newer_one() -> None:
    round_ = round_of("ann")
    assert hold(round_, offer("ann", 2)) is None
    for again in (offer("ann", 2), offer("ann", 1), offer("ann", 9, incarnation=0)):
        assert hold(round_, again) == "superseded by a newer offer, or a duplicate"
    assert hold(round_, offer("ann", 3, tokens=99)) is None
    assert hold(round_, offer("ann", 1, incarnation=2)) is None
    assert [held.offer.members[0].incarnation for held in round_.held.values()] == [2]


def round_at(version: int, *, staleness: int = 2) -> Round:
    """A log at ``version`` that holds ann's offer 3."""
    round_ = round_of("ann", **{"round.max_staleness_versions": staleness})
    chain = round_.chain
    chain.cursors["ann"] = Cursor("ann", 1, 3, 1, 40, 0)
    for number in range(1, version + 1):
        chain.version, chain.state_hash = number, hash_of(number)
        round_.committed(0)
    return round_


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (offer("ann", 3, 6, after=(1, 3)), r"merged already, as (1, 3) or before"),
        (offer("ann", 2, 6), r"merged already, as (1, 3) or before"),
        (offer("ann", 4, 6), r"made without knowing that (1, 3) was merged (it states (0, 0))"),
        (offer("ann", 4, 6, after=(1, 2)), r"made without knowing that (1, 3) was merged (it states (1, 2))"),
        (offer("bob", 4, 6, after=(1, 3)), r"made without knowing that (0, 0) was merged (it states (1, 3))"),
        (offer("bob", 1, 7), "from the future: base 6, round 7, log at 5"),
        (offer("bob", 1, 7, base_version=5), "from the future: base 5, round 7, log at 5"),
        (offer("bob", 1, 6, base_version=6), "from the future: base 6, round 6, log at 5"),
        (offer("bob", 1, 6, base_version=2), "its base 2 is too old, log at 5"),
        (offer("bob", 1, 6, base_hash=b"x" * 32), "its base 5 has another state hash than the log's"),
        (offer("bob", 1, 4, base_hash=b"x" * 32), "its base 3 has another state hash than the log's"),
    ],
)
def test_what_is_not_fit_is_refused_with_the_reason(sent: Offer, reason: str) -> None:
    round_ = round_at(5)
    assert hold(round_, sent) == reason
    assert round_.held == {}


@pytest.mark.parametrize(
    "sent",
    [
        offer("ann", 4, 6, after=(1, 3)),
        offer("ann", 1, 6, after=(1, 3), incarnation=2),
        offer("bob", 1, 6, base_version=3),  # just young enough
        offer("bob", 1, 4),  # a late answer
    ],
)
def test_what_is_fit_is_held(sent: Offer) -> None:
    round_ = round_at(5)
    assert round_.refuse(sent) is None
    assert round_.held == {}
    assert hold(round_, sent) is None
    assert round_.held[sent.learner].offer == sent


def test_a_commit_drops_what_it_made_unfit() -> None:
    round_ = round_at(5)
    hold(round_, offer("bob", 1, 6, base_version=3))
    hold(round_, offer("cat", 1, 6, base_version=4))
    round_.chain.version, round_.chain.state_hash = 6, hash_of(6)
    round_.committed(0)
    assert list(round_.held) == ["cat"]


def test_a_closed_run_takes_no_offers_and_opens_no_round() -> None:
    round_ = round_of("ann", tokens=1)
    round_.roster.hear(pulse("ann", 5, tokens=1), 0)
    assert round_.due(0, STEPS)
    round_.chain.closed = True
    assert not round_.due(0, STEPS)
    assert hold(round_, offer("ann")) == "the run is closed"


def used_up(*learners: str, **changes: Any) -> Round:
    """A round that is closing: ann and bob have used up the budget."""
    round_ = round_of(**({"tokens": 100} | changes))
    for learner in learners:
        round_.roster.hear(pulse(learner, 6, tokens=100, steps=[2]), 0)
    open_at(round_, 0)
    assert round_.closing
    return round_


def test_a_closing_round_waits_for_all_that_the_living_hold() -> None:
    round_ = used_up("ann", "bob")
    hold(round_, offer("ann"))
    assert round_.poll(1) is None
    round_.roster.hear(pulse("bob", 7, tokens=100, steps=[3], state="closing"), 1)
    assert round_.poll(4) is None  # bob has stopped, and holds three steps
    hold(round_, offer("bob", steps=3))
    assert round_.poll(4.2) is None  # ann has answered, and not stopped
    round_.roster.hear(pulse("ann", 7, tokens=100, steps=[5], state="closing"), 4.3)
    assert round_.poll(4.3) is None  # her answer lacks the last step: it is one to an owner before this one
    hold(round_, offer("ann", 2, steps=5))
    merge = round_.poll(4.5)
    assert names(merge) == [("ann", 2), ("bob", 1)]
    assert merge is not None
    assert merge.closing
    commit(round_, merge, 5)
    assert round_.chain.closed
    assert not round_.due(5, STEPS)


def test_a_closing_round_needs_no_answer_of_who_holds_nothing() -> None:
    round_ = used_up("ann", "bob")
    hold(round_, offer("ann"))
    round_.roster.hear(pulse("ann", 6, tokens=100, steps=[2], state="closing"), 1)
    round_.roster.hear(pulse("bob", 7, tokens=100, steps=[0], state="stepping"), 1)
    assert round_.poll(1) is None  # it may still step
    round_.roster.hear(pulse("bob", 7, tokens=100, steps=[0], state="closing", version=0), 1)
    assert names(round_.poll(1)) == [("ann", 1)]


def test_a_closing_round_waits_for_who_has_not_applied_the_last_version() -> None:
    round_ = used_up("ann")
    round_.roster.hear(pulse("ann", 7, tokens=100, steps=[0], state="closing", versions=[7]), 1)
    assert round_.poll(1) is None
    round_.roster.hear(pulse("ann", 7, tokens=100, steps=[0], state="closing", versions=[0]), 1)
    assert names(round_.poll(1)) == []


def test_a_closing_round_does_not_hang_on_the_dead() -> None:
    round_ = used_up("ann", "bob", **{"round.quorum": 3})
    hold(round_, offer("ann"))
    round_.roster.hear(pulse("ann", 6, tokens=100, steps=[2], state="closing"), 4)
    assert round_.poll(4.9) is None
    assert names(round_.poll(5)) == [("ann", 1)]


def test_with_nothing_left_the_log_is_closed_without_a_version() -> None:
    round_ = used_up("ann")
    round_.roster.hear(pulse("ann", 7, tokens=100, steps=[0], state="closing"), 1)
    merge = round_.poll(1)
    assert names(merge) == []
    assert merge is not None
    commit(round_, merge, 1)
    assert (round_.chain.closed, round_.chain.version) == (True, 0)


def test_an_open_round_does_not_wait_at_the_end_for_who_has_nothing_to_answer() -> None:
    # bob came too late to take a step: the others have used up the budget
    round_ = round_of("ann", tokens=100, **{"round.quorum": "all", "round.grace_factor": 0})
    open_at(round_, 0)
    round_.roster.hear(pulse("bob"), 1)
    hold(round_, offer("ann"))
    assert round_.poll(1) is None
    round_.roster.hear(pulse("ann", 20, tokens=100, steps=[20], state="closing"), 2)
    round_.roster.hear(pulse("bob", state="closing"), 2)
    assert names(round_.poll(2)) == [("ann", 1)]


def test_an_open_round_does_not_wait_for_a_quorum_that_the_end_has_made_impossible() -> None:
    # bob dies for good while the round is open; ann goes on to the end of the budget and stops
    round_ = round_of("ann", "bob", tokens=100, **{"round.quorum": 2, "round.grace_factor": 0})
    open_at(round_, 0)
    hold(round_, offer("ann"))
    round_.roster.hear(pulse("ann", 8), 10)
    assert round_.poll(10) is None
    round_.roster.hear(pulse("ann", 20, tokens=100, steps=[20], state="closing"), 20)
    merge = round_.poll(20)
    assert names(merge) == [("ann", 1)]
    assert merge is not None
    assert not merge.closing  # ann still holds the steps since its offer: they go into the closing round
    commit(round_, merge, 20)
    open_at(round_, 20)
    assert round_.closing


def test_an_open_round_that_nobody_can_answer_any_more_becomes_the_closing_one() -> None:
    round_ = round_of("ann", "bob", tokens=100)
    open_at(round_, 0)
    round_.roster.hear(pulse("ann", 20, tokens=100, steps=[2], state="closing"), 20)
    assert round_.poll(20) is None  # it holds two steps, and will answer
    round_.roster.hear(pulse("ann", 20, tokens=100, steps=[0], state="closing"), 20)
    merge = round_.poll(20)
    assert names(merge) == []
    assert merge is not None
    assert merge.closing


def combine(*offers: Offer, number: int = 1) -> Combined:
    return Combined(0, "syncer-1", 1, number, 4, [Answer.of(offer) for offer in offers], BODY)


def hold_combined(round_: Round, *offers: Offer) -> str | None:
    return round_.hold(Held(combine(*offers), RAW))


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


@dataclass
class Learner:
    """A learner as the protocol wants it, reduced to numbers: it may restart, and its messages may be late or doubled."""

    name: str
    incarnation: int = 1
    number: int = 1
    after: tuple[int, int] = (0, 0)
    version: int = 0
    step: int = 0
    steps: int = 0  # not merged yet
    tokens: int = 0
    done: int = 0  # tokens, in all
    merged: int = 0
    mailbox: list[Offer] = field(default_factory=list)

    def pulse(self) -> Pulse:
        values = {"incarnation": self.incarnation, "steps": [self.steps]}
        return pulse(self.name, self.step, self.version, **values)

    def take_step(self) -> None:
        self.step += 1
        self.steps += 1
        self.tokens += 10
        self.done += 10

    def offer(self, version: int) -> None:
        changes = {"base_version": self.version, "base_hash": hash_of(self.version), "incarnation": self.incarnation}
        counters = {"steps": self.steps, "tokens": self.tokens, "after": self.after}
        self.mailbox.append(offer(self.name, self.number, version, **changes, **counters))
        self.number += 1

    def apply(self, merge: Merge) -> None:
        self.version = merge.version
        for merged in members_of(merge):
            if merged.learner == self.name:
                self.after = (merged.incarnation, merged.number)
                if merged.incarnation == self.incarnation:
                    self.steps -= merged.steps
                    self.tokens -= merged.tokens

    def restart(self, round_: Round) -> None:
        self.incarnation += 1
        self.number, self.steps, self.tokens = 1, 0, 0
        self.version, self.after = round_.chain.version, round_.chain.cursor(self.name)


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
        action = draw.choices(["step", "pulse", "offer", "deliver", "apply", "tick", "restart"], [6, 6, 4, 6, 4, 12, 0.15])[0]
        if action == "step":
            learner.take_step()
        elif action == "pulse":
            round_.roster.hear(learner.pulse(), now_s)
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
                round_.abandoned()
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
    logs = [interleave(seed, 1, 0.9, 3) for seed in range(20)]
    merged = [(merge.version, offer) for log in logs for merge in log for offer in members_of(merge)]
    assert sum(len(log) for log in logs) > 100
    assert sum(offer.round < version for version, offer in merged) > 10  # late answers
    assert sum(offer.incarnation > 1 for _, offer in merged) > 10  # restarted learners


LARGE = 2**62


def large(learner: str, version: int = 1, number: int = 1) -> Offer:
    """An offer that takes as much of a record as any may."""
    data = [(share, LARGE - 2**32, 2**32) for share in range(2**14 - 64, 2**14)]
    counts = dict.fromkeys(("incarnation", "steps", "tokens", "lost_tokens"), LARGE)
    return offer(learner, number, version, data=data, **counts)


def test_a_round_merges_what_one_record_has_room_for_and_the_next_ones_the_rest() -> None:
    learners = [f"{'x' * 43}-{i:04}" for i in range(1000)]
    round_ = round_of(*learners, learners=1000, tokens=10)
    for learner in learners:
        assert hold(round_, large(learner)) is None
    round_.open(0.0)
    merge = round_.poll(0.0)
    assert merge is not None
    chosen = members_of(merge)
    assert 300 < len(chosen) < 400  # some 1,500 bytes each, nearly all in 64 ranges of 22
    assert [o.learner for o in chosen] == learners[: len(chosen)]
    members = [
        Member(o.learner, o.incarnation, o.number, o.round, o.base_version, o.steps, o.tokens, o.lost_tokens, 1e300, o.data)
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
    round_ = round_of(*learners, learners=400, tokens=10)
    for learner in learners:
        round_.roster.hear(pulse(learner, STEPS, tokens=40, state="closing"), 0.0)
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
        round_.roster.hear(pulse(learner, STEPS + 1, 1, tokens=40, state="closing", steps=[0 if merged else 4]), 1.0)
        if not merged:
            assert hold(round_, small_but_many(learner, version=2, number=2)) is None
    round_.open(1.0)
    merge = round_.poll(1.0)
    assert merge is not None
    assert merge.closing
    assert [member.learner for member in members_of(merge)] == learners[len(first) :]


def small_but_many(learner: str, version: int = 1, number: int = 1) -> Offer:
    data = [(share, LARGE - 2**32, 2**32) for share in range(2**14 - 64, 2**14)]
    return offer(learner, number, version, data=data)


# ---- learners that are barred


def test_a_barred_learner_is_not_waited_for_and_what_is_held_of_it_is_not_merged() -> None:
    round_ = round_of("ann", "bob", "cat", **{"round.quorum": "all"})
    open_at(round_, 0.0)
    assert hold(round_, offer("ann")) is None
    assert hold(round_, offer("cat")) is None
    assert round_.poll(0.1) is None  # bob is to answer
    round_.roster.change(round_.settings, frozenset({"bob", "cat"}))
    round_.changed()
    assert names(round_.poll(0.2)) == [("ann", 1)]
    assert hold(round_, offer("bob")) == "bob is ejected or quarantined"
    assert not round_.roster.hear(pulse("bob", 99, tokens=99), 0.3)
    round_.roster.change(round_.settings, frozenset({"cat"}))
    round_.abandoned()
    assert round_.roster.hear(pulse("bob", 5), 0.4)
    assert hold(round_, offer("bob")) is None
    assert names(round_.poll(0.5)) == [("ann", 1), ("bob", 1)]


def test_what_a_barred_learner_did_stays_counted() -> None:
    roster = Roster(settings_of(tokens=100))
    roster.hear(pulse("ann", tokens=60), 0)
    roster.hear(pulse("bob", tokens=30), 0)
    roster.change(roster.settings, frozenset({"bob"}))
    roster.hear(pulse("bob", step=9, tokens=90), 1)
    assert roster.tokens_processed() == 90
    assert not roster.used_up(1)


def test_a_merge_without_some_learners_needs_a_quorum_of_the_others() -> None:
    round_ = round_of("ann", "bob", "cat", **{"round.quorum": 2, "round.grace_factor": 0.0})
    open_at(round_, 0.0)
    hold(round_, offer("ann"))
    hold(round_, offer("bob"))
    assert names(round_.poll(0.1)) == [("ann", 1), ("bob", 1)]
    round_.without({"bob"})
    round_.roster.change(round_.settings, frozenset({"bob"}))
    assert round_.poll(0.2) is None
    hold(round_, offer("cat"))
    assert names(round_.poll(0.3)) == [("ann", 1), ("cat", 1)]


def test_settings_that_change_count_at_once() -> None:
    round_ = round_of("ann", "bob", **{"round.quorum": 2})
    open_at(round_, 0.0)
    hold(round_, offer("ann"))
    assert round_.poll(9.0) is None
    round_.roster.hear(pulse("ann", 5), 9.0)
    round_.roster.change(settings_of(**{"round.quorum": 1}), frozenset())
    assert names(round_.poll(9.0)) == [("ann", 1)]


def test_what_was_made_before_a_rollback_is_dropped_and_refused_however_young_it_is() -> None:
    round_ = round_at(5, staleness=8)
    assert hold(round_, offer("bob", 1, 6)) is None
    round_.open(0)
    chain = round_.chain
    chain.version, chain.state_hash, chain.rolled_back = 6, hash_of(3), RolledBack(1, 3, 6)  # back to version 3
    round_.committed(0)
    assert (round_.held, round_.opened_at_s, round_.version) == ({}, None, 7)
    refused = {base: hold(round_, offer("cat", 1, 7, base_version=base, base_hash=hash_of(base))) for base in (3, 5)}
    assert refused == {base: f"its base {base} is of before the rollback that made version 6" for base in (3, 5)}
    assert hold(round_, offer("cat", 1, 7, base_version=6, base_hash=hash_of(3))) is None
