"""Merges that move too far: what is the usual, by hand, and whose offers are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.made.fragment_vectors import vector
from tests.made.held_offers import fragment_of, held, replica_of
from tests.made.run_settings import MERGES, settings_of

from diloco.core.log.fold import Replica
from diloco.core.syncer import excess
from diloco.core.syncer.merging import accumulate, sound, unreadable
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors.outer import AVERAGE, AdamW
from diloco.errors import UnmergeableError
from diloco.settings.run import RunSettings

Vector = NDArray[np.float32]
RUN = bytes(8)
LIVE = ("ann", "bob", "cat", "dan")


def moved(momentum: Vector, theta: Vector, version: int = 9) -> Replica:
    replica = replica_of(theta)
    replica.momentum, replica.chain.version = momentum, version
    return replica


def merged(settings: RunSettings, replica: Replica, *offers: RoundOffer, live: tuple[str, ...] = LIVE) -> list[float]:
    merge = Merge(replica.chain.version + 1, offers, False, 0.0, 0.0)
    values: list[float] = sound(fragment_of(replica.theta.size), settings, merge, {}, replica, live, RUN).tolist()
    return values


def factor(value: float = 10.0, **changes: Any) -> RunSettings:
    return settings_of(MERGES, **{"merge.method": "average", "quarantine.merge_factor": value, "round.steps": 4} | changes)


def test_the_usual_is_what_the_momentum_remembers() -> None:
    assert excess.usual(moved(vector(3, 4), vector(6, 8))) == 5
    assert excess.usual(moved(vector(0.03, 0.04), vector(60, 80))) == 1  # a fragment that rested: a hundredth of its own
    assert excess.usual(moved(vector(3, 4), vector(6, 8), version=3)) == 10  # first rounds: its own
    assert excess.usual(moved(vector(30, 40), vector(6, 8), version=3)) == 50
    assert excess.usual(moved(vector(0, 0, 0, 0), vector(0, 0, 0, 0), version=0)) == 0.2  # a tenth in each of four values
    assert excess.usual(moved(vector(0, 0), vector(0, 0))) == 0
    # of AdamW the second half remembers squares: 9 + 16
    adamw = Replica(replica_of(vector(0, 0)).chain, vector(0, 0), vector(1, 1, 9, 16), AdamW(0.95, ()))
    assert excess.usual(adamw) == 5
    # offers of state are values: its own norm in any version
    state = moved(vector(3, 4), vector(6, 8))
    state.optimizer = AVERAGE
    assert excess.usual(state) == 10
    # and none before it has moved: a running variance begins as 1, whatever the data's is
    begins = moved(vector(0, 0), vector(1, 1), version=0)
    begins.optimizer = AVERAGE
    assert excess.usual(begins) == 0


def test_more_steps_have_more_room() -> None:
    offers = [held("ann", vector(1), tokens=40, steps=4), held("bob", vector(1), tokens=120, steps=12)]
    assert excess.room(5.0, offers[:1], factor()) == 50
    assert excess.room(5.0, offers, factor()) == 150  # three times the steps between two rounds
    assert excess.room(5.0, offers, factor(0.0)) == 2.0**60
    assert excess.room(0.0, offers, factor()) == 2.0**60


def test_the_largest_offers_are_left_out_until_the_rest_moves_no_further_than_it_may() -> None:
    replica = moved(vector(3, 4), vector(0, 0))
    ann, bob = held("ann", vector(30, 40), tokens=10), held("bob", vector(10, 0), tokens=10)
    assert merged(factor(), replica, ann, bob) == [20, 20]  # norm 50 is as far as it may move
    cat, dan = held("cat", vector(3e37, 0), tokens=10), held("dan", vector(0, 4000), tokens=10)
    with pytest.raises(
        UnmergeableError, match="with offers of dan, of norms up to 4000, the merge has a norm above 50"
    ) as raised:
        merged(factor(), replica, ann, bob, dan)
    assert (raised.value.event, raised.value.learners) == ("merge_too_far", ("dan",))
    with pytest.raises(
        UnmergeableError, match=r"with offers of cat, dan, of norms up to 3e\+37, the merge is not finite"
    ) as raised:
        merged(factor(), replica, ann, bob, cat, dan)
    assert (raised.value.event, raised.value.learners) == ("merge_not_finite", ("cat", "dan"))
    assert replica.theta.tolist() == [0, 0]


def test_without_a_usual_values_are_to_be_such_that_sums_of_their_squares_are_finite() -> None:
    replica = moved(vector(0, 0), vector(0, 0))
    assert merged(factor(), replica, held("ann", vector(2.0**60, 0), tokens=1)) == [2.0**60, 0]
    with pytest.raises(UnmergeableError, match=r"with offers of bob, .* the merge is not finite") as raised:
        merged(factor(), replica, held("ann", vector(1, 0), tokens=1), held("bob", vector(2.0**62, 0), tokens=1))
    assert (raised.value.event, raised.value.learners) == ("merge_not_finite", ("bob",))


def test_offers_that_only_their_sum_spoils_are_left_out_by_norm_and_then_name() -> None:
    replica = moved(vector(0), vector(0))
    offers = [held(name, vector(value), tokens=10**15) for name, value in (("ann", 1e17), ("bob", 1e30), ("cat", 1e30))]
    with pytest.raises(UnmergeableError) as raised:
        merged(factor(), replica, *offers)
    assert raised.value.learners == ("bob", "cat")


def test_the_last_live_learner_moves_as_far_as_it_likes() -> None:
    replica = moved(vector(3, 4), vector(0, 0))
    far = held("ann", vector(600, 800), tokens=10)
    with pytest.raises(UnmergeableError):
        merged(factor(), replica, far)  # bob, cat and dan may answer yet
    assert merged(factor(), replica, far, live=("ann",)) == [600, 800]
    # a jump of everybody's: the smallest is merged, and is the usual from then on
    both = (held("bob", vector(0, 900), tokens=10), far)
    with pytest.raises(UnmergeableError) as raised:
        merged(factor(), replica, *both, live=("ann", "bob"))
    assert raised.value.learners == ("ann",)
    assert merged(factor(), replica, both[0], live=("bob",)) == [0, 900]
    with pytest.raises(UnmergeableError):  # but to where nothing is finite
        merged(factor(), replica, held("ann", vector(1e30, 0), tokens=10), live=("ann",))


def test_the_same_offers_are_left_out_by_every_owner() -> None:
    """However the merge is made: in parts of the fragment's own cut, of any bits, by the fold of the log alone."""
    noise = np.random.default_rng(3)
    theta, momentum = (noise.normal(size=300).astype(np.float32) for _ in range(2))
    offers = [
        held(name, 10.0**power * noise.normal(size=300).astype(np.float32), tokens=9, bits=4) for power, name in enumerate(LIVE)
    ]
    told = []
    for replica in (moved(momentum, theta), moved(momentum.copy(), theta.copy()).copy()):
        with pytest.raises(UnmergeableError) as raised:
            merged(factor(2.0), replica, *offers)
        told.append((raised.value.learners, str(raised.value)))
    assert told[0] == told[1]
    assert told[0][0] == ("bob", "cat", "dan")  # norms of 170 and more, where 35 may be


def test_offers_whose_claims_nobody_could_read_in_an_entry_are_named() -> None:
    settings, chain = settings_of(MERGES), replica_of(vector(1)).chain
    ann, bob, cat = (
        held(name, vector(1), tokens=10, lost_tokens=lost) for name, lost in (("ann", 5), ("bob", 2**61), ("cat", 2**61))
    )
    merge = Merge(4, (ann, bob, cat), False, 0.0, 0.0)
    assert unreadable(chain, Merge(4, (ann, bob), False, 0.0, 0.0), settings, RUN) == []
    assert unreadable(chain, merge, settings, RUN) == [cat]
    with pytest.raises(UnmergeableError, match="the entry with offers of cat cannot be read") as raised:
        merged(settings, replica_of(vector(1)), ann, bob, cat)
    assert raised.value.event == "merge_unreadable"
    assert accumulate(fragment_of(1), settings, [ann], {}, vector(1)).result().tolist() == [1]
