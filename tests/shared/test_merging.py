"""From held offers to a log entry: merges of two learners by hand, what the entry states, and what is left over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.made.fragment_vectors import vector
from tests.made.held_offers import Vector, fragment_of, held, replica_of
from tests.made.log_entries import BODY
from tests.made.run_settings import MERGES, settings_of

from diloco.core.log.chain import Chain
from diloco.core.log.fold import Replica
from diloco.core.syncer.merging import accumulate, make_marker, make_rollback, make_version, sound
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors import codec, outer, quantise
from diloco.core.tensors.fragments import Fragment, TensorSpec, build_map
from diloco.errors import NonFiniteError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.wire.body import body_pieces
from diloco.wire.entries import Record, RolledBack
from diloco.wire.fields import Bits
from diloco.wire.offers import Answer, MergeMember, Offer, RegionalMembers, RegionalOffer

ATTEMPT = b"ATTEMPT."


def merged(fragment: Fragment, settings: RunSettings, *offers: RoundOffer) -> list[float]:
    theta = np.zeros(fragment.size, np.float32)
    values: list[float] = accumulate(fragment, settings, offers, {}, theta).result().tolist()
    return values


def two() -> tuple[RoundOffer, RoundOffer]:
    """ann (3, 4, 0, 2) of 10 tokens, bob (0, 5, 2, 0) of 30."""
    return held("ann", vector(3, 4, 0, 2), tokens=10), held("bob", vector(0, 5, 2, 0), tokens=30)


def test_the_weighted_average_by_hand() -> None:
    settings = settings_of(MERGES, **{"merge.method": "average"})
    assert merged(fragment_of(2, 2), settings, *two()) == pytest.approx([0.75, 4.75, 1.5, 0.5])


def test_radial_directional_averaging_by_row_by_hand() -> None:
    # equal weights. Row 1: norms 5 and 5; mean direction (0.3, 0.9) of length sqrt(0.9); times 5
    # row 2: norms 2 and 2; mean direction (0.5, 0.5), made a unit vector, times 2
    settings = settings_of(MERGES, **{"merge.granularity": "row", "merge.weights": "equal"})
    expected = [1.5 / 0.9**0.5, 4.5 / 0.9**0.5, 2**0.5, 2**0.5]
    assert merged(fragment_of(2, 2), settings, *two()) == pytest.approx(expected, rel=1e-6)


def test_radial_directional_averaging_by_tensor_by_hand() -> None:
    # weights 1 : 3; norms 29 ** 0.5 both, so the direction is that of the weighted sum and the length is theirs
    settings = settings_of(MERGES, **{"merge.granularity": "tensor"})
    total = np.array([3, 4 + 15, 6, 2])
    expected = total / np.linalg.norm(total) * 29**0.5
    assert merged(fragment_of(2, 2), settings, *two()) == pytest.approx(expected.tolist(), rel=1e-6)


def test_embeddings_are_averaged_whatever_the_method() -> None:
    fragment = fragment_of(2, 2, embedding=True)
    assert fragment.embedding
    assert merged(fragment, settings_of(MERGES, **{"merge.method": "rda"}), *two()) == pytest.approx([0.75, 4.75, 1.5, 0.5])


def test_embeddings_have_a_method_of_their_own() -> None:
    embed, weight = (TensorSpec("embed", (1, 2), embedding=True), TensorSpec("weight", (1, 2)))
    # ann (3, 4, 0, 2), bob (0, 5, 2, 0), weights 1 : 3. Rows 1: radius 5, direction of (3, 19) / 5; rows 2 as below
    rda = [5 * 3 / 370**0.5, 5 * 19 / 370**0.5, 6 / 10**0.5, 2 / 10**0.5]
    average = [0.75, 4.75, 1.5, 0.5]
    for method, embedding, expected in (
        ("rda", "rda", rda),
        ("average", "rda", rda[:2] + average[2:]),
        ("average", "average", average),
    ):
        settings = settings_of(MERGES, **{"merge.method": method, "merge.embedding": embedding})
        [together] = build_map([embed, weight], 1).fragments
        assert merged(together, settings, *two()) == pytest.approx(expected, rel=1e-6)
        # and in fragments of their own, as usual
        alone = fragment_of(2, 2, embedding=True)
        own = expected[:2] + (rda[2:] if embedding == "rda" else average[2:])
        assert merged(alone, settings, *two()) == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_embeddings_are_averaged_in_a_fragment_with_others_too(granularity: str) -> None:
    [fragment] = build_map([TensorSpec("embed", (1, 2), embedding=True), TensorSpec("weight", (1, 2))], 1).fragments
    assert not fragment.embedding
    # the weight's rows are (0, 2) and (2, 0): radius 2, direction (3, 1) / sqrt(10)
    expected = [0.75, 4.75, 6 / 10**0.5, 2 / 10**0.5]
    assert merged(fragment, settings_of(MERGES, **{"merge.granularity": granularity}), *two()) == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize(
    ("rule", "steps", "expected"),
    [
        # ann 100 tokens, bob 100 tokens; ann's v is 0, so the merge is bob's share of 12
        ("quality", (4, 2), 8),  # 100 * 100 / 4 = 2500 against 5000
        ("tokens", (4, 2), 6),
        ("equal", (4, 2), 6),
        ("quality", (1, 0), 0),  # bob states no steps
    ],
)
def test_weights(rule: str, steps: tuple[int, int], expected: float) -> None:
    settings = settings_of(MERGES, **{"merge.method": "average", "merge.weights": rule})
    ann, bob = (
        held("ann", vector(0), tokens=100, steps=steps[0]),
        held("bob", vector(12), tokens=100, steps=steps[1]),
    )
    assert merged(fragment_of(1), settings, ann, bob) == [pytest.approx(expected)]


def test_against_the_current_value_an_old_base_counts_as_moved() -> None:
    # the learner is at its base (7, 21) minus its outer gradient (1, 1), at (6, 20); the newest version is (10, 20)
    settings = settings_of(MERGES, **{"merge.method": "average", "merge.against": "current"})
    item = held("ann", vector(1, 1), tokens=1)
    bases = {3: vector(7, 21)}
    merge = accumulate(fragment_of(2), settings, [item], bases, vector(10, 20))
    assert merge.result().tolist() == [4, 0]
    with pytest.raises(KeyError):  # never another base without a word
        accumulate(fragment_of(2), settings, [item], {2: vector(7, 21)}, vector(10, 20))
    against_base = settings_of(MERGES, **{"merge.method": "average", "merge.against": "base"})
    merge = accumulate(fragment_of(2), against_base, [item], {}, vector(10, 20))
    assert merge.result().tolist() == [1, 1]


@pytest.mark.parametrize("method", ["average", "rda"])
def test_offers_of_several_bases_against_float64(method: str) -> None:
    """Each learner's outer gradient is the newest value less the learner's own: its base less what it offers."""
    rng, size = np.random.default_rng(7), 40
    bases = {version: rng.normal(size=size).astype(np.float32) for version in (1, 2, 3)}
    rules = {"merge.method": method, "merge.weights": "tokens", "merge.granularity": "tensor", "merge.against": "current"}
    settings = settings_of(MERGES, **rules)
    offered = {name: rng.normal(size=size).astype(np.float32) for name in ("ann", "bob", "cat")}
    tokens = {"ann": 10, "bob": 20, "cat": 70}
    items = [
        held(name, values, tokens=tokens[name], base_version=version)
        for (name, values), version in zip(offered.items(), bases, strict=True)
    ]
    newest = bases[3].astype(np.float64)
    outer_gradients = [
        newest - (bases[version].astype(np.float64) - values) for version, values in zip(bases, offered.values(), strict=True)
    ]
    shares = np.array(list(tokens.values())) / 100
    if method == "average":
        expected = sum(share * values for share, values in zip(shares, outer_gradients, strict=True))
    else:
        norms = [np.linalg.norm(values) for values in outer_gradients]
        direction = sum(share * values / norm for share, values, norm in zip(shares, outer_gradients, norms, strict=True))
        expected = shares @ norms * direction / np.linalg.norm(direction)
    result = accumulate(fragment_of(size), settings, items, bases, bases[3]).result()
    np.testing.assert_allclose(result, expected, atol=3e-7 * np.abs(expected).max())


def combined(*items: RoundOffer, values: Vector) -> RoundOffer:
    """A version that a syncer has made of some learners' offers."""
    answers = [Answer.of(item.offer) for item in items if isinstance(item.offer, Offer)]
    return RoundOffer(RegionalOffer(0, "syncer-2", 5, 6, 32, answers, BODY), quantise.quantise(values.copy(), 32))


