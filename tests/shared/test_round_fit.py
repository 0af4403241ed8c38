"""Offers that a round may merge: those that are refused, with the reason, those that are held, and those that are dropped."""

from __future__ import annotations

import pytest
from tests.made.heartbeats import learner_heartbeat
from tests.made.log_entries import hash_of
from tests.made.rounds import STEPS, hold, hold_combined, names, offer, open_at, round_of
from tests.made.run_settings import ROUNDS, settings_of

from diloco.core.syncer.offer_fit import OF_ANOTHER_LOG
from diloco.core.syncer.round import Round
from diloco.errors import ClaimError
from diloco.wire.entries import Cursor, RolledBack
from diloco.wire.offers import Offer


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
    ],
)
def test_what_is_not_fit_is_missed_with_the_reason(sent: Offer, reason: str) -> None:
    round_ = round_at(5)
    assert hold(round_, sent) == reason
    assert round_.held == {}


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (offer("bob", 1, 8), "from the future: base 7, round 8, log at 5"),
        (offer("bob", 1, 8, base_version=5), "from the future: base 5, round 8, log at 5"),
        (offer("bob", 1, 6, base_version=7), "from the future: base 7, round 6, log at 5"),
        (offer("bob", 1, 6, base_version=2**62), f"from the future: base {2**62}, round 6, log at 5"),
        (offer("bob", 1, 6, base_hash=b"x" * 32), "its base 5 has another state hash than the log's"),
        (offer("bob", 1, 4, base_hash=b"x" * 32), "its base 3 has another state hash than the log's"),
    ],
)
def test_what_is_of_another_log_is_missed(sent: Offer, reason: str) -> None:
    """An owner may know of one version less than the learner: of one that is stored, and not acknowledged yet.

    Such an offer is no lie by itself: entries that its learner has read may be lost with a server.
    """
    round_ = round_at(5)
    missed = round_.refuse(sent)
    assert missed is not None
    assert (missed.text, missed.reason in OF_ANOTHER_LOG) == (reason, True)
    assert hold(round_, sent) == reason
    assert round_.held == {}


def test_an_offer_without_a_step_is_refused() -> None:
    with pytest.raises(ClaimError, match=r"offer 1 of bob is impossible: offers without a step: 1, at most 0 \(0 steps, 0 to"):
        hold(round_at(5), offer("bob", 1, 6, steps=0, tokens=0, data=[]))


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
    round_.roster.hear(learner_heartbeat("ann", 5, tokens=1), 0)
    assert round_.due(0, STEPS)
    round_.chain.closed = True
    assert not round_.due(0, STEPS)
    assert hold(round_, offer("ann")) == "the run is closed"


@pytest.mark.parametrize("combined", [False, True])
def test_a_claim_that_cannot_be_is_refused_by_name_alone_and_among_others(combined: bool) -> None:
    round_ = round_of("ann", "bob")
    offers = [offer("ann"), offer("bob", lost_tokens=2**62)]
    with pytest.raises(ClaimError, match="offer 1 of bob is impossible"):
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
    round_.roster.hear(learner_heartbeat("ann", 5), 9.0)
    round_.roster.change(settings_of(ROUNDS, **{"round.quorum": 1}), frozenset())
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
    assert refused == {base: f"its base {base} precedes the rollback that made version 6" for base in (3, 5)}
    assert hold(round_, offer("cat", 1, 7, base_version=6, base_hash=hash_of(3))) is None
