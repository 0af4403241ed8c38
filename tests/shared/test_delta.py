"""A learner's pending delta: the table of what stays, row by row with numbers; no token is counted twice or forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.made.fragment_vectors import vector
from tests.made.learner_delta import Delta, written
from tests.made.log_entries import hash_of, record_of
from tests.made.quantised_reference import any_vectors, quantised_reference

from diloco.core.learner.delta import ERROR_BITS, PLAIN_BITS, PendingDelta, VersionWrite
from diloco.core.log.chain import Chain
from diloco.core.tensors import quantise, ranges
from diloco.errors import NonFiniteError
from diloco.wire.entries import Cursor, Record, RolledBack
from diloco.wire.fields import Bits, Range
from diloco.wire.offers import MergeMember

Vector = NDArray[np.float32]
Wide = NDArray[np.float64]


def version_record(version: int, *members: MergeMember) -> Record:
    return record_of(version, *members, bits=32, state_hash=hash_of(version))


def rollback_record(version: int, to_version: int) -> Record:
    back = RolledBack(1, to_version, version)
    return msgspec.structs.replace(version_record(version), entry="rollback", rolled_back=back)


def member_of(offer: PendingDelta) -> MergeMember:
    return MergeMember.of(offer.stated, 1.0)


@dataclass
class Learner:
    """A learner's value of one fragment beside its delta, and what an outsider counts."""

    delta: Delta
    value: Vector
    processed: int = 0
    merged: int = 0
    tokens_of: list[int] = field(default_factory=list)  # by batch trained, all of share 3
    merged_data: list[Range] = field(default_factory=list)
    moved: Vector = field(default_factory=lambda: vector(0, 0))  # sum of all inner steps
    sent: Vector = field(default_factory=lambda: vector(0, 0))  # sum of all merged offers, decoded
    bodies: dict[tuple[int, int], Vector] = field(default_factory=dict)  # of all offers, decoded, by identity

    def step(self, tokens: int, *change: float) -> None:
        self.value = self.value + vector(*change)
        self.moved = self.moved + vector(*change)
        self.delta.state.step(tokens, 3, len(self.tokens_of))
        self.tokens_of.append(tokens)
        self.processed += tokens

    def offer(self, bits: Bits = 32, round_version: int | None = None) -> PendingDelta:
        delta = self.delta
        answered = delta.state.base_version + 1 if round_version is None else round_version
        state = delta.state
        offer = delta.offer(self.value.copy(), state.steps, state.tokens, state.data, answered, bits)
        self.bodies[offer.identity] = quantise.dequantise(delta.body(offer), self.value.size, bits)
        return offer

    def take(self, applied: VersionWrite) -> None:
        self.value = written(applied, self.value)

    def version(self, theta: Vector, offer: PendingDelta | None, *, closing: bool = False) -> None:
        """A version that merges ``offer``, or only another learner's; ``closing``: none follows it."""
        members = [MergeMember("zoe", 1, 1, 1, 0, 1, 5, 0, 1.0, [])]
        if offer is not None:
            members.insert(0, member_of(offer))
            self.merged += offer.stated.tokens
            assert not ranges.common(self.merged_data, offer.stated.data), "merged twice"
            self.merged_data = ranges.normal(self.merged_data + offer.stated.data)
            self.sent = self.sent + self.bodies[offer.identity]
        record = version_record(self.delta.state.base_version + 1, *members)
        self.take(self.delta.apply(msgspec.structs.replace(record, closing=closing), theta))

    def balanced(self) -> bool:
        return self.processed == self.merged + self.delta.state.lost_tokens + self.delta.state.tokens

    def tokens_in(self, data: list[Range]) -> int:
        """Tokens of the batches in some ranges."""
        assert all(share == 3 for share, _, _ in data)
        return sum(sum(self.tokens_of[first : first + count]) for _, first, count in data)


def learner(
    overlap: bool = True, *, feedback: bool = True, error_bits: Bits = ERROR_BITS, keeps_single_step: bool = False
) -> Learner:
    base = vector(100, 200)
    made = Delta("ann", 7, overlap, feedback, base, 0, hash_of(0), error_bits=error_bits, keeps_single_step=keeps_single_step)
    return Learner(made, base.copy())


def chain_at(version: int, cursor: tuple[int, int]) -> Chain:
    chain = Chain(0, version, 0, bytes(32), 9, hash_of(version))
    if cursor != (0, 0):
        chain.cursors["ann"] = Cursor("ann", *cursor, 1, 0, 0, 0)
    return chain


def test_what_an_offer_states() -> None:
    ann = learner()
    ann.step(10, 1, -2)
    ann.step(20, 2, -3)
    offer = ann.offer(round_version=1)
    # the outer gradient is the base minus the value
    assert quantise.dequantise(ann.delta.body(offer), 2, 32).tolist() == [-3, 5]
    assert (offer.stated.incarnation, offer.stated.number, offer.stated.round, offer.stated.after) == (7, 1, 1, (0, 0))
    assert (offer.stated.base_version, offer.stated.base_hash) == (0, hash_of(0))
    assert (offer.stated.steps, offer.stated.tokens, offer.stated.lost_tokens) == (2, 30, 0)
    assert ann.value.tolist() == [103, 195]
    assert ann.offer(round_version=2).stated.number == 2


