"""The bounds of a learner's claims by hand, and that an owner and its successor judge alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.made.learner_claims import BATCH, BUILT_IN_BOUNDS, ann, chain_with, impossible
from tests.made.rounds import offer
from tests.made.run_settings import CLAIMS, settings_of

from diloco.core.log.chain import Chain
from diloco.core.syncer import claims
from diloco.core.syncer.claims import StepBounds
from diloco.core.tensors.built_in import tensor_shapes
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import ClaimError
from diloco.wire.body import Body
from diloco.wire.entries import Cursor, Keyframe
from diloco.wire.grants import Grant
from diloco.wire.offers import Answer


def test_an_island_of_eight_batches_is_honest_and_one_token_more_is_not() -> None:
    # the built-in task has 2,048 tokens a batch, so 24 steps of an island eight times as large have 393,216
    settings = settings_of(CLAIMS)
    assert impossible(settings) == ""
    assert impossible(settings, tokens=393_216) == ""
    assert "tokens in its steps: 393217, at most 393216" in impossible(settings, tokens=393_217)
    assert "tokens in its steps: 20000000, at most 16384" in impossible(settings, steps=1, tokens=20_000_000, data=[])
    assert impossible(settings, steps=24, tokens=24, data=[]) == ""  # and however small
    assert "steps, at one token or more per step: 25, at most 24" in impossible(settings, steps=25, tokens=24, data=[])


def test_batches_are_counted_from_where_their_share_begins() -> None:
    before = {"run": "old", "identity": "00" * 8, "tokens": 9, "batches": [10**6, 0]}
    settings, none = settings_of(CLAIMS, continues=before), settings_of(CLAIMS)
    # 2,016,384 tokens of batches of 256 at least: 7,876 of them behind the first one
    assert impossible(settings, data=[(0, 10**6 + 7852, 24)]) == ""
    assert "the end of its batches: 1007877, at most 1007876" in impossible(settings, data=[(0, 10**6 + 7853, 24)])
    assert "the end of its batches: 7877, at most 7876" in impossible(none, data=[(0, 7853, 24)])
    assert "the end of its batches: 7877, at most 7876" in impossible(settings, data=[(0, 10**6, 12), (1, 7865, 12)])
    assert impossible(settings, data=[(0, 10**6, 24)], elapsed_s=0.0) == ""


def test_of_a_task_of_ones_own_the_settings_say_nothing() -> None:
    settings, own = settings_of(CLAIMS, tokens=10**9), StepBounds()
    assert impossible(settings, bounds=own, steps=1, tokens=2**27, data=[]) == ""
    assert "at most 134217728" in impossible(settings, bounds=own, steps=1, tokens=2**27 + 1, data=[])


def test_the_settings_batch_binds_the_built_in_model_and_no_other() -> None:
    settings = settings_of(CLAIMS)
    built_in = [TensorSpec(path, shape) for path, shape in tensor_shapes(settings.task).items()]
    assert claims.step_bounds(settings, build_map(built_in, 2)) == BUILT_IN_BOUNDS
    assert claims.step_bounds(settings_of(CLAIMS, **{"task.name": "mine:task"}), build_map(built_in, 2)) == StepBounds()
    others = (
        built_in[1:],
        [*built_in, TensorSpec("adapter", (3,))],
        [TensorSpec(each.path, (*each.shape[:-1], 1 + each.shape[-1])) for each in built_in],
    )
    for tensors in others:
        assert claims.step_bounds(settings, build_map(tensors, 2)) == StepBounds()


def test_a_loop_of_sixteen_tokens_a_step_is_honest() -> None:
    """Its 313 steps to the end of a budget of 5,000 tokens are more than batches of an eighth of the built-in task's."""
    settings = settings_of(CLAIMS, tokens=5000)
    assert impossible(settings, bounds=StepBounds(), steps=24, tokens=24 * 16, data=[(0, 289, 24)]) == ""
    assert "the end of its batches: 313, at most 103" in impossible(settings, steps=24, tokens=24 * 16, data=[(0, 289, 24)])


def test_a_learner_processes_the_budget_twice_and_a_step_at_most() -> None:
    # 2,000,000 and a step's 16,384; 600,000 are merged, and 49,152 held
    settings, chain = settings_of(CLAIMS), chain_with(ann(600_000, 1000))
    assert impossible(settings, chain, lost_tokens=1_367_232) == ""
    assert "tokens merged, lost and held: 2016385, at most 2016384" in impossible(settings, chain, lost_tokens=1_367_233)
    assert "at most 2016384" in impossible(settings, chain, lost_tokens=2**62)
    assert "at most 2016384" in impossible(settings, None, lost_tokens=2**62)  # a region that does not know the log yet


