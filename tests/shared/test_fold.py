"""Folding a log: any replica arrives at the same bits, and a wrong bit is noticed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from msgspec.structs import replace
from numpy.typing import NDArray
from tests.made.log_entries import BODY, record_of

from diloco.core.log.chain import Chain
from diloco.core.log.fold import Replica, keyframe_body, keyframe_bytes, load_keyframe
from diloco.core.tensors import outer, quantise
from diloco.core.tensors.outer import AdamW
from diloco.errors import ChainError, HashError, NonFiniteError, WrongEntryError
from diloco.wire.entries import Keyframe, Record, RolledBack
from diloco.wire.fields import Bits
from diloco.wire.offers import MergeMember

Vector = NDArray[np.float32]
Raw = NDArray[np.uint8]
Entry = tuple[Record, bytes, int, Raw | None]
RATE, MU = np.float32(0.5), np.float32(0.25)


def hash_of(theta: Vector, momentum: Vector) -> bytes:
    """The state hash by its definition."""
    halves = [blake3(v.astype("<f4").tobytes()).digest() for v in (theta, momentum)]
    return blake3(b"".join(halves)).digest()


def fresh(theta: Vector) -> Replica:
    momentum = np.zeros_like(theta)
    return Replica(Chain(0, 0, 0, b"g" * 32, 0, hash_of(theta, momentum)), theta.copy(), momentum)


def version_entry(chain: Chain, number: int, state_hash: bytes, bits: Bits, *, takeover: bool = False) -> Record:
    members = [] if takeover else [MergeMember("ann", 1, number, number, number - 1, 1, 10, 0, 1.0, [(0, number - 1, 1)])]
    return record_of(
        chain.version + (not takeover),
        *members,
        entry="takeover" if takeover else "version",
        epoch=chain.epoch + takeover,
        previous=chain.head,
        bits=bits,
        momentum=0.25,
        tokens_merged=chain.tokens_merged + (0 if takeover else 10),
        state_hash=state_hash,
        body=None if takeover else BODY,
    )


def reference_log(theta: Vector, bits: Bits, versions: int, seed: int) -> tuple[list[Entry], Vector, Vector]:
    """A log and its end, folded here in plain NumPy; there is a takeover after the first version."""
    generator = np.random.default_rng(seed)
    chain = fresh(theta).chain
    value: NDArray[Any] = theta.copy()
    momentum: NDArray[Any] = np.zeros_like(theta)
    entries: list[Entry] = []
    for number in range(1, versions + 1):
        body = quantise.quantise(generator.standard_normal(theta.size).astype(np.float32), bits)
        delta = quantise.dequantise(body, theta.size, bits)
        momentum = MU * momentum + delta
        value = value - RATE * (delta + MU * momentum)
        record = version_entry(chain, number, hash_of(value, momentum), bits)
        entries.append((record, bytes([number]) * 32, 10 * number, body))
        chain.advance(*entries[-1][:3])
        if number == 1:
            takeover = version_entry(chain, 0, chain.state_hash, bits, takeover=True)
            entries.append((takeover, b"t" * 32, 11, None))
            chain.advance(*entries[-1][:3])
    return entries, value, momentum


def test_one_version_by_hand() -> None:
    # Theta 1, -2; Delta 4, 8: momentum 4, 8; Theta -= 0.5 * (Delta + 0.25 * momentum) = 0.5 * (5, 10)
    replica = fresh(np.array([1, -2], np.float32))
    body = quantise.quantise(np.array([4, 8], np.float32), 32)
    expected = np.array([-1.5, -7], np.float32), np.array([4, 8], np.float32)
    record = version_entry(replica.chain, 1, hash_of(*expected), 32)
    replica.fold(record, b"1" * 32, 10, body)
    assert replica.theta.tolist() == [-1.5, -7]
    assert replica.momentum.tolist() == [4, 8]
    assert (replica.chain.version, replica.chain.head, replica.chain.sequence) == (1, b"1" * 32, 10)
    # then Delta 0, 0: momentum 1, 2; Theta -= 0.5 * 0.25 * (1, 2)
    expected = np.array([-1.625, -7.25], np.float32), np.array([1, 2], np.float32)
    record = version_entry(replica.chain, 2, hash_of(*expected), 32)
    replica.fold(record, b"2" * 32, 11, quantise.quantise(np.zeros(2, np.float32), 32))
    assert replica.theta.tolist() == [-1.625, -7.25]


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("in_place", [True, False])
def test_replicas_arrive_at_the_bits_of_a_fold_in_numpy(bits: Bits, in_place: bool) -> None:
    theta = np.random.default_rng(1).standard_normal(70_001).astype(np.float32)  # more than a chunk, no whole block
    entries, value, momentum = reference_log(theta, bits, 3, seed=bits)
    replica = fresh(theta)
    for record, check, sequence, body in entries:
        replica.fold(record, check, sequence, body, in_place=in_place)
    np.testing.assert_array_equal(replica.theta, value)
    np.testing.assert_array_equal(replica.momentum, momentum)
    assert replica.chain.state_hash == hash_of(value, momentum)
    assert (replica.chain.version, replica.chain.epoch) == (3, 1)


def test_not_in_place_leaves_the_version_before_to_its_holder() -> None:
    theta = np.arange(100, dtype=np.float32)
    (record, check, sequence, body), *_ = reference_log(theta, 8, 1, seed=0)[0]
    replica = fresh(theta)
    before = replica.theta
    replica.fold(record, check, sequence, body, in_place=False)
    assert replica.theta is not before
    np.testing.assert_array_equal(before, theta)
    assert not np.array_equal(replica.theta, theta)


def test_judging_folds_a_right_entry_into_the_same_arrays_and_a_wrong_one_not_at_all() -> None:
    theta = np.random.default_rng(5).standard_normal(70_001).astype(np.float32)  # more than a chunk
    [first, _, second] = reference_log(theta, 4, 2, seed=5)[0]
    replica = fresh(theta)
    arrays = replica.theta, replica.momentum
    replica.judge(*first)
    state, chain = replica.state(), deepcopy(replica.chain)
    wrong = replace(second[0], previous=chain.head, epoch=chain.epoch, state_hash=b"w" * 32)
    with pytest.raises(WrongEntryError, match="fragment 0, version 2: folding gives state"):
        replica.judge(wrong, *second[1:])
    assert replica.state().tobytes() == state.tobytes()
    assert replica.chain == chain
    right = replace(wrong, state_hash=second[0].state_hash)
    replica.judge(right, *second[1:])
    assert replica.chain.state_hash == hash_of(*arrays)
    assert (replica.theta is arrays[0], replica.momentum is arrays[1]) == (True, True)


@pytest.mark.parametrize(("where", "byte", "bit"), [("body", 2, 0x20), ("theta", 2, 0x20), ("momentum", 3, 0x40)])
def test_one_flipped_bit_is_noticed(where: str, byte: int, bit: int) -> None:
    theta = np.linspace(1, 2, 64, dtype=np.float32)
    (record, check, sequence, body), *_ = reference_log(theta, 32, 1, seed=3)[0]
    assert body is not None
    replica = fresh(theta)
    flipped = {"body": body, "theta": replica.theta.view(np.uint8), "momentum": replica.momentum.view(np.uint8)}[where]
    flipped[4 * 17 + byte] ^= bit  # a momentum of zero becomes 2; a tiny one would vanish in the sum
    with pytest.raises(HashError, match="fragment 0, version 1: folding gives state"):
        replica.fold(record, check, sequence, body)
    assert replica.chain.version == 0


def test_a_takeover_that_states_another_hash_does_not_follow() -> None:
    replica = fresh(np.ones(3, np.float32))
    record = version_entry(replica.chain, 0, b"x" * 32, 4, takeover=True)
    with pytest.raises(ChainError, match="the state before where it makes no version"):
        replica.fold(record, b"1" * 32, 10, None)
    assert replica.chain.epoch == 0


def test_an_entry_that_does_not_follow_changes_nothing() -> None:
    theta = np.arange(10, dtype=np.float32)
    (record, check, sequence, body), *_ = reference_log(theta, 8, 1, seed=0)[0]
    replica = fresh(theta)
    with pytest.raises(ChainError):
        replica.fold(replace(record, version=2), check, sequence, body)
    np.testing.assert_array_equal(replica.theta, theta)
    replica.fold(record, check, sequence, body)
    with pytest.raises(ChainError):  # the same entry once more
        replica.fold(record, check, sequence, body)


def keyframe_of(replica: Replica) -> Keyframe:
    chain = replica.chain
    cursors = chain.keyframe_cursors()
    return Keyframe(
        0,
        chain.version,
        chain.epoch,
        chain.head,
        chain.sequence,
        chain.tokens_merged,
        chain.tokens_lost,
        cursors,
        chain.keyframe_ends(),
        chain.state_hash,
        chain.closed,
        BODY,
    )


def test_a_log_goes_on_from_a_keyframe_as_from_its_beginning() -> None:
    theta = np.random.default_rng(5).standard_normal(130).astype(np.float32)
    entries, value, _ = reference_log(theta, 4, 4, seed=4)
    replica = fresh(theta)
    for entry in entries[:3]:
        replica.fold(*entry)
    residual = np.linspace(-1, 1, 130, dtype=np.float32)
    raw = keyframe_body(replica, residual)
    assert raw.size == keyframe_bytes(130, 1) == 12 * 130
    keyframe = keyframe_of(replica)
    loaded, loaded_residual = load_keyframe(keyframe, Chain.from_keyframe(keyframe), raw)
    np.testing.assert_array_equal(loaded_residual, residual)
    raw[:] = 0  # what was loaded does not share its memory
    for entry in entries[3:]:
        loaded.fold(*entry)
    np.testing.assert_array_equal(loaded.theta, value)
    assert loaded.chain.version == 4


def test_a_keyframe_keeps_all_bits_of_adamw() -> None:
    n, adamw = 130, AdamW(0.95, ((70, 0.1), (130, 0.0)))
    replica = fresh(np.random.default_rng(5).standard_normal(n).astype(np.float32))
    replica.momentum, replica.optimizer = np.zeros(2 * n, np.float32), adamw
    for version in (1, 2):
        step = adamw.at(version, 0.01, 0.9)
        replica.chain.state_hash = outer.fold(replica.theta, replica.momentum, random_body(n, version), 16, step)
    replica.chain.version = 2
    residual = np.linspace(-1, 1, n, dtype=np.float32)
    raw = keyframe_body(replica, residual)
    assert raw.tobytes() == replica.theta.tobytes() + replica.momentum.tobytes() + residual.tobytes()
    assert raw.size == keyframe_bytes(n, 2) == 16 * n
    keyframe = keyframe_of(replica)
    loaded, loaded_residual = load_keyframe(keyframe, Chain.from_keyframe(keyframe), raw, adamw)
    assert loaded.theta.tobytes() == replica.theta.tobytes()
    assert loaded.momentum.tobytes() == replica.momentum.tobytes()
    np.testing.assert_array_equal(loaded_residual, residual)
    # and the third version is that of the replica which saw the first two: the corrections count the versions of the log
    state_hash = outer.fold(replica.theta, replica.momentum, random_body(n, 3), 16, adamw.at(3, 0.01, 0.9))
    record = replace(version_entry(loaded.chain, 3, state_hash, 16), momentum=0.9, learning_rate=0.01)
    loaded.fold(record, b"n" * 32, 10, random_body(n, 3))
    assert loaded.chain.state_hash == state_hash
    raw.view("<f4")[2 * n] += 1
    with pytest.raises(HashError, match="keyframe of version 2"):
        load_keyframe(keyframe, Chain.from_keyframe(keyframe), raw, adamw)


def random_body(n: int, seed: int) -> NDArray[np.uint8]:
    return quantise.quantise(np.random.default_rng(seed).standard_normal(n).astype(np.float32), 16)


def test_a_keyframe_without_a_residual_has_zeros() -> None:
    replica = fresh(np.ones(3, np.float32))
    replica.momentum[:] = 2
    assert keyframe_body(replica, None).view("<f4").tolist() == [1, 1, 1, 2, 2, 2, 0, 0, 0]


@pytest.mark.parametrize("position", [0, 5])
def test_a_damaged_keyframe_is_refused(position: int) -> None:
    replica = fresh(np.ones(4, np.float32))
    raw = keyframe_body(replica, np.zeros(4, np.float32))
    raw.view("<f4")[position] += 1
    with pytest.raises(HashError, match="keyframe of version 0"):
        load_keyframe(keyframe_of(replica), replica.chain, raw)


def test_a_residual_that_is_not_finite_is_refused() -> None:
    replica = fresh(np.ones(4, np.float32))
    raw = keyframe_body(replica, np.array([0, np.inf, 0, 0], np.float32))
    with pytest.raises(NonFiniteError):
        load_keyframe(keyframe_of(replica), replica.chain, raw)


def rollback_entry(chain: Chain, to_version: int, state_hash: bytes) -> Record:
    entry = version_entry(chain, 0, state_hash, 32, takeover=True)
    version = chain.version + 1
    back = RolledBack(1, to_version, version)
    return replace(entry, entry="rollback", version=version, epoch=chain.epoch, body=BODY, rolled_back=back)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_rollback_gives_the_state_of_an_earlier_version_to_the_bit(in_place: bool) -> None:
    theta = np.random.default_rng(7).standard_normal(130).astype(np.float32)
    entries, *_ = reference_log(theta, 4, 3, seed=7)
    replica = fresh(theta)
    for entry in entries[:2]:
        replica.fold(*entry)
    past, state, state_hash = replica.copy(), replica.state(), replica.chain.state_hash
    past.theta = replica.theta.copy()
    for entry in entries[2:]:
        replica.fold(*entry)
    before, kept = replica.theta, replica.theta.copy()
    assert state.tobytes() == past.theta.tobytes() + past.momentum.tobytes()

    replica.fold(rollback_entry(replica.chain, 1, state_hash), b"b" * 32, 99, state.view(np.uint8), in_place=in_place)

    assert replica.theta.tobytes() == past.theta.tobytes()
    assert replica.momentum.tobytes() == past.momentum.tobytes()
    assert (replica.chain.version, replica.chain.state_hash, replica.chain.floor) == (4, state_hash, 4)
    assert in_place == (replica.theta is before)
    if not in_place:
        assert before.tobytes() == kept.tobytes()
    # and from there it goes on as from that earlier version
    body = random_body(130, 9)
    again = [outer.fold(r.theta, r.momentum, body, 16, r.optimizer.at(5, 0.5, 0.25)) for r in (past, replica)]
    assert again[0] == again[1]


def test_a_rollback_to_another_state_than_it_states_is_noticed() -> None:
    theta = np.linspace(1, 2, 64, dtype=np.float32)
    replica = fresh(theta)
    first = replica.state()
    replica.fold(*reference_log(theta, 32, 1, seed=3)[0][0])
    with pytest.raises(HashError, match="fragment 0, version 2: folding gives state"):
        replica.fold(rollback_entry(replica.chain, 0, b"x" * 32), b"b" * 32, 99, first.view(np.uint8))
