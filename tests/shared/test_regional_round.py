"""A region's own merge: who is waited for, what is combined, what quantisation leaves over; nothing is merged twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray
from tests.made.heartbeats import learner_heartbeat
from tests.made.log_entries import BODY, hash_of, record_of
from tests.made.rounds import Learner, commit, members_of, offer
from tests.made.run_settings import ROUNDS, settings_of

from diloco.core.log import regional_round
from diloco.core.log.chain import Chain
from diloco.core.log.regional_round import HeldOffer, RegionalRound
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Merge, Round, RoundOffer
from diloco.core.tensors import quantise
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import ClaimError, UnmergeableError
from diloco.wire.control import Announcement
from diloco.wire.entries import Cursor, Record, RolledBack
from diloco.wire.offers import Answer, Offer, RegionalMembers, RegionalOffer

RAW = np.zeros(0, np.uint8)
ME = ("syncer-1", 7)
FRAGMENT = build_map([TensorSpec("t", (64,))], 1).fragments[0]


def chain_of(version: int = 0) -> Chain:
    return Chain(0, version, 0, hash_of(1000 + version), version, hash_of(version))


def combining_of(*learners: str, **changes: Any) -> RegionalRound:
    """A region with these learners, whose log is at version 0; they take 1 s a step."""
    base = {"learners": 8, "round.overlap_steps": 2.0, "round.grace_factor": 0.5, "merge.method": "average"}
    settings = settings_of(ROUNDS, **base | {"merge.weights": "tokens"} | changes)
    roster = Roster(settings)
    for learner in learners:
        roster.hear(learner_heartbeat(learner, 4), 0.0)
    combining = RegionalRound(roster, FRAGMENT)
    combining.follow(chain_of(), None, ME)
    return combining


def announced(version: int = 1, *, closing: bool = False, epoch: int = 0) -> Announcement:
    return Announcement(0, version, epoch, "syncer-0", 1.0, closing, 0, 24, [])


def hold(combining: RegionalRound, sent: Offer, raw: NDArray[np.uint8] = RAW) -> str | None:
    missed = combining.hold(HeldOffer(sent, raw))
    return None if missed is None else missed.text


def names(held: tuple[HeldOffer, ...]) -> list[tuple[str, int]]:
    return [(own.offer.learner, own.offer.number) for own in held]


def version_of(number: int, *combined: int) -> Record:
    """Version ``number``, in which own regional offers were merged."""
    combinations = [RegionalMembers(*ME, own, [place]) for place, own in enumerate(combined)]
    members: list[Any] = [None] * len(combined)
    return record_of(number, members=members, regional_offers=combinations, state_hash=hash_of(number))


def test_the_answers_of_a_region_are_combined_when_all_its_learners_have_answered() -> None:
    combining = combining_of("ann", "bob")
    combining.hear(announced(), 0.0)
    hold(combining, offer("bob"))
    assert combining.poll(0.1) == ()
    hold(combining, offer("ann"))
    assert names(combining.poll(0.2)) == [("ann", 1), ("bob", 1)]
    assert combining.poll(0.3) == ()  # once
    combining.hear(announced(), 0.4)
    assert combining.poll(9.0) == ()


def test_under_quorum_all_a_region_waits_for_six_of_a_learners_own_intervals() -> None:
    combining = combining_of("ann", "eve", **{"round.quorum": "all"})
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann"))
    for second in range(20):
        for learner in ("ann", "eve"):
            combining.roster.hear(learner_heartbeat(learner, 4 + second), float(second))
        assert combining.poll(float(second)) == (), second
    combining.roster.hear(learner_heartbeat("eve", 24), 20.0)
    assert combining.poll(23.9) == ()
    assert names(combining.poll(24.0)) == [("ann", 1)]  # six times the four steps of 1 s between two rounds


def test_who_is_late_is_waited_for_no_longer_than_the_grace_window_and_comes_with_the_next_round() -> None:
    combining = combining_of("ann", "bob")
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann"))
    assert combining.poll(0.25) == ()
    # 0.5 * (2 steps of 1 s - 0.25 s until the first answer), from the first answer on
    assert combining.remaining_s(0.25) == pytest.approx(0.875)
    assert combining.poll(1.12) == ()
    assert names(combining.poll(1.13)) == [("ann", 1)]
    merged = chain_of(1)
    merged.cursors["ann"] = Cursor("ann", 1, 1, 1, 40, 0, 4)
    combining.follow(merged, version_of(1), ME)
    combining.hear(announced(2), 2.0)
    hold(combining, offer("bob"))
    assert combining.poll(2.1) == ()  # nothing that answers this round
    hold(combining, offer("ann", 2, version=2, after=(1, 1)))
    combining.roster.hear(learner_heartbeat("bob", 4, state="closing", steps=[0]), 2.2)
    assert names(combining.poll(2.2)) == [("ann", 2), ("bob", 1)]


def test_where_the_version_comes_without_the_region_nothing_is_waited_for_any_more() -> None:
    combining = combining_of("ann", "bob")
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann"))
    assert combining.poll(0.1) == ()
    assert combining.remaining_s(0.1) is not None
    combining.follow(chain_of(1), version_of(1), ME)
    assert combining.poll(9.0) == ()
    assert combining.remaining_s(9.0) is None


def test_one_that_answers_after_the_others_were_sent_is_sent_with_them_if_the_round_stays_open() -> None:
    combining = combining_of("ann", "bob", **{"round.grace_factor": 0.0})
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann"))
    assert names(combining.poll(0.1)) == [("ann", 1)]
    hold(combining, offer("bob"))
    combining.hear(announced(), 2.0)
    assert combining.poll(5.0) == ()  # when it was last heard of, 2 steps had not passed: it may be over
    combining.hear(announced(), 2.2)
    assert names(combining.poll(5.0)) == [("ann", 1), ("bob", 1)]


def test_announcements_of_rounds_that_the_log_is_not_at_keep_no_region_waiting_and_have_nothing_sent_twice() -> None:
    """Any syncer may announce any round of any fragment, as often as it likes."""
    combining = combining_of("ann", "bob")
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann"))
    assert combining.poll(0.25) == ()
    for at_s in (0.3, 0.6, 0.9, 1.1):
        for version in (2, 3, 2**40):
            combining.hear(announced(version, closing=True), at_s)
        combining.hear(announced(), at_s)
        assert combining.poll(at_s) == ()
    assert names(combining.poll(1.13)) == [("ann", 1)]  # the grace window begins with the first answer, as ever
    for at_s in (2.0, 3.0, 4.0):
        combining.hear(announced(2), at_s)
        combining.hear(announced(), at_s)
        assert combining.poll(at_s) == ()
    assert len(combining.ahead) <= regional_round.AHEAD


def test_a_round_that_is_heard_of_before_its_version_is_known_opens_with_it() -> None:
    combining = combining_of("ann")
    combining.hear(announced(2), 0.5)
    combining.hear(announced(3), 0.6)
    assert hold(combining, offer("ann", version=2)) is None
    assert combining.poll(0.6) == ()
    combining.follow(chain_of(1), version_of(1), ME)
    assert names(combining.poll(0.7)) == [("ann", 1)]
    assert combining.round == 2


def test_a_new_owner_has_its_answers_at_once() -> None:
    combining = combining_of("ann")
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann"))
    assert names(combining.poll(0.1)) == [("ann", 1)]
    combining.hear(announced(epoch=1), 0.2)
    assert combining.poll(0.2) == ()  # this it can read
    hold(combining, offer("ann", 2))
    assert names(combining.poll(0.3)) == [("ann", 2)]


def test_where_the_owner_waits_for_all_so_does_the_region_and_not_for_the_dead() -> None:
    combining = combining_of("ann", "bob", **{"round.quorum": "all", "round.grace_factor": 0.0})
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann"))
    combining.roster.hear(learner_heartbeat("ann", 5), 4.0)
    assert combining.poll(4.9) == ()
    assert combining.remaining_s(4.9) is None
    assert names(combining.poll(5.0)) == [("ann", 1)]  # bob was not heard for 5 s


def test_one_that_has_stopped_with_nothing_to_answer_is_not_waited_for() -> None:
    combining = combining_of("ann", "bob", **{"round.quorum": "all"})
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann"))
    combining.roster.hear(learner_heartbeat("bob", 5, state="closing", steps=[3]), 0.1)
    assert combining.poll(0.1) == ()
    combining.roster.hear(learner_heartbeat("bob", 5, state="closing", steps=[0]), 0.2)
    assert names(combining.poll(0.2)) == [("ann", 1)]


def test_in_the_closing_round_those_are_waited_for_that_hold_more_than_they_answered() -> None:
    combining = combining_of("ann", **{"round.quorum": "all"})
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann", steps=4))
    combining.roster.hear(learner_heartbeat("ann", 6, state="closing", steps=[6]), 0.1)
    assert names(combining.poll(0.1)) == [("ann", 1)]  # it answers a round once
    combining.hear(announced(closing=True), 0.2)
    assert combining.poll(0.2) == ()
    hold(combining, offer("ann", 2, steps=6))
    assert names(combining.poll(0.3)) == [("ann", 2)]


def test_an_offer_ahead_of_the_log_as_known_here_waits_for_it() -> None:
    combining = combining_of("ann")
    assert hold(combining, offer("ann", 2, version=2, after=(1, 1))) is None
    combining.hear(announced(2), 0.0)
    assert combining.poll(0.0) == ()
    chain = chain_of(1)
    combining.follow(chain, version_of(1), ME)
    assert combining.poll(1.0) == ()  # by this log, nothing of ann was merged
    assert combining.held == {}


def test_a_round_of_an_owner_that_was_replaced_and_one_that_is_over_are_none() -> None:
    combining = combining_of("ann")
    chain = chain_of(1)
    chain.epoch = 3
    combining.follow(chain, None, ME)
    combining.hear(announced(2, epoch=2), 0.0)
    combining.hear(announced(1, epoch=3), 0.0)
    hold(combining, offer("ann", version=2))
    assert combining.poll(0.0) == ()
    combining.hear(announced(2, epoch=3), 0.0)
    assert names(combining.poll(0.0)) == [("ann", 1)]


def test_offers_that_no_version_can_have_are_refused() -> None:
    combining = combining_of("ann", **{"round.max_staleness_versions": 1})
    combining.follow(chain_of(3), None, ME)
    assert "too old" in str(hold(combining, offer("ann", version=2)))
    assert "another state hash" in str(hold(combining, offer("ann", version=4, base_hash=b"?" * 32)))
    assert hold(combining, offer("ann", 2, version=4)) is None
    assert "superseded" in str(hold(combining, offer("ann", 1, version=4)))


def values_of(*first: float) -> NDArray[np.float32]:
    values = np.zeros(64, np.float32)
    values[: len(first)] = first
    return values


def own(learner: str, *first: float, tokens: int) -> HeldOffer:
    return HeldOffer(offer(learner, tokens=tokens), quantise.quantise(values_of(*first), 4))


def left_over(combining: RegionalRound) -> NDArray[np.float32] | None:
    return combining.residual


def test_what_quantisation_leaves_over_of_a_merged_one_is_added_to_the_next_once() -> None:
    combining = combining_of("ann", "bob")
    # both blocks have the scale 1; the mean (7, 0.5) rounds to (7, 0), half to even
    held = (own("ann", 7, 1, tokens=10), own("bob", 7, 0, tokens=10))
    raw, rest = combining.combine(held, combining.residual)
    assert quantise.dequantise(raw, 64, 4)[:2].tolist() == [7, 0]
    assert rest is not None
    assert rest[:2].tolist() == [0, 0.5]
    combining.send(1, rest)
    combining.follow(chain_of(1), version_of(1), ME)
    assert left_over(combining) is None  # a version without it
    combining.send(2, np.ones(64, np.float32))
    combining.follow(chain_of(2), version_of(2, 1), ME)
    assert left_over(combining) is rest
    # 0.5 and 0.5 make 1
    raw, rest = combining.combine(held, combining.residual)
    assert quantise.dequantise(raw, 64, 4)[:2].tolist() == [7, 1]
    assert rest is not None
    assert rest[:2].tolist() == [0, 0]
    # what was sent before the merge cannot be merged any more: were it named, nothing would be known of it
    combining.follow(chain_of(3), version_of(3, 2), ME)
    assert left_over(combining) is None


def test_what_is_left_over_is_forgotten_where_versions_were_not_seen() -> None:
    combining = combining_of("ann")
    combining.residual = np.ones(64, np.float32)
    combining.send(1, np.ones(64, np.float32))
    combining.follow(chain_of(5), None, ME)
    assert left_over(combining) is None
    combining.follow(chain_of(6), version_of(6, 1), ME)
    assert left_over(combining) is None


def test_without_error_feedback_nothing_is_kept() -> None:
    combining = combining_of("ann", **{"codec.error_feedback": False})
    raw, rest = combining.combine([own("ann", 7, 0.25, tokens=10)], None)
    assert rest is None
    assert quantise.dequantise(raw, 64, 4)[:2].tolist() == [7, 0]


def test_a_region_sends_the_average_of_values_of_state_as_they_are() -> None:
    combining = combining_of("ann", "bob", **{"merge.method": "rda", "codec.error_feedback": True})
    combining.fragment = build_map([TensorSpec("t", (9,)), TensorSpec("u", (2,), state=True)], 2).fragments[1]
    combining.usual = 1e3
    values = {"ann": ([100, 1e-6], 10), "bob": ([60, 5e-6], 30)}
    offers = [
        HeldOffer(offer(name, tokens=tokens, bits=32), quantise.quantise(np.array(value, np.float32), 32))
        for name, (value, tokens) in values.items()
    ]
    raw, rest = combining.combine(offers, None)
    assert raw.view(np.float32).tolist() == pytest.approx([70, 4e-6])
    assert rest is not None
    assert not rest.any()


def test_offers_that_add_up_to_what_is_not_finite_are_dropped() -> None:
    combining = combining_of("ann", "bob", **{"codec.offer_bits": 32, "merge.weights": "equal"})
    held = [HeldOffer(offer(name, bits=32), quantise.quantise(values_of(3e38), 32)) for name in ("ann", "bob")]
    for item in held:
        combining.hold(item)
    with pytest.raises(UnmergeableError, match="of ann, bob") as raised:
        combining.combine(held, None)
    combining.without(raised.value.learners)
    assert combining.held == {}


def test_the_others_are_combined_at_once_without_one_whose_values_move_too_far() -> None:
    combining = combining_of("ann", "bob", **{"round.quorum": "all", "codec.error_feedback": False})
    combining.usual = 0.5
    combining.hear(announced(), 0.0)
    for item in (own("ann", 7, -7, tokens=10), own("bob", 7e6, tokens=10)):  # 0.5 times 100 is as far as a merge may move
        assert combining.hold(item) is None
    held = combining.poll(0.1)
    with pytest.raises(UnmergeableError, match="of bob") as raised:
        combining.combine(held, None)
    combining.without(raised.value.learners)
    held = combining.poll(0.2)
    assert names(held) == [("ann", 1)]
    raw, _ = combining.combine(held, None)
    assert quantise.dequantise(raw, 64, 4)[:3].tolist() == [7, -7, 0]


def test_claims_that_cannot_be_cross_no_border() -> None:
    combining = combining_of("ann")
    combining.hear(announced(), 0.0)
    with pytest.raises(ClaimError, match="offer 1 of ann is impossible"):
        hold(combining, offer("ann", data=[(0, 2**62, 2**62)]))
    assert combining.poll(9.0) == ()


# ---- a whole round, from learners to versions


@dataclass
class Region:
    """Learners, and two syncers of which each may believe that it is the one to combine."""

    learners: list[Learner]
    combining: list[RegionalRound]
    sent: list[RegionalOffer] = field(default_factory=list)


def interleave(seed: int, quorum: object, grace: float) -> list[Merge]:
    """Random events of two regions' learners and syncers, and of an owner who reads what they send late, twice, or not."""
    draw = random.Random(seed)
    changes = {"round.quorum": quorum, "round.grace_factor": grace, "tokens": 10**9, "learners": 4}
    everybody = Roster(settings_of(ROUNDS, **changes))
    round_ = Round(everybody, chain_of(), 1)
    regions = [
        Region([Learner(name) for name in pair], [combining_of(*pair, **changes) for _ in range(2)])
        for pair in (("ann", "bob"), ("cat", "dee"))
    ]
    learners = [learner for region in regions for learner in region.learners]
    log: list[tuple[Merge, Chain]] = []
    now_s, seen = 0.0, set[tuple[str, int, int]]()
    actions = {"step": 6, "offer": 5, "gather": 8, "combine": 6, "deliver": 6, "single": 1, "apply": 6, "follow": 6, "tick": 8}
    for _ in range(1500):
        region = draw.choice(regions)
        learner, combining = draw.choice(region.learners), draw.choice(region.combining)
        action = draw.choices(list(actions), list(actions.values()))[0]
        if action == "step":
            learner.take_step()
            for roster in (everybody, *(own.roster for own in region.combining)):
                roster.hear(learner.heartbeat(), now_s)
        elif action == "offer" and learner.steps:
            learner.offer(learner.version + 1)
        elif action == "gather" and learner.mailbox:
            combining.hold(HeldOffer(draw.choice(learner.mailbox[-3:]), RAW))
        elif action == "combine":
            combining.hear(announced(round_.version), now_s)
            members = [Answer.of(own.offer) for own in combining.poll(now_s)]
            if members:
                region.sent.append(RegionalOffer(0, "syncer-1", 1, len(region.sent) + 1, 4, members, BODY))
        elif action == "deliver" and region.sent:
            round_.hold(RoundOffer(draw.choice(region.sent[-3:]), RAW))
        elif action == "single" and learner.mailbox:
            round_.hold(RoundOffer(draw.choice(learner.mailbox[-3:]), RAW))
        elif action == "apply" and learner.version < round_.chain.version:
            learner.apply(log[learner.version][0])
        elif action == "follow" and combining.chain is not None and combining.chain.version < round_.chain.version:
            combining.follow(log[combining.chain.version][1], version_of(combining.chain.version + 1), ME)
        elif action == "tick":
            now_s += draw.choice([0.0, 0.3, 1.0])
            if round_.due(now_s, round_.settings.round.steps):
                round_.open(now_s)
            merge = round_.poll(now_s)
            if merge is not None:
                for merged in members_of(merge):
                    identity = (merged.learner, merged.incarnation, merged.number)
                    assert identity not in seen
                    seen.add(identity)
                    next(other for other in learners if other.name == merged.learner).merged += merged.tokens
                commit(round_, merge, now_s)  # the chain's own rules hold, too
                kept = Chain(0, merge.version, 0, round_.chain.head, merge.version, hash_of(merge.version))
                kept.cursors = dict(round_.chain.cursors)
                log.append((merge, kept))
        for other in learners:
            assert other.merged <= other.done
    return [merge for merge, _ in log]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, "all"]), st.sampled_from([0, 0.9]))
