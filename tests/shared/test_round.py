"""A fragment's rounds under a clock of the test's own: when they open, whose offers are in them, when they close."""

from __future__ import annotations

from typing import Any

import pytest
from tests.made.heartbeats import learner_heartbeat
from tests.made.log_entries import hash_of
from tests.made.rounds import STEPS, commit, hold, log_of, names, offer, open_at, round_of
from tests.made.run_settings import ROUNDS, settings_of

from diloco.core.log.chain import Chain
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Round
from diloco.errors import ClaimError
from diloco.wire.control import Heartbeat

COUNTED: dict[str, Any] = {
    "round.learners_wait": True
}  # rounds are due after H steps, and not in slots: tests/shared/test_slots.py


def test_a_round_is_due_when_the_quorum_took_h_steps() -> None:
    round_ = round_of("ann", "bob", "cat", step=STEPS - 1, **COUNTED, **{"round.quorum": 2})
    assert not round_.due(0, STEPS)
    round_.roster.hear(learner_heartbeat("ann", STEPS), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(learner_heartbeat("bob", STEPS), 0)
    assert round_.due(0, STEPS)
    round_.open(0)
    assert not round_.due(0, STEPS)


def test_a_round_is_due_too_when_nobody_takes_a_step_any_more() -> None:
    """Learners that wait for versions, ann for this fragment's and bob for another one's: neither would come."""
    round_ = round_of("ann", "bob", step=STEPS - 1, **COUNTED, **{"round.quorum": "all", "liveness.heartbeat_s": 0.5})
    round_.roster.hear(learner_heartbeat("ann", STEPS, state="waiting"), 1.0)
    assert not round_.due(3.5, STEPS), "bob steps on"
    for learner, step in (("ann", STEPS), ("bob", STEPS - 1)):
        round_.roster.hear(learner_heartbeat(learner, step, state="waiting"), 4.0)
    assert not round_.due(4.0, STEPS)
    assert not round_.due(5.9, STEPS)
    assert round_.due(6.0, STEPS)
    round_.open(6.0)
    hold(round_, offer("ann"))
    assert round_.poll(6.1) is None, "it needs its quorum"
    hold(round_, offer("bob"))
    assert names(round_.poll(6.2)) == [("ann", 1), ("bob", 1)]


def test_all_means_all_that_are_alive() -> None:
    round_ = round_of("ann", "bob", "cat", step=STEPS - 1, **COUNTED, **{"round.quorum": "all"})
    round_.roster.hear(learner_heartbeat("ann", STEPS), 4)
    round_.roster.hear(learner_heartbeat("bob", STEPS), 4)
    assert not round_.due(4, STEPS)
    assert round_.due(5, STEPS)  # cat has not been heard for 5 s


def test_nobody_alive_no_round() -> None:
    round_ = round_of("ann", **{"round.quorum": "all"})
    assert round_.due(4.9, STEPS)
    assert not round_.due(5, STEPS)


@pytest.mark.parametrize("changes", [{"state": "starting"}, {"state": "recovering"}, {"state": "left"}, {"state": "finished"}])
def test_who_takes_no_part_makes_no_round_due(changes: dict[str, Any]) -> None:
    round_ = round_of()
    round_.roster.hear(learner_heartbeat("ann", STEPS, **changes), 0)
    assert not round_.due(0, STEPS)
    assert round_.roster.live(0) == []


def leaving(learner: str, unmerged: int, version: int = 0) -> Heartbeat:
    return learner_heartbeat(learner, 2 * STEPS, version, state="leaving", steps=[unmerged])


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
    round_.roster.hear(leaving("bob", 2, 1), 0)
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
    assert names(round_.poll(0.1)) == [("ann", 1)]  # a learner that holds nothing is not waited for


def test_h_counts_from_the_step_at_which_the_version_was_applied() -> None:
    round_ = round_of("ann", **COUNTED)
    open_at(round_, 0)
    assert hold(round_, offer("ann")) is None
    merge = round_.poll(0)
    assert merge is not None
    commit(round_, merge, 0)
    round_.roster.hear(learner_heartbeat("ann", 9, 0), 0)  # 9 steps, but none of them since version 1
    assert not round_.due(0, STEPS)
    round_.roster.hear(learner_heartbeat("ann", 10, 1), 0)
    round_.roster.hear(learner_heartbeat("ann", 13, 1), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(learner_heartbeat("ann", 14, 1), 0)
    assert round_.due(0, STEPS)
    assert not round_.due(0, 2 * STEPS)  # where a link is slow more steps lie between two rounds
    round_.roster.hear(learner_heartbeat("ann", 18, 1), 0)
    assert round_.due(0, 2 * STEPS)


@pytest.mark.parametrize(("fragment", "due_at"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_first_rounds_are_staggered(fragment: int, due_at: int) -> None:
    roster = Roster(settings_of(ROUNDS, **COUNTED, **{"fragments.count": 4}))
    round_ = Round(roster, Chain(fragment, 0, 0, bytes(32), 0, hash_of(0)), 4)
    roster.hear(learner_heartbeat("ann", due_at - 1, versions=[0] * 4), 0)
    assert not round_.due(0, STEPS)
    roster.hear(learner_heartbeat("ann", due_at, versions=[0] * 4), 0)
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
    round_.roster.hear(learner_heartbeat("zoe", 50, 0), now_s)
    assert not round_.due(now_s, STEPS)
    round_.roster.hear(learner_heartbeat("zoe", 60, 1, steps=[0]), now_s)  # applied: it holds nothing yet
    assert not round_.due(now_s, STEPS)
    round_.roster.hear(learner_heartbeat("zoe", 60 + STEPS, 1, steps=[STEPS]), now_s)
    assert round_.due(now_s, STEPS)


def test_heartbeats_out_of_order_are_ignored() -> None:
    roster = Roster(settings_of(ROUNDS))
    assert roster.hear(learner_heartbeat("ann", 5), 0)
    assert not roster.hear(learner_heartbeat("ann", 4), 1)
    assert not roster.hear(learner_heartbeat("ann", 5), 2)  # nothing new, but that it lives
    assert [seen.at_s for seen in roster.live(2)] == [2]
    assert roster.hear(learner_heartbeat("ann", 1, incarnation=2), 3)  # restarted
    assert not roster.hear(learner_heartbeat("ann", 99), 4)
    assert [(seen.heartbeat.step, seen.at_s) for seen in roster.live(4)] == [(1, 3)]


def test_a_restart_counts_its_steps_from_zero() -> None:
    round_ = round_of(**COUNTED)
    round_.chain.version = 1
    round_.roster.hear(learner_heartbeat("ann", 10, 1), 0)
    round_.roster.hear(learner_heartbeat("ann", 14, 1, incarnation=2), 0)
    assert not round_.due(0, STEPS)
    round_.roster.hear(learner_heartbeat("ann", 18, 1, incarnation=2), 0)
    assert round_.due(0, STEPS)


def test_the_step_time_is_the_median_of_the_living() -> None:
    roster = Roster(settings_of(ROUNDS))
    assert roster.step_s(0) == 1
    for learner, step_s in {"ann": 0.1, "bob": 0.3, "cat": 9.0, "new": 0.0}.items():
        roster.hear(learner_heartbeat(learner, step_s=step_s), 0)
    assert roster.step_s(0) == 0.3
    roster.hear(learner_heartbeat("ann", step_s=0.1), 4)
    assert roster.step_s(6) == 0.1


def test_the_grace_window_has_room_for_long_steps_and_not_for_one_pause() -> None:
    """Ann's and bob's steps take 0.1 s and every fourth of them 0.5 s; bob pauses for a minute once."""
    round_ = round_of(**{"round.overlap_steps": 2.0, "round.grace_factor": 0.5})
    now_s = {"ann": 0.0, "bob": 0.0}
    for step in range(1, 41):
        for learner in now_s:
            paused = learner == "bob" and step == 20
            now_s[learner] += 60.0 if paused else 0.5 if step % 4 == 0 else 0.1
            round_.roster.hear(learner_heartbeat(learner, step, step_s=0.2), now_s[learner])
    at_s = now_s["bob"]
    round_.roster.hear(learner_heartbeat("ann", 40, step_s=0.2), at_s)
    assert round_.roster.long_step_s(at_s) == pytest.approx(0.5)
    open_at(round_, at_s)
    hold(round_, offer("ann", steps=3))
    assert round_.poll(at_s) is None
    assert round_.remaining_s(at_s) == pytest.approx(0.5 * 2 * 0.5)  # a window of mean steps would have 0.2 s


def test_a_quorum_of_all_waits_at_first_for_learners_that_may_be_about_to_take_part() -> None:
    round_ = round_of("ann", **{"round.quorum": "all", "learners": 2})  # of a run that has merged nothing yet
    assert (round_.due(0.0, STEPS), round_.quorum(0.0)) == (False, 2)
    dead_s = round_.settings.liveness.dead_s
    round_.roster.hear(learner_heartbeat("ann", STEPS), dead_s - 0.1)
    assert not round_.due(dead_s - 0.1, STEPS)
    assert (round_.due(dead_s, STEPS), round_.quorum(dead_s)) == (True, 1)

    later = Round(Roster(settings_of(ROUNDS, **{"round.quorum": "all", "learners": 3})), log_of(8, ann=(1, 4), bob=(1, 4)), 1)
    later.roster.hear(learner_heartbeat("ann", STEPS), 7.0)  # an owner that took over, of a log that knows bob
    assert later.quorum(7.0) == 2
    later.roster.hear(learner_heartbeat("bob", STEPS, state="recovering"), 7.1)
    later.roster.hear(learner_heartbeat("cat", STEPS), 7.1)
    assert later.quorum(7.1) == 3
    later.roster.change(later.settings, frozenset({"bob"}))
    assert later.quorum(7.1) == 2


def test_a_round_is_due_for_learners_that_wait_whatever_an_owner_has_heard_of_their_steps() -> None:
    # an owner that begins after they took their steps sees none of them
    settings = settings_of(ROUNDS, **COUNTED, **{"round.quorum": 2})
    round_ = Round(Roster(settings), Chain(0, 3, 0, bytes(32), 9, hash_of(3)), 1)
    for learner in ("ann", "bob"):
        round_.roster.hear(learner_heartbeat(learner, 20, 3, steps=[STEPS], state="stepping"), 0)
    assert not round_.due(0, STEPS)
    for learner in ("ann", "bob"):
        round_.roster.hear(learner_heartbeat(learner, 20, 3, steps=[STEPS - 1], state="waiting"), 1)
    assert not round_.due(1, STEPS)  # it is another fragment that they wait for
    for learner in ("ann", "bob"):
        round_.roster.hear(learner_heartbeat(learner, 20, 3, steps=[STEPS], state="waiting"), 2)
    assert round_.due(2, STEPS)


def test_in_lockstep_a_round_is_open_before_the_step_that_it_is_for() -> None:
    lockstep = {"round.steps": 1, "round.learners_wait": True, "round.quorum": "all", "round.grace_factor": 0}
    round_ = round_of(**lockstep)
    assert not round_.due(0, STEPS)  # no learner lives
    for learner in ("ann", "bob"):
        round_.roster.hear(learner_heartbeat(learner, 0), 0)
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
    round_.roster.hear(learner_heartbeat("ann", 2, 1), 4.9)
    assert round_.poll(4.9) is None
    assert names(round_.poll(5)) == [("ann", 2)]


def test_a_learner_that_is_out_of_step_is_not_waited_for() -> None:
    lockstep = {"round.steps": 1, "round.learners_wait": True, "round.quorum": "all", "round.grace_factor": 0}
    round_ = round_of("ann", **lockstep)
    round_.roster.hear(learner_heartbeat("bob", 5, state="recovering"), 0)
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
    # gamma 0.9, tau 2, xi_step 1. First round: xi_quorum 0.5, xi_sync 0.25 (half of the quickest answer's time):
    # 0.9 * (2 - 0.5 - 0.25) = 1.125 after the quorum, but at most a step
    round_ = round_of("ann", "bob", "cat", now_s=100, **{"round.grace_capped": True})
    open_at(round_, 100)
    assert round_.remaining_s(100.2) == pytest.approx(0.8)
    hold(round_, offer("ann"))
    assert round_.poll(100.5) is None
    assert round_.remaining_s(101) == pytest.approx(0.5)
    assert round_.poll(101.49) is None
    hold(round_, offer("cat"))  # within the window
    merge = round_.poll(101.51)
    assert names(merge) == [("ann", 1), ("cat", 1)]
    assert merge is not None
    assert merge.quorum_s == pytest.approx(0.5)
    assert merge.round_s == pytest.approx(1.51)
    commit(round_, merge, 101.76)  # 0.25 s until it is stored
    assert round_.remaining_s(101.76) == 0
    # second round, quorum after 0.5 again: 0.9 * (2 - 0.5 - 0.25 - 0.25) = 0.9
    for learner in ("ann", "bob", "cat"):
        round_.roster.hear(learner_heartbeat(learner, 12, 1), 110)
        round_.roster.hear(learner_heartbeat(learner, 16, 1), 110)
    open_at(round_, 110)
    hold(round_, offer("ann", 2, 2, after=(1, 1)))
    assert round_.poll(110.5) is None
    assert round_.poll(111.39) is None
    assert round_.poll(111.41) is not None


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
    round_.roster.hear(learner_heartbeat("ann", 5), 4)
    assert round_.poll(4.9) is None
    assert names(round_.poll(5)) == [("ann", 1)]


def test_the_offer_of_a_learner_that_died_since_is_merged() -> None:
    round_ = round_of("ann", "bob")
    open_at(round_, 0)
    hold(round_, offer("bob"))
    round_.roster.hear(learner_heartbeat("ann", 5), 8)
    hold(round_, offer("ann"))
    assert names(round_.poll(8)) == [("ann", 1), ("bob", 1)]


def test_offers_without_steps_make_no_version() -> None:
    round_ = round_of("ann", **{"round.grace_factor": 0})
    open_at(round_, 0)
    with pytest.raises(ClaimError, match="offers without a step"):
        hold(round_, offer("ann", steps=0, tokens=0, data=[]))
    assert round_.poll(50) is None
    round_.roster.hear(learner_heartbeat("ann", 5), 50)
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
    round_.roster.hear(learner_heartbeat("ann", 9, 1), 3)
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


def test_a_merge_that_is_put_off_has_what_is_held_by_then() -> None:
    round_ = round_of("ann", "bob", "cat", **{"round.quorum": 1, "round.grace_factor": 0})
    open_at(round_, 0)
    hold(round_, offer("ann"))
    assert names(round_.poll(1)) == [("ann", 1)]
    round_.put_off(5)
    hold(round_, offer("bob"))
    assert round_.poll(4.9) is None
    merge = round_.poll(5)
    assert names(merge) == [("ann", 1), ("bob", 1)]
    assert merge is not None
    commit(round_, merge, 5)
    assert round_.opened_at_s is None


def test_an_older_offer_comes_never_after_a_newer_one() -> None:
    round_ = round_of("ann")
    assert hold(round_, offer("ann", 2)) is None
    for again in (offer("ann", 2), offer("ann", 1), offer("ann", 9, incarnation=0)):
        assert hold(round_, again) == "superseded by a newer offer, or a duplicate"
    assert hold(round_, offer("ann", 3, tokens=99)) is None
    assert hold(round_, offer("ann", 1, incarnation=2)) is None
    assert [held.offer.members[0].incarnation for held in round_.held.values()] == [2]