# A learner of base (100, 200): one step of 10 tokens by (4, 8), an offer, one step of 6 tokens by (2, -6), the version
# (50, 60).
@pytest.mark.parametrize(
    ("overlap", "value", "tokens", "steps", "data", "lost"),
    [(False, [50, 60], 0, 0, [], 6), (True, [52, 54], 6, 1, [(3, 1, 1)], 0)],
)
def test_a_version_that_merges_the_answer_to_its_own_round(
    overlap: bool, value: list[float], tokens: int, steps: int, data: list[Range], lost: int
) -> None:
    ann = learner(overlap)
    ann.step(10, 4, 8)
    offer = ann.offer()
    ann.step(6, 2, -6)
    ann.version(vector(50, 60), offer)
    assert ann.value.tolist() == value
    state = ann.delta.state
    assert (state.tokens, state.steps, state.data, state.lost_tokens) == (tokens, steps, data, lost)
    assert (state.base_version, state.base_hash, state.after) == (1, hash_of(1), (7, 1))
    assert ann.delta.values.base.tolist() == [50, 60]
    assert state.pending == []
    assert ann.balanced()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_version_that_merges_none_of_this_learner_leaves_nothing_of_its_work(overlap: bool) -> None:
    ann = learner(overlap)
    ann.step(10, 4, 8)
    ann.offer()
    ann.step(6, 2, -6)
    ann.version(vector(50, 60), None)
    assert ann.value.tolist() == [50, 60]
    state = ann.delta.state
    assert (state.tokens, state.steps, state.data, state.lost_tokens) == (0, 0, [], 16)
    assert (state.after, state.base_version) == ((0, 0), 1)
    assert ann.balanced()


# A learner of base (100, 200), one step of 10 tokens by (4, 8), and the version (50, 60), which has nothing of it.
@pytest.mark.parametrize(
    ("overlap", "value", "tokens", "steps", "data", "lost"),
    [(False, [50, 60], 0, 0, [], 10), (True, [54, 68], 10, 1, [(3, 0, 1)], 0)],
)
def test_a_single_step_that_could_not_be_offered_yet_is_kept(
    overlap: bool, value: list[float], tokens: int, steps: int, data: list[Range], lost: int
) -> None:
    ann = learner(overlap, keeps_single_step=True)
    ann.step(10, 4, 8)
    ann.version(vector(50, 60), None)
    state = ann.delta.state
    assert ann.value.tolist() == value
    assert (state.tokens, state.steps, state.data, state.lost_tokens, state.base_version) == (tokens, steps, data, lost, 1)
    assert ann.balanced()
    if overlap:
        assert quantise.dequantise(ann.delta.body(ann.offer()), 2, 32).tolist() == [-4, -8]  # against the new base


@pytest.mark.parametrize(("merges", "lost"), [(True, 6), (False, 16)])
def test_nothing_is_kept_beside_a_closing_version(merges: bool, lost: int) -> None:
    """No version follows that could merge it: the value would never be the run's."""
    ann = learner(keeps_single_step=True)
    ann.step(10, 4, 8)
    offer = ann.offer()
    ann.step(6, 2, -6)
    ann.version(vector(50, 60), offer if merges else None, closing=True)
    assert ann.value.tolist() == [50, 60]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens) == (0, lost)
    assert ann.balanced()


def test_a_single_step_is_not_kept_beside_a_closing_version() -> None:
    ann = learner(keeps_single_step=True)
    ann.step(10, 4, 8)
    ann.version(vector(50, 60), None, closing=True)
    assert ann.value.tolist() == [50, 60]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens) == (0, 10)


def test_a_log_that_is_closed_leaves_nothing_of_a_learner_that_comes_back() -> None:
    ann = learner()
    ann.version(vector(50, 60), None)
    ann.step(10, 4, 8)
    chain = chain_at(1, (0, 0))
    chain.closed = True
    ann.take(ann.delta.reload(chain, vector(50, 60)))
    assert ann.value.tolist() == [50, 60]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens) == (0, 10)


def test_a_single_step_is_kept_through_several_versions_and_lost_once_it_is_offered_or_no_longer_single() -> None:
    ann = learner(keeps_single_step=True)
    ann.step(10, 4, 8)
    ann.version(vector(50, 60), None)
    ann.version(vector(10, 20), None)
    assert ann.value.tolist() == [14, 28]
    ann.offer()
    ann.version(vector(30, 40), None)
    assert (ann.value.tolist(), ann.delta.state.lost_tokens) == ([30, 40], 10)
    ann.step(3, 1, 1)
    ann.step(3, 1, 1)
    ann.version(vector(5, 6), None)
    assert (ann.value.tolist(), ann.delta.state.lost_tokens) == ([5, 6], 16)
    assert ann.balanced()


