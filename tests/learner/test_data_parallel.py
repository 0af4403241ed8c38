"""The preset data-parallel against optax: gradients through the run's own code, and AdamW on their average beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from numpy.typing import NDArray
from tests.made.learner_delta import Delta

from diloco.core.learner.schedule import Moment, learning_rate
from diloco.core.log.chain import Chain
from diloco.core.log.fold import Replica
from diloco.core.syncer.merging import accumulate, make_version
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors import codec, outer
from diloco.core.tensors.fragments import FragmentMap, build_map
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.wire.body import Body
from diloco_learner.jax.island import Island

LEARNERS, STEPS, TOKENS = 3, 40, 8
BUDGET = LEARNERS * STEPS * TOKENS
BODY = Body(size_bytes=0, content_hash=bytes(32), parts=0, attempt=bytes(8))


class Curve:
    """A network of one hidden layer, and a table of offsets, fitted to a sine."""

    tokens_per_batch = TOKENS

    def init(self, key: jax.Array) -> Any:
        first, second, third = jax.random.split(key, 3)
        return {
            "hidden": {"weight": jax.random.normal(first, (12, 2)), "bias": jnp.zeros(12)},
            "out": jax.random.normal(second, (1, 12)) / 4,
            "table": jax.random.normal(third, (4, 3)) / 4,
        }

    def loss(self, params: Any, batch: Any) -> jax.Array:
        x, kind = batch[:, :2], batch[:, 2].astype(jnp.int32)
        hidden = jnp.tanh(x @ params["hidden"]["weight"].T + params["hidden"]["bias"])
        guess = (hidden @ params["out"].T)[:, 0] + params["table"][kind].sum(1)
        return 3 * jnp.mean((guess - jnp.sin(3 * x[:, 0]) * x[:, 1] - kind) ** 2)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        for index in range(start, STEPS):
            rng = np.random.default_rng((seed, share, index))
            x, kind = rng.normal(size=(TOKENS, 2)), rng.integers(0, 4, (TOKENS, 1))
            yield np.concatenate([x, kind], axis=1).astype(np.float32)

    def validation(self) -> Sequence[Any]:
        return []

    def is_embedding(self, path: str) -> bool:
        return path == "table"


def rounded(values: Any) -> NDArray[np.float32]:
    """As bfloat16."""
    return np.asarray(values).astype(ml_dtypes.bfloat16).astype(np.float32)


def reference(settings: RunSettings, task: Curve, params: Any) -> Any:
    """The parameters after all steps of AdamW on averaged gradients, each and their mean rounded to bfloat16."""
    inner = settings.inner
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, inner.learning_rate, round(inner.warmup_fraction * BUDGET), BUDGET, inner.final_fraction * inner.learning_rate
    )
    matrices = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    adamw = optax.adamw(
        lambda step: schedule(step * LEARNERS * TOKENS),
        inner.beta1,
        inner.beta2,
        weight_decay=inner.weight_decay,
        mask=matrices,
    )
    state = adamw.init(params)

    @jax.jit
    def gradient_of(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        gradient = jax.grad(task.loss)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
        return jax.tree.map(lambda leaf: leaf * jnp.minimum(1, inner.clip_norm / norm), gradient), norm > inner.clip_norm

    @jax.jit
    def step(params: Any, mean: Any, state: Any) -> Any:
        updates, state = adamw.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    shares = [task.batches(share, LEARNERS, settings.seed, 0) for share in range(LEARNERS)]
    clipped = 0
    for _ in range(STEPS):
        gradients, cut = zip(*(gradient_of(params, next(share)) for share in shares), strict=True)
        clipped += sum(map(int, cut))
        mean = jax.tree.map(
            lambda *values: rounded(np.mean([rounded(v) for v in values], axis=0, dtype=np.float64)), *gradients
        )
        params, state = step(params, mean, state)
    assert 0 < clipped < LEARNERS * STEPS  # both kinds of gradients are in it
    return params


class Fragments:
    """All learners' pending deltas of a run's fragments, and the log's folds, without a network."""

    def __init__(self, settings: RunSettings, fragment_map: FragmentMap, island: Island) -> None:
        self.settings, self.map = settings, fragment_map
        self.replicas, self.deltas = [], []
        for fragment in fragment_map.fragments:
            theta, optimizer = island.read(fragment).to_host(), outer.optimizer(settings, fragment)
            momentum = np.zeros(optimizer.moments * fragment.size, np.float32)
            chain = Chain(fragment.index, 0, 0, bytes(32), 0, outer.state_hash(theta, momentum))
            self.replicas.append([Replica(chain, theta, momentum, optimizer).copy() for _ in range(2)])  # owner, reader
            self.deltas.append(
                [
                    Delta(f"learner-{i}", 1, settings.carry.overlap, False, theta, 0, chain.state_hash, gradients=True)
                    for i in range(LEARNERS)
                ]
            )

    def synchronise(self, step: int, islands: list[Island]) -> None:
        """All learners have taken a step: offers, a version of each fragment, and what learners make of it."""
        for fragment, (owner, reader), deltas in zip(self.map.fragments, self.replicas, self.deltas, strict=True):
            held = []
            for share, (own, island) in enumerate(zip(deltas, islands, strict=True)):
                counts = own.state
                counts.step(TOKENS, share, step)
                made = own.offer(island.snapshot(fragment).to_host(), counts.steps, counts.tokens, counts.data, step + 1, 16)
                held.append(RoundOffer(made.message(fragment.index, BODY), own.body(made)))
            merge = Merge(step + 1, tuple(held), closing=False, quorum_s=0.0, round_s=0.0)
            delta = accumulate(fragment, self.settings, held, {}, owner.theta).result()
            residual = np.zeros(fragment.size, np.float32)
            record, inline, _ = make_version(
                owner, residual, delta, merge, self.settings, bits=16, syncer="syncer", attempt=bytes(8), now_s=0.0
            )
            owner.chain.advance(record, bytes([step]) * 32, step)
            reader.fold(record, bytes([step]) * 32, step, codec.unpack([inline], 2 * fragment.size), in_place=False)
            assert [member.steps for member in record.members] == [1] * LEARNERS
            for own, island in zip(deltas, islands, strict=True):
                applied = own.apply(record, reader.theta)
                assert applied.reference is None
                island.write(fragment, applied.theta)


