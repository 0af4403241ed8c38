"""Weights from a file: put into a model whatever their precision, and refused by name where they are another model's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.flax import save_file as save_jax
from safetensors.numpy import save_file
from tests.made.object_stores import memory_store, use

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco_learner.jax.island import Island
from diloco_learner.run import weights


class Model:
    """A matrix that fragments cut by rows, a vector and a number."""

    tokens_per_batch = 1

    def init(self, key: jax.Array) -> Any:
        return {"a": {"matrix": jnp.zeros((4, 3))}, "list": [jnp.zeros(5), jnp.float32(0)]}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(params)), jnp.float32(0))

    def batches(self, share: int, shares: int, seed: int, start: int) -> Any:
        raise NotImplementedError

    def validation(self) -> Any:
        raise NotImplementedError

    def is_embedding(self, path: str) -> bool:
        return False


Tensors = dict[str, NDArray[Any]]


def values(dtype: Any = np.float32) -> Tensors:
    """Numbers that every precision has exactly."""
    return {
        "a/matrix": np.arange(12, dtype=dtype).reshape(4, 3) / 4,
        "list/0": np.array([-1, 2, -4, 8, 0.5], dtype),
        "list/1": np.asarray(-7, dtype),
    }


SETTINGS = run_settings(overrides={"fragments.count": 3, "inner.optimizer": "adamw"})


@pytest.fixture
def island() -> Island:
    return Island(Model(), SETTINGS)


def put(path: Path, island: Island, names: Path | None = None) -> Mapping[str, Any]:
    weights.put(path, island, island.fragments(), names)
    found: Mapping[str, Any] = island.params()
    return found


def test_a_run_begins_with_the_weights_of_a_place(island: Island, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    use(monkeypatch, store)
    save_file(values(), tmp_path / "model.safetensors")
    store.send([("model/model.safetensors", tmp_path / "model.safetensors")])
    store.put("model/pytorch_model.bin", b"the same in another format")
    for place in ("s3://bucket/model", "s3://bucket/model/model.safetensors"):
        weights.begin(place, island, island.fragments(), None, tmp_path / "cache")
        np.testing.assert_array_equal(island.params()["a"]["matrix"], values()["a/matrix"])
    assert not [*(tmp_path / "cache").rglob("*.bin")]
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    store.send([("other.safetensors", tmp_path / "model.safetensors")])
    with pytest.raises(
        SettingsError, match=r"^init = s3://bucket/other.safetensors, here /.*/other.safetensors: it lacks tensor"
    ):
        weights.begin("s3://bucket/other.safetensors", island, island.fragments(), None, tmp_path / "cache")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, jnp.bfloat16])
def test_every_precision_is_read(dtype: Any, island: Island, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    if dtype is jnp.bfloat16:
        save_jax({name: jnp.asarray(value, jnp.bfloat16) for name, value in values().items()}, path)
    else:
        save_file(values(dtype), path)
    check_values(put(path, island))


def check_values(params: Mapping[str, Any]) -> None:
    assert np.array_equal(params["a"]["matrix"], values()["a/matrix"])
    assert np.array_equal(params["list"][0], values()["list/0"])
    assert float(params["list"][1]) == -7.0


def test_a_names_map_says_where_tensors_lie_in_a_file_of_others(island: Island, tmp_path: Path) -> None:
    tensors = values()
    others = {"kernel": np.ascontiguousarray(tensors["a/matrix"].T), "scale": tensors["list/1"]}
    others |= {"low": tensors["list/0"][:2], "high": tensors["list/0"][2:]}
    save_file(others, tmp_path / "w")
    names = {"a/matrix": {"transposed": "kernel"}, "list/1": "scale", "list/0": {"rows": {"low": 2, "high": 3}}}
    (tmp_path / "names.json").write_text(json.dumps(names))
    check_values(put(tmp_path / "w", island, tmp_path / "names.json"))
    with pytest.raises(SettingsError, match="it lacks tensor 'a/matrix'"):
        put(tmp_path / "w", island)


class Named(Model):
    """A model that says how others name its tensors."""

    def names(self) -> Any:
        return {"list/0": "bias", "a/matrix": {"stacked": ["0", "1", "2", "3"]}}


def test_a_folder_is_read_by_the_tasks_own_names_and_its_index(tmp_path: Path) -> None:
    island, tensors = Island(Named(), SETTINGS), values()
    save_file({"bias": tensors["list/0"], "1": tensors["a/matrix"][1]}, tmp_path / "one.safetensors")
    rest = {"list/1": tensors["list/1"]} | {str(row): tensors["a/matrix"][row] for row in (0, 2, 3)}
    save_file(rest, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(SettingsError, match=r"init = .*: cannot be read as a safetensors file: .*model\.safetensors"):
        put(tmp_path, island)
    index.write_text(json.dumps({"weight_map": {"bias": "one.safetensors", "0": "two.safetensors"}}))
    check_values(put(tmp_path, island))
    for odd in ('{"weight_map": {"bias": "../one.safetensors"}}', '{"weight_map": 3}', "[]", "{"):
        index.write_text(odd)
        with pytest.raises(SettingsError, match=r"cannot be read as a safetensors file: "):
            put(tmp_path, island)


def test_names_that_are_no_names_are_refused_with_their_line(tmp_path: Path) -> None:
    task = Named()
    task.names = lambda: ["bias"]  # type: ignore[method-assign]
    with pytest.raises(
        SettingsError, match=r"names\(\) did not return a mapping that JSON can store: it is a list \(.*test_weights\.py, "
    ):
        put(tmp_path, Island(task, SETTINGS))


def changed(**changes: Any) -> Tensors:
    return {name: value for name, value in (values() | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (changed(**{"list/0": None}), r"it lacks tensor 'list/0' of shape \(5,\) \(did you mean 'list/1'\?\)"),
        (
            changed(**{"a/matrices": np.zeros(2, np.float32)}),
            r"the model has no tensor 'a/matrices' \(did you mean 'a/matrix'\?\)",
        ),
        (changed(**{"a/matrix": np.zeros((3, 4), np.float32)}), r"'a/matrix' has the shape \(3, 4\), the model's has \(4, 3\)"),
        (changed(**{"list/0": np.zeros(5, np.int32)}), "'list/0' is I32, expected one of F64, F32, F16, BF16"),
        (changed(**{"a/matrix": np.full((4, 3), np.nan, np.float32)}), "tensor 'a/matrix' holds NaN, infinity"),
        (
            changed(**{"list/1": np.asarray(1e300)}),
            "tensor 'list/1' holds NaN, infinity, or a value beyond the range of float32",
        ),
    ],
)
def test_another_models_weights_are_refused_by_name(tensors: Tensors, said: str, island: Island, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "w")
    with pytest.raises(SettingsError, match=f"init = .*w: .*{said}"):
        put(tmp_path / "w", island)


def test_the_line_that_gives_a_tensor_its_name_is_named(island: Island, tmp_path: Path) -> None:
    names = tmp_path / "names.json"
    names.write_text('{\n "list/0": "bias",\n "a/matrix": {"transposed": "weight"}\n}')
    theirs = {"bias": values()["list/0"], "list/1": values()["list/1"], "weight": values()["a/matrix"].T.copy()}
    for odd, line, said in (
        ({"weight": None}, 3, r"it lacks tensor 'weight' of shape \(3, 4\)"),
        ({"bias": np.zeros(4, np.float32)}, 2, r"tensor 'bias' has the shape \(4,\), the model's has \(5,\)"),
        ({"bias": np.zeros(5, np.int32)}, 2, "tensor 'bias' is I32"),
        ({"weight": np.full((3, 4), np.inf, np.float32)}, 3, "tensor 'weight' holds NaN"),
    ):
        save_file({name: value for name, value in (theirs | odd).items() if value is not None}, tmp_path / "w")
        path = {2: "list/0", 3: "a/matrix"}[line]
        with pytest.raises(
            SettingsError, match=rf"init = .*w: {said}.*; names of .*names\.json, line {line}: .* model's '{path}'"
        ):
            put(tmp_path / "w", island, names)
    save_file(theirs, tmp_path / "w")
    check_values(put(tmp_path / "w", island, names))


def test_no_file_or_another_one_is_refused(island: Island, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read as a safetensors file: No such file"):
        put(tmp_path / "none", island)
    (tmp_path / "text").write_text("weights")
    with pytest.raises(SettingsError, match="cannot be read as a safetensors file"):
        put(tmp_path / "text", island)
    save_file(values(), tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-8])
    with pytest.raises(SettingsError, match="cannot be read as a safetensors file"):
        put(tmp_path / "cut", island)


class WithHead(Model):
    """An embedding, and a head that may be the embedding itself."""

    def __init__(self, *, tied: bool) -> None:
        self.tied = tied

    def init(self, key: jax.Array) -> Any:
        params = {"embed": jnp.zeros((2500, 3)), "body": jnp.zeros((3, 3))}
        return params if self.tied else params | {"head": jnp.zeros((2500, 3))}

    def is_embedding(self, path: str) -> bool:
        return path == "embed"

    def names(self) -> Any:
        return {"embed": "embed.weight"} | ({} if self.tied else {"head": "lm_head.weight"})


def folder(path: Path, tie: bool | None, head: NDArray[np.float32] | None, **config: Any) -> Path:
    """A folder as Hugging Face's libraries write it."""
    path.mkdir()
    tensors = {"embed.weight": np.arange(7500, dtype=np.float32).reshape(2500, 3), "body": np.ones((3, 3), np.float32)}
    save_file(tensors if head is None else tensors | {"lm_head.weight": head}, path / "model.safetensors")
    if tie is not None:
        (path / "config.json").write_text(json.dumps({"tie_word_embeddings": tie} | config))
    return path