def test_offers_averaged_in_their_region_first_weigh_as_much_as_each_by_itself() -> None:
    settings = settings_of(MERGES, **{"merge.method": "average"})
    ann, bob = two()
    cat = held("cat", vector(8, 0, 0, 8), tokens=40)
    together = combined(ann, bob, values=vector(0.75, 4.75, 1.5, 0.5))  # 10 and 30 tokens
    expected = pytest.approx([4.375, 2.375, 0.75, 4.25])  # and 40 tokens each
    assert merged(fragment_of(2, 2), settings, ann, bob, cat) == expected
    assert merged(fragment_of(2, 2), settings, together, cat) == expected


def test_directions_that_a_region_has_merged_count_fully_however_much_its_learners_differed() -> None:
    # all three at right angles, of norm 2. Of ann and bob their region makes sqrt(2) each way, of norm 2 again
    settings = settings_of(MERGES, **{"merge.method": "rda", "merge.granularity": "tensor", "merge.weights": "equal"})
    ann, bob, cat = (held(name, vector(*values), tokens=1) for name, values in AT_RIGHT_ANGLES.items())
    flat = merged(fragment_of(3), settings, ann, bob, cat)
    assert flat == pytest.approx([2 / 3**0.5] * 3)  # each direction a third
    together = combined(ann, bob, values=vector(2**0.5, 2**0.5, 0))
    first = merged(fragment_of(3), settings, together, cat)
    # two of the weight in a direction of length 1, where by themselves they add up to one of length sqrt(2)
    assert first == pytest.approx([2 * 2**0.5 / 5**0.5, 2 * 2**0.5 / 5**0.5, 2 / 5**0.5])
    assert np.linalg.norm(first) == pytest.approx(np.linalg.norm(flat))


