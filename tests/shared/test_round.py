"""A fragment's rounds under a clock of the test's own: when they open, whose offers are in them, when they close."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.heartbeats import learner_heartbeat

from diloco.core.chain import Chain
from diloco.core.roster import Roster
from diloco.core.round import Held, Merge, Round
from diloco.errors import ClaimError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.wire.body import PART_BYTES, Body
from diloco.wire.control import Heartbeat
from diloco.wire.entries import Cursor, Record, RolledBack
from diloco.wire.framing import MAX_FRAME_BYTES, pack
from diloco.wire.offers import Answer, Member, Offer, RegionalOffer

BODY = Body(size_bytes=0, content_hash=b"c" * 32, parts=0, attempt=b"attempt.")
RAW = np.zeros(0, np.uint8)
STEPS = 4  # H of these tests


def hash_of(version: int) -> bytes:
    return version.to_bytes(32, "big")


def settings_of(**changes: Any) -> RunSettings:
    """Three learners, one fragment, H = 4; liveness ends after 5 s."""
    defaults = {
        "learners": 3,
        "shards": 1,
        "fragments.count": 1,
        "round.steps": STEPS,
        "tokens": 1000,
        "task.name": "tests:round",
    }
    return run_settings("decoupled", defaults | changes)


def heartbeat(learner: str, step: int = 0, version: int = 0, **changes: Any) -> Heartbeat:
    values: dict[str, Any] = {"step": step, "versions": [version], "steps": [step]}
    return learner_heartbeat(learner, 1, **(values | changes))


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
        "data": [(0, 4 * (version - 1), changes.get("steps", 4))],
        "body": BODY,
    }
    return Offer(**(values | changes))


def round_of(*learners: str, **changes: Any) -> Round:
    """A round of version 1 over learners that were heard at ``now_s`` (0) when they had taken ``step`` (H) steps."""
    now_s, step = changes.pop("now_s", 0.0), changes.pop("step", STEPS)
    if "round.quorum" not in changes or changes["round.quorum"] == "all":
        changes = {"learners": max(1, len(learners))} | changes  # as many as the run has
    roster = Roster(settings_of(**changes))
    for learner in learners:
        roster.hear(heartbeat(learner, step), now_s)
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
        regional_offers=[],
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
    round_.roster.hear(heartbeat("ann", STEPS), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(heartbeat("bob", STEPS), 0)
    assert round_.due(0, STEPS)
    round_.open(0)
    assert not round_.due(0, STEPS)


def test_a_round_is_due_too_when_nobody_takes_a_step_any_more() -> None:
    """Learners that wait for versions, ann for this fragment's and bob for another one's: neither would come."""
    round_ = round_of("ann", "bob", step=STEPS - 1, **{"round.quorum": "all", "liveness.heartbeat_s": 0.5})
    round_.roster.hear(heartbeat("ann", STEPS, state="waiting"), 1.0)
    assert not round_.due(3.5, STEPS), "bob steps on"
    for learner, step in (("ann", STEPS), ("bob", STEPS - 1)):
        round_.roster.hear(heartbeat(learner, step, state="waiting"), 4.0)
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
    round_.roster.hear(heartbeat("ann", STEPS), 4)
    round_.roster.hear(heartbeat("bob", STEPS), 4)
    assert not round_.due(4, STEPS)
    assert round_.due(5, STEPS)  # cat has not been heard for 5 s


def test_nobody_alive_no_round() -> None:
    round_ = round_of("ann", **{"round.quorum": "all"})
    assert round_.due(4.9, STEPS)
    assert not round_.due(5, STEPS)


@pytest.mark.parametrize("changes", [{"state": "starting"}, {"state": "recovering"}, {"state": "left"}, {"state": "finished"}])
def test_who_takes_no_part_makes_no_round_due(changes: dict[str, Any]) -> None:
    round_ = round_of()
    round_.roster.hear(heartbeat("ann", STEPS, **changes), 0)
    assert not round_.due(0, STEPS)
    assert round_.roster.live(0) == []


def leaving(learner: str, unmerged: int, version: int = 0) -> Heartbeat:
    return heartbeat(learner, 2 * STEPS, version, state="leaving", steps=[unmerged])


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
    round_.roster.hear(heartbeat("ann", 9, 0), 0)  # 9 steps, but none of them since version 1
    assert not round_.due(0, STEPS)
    round_.roster.hear(heartbeat("ann", 10, 1), 0)
    round_.roster.hear(heartbeat("ann", 13, 1), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(heartbeat("ann", 14, 1), 0)
    assert round_.due(0, STEPS)
    assert not round_.due(0, 2 * STEPS)  # where a link is slow more steps lie between two rounds
    round_.roster.hear(heartbeat("ann", 18, 1), 0)
    assert round_.due(0, 2 * STEPS)


@pytest.mark.parametrize(("fragment", "due_at"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_first_rounds_are_staggered(fragment: int, due_at: int) -> None:
    roster = Roster(settings_of(**{"fragments.count": 4}))
    round_ = Round(roster, Chain(fragment, 0, 0, bytes(32), 0, hash_of(0)), 4)
    roster.hear(heartbeat("ann", due_at - 1, versions=[0] * 4), 0)
    assert not round_.due(0, STEPS)
    roster.hear(heartbeat("ann", due_at, versions=[0] * 4), 0)
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
    round_.roster.hear(heartbeat("zoe", 50, 0), now_s)
    assert not round_.due(now_s, STEPS)
    round_.roster.hear(heartbeat("zoe", 60, 1), now_s)  # applied: its H steps begin now
    assert not round_.due(now_s, STEPS)
    round_.roster.hear(heartbeat("zoe", 60 + STEPS, 1), now_s)
    assert round_.due(now_s, STEPS)


def test_heartbeats_out_of_order_are_ignored() -> None:
    roster = Roster(settings_of())
    assert roster.hear(heartbeat("ann", 5), 0)
    assert not roster.hear(heartbeat("ann", 4), 1)
    assert roster.hear(heartbeat("ann", 5), 2)
    assert roster.hear(heartbeat("ann", 1, incarnation=2), 3)  # restarted
    assert not roster.hear(heartbeat("ann", 99), 4)
    assert [(seen.heartbeat.step, seen.at_s) for seen in roster.live(4)] == [(1, 3)]


def test_a_restart_counts_its_steps_from_zero() -> None:
    round_ = round_of()
    round_.chain.version = 1
    round_.roster.hear(heartbeat("ann", 10, 1), 0)
    round_.roster.hear(heartbeat("ann", 14, 1, incarnation=2), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(heartbeat("ann", 18, 1, incarnation=2), 0)
    assert round_.due(0, STEPS)


def test_the_step_time_is_the_median_of_the_living() -> None:
    roster = Roster(settings_of())
    assert roster.step_s(0) == 1
    for learner, step_s in {"ann": 0.1, "bob": 0.3, "cat": 9.0, "new": 0.0}.items():
        roster.hear(heartbeat(learner, step_s=step_s), 0)
    assert roster.step_s(0) == 0.3
    roster.hear(heartbeat("ann", step_s=0.1), 4)
    assert roster.step_s(6) == 0.1


def test_the_grace_window_has_room_for_long_steps_and_not_for_one_pause() -> None:
    """Ann's and bob's steps take 0.1 s and every fourth of them 0.5 s; bob pauses for a minute once."""
    round_ = round_of(**{"round.overlap_steps": 2.0, "round.grace_factor": 0.5})
    now_s = {"ann": 0.0, "bob": 0.0}
    for step in range(1, 41):
        for learner in now_s:
            paused = learner == "bob" and step == 20
            now_s[learner] += 60.0 if paused else 0.5 if step % 4 == 0 else 0.1
            round_.roster.hear(heartbeat(learner, step, step_s=0.2), now_s[learner])
    at_s = now_s["bob"]
    round_.roster.hear(heartbeat("ann", 40, step_s=0.2), at_s)
    assert round_.roster.long_step_s(at_s) == pytest.approx(0.5)
    open_at(round_, at_s)
    hold(round_, offer("ann", steps=3))
    assert round_.poll(at_s) is None
    assert round_.remaining_s(at_s) == pytest.approx(0.5 * 2 * 0.5)  # a window of mean steps would have 0.2 s


# ---- the end of the budget: by what the log holds


def test_a_quorum_of_all_waits_at_first_for_learners_that_may_be_about_to_take_part() -> None:
    round_ = round_of("ann", **{"round.quorum": "all", "learners": 2})  # of a run that has merged nothing yet
    assert (round_.due(0.0, STEPS), round_.quorum(0.0)) == (False, 2)
    dead_s = round_.settings.liveness.dead_s
    round_.roster.hear(heartbeat("ann", STEPS), dead_s - 0.1)
    assert not round_.due(dead_s - 0.1, STEPS)
    assert (round_.due(dead_s, STEPS), round_.quorum(dead_s)) == (True, 1)

    later = Round(Roster(settings_of(**{"round.quorum": "all", "learners": 3})), log_of(8, ann=(1, 4), bob=(1, 4)), 1)
    later.roster.hear(heartbeat("ann", STEPS), 7.0)  # an owner that took over, of a log that knows bob
    assert later.quorum(7.0) == 2
    later.roster.hear(heartbeat("bob", STEPS, state="recovering"), 7.1)
    later.roster.hear(heartbeat("cat", STEPS), 7.1)
    assert later.quorum(7.1) == 3
    later.roster.change(later.settings, frozenset({"bob"}))
    assert later.quorum(7.1) == 2


def log_of(tokens: int, *, lost: int = 0, **merged: tuple[int, int]) -> Chain:
    """Return a log that holds so many tokens; by learner: versions and tokens of its merged offers."""
    chain = Chain(0, 3, 0, bytes(32), 9, hash_of(3), tokens, lost)
    chain.cursors = {name: Cursor(name, 1, 1, versions, own, 0, own) for name, (versions, own) in merged.items()}
    return chain


def is_used_up(roster: Roster, chain: Chain, now_s: float) -> bool:
    return roster.used_up(chain, now_s, near=roster.in_reach(chain))


def test_no_word_of_a_learner_ends_a_run() -> None:
    """Ann's three offers hold 40 tokens each, in the mean: of what she says that she holds besides, 80 count."""
    roster, chain = Roster(settings_of(tokens=1000)), log_of(600, ann=(3, 120), bob=(3, 480))
    roster.hear(heartbeat("ann", tokens=2**62), 0)
    roster.hear(heartbeat("eve", tokens=2**62), 0)  # nothing of hers is in the log
    assert roster.processed(chain, 0) == 600 + 2 * 40
    assert not is_used_up(roster, chain, 0)
    roster.hear(heartbeat("bob", tokens=480 + 160), 0)  # bob holds 160, half of what he may
    assert roster.processed(chain, 0) == 600 + 80 + 160
    roster.hear(heartbeat("bob", step=1, tokens=480 + 320), 0)
    assert roster.processed(chain, 0) == 1000
    assert is_used_up(roster, chain, 0)
    assert roster.processed(chain, 5) == 600, "they are dead: of what they held nothing was merged"


