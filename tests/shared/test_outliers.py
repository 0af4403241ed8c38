"""Outliers by norm: the rule by hand, and that it leaves a healthy run alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.made.held_offers import held
from tests.made.rounds import log_of, offer
from tests.made.run_settings import MERGES, settings_of

from diloco.core.syncer.outliers import JudgedOffer, Norms, counting, is_cut, warmed_up
from diloco.core.tensors import quantise
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.settings.run import QuarantineSettings

LIVE = ("ann", "bob", "cat", "dan")


def judge(
    norms: Norms,
    number: int,
    *offers: tuple[str, int, float],
    factor: float = 10.0,
    in_a_row: int = 1,
    live: tuple[str, ...] = LIVE,
    **changes: Any,
) -> list[JudgedOffer]:
    """Return the outliers among offers number ``number``: learner, steps and norm of each."""
    given = [(offer(learner, number=number, steps=steps), norm) for learner, steps, norm in offers]
    judged = norms.judge(given, live, QuarantineSettings(factor=factor, offers=in_a_row), **changes)
    return [each for each in judged if each.is_outlier]


def outlier(norm: float, threshold: float, *, counts: bool = True) -> JudgedOffer:
    return JudgedOffer("dan", 1, norm, threshold, counts)


def test_the_rule_by_hand() -> None:
    # the others' median (the higher of two) is 3, so dan may have 30
    round_ = (("ann", 6, 2.0), ("bob", 6, 3.0), ("cat", 6, 1.0))
    assert judge(Norms(), 1, *round_, ("dan", 6, 20.0)) == []
    assert judge(Norms(), 1, *round_, ("dan", 6, 20.1), factor=10.0) == [outlier(20.1, 20.0)]


def test_more_steps_give_more_room_and_fewer_no_less() -> None:
    round_ = (("ann", 6, 1.0), ("bob", 6, 1.0))
    assert judge(Norms(), 1, *round_, ("dan", 24, 40.0)) == []  # four times the steps: four times the room
    assert judge(Norms(), 1, *round_, ("dan", 24, 40.1)) == [outlier(40.1, 40.0)]
    assert judge(Norms(), 1, *round_, ("dan", 1, 10.0)) == []
    assert judge(Norms(), 1, *round_, ("dan", 1, 10.1)) == [outlier(10.1, 10.0)]


def test_two_others_that_live_are_needed() -> None:
    assert judge(Norms(), 1, ("ann", 6, 1.0), ("dan", 6, 1e6)) == []
    assert judge(Norms(), 1, ("ann", 6, 1.0), ("bob", 6, 1.0), ("dan", 6, 1e6), live=("ann", "dan")) == []
    norms = Norms()  # in rounds of one answer each, too
    assert judge(norms, 1, ("ann", 6, 1.0)) == []
    assert judge(norms, 1, ("bob", 6, 1.0)) == []
    assert judge(norms, 1, ("dan", 6, 11.0)) == [outlier(11.0, 10.0)]


def test_others_that_do_not_move_at_all_are_no_measure() -> None:
    assert judge(Norms(), 1, ("ann", 6, 0.0), ("bob", 6, 0.0), ("dan", 6, 1.0)) == []


def test_so_many_in_a_row_of_one_learner_count() -> None:
    norms = Norms()
    calm = (("ann", 6, 1.0), ("bob", 6, 1.0))
    first = [outlier(11.0, 10.0, counts=False)]
    assert judge(norms, 1, *calm, ("dan", 6, 11.0), in_a_row=2) == first
    assert judge(norms, 1, *calm, ("dan", 6, 11.0), in_a_row=2) == first  # the same offer again, in a merge made again
    assert judge(norms, 2, *calm, ("dan", 6, 1.0), in_a_row=2) == []
    assert judge(norms, 3, *calm, ("dan", 6, 11.0), in_a_row=2) == first
    assert judge(norms, 4, *calm, ("dan", 6, 11.0), in_a_row=2) == [outlier(11.0, 10.0)]
    assert judge(norms, 4, *calm, ("dan", 6, 11.0), in_a_row=2) == [outlier(11.0, 10.0)]


def test_an_offer_that_too_few_others_were_beside_at_first_is_judged_once_there_are_enough() -> None:
    norms = Norms()
    assert judge(norms, 1, ("ann", 6, 1.0), ("dan", 6, 11.0)) == []
    assert judge(norms, 1, ("bob", 6, 1.0), ("dan", 6, 11.0)) == [outlier(11.0, 10.0)]  # the same offer, in the next merge


def test_an_outlier_of_a_sound_learner_does_not_count() -> None:
    round_ = (("ann", 6, 1.0), ("bob", 6, 1.0), ("dan", 6, 100.0))
    assert judge(Norms(), 1, *round_, is_cut=True) == [outlier(100.0, 10.0, counts=False)]
    assert judge(Norms(), 1, *round_, still_norm=lambda: 1.0) == [outlier(100.0, 10.0, counts=False)]  # the others nearly rest
    assert judge(Norms(), 1, *round_, still_norm=lambda: 0.9) == [outlier(100.0, 10.0)]


def test_fragments_with_an_embedding_and_of_state_do_not_count() -> None:
    specs = [TensorSpec("embed", (4, 2), embedding=True), TensorSpec("weight", (4, 2)), TensorSpec("mean", (4,), state=True)]
    apart, together = build_map(specs, 3).fragments, build_map(specs[:2], 1).fragments
    assert sorted(is_cut(fragment) for fragment in apart) == [False, False, True]
    assert counting(apart) == 1
    assert is_cut(together[0])
    assert counting(together) == 0


def test_while_the_learning_rate_rises_earlier_offers_count_more() -> None:
    norms = Norms()
    assert judge(norms, 1, ("ann", 6, 1.0), ("bob", 6, 1.0), ("dan", 6, 1.0), warmed_up=0.1) == []
    # dan is ahead of the others: the rate has risen fourfold since they offered, so it may have 10 * 4
    assert judge(norms, 2, ("dan", 6, 40.0), warmed_up=0.4) == []
    assert judge(norms, 3, ("dan", 6, 40.1), warmed_up=0.4) == [outlier(40.1, 40.0)]
    # beside others of now there is no such room
    assert judge(norms, 4, ("ann", 6, 2.0), ("bob", 6, 2.0), ("dan", 6, 40.1), warmed_up=0.4) == [outlier(40.1, 40.0)]
    settings = settings_of(MERGES, tokens=1000, **{"inner.warmup_fraction": 0.1})
    chain, offers = log_of(30, lost=10), [held("ann", np.zeros(2, np.float32), tokens=20)]
    assert warmed_up(settings, chain, offers) == 0.6  # 60 tokens of 100
    assert warmed_up(settings, log_of(500), offers) == 1
    assert warmed_up(settings_of(MERGES, **{"inner.warmup_fraction": 0.0}), chain, []) == 1


def test_when_all_norms_rise_together_nobody_stands_out() -> None:
    norms = Norms()
    for number in range(1, 20):  # as while the learning rate rises from 0
        assert judge(norms, number, *((name, 6, 4.0**number) for name in LIVE), factor=2.0) == []


OFFERS = st.lists(st.tuples(st.sampled_from(LIVE), st.integers(1, 500), st.floats(1.0, 3.0)), max_size=4)


@given(st.lists(OFFERS), st.floats(0.5, 1.0))
def test_learners_that_move_alike_a_step_are_never_outliers(rounds: list[list[tuple[str, int, float]]], power: float) -> None:
    """Each moves by 1 to 3 a step; straight on (1), to and fro (a half), or between; with whatever it carried over."""
    norms = Norms()
    for number, offers in enumerate(rounds, 1):
        by_name = {name: (name, steps, rate * steps**power) for name, steps, rate in offers}
        assert judge(norms, number, *by_name.values(), factor=3.0 * 1.0001) == []


def test_the_norm_of_a_body() -> None:
    values = np.array([3.0, -4.0, 0.0], np.float32)
    assert quantise.norm_of(quantise.quantise(values, 32), 3, 32) == 5.0
    assert math.isclose(quantise.norm_of(quantise.quantise(values, 4), 3, 4), 5.0, rel_tol=0.1)
    many = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    for bits in (1, 2, 4, 8, 16, 32):
        body = quantise.quantise(many, bits)
        assert math.isclose(
            quantise.norm_of(body, 1000, bits), np.linalg.norm(quantise.dequantise(body, 1000, bits)), rel_tol=1e-6
        )