def test_lost_tokens_too_fit_into_the_time_since_genesis() -> None:
    """40 s, and 60 s by which clocks may differ, have 2,000 steps of 50 ms, of 4,096 tokens each: 8,192,000 tokens."""
    settings, chain = settings_of(CLAIMS, tokens=10**9), chain_with(ann(600_000, 1000))
    granted: dict[str, Any] = {"grant": Grant("run", "ann", "U" + "A" * 55, 4096, 0.05), "elapsed_s": 40.0}
    held: dict[str, Any] = {"steps": 24, "tokens": 24 * BATCH}  # 49,152
    assert impossible(settings, chain, lost_tokens=7_542_848, **held, **granted) == ""
    reason = impossible(settings, chain, lost_tokens=7_542_849, **held, **granted)
    assert "tokens since genesis, merged and lost ones included: 8192001, at most 8192000" in reason


def test_totals_of_all_learners_fit_into_their_field() -> None:
    settings = settings_of(CLAIMS, tokens=10**18)
    others = [Cursor(f"bob-{i}", 1, 1, 1, 10**18, 10**18, 1) for i in range(2)]
    assert impossible(settings, chain_with(*others), bounds=StepBounds()) == ""
    reason = impossible(settings, chain_with(*others), bounds=StepBounds(), lost_tokens=4 * 10**17)
    assert "tokens of all learners: 2400000000000000000, at most 2305843009213693952" in reason


def test_batches_are_no_more_than_steps_and_end_where_a_run_of_small_batches_does() -> None:
    # 2,016,384 tokens in batches of 256, an eighth of the task's, are 7,876 batches
    settings = settings_of(CLAIMS)
    assert impossible(settings, data=[(0, 7875, 1)]) == ""
    assert "the end of its batches: 7877, at most 7876" in impossible(settings, data=[(0, 7876, 1)])
    for data in ([(0, 10**9, 1)], [(2, 0, 1), (3, 2**62, 2**62)]):
        assert "is impossible" in impossible(settings, data=data)
    assert impossible(settings, data=[(0, 0, 24)]) == ""
    assert "batches in its steps: 25, at most 24" in impossible(settings, data=[(0, 0, 25)])


def test_shares_are_those_that_learners_can_have() -> None:
    # three of the run, and one for each learner that a record has room for
    settings = settings_of(CLAIMS)
    assert impossible(settings, data=[(4098, 0, 1)]) == ""
    assert "a share of the data: 4099, at most 4098" in impossible(settings, data=[(4099, 0, 1)])


COUNTS = st.integers(0, 2**62)
SMALL = st.integers(0, 4_000_000)


@given(st.one_of(SMALL, COUNTS), st.one_of(SMALL, COUNTS), st.one_of(SMALL, COUNTS), SMALL, SMALL, st.lists(COUNTS, max_size=2))
def test_a_successor_judges_by_the_log_as_the_owner_before_it(
    steps: int, tokens: int, lost: int, merged: int, merged_lost: int, batches: list[int]
) -> None:
    """The owner has folded the log; the successor has a keyframe; the claim came alone, or with others of its region."""
    settings, owner = settings_of(CLAIMS), chain_with(ann(merged, merged_lost), Cursor("bob", 1, 1, 1, 500, 5, 5))
    keyframe = Keyframe(
        0, owner.version, owner.epoch, owner.head, 9, owner.tokens_merged, owner.tokens_lost, owner.keyframe_cursors(),
        owner.keyframe_ends(), owner.state_hash, False, Body(0, bytes(32), 0, bytes(8)),
    )  # fmt: skip
    data = [(share, first, 1) for share, first in enumerate(batches)]
    claim = offer("ann", 2, steps=steps, tokens=tokens, lost_tokens=lost, data=data)
    verdicts = set()
    for chain in (owner, Chain.from_keyframe(keyframe)):
        for stated in (claim, Answer.of(claim)):
            try:
                claims.judge(stated, chain, settings, BUILT_IN_BOUNDS)
                verdicts.add("")
            except ClaimError as error:
                verdicts.add(str(error))
    assert len(verdicts) == 1


@given(st.integers(1, 10**18), st.lists(st.tuples(COUNTS, COUNTS), max_size=12))
def test_no_claims_that_can_be_make_totals_that_a_record_cannot_hold(budget: int, stated: list[tuple[int, int]]) -> None:
    settings, chain = settings_of(CLAIMS, tokens=budget), chain_with()
    for number, (tokens, lost) in enumerate(stated):
        claim = offer(f"learner-{number}", steps=tokens, tokens=tokens, lost_tokens=lost, data=[])
        try:
            claims.judge(claim, chain, settings, StepBounds())
        except ClaimError:
            continue
        chain.cursors[claim.learner] = Cursor(claim.learner, 1, 1, 1, tokens, lost, tokens)
        chain.tokens_merged, chain.tokens_lost = chain.tokens_merged + tokens, chain.tokens_lost + lost
    assert max(chain.tokens_merged, chain.tokens_lost) <= 2**62


def test_an_unknown_learner_has_merged_nothing() -> None:
    with pytest.raises(ClaimError, match="offer 1 of eve is impossible"):
        claims.judge(offer("eve", tokens=10**7, steps=4), chain_with(ann(1, 1)), settings_of(CLAIMS), BUILT_IN_BOUNDS)