def test_a_sum_of_the_largest_counts_fits_into_an_announcement() -> None:
    roster, chain = Roster(settings_of(tokens=10**18)), log_of(2**62, lost=2**62, ann=(1, 2**61))
    roster.hear(heartbeat("ann", tokens=2**62), 0)
    assert roster.processed(chain, 0) == 2**62


def test_tokens_that_learners_lost_count_as_the_log_states_them() -> None:
    assert is_used_up(Roster(settings_of(tokens=100)), log_of(60, lost=40), 0)
    assert not is_used_up(Roster(settings_of(tokens=100)), log_of(60, lost=39), 0)


def test_the_budget_is_used_up_when_all_who_live_have_stopped_and_the_log_is_near_to_it() -> None:
    # cat was killed for good: of 100 tokens the log holds 80. The others had stopped before, and take no step any more
    roster = Roster(settings_of(tokens=100))
    merged: dict[str, Any] = {"ann": (2, 40), "bob": (2, 30), "cat": (2, 10)}
    roster.hear(heartbeat("ann", tokens=40, state="closing"), 0)
    roster.hear(heartbeat("bob", tokens=30, state="stepping"), 0)
    assert not is_used_up(roster, log_of(80, **merged), 0)
    roster.hear(heartbeat("bob", tokens=30, state="closing"), 1)
    assert is_used_up(roster, log_of(80, **merged), 1)
    assert not is_used_up(roster, log_of(80, **merged), 100), "nobody lives: a newcomer may take the missing steps"
    # they alone are heard, and say that they have stopped: the log knows better
    assert not is_used_up(roster, log_of(8, ann=(2, 4), bob=(2, 2), cat=(2, 2)), 1)
    roster.ending = True  # another fragment's log is closed
    assert is_used_up(roster, log_of(8, ann=(2, 4), bob=(2, 2), cat=(2, 2)), 1)