def test_a_folder_whose_head_would_be_made_at_random_is_refused(tmp_path: Path) -> None:
    island = Island(WithHead(tied=True), SETTINGS)
    with pytest.raises(SettingsError, match=r"a: config.json: tie_word_embeddings is false, .* embedding 'embed.weight'"):
        put(folder(tmp_path / "a", False, None, architectures=["LlamaForCausalLM"]), island)
    for name, tie in (("b", True), ("c", None)):
        assert put(folder(tmp_path / name, tie, None), island)["embed"][2499, 2] == 7499


def test_a_folder_of_a_model_that_may_have_no_head_is_read_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    island = Island(WithHead(tied=True), SETTINGS)
    assert put(folder(tmp_path / "a", False, None), island)["embed"][2499, 2] == 7499
    assert "a: config.json: tie_word_embeddings is false, architectures names no model" in capsys.readouterr().err
    put(folder(tmp_path / "b", False, None, architectures=["LlamaModel"]), island)
    assert not capsys.readouterr().err


def test_a_head_of_other_values_than_the_embedding_that_stands_for_it_is_refused(tmp_path: Path) -> None:
    island = Island(WithHead(tied=False), SETTINGS)
    head = np.arange(7500, dtype=np.float32).reshape(2500, 3)
    assert put(folder(tmp_path / "a", True, head), island)["head"][2499, 2] == 7499
    head[2400, 1] += 1
    with pytest.raises(SettingsError, match=r"head 'lm_head.weight' has other values than the embedding 'embed.weight'"):
        put(folder(tmp_path / "b", True, head), island)
    for name, tie in (("c", False), ("d", None)):
        assert put(folder(tmp_path / name, tie, head), island)["head"][2400, 1] == head[2400, 1]


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", None, None)
    (path / "config.json").write_text("[")
    with pytest.raises(SettingsError, match=r"a: config.json: cannot be read"):
        put(path, Island(WithHead(tied=True), SETTINGS))
