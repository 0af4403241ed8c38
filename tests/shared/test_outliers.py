"""Outliers by norm: the rule by hand, and that it leaves a healthy run alone."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.made.rounds import offer

from diloco.core.syncer.excess import norm_of
from diloco.core.syncer.outliers import Norms, Outlier
from diloco.core.tensors import quantise
from diloco.settings.run import QuarantineSettings

LIVE = ("ann", "bob", "cat", "dan")


def judge(
    norms: Norms,
    number: int,
    *offers: tuple[str, int, float],
    factor: float = 10.0,
    in_a_row: int = 1,
    live: tuple[str, ...] = LIVE,
) -> list[Outlier]:
    """Offers number ``number``: learner, steps and norm of each."""
    given = [(offer(learner, number=number, steps=steps), norm) for learner, steps, norm in offers]
    return norms.judge(given, live, QuarantineSettings(factor=factor, offers=in_a_row))


def test_the_rule_by_hand() -> None:
    # the others' median (the higher of two) is 3, so dan may have 30
    round_ = (("ann", 6, 2.0), ("bob", 6, 3.0), ("cat", 6, 1.0))
    assert judge(Norms(), 1, *round_, ("dan", 6, 20.0)) == []
    assert judge(Norms(), 1, *round_, ("dan", 6, 20.1), factor=10.0) == [Outlier("dan", 20.1, 20.0)]


def test_more_steps_give_more_room_and_fewer_no_less() -> None:
    round_ = (("ann", 6, 1.0), ("bob", 6, 1.0))
    assert judge(Norms(), 1, *round_, ("dan", 24, 40.0)) == []  # four times the steps: four times the room
    assert judge(Norms(), 1, *round_, ("dan", 24, 40.1)) == [Outlier("dan", 40.1, 40.0)]
    assert judge(Norms(), 1, *round_, ("dan", 1, 10.0)) == []
    assert judge(Norms(), 1, *round_, ("dan", 1, 10.1)) == [Outlier("dan", 10.1, 10.0)]


def test_two_others_that_live_are_needed() -> None:
    assert judge(Norms(), 1, ("ann", 6, 1.0), ("dan", 6, 1e6)) == []
    assert judge(Norms(), 1, ("ann", 6, 1.0), ("bob", 6, 1.0), ("dan", 6, 1e6), live=("ann", "dan")) == []
    norms = Norms()  # in rounds of one answer each, too
    assert judge(norms, 1, ("ann", 6, 1.0)) == []
    assert judge(norms, 1, ("bob", 6, 1.0)) == []
    assert judge(norms, 1, ("dan", 6, 11.0)) == [Outlier("dan", 11.0, 10.0)]


def test_others_that_do_not_move_at_all_are_no_measure() -> None:
    assert judge(Norms(), 1, ("ann", 6, 0.0), ("bob", 6, 0.0), ("dan", 6, 1.0)) == []


def test_so_many_in_a_row_of_one_learner() -> None:
    norms = Norms()
    calm = (("ann", 6, 1.0), ("bob", 6, 1.0))
    assert judge(norms, 1, *calm, ("dan", 6, 11.0), in_a_row=2) == []
    assert judge(norms, 1, *calm, ("dan", 6, 11.0), in_a_row=2) == []  # the same offer again, in a merge that is made again
    assert judge(norms, 2, *calm, ("dan", 6, 1.0), in_a_row=2) == []
    assert judge(norms, 3, *calm, ("dan", 6, 11.0), in_a_row=2) == []
    assert judge(norms, 4, *calm, ("dan", 6, 11.0), in_a_row=2) == [Outlier("dan", 11.0, 10.0)]


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
    assert norm_of(quantise.quantise(values, 32), 3, 32) == 5.0
    assert math.isclose(norm_of(quantise.quantise(values, 4), 3, 4), 5.0, rel_tol=0.1)