def test_a_run_whose_learners_lost_all_ends_when_all_of_them_have_stopped() -> None:
    """Two learners never had finite values: nothing of theirs is in the log, or ever comes."""
    roster, chain = Roster(settings_of(tokens=100, learners=2)), log_of(0)
    roster.hear(heartbeat("ann", 9, tokens=100, state="closing", steps=[0]), 0)
    assert not is_used_up(roster, chain, 0), "the run has two learners"
    roster.hear(heartbeat("bob", 9, tokens=100, state="closing", steps=[1]), 0)
    assert not is_used_up(roster, chain, 0), "bob holds a step"
    roster.hear(heartbeat("bob", 9, tokens=100, state="closing", steps=[0]), 0)
    assert is_used_up(roster, chain, 0)
    assert not is_used_up(roster, log_of(8, cat=(2, 8)), 0), "cat is in the log, and may come back"


def test_what_those_hold_who_stopped_before_the_first_version_is_merged() -> None:
    """The budget is less than the steps before the first round: each has used it up alone, and the log holds nothing."""
    round_ = round_of("ann", "bob", step=1, tokens=10, **{"round.quorum": "all"})
    assert not round_.due(0, STEPS)
    round_.roster.hear(heartbeat("ann", 2, tokens=20, state="closing"), 1)
    assert not round_.due(1, STEPS), "bob steps on"
    round_.roster.hear(heartbeat("bob", 1, tokens=10, state="closing", steps=[0]), 1)
    open_at(round_, 1)
    assert hold(round_, offer("ann", steps=2, tokens=20)) is None
    merge = round_.poll(1)
    assert names(merge) == [("ann", 1)]
    assert merge is not None
    commit(round_, merge, 1)
    open_at(round_, 1)
    assert round_.closing