def test_no_interleaving_merges_anything_twice(seed: int, quorum: object, grace: float) -> None:
    interleave(seed, quorum, grace)


def test_such_interleavings_do_merge_combined_offers() -> None:
    # a guard of the property above, which would hold if nothing were ever merged
    logs = [interleave(seed, 1, 0.9) for seed in range(20)]
    merged = [held.offer for log in logs for merge in log for held in merge.held]
    assert sum(len(log) for log in logs) > 100
    assert sum(len(offer.members) > 1 for offer in merged) > 30
    assert sum(len({m.round for m in offer.members}) > 1 for offer in merged) > 3  # with a late answer among them


def test_when_a_learner_is_excluded_the_others_are_combined_again_and_so_are_all_when_it_is_readmitted() -> None:
    combining = combining_of("ann", "bob")
    combining.hear(announced(), 0.0)
    hold(combining, offer("ann"))
    hold(combining, offer("bob"))
    assert names(combining.poll(0.1)) == [("ann", 1), ("bob", 1)]
    combining.roster.change(combining.settings, frozenset({"bob"}))
    combining.changed()
    assert names(combining.poll(0.2)) == [("ann", 1)]
    assert hold(combining, offer("bob", 2)) == "bob is ejected or quarantined"
    combining.roster.change(combining.settings, frozenset())
    combining.changed()
    hold(combining, offer("bob", 2))
    assert names(combining.poll(0.3)) == [("ann", 1), ("bob", 2)]


