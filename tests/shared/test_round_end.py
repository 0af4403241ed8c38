"""The end of a run by its budget: when it is used up, and the rounds that close the log."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.made.heartbeats import learner_heartbeat
from tests.made.rounds import STEPS, commit, hold, is_used_up, log_of, names, offer, open_at, round_of
from tests.made.run_settings import ROUNDS, settings_of

from diloco.core.run import budget
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Round


def test_no_word_of_a_learner_ends_a_run() -> None:
    """Ann's three offers hold 40 tokens each, in the mean: of what she says that she holds besides, 80 count."""
    roster, chain = Roster(settings_of(ROUNDS, tokens=1000)), log_of(600, ann=(3, 120), bob=(3, 480))
    roster.hear(learner_heartbeat("ann", tokens=2**62), 0)
    roster.hear(learner_heartbeat("eve", tokens=2**62), 0)  # nothing of hers is in the log
    assert roster.processed(chain, 0) == 600 + 2 * 40
    assert not is_used_up(roster, chain, 0)
    roster.hear(learner_heartbeat("bob", tokens=480 + 160), 0)  # bob holds 160, half of what he may
    assert roster.processed(chain, 0) == 600 + 80 + 160
    roster.hear(learner_heartbeat("bob", step=1, tokens=480 + 320), 0)
    assert roster.processed(chain, 0) == 1000
    assert is_used_up(roster, chain, 0)
    assert roster.processed(chain, 5) == 600, "they are dead: of what they held nothing was merged"


def test_a_sum_of_the_largest_counts_fits_into_an_announcement() -> None:
    roster, chain = Roster(settings_of(ROUNDS, tokens=10**18)), log_of(2**62, lost=2**62, ann=(1, 2**61))
    roster.hear(learner_heartbeat("ann", tokens=2**62), 0)
    assert roster.processed(chain, 0) == 2**62


def test_tokens_that_learners_lost_count_as_the_log_states_them() -> None:
    assert is_used_up(Roster(settings_of(ROUNDS, tokens=100)), log_of(60, lost=40), 0)
    assert not is_used_up(Roster(settings_of(ROUNDS, tokens=100)), log_of(60, lost=39), 0)


def test_what_one_learner_has_lost_beyond_its_merged_tokens_ends_no_run() -> None:
    """Of a budget of 1,000 tokens 100 are merged; eve claims to have lost all of it."""
    settings, chain = settings_of(ROUNDS, tokens=1000), log_of(100, lost=1010, ann=(1, 60), bob=(1, 30), eve=(1, 10))
    for name, lost in (("eve", 1000), ("bob", 10)):
        chain.cursors[name] = msgspec.structs.replace(chain.cursors[name], lost_tokens=lost)
    assert budget.accounted(chain) == 100 + 10 + 10
    assert not is_used_up(Roster(settings), chain, 0)
    chain.cursors["ann"] = msgspec.structs.replace(chain.cursors["ann"], lost_tokens=160)  # 100 more than it has merged
    chain.tokens_lost += 160
    assert budget.accounted(chain) == 100 + 10 + 10 + 160, "only the one of which it is most does not count"


def test_a_run_whose_learner_has_lost_most_ends_when_all_who_live_have_stopped() -> None:
    """Ann has processed the budget, and lost most of it; bob, of whom the log has something, is gone for good."""
    settings, chain = settings_of(ROUNDS, tokens=1000), log_of(200, lost=900, ann=(1, 100), bob=(1, 100))
    chain.cursors["ann"] = msgspec.structs.replace(chain.cursors["ann"], lost_tokens=900)
    roster = Roster(settings)
    roster.hear(learner_heartbeat("ann", tokens=1000, state="stepping"), 0)
    assert not is_used_up(roster, chain, 0)
    roster.hear(learner_heartbeat("ann", tokens=1000, state="closing"), 1)
    assert is_used_up(roster, chain, 1)


