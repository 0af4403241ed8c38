"""The learning rate over the token budget, and AdamW by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.learner.schedule import Moment, learning_rate
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.jax.inner import optimizer


def inner_settings(**inner: float | str) -> RunSettings:
    """A budget of 10 000 tokens."""
    return run_settings(overrides={"tokens": 10_000} | {f"inner.{name}": value for name, value in inner.items()})


SETTINGS = inner_settings(learning_rate=0.01, final_fraction=0.1, warmup_fraction=0.05)


def at(tokens: int, warming_steps: int | None = None) -> Moment:
    return Moment(tokens, 10_000, warming_steps)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, 0.0),
        (250, 0.005),  # half of the warm-up
        (500, 0.01),  # its end
        (5250, 0.0055),  # half of the cosine: between peak and a tenth of it
        (10_000, 0.001),
        (20_000, 0.001),  # beyond the budget
    ],
)
def test_learning_rate(tokens: int, expected: float) -> None:
    assert learning_rate(SETTINGS, at(tokens)) == pytest.approx(expected)


def test_no_warm_up() -> None:
    assert learning_rate(inner_settings(learning_rate=0.01, warmup_fraction=0), at(0)) == pytest.approx(0.01)


@given(st.integers(500, 11_000), st.integers(500, 11_000))
def test_falls_after_the_warm_up(one: int, other: int) -> None:
    earlier, later = sorted((one, other))
    assert 0.001 * 0.999999 <= learning_rate(SETTINGS, at(later)) <= learning_rate(SETTINGS, at(earlier))


def test_a_fresh_optimizer_in_mid_run_warms_up_by_steps() -> None:
    warming = inner_settings(learning_rate=0.01, restart_warmup_steps=4)
    rates = [learning_rate(warming, at(5250, steps)) for steps in range(6)]
    assert rates == pytest.approx([0.0055 * share for share in (0.2, 0.4, 0.6, 0.8, 1.0, 1.0)])
    assert learning_rate(warming, at(5250)) == pytest.approx(0.0055)
    assert learning_rate(inner_settings(learning_rate=0.01, restart_warmup_steps=0), at(5250, 0)) == pytest.approx(0.0055)


def test_first_update_by_hand() -> None:
    # after bias correction the first Adam update is g / (|g| + eps), whatever g's scale; the matrix decays, the vector not
    inner = optimizer(inner_settings(optimizer="adamw", weight_decay=0.5, clip_norm=1e-3), [(), ()])
    params = {"matrix": jnp.full((2, 2), 4.0), "vector": jnp.full(2, 4.0)}
    gradients = {"matrix": jnp.array([[30.0, -30.0], [30.0, 30.0]]), "vector": jnp.array([30.0, -30.0])}
    updates, _ = inner.update(gradients, inner.init(params), params)
    np.testing.assert_allclose(updates["matrix"], [[3.0, 1.0], [3.0, 3.0]], rtol=1e-4)
    np.testing.assert_allclose(updates["vector"], [1.0, -1.0], rtol=1e-4)


def test_for_an_outer_adamw_the_step_is_the_gradient_cut_to_the_norm() -> None:
    settings = run_settings("data-parallel", {"inner.clip_norm": 5.0})
    inner = optimizer(settings, [(2,), ()])
    params = {"matrix": jnp.full((1, 2), 4.0), "vector": jnp.full(1, 4.0)}
    state = inner.init(params)
    assert jax.tree.leaves(state) == []
    # of norm 5: as it is, without decay; of norm 10: half of it
    gradient = {"matrix": jnp.array([[3.0, 0.0]]), "vector": jnp.array([-4.0])}
    for factor in (1, 2):
        updates, state = inner.update(jax.tree.map(lambda leaf: factor * leaf, gradient), state, params)  # noqa: B023
        np.testing.assert_allclose(updates["matrix"], [[3.0, 0.0]], rtol=1e-6)
        np.testing.assert_allclose(updates["vector"], [-4.0], rtol=1e-6)
    assert [learning_rate(settings, at(tokens, steps)) for tokens in (0, 10**6) for steps in (None, 0)] == [1.0] * 4


def orthogonalised(singular: list[float]) -> list[float]:
    """Newton-Schulz in five steps, by its polynomial on the singular values of a matrix of Frobenius norm 1 (Jordan 2024)."""
    values = np.array(singular) / np.linalg.norm(singular)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return [float(value) for value in values]


def test_muon_treats_each_fused_matrix_by_itself_and_leaves_the_rest_to_adamw() -> None:
    # two diagonal 2 x 2 matrices in one tensor: singular values 3, 4 and 1, 1; an update's entries are 0.2 sqrt(2) times theirs
    inner = optimizer(inner_settings(optimizer="muon", weight_decay=0.5, clip_norm=1e6), [(2, 2), (), ()])
    params = [jnp.full((4, 2), 4.0), jnp.full((2, 2), 4.0), jnp.full(2, 4.0)]
    gradients = [
        jnp.array([[3.0, 0.0], [0.0, 4.0], [1.0, 0.0], [0.0, -1.0]]),
        jnp.array([[30.0, -30.0], [30.0, 30.0]]),
        jnp.array([30.0, -30.0]),
    ]
    (fused, table, vector), state = jax.jit(inner.update)(gradients, inner.init(params), params)
    first, second = orthogonalised([3.0, 4.0]), orthogonalised([1.0, 1.0])
    factor, decay = 0.2 * 2**0.5, 0.5 * 4.0
    expected = [[factor * first[0], 0], [0, factor * first[1]], [factor * second[0], 0], [0, -factor * second[1]]]
    np.testing.assert_allclose(fused, np.array(expected) + decay, rtol=2e-3)
    np.testing.assert_allclose(table, np.array([[1.0, -1.0], [1.0, 1.0]]) + decay, rtol=1e-4)
    np.testing.assert_allclose(vector, [1.0, -1.0], rtol=1e-4)
    # half of AdamW's state for a matrix: one moment for eight entries, two for the six others
    assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == 8 + 2 * 6 + 3
