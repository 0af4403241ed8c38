"""How good a model is: no validation set, one, or several by name; metrics and values of the task's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.api.evaluation import Evaluation
from diloco_learner.jax.island import Island
from diloco_learner.task import Aux, check_members
from diloco_learner.task_api import evaluate_every_s

SETTINGS: RunSettings = run_settings(overrides={"seed": 3, "shards": 1, "fragments.count": 1})


class Mean:
    """Loss: the parameter times the mean of the batch."""

    tokens_per_batch = 2

    def init(self, key: jax.Array) -> Any:
        return {"x": jnp.float32(2)}

    def loss(self, params: Any, batch: Any) -> Any:
        return params["x"] * jnp.mean(batch)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        while True:
            yield np.ones(2, np.float32)


class Metric(Mean):
    def loss(self, params: Any, batch: Any) -> Any:
        return super().loss(params, batch), Aux({"largest": jnp.max(batch)})


def task_of(base: type[Mean] = Mean, **members: Any) -> Any:
    return type("Made", (base,), members)()


def held_out(*values: float) -> list[Any]:
    return [np.full(2, value, np.float32) for value in values]


def test_without_a_set_there_is_no_loss() -> None:
    island = Island(Mean(), SETTINGS)
    assert island.evaluation() == Evaluation(None, {})
    with pytest.raises(SettingsError, match=r"it has no validation\(\), so there is no validation loss"):
        island.evaluate()


def test_a_list_is_one_set() -> None:
    one = task_of(Metric, validation=lambda self: held_out(1, 2, 6))
    assert Island(one, SETTINGS).evaluation() == Evaluation(6.0, {"val/largest": 3.0})


def test_named_sets_count_alike_whatever_their_length() -> None:
    named = task_of(Metric, validation=lambda self: {"code": held_out(1, 2, 6), "prose": held_out(0.5)})
    expected = {"val_loss/code": 6.0, "val/code/largest": 3.0, "val_loss/prose": 1.0, "val/prose/largest": 0.5}
    assert Island(named, SETTINGS).evaluation() == Evaluation(3.5, expected)


def test_values_of_the_task_s_own_come_besides_and_its_key_is_the_run_s() -> None:
    def evaluate(self: Any, params: Any, *, key: jax.Array) -> Mapping[str, Any]:
        return {"twice": 2 * params["x"], "drawn": jax.random.uniform(key), "gone": math.nan}

    found = Island(task_of(evaluate=evaluate), SETTINGS).evaluation()
    assert found.loss is None
    assert found.finite_values() == {"twice": 4.0, "drawn": float(jax.random.uniform(jax.random.key(3))), "gone": None}


def returns(value: Any) -> Any:
    return lambda self, *arguments: value


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"validation": returns([])}, r"validation\(\) returned no batch; give at least one.* or leave validation\(\) out"),
        ({"validation": returns({})}, r"validation\(\) returned no set; give at least one batch"),
        ({"validation": returns({"code": []})}, r"validation\(\) returned no batch in set 'code'; .* \(.*, line \d+\)"),
        ({"validation": returns({"My code": [1]})}, r"returned a set named 'My code', expected 1 to 48 lower-case"),
        ({"validation": returns(iter([1]))}, r"returned a list_iterator, expected a list of batches"),
        ({"validation": returns(None)}, r"returned a NoneType, expected a list of batches"),
        ({"evaluate": returns(3.0)}, r"evaluate\(\) returned a float, expected numbers by name"),
        ({"evaluate": returns({"Exact match": 1})}, "named a value 'Exact match'"),
        ({"evaluate": returns({"match": "all"})}, r"evaluate\(\) returned match = 'all', expected a number"),
        ({"evaluate": returns({"match": np.ones(2)})}, r"returned match = array.*, expected a number"),
    ],
)
def test_what_is_wrong_is_found_before_a_step(members: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Island(task_of(**members), SETTINGS).check_evaluation()


@pytest.mark.parametrize("every_s", [0, -1.0, math.nan, math.inf, "often"])
def test_the_time_between_two_evaluations(every_s: Any) -> None:
    assert evaluate_every_s(Mean()) == 8.0
    assert evaluate_every_s(task_of(evaluate_every_s=60)) == 60
    with pytest.raises(SettingsError, match=r"evaluate_every_s = .*, expected seconds above 0"):
        check_members(task_of(evaluate_every_s=every_s), "it")