def test_a_round_is_due_for_learners_that_wait_whatever_an_owner_has_heard_of_their_steps() -> None:
    # an owner that begins after they took their steps sees none of them
    settings = settings_of(**{"round.quorum": 2})
    round_ = Round(Roster(settings), Chain(0, 3, 0, bytes(32), 9, hash_of(3)), 1)
    for learner in ("ann", "bob"):
        round_.roster.hear(heartbeat(learner, 20, version=3, steps=[STEPS], state="stepping"), 0)
    assert not round_.due(0, STEPS)
    for learner in ("ann", "bob"):
        round_.roster.hear(heartbeat(learner, 20, version=3, steps=[STEPS - 1], state="waiting"), 1)
    assert not round_.due(1, STEPS)  # it is another fragment that they wait for
    for learner in ("ann", "bob"):
        round_.roster.hear(heartbeat(learner, 20, version=3, steps=[STEPS], state="waiting"), 2)
    assert round_.due(2, STEPS)


def test_in_lockstep_a_round_is_open_before_the_step_that_it_is_for() -> None:
    lockstep = {"round.steps": 1, "round.learners_wait": True, "round.quorum": "all", "round.grace_factor": 0}
    round_ = round_of(**lockstep)
    assert not round_.due(0, STEPS)  # nobody lives
    for learner in ("ann", "bob"):
        round_.roster.hear(heartbeat(learner, 0), 0)
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
    round_.roster.hear(heartbeat("ann", 2, version=1), 4.9)
    assert round_.poll(4.9) is None
    assert names(round_.poll(5)) == [("ann", 2)]


def test_a_learner_that_is_out_of_step_is_not_waited_for() -> None:
    lockstep = {"round.steps": 1, "round.learners_wait": True, "round.quorum": "all", "round.grace_factor": 0}
    round_ = round_of("ann", **lockstep)
    round_.roster.hear(heartbeat("bob", 5, state="recovering"), 0)
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
        round_.roster.hear(heartbeat(learner, 10, 1), 110)
        round_.roster.hear(heartbeat(learner, 14, 1), 110)
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
    round_.roster.hear(heartbeat("ann", 5), 4)
    assert round_.poll(4.9) is None
    assert names(round_.poll(5)) == [("ann", 1)]


def test_the_offer_of_a_learner_that_died_since_is_merged() -> None:
    round_ = round_of("ann", "bob")
    open_at(round_, 0)
    hold(round_, offer("bob"))
    round_.roster.hear(heartbeat("ann", 5), 8)
    hold(round_, offer("ann"))
    assert names(round_.poll(8)) == [("ann", 1), ("bob", 1)]


def test_offers_without_steps_make_no_version() -> None:
    round_ = round_of("ann", **{"round.grace_factor": 0})
    open_at(round_, 0)
    hold(round_, offer("ann", steps=0, tokens=0, data=[]))
    assert round_.poll(50) is None
    round_.roster.hear(heartbeat("ann", 5), 50)
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
    round_.roster.hear(heartbeat("ann", 9, 1), 3)
    assert hold(round_, offer("ann", 2, 2, after=(1, 1))) is None
    merge = round_.poll(3)
    assert names(merge) == [("ann", 2), ("bob", 1)]


