"""Learners that a round waits for in vain, and those that no merge can have.

All of these have 5 s of liveness, and steps of 1 s or 5 s.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.made.heartbeats import learner_heartbeat
from tests.made.rounds import STEPS, commit, hold, hold_combined, is_used_up, log_of, names, offer, open_at, round_of
from tests.made.run_settings import ROUNDS, settings_of

from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Round
from diloco.errors import ClaimError

COUNTED: dict[str, Any] = {"round.learners_wait": True}  # rounds are due after H steps, and not in slots


def step_on(round_: Round, learner: str, step: int, now_s: float, **changes: Any) -> None:
    round_.roster.hear(learner_heartbeat(learner, step, round_.chain.version, **changes), now_s)


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
    round_, now_s = in_full_swing("ann", "eve", step_s=step_s, **COUNTED)

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
            round_.roster.hear(learner_heartbeat(learner, 3 + step, 0), at_s)
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
    roster = Roster(settings_of(ROUNDS))
    roster.hear(learner_heartbeat("ann"), 0)
    roster.hear(learner_heartbeat("bob"), 0)
    assert not roster.stands_still(roster.learners["bob"], 1000), "no learner steps yet: models are being compiled"
    roster.hear(learner_heartbeat("ann", 1), 1000)
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
    assert round_.waits.in_vain == {"eve"}
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


def test_a_learner_that_comes_back_when_its_time_was_over_makes_up_a_quorum_that_nobody_else_can() -> None:
    """Two must answer, and there are two: bob is away for a minute, and ann is ready all the while."""
    round_, now_s = in_full_swing("ann", "bob", **COUNTED, **{"round.quorum": 2})
    for step in range(STEPS, STEPS + 60):
        now_s += 1
        step_on(round_, "ann", step, now_s)
        assert not round_.due(now_s, STEPS)
    step_on(round_, "bob", 3, now_s, incarnation=2)
    assert not round_.due(now_s, STEPS), "it has a step to take yet"
    assert round_.waits.in_vain == {"bob"}
    step_on(round_, "bob", STEPS, now_s + 1, incarnation=2)
    assert round_.due(now_s + 1, STEPS), "it delivers nothing before a round is open"
    open_at(round_, now_s + 1)
    hold(round_, offer("ann"))
    assert round_.poll(now_s + 1) is None
    hold(round_, offer("bob"))
    assert round_.waits.in_vain == set()
    assert names(round_.poll(now_s + 1)) == [("ann", 1), ("bob", 1)]


def test_a_learner_whose_time_is_over_opens_no_round_that_others_can() -> None:
    """Two of three must answer: eve was given up, and is ready before bob."""
    round_, now_s = in_full_swing("ann", "bob", "eve", **COUNTED, **{"round.quorum": 2})
    round_.waits.in_vain.add("eve")
    for learner in ("ann", "eve"):
        step_on(round_, learner, STEPS, now_s)
    assert not round_.due(now_s, STEPS)
    step_on(round_, "bob", STEPS, now_s)
    assert round_.due(now_s, STEPS)


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
    round_, now_s = in_full_swing("ann", "eve", **COUNTED)
    for step in range(4, 28):
        now_s = float(step)
        step_on(round_, "ann", step, now_s)
        round_.roster.hear(learner_heartbeat("eve", step, step), now_s)  # another one each time: its steps begin again
        assert not round_.due(now_s, STEPS), step
    step_on(round_, "ann", 28, 28.0)
    round_.roster.hear(learner_heartbeat("eve", 28, 28), 28.0)
    assert round_.due(28.0, STEPS)  # 24 s after ann was ready


def test_a_learner_that_says_it_waits_or_has_stopped_in_the_midst_of_a_run_holds_up_no_round() -> None:
    for state in ("waiting", "closing"):
        round_, now_s = in_full_swing("ann", "eve")
        round_.chain.version = 1  # eve never applies it
        step_on(round_, "ann", 4, now_s + 1)
        step_on(round_, "ann", 8, now_s + 5.9)
        eve = learner_heartbeat("eve", 3, 0, state=state)
        round_.roster.hear(eve, now_s + 5.9)
        assert not round_.due(now_s + 5.9, STEPS)
        round_.roster.hear(eve, now_s + 6)
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
    assert not round_.roster.hear(learner_heartbeat("bob", 99, tokens=99), 0.3)
    round_.roster.change(round_.settings, frozenset({"cat"}))
    round_.without(())
    assert round_.roster.hear(learner_heartbeat("bob", 5), 0.4)
    assert hold(round_, offer("bob")) is None
    assert names(round_.poll(0.5)) == [("ann", 1), ("bob", 1)]


def test_the_offers_of_a_quarantined_learner_are_kept_to_be_judged_and_merged_once_it_is_back() -> None:
    round_ = round_of("ann", "bob", "cat", **{"round.quorum": "all"})
    open_at(round_, 0.0)
    assert hold(round_, offer("bob")) is None
    round_.roster.change(round_.settings, frozenset({"bob", "cat"}), frozenset({"bob"}))
    round_.drop_unfit()
    assert hold(round_, offer("cat")) == "cat is ejected or quarantined"
    for number in (2, 3):
        assert hold(round_, offer("bob", number)) == "bob is quarantined: its offer is judged, and not merged"
    with pytest.raises(ClaimError):  # nor can it get more room by steps that it cannot have taken
        hold(round_, offer("bob", 4, steps=10, tokens=5))
    assert [held.offer.members[0].number for held in round_.on_trial.values()] == [3]
    assert hold_combined(round_, offer("ann"), offer("bob")) == "bob is ejected or quarantined"
    assert hold(round_, offer("ann")) is None
    merge = round_.poll(0.1)  # it is not waited for
    assert names(merge) == [("ann", 1)]
    assert merge is not None
    commit(round_, merge, 0.2)
    assert list(round_.on_trial) == ["bob"]  # it may be judged with the next merge
    round_.roster.change(round_.settings, frozenset())
    round_.drop_unfit()
    assert round_.on_trial == {}
    assert hold(round_, offer("bob", 3)) is None


def test_where_all_who_made_a_quorum_are_excluded_the_round_waits_for_another_one_and_the_log_goes_on() -> None:
    round_ = round_of("ann", "bob", **{"round.quorum": 1, "round.grace_factor": 0.9})
    open_at(round_, 0)
    assert hold(round_, offer("ann")) is None
    assert round_.poll(1) is None  # within the grace window
    round_.roster.change(round_.settings, frozenset({"ann"}))
    round_.drop_unfit()
    assert round_.poll(100) is None
    assert hold(round_, offer("bob")) is None
    merge = round_.poll(101)
    assert names(merge) == [("bob", 1)]
    assert merge is not None
    commit(round_, merge, 101)
    assert not round_.chain.closed


def test_what_is_merged_of_an_excluded_learner_stays_counted() -> None:
    roster, chain = Roster(settings_of(ROUNDS, tokens=100)), log_of(60, bob=(1, 30), ann=(1, 30))
    roster.hear(learner_heartbeat("bob", tokens=90), 0)
    assert is_used_up(roster, chain, 0)
    roster.change(roster.settings, frozenset({"bob"}))
    assert not roster.hear(learner_heartbeat("bob", step=9, tokens=99), 1)
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


@pytest.mark.parametrize(("quorum", "waits"), [("all", False), (2, True)])
def test_where_all_are_waited_for_a_region_waits_for_its_own_learners_alone(quorum: object, waits: bool) -> None:
    """ap's syncer has left dan out, as an outlier: us, where the owner is, is not told."""
    regions: dict[str, Any] = {"regions.names": ["us", "ap"], "regions.merge": True, "log.archive": False}
    round_ = round_of("ann", "bob", "cat", "dan", **regions, **{"round.quorum": quorum, "learners": 4})
    for learner, region in (("ann", "us"), ("bob", "us"), ("cat", "ap"), ("dan", "ap")):
        round_.roster.hear(learner_heartbeat(learner, STEPS, region=region, busy_s=1e-3), 0.0)
    open_at(round_, 0.0)
    for learner in ("ann", "bob"):
        hold(round_, offer(learner))
    assert quorum != "all" or round_.poll(0.1) is None  # an offer of the own region says nothing of the other
    hold_combined(round_, offer("cat"))
    merge = round_.poll(0.2)
    assert names(merge) == (None if waits else [("ann", 1), ("bob", 1), ("cat", 1)])
    if merge is not None:
        commit(round_, merge, 0.2)
        for learner, region in (("ann", "us"), ("bob", "us"), ("cat", "ap"), ("dan", "ap")):
            round_.roster.hear(learner_heartbeat(learner, 2 * STEPS, 1, region=region), 0.3)
        round_.open(0.3)
        for learner in ("ann", "bob"):
            assert hold(round_, offer(learner, 2, 2, after=(1, 1))) is None
        assert round_.poll(0.4) is None  # the next one waits for ap again
        assert hold_combined(round_, offer("cat", 2, 2, after=(1, 1)), offer("dan", 2, 2)) is None
        assert names(round_.poll(0.5)) == [("ann", 2), ("bob", 2), ("cat", 2), ("dan", 2)]


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
        round_.roster.hear(learner_heartbeat(learner, STEPS, 1), 0.3)
        round_.roster.hear(learner_heartbeat(learner, 2 * STEPS, 1), 0.4)
    open_at(round_, 0.4)
    hold(round_, offer("ann", 2, 2, after=(1, 1)))
    assert round_.poll(0.5) is None  # in the next round it is waited for
    hold(round_, offer("bob", 2, 2))
    assert names(round_.poll(0.6)) == [("ann", 2), ("bob", 2)]


def test_a_log_is_closed_without_the_steps_of_a_learner_whose_answer_no_merge_can_have() -> None:
    round_ = round_of("ann", "bob", tokens=10)
    round_.chain.tokens_merged = 10
    for learner in ("ann", "bob"):
        round_.roster.hear(learner_heartbeat(learner, STEPS, tokens=40, state="closing"), 0.0)
        assert hold(round_, offer(learner)) is None
    round_.open(0.0)
    assert names(round_.poll(0.1)) == [("ann", 1), ("bob", 1)]
    round_.without({"bob"})
    merge = round_.poll(0.2)
    assert names(merge) == [("ann", 1)]
    assert merge is not None
    assert merge.closing