def test_the_offers_of_a_quarantined_learner_are_kept_to_be_judged_and_not_combined() -> None:
    combining = combining_of("ann", "bob")
    combining.hear(announced(), 0.0)
    combining.roster.change(combining.settings, frozenset({"bob"}), frozenset({"bob"}))
    combining.changed()
    assert hold(combining, offer("bob")) == "bob is quarantined: its offer is judged, and not merged"
    hold(combining, offer("ann"))
    assert names(combining.poll(0.1)) == [("ann", 1)]
    assert list(combining.on_trial) == ["bob"]
    combining.roster.change(combining.settings, frozenset())
    combining.changed()
    assert combining.on_trial == {}
    assert hold(combining, offer("bob")) is None


def test_a_region_begins_again_when_the_log_goes_back() -> None:
    combining = combining_of("ann", "bob")
    combining.residual = np.ones(64, np.float32)
    combining.send(1, np.ones(64, np.float32))
    combining.hear(announced(1), 0.0)
    for learner in ("ann", "bob"):
        assert hold(combining, offer(learner)) is None
    chain = chain_of(1)
    chain.rolled_back = RolledBack(1, 0, 1)
    record = replace(version_of(1), entry="rollback", bits=32, rolled_back=chain.rolled_back)
    combining.follow(chain, record, ME)
    assert (combining.held, left_over(combining)) == ({}, None)
    assert "precedes the rollback" in (hold(combining, offer("ann", 2)) or "")
    combining.follow(chain_of(2), version_of(2, 1), ME)  # what was sent before is forgotten
    assert left_over(combining) is None