def test_one_merge_at_a_time_and_again_if_it_came_to_nothing() -> None:
    round_ = round_of("ann")
    open_at(round_, 0)
    hold(round_, offer("ann"))
    first = round_.poll(0)
    assert round_.poll(1) is None
    round_.without(())
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
    chain.cursors["ann"] = Cursor("ann", 1, 3, 1, 40, 0, 4)
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
    round_.roster.hear(heartbeat("ann", 5, tokens=1), 0)
    assert round_.due(0, STEPS)
    round_.chain.closed = True
    assert not round_.due(0, STEPS)
    assert hold(round_, offer("ann")) == "the run is closed"


def used_up(*learners: str, **changes: Any) -> Round:
    """A round that is closing: the log holds the budget."""
    round_ = round_of(**({"tokens": 100} | changes))
    round_.chain.tokens_merged = 100
    for learner in learners:
        round_.roster.hear(heartbeat(learner, 6, tokens=100, steps=[2]), 0)
    open_at(round_, 0)
    assert round_.closing
    return round_


def test_a_closing_round_waits_for_all_that_the_living_hold() -> None:
    round_ = used_up("ann", "bob")
    hold(round_, offer("ann"))
    assert round_.poll(1) is None
    round_.roster.hear(heartbeat("bob", 7, tokens=100, steps=[3], state="closing"), 1)
    assert round_.poll(4) is None  # bob has stopped, and holds three steps
    hold(round_, offer("bob", steps=3))
    assert round_.poll(4.2) is None  # ann has answered, and not stopped
    round_.roster.hear(heartbeat("ann", 7, tokens=100, steps=[5], state="closing"), 4.3)
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
    round_.roster.hear(heartbeat("ann", 6, tokens=100, steps=[2], state="closing"), 1)
    round_.roster.hear(heartbeat("bob", 7, tokens=100, steps=[0], state="stepping"), 1)
    assert round_.poll(1) is None  # it may still step
    round_.roster.hear(heartbeat("bob", 7, tokens=100, steps=[0], state="closing", version=0), 1)
    assert names(round_.poll(1)) == [("ann", 1)]


def test_a_closing_round_waits_for_who_has_not_applied_the_last_version() -> None:
    round_ = used_up("ann")
    round_.roster.hear(heartbeat("ann", 7, tokens=100, steps=[0], state="closing", versions=[7]), 1)
    assert round_.poll(1) is None
    round_.roster.hear(heartbeat("ann", 7, tokens=100, steps=[0], state="closing", versions=[0]), 1)
    assert names(round_.poll(1)) == []


def test_a_closing_round_does_not_hang_on_the_dead() -> None:
    round_ = used_up("ann", "bob", **{"round.quorum": 3})
    hold(round_, offer("ann"))
    round_.roster.hear(heartbeat("ann", 6, tokens=100, steps=[2], state="closing"), 4)
    assert round_.poll(4.9) is None
    assert names(round_.poll(5)) == [("ann", 1)]


def test_with_nothing_left_the_log_is_closed_without_a_version() -> None:
    round_ = used_up("ann")
    round_.roster.hear(heartbeat("ann", 7, tokens=100, steps=[0], state="closing"), 1)
    merge = round_.poll(1)
    assert names(merge) == []
    assert merge is not None
    commit(round_, merge, 1)
    assert (round_.chain.closed, round_.chain.version) == (True, 0)


def test_an_open_round_does_not_wait_at_the_end_for_who_has_nothing_to_answer() -> None:
    # bob came too late to take a step: the others have used up the budget
    round_ = round_of("ann", tokens=100, **{"round.quorum": "all", "round.grace_factor": 0})
    open_at(round_, 0)
    round_.roster.hear(heartbeat("bob"), 1)
    hold(round_, offer("ann"))
    assert round_.poll(1) is None
    round_.roster.hear(heartbeat("ann", 20, tokens=100, steps=[20], state="closing"), 2)
    round_.roster.hear(heartbeat("bob", state="closing"), 2)
    assert names(round_.poll(2)) == [("ann", 1)]


def test_an_open_round_does_not_wait_for_a_quorum_that_the_end_has_made_impossible() -> None:
    # bob dies for good while the round is open; ann goes on to the end of the budget and stops
    round_ = round_of("ann", "bob", tokens=100, **{"round.quorum": 2, "round.grace_factor": 0})
    open_at(round_, 0)
    hold(round_, offer("ann"))
    round_.roster.hear(heartbeat("ann", 8), 10)
    assert round_.poll(10) is None
    round_.roster.hear(heartbeat("ann", 20, tokens=100, steps=[20], state="closing"), 20)
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
    round_.chain.tokens_merged = 100
    round_.roster.hear(heartbeat("ann", 20, tokens=100, steps=[2], state="closing"), 20)
    assert round_.poll(20) is None  # it holds two steps, and will answer
    round_.roster.hear(heartbeat("ann", 20, tokens=100, steps=[0], state="closing"), 20)
    merge = round_.poll(20)
    assert names(merge) == []
    assert merge is not None
    assert merge.closing