AT_RIGHT_ANGLES = {"ann": (2, 0, 0), "bob": (0, 2, 0), "cat": (0, 0, 2)}


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_offers_of_any_width_merge_alike(bits: Bits) -> None:
    # of codes alone, which are exact; so are small integers in 16 and 32 bits
    values = {1: vector(1, 1, -1), 2: vector(7, 2, -7), 4: vector(7, 0, -7)}.get(bits, vector(127, 0, -127))
    items = [held(name, values, tokens=5, bits=bits) for name in ("ann", "bob")]
    assert merged(fragment_of(3), settings_of(MERGES), *items) == pytest.approx(values.tolist(), rel=1e-6)


def version(
    replica: Replica,
    residual: Vector,
    settings: RunSettings,
    *offers: RoundOffer,
    closing: bool = False,
    bits: Bits | None = None,
) -> tuple[Record, bytes, list[bytes]]:
    fragment = fragment_of(replica.theta.size)
    merge = Merge(4, offers, closing, quorum_s=0.5, round_s=1.5)
    delta = accumulate(fragment, settings, offers, {}, replica.theta).result()
    bits = settings.codec.record_bits if bits is None else bits
    return make_version(replica, residual, delta, merge, settings, bits=bits, syncer="syncer-0", attempt=ATTEMPT, now_s=17.0)