def test_a_single_step_is_kept_where_a_version_merges_an_offer_from_before_its_base() -> None:
    ann = learner(keeps_single_step=True)
    ann.step(10, 4, 8)
    late = ann.offer(8)
    ann.version(vector(50, 60), None)
    ann.step(3, 1, 1)
    ann.version(vector(10, 20), late)
    state = ann.delta.state
    assert (ann.value.tolist(), state.tokens, state.lost_tokens, ann.merged) == ([11, 21], 3, 0, 10)
    assert ann.delta.dump()[1].keys() == {"base"}  # a dropped offer leaves no error
    assert ann.balanced()


# Two steps with an offer between them, then a step of 4 tokens by (1, 1) and a version (10, 20), which merges the offer after
# all. The version before wrote off all 16 tokens: the 10 of the offer come back, and the 4 new ones go, which answered another
# round.
@pytest.mark.parametrize("overlap", [False, True])
def test_a_version_that_merges_an_offer_too_late_for_its_own_round(overlap: bool) -> None:
    ann = learner(overlap)
    ann.step(10, 4, 8)
    offer = ann.offer()
    ann.step(6, 2, -6)
    ann.version(vector(50, 60), None)
    ann.step(4, 1, 1)
    ann.version(vector(10, 20), offer)
    assert ann.value.tolist() == [10, 20]
    assert (ann.delta.state.tokens, ann.delta.state.data, ann.delta.state.lost_tokens) == (0, [], 10)
    assert (ann.merged, ann.delta.state.after) == (10, (7, 1))
    assert ann.balanced()


def test_an_offer_merged_late_leaves_no_error() -> None:
    # what quantisation left over of it went with its displacement, and what was left over before is in the offer
    ann = learner()
    ann.step(10, 127, -0.25)
    ann.version(vector(50, 60), ann.offer(8))
    error = ann.delta.error()
    assert error is not None
    assert error.tolist() == [0, 0.25]
    ann.step(10, 4, 8)
    late = ann.offer(8)
    ann.version(vector(50, 60), None)
    assert ann.delta.dump()[1].keys() == {"base", "error"}  # of a dropped offer nothing is kept
    ann.version(vector(10, 20), late)
    assert ann.delta.dump()[1].keys() == {"base"}
    ann.step(3, 1, 1)
    assert quantise.dequantise(ann.delta.body(ann.offer()), 2, 32).tolist() == [-1, -1]


def test_an_offer_holds_the_work_since_its_base_and_none_that_was_dropped() -> None:
    ann = learner()
    ann.step(10, 4, 8)
    ann.offer()
    ann.version(vector(50, 60), None)
    ann.step(6, 2, -6)
    second = ann.offer()
    assert quantise.dequantise(ann.delta.body(second), 2, 32).tolist() == [-2, 6]
    stated = second.stated
    assert (stated.number, stated.after, stated.steps, stated.tokens, stated.base_version) == (2, (0, 0), 1, 6, 1)
    assert (stated.data, stated.lost_tokens) == ([(3, 1, 1)], 10)
    ann.version(vector(10, 20), second)
    assert ann.value.tolist() == [10, 20]
    assert (ann.delta.state.tokens, ann.merged, ann.delta.state.lost_tokens) == (0, 6, 10)


def test_the_older_offer_may_be_the_one_that_is_merged() -> None:
    ann = learner()
    ann.step(10, 4, 8)
    first = ann.offer()
    ann.version(vector(50, 60), None)
    ann.step(6, 2, -6)
    ann.offer()  # states that nothing was merged: it never will be, once the first is
    ann.version(vector(10, 20), first)
    assert ann.value.tolist() == [10, 20]
    assert (ann.delta.state.tokens, ann.delta.state.steps, ann.delta.state.lost_tokens) == (0, 0, 6)
    assert ann.delta.state.pending == []
    ann.step(5, 1, 1)
    third = ann.offer()
    assert (third.stated.number, third.stated.after, third.stated.tokens) == (3, (7, 1), 5)
    assert ann.balanced()


def test_an_offer_of_a_forgotten_incarnation_was_merged() -> None:
    # what is in the value since belongs to no known base: it cannot be told from what was merged
    ann = learner()
    ann.step(10, 4, 8)
    ann.offer()
    members = [MergeMember("ann", 6, 3, 1, 0, 2, 25, 0, 1.0, [])]
    ann.take(ann.delta.apply(version_record(1, *members), vector(50, 60)))
    assert ann.value.tolist() == [50, 60]
    assert (ann.delta.state.tokens, ann.delta.state.steps, ann.delta.state.lost_tokens) == (0, 0, 10)
    assert ann.delta.state.after == (6, 3)
    assert ann.delta.state.pending == []


