"""Tensors that a task has in bfloat16: the loss sees them rounded, and nothing else does."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.made.learner_delta import Delta

from diloco.core.log.chain import Chain
from diloco.core.log.fold import Replica
from diloco.core.syncer.merging import accumulate, make_version
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors import outer
from diloco.core.tensors.fragments import Fragment, build_map
from diloco.core.tensors.outer import EPSILON
from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.wire.body import Body
from diloco_learner.jax.island import Island

Wide = NDArray[np.float64]
VALUES = 4096
BODY = Body(size_bytes=0, content_hash=bytes(32), parts=0, attempt=bytes(8))


class Drift:
    """A loss whose gradient is the batch, whatever the parameters are. ``scale`` is float32."""

    tokens_per_batch = 8

    def __init__(self, dtype: Any = jnp.bfloat16, loss_dtype: Any = jnp.float32) -> None:
        self.dtype, self.loss_dtype = dtype, loss_dtype

    def init(self, key: jax.Array) -> Any:
        return {"weight": (0.02 * jax.random.normal(key, (VALUES,))).astype(self.dtype), "scale": jnp.ones(3)}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        assert params["weight"].dtype == self.dtype
        assert params["scale"].dtype == jnp.float32
        moved = (params["weight"].astype(jnp.float32) * batch).sum() + params["scale"].sum()
        loss: jax.Array = moved.astype(self.loss_dtype)
        return loss

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[NDArray[np.float32]]:
        rng = np.random.default_rng((seed, share))  # exact in bfloat16, with a trend of a third of their deviation
        while True:
            yield rng.normal(1 / 3, 1, VALUES).astype(ml_dtypes.bfloat16).astype(np.float32)

    def validation(self) -> Sequence[NDArray[np.float32]]:
        return [np.ones(VALUES, np.float32)]

    def is_embedding(self, path: str) -> bool:
        return False


OVERRIDES = {
    "inner.optimizer": "adamw",
    "inner.weight_decay": 0.0,
    "inner.clip_norm": 1e9,
    "merge.method": "average",
    "codec.offer_bits": 32,
    "codec.record_bits": 32,
    "fragments.count": 1,
    "shards": 1,
    "learners": 2,
}
SETTINGS = run_settings(overrides=OVERRIDES)


@functools.cache
def made() -> Island:
    """An island that no test steps: its twins share what they compile."""
    return Island(Drift(), SETTINGS)


def fragment_of(island: Island) -> Fragment:
    [fragment] = build_map(island.tensors(), 1).fragments
    return fragment


def rounded(values: Any) -> NDArray[np.float32]:
    """The nearest bfloat16, ties to the even one, by another program than XLA's."""
    return np.asarray(values).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_the_loss_sees_rounded_values_and_reads_and_writes_do_not() -> None:
    island = made().twin()
    fragment = fragment_of(island)
    begun = island.read(fragment).to_host()
    np.testing.assert_array_equal(begun, rounded(begun))  # what `init` made, so the first version of the log is of bfloat16
    theta = np.linspace(0.01600001, 0.01600002, fragment.size, dtype=np.float32)  # rounding moves all of them up
    assert np.mean(theta == rounded(theta)) < 0.1
    island.write(fragment, theta)
    np.testing.assert_array_equal(island.read(fragment).to_host(), theta)
    by_path = fragment.pieces[0].path, fragment.pieces[-1].path
    assert by_path == ("scale", "weight")
    np.testing.assert_array_equal(np.asarray(island.params()["weight"]).astype(np.float32), rounded(theta[3:]))
    np.testing.assert_array_equal(island.params()["scale"], theta[:3])
    expected = rounded(theta[3:]).sum(dtype=np.float64) + theta[:3].sum(dtype=np.float64)
    assert island.evaluate() == pytest.approx(expected, rel=1e-4)
    island.write(fragment, theta, theta - np.float32(1e-5))  # what is kept of the overlap
    np.testing.assert_array_equal(island.read(fragment).to_host(), theta + (theta - (theta - np.float32(1e-5))))


def test_a_state_is_that_of_a_task_in_float32() -> None:
    half, full = made().twin(), Island(Drift(jnp.float32), SETTINGS)
    assert half.rounded_tensors() == ["weight"]
    assert full.rounded_tensors() == []
    assert half.tensors() == full.tensors()
    assert half.optimizer_layout() == full.optimizer_layout()
    for island in (half, full):
        island.step(np.ones(VALUES, np.float32), 1e-5).wait()
    assert {values.dtype.name for values in half.state().values()} == {"float32", "int32"}
    half.load_state(full.state())
    for name, values in half.state().items():
        np.testing.assert_array_equal(values, full.state()[name])


class Learner:
    """A learner in float64: AdamW, and what it has done since it took over a version."""

    def __init__(self, theta: Wide) -> None:
        self.theta, self.mean, self.square, self.steps = theta.copy(), np.zeros_like(theta), np.zeros_like(theta), 0

    def step(self, gradient: Wide, rate: float) -> None:
        beta1, beta2 = SETTINGS.inner.beta1, SETTINGS.inner.beta2
        self.steps += 1
        self.mean += (1 - beta1) * (gradient - self.mean)
        self.square += (1 - beta2) * (gradient**2 - self.square)
        mean, square = self.mean / (1 - beta1**self.steps), self.square / (1 - beta2**self.steps)
        self.theta -= rate * mean / (np.sqrt(square) + EPSILON)


