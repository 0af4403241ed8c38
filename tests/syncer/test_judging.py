"""A fragment's judge: which offers are left out of a merge, which are cut, and which count."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.made.held_offers import fragment_of, held, replica_of
from tests.made.run_settings import MERGES, settings_of

from diloco.core.syncer.outliers import JudgedOffer
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors.fragments import Fragment, TensorSpec, build_map
from diloco.errors import UnmergeableError
from diloco.process.observe import get_logger
from diloco_syncer.context import Context
from diloco_syncer.offers.judging import UNKNOWN_THETA, OfferJudge

LIVE = ("ann", "bob", "cat")
THETA = np.ones(64, np.float32)
PLAIN, EMBEDDING = fragment_of(8, 8), fragment_of(8, 8, embedding=True)
[STATE] = [
    fragment
    for fragment in build_map([TensorSpec("w", (64,)), TensorSpec("state/mean", (64,), state=True)], 2).fragments
    if fragment.state
]


def judge_of(fragment: Fragment, own_norm: float = 8.0, **changes: Any) -> OfferJudge:
    run = SimpleNamespace(in_force=settings_of(MERGES, **changes))
    return OfferJudge(cast(Context, SimpleNamespace(run=run, log=get_logger())), fragment, lambda: own_norm)


def offers(*factors: float) -> list[RoundOffer]:
    """Offers of ann, bob, ..., whose values are all so large."""
    return [held(name, np.full(64, factor, np.float32), tokens=10) for name, factor in zip(LIVE, factors, strict=False)]


async def judged(
    judge: OfferJudge, held: list[RoundOffer], on_trial: tuple[RoundOffer, ...] = (), theta: Any = THETA
) -> tuple[list[JudgedOffer], UnmergeableError | None]:
    found = await judge.judge(replica_of(THETA).chain, held, on_trial, LIVE)
    return [each for each in found if each.is_outlier], await judge.left_out(5, held, found, theta)


async def test_an_outlier_is_left_out_and_counts() -> None:
    [cat], left_out = await judged(judge_of(PLAIN), offers(1.0, 1.0, 10.0))
    assert cat == JudgedOffer("cat", 7, 80.0, 40.0, counts=True)  # of norm 8 * 10; five times 8
    assert left_out is not None
    assert (left_out.event, left_out.learners) == ("offer_outlier", ("cat",))
    assert str(left_out) == "fragment 0, version 5: outliers by norm are left out: cat 80 (above 40)"
    assert await judged(judge_of(PLAIN), offers(1.0, 1.0, 5.0)) == ([], None)


async def test_where_rows_may_be_one_learners_it_is_cut_and_does_not_count() -> None:
    [cat], left_out = await judged(judge_of(EMBEDDING), offers(1.0, 1.0, 10.0))
    assert (cat.counts, left_out) == (False, None)
    [cat], left_out = await judged(judge_of(PLAIN), offers(1e-5, 1e-5, 10.0))  # the others nearly rest
    assert (cat.counts, left_out) == (False, None)


@pytest.mark.parametrize("many", [1, 2])
async def test_what_cannot_be_cut_is_left_out(many: int) -> None:
    judge = judge_of(EMBEDDING)
    await judged(judge, offers(1.0, 1.0))  # their norms are known
    [cat], left_out = await judged(judge, offers(1.0, 1.0, 10.0)[-many:])  # of a merge with too few others
    assert not cat.counts
    assert left_out is not None
    assert left_out.learners == ("cat",)
    [_], left_out = await judged(judge_of(EMBEDDING), offers(1.0, 1.0, 10.0), theta=UNKNOWN_THETA)
    assert left_out is not None
    [_], left_out = await judged(judge_of(EMBEDDING), offers(1.0, 1.0, 3e30))
    assert left_out is not None


async def test_of_a_region_that_does_not_know_theta_no_outlier_counts() -> None:
    [cat], left_out = await judged(judge_of(PLAIN, own_norm=math.inf), offers(1.0, 1.0, 10.0), theta=UNKNOWN_THETA)
    assert not cat.counts
    assert left_out is not None


async def test_offers_of_a_quarantined_learner_are_judged_and_not_left_out() -> None:
    *merged, cat = offers(1.0, 1.0, 10.0)
    found, left_out = await judged(judge_of(PLAIN), merged, (cat,))
    assert ([each.learner for each in found], left_out) == (["cat"], None)


async def test_state_is_not_judged_nor_anything_where_the_rule_is_off() -> None:
    assert await judged(judge_of(STATE), offers(1.0, 1.0, 10.0)) == ([], None)
    assert await judged(judge_of(PLAIN, quarantine__factor=0.0), offers(1.0, 1.0, 10.0)) == ([], None)