# ---- learners that are waited for in vain; all of these have 5 s of liveness, and steps of 1 s or 5 s


def step_on(round_: Round, learner: str, step: int, now_s: float, **changes: Any) -> None:
    round_.roster.hear(heartbeat(learner, step, round_.chain.version, **changes), now_s)


def in_full_swing(*learners: str, step_s: float = 1.0, **changes: Any) -> tuple[Round, float]:
    """Return a round over learners of which three steps of ``step_s`` were heard, and the time of the last."""
    round_ = round_of(*learners, step=0, **({"round.quorum": "all"} | changes))
    for step in (1, 2, 3):
        for learner in learners:
            step_on(round_, learner, step, step * step_s)
    return round_, 3 * step_s


@pytest.mark.parametrize(("step_s", "patience_s"), [(0.1, 5.0), (1.0, 6.0), (20.0, 120.0)])
def test_a_learner_that_says_that_it_steps_and_does_not_leaves_the_quorum(step_s: float, patience_s: float) -> None:
    """It has five seconds, or six of its own steps where these take longer."""
    round_, now_s = in_full_swing("ann", "eve", step_s=step_s)

    def at(late_s: float) -> bool:
        step_on(round_, "ann", 4 + int(late_s), now_s + late_s)
        step_on(round_, "eve", 3, now_s + late_s)  # it is heard all the time
        return round_.due(now_s + late_s, STEPS)

    assert not at(patience_s - 0.01)
    assert at(patience_s)
    step_on(round_, "eve", STEPS - 1, now_s + patience_s)
    step_on(round_, "eve", STEPS, now_s + patience_s + 0.1)
    assert len(round_.roster.live(now_s + patience_s + 0.1)) == 2, "it steps again"


def test_a_learner_five_times_slower_than_before_and_than_others_stays_in() -> None:
    round_, now_s = in_full_swing("ann", "bob")
    for learner, step_s in (("ann", 1.0), ("bob", 5.0)):
        for step in range(1, int(100 / step_s)):
            at_s = now_s + step * step_s
            round_.roster.hear(heartbeat(learner, 3 + step, 0), at_s)
            assert not round_.roster.stands_still(round_.roster.learners[learner], at_s + 4.9)


def test_one_long_pause_does_not_make_the_next_one_usual() -> None:
    """After a pause of 100 s a step of 1 s counts as 1.2 s: 0.8 of the usual one, and a fifth of twice as much."""
    round_, now_s = in_full_swing("ann")
    step_on(round_, "ann", 4, now_s + 100)
    seen = round_.roster.learners["ann"]
    assert seen.step_times.value == pytest.approx(1.2)
    assert not round_.roster.stands_still(seen, now_s + 107.1)
    assert round_.roster.stands_still(seen, now_s + 107.3)


def test_a_first_step_may_take_a_minute_from_when_others_step() -> None:
    roster = Roster(settings_of())
    roster.hear(heartbeat("ann"), 0)
    roster.hear(heartbeat("bob"), 0)
    assert not roster.stands_still(roster.learners["bob"], 1000), "nobody steps yet: models are being compiled"
    roster.hear(heartbeat("ann", 1), 1000)
    assert not roster.stands_still(roster.learners["bob"], 1059.9)
    assert roster.stands_still(roster.learners["bob"], 1060)


def test_a_learner_that_took_its_steps_and_does_not_answer_leaves_the_quorum_until_it_delivers() -> None:
    """Steps of 1 s, four of them between two rounds: eve has six times as long from the first answer on."""
    round_, now_s = in_full_swing("ann", "eve")
    for learner in ("ann", "eve"):
        step_on(round_, learner, STEPS, now_s + 1)
    now_s += 1
    open_at(round_, now_s)
    hold(round_, offer("ann"))
    for late_s in range(24):
        step_on(round_, "eve", STEPS + late_s, now_s + late_s)
        step_on(round_, "ann", STEPS + late_s, now_s + late_s)
        assert round_.poll(now_s + late_s) is None, late_s
    now_s += 24
    merge = round_.poll(now_s)
    assert names(merge) == [("ann", 1)]
    assert merge is not None
    commit(round_, merge, now_s)
    assert round_.in_vain == {"eve"}
    # the next round does not wait for it, until an offer of its own comes
    for step in (40, 44):
        step_on(round_, "ann", step, now_s)
        step_on(round_, "eve", step, now_s)
    open_at(round_, now_s)
    assert round_.quorum(now_s) == 1
    assert hold(round_, offer("eve", 1, 2)) is None
    assert round_.quorum(now_s) == 2
    assert round_.poll(now_s) is None
    hold(round_, offer("ann", 2, 2, after=(1, 1)))
    assert names(round_.poll(now_s)) == [("ann", 2), ("eve", 1)]


