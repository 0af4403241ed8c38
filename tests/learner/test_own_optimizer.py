"""An optimizer of the task's own: any optax transformation, at the run's rate, whose state is kept like the built-in one's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.errors import RunError, SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.jax.island import Island

SETTINGS: RunSettings = run_settings(overrides={"shards": 1, "fragments.count": 1})
RATES = (0.5, 0.25, 0.125)


class Bowl:
    """Loss: half the squared distance from the batch, a number; the gradient is the distance."""

    tokens_per_batch = 1
    make: Any = None

    def init(self, key: jax.Array) -> Any:
        return {"a": jnp.float32([1, 2]), "b": {"c": jnp.float32([[3.0]])}}

    def loss(self, params: Any, batch: Any) -> Any:
        return sum((0.5 * jnp.sum((leaf - batch) ** 2) for leaf in jax.tree.leaves(params)), jnp.float32(0))

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        while True:
            yield np.float32(0)

    def optimizer(self, rate: optax.Schedule) -> Any:
        return type(self).make(rate)


def island_of(make: Any, settings: RunSettings = SETTINGS, *, apart: bool = False) -> Island:
    return Island(type("Made", (Bowl,), {"make": staticmethod(make)})(), settings, apart=apart)


def values(island: Island) -> list[float]:
    return [float(value) for leaf in jax.tree.leaves(island.params()) for value in np.ravel(leaf)]


@pytest.mark.parametrize("apart", [False, True])
def test_momentum_by_hand_at_the_run_s_rate(apart: bool) -> None:
    island = island_of(lambda rate: optax.sgd(rate, momentum=0.5), apart=apart)
    expected, velocity = np.arange(1.0, 4), np.zeros(3)
    for rate in RATES:
        velocity = expected + 0.5 * velocity
        expected = expected - rate * velocity
        island.step(np.float32(0), rate).wait()
        assert values(island) == pytest.approx(list(expected))


def test_the_state_has_names_of_the_task_s_own_tree_and_goes_on_to_the_bit() -> None:
    def make(rate: optax.Schedule) -> Any:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

    island, other = island_of(make), island_of(make)
    assert "optimizer/1/0/mu/b/c" in island.state()
    for rate in RATES:
        island.step(np.float32(7), rate).wait()
    other.load_state(island.state())
    for each in (island, other):
        each.step(np.float32(-3), 0.1).wait()
    assert values(island) == values(other)
    with pytest.raises(RunError, match=r"array 'optimizer/.*' is (missing|not in this model)"):
        island_of(optax.sgd).load_state(island.state())


def test_hyperparameters_and_parts_of_the_tree() -> None:
    """The rate may be a hyperparameter, and transformations may be chosen by path."""
    injected = island_of(lambda rate: optax.inject_hyperparams(optax.sgd)(learning_rate=rate))
    parts = island_of(
        lambda rate: optax.partition({"sgd": optax.sgd(rate), "none": optax.set_to_zero()}, {"a": "sgd", "b": "none"})
    )
    for island in (injected, parts):
        island.check(np.float32(0))
        island.step(np.float32(0), 0.5).wait()
    assert values(injected) == [0.5, 1.0, 1.5]
    assert values(parts) == [0.5, 1.0, 3.0]


def test_a_rehearsal_moves_no_parameter_also_where_the_optimizer_has_a_rate_of_its_own() -> None:
    Bowl.make = staticmethod(lambda rate: optax.sgd(0.5))
    island = Island(Bowl(), SETTINGS)
    assert island.rehearse(np.float32(0)) == 0.5 * (1 + 4 + 9)
    assert [leaf.tolist() for leaf in jax.tree.leaves(island.params())] == [[1, 2], [[3]]]
    island.step(np.float32(0), 0.0).wait()
    assert [leaf.tolist() for leaf in jax.tree.leaves(island.params())] == [[0.5, 1], [[1.5]]]


def test_a_step_compiles_once_and_one_that_is_not_finite_changes_nothing() -> None:
    island = island_of(lambda rate: optax.adam(rate))
    for target in (1.0, 2.0):
        island.step(np.float32(target), 0.1).wait()
    assert island._step._cache_size() == 1
    before = island.state()
    island.step(np.float32(np.nan), 0.1)
    for name, kept in island.state().items():
        np.testing.assert_array_equal(kept, before[name])


def growing(rate: optax.Schedule) -> Any:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {"seen": jnp.append(state["seen"], 1.0)}

    return optax.GradientTransformation(lambda params: {"seen": jnp.zeros(1)}, update)


def halved(rate: optax.Schedule) -> Any:
    return optax.stateless(lambda updates, params: {"a": updates["a"]})


def keyed(rate: optax.Schedule) -> Any:
    return optax.GradientTransformation(
        lambda params: {"key": jax.random.key(0)}, lambda updates, state, params=None: (updates, state)
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda rate: 3,
            r"optimizer\(\) returned a int, expected an optax transformation \(.*test_own_optimizer\.py, line \d+\)",
        ),
        (growing, r"its state has seen as float32\[2\], expected float32\[1\], as before the step"),
        (halved, r"its updates has b/c as nothing, expected float32\[1, 1\]"),
        (keyed, r"its state has key as key<fry>, which cannot be saved: .* jax\.random\.key_data"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        island_of(make).rehearse(np.float32(0))


def test_an_outer_adamw_has_no_other_beside_it() -> None:
    with pytest.raises(SettingsError, match=r"task: optimizer\(\) with outer\.optimizer = adamw"):
        island_of(optax.sgd, run_settings("data-parallel"))
