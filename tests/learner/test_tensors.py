"""What a task says of its tensors, and where it leads: the log has output units as rows, and the task sees its own shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from diloco.core.tensors.arrangement import Arrangement
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.jax.island import Island
from diloco_learner.jax.mesh import stored_partition
from diloco_learner.jax.tree import Described
from diloco_learner.run import weights
from diloco_learner.task import check_members
from diloco_learner.tensors import Tensor, tensor_of

SETTINGS: RunSettings = run_settings(overrides={"fragments.count": 3, "inner.optimizer": "muon"})
KERNEL = np.arange(12, dtype=np.float32).reshape(3, 4) / 8  # (in, out)
CONVOLUTION = np.arange(24, dtype=np.float32).reshape(2, 2, 3, 2) / 16  # (height, width, in, out)


class Line:
    """A kernel of shape (in, out), one of a convolution, and a stack of positions that is one vector."""

    tokens_per_batch = 2

    def init(self, key: jax.Array) -> Any:
        return {"kernel": jnp.asarray(KERNEL), "conv": jnp.asarray(CONVOLUTION), "at": jnp.ones((2, 3))}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        assert {name: leaf.shape for name, leaf in params.items()} == {"kernel": (3, 4), "conv": (2, 2, 3, 2), "at": (2, 3)}
        image = jax.lax.conv_general_dilated(
            batch["image"], params["conv"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean((batch["x"] @ params["kernel"]) ** 2) + jnp.mean(image**2) + jnp.mean(params["at"] ** 2)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        while True:
            rng = np.random.default_rng(start)
            x, image = rng.normal(size=(2, 3)), rng.normal(size=(2, 4, 4, 3))
            yield {"x": x.astype(np.float32), "image": image.astype(np.float32)}
            start += 1

    def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
        return Tensor(kind="vector") if path == "at" else Tensor(kind="matrix", output_axis=-1)


class Turned:
    """The same model with weights as the log has them, and nothing but a number said of one."""

    tokens_per_batch, batches = Line.tokens_per_batch, Line.batches

    def init(self, key: jax.Array) -> Any:
        return {"kernel": jnp.asarray(KERNEL.T), "conv": jnp.asarray(CONVOLUTION.reshape(12, 2).T), "at": jnp.ones((1, 6))}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        kernel, conv = params["kernel"].T, params["conv"].T.reshape(2, 2, 3, 2)
        return Line().loss({"kernel": kernel, "conv": conv, "at": params["at"].reshape(2, 3)}, batch)

    def matrices(self, path: str) -> int:
        return 0 if path == "at" else 1


def test_the_log_has_one_row_for_each_output_unit() -> None:
    island = Island(Line(), SETTINGS)
    stored = {tensor.path: tensor.shape for tensor in island.tensors()}
    assert stored == {"kernel": (4, 3), "conv": (2, 12), "at": (1, 6)}
    arrays = island.state()
    np.testing.assert_array_equal(arrays["params/kernel"], KERNEL.T)
    for unit in range(2):
        np.testing.assert_array_equal(arrays["params/conv"][unit], CONVOLUTION[..., unit].reshape(-1))
    fragments = island.fragments().fragments
    groups = sum(fragment.segments("row").size - 1 for fragment in fragments)
    assert groups == 4 + 2 + 1
    params = island.params()
    np.testing.assert_array_equal(params["kernel"], KERNEL)
    np.testing.assert_array_equal(params["conv"], CONVOLUTION)


@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_it_trains_as_the_same_model_that_has_output_units_first(kind: str) -> None:
    settings = run_settings(overrides={"inner.optimizer": kind, "fragments.count": 3})
    one, other = Island(Line(), settings), Island(Turned(), settings)
    for batch, _ in zip(Line().batches(0, 1, 0, 0), range(3), strict=False):
        losses = [island.step(batch, 0.05).wait() for island in (one, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, values in one.state().items():
        if name.startswith("params/"):
            np.testing.assert_allclose(values, other.state()[name], atol=2e-5, err_msg=name)


def test_an_optimizer_of_the_task_s_own_sees_its_shapes() -> None:
    seen: list[dict[str, tuple[int, ...]]] = []

    class Own(Line):
        def optimizer(self, rate: optax.Schedule) -> Any:
            def update(updates: Any, state: Any, params: Any = None) -> Any:
                seen.append({name: leaf.shape for name, leaf in params.items()})
                return jax.tree.map(lambda leaf: jnp.full_like(leaf, -1).at[..., 0].set(-2), updates), state

            return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    island = Island(Own(), SETTINGS)
    island.step(next(Line().batches(0, 1, 0, 0)), 1.0).wait()
    assert seen[0] == {"kernel": (3, 4), "conv": (2, 2, 3, 2), "at": (2, 3)}
    expected = KERNEL - 1
    expected[:, 0] -= 1
    np.testing.assert_array_equal(island.params()["kernel"], expected)


def test_a_file_of_weights_has_the_model_s_shapes(tmp_path: Path) -> None:
    island, file = Island(Line(), SETTINGS), tmp_path / "w.safetensors"
    values = {"kernel": 2 * KERNEL, "conv": CONVOLUTION + 1, "at": np.full((2, 3), 5, np.float32)}
    save_file(values, file)
    weights.put(file, island, island.fragments())
    for name, leaf in island.params().items():
        np.testing.assert_array_equal(leaf, values[name])


def test_fused_matrices_of_unequal_sizes_are_muon_s_each_by_itself() -> None:
    class Fused(Line):
        def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
            return Tensor(kind="matrix", output_axis=-1, parts=(1, 3)) if path == "kernel" else Tensor(kind="vector")

    island = Island(Fused(), SETTINGS)
    before = island.state()["params/kernel"]
    island.step(next(Line().batches(0, 1, 0, 0)), 1.0).wait()
    moved = island.state()["params/kernel"] * 1.0 - before + SETTINGS.inner.weight_decay * before
    # the one row is a matrix: its update has the length 0.2 * sqrt(3), give or take what five Newton-Schulz steps leave
    assert np.linalg.norm(moved[0]) == pytest.approx(0.2 * 3**0.5, rel=0.35)


@pytest.mark.parametrize(
    ("said", "shape", "message"),
    [
        ("matrix", (3, 4), r"tensor\('w', \(3, 4\)\) is 'matrix', expected a Tensor\(kind=...\) \(.*line"),
        (Tensor(kind="vektor"), (3, 4), "has the kind 'vektor'.*vector.*the kinds are matrix, embedding"),  # type: ignore[arg-type]
        (Tensor(kind="matrix"), (3,), "is a matrix, which has two axes or more: call it a 'vector'"),
        (Tensor(kind="matrix", output_axis=2), (3, 4), "has output_axis = 2, expected one of its 2 axes"),
        (
            Tensor(kind="matrix", output_axis=(0, -1)),
            (3, 4),
            "expected each axis at most once, and at least one other axis as input",
        ),
        (Tensor(kind="matrix", parts=(1, 1)), (3, 4), r"has parts = \(1, 1\), expected numbers that add up to the 3"),
        (Tensor(kind="matrix", output_axis=-1, stacked=True), (4, 3, 3), "is stacked, .*: name the axis of layers, 0, before"),
        (Tensor(kind="vector", stacked=True), (), "is stacked, but has no axes: a stack has the axis of its layers"),
        (Tensor(kind="embedding", parts=(1, 2)), (3, 4), "has parts, which a embedding must not have"),
    ],
)
def test_what_cannot_be_is_named_with_the_tensor_and_the_line(said: Any, shape: tuple[int, ...], message: str) -> None:
    class Says:
        def tensor(self, path: str, shape: tuple[int, ...]) -> Any:
            return said

    with pytest.raises(SettingsError, match=message):
        tensor_of(Says(), "w", shape)


def test_two_ways_to_say_it_are_refused() -> None:
    task = Line()
    task.is_embedding = lambda path: False  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match=r"has tensor\(\) and is_embedding\(\), .*remove is_embedding\(\)"):
        check_members(task, "task")


class Scanned:
    """Four layers of 3 in and 3 out, stacked, as ``jax.lax.scan`` takes them."""

    tokens_per_batch, batches = Line.tokens_per_batch, Line.batches

    def init(self, key: jax.Array) -> Any:
        return {"embed": jnp.ones((2, 3)), "kernel": jax.random.normal(key, (4, 3, 3)), "scale": jnp.ones((4, 3))}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ one["kernel"]) * one["scale"], None

        layers = {name: params[name] for name in ("kernel", "scale")}
        return jnp.mean(jax.lax.scan(layer, batch["x"] @ params["embed"].T @ params["embed"], layers)[0] ** 2)

    def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
        if path == "embed":
            return Tensor(kind="embedding")
        return (
            Tensor(kind="matrix", output_axis=(0, -1), stacked=True)
            if path == "kernel"
            else Tensor(kind="vector", stacked=True)
        )


def test_stacked_layers_are_dealt_by_their_numbers() -> None:
    island = Island(Scanned(), run_settings(overrides={"fragments.strategy": "layers", "fragments.count": 3}))
    fragments = island.fragments().fragments
    # the kernel's rows in the log: 3 output units a layer
    assert [[(piece.path, piece.row_start, piece.row_stop) for piece in fragment.pieces] for fragment in fragments] == [
        [("embed", 0, 2)],
        [("kernel", 0, 3), ("kernel", 6, 9), ("scale", 0, 1), ("scale", 2, 3)],
        [("kernel", 3, 6), ("kernel", 9, 12), ("scale", 1, 2), ("scale", 3, 4)],
    ]
    before = {name: np.array(leaf) for name, leaf in island.params().items()}
    island.write(fragments[2], np.zeros(fragments[2].size, np.float32))
    for name in ("kernel", "scale"):
        after = np.asarray(island.params()[name])
        assert not after[1::2].any()
        np.testing.assert_array_equal(after[::2], before[name][::2])


def test_members_of_an_earlier_version_say_the_same() -> None:
    class Earlier:
        def is_embedding(self, path: str) -> bool:
            return path == "table"

        def matrices(self, path: str) -> int:
            return {"qkv": 3, "head": 0}.get(path, 1)

        def partition(self, path: str, shape: tuple[int, ...]) -> Any:
            return P("fsdp") if path == "qkv" else None

    said = {path: tensor_of(Earlier(), path, (6, 4)) for path in ("table", "qkv", "head", "w")}
    assert [tensor.kind for tensor in said.values()] == ["embedding", "matrix", "head", "matrix"]
    assert [tensor.matrices((6, 4)) for tensor in said.values()] == [(), (2, 2, 2), (), (6,)]
    assert said["qkv"].partition == P("fsdp")
    assert all(tensor.arrangement((6, 4)) is None for tensor in said.values())
    # a stack of matrices has a norm for each vector along its last axis, and is AdamW's, as it always was
    assert tensor_of(object(), "stack", (2, 6, 4)).arrangement((2, 6, 4)) is None
    assert tensor_of(object(), "stack", (2, 6, 4)).kind == "head"


def test_masters_are_split_like_the_task_s_tensors() -> None:
    sizes = {"data": 1, "fsdp": 2, "tensor": 2}

    def split(shape: tuple[int, ...], spec: P) -> P:
        tensor = Tensor(kind="matrix", output_axis=-1)
        return stored_partition(Described((), shape, jnp.float32, tensor, tensor.arrangement(shape)), spec, sizes)

    assert split((64, 128), P("fsdp", "tensor")) == P("tensor", "fsdp")
    assert split((2, 2, 64, 128), P(None, None, None, "fsdp")) == P("fsdp", None)
    assert split((2, 2, 64, 128), P(None, None, "fsdp")) == P(None, "fsdp")  # not its own axis in the log: by default


def test_the_map_carries_the_way_of_a_tensor() -> None:
    kept = Arrangement((3, 4), (1,))
    there = build_map([TensorSpec("a", (4, 3), arrangement=kept), TensorSpec("b", (4, 3))], 2)
    assert there.tensors[0].model_shape == (3, 4)
    assert there.digest != build_map([TensorSpec("a", (4, 3)), TensorSpec("b", (4, 3))], 2).digest