def test_nobody_is_to_blame_where_nobody_answers() -> None:
    """A server is away for ten minutes: none of the learners can store an offer, and all of them stay in the quorum."""
    round_, now_s = in_full_swing("ann", "bob")
    for learner in ("ann", "bob"):
        step_on(round_, learner, STEPS, now_s + 1)
    open_at(round_, now_s + 1)
    for late_s in range(1, 600):
        for learner in ("ann", "bob"):
            step_on(round_, learner, STEPS + late_s, now_s + late_s)
        assert round_.poll(now_s + late_s) is None
    assert round_.quorum(now_s + 599) == 2


def test_a_learner_that_never_applies_the_newest_version_holds_up_no_round() -> None:
    round_, now_s = in_full_swing("ann", "eve")
    for step in range(4, 28):
        now_s = float(step)
        step_on(round_, "ann", step, now_s)
        round_.roster.hear(heartbeat("eve", step, version=step), now_s)  # another one each time: its steps begin again
        assert not round_.due(now_s, STEPS), step
    step_on(round_, "ann", 28, 28.0)
    round_.roster.hear(heartbeat("eve", 28, version=28), 28.0)
    assert round_.due(28.0, STEPS)  # 24 s after ann was ready


def test_a_learner_that_says_it_waits_or_has_stopped_in_the_midst_of_a_run_holds_up_no_round() -> None:
    for state in ("waiting", "closing"):
        round_, now_s = in_full_swing("ann", "eve")
        step_on(round_, "ann", 8, now_s + 5.9)
        step_on(round_, "eve", 3, now_s + 5.9, state=state)
        assert not round_.due(now_s + 5.9, STEPS)
        step_on(round_, "eve", 3, now_s + 6, state=state)
        assert round_.due(now_s + 6, STEPS), state


def test_a_learner_that_never_stops_does_not_keep_a_run_open() -> None:
    """Eve steps on for ever, and answers nothing: the closing round waits a minute for her."""
    round_, now_s = in_full_swing("ann", "eve", tokens=100)
    round_.chain.tokens_merged = 100
    open_at(round_, now_s)
    assert round_.closing
    hold(round_, offer("ann", steps=3))
    step_on(round_, "ann", 3, now_s, state="closing")
    assert round_.poll(now_s) is None
    for late_s in range(1, 61):
        step_on(round_, "ann", 3, now_s + late_s, state="closing")
        step_on(round_, "eve", 3 + late_s, now_s + late_s)
        merge = round_.poll(now_s + late_s)
        assert (merge is None) == (late_s < 60), late_s
    assert names(merge) == [("ann", 1)]
    assert merge is not None
    assert merge.closing


def test_a_stated_step_time_lengthens_no_grace_window() -> None:
    """Eve steps once a second, and says that her steps take years."""
    round_, now_s = in_full_swing("ann", "eve")
    step_on(round_, "eve", 4, now_s + 1, step_s=1e12)
    assert round_.roster.step_s(now_s + 1) == 1.5  # the median of 1 and twice what was heard


def combine(*offers: Offer, number: int = 1) -> RegionalOffer:
    return RegionalOffer(0, "syncer-1", 1, number, 4, [Answer.of(offer) for offer in offers], BODY)


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

    def heartbeat(self) -> Heartbeat:
        values = {"incarnation": self.incarnation, "steps": [self.steps]}
        return heartbeat(self.name, self.step, self.version, **values)

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
    round_ = round_of(*learners, learners=400, tokens=BUDGET)
    round_.chain.tokens_merged = BUDGET
    for learner in learners:
        round_.roster.hear(heartbeat(learner, STEPS, tokens=BUDGET, state="closing"), 0.0)
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
        round_.roster.hear(heartbeat(learner, STEPS + 1, 1, tokens=BUDGET, state="closing", steps=[0 if merged else 4]), 1.0)
        if not merged:
            assert hold(round_, small_but_many(learner, version=2, number=2)) is None
    round_.open(1.0)
    merge = round_.poll(1.0)
    assert merge is not None
    assert merge.closing
    assert [member.learner for member in members_of(merge)] == learners[len(first) :]