def test_what_was_dropped_stays_so_when_the_log_has_lost_entries_and_makes_them_again() -> None:
    # base 2 is made twice, with the same state: an offer on the first one is merged, which is not in the value any more
    ann = learner()
    ann.version(vector(50, 60), None)
    ann.version(vector(70, 80), None)
    ann.step(10, 4, 8)
    offer = ann.offer()
    ann.take(ann.delta.reload(chain_at(1, (0, 0)), vector(50, 60)))
    ann.version(vector(70, 80), None)
    ann.step(6, 2, -6)
    assert offer.stated.base_version == ann.delta.state.base_version
    ann.version(vector(10, 20), offer)
    assert ann.value.tolist() == [10, 20]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens) == (0, 6)
    assert ann.balanced()


@pytest.mark.parametrize("feedback", [True, False])
def test_the_quantisation_error_of_a_merged_offer_goes_into_the_next(feedback: bool) -> None:
    # int8, one block: the scale is 127 / 127 = 1, so -127 and 0.25 are sent as -127 and 0
    ann = learner(feedback=feedback)
    ann.step(10, 127, -0.25)
    offer = ann.offer(8)
    assert quantise.dequantise(ann.delta.body(offer), 2, 8).tolist() == [-127, 0]
    assert "error" not in ann.delta.dump()[1]  # its fate is not known yet
    ann.version(vector(50, 60), offer)
    error = ann.delta.error()
    assert (None if error is None else error.tolist()) == ([0, 0.25] if feedback else None)
    ann.step(10, 0, -1)
    expected = [0, 1.25] if feedback else [0, 1]
    assert quantise.dequantise(ann.delta.body(ann.offer(32)), 2, 32).tolist() == expected
    assert ann.value.tolist() == [50, 59]  # the error lives apart from the parameters


STEP = st.tuples(st.just("step"), st.integers(1, 50), st.integers(-20, 20), st.integers(-20, 20))
OFFER = st.tuples(st.just("offer"))
VERSION = st.tuples(st.just("version"), st.sampled_from(["regular", "late", "none"]), st.integers(-20, 20))
SCHEDULES = st.lists(st.one_of(STEP, OFFER, VERSION), max_size=40)
ROLLBACK = st.tuples(st.just("rollback"))
WITH_ROLLBACKS = st.lists(st.one_of(STEP, OFFER, VERSION, ROLLBACK), max_size=40)


def mergeable(ann: Learner, which: str) -> PendingDelta | None:
    """An offer that the next version may merge: the newest answer to that very round, or the oldest of an earlier one."""
    version = ann.delta.state.base_version + 1
    fit = [
        o
        for o in ann.delta.state.pending
        if o.stated.after == ann.delta.state.after and (o.stated.round == version) is (which == "regular")
    ]
    if which == "none" or not fit:
        return None
    return fit[-1] if which == "regular" else fit[0]


def play(ann: Learner, schedule: list[Any], *bits: Bits) -> None:
    """Play a schedule; ``bits`` are those of the offers, in turn."""
    turns = cycle(bits)
    for kind, *values in schedule:
        if kind == "step":
            ann.step(*values)
        elif kind == "offer":
            ann.offer(next(turns))
        elif kind == "rollback":
            ann.take(ann.delta.apply(rollback_record(ann.delta.state.base_version + 1, 0), vector(3, -3)))
            assert (ann.value.tolist(), ann.delta.state.tokens, ann.delta.state.pending) == ([3, -3], 0, [])
        else:
            which, shift = values
            ann.version(ann.delta.values.base + vector(shift, -shift), mergeable(ann, which))
        assert not ranges.common(ann.delta.state.data, ann.merged_data)
        assert bool(ann.delta.state.data) == bool(ann.delta.state.tokens)
        assert ann.balanced(), (ann.processed, ann.merged, ann.delta.state.lost_tokens, ann.delta.state.tokens)
        assert ann.delta.state.lost_tokens >= 0
        assert ann.delta.state.tokens >= 0
        assert ann.delta.state.steps >= 0


@given(WITH_ROLLBACKS, st.booleans(), st.booleans())
def test_every_batch_and_its_tokens_are_merged_or_lost_or_in_the_books(
    schedule: list[Any], overlap: bool, keeps_single_step: bool
) -> None:
    ann = learner(overlap, keeps_single_step=keeps_single_step)
    for i in range(len(schedule)):
        play(ann, schedule[i : i + 1], 32)
        assert ann.tokens_in(ann.delta.state.data) == ann.delta.state.tokens
        assert ranges.batches(ann.delta.state.data) == ann.delta.state.steps
        assert ann.tokens_in(ann.merged_data) == ann.merged
        for offer in ann.delta.state.pending:
            assert ann.tokens_in(offer.stated.data) == offer.stated.tokens
            assert ranges.batches(offer.stated.data) == offer.stated.steps
    kept = ranges.normal(ann.merged_data + ann.delta.state.data)
    assert sum(ann.tokens_of) - ann.tokens_in(kept) == ann.delta.state.lost_tokens


