"""State that is merged: it is in the island's fragments beside the parameters, and the loss sees what was written there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.jax.beginning import prepare_copies
from diloco_learner.jax.island import Island
from diloco_learner.jax_framework import JaxFramework
from diloco_learner.task import Aux

SMALL = {"shards": 1, "fragments.count": 2, "inner.optimizer": "adamw", "inner.clip_norm": 1e6}
SETTINGS: RunSettings = run_settings(overrides=SMALL)


class Centred:
    """Its loss is that of batches less a running mean; counts of steps are each learner's own."""

    tokens_per_batch = 2
    first = 0.0

    def init(self, key: jax.Array) -> Any:
        return {"w": jnp.ones(2)}

    def init_state(self, key: jax.Array) -> Any:
        return {"mean": jnp.full(2, self.first), "size": jnp.float32(1), "steps": jnp.int32(0)}

    def loss(self, params: Any, batch: Any, *, state: Any) -> Any:
        after = {
            "mean": (state["mean"] + jnp.mean(batch, 0)) / 2,
            "size": state["size"] + 1,
            "steps": state["steps"] + 1,
        }
        return jnp.mean((batch - state["mean"]) @ params["w"]), Aux(state=after)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        while True:
            yield np.array([[2, 4]], np.float32)

    def validation(self) -> Any:
        return [np.array([[2, 4]], np.float32)]


BATCH = np.array([[2, 4]], np.float32)


def values_of(island: Island) -> dict[str, list[float]]:
    return {name: values.reshape(-1).tolist() for name, values in island.state().items() if name.startswith("state/")}


@pytest.mark.parametrize("apart", [False, True])
def test_state_is_read_and_written_as_a_fragment(apart: bool) -> None:
    island = Island(Centred(), SETTINGS, apart=apart)
    others, state = island.fragments().fragments
    assert ([p.path for p in others.pieces], [p.path for p in state.pieces]) == (["w"], ["state/mean", "state/size"])
    island.step(BATCH, 0.0).wait()
    assert island.read(state).to_host().tolist() == island.snapshot(state).to_host().tolist() == [1, 2, 2]
    assert island.evaluation().loss == 3  # (2 - 1) + (4 - 2)
    island.write(state, np.array([2, 3, 8], np.float32))
    assert island.evaluation().loss == 1
    island.step(BATCH, 0.0).wait()
    assert values_of(island) == {"state/mean": [2, 3.5], "state/size": [9], "state/steps": [2]}
    island.write(state, np.array([4, 1.5, 1], np.float32), None, 0.5)  # apply.alpha: half of each
    assert values_of(island) == {"state/mean": [3, 2.5], "state/size": [5], "state/steps": [2]}
    assert island._step._cache_size() == (0 if apart else 1)


def test_what_others_need_is_compiled_without_a_change_and_a_rehearsal_keeps_what_was_written() -> None:
    island = Island(Centred(), SETTINGS)
    fragments = island.fragments()
    island.write(fragments.fragments[1], np.array([5, 6, 7], np.float32))
    island.prepare(fragments)
    prepare_copies(island)
    island.rehearse(BATCH)
    assert values_of(island) == {"state/mean": [5, 6], "state/size": [7], "state/steps": [0]}
    twin = island.twin()
    island.step(BATCH, 0.0).wait()
    assert twin.read(fragments.fragments[1]).to_host().tolist() == [5, 6, 7]


def test_learners_that_offer_gradients_offer_values_of_state() -> None:
    settings = run_settings("data-parallel", {"shards": 1, "fragments.count": 2})
    island = Island(Centred(), settings)
    others, state = island.fragments().fragments
    island.step(BATCH, 0.0).wait()
    assert island.snapshot(state).to_host().tolist() == [1, 2, 2]
    assert island.snapshot(others).to_host().tolist() == pytest.approx([2 / 20**0.5, 4 / 20**0.5])  # clipped to a norm of 1
    island.write(state, np.array([0, 0, 1], np.float32))
    assert island.snapshot(others).to_host().any(), "a version of state drops no gradient"


def test_a_state_that_begins_with_no_numbers_is_named() -> None:
    with pytest.raises(SettingsError, match=r"init_state\(\) returned 'state/mean' with NaN or infinity.*\(.*line"):
        JaxFramework("jax").check_values(Island(type("Made", (Centred,), {"first": float("nan")})(), SETTINGS))


def test_one_fragment_has_no_room_for_parameters_and_state() -> None:
    with pytest.raises(SettingsError, match=r"fragments.count = 1: merged state such as 'state/mean' .* set at least 2"):
        Island(Centred(), run_settings(overrides=SMALL | {"fragments.count": 1})).fragments()