def body_of(record: Record, inline: bytes, parts: list[bytes], n: int) -> NDArray[np.uint8]:
    """The body as a reader gets it, validated."""
    assert record.body is not None
    assert all(part.startswith(ATTEMPT) for part in parts)
    pieces = body_pieces(record.body, inline, [part[len(ATTEMPT) :] for part in parts], "test")
    body = codec.unpack(pieces, quantise.body_bytes(n, record.bits))
    quantise.validate(body, n, record.bits)
    assert codec.content_hash(body) == record.body.content_hash
    return body


def test_what_a_version_states() -> None:
    settings = settings_of(MERGES, **{"merge.method": "average", "merge.weights": "quality"})
    replica = replica_of(vector(10, 20))
    ann = held("ann", vector(2, 4), tokens=10, steps=2, lost_tokens=3)
    bob = held("bob", vector(6, 8), tokens=30, steps=6, lost_tokens=4, base_version=2, round=3, incarnation=9, number=1)
    record, inline, parts = version(replica, vector(0, 0), settings, ann, bob)
    # weights 50 and 150: Delta (5, 7); Theta -= 0.5 * Delta
    assert replica.theta.tolist() == [7.5, 16.5]
    assert quantise.dequantise(body_of(record, inline, parts, 2), 2, 32).tolist() == [5, 7]
    assert (record.fragment, record.entry, record.version, record.epoch) == (0, "version", 4, 2)
    assert (record.previous, record.syncer, record.closing) == (b"h" * 32, "syncer-0", False)
    assert record.members == [
        MergeMember("ann", 7, 2, 4, 3, 2, 10, 3, 50.0, [(2, 8, 2)]),
        MergeMember("bob", 9, 1, 3, 2, 6, 30, 4, 150.0, [(2, 8, 6)]),
    ]
    assert (record.tokens_merged, record.tokens_lost) == (1040, 7)
    assert (record.bits, record.learning_rate, record.momentum) == (32, 0.5, 0.0)
    assert (record.committed_at_s, record.quorum_s, record.round_s) == (17.0, 0.5, 1.5)
    assert record.state_hash == outer.state_hash(replica.theta, replica.momentum)
    # the chain has not advanced, and takes the record
    assert replica.chain.version == 3
    replica.chain.check(record)
    assert record.regional_offers == []


def test_a_version_names_all_members_of_a_combined_offer_and_how_they_came() -> None:
    replica = replica_of(vector(10, 20))
    items = [held(name, vector(2, 4), tokens=10) for name in ("ann", "bob", "cat")]
    together = combined(items[0], items[2], values=vector(2, 4))
    record, _, _ = version(replica, vector(0, 0), settings_of(MERGES), together, items[1])
    assert [(member.learner, member.weight) for member in record.members] == [("ann", 10), ("bob", 10), ("cat", 10)]
    assert record.regional_offers == [RegionalMembers("syncer-2", 5, 6, [0, 2])]
    assert record.tokens_merged == 1030
    replica.chain.check(record)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_any_reader_folds_a_version_to_the_same_bits(bits: Bits) -> None:
    settings = settings_of(MERGES, **{"codec.record_bits": bits, "outer.momentum": 0.9})
    values = np.random.default_rng(bits).standard_normal((2, 1000)).astype(np.float32)
    syncer, reader = replica_of(values[0]), replica_of(values[0])
    record, inline, parts = version(syncer, np.zeros(1000, np.float32), settings, held("ann", values[1], tokens=1))
    reader.fold(record, b"n" * 32, 10, body_of(record, inline, parts, 1000))
    np.testing.assert_array_equal(reader.theta, syncer.theta)
    np.testing.assert_array_equal(reader.momentum, syncer.momentum)