# versions that merge the answer to their own round, or come before there is work
IN_TIME = st.lists(
    st.one_of(
        STEP,
        st.tuples(st.just("round"), st.lists(STEP, min_size=1, max_size=2), st.lists(STEP, max_size=2), st.integers(-9, 9)),
    ),
    max_size=20,
)


def rounds_in_time(schedule: list[Any]) -> list[Any]:
    """Each round as steps, an offer, steps of the overlap, and the version that merges the offer."""
    events: list[Any] = []
    for event in schedule:
        kind, *values = event
        if kind == "step":
            events.append(event)
        else:
            before, overlap, shift = values
            events += [*before, ("offer",), *overlap, ("version", "regular", shift)]
    return events


@given(IN_TIME, st.booleans())
def test_nothing_is_lost_of_a_learner_that_is_in_time(schedule: list[Any], feedback: bool) -> None:
    ann = learner(feedback=feedback)
    play(ann, rounds_in_time(schedule), 32)
    assert ann.delta.state.lost_tokens == 0
    # exact, since small integers are exact in float32: what was done is what was sent and what is still there
    np.testing.assert_array_equal(ann.moved, -ann.sent + (ann.value - ann.delta.values.base))


@pytest.mark.parametrize(
    ("error_bits", "lost"),
    # a round without steps since its offer loses 1/254 of an error, which is at most 25 here
    [(PLAIN_BITS, 0.0), (ERROR_BITS, 0.1)],
)
@given(schedule=IN_TIME, bits=st.lists(st.sampled_from([1, 2, 4, 8, 16, 32]), min_size=1, max_size=4))
def test_with_error_feedback_quantisation_loses_nothing_either(
    error_bits: Bits, lost: float, schedule: list[Any], bits: list[Bits]
) -> None:
    ann = learner(error_bits=error_bits)
    play(ann, rounds_in_time(schedule), *bits)
    rounds = sum(event[0] == "round" and not event[2] for event in schedule)
    known = ann.delta.error()
    error = vector(0, 0) if known is None else known
    np.testing.assert_allclose(ann.moved, -(ann.sent + error) + (ann.value - ann.delta.values.base), atol=0.02 + lost * rounds)


@given(SCHEDULES, SCHEDULES, st.booleans(), st.booleans())
def test_books_go_on_from_a_checkpoint(before: list[Any], after: list[Any], overlap: bool, keeps_single_step: bool) -> None:
    ann = learner(overlap, keeps_single_step=keeps_single_step)
    play(ann, before, 4)
    plain, arrays = ann.delta.dump()
    plain = msgspec.json.decode(msgspec.json.encode(plain))
    again = learner(overlap, keeps_single_step=keeps_single_step)
    again.delta.load(plain, {name: values.copy() for name, values in arrays.items()})
    again.delta.state.next_number = ann.delta.state.next_number  # a new incarnation would number from 1
    again.value, again.processed, again.merged = ann.value.copy(), ann.processed, ann.merged
    again.tokens_of, again.merged_data, again.bodies = list(ann.tokens_of), list(ann.merged_data), dict(ann.bodies)
    play(ann, after, 4)
    play(again, after, 4)
    np.testing.assert_array_equal(again.value, ann.value)
    assert again.delta.dump()[0] == ann.delta.dump()[0]
    for name, values in ann.delta.dump()[1].items():
        np.testing.assert_array_equal(again.delta.dump()[1][name], values)


def test_a_checkpoint_is_taken_over_by_a_new_incarnation() -> None:
    ann = learner()
    ann.step(10, 4, 8)
    ann.offer()
    plain, arrays = ann.delta.dump()
    again = Delta("ann", 8, True, True, vector(0, 0), 0, hash_of(0))
    again.load(plain, arrays)
    assert again.state.incarnation == 8
    assert [(o.stated.incarnation, o.stated.number) for o in again.state.pending] == [(7, 1)]
    assert again.state.pending[0].stated.tokens == 10


def test_a_checkpoint_of_another_model_is_refused() -> None:
    plain, arrays = learner().delta.dump()
    other = Delta("ann", 8, True, True, np.zeros(3, np.float32), 0, hash_of(0))
    with pytest.raises(ValueError, match="2 parameters, expected 3"):
        other.load(plain, arrays)
    with pytest.raises(KeyError):
        learner().delta.load({name: value for name, value in plain.items() if name != "tokens"}, arrays)


def test_reload_of_the_same_version_changes_nothing() -> None:
    ann = learner()
    ann.step(10, 4, 8)
    ann.offer()
    ann.step(6, 2, -6)
    applied = ann.delta.reload(chain_at(0, (0, 0)), vector(100, 200))
    assert applied.reset  # so that apply.alpha mixes nothing of a newcomer's own initial values in
    ann.take(applied)
    assert ann.value.tolist() == [106, 202]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens, len(ann.delta.state.pending)) == (16, 0, 1)


def test_reload_of_another_version_keeps_nothing_of_a_newcomers_own_values() -> None:
    ann = learner()
    ann.value = vector(3, -4)  # as it was initialised: it has not applied the version that its delta begin with
    ann.take(ann.delta.reload(chain_at(3, (0, 0)), vector(50, 60)))
    assert ann.value.tolist() == [50, 60]