def small_but_many(learner: str, version: int = 1, number: int = 1) -> Offer:
    return offer(learner, number, version, data=many_ranges(), steps=2**40, tokens=2**40)


# ---- learners that are excluded


def test_an_excluded_learner_is_not_waited_for_and_what_is_held_of_it_is_not_merged() -> None:
    round_ = round_of("ann", "bob", "cat", **{"round.quorum": "all"})
    open_at(round_, 0.0)
    assert hold(round_, offer("ann")) is None
    assert hold(round_, offer("cat")) is None
    assert round_.poll(0.1) is None  # bob is to answer
    round_.roster.change(round_.settings, frozenset({"bob", "cat"}))
    round_.drop_unfit()
    assert names(round_.poll(0.2)) == [("ann", 1)]
    assert hold(round_, offer("bob")) == "bob is ejected or quarantined"
    assert not round_.roster.hear(heartbeat("bob", 99, tokens=99), 0.3)
    round_.roster.change(round_.settings, frozenset({"cat"}))
    round_.without(())
    assert round_.roster.hear(heartbeat("bob", 5), 0.4)
    assert hold(round_, offer("bob")) is None
    assert names(round_.poll(0.5)) == [("ann", 1), ("bob", 1)]


def test_what_is_merged_of_an_excluded_learner_stays_counted() -> None:
    roster, chain = Roster(settings_of(tokens=100)), log_of(60, bob=(1, 30), ann=(1, 30))
    roster.hear(heartbeat("bob", tokens=90), 0)
    assert is_used_up(roster, chain, 0)
    roster.change(roster.settings, frozenset({"bob"}))
    assert not roster.hear(heartbeat("bob", step=9, tokens=99), 1)
    assert roster.processed(chain, 1) == 60


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


def test_a_round_does_not_wait_for_a_learner_whose_answer_no_merge_can_have_until_it_answers_again() -> None:
    round_ = round_of("ann", "bob", **{"round.quorum": "all"})
    open_at(round_, 0.0)
    for learner in ("ann", "bob"):
        hold(round_, offer(learner))
    assert names(round_.poll(0.1)) == [("ann", 1), ("bob", 1)]
    round_.without({"bob"})
    merge = round_.poll(0.2)
    assert names(merge) == [("ann", 1)]
    assert merge is not None
    commit(round_, merge, 0.2)
    for learner in ("ann", "bob"):
        round_.roster.hear(heartbeat(learner, STEPS, 1), 0.3)
        round_.roster.hear(heartbeat(learner, 2 * STEPS, 1), 0.4)
    open_at(round_, 0.4)
    hold(round_, offer("ann", 2, 2, after=(1, 1)))
    assert round_.poll(0.5) is None  # in the next round it is waited for
    hold(round_, offer("bob", 2, 2))
    assert names(round_.poll(0.6)) == [("ann", 2), ("bob", 2)]


def test_a_log_is_closed_without_the_steps_of_a_learner_whose_answer_no_merge_can_have() -> None:
    round_ = round_of("ann", "bob", tokens=10)
    round_.chain.tokens_merged = 10
    for learner in ("ann", "bob"):
        round_.roster.hear(heartbeat(learner, STEPS, tokens=40, state="closing"), 0.0)
        assert hold(round_, offer(learner)) is None
    round_.open(0.0)
    assert names(round_.poll(0.1)) == [("ann", 1), ("bob", 1)]
    round_.without({"bob"})
    merge = round_.poll(0.2)
    assert names(merge) == [("ann", 1)]
    assert merge is not None
    assert merge.closing


@pytest.mark.parametrize("combined", [False, True])
def test_a_claim_that_cannot_be_is_refused_by_name_alone_and_among_others(combined: bool) -> None:
    round_ = round_of("ann", "bob")
    offers = [offer("ann"), offer("bob", lost_tokens=2**62)]
    with pytest.raises(ClaimError, match="offer 1 of bob states what cannot be"):
        hold_combined(round_, *offers) if combined else hold(round_, offers[1])
    assert round_.held == {}
    # one that is old is passed over: it may have been honest when it was made
    assert (
        hold(round_, offer("bob", lost_tokens=2**62, after=(1, 7)))
        == "made without knowing that (0, 0) was merged (it states (1, 7))"
    )


def test_settings_that_change_count_at_once() -> None:
    round_ = round_of("ann", "bob", **{"round.quorum": 2})
    open_at(round_, 0.0)
    hold(round_, offer("ann"))
    assert round_.poll(9.0) is None
    round_.roster.hear(heartbeat("ann", 5), 9.0)
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