def test_what_quantisation_leaves_over_goes_into_the_next_version() -> None:
    # int8, one block, scale 127 / 127 = 1: (127, 0.25) is sent as (127, 0)
    settings = settings_of(MERGES, **{"codec.record_bits": 8, "merge.method": "average"})
    replica, residual = replica_of(vector(0, 0)), vector(0, 0)
    record, inline, parts = version(replica, residual, settings, held("ann", vector(127, 0.25), tokens=1))
    assert quantise.dequantise(body_of(record, inline, parts, 2), 2, 8).tolist() == [127, 0]
    assert residual.tolist() == [0, 0.25]
    # with the residual the second value is 0.5, and a third time 0.75, which is sent as 1
    residual[:] = 0, 0.5
    record, inline, parts = version(replica, residual, settings, held("ann", vector(127, 0.25), tokens=1))
    assert quantise.dequantise(body_of(record, inline, parts, 2), 2, 8).tolist() == [127, 1]
    assert residual.tolist() == [0, -0.25]


@pytest.mark.parametrize("precisions", [(4,), (16, 4, 8, 32)])  # as a link that changes has them
def test_sums_of_versions_and_residual_are_those_of_offers(precisions: tuple[Bits, ...]) -> None:
    settings = settings_of(MERGES, **{"codec.record_bits": 4, "merge.method": "average"})
    generator = np.random.default_rng(3)
    replica, residual = replica_of(np.zeros(100, np.float32)), np.zeros(100, np.float32)
    wanted, sent = np.zeros(100), np.zeros(100)
    for bits in precisions * (20 // len(precisions)):
        values = generator.standard_normal(100).astype(np.float32)
        record, inline, parts = version(replica, residual, settings, held("ann", values, tokens=1), bits=bits)
        wanted += values
        sent += quantise.dequantise(body_of(record, inline, parts, 100), 100, record.bits)
    np.testing.assert_allclose(sent + residual, wanted, atol=1e-4)
    assert np.abs(residual).max() < 0.5  # it does not grow: half a step of a block's largest value


def test_without_error_feedback_nothing_is_kept() -> None:
    settings = settings_of(MERGES, **{"codec.record_bits": 8, "merge.method": "average", "codec.error_feedback": False})
    residual = vector(0, 0.5)
    record, inline, parts = version(replica_of(vector(0, 0)), residual, settings, held("ann", vector(127, 0.25), tokens=1))
    assert quantise.dequantise(body_of(record, inline, parts, 2), 2, 8).tolist() == [127, 0]
    assert residual.tolist() == [0, 0.5]


def test_a_closing_merge_makes_a_closing_version() -> None:
    record, _, _ = version(
        replica_of(vector(0)), vector(0), settings_of(MERGES), held("ann", vector(1), tokens=1), closing=True
    )
    assert record.closing
    replica_of(vector(0)).chain.check(record)


def test_a_large_body_travels_in_parts() -> None:
    values = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    replica, residual = replica_of(np.zeros_like(values)), np.zeros_like(values)
    settings = settings_of(MERGES, **{"merge.method": "average"})
    record, inline, parts = version(replica, residual, settings, held("ann", values, tokens=1))
    assert inline == b""
    assert len(parts) > 1
    assert record.body is not None
    assert record.body.parts == len(parts)
    body = body_of(record, inline, parts, values.size)
    np.testing.assert_array_equal(quantise.dequantise(body, values.size, 32), values)


def test_a_parameter_that_overflows_makes_no_version() -> None:
    settings = settings_of(MERGES, **{"outer.learning_rate": 10, "merge.method": "average"})
    replica = replica_of(vector(3e38, 1))
    with pytest.raises(NonFiniteError, match="fragment 0, version 4"):
        version(replica, vector(0, 0), settings, held("ann", vector(-1e38, 0), tokens=1))


def state_version(theta: Vector, settings: RunSettings, *offers: RoundOffer) -> tuple[Record, Replica]:
    """A version of state as its owner makes it; a reader has folded it to the same bits."""
    fragment = build_map([TensorSpec("t", (3,)), TensorSpec("u", (theta.size,), state=True)], 2).fragments[1]
    owner, reader = replica_of(theta), replica_of(theta)
    owner.optimizer = outer.optimizer(settings, fragment)
    owner.momentum[:] = reader.momentum[:] = 1.0  # of the merge before: it must not go on
    merge = Merge(4, offers, False, quorum_s=0.5, round_s=1.5)
    delta = sound(fragment, settings, merge, {3: theta, 2: theta + 50}, owner, {"ann", "bob"}, b"r" * 8)
    bits = fragment.bits(settings.codec.record_bits)
    residual = np.zeros_like(theta)
    record, inline, parts = make_version(
        owner, residual, delta, merge, settings, bits=bits, syncer="syncer-0", attempt=ATTEMPT, now_s=17.0
    )
    assert not residual.any()
    reader.fold(record, b"n" * 32, 10, body_of(record, inline, parts, theta.size))
    assert reader.theta.tobytes() == owner.theta.tobytes()
    return record, reader


@pytest.mark.parametrize("changes", [{}, {"merge.against": "current"}, {"outer.momentum": 0.9, "codec.record_bits": 4}])
def test_a_version_of_state_is_the_weighted_average_of_values_by_hand(changes: dict[str, Any]) -> None:
    ann = held("ann", vector(3, 4, 0, 1e-6), tokens=10)
    bob = held("bob", vector(1, 6, 8, 1e-6), tokens=30, base_version=2)  # of an older base: of no account
    record, reader = state_version(vector(100, 0, 5, 2), settings_of(MERGES, **changes), ann, bob)
    assert reader.theta.tolist() == pytest.approx([1.5, 5.5, 6, 1e-6], abs=1e-7)
    assert (record.learning_rate, record.momentum, record.bits) == (1.0, 0.0, 32)


def test_under_an_outer_adamw_state_is_averaged_all_the_same() -> None:
    settings = run_settings("data-parallel", {"fragments.count": 2, "shards": 1, "tokens": 10_000})
    record, reader = state_version(
        vector(1, 2), settings, held("ann", vector(3, 4), tokens=10), held("bob", vector(5, 8), tokens=10)
    )
    assert reader.theta.tolist() == [4, 6]
    assert (record.learning_rate, record.momentum) == (1.0, 0.0)


VARIANCES = st.floats(0, 2.0**10, width=32)


@given(st.lists(st.tuples(VARIANCES, VARIANCES, VARIANCES), min_size=1, max_size=40), st.tuples(*2 * [st.integers(1, 10**6)]))
def test_no_variance_becomes_negative_and_each_is_within_rounding_of_the_average(
    values: list[tuple[float, float, float]], tokens: tuple[int, int]
) -> None:
    theta, ann, bob = (np.array(column, np.float32) for column in zip(*values, strict=True))
    settings = settings_of(MERGES, **{"quarantine.merge_factor": 0})
    _, reader = state_version(theta, settings, held("ann", ann, tokens=tokens[0]), held("bob", bob, tokens=tokens[1]))
    assert (reader.theta >= 0).all()
    exact = np.average(np.stack([ann, bob]).astype(np.float64), axis=0, weights=tokens)
    assert (np.abs(reader.theta - exact) <= 2.0**-21 * np.maximum(theta, exact) + 1e-38).all()


@pytest.mark.parametrize(("entry", "epoch", "closing"), [("takeover", 3, False), ("close", 2, True)])
def test_markers_follow_the_head_and_change_nothing(entry: Any, epoch: int, closing: bool) -> None:
    replica = replica_of(vector(1, 2))
    record = make_marker(replica, entry, settings_of(MERGES), syncer="syncer-1", now_s=17.0)
    assert (record.entry, record.version, record.epoch, record.closing) == (entry, 3, epoch, closing)
    assert (record.members, record.body, record.state_hash) == ([], None, replica.chain.state_hash)
    replica.fold(record, b"n" * 32, 10, None)
    assert replica.theta.tolist() == [1, 2]
    assert (replica.chain.epoch, replica.chain.closed) == (epoch, closing)


def adamw_replica(settings: RunSettings, fragment: Fragment, tokens_merged: int) -> Replica:
    theta, momentum = np.ones(fragment.size, np.float32), np.zeros(2 * fragment.size, np.float32)
    chain = Chain(0, 3, 2, b"h" * 32, 9, outer.state_hash(theta, momentum), tokens_merged=tokens_merged)
    return Replica(chain, theta, momentum, outer.optimizer(settings, fragment))


def test_adamw_versions_state_the_rate_of_the_schedule_and_every_reader_folds_them_alike() -> None:
    changes = {"fragments.count": 1, "shards": 1, "tokens": 10_000, "inner.learning_rate": 0.01, "inner.warmup_fraction": 0.05}
    settings = run_settings("data-parallel", changes)
    fragment = fragment_of(4, 50)
    for tokens, rate in {0: 0.0, 250: 0.005, 500: 0.01, 5250: 0.0055, 20_000: 0.001}.items():
        syncer, reader = (adamw_replica(settings, fragment, tokens) for _ in range(2))
        gradients = np.random.default_rng(tokens).standard_normal((2, 200)).astype(np.float32)
        offers = [
            held(name, values, tokens=share) for name, values, share in zip(("ann", "bob"), gradients, (10, 30), strict=True)
        ]
        record, inline, parts = version(syncer, np.zeros(200, np.float32), settings, *offers)
        assert record.learning_rate == pytest.approx(rate)
        assert (record.momentum, record.bits) == (0.9, 16)
        body = body_of(record, inline, parts, 200)
        mean = (10 * gradients[0] + 30 * gradients[1]) / 40
        np.testing.assert_allclose(quantise.dequantise(body, 200, 16), mean, rtol=2**-8, atol=1e-6)
        reader.fold(record, b"n" * 32, 10, body)
        assert reader.theta.tobytes() == syncer.theta.tobytes()
        assert reader.momentum.tobytes() == syncer.momentum.tobytes()


def test_a_square_that_overflows_makes_no_version() -> None:
    settings = run_settings("data-parallel", {"fragments.count": 1, "shards": 1})
    replica = adamw_replica(settings, fragment_of(2), 500)
    with pytest.raises(NonFiniteError, match="fragment 0, version 4"):
        version(replica, vector(0, 0), settings, held("ann", vector(1e30, 0), tokens=1))


def test_a_rollback_states_what_a_reader_comes_to() -> None:
    replica, past = replica_of(vector(5, 6)), replica_of(vector(1, 2))
    past.momentum[:] = 3, 4
    past.chain.version, past.chain.state_hash = 1, outer.state_hash(past.theta, past.momentum)
    reader, residual = replica_of(vector(5, 6)), vector(7, 8)
    record, inline, parts = make_rollback(
        replica, residual, past, 9, settings_of(MERGES), syncer="syncer-1", attempt=ATTEMPT, now_s=17.0
    )
    assert (record.entry, record.version, record.epoch, record.members, record.closing) == ("rollback", 4, 2, [], False)
    assert (record.bits, record.rolled_back, record.state_hash) == (32, RolledBack(9, 1, 4), past.chain.state_hash)
    assert residual.tolist() == [0, 0]
    assert record.body is not None
    body = codec.unpack(body_pieces(record.body, inline, parts, "body"), 16)
    assert body.view("<f4").tolist() == [1, 2, 3, 4]
    reader.fold(record, b"n" * 32, 10, body)
    for own in (reader, replica):
        assert (own.theta.tolist(), own.momentum.tolist()) == ([1, 2], [3, 4])
