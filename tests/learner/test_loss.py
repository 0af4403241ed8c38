"""The loss of a task: its random key, training and validation, its metrics, and that a loss of two arguments is as ever."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.core.learner.schedule import Moment, learning_rate
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.jax.inner import optimizer
from diloco_learner.jax.island import Island
from diloco_learner.replay import Redo
from diloco_learner.task import Aux, GptTask, load_task
from diloco_learner.tensors import tensor_of

SETTINGS: RunSettings = run_settings(
    overrides={"seed": 7, "inner.optimizer": "adamw", "inner.weight_decay": 0.0, "shards": 1, "fragments.count": 1}
)


class Noisy:
    """Training adds noise to each row; validation, and the metric ``clean``, have none."""

    tokens_per_batch = 4

    def init(self, key: jax.Array) -> Any:
        return {"weight": jnp.ones(3)}

    def loss(self, params: Any, batch: Any, *, key: jax.Array, train: bool) -> Any:
        clean = batch @ params["weight"]
        drawn = jax.random.uniform(key, clean.shape)
        rows = clean + drawn if train else clean
        return jnp.mean(rows**2), Aux({"clean": jnp.mean(clean), "drawn": jnp.mean(drawn), "positive": jnp.mean(clean > 0)})

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        for index in itertools.count(start):
            yield np.random.default_rng((share, index)).normal(size=(4, 3)).astype(np.float32)

    def validation(self) -> list[Any]:
        return [np.eye(4, 3, dtype=np.float32)]


def key_of(share: int, index: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(7), share), index)


@pytest.mark.parametrize("apart", [False, True])
def test_a_batch_s_key_is_made_of_seed_share_and_index(apart: bool) -> None:
    island = Island(Noisy(), SETTINGS, apart=apart)
    batch = next(Noisy().batches(2, 4, 7, 5))
    for share, index in ((2, 5), (5, 2), (2, 5), (4_000_000_000, 1)):
        clean = batch @ np.asarray(island.params()["weight"])
        drawn = np.asarray(jax.random.uniform(key_of(share, index), (4,)))
        output = island.step(batch, 0.0, (share, index))
        assert output.wait() == pytest.approx(np.mean((clean + drawn) ** 2), rel=1e-5)
        expected = {"clean": np.mean(clean), "drawn": np.mean(drawn), "positive": np.mean(clean > 0)}
        assert output.metric_values() == pytest.approx(expected, rel=1e-5)


def test_a_redone_step_has_the_trainer_s_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_learner.replay.load_task", lambda settings, data: Noisy())
    redo, island = Redo(SETTINGS, None, None, apart=False), Island(Noisy(), SETTINGS)
    for share, index in ((1, 3), (1, 4), (0, 0)):
        at = Moment(50_000 * (index + 1), SETTINGS.tokens)
        redo.step(share, index, at)
        island.step(next(Noisy().batches(share, 4, 7, index)), learning_rate(SETTINGS, at), (share, index)).wait()
    for name, values in island.state().items():
        np.testing.assert_array_equal(redo.state()[name], values)


def test_validation_is_without_noise_and_the_same_each_time() -> None:
    island = Island(Noisy(), SETTINGS)
    assert island.evaluate() == pytest.approx(3 / 4)  # three rows of one, and one of zeros
    assert island.evaluate() == island.evaluate()
    metrics = island._batch_evaluation(Noisy().validation()[0]).metrics
    drawn = np.mean(np.asarray(jax.random.uniform(jax.random.key(7), (4,))))
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {"clean": 0.75, "drawn": drawn, "positive": 0.75}
    )


def test_a_step_that_is_not_finite_changes_nothing_and_metrics_say_what_was_seen() -> None:
    island = Island(Noisy(), SETTINGS)
    before = island.state()
    output = island.step(np.full((4, 3), np.inf, np.float32), 0.1, (0, 0))
    assert math.isnan(output.wait())
    assert output.metric_values()["positive"] == 1
    for name, values in island.state().items():
        np.testing.assert_array_equal(values, before[name])


def small(text: Path, **inner: str) -> tuple[RunSettings, GptTask]:
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 8, "batch": 4}
    overrides = {f"task.{name}": value for name, value in shape.items()} | {
        f"inner.{name}": value for name, value in inner.items()
    }
    settings = run_settings(overrides=overrides)
    text.write_bytes(b"for i in range(10):\n    print(i)\n" * 100)
    task = load_task(settings.task, str(text))
    assert isinstance(task, GptTask)
    return settings, task


@pytest.mark.parametrize("kind", [pytest.param("muon", marks=pytest.mark.slow), "adamw"])
def test_the_built_in_task_takes_the_steps_that_it_took_before_there_were_keywords(tmp_path: Path, kind: str) -> None:
    """The step of that time is written out here. Bits are compared."""
    settings, task = small(tmp_path / "text.txt", optimizer=kind)
    island = Island(task, settings)
    leaves, structure = jax.tree.flatten(task.init(jax.random.key(settings.seed)))
    inner = optimizer(settings, [tensor_of(task, each.path, each.shape).matrices(each.shape) for each in island.tensors()])

    @jax.jit
    def step(leaves: Any, state: Any, batch: Any, rate: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda values: task.loss(jax.tree.unflatten(structure, values), batch))(leaves)
        norm = jnp.sqrt(sum(jnp.tensordot(gradient, gradient, gradient.ndim) for gradient in gradients))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, moved = inner.update(gradients, state, leaves)
        stepped = [leaf - rate * update for leaf, update in zip(leaves, updates, strict=True)]
        chosen = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (stepped, moved), (leaves, state))
        return chosen, loss

    state = inner.init(leaves)
    for batch, _ in zip(task.batches(0, 4, 0, 0), range(3), strict=False):
        (leaves, state), loss = step(leaves, state, batch, np.float32(0.01))
        assert island.step(batch, 0.01).wait() == float(loss)
    for each, leaf in zip(island.tensors(), leaves, strict=True):
        np.testing.assert_array_equal(island.state()[f"params/{each.path}"], np.asarray(leaf))


def test_a_loss_of_two_arguments_has_no_argument_more_in_its_program(tmp_path: Path) -> None:
    settings, task = small(tmp_path / "text.txt")
    island, batch = Island(task, settings), next(task.batches(0, 4, 0, 0))
    arguments = len(jax.tree.leaves(island.trace(batch)[0].in_avals))
    assert arguments == len(island.arrays()) + 2  # batch and rate
    noisy = Island(Noisy(), SETTINGS)
    traced = noisy.trace(next(Noisy().batches(0, 4, 0, 0)))[0]
    assert len(jax.tree.leaves(traced.in_avals)) == len(noisy.arrays()) + 3