def test_reload_of_another_version_drops_what_the_log_has_not_merged() -> None:
    ann = learner()
    ann.step(10, 4, 8)
    offer = ann.offer()
    ann.step(6, 2, -6)
    ann.take(ann.delta.reload(chain_at(3, (0, 0)), vector(50, 60)))
    assert ann.value.tolist() == [50, 60]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens) == (0, 16)
    assert (ann.delta.state.base_version, ann.delta.state.base_hash) == (3, hash_of(3))
    ann.version(vector(10, 20), offer)  # it may still be merged
    assert ann.delta.state.lost_tokens == 6
    assert ann.balanced()


# the version that answers the offer's round keeps the overlap, however it is read; of a later one nothing is known
@pytest.mark.parametrize(
    ("version", "value", "tokens", "steps", "lost"), [(1, [52, 54], 6, 1, 0), (2, [50, 60], 0, 0, 6), (9, [50, 60], 0, 0, 6)]
)
def test_reload_counts_an_offer_that_was_merged_meanwhile_as_merged(
    version: int, value: list[float], tokens: int, steps: int, lost: int
) -> None:
    ann = learner()
    ann.step(10, 4, 8)
    ann.offer()
    ann.step(6, 2, -6)
    ann.merged = 10
    ann.take(ann.delta.reload(chain_at(version, (7, 1)), vector(50, 60)))
    assert ann.value.tolist() == value
    assert (ann.delta.state.tokens, ann.delta.state.steps, ann.delta.state.lost_tokens) == (tokens, steps, lost)
    assert ann.delta.state.after == (7, 1)
    assert ann.balanced()


def test_reload_drops_what_the_log_may_have_merged_unknown_to_the_books() -> None:
    ann = learner()
    ann.step(10, 4, 8)
    ann.offer()
    ann.take(ann.delta.reload(chain_at(3, (6, 9)), vector(50, 60)))
    assert ann.value.tolist() == [50, 60]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens, ann.delta.state.after) == (0, 10, (6, 9))
    assert ann.delta.state.pending == []
    assert ann.delta.values.error is None


@pytest.mark.parametrize(("cursor", "merged"), [((0, 0), 0), ((7, 1), 10)])
@pytest.mark.parametrize("version", [0, 3])
def test_reload_of_a_invalid_value_keeps_nothing_of_it(version: int, cursor: tuple[int, int], merged: int) -> None:
    ann = learner()
    ann.step(10, 4, 8)
    ann.offer()
    ann.step(6, np.nan, 0)
    ann.merged = merged
    ann.take(ann.delta.reload(chain_at(version, cursor), vector(50, 60), invalid=True))
    assert ann.value.tolist() == [50, 60]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens, ann.delta.state.after) == (0, 16 - merged, cursor)
    assert ann.delta.state.pending == []
    assert ann.balanced()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_never_offered(wrong: float) -> None:
    ann = learner()
    ann.step(10, 4, 8)
    before = ann.delta.dump()[0]
    ann.value[1] = wrong
    with pytest.raises(NonFiniteError):
        ann.offer(4)
    assert ann.delta.dump()[0] == before


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rollback_leaves_nothing_of_what_a_learner_has(overlap: bool) -> None:
    ann = learner(overlap)
    ann.step(10, 4, 8)
    merged = ann.offer(4)  # so coarse that something is left over of it
    ann.version(vector(100, 200), merged)
    assert ann.delta.values.error is not None
    ann.step(6, 2, -6)
    ann.offer()
    ann.step(5, 1, 1)
    applied = ann.delta.apply(rollback_record(2, 0), vector(0, 0))
    ann.take(applied)
    assert applied.reset
    assert ann.value.tolist() == [0, 0]
    assert (ann.delta.state.steps, ann.delta.state.tokens, ann.delta.state.lost_tokens) == (0, 0, 11)
    assert (ann.delta.state.data, ann.delta.state.pending) == ([], [])
    assert ann.delta.dump()[1].keys() == {"base"}  # nothing left over
    assert (ann.delta.state.base_version, ann.delta.state.after) == (2, (7, 1))  # what was merged stays merged
    assert ann.balanced()
    # it goes on from there, with a number that no offer had
    ann.step(8, 1, -1)
    offer = ann.offer()
    assert (offer.stated.number, offer.stated.after, offer.stated.base_version, offer.stated.lost_tokens) == (3, (7, 1), 2, 11)
    assert quantise.dequantise(ann.delta.body(offer), 2, 32).tolist() == [-1, 1]


