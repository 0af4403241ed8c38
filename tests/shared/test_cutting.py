"""Outliers that are cut row by row: by hand, and what a merge makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.made.held_offers import fragment_of, held
from tests.made.run_settings import MERGES, settings_of

from diloco.core.syncer import merging
from diloco.core.syncer.cutting import cut_rows
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors.fragments import Fragment
from diloco.settings.run import RunSettings
from diloco.wire.fields import Bits

Vector = NDArray[np.float32]
EMBEDDING = fragment_of(3, 2, embedding=True)
THETA = np.array([6, 8, 0, 10, 3, 4], np.float32)  # rows of norm 10, 10 and 5


def settings(factor: float = 5.0) -> RunSettings:
    return settings_of(MERGES, **{"quarantine.factor": factor, "merge.weights": "equal"})


def rows_of(learner: str, *norms: float, steps: int = 1, bits: Bits = 32) -> RoundOffer:
    """An offer whose rows have these norms, along the first axis."""
    values = np.zeros((len(norms), 2), np.float32)
    values[:, 0] = norms
    return held(learner, values.reshape(-1), tokens=10, steps=steps, bits=bits)


def cut(
    *offers: RoundOffer, fragment: Fragment = EMBEDDING, factor: float = 5.0, theta: Vector = THETA
) -> dict[int, list[float]]:
    found = cut_rows(fragment, settings(factor).quarantine, offers, theta)
    return {place: [round(float(f), 4) for f in factors] for place, factors in found.items()}


def test_rows_that_others_move_are_cut_to_their_median_and_rows_that_they_leave_alone_to_theta() -> None:
    # the others' rows: medians (the higher) 1, 1 and 0. Cat: 4 -> 1, 0.5 stays, 50 -> 25, five times that row of Theta
    offers = rows_of("ann", 1, 1, 0), rows_of("bob", 0.5, 1, 0), rows_of("cat", 4, 0.5, 50)
    assert cut(*offers) == {2: [0.25, 1.0, 0.5]}
    # a row that the others hardly move beside the other rows is left alone, too: weight decay moves it
    assert cut(rows_of("ann", 1, 1, 0.02), offers[1], offers[2]) == {2: [0.25, 1.0, 0.5]}
    assert cut(rows_of("ann", 1, 1, 0.5), offers[1], offers[2]) == {2: [0.25, 1.0, 0.01]}


def test_offers_within_the_factor_are_not_cut() -> None:
    calm = rows_of("ann", 1, 0, 0), rows_of("bob", 1, 0, 0)
    assert cut(*calm, rows_of("cat", 0, 5, 0)) == {}
    assert cut(*calm, rows_of("cat", 0, 5.01, 0)) == {2: [1.0, 1.0, 1.0]}  # the rows of Theta are longer
    assert cut(*calm, rows_of("cat", 20, 0, 0, steps=4)) == {}  # four times the steps have four times the room
    assert cut(*calm, rows_of("cat", 40, 0, 0, steps=4)) == {2: [0.1, 1.0, 1.0]}
    assert cut(*calm, rows_of("cat", 0, 60, 0), factor=0.0) == {}


def test_two_others_are_needed_and_theta() -> None:
    assert cut(rows_of("ann", 1, 0, 0), rows_of("cat", 90, 0, 0)) == {}
    assert cut(rows_of("ann", 1, 0, 0), rows_of("bob", 1, 0, 0), rows_of("cat", 90, 0, 0), theta=THETA[:0]) == {}


def test_where_others_move_a_fragment_without_embeddings_nothing_is_cut() -> None:
    plain = fragment_of(3, 2)
    offers = rows_of("ann", 0, 0.002, 0), rows_of("bob", 0, 0.002, 0), rows_of("cat", 90, 0, 0)
    assert cut(*offers, fragment=plain) == {}
    # nearly at rest beside Theta, whose norm is 15: an expert that only cat's tokens reach
    offers = rows_of("ann", 0, 0.0014, 0), rows_of("bob", 0, 0.0014, 0), rows_of("cat", 90, 0, 0)
    assert cut(*offers, fragment=plain) == {2: [0.5556, 1.0, 1.0]}


def test_a_fragment_that_begins_as_zeros_can_be_trained_by_one_learner() -> None:
    rest = rows_of("ann", 0, 0, 0), rows_of("bob", 0, 0, 0)
    assert cut(*rest, rows_of("cat", 1, 0, 0), theta=np.zeros(6, np.float32)) == {2: [round(0.5 * 2**0.5, 4), 1.0, 1.0]}


@pytest.mark.parametrize("bits", [2, 4, 8, 32])
@pytest.mark.parametrize("factor", [-6.0, -15.0, -60.0])
def test_a_learner_that_lies_cannot_turn_an_embedding_round(factor: float, bits: Bits) -> None:
    """Of four learners one sends its displacement times a negative number: the others' direction wins."""
    draw = np.random.default_rng(5)
    fragment, truth = fragment_of(64, 32, embedding=True), draw.normal(size=64 * 32)
    theta = draw.normal(size=truth.size).astype(np.float32)
    names = ("ann", "bob", "cat", "dan")
    moved = {name: (truth + 0.1 * draw.normal(size=truth.size)).astype(np.float32) for name in names}
    moved["dan"] *= np.float32(factor)
    offers = [held(name, moved[name], tokens=10, bits=bits) for name in names]
    merged = merging.merged(fragment, settings(), offers, {}, theta)
    along = float(merged @ truth / (truth @ truth))
    assert 0.4 < along < 0.6  # (1 + 1 + 1 - 1) / 4: it weighs as one learner


def test_rows_that_one_learner_alone_trains_go_on_being_trained() -> None:
    """Rows of three learners' words, and rows of the fourth's alphabet."""
    draw = np.random.default_rng(6)
    fragment, theta = fragment_of(64, 32, embedding=True), draw.normal(size=(64, 32)).astype(np.float32)
    common, alone = np.zeros((64, 32), np.float32), np.zeros((64, 32), np.float32)
    common[:60], alone[60:] = 0.001 * draw.normal(size=(60, 32)), 0.5 * draw.normal(size=(4, 32))
    offers = [held(name, common.reshape(-1), tokens=10) for name in ("ann", "bob", "cat")]
    offers.append(held("dan", (common + alone).reshape(-1), tokens=10))
    merged = merging.merged(fragment, settings(), offers, {}, theta.reshape(-1)).reshape(64, 32)
    np.testing.assert_allclose(merged[:60], common[:60], rtol=1e-5)
    np.testing.assert_allclose(merged[60:], alone[60:] / 4, rtol=1e-5)


def test_what_no_sound_learner_makes_is_left_out() -> None:
    calm = rows_of("ann", 1, 0, 0), rows_of("bob", 1, 0, 0)
    # Theta has the norm 15
    assert cut(*calm, rows_of("cat", 15_000, 0, 0)) == {2: [0.0001, 1.0, 1.0]}
    assert cut(*calm, rows_of("cat", 15_010, 0, 0)) == {}