def test_learners_and_log_do_what_adamw_does_with_the_averaged_gradient() -> None:
    overrides = {"tokens": BUDGET, "learners": LEARNERS, "shards": 1, "fragments.count": 5, "seed": 4}
    settings = run_settings("data-parallel", overrides | {"inner.learning_rate": 0.03, "inner.clip_norm": 4.0})
    task = Curve()
    islands = [Island(task, settings) for _ in range(LEARNERS)]
    start = jax.tree.map(np.array, islands[0].params())
    specs = islands[0].tensors()
    run = Fragments(settings, build_map(specs, 5, settings.fragments.strategy), islands[0])
    shares = [task.batches(share, LEARNERS, settings.seed, 0) for share in range(LEARNERS)]

    for step in range(STEPS):
        for island, share in zip(islands, shares, strict=True):
            island.step(next(share), learning_rate(settings, Moment(step * LEARNERS * TOKENS, settings.tokens))).wait()
        run.synchronise(step, islands)

    expected = reference(settings, task, jax.tree.map(jnp.asarray, start))
    for one, other in itertools.pairwise(islands):
        for own, its in zip(jax.tree.leaves(one.params()), jax.tree.leaves(other.params()), strict=True):
            assert np.array_equal(own, its)
    # the rare gradient that is rounded to bfloat16 the other way moves its parameter by a 256th of a step; without rounding
    # the two are two thousandths apart
    for tensor, begun, own, its in zip(
        islands[0].tensors(), *(jax.tree.leaves(tree) for tree in (start, islands[0].params(), expected)), strict=True
    ):
        travelled = np.abs(np.asarray(its) - begun).max()
        assert travelled > 0.1, tensor
        np.testing.assert_allclose(own, its, atol=2e-4, err_msg=str(tensor))


def test_an_offer_is_the_gradient_bit_for_bit() -> None:
    # a gradient a million times smaller than the parameters: theta - (theta - g) would have other bits
    settings = run_settings("data-parallel", {"learners": 1, "shards": 1, "fragments.count": 1, "inner.clip_norm": 1e-5})
    task = Curve()
    island = Island(task, settings)
    [fragment] = build_map(island.tensors(), 1).fragments
    theta, batch = island.read(fragment).to_host(), next(task.batches(0, 1, 0, 0))

    gradient = jax.jit(jax.grad(task.loss))(island.params(), batch)
    clipped, _ = optax.clip_by_global_norm(settings.inner.clip_norm).update(gradient, optax.EmptyState())
    paths = [tensor.path for tensor in island.tensors()]
    by_path = {path: np.asarray(leaf) for path, leaf in zip(paths, jax.tree.leaves(clipped), strict=True)}
    expected = fragment.gather(by_path)
    assert np.linalg.norm(expected) == pytest.approx(1e-5)

    island.step(batch, 1.0).wait()
    np.testing.assert_array_equal(island.read(fragment).to_host(), theta)  # the step is taken in the fold
    held = island.snapshot(fragment).to_host()
    np.testing.assert_allclose(held, expected, rtol=1e-5, atol=1e-12)  # another compilation of the same
    delta = Delta("learner-0", 1, settings.carry.overlap, False, theta, 0, bytes(32), gradients=True)
    delta.state.step(TOKENS, 0, 0)
    made = delta.offer(held.copy(), 1, TOKENS, delta.state.data, 1, 16)
    sent = delta.body(made).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(sent, held.astype(ml_dtypes.bfloat16))
    through_theta = (theta - (theta - held)).astype(ml_dtypes.bfloat16)
    assert np.mean(through_theta[theta != 0] != sent[theta != 0]) > 0.5