@pytest.mark.parametrize(("cursor", "lost"), [((0, 0), 16), ((7, 1), 6)])
def test_who_was_away_when_the_log_went_back_keeps_nothing_either(cursor: tuple[int, int], lost: int) -> None:
    ann = learner()
    ann.step(10, 4, 8)
    ann.offer()
    ann.step(6, 2, -6)
    ann.merged = 16 - lost
    chain = chain_at(5, cursor)
    chain.rolled_back = RolledBack(1, 0, 4)
    ann.take(ann.delta.reload(chain, vector(50, 60)))
    assert ann.value.tolist() == [50, 60]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens, ann.delta.state.after) == (0, lost, cursor)
    assert ann.delta.state.pending == []
    assert ann.balanced()


def test_what_was_made_since_a_log_went_back_is_kept_as_ever() -> None:
    ann = learner()
    ann.delta.state.base_version = 4
    ann.step(10, 4, 8)
    ann.offer()
    ann.step(6, 2, -6)
    chain = chain_at(5, (7, 1))
    chain.rolled_back = RolledBack(1, 0, 4)
    ann.merged = 10
    ann.take(ann.delta.reload(chain, vector(50, 60)))
    assert ann.value.tolist() == [52, 54]
    assert (ann.delta.state.tokens, ann.delta.state.lost_tokens) == (6, 0)
    assert ann.balanced()


# ---- quantisation errors, which are kept in 8 bits


def wide(size: int, error_bits: Bits = ERROR_BITS, *, overlap: bool = True, base: Vector | None = None) -> Delta:
    """A delta of ``size`` values, of base 0 unless given."""
    start = np.zeros(size, np.float32) if base is None else base
    return Delta("ann", 7, overlap, True, start, 0, hash_of(0), error_bits=error_bits)


def offered(delta: Delta, snapshot: Vector, bits: Bits) -> PendingDelta:
    """Answer the next round with a snapshot after one step of one token."""
    state = delta.state
    state.step(1, 3, state.base_version)
    return delta.offer(snapshot.copy(), state.steps, state.tokens, state.data, state.base_version + 1, bits)


def merged(delta: Delta, theta: Vector, offer: PendingDelta) -> VersionWrite:
    """The next version, which merges an offer."""
    return delta.apply(version_record(delta.state.base_version + 1, member_of(offer)), theta)