def test_the_budget_is_used_up_when_all_who_live_have_stopped_and_the_log_is_near_to_it() -> None:
    # cat was killed for good: of 100 tokens the log holds 80. The others had stopped before, and take no step any more
    roster = Roster(settings_of(ROUNDS, tokens=100))
    merged: dict[str, Any] = {"ann": (2, 40), "bob": (2, 30), "cat": (2, 10)}
    roster.hear(learner_heartbeat("ann", tokens=40, state="closing"), 0)
    roster.hear(learner_heartbeat("bob", tokens=30, state="stepping"), 0)
    assert not is_used_up(roster, log_of(80, **merged), 0)
    roster.hear(learner_heartbeat("bob", tokens=30, state="closing"), 1)
    assert is_used_up(roster, log_of(80, **merged), 1)
    assert not is_used_up(roster, log_of(80, **merged), 100), "no learner lives: a newcomer may take the missing steps"
    # they alone are heard, and say that they have stopped: the log knows better
    assert not is_used_up(roster, log_of(8, ann=(2, 4), bob=(2, 2), cat=(2, 2)), 1)
    roster.ending = True  # another fragment's log is closed
    assert is_used_up(roster, log_of(8, ann=(2, 4), bob=(2, 2), cat=(2, 2)), 1)


def test_a_run_whose_learners_lost_all_ends_when_all_of_them_have_stopped() -> None:
    """Two learners never had finite values: nothing of theirs is in the log, or ever comes."""
    roster, chain = Roster(settings_of(ROUNDS, tokens=100, learners=2)), log_of(0)
    roster.hear(learner_heartbeat("ann", 9, tokens=100, state="closing", steps=[0]), 0)
    assert not is_used_up(roster, chain, 0), "the run has two learners"
    roster.hear(learner_heartbeat("bob", 9, tokens=100, state="closing", steps=[1]), 0)
    assert not is_used_up(roster, chain, 0), "bob holds a step"
    roster.hear(learner_heartbeat("bob", 9, tokens=100, state="closing", steps=[0]), 0)
    assert is_used_up(roster, chain, 0)
    assert not is_used_up(roster, log_of(8, cat=(2, 8)), 0), "cat is in the log, and may come back"


def test_what_those_hold_who_stopped_before_the_first_version_is_merged() -> None:
    """The budget is less than the steps before the first round: each has used it up alone, and the log holds nothing."""
    round_ = round_of("ann", "bob", step=1, tokens=10, **{"round.quorum": "all"})
    assert not round_.due(0, STEPS)
    round_.roster.hear(learner_heartbeat("ann", 2, tokens=20, state="closing"), 1)
    assert not round_.due(1, STEPS), "bob steps on"
    round_.roster.hear(learner_heartbeat("bob", 1, tokens=10, state="closing", steps=[0]), 1)
    open_at(round_, 1)
    assert hold(round_, offer("ann", steps=2, tokens=20)) is None
    merge = round_.poll(1)
    assert names(merge) == [("ann", 1)]
    assert merge is not None
    commit(round_, merge, 1)
    open_at(round_, 1)
    assert round_.closing


def test_a_learner_that_has_stopped_for_good_makes_no_quorum_unreachable() -> None:
    """The log lost what bob had merged: he has used the budget up by his own account, and ann steps on alone."""
    round_ = round_of("ann", "bob", tokens=1000, **{"round.quorum": 2})
    found = []
    for now_s in range(1, 13):
        round_.roster.hear(learner_heartbeat("ann", STEPS + now_s, tokens=now_s), now_s)
        halted = {"state": "closing"} if now_s >= 3 else {}
        round_.roster.hear(learner_heartbeat("bob", STEPS + min(now_s, 3), tokens=990, steps=[0], **halted), now_s)
        found.append(round_.quorum(now_s))
    assert found == [2] * 8 + [1] * 4, "six usual steps after his last one, at 3 s"


def used_up(*learners: str, **changes: Any) -> Round:
    """A round that is closing: the log holds the budget."""
    round_ = round_of(**({"tokens": 100} | changes))
    round_.chain.tokens_merged = 100
    for learner in learners:
        round_.roster.hear(learner_heartbeat(learner, 6, tokens=100, steps=[2]), 0)
    open_at(round_, 0)
    assert round_.closing
    return round_