def test_updates_far_below_the_last_place_of_bfloat16_reach_the_log_without_bias() -> None:
    """Two learners, 60 rounds with an overlap, beside float64. A step moves a parameter by about 1e-5; they are 0.02 large."""
    rounds, before, after, rate = 60, 4, 2, 1e-5
    islands = [made().twin() for _ in range(SETTINGS.learners)]
    fragment = fragment_of(islands[0])
    start = islands[0].read(fragment).to_host()
    optimizer = outer.optimizer(SETTINGS, fragment)
    momentum = np.zeros(fragment.size, np.float32)
    chain = Chain(fragment.index, 0, 0, bytes(32), 0, outer.state_hash(start, momentum))
    log = Replica(chain, start.copy(), momentum, optimizer)
    deltas = [Delta(f"learner-{i}", 1, True, False, start, 0, chain.state_hash) for i in range(len(islands))]
    streams = [island.task.batches(share, 2, 0, 0) for share, island in enumerate(islands)]

    expected, heap = start.astype(np.float64), np.zeros(fragment.size)
    learners = [Learner(expected) for _ in islands]
    displaced, wanted = [], []

    def train(steps: int, first: int) -> None:
        for share, (island, learner, delta) in enumerate(zip(islands, learners, deltas, strict=True)):
            for step in range(first, first + steps):
                batch = next(streams[share])
                island.step(batch, rate).wait()
                learner.step(np.concatenate([np.ones(3), batch]), rate)
                delta.state.step(8, share, step)

    def answer(own: Delta, island: Island, version: int) -> RoundOffer:
        state = own.state
        made = own.offer(island.snapshot(fragment).to_host(), state.steps, state.tokens, state.data, version, 32)
        return RoundOffer(made.message(fragment.index, BODY), own.body(made))

    for version in range(1, rounds + 1):
        train(before, (version - 1) * (before + after))
        held = [answer(own, island, version) for own, island in zip(deltas, islands, strict=True)]
        offered = [learner.theta.copy() for learner in learners]
        displaced += [-item.body.view(np.float32).astype(np.float64)[3:] for item in held]
        wanted += [(theta - expected)[3:] for theta in offered]
        train(after, (version - 1) * (before + after) + before)

        merged = accumulate(fragment, SETTINGS, held, {}, log.theta).result()
        merge = Merge(version, tuple(held), closing=False, quorum_s=0.0, round_s=0.0)
        residual = np.zeros(fragment.size, np.float32)
        record, _, _ = make_version(
            log, residual, merged, merge, SETTINGS, bits=32, syncer="syncer", attempt=bytes(8), now_s=0.0
        )
        log.chain.advance(record, bytes([version]) * 32, version)
        for own, island in zip(deltas, islands, strict=True):
            applied = own.apply(record, log.theta.copy())
            assert applied.reference is not None
            island.write(fragment, applied.theta, applied.reference)

        gradient = expected - np.mean(offered, axis=0)
        heap = SETTINGS.outer.momentum * heap + gradient
        expected = expected - SETTINGS.outer.learning_rate * (gradient + SETTINGS.outer.momentum * heap)
        for learner, theta in zip(learners, offered, strict=True):
            learner.theta = expected + (learner.theta - theta)

    # of bfloat16 alone hardly any step would be left
    last = islands[0].read(fragment).to_host()
    islands[0].step(next(streams[0]), rate).wait()
    moved = islands[0].read(fragment).to_host()
    assert np.mean(moved == last) < 0.01
    assert np.mean((rounded(last) + (moved - last)).astype(ml_dtypes.bfloat16) == rounded(last)) > 0.8

    # each displacement: no part of it is lost, and its error is float32's, around zero
    error, size = np.array(displaced) - np.array(wanted), np.array(wanted)
    assert np.sqrt(np.mean(size**2)) == pytest.approx(3e-5, rel=0.5)
    assert np.sum(np.array(displaced) * size) / np.sum(size**2) == pytest.approx(1, abs=1e-4)
    assert np.abs(error).max() < 2e-8  # the last place of a float32 of 0.06 is 4e-9
    assert abs(error.mean()) < 4 * error.std() / math.sqrt(error.size)
    # and what the log holds after all rounds
    travelled, off = (expected - start)[3:], (log.theta - expected)[3:]
    assert np.sqrt(np.mean(travelled**2)) > 1e-3
    assert np.sqrt(np.mean(off**2)) < 1e-4 * np.sqrt(np.mean(travelled**2))
    assert abs(off.mean()) < 4 * off.std() / math.sqrt(off.size)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (
            Drift(jnp.float16),
            r"parameter 'weight' is float16, expected float32 or bfloat16: gradients below 6e-8 .* use bfloat16",
        ),
        (Drift(jnp.int32), r"parameter 'weight' is int32, expected float32 or bfloat16: keep parameters in one of these"),
        (Drift(loss_dtype=jnp.bfloat16), r"loss\(\) returned bfloat16\[\], expected a float32 scalar: cast logits to float32"),
    ],
)
def test_other_types_are_refused(task: Drift, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Island(task, SETTINGS).check(np.ones(VALUES, np.float32))