@given(any_vectors(), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_an_error_is_kept_as_the_int8_values_nearest_to_it(values: Vector, bits: Bits) -> None:
    delta = wide(values.size)
    offer = offered(delta, values, bits)
    gradient = np.zeros_like(values) - values
    error = gradient - quantise.dequantise(delta.body(offer), values.size, bits)
    body, decoded = quantised_reference(error, 8)
    merged(delta, np.zeros_like(values), offer)
    np.testing.assert_array_equal(delta.values.error, body)
    np.testing.assert_array_equal(delta.error(), decoded)
    # and it goes into the next offer
    second = offered(delta, values, 32)
    np.testing.assert_array_equal(quantise.dequantise(delta.body(second), values.size, 32), gradient + decoded)


@pytest.mark.parametrize("error_bits", [8, 32])
@pytest.mark.parametrize("size", [1, 64, 1000, (1 << 16) + 100])
def test_slices_of_the_reference_are_those_of_the_whole(size: int, error_bits: Bits) -> None:
    rng = np.random.default_rng(size)
    base, first, second = (rng.normal(0, 1, size).astype(np.float32) for _ in range(3))
    delta = wide(size, error_bits, base=base)
    before = offered(delta, base + first, 4)
    merged(delta, base, before)
    error = delta.error()
    assert error is not None
    offer = offered(delta, base + second, 4)
    rest = quantise.dequantise(delta.values.held[offer.identity].rest, size, error_bits)
    sent = quantise.dequantise(delta.body(offer), size, 4)
    delta.state.step(1, 3, 9)  # progress since, without which there is nothing to keep
    applied = merged(delta, base, offer)
    assert applied.reference is not None
    whole = applied.reference[:]
    np.testing.assert_array_equal(whole, base + (error - (sent + rest)))
    np.testing.assert_allclose(whole, base + second, atol=5e-3)  # the value that was offered, but for the error's own error
    for _ in range(20):
        start, stop = sorted(rng.integers(0, size + 1, 2).tolist())
        np.testing.assert_array_equal(applied.reference[start:stop], whole[start:stop])


def test_a_learner_keeps_little_more_than_its_base_and_what_it_offered() -> None:
    size = 1 << 16
    delta, values = wide(size), np.random.default_rng(0).normal(0, 1, size).astype(np.float32)
    merged(delta, np.zeros_like(values), offered(delta, values, 4))
    offered(delta, values, 4)
    sizes = {name: array.nbytes / size for name, array in delta.dump()[1].items()}
    assert sizes == {"base": 4, "error": 1.0625, "offer/0/body": 0.53125, "offer/0/rest": 1.0625}


def travel(delta: Delta, moves: Callable[[int], Vector], rounds: int) -> tuple[Wide, Wide]:
    """Rounds of int4 of one learner, whose versions are its offers; return what was done and offered, and what arrived.

    A learner that keeps the overlap moves once before an offer and once before the version, another one before the offer alone.
    Of what was done the progress since the last offer is left out.
    """
    base = delta.values.base
    value, done, arrived = base.copy(), np.zeros(base.size), np.zeros(base.size)
    for version in range(1, rounds + 1):
        for when in range(1 + delta.state.overlap):
            if when == 0:
                move = moves(2 * version)
                value, done = value + move, done + move
                offer = offered(delta, value, 4)
            else:
                delta.state.step(1, 3, 1000 + version)
                move = moves(2 * version + 1)
                value, done = value + move, done + move
        sent = quantise.dequantise(delta.body(offer), base.size, 4)
        arrived -= sent
        value = written(merged(delta, delta.values.base - sent, offer), value)
    return done - (value - delta.values.base), arrived


@pytest.mark.parametrize("overlap", [True, False])
def test_what_arrives_over_many_rounds_has_no_bias(overlap: bool) -> None:
    """Noise with a trend of a third of its deviation, each value with a size of its own, and none of it exact in float32."""
    size, rounds = 4096, 150
    rng = np.random.default_rng(5)
    sizes = (10.0 ** rng.uniform(-2, 0, size)).astype(np.float32)
    moves = [sizes * rng.normal(1 / 3, 1, size).astype(np.float32) for _ in range(2 * rounds + 2)]
    off = {}
    for bits in (ERROR_BITS, PLAIN_BITS):
        done, arrived = travel(wide(size, bits, overlap=overlap), moves.__getitem__, rounds)
        off[bits] = (arrived - done) / sizes
        assert np.sum(off[bits] * done / sizes) / np.sum((done / sizes) ** 2) == pytest.approx(0, abs=3e-3)
    # as much is missing as where errors are kept in float32, the error of the last offer, and nothing of one sign besides
    assert off[ERROR_BITS].std() == pytest.approx(off[PLAIN_BITS].std(), rel=0.05)
    more = off[ERROR_BITS] - off[PLAIN_BITS]
    assert abs(more.mean()) < 4 * more.std() / np.sqrt(size)


@pytest.mark.parametrize(
    ("bits", "overlap", "below"), [(8, True, 3e-5), (32, True, 3e-5), (32, False, 3e-5), (8, False, 2.3e-4)]
)
def test_constant_moves_that_are_too_small_to_arrive(bits: Bits, overlap: bool, below: float) -> None:
    """After 2000 rounds a move of 3e-5 of the largest of its block has not added up to half a code.

    Without the overlap an error of 8 bits keeps no move of 2e-4, however long that goes on.
    """
    moves = np.tile(10.0 ** np.linspace(-5, 0, 64), 2).astype(np.float32)
    done, arrived = travel(wide(128, bits, overlap=overlap), lambda _: moves, 2000)
    assert moves[arrived / done < 0.5].max() == pytest.approx(below, rel=0.2)


def test_a_state_of_an_earlier_version_serves() -> None:
    size = 1000
    rng = np.random.default_rng(1)
    base, first, second = (rng.normal(0, 1, size).astype(np.float32) for _ in range(3))
    old, new = wide(size, 32, base=base), wide(size, base=base)
    merged(old, base, offered(old, base + first, 4))
    offered(old, base + second, 4)
    plain, arrays = old.dump()
    error, rest = old.error(), quantise.dequantise(old.values.held[7, 2].rest, size, 32)
    assert error is not None
    assert {name: (array.dtype.name, array.size) for name, array in arrays.items() if name.endswith(("error", "rest"))} == {
        "error": ("float32", size),
        "offer/0/rest": ("float32", size),
    }
    new.load(plain, arrays)
    np.testing.assert_array_equal(new.values.error, quantised_reference(error, 8)[0])
    np.testing.assert_array_equal(new.values.held[7, 2].rest, quantised_reference(rest, 8)[0])
    assert new.dump()[1]["error"].dtype == np.uint8
    again = wide(size, base=base)
    again.load(*new.dump())
    np.testing.assert_array_equal(again.error(), new.error())


@pytest.mark.parametrize(
    ("name", "array", "error", "says"),
    [
        ("error", np.zeros(999, np.float32), ValueError, "array 'error' is float32 .999,., expected 1000 values in 8 bits"),
        ("error", np.zeros(1087, np.uint8), ValueError, "array 'error' is uint8 .1087,., expected 1000 values in 8 bits"),
        ("error", np.full(1000, np.nan, np.float32), NonFiniteError, "NaN or infinite"),
        ("offer/0/rest", np.zeros(4000, np.uint8), ValueError, "array 'offer/0/rest' is uint8 .4000,., expected 1000 values"),
        ("base", np.zeros(999, np.float32), ValueError, "a fragment of 999 parameters, expected 1000"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(name: str, array: Any, error: type[Exception], says: str) -> None:
    delta, values = wide(1000), np.ones(1000, np.float32)
    merged(delta, np.zeros_like(values), offered(delta, values, 4))
    offered(delta, values, 4)
    plain, arrays = delta.dump()
    with pytest.raises(error, match=says):
        wide(1000).load(plain, arrays | {name: array})