def test_a_closing_round_waits_for_all_that_the_living_hold() -> None:
    round_ = used_up("ann", "bob")
    hold(round_, offer("ann"))
    assert round_.poll(1) is None
    round_.roster.hear(learner_heartbeat("bob", 7, tokens=100, steps=[3], state="closing"), 1)
    assert round_.poll(4) is None  # bob has stopped, and holds three steps
    hold(round_, offer("bob", steps=3))
    assert round_.poll(4.2) is None  # ann has answered, and not stopped
    round_.roster.hear(learner_heartbeat("ann", 7, tokens=100, steps=[5], state="closing"), 4.3)
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
    round_.roster.hear(learner_heartbeat("ann", 6, tokens=100, steps=[2], state="closing"), 1)
    round_.roster.hear(learner_heartbeat("bob", 7, tokens=100, steps=[0], state="stepping"), 1)
    assert round_.poll(1) is None  # it may still step
    round_.roster.hear(learner_heartbeat("bob", 7, 0, tokens=100, steps=[0], state="closing"), 1)
    assert names(round_.poll(1)) == [("ann", 1)]


def test_a_closing_round_waits_for_who_has_not_applied_the_last_version() -> None:
    round_ = used_up("ann")
    round_.roster.hear(learner_heartbeat("ann", 7, tokens=100, steps=[0], state="closing", versions=[7]), 1)
    assert round_.poll(1) is None
    round_.roster.hear(learner_heartbeat("ann", 7, tokens=100, steps=[0], state="closing", versions=[0]), 1)
    assert names(round_.poll(1)) == []


def test_a_closing_round_does_not_hang_on_the_dead() -> None:
    round_ = used_up("ann", "bob", **{"round.quorum": 3})
    hold(round_, offer("ann"))
    round_.roster.hear(learner_heartbeat("ann", 6, tokens=100, steps=[2], state="closing"), 4)
    assert round_.poll(4.9) is None
    assert names(round_.poll(5)) == [("ann", 1)]


def test_with_nothing_left_the_log_is_closed_without_a_version() -> None:
    round_ = used_up("ann")
    round_.roster.hear(learner_heartbeat("ann", 7, tokens=100, steps=[0], state="closing"), 1)
    merge = round_.poll(1)
    assert names(merge) == []
    assert merge is not None
    commit(round_, merge, 1)
    assert (round_.chain.closed, round_.chain.version) == (True, 0)


def test_an_open_round_does_not_wait_at_the_end_for_who_has_nothing_to_answer() -> None:
    # bob came too late to take a step: the others have used up the budget
    round_ = round_of("ann", tokens=100, **{"round.quorum": "all", "round.grace_factor": 0})
    open_at(round_, 0)
    round_.roster.hear(learner_heartbeat("bob"), 1)
    hold(round_, offer("ann"))
    assert round_.poll(1) is None
    round_.roster.hear(learner_heartbeat("ann", 20, tokens=100, steps=[20], state="closing"), 2)
    round_.roster.hear(learner_heartbeat("bob", state="closing"), 2)
    assert names(round_.poll(2)) == [("ann", 1)]


def test_an_open_round_does_not_wait_for_a_quorum_that_the_end_has_made_impossible() -> None:
    # bob dies for good while the round is open; ann goes on to the end of the budget and stops
    round_ = round_of("ann", "bob", tokens=100, **{"round.quorum": 2, "round.grace_factor": 0})
    open_at(round_, 0)
    hold(round_, offer("ann"))
    round_.roster.hear(learner_heartbeat("ann", 8), 10)
    assert round_.poll(10) is None
    round_.roster.hear(learner_heartbeat("ann", 20, tokens=100, steps=[20], state="closing"), 20)
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
    round_.roster.hear(learner_heartbeat("ann", 20, tokens=100, steps=[2], state="closing"), 20)
    assert round_.poll(20) is None  # it holds two steps, and will answer
    round_.roster.hear(learner_heartbeat("ann", 20, tokens=100, steps=[0], state="closing"), 20)
    merge = round_.poll(20)
    assert names(merge) == []
    assert merge is not None
    assert merge.closing
