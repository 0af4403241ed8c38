"""An island on a mesh of four devices. ``test_mesh.py`` has pytest run this file in a process that has them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, get_abstract_mesh, reshard
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.fragments import FragmentMap, build_map
from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import TaskSettings
from diloco.settings.service import MeshSettings
from diloco.states import state
from diloco_learner.api.evaluation import UNNAMED, validation_sets
from diloco_learner.jax.beginning import prepare_copies
from diloco_learner.jax.island import Island
from diloco_learner.jax.mesh import ROWS as ROW_SPEC
from diloco_learner.jax.mesh import make_mesh, rows_alone, rows_on, shifted
from diloco_learner.task import Aux, GptTask
from diloco_learner.tensors import Tensor

ROWS, STEPS, FRAGMENTS = 8, 6, 3
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
SETTINGS = run_settings(overrides={"inner.warmup_fraction": 0.0})  # Muon for matrices, AdamW for the others
GRADIENTS = run_settings("data-parallel")


class Curve:
    """A network of two layers. ``first`` is split by rows, ``second`` by columns, and ``bias`` and ``scale`` are too small."""

    tokens_per_batch = ROWS

    def init(self, key: jax.Array) -> Any:
        one, two, three = jax.random.split(key, 3)
        return {
            "first": jax.random.normal(one, (128, 64)) / 8,
            "second": jax.random.normal(two, (33, 128)) / 11,  # 33 rows: only columns divide
            "stack": jax.random.normal(three, (128, 64)) / 8,  # two matrices, one below the other
            "bias": jnp.zeros(128),
            "scale": jnp.float32(1),
        }

    def loss(self, params: Any, batch: Any) -> jax.Array:
        up, gate = jnp.split(batch["x"] @ params["stack"].T, 2, axis=-1)
        hidden = jnp.tanh((batch["x"] + up * gate) @ params["first"].T + params["bias"])
        return jnp.mean((params["scale"] * hidden @ params["second"].T - batch["y"]) ** 2)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        for index in range(start, STEPS):
            rng = np.random.default_rng((seed, share, index))
            x = rng.normal(size=(ROWS, 64)).astype(np.float32)
            yield {"x": x, "y": np.sin(3 * x[:, :33])}

    def validation(self) -> Sequence[Any]:
        return [batch for batch, _ in zip(self.batches(9, 1, 0, 0), range(1), strict=False)]

    def is_embedding(self, path: str) -> bool:
        return False

    def matrices(self, path: str) -> int:
        return 2 if path == "stack" else 0


class TensorParallel(Curve):
    """Its first layer's units, and what the second makes of them, are split over ``tensor``."""

    def partition(self, path: str, shape: tuple[int, ...]) -> P | None:
        return {"first": P("tensor", "fsdp"), "bias": P("tensor"), "second": P(None, "tensor")}.get(path)


class Rounded(Curve):
    """Its matrices are bfloat16, all else is float32."""

    def init(self, key: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16 if leaf.ndim > 1 else jnp.float32), super().init(key))

    def loss(self, params: Any, batch: Any) -> jax.Array:
        x = batch["x"].astype(jnp.bfloat16)
        return super().loss(params | {"bias": params["bias"].astype(x.dtype)}, batch | {"x": x}).astype(jnp.float32)


class Explicit(Curve):
    """Code for explicit axes: how an array is split is in its type, and contractions over split axes are asked for."""

    axes = "explicit"

    def loss(self, params: Any, batch: Any) -> jax.Array:
        mesh = get_abstract_mesh()
        if not mesh.empty:
            assert jax.typeof(params["first"]).sharding.spec == P("fsdp", None)
            assert jax.typeof(batch["x"]).sharding.spec == P(("data", "fsdp"), None)
            params = jax.tree.map(lambda tensor: reshard(tensor, P()), params)
        return super().loss(params, batch)


class Counted(Curve):
    """Of the rows of a batch some count, and none of those that the last devices take."""

    def loss(self, params: Any, batch: Any) -> Any:
        up, gate = jnp.split(batch["x"] @ params["stack"].T, 2, axis=-1)
        hidden = jnp.tanh((batch["x"] + up * gate) @ params["first"].T + params["bias"])
        each = jnp.mean((params["scale"] * hidden @ params["second"].T - batch["y"]) ** 2, axis=1)
        tokens = jnp.sum(batch["mask"])
        return jnp.sum(each * batch["mask"]) / jnp.maximum(tokens, 1), Aux(tokens=tokens)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        for number, batch in enumerate(super().batches(share, shares, seed, start)):
            yield batch | {"mask": np.arange(ROWS) < 1 + number}


MESHES: Mapping[str, tuple[Curve, MeshSettings]] = {
    "fsdp": (Curve(), MeshSettings()),
    "data": (Curve(), MeshSettings(data=4)),
    "both": (Curve(), MeshSettings(data=2, fsdp=2)),
    "tensor": (TensorParallel(), MeshSettings(tensor=2)),
}


@functools.cache
def made(mesh: str) -> Island:
    """An island that no test steps: its twins share what they compile."""
    task, settings = MESHES[mesh]
    return Island(task, SETTINGS, make_mesh(settings))


def fragments_of(island: Island) -> FragmentMap:
    """Fragments whose pieces begin and end in the middle of shards."""
    return build_map(island.tensors(), FRAGMENTS)


def held_out(island: Island) -> Any:
    """The first batch that is held out."""
    return validation_sets(island.task, SETTINGS.task)[UNNAMED][0]


def train(island: Island, steps: int = STEPS) -> list[float]:
    return [island.step(batch, 0.02).wait() for batch, _ in zip(island.task.batches(0, 1, 0, 0), range(steps), strict=False)]


def params_of(state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name.removeprefix("params/"): values for name, values in state.items() if name.startswith("params/")}


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, NDArray[Any]], float]:
    """Losses, state and validation loss of one device."""
    island = Island(Curve(), SETTINGS)
    losses = train(island)
    assert losses[-1] < 0.9 * losses[0]
    return losses, island.state(), island.evaluate()


@pytest.mark.parametrize("mesh", ["fsdp", "data", "tensor"])
def test_a_mesh_trains_as_one_device_does_and_compiles_once(
    mesh: str, alone: tuple[list[float], dict[str, NDArray[Any]], float]
) -> None:
    island = made(mesh).twin()
    fragments, first = fragments_of(island), held_out(island)
    island.check(first)
    island.prepare(fragments)
    prepare_copies(island)
    island.trace(first)[0].compile()
    island.rehearse(first)
    places = {name: leaf.sharding for name, leaf in island.arrays().items()}
    assert any(not place.is_fully_replicated for place in places.values()) == (mesh != "data")
    losses = train(island, 3)
    for fragment in fragments.fragments:
        values = island.read(fragment).to_host()
        island.write(fragment, values)
        island.write(fragment, values, values, 0.5)
    island.load_state(island.state())
    rest = [island.step(batch, 0.02).wait() for batch in island.task.batches(0, 1, 0, 3)]
    np.testing.assert_allclose(losses + rest, alone[0], rtol=2e-5)
    for name, values in island.state().items():
        np.testing.assert_allclose(values, alone[1][name], rtol=1e-3, atol=2e-5, err_msg=name)
    assert {name: leaf.sharding for name, leaf in island.arrays().items()} == places
    assert island._step._cache_size() == 1
    assert island.evaluate() == pytest.approx(alone[2], rel=1e-4)


@pytest.mark.parametrize("apart", [False, True])
def test_tokens_are_counted_over_all_devices_and_the_gradient_is_that_of_one_device(apart: bool) -> None:
    many = Island(Counted(), SETTINGS, make_mesh(MeshSettings(data=2, fsdp=2)), apart=apart)
    one = Island(Counted(), SETTINGS)
    batches = list(Counted().batches(0, 1, 0, 0))
    for island in (many, one):
        island.check(batches[0])
        assert len(island.trace(batches[0])) == 2 + island.apart
    for number, batch in enumerate(batches):
        ours, theirs = (island.step(batch, 0.02) for island in (many, one))
        assert (ours.tokens(), theirs.tokens()) == (number + 1, number + 1)
        assert ours.wait() == pytest.approx(theirs.wait(), rel=2e-5)
    for name, values in many.state().items():
        np.testing.assert_allclose(values, one.state()[name], rtol=1e-3, atol=2e-5, err_msg=name)


def test_the_second_program_of_a_step_needs_no_device_of_another_replica() -> None:
    settings = run_settings("decoupled", {"inner.optimizer": "muon"})
    for mesh, replicas in (("data", ()), ("both", ("{{0,1},{2,3}}", "[2,2]<=[4]"))):
        task, shape = MESHES[mesh]
        island = Island(task, settings, make_mesh(shape), apart=True)
        island.check(task.validation()[0])
        first, second = (str(program.compile().as_text()) for program in island.trace(task.validation()[0]))
        assert "all-reduce" in first
        groups = re.findall(r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\[[^\]]*\]<=\[[^\]]*\])", second)
        assert set(groups) <= set(replicas), mesh


@pytest.mark.parametrize("mesh", ["fsdp", "both", "tensor"])
def test_pieces_are_read_and_written_wherever_their_rows_lie(mesh: str) -> None:
    island = made(mesh).twin()
    fragments, hosts = fragments_of(island), params_of(island.state())
    pointers = [shard.data.unsafe_buffer_pointer() for leaf in island._leaves for shard in leaf.addressable_shards]
    rng = np.random.default_rng(0)
    for fragment in fragments.fragments:
        before = fragment.gather(hosts)
        np.testing.assert_array_equal(island.read(fragment).to_host(), before)
        theta, reference = rng.normal(size=(2, fragment.size)).astype(np.float32)
        island.write(fragment, theta, reference, 0.25)
        mixed = 0.25 * before + 0.75 * (theta + (before - reference))
        np.testing.assert_allclose(island.read(fragment).to_host(), mixed, rtol=1e-5, atol=1e-6)
        island.write(fragment, theta)
        np.testing.assert_array_equal(island.read(fragment).to_host(), theta)
        for piece in fragment.pieces:  # and nothing beside it
            rows = hosts[piece.path][piece.row_start : piece.row_stop] if piece.shape else hosts[piece.path]
            rows[...] = theta[piece.offset : piece.offset + piece.size].reshape(piece.shape)
        for path, values in params_of(island.state()).items():
            np.testing.assert_array_equal(values, hosts[path])
    # in place: the shards are where they were, on every device that has one, and replicas are alike
    shards = [shard for leaf in island._leaves for shard in leaf.addressable_shards]
    assert [shard.data.unsafe_buffer_pointer() for shard in shards] == pointers
    for path, leaf in zip(island._index, island._leaves, strict=True):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), hosts[path][shard.index])


def test_gradients_for_an_outer_adamw_are_split_too_and_axes_may_be_explicit() -> None:
    island, single = Island(Explicit(), GRADIENTS, make_mesh(MeshSettings())), Island(Curve(), GRADIENTS)
    fragments = fragments_of(island)
    island.prepare(fragments)
    prepare_copies(island)
    step = island.trace(held_out(island))[0].compile()
    for each in (island, single):
        train(each, 2)
    first = fragments.fragments[0]
    for fragment in fragments.fragments:
        ours, theirs = (each.snapshot(fragment).to_host() for each in (island, single))
        assert theirs.any()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    island.write(first, np.zeros(first.size, np.float32))
    assert not island.snapshot(first).to_host().any()
    assert island._gradients is not None
    assert [leaf.sharding for leaf in island._gradients] == [leaf.sharding for leaf in island._leaves]
    assert island._step._cache_size() == 1

    whole, _ = whole_and_fragment(island, fragments)
    batch = island._placement.batch(held_out(island))
    memory = step.memory_analysis()
    assert memory is not None
    rows = sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) / 4
    assert memory.argument_size_in_bytes <= 1.15 * whole / 4 + rows + 1024
    assert memory.alias_size_in_bytes >= 0.98 * whole / 4  # it is all donated, and not held twice


def whole_and_fragment(island: Island, fragments: FragmentMap) -> tuple[int, int]:
    """Bytes of all that an island holds, and of its largest fragment."""
    whole = sum(array.nbytes for array in island.arrays().values())
    return whole, 4 * max(fragment.size for fragment in fragments.fragments)


class Noisy(Curve):
    """Rows are scaled by what is drawn for each, and a metric says the mean of it."""

    def loss(self, params: Any, batch: Any, *, key: jax.Array) -> Any:  # type: ignore[override]
        drawn = jax.random.uniform(key, (ROWS, 1))
        return super().loss(params, {"x": batch["x"] * drawn, "y": batch["y"]}), Aux({"drawn": jnp.mean(drawn)})


class ExplicitNoisy(Noisy):
    """The same for explicit axes."""

    axes = "explicit"

    def loss(self, params: Any, batch: Any, *, key: jax.Array) -> Any:  # type: ignore[override]
        if not get_abstract_mesh().empty:
            params, batch = (jax.tree.map(lambda tensor: reshard(tensor, P()), tree) for tree in (params, batch))
        return super().loss(params, batch, key=key)


@pytest.mark.parametrize(("task", "apart"), [(Noisy(), False), (Noisy(), True), (ExplicitNoisy(), False)])
def test_keys_and_metrics_are_those_of_one_device(task: Curve, apart: bool) -> None:
    island, single = Island(task, SETTINGS, make_mesh(MeshSettings(data=2)), apart=apart), Island(Noisy(), SETTINGS)
    for index, batch in zip(range(3), task.batches(0, 1, 0, 0), strict=False):
        ours, theirs = (each.step(batch, 0.02, (1, index)) for each in (island, single))
        assert ours.wait() == pytest.approx(theirs.wait(), rel=1e-4)
        assert ours.metric_values() == pytest.approx(theirs.metric_values(), rel=1e-6)
        drawn = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), index), (ROWS, 1))
        assert ours.metric_values() == {"drawn": pytest.approx(float(jnp.mean(drawn)), rel=1e-6)}


class Own(Curve):
    """Its optimizer sees the tree of the task, under names."""

    def optimizer(self, rate: Any) -> Any:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def test_the_state_of_an_optimizer_of_the_task_s_own_is_split_like_the_parameters() -> None:
    island, single = Island(Own(), SETTINGS, make_mesh(MeshSettings())), Island(Own(), SETTINGS)
    assert train(island, 3) == pytest.approx(train(single, 3), rel=1e-4)
    arrays, state = island.arrays(), {name: leaf for name, leaf in island.arrays().items() if name.startswith("optimizer/")}
    for tensor in ("first", "second", "stack", "bias"):
        moments = [leaf for name, leaf in state.items() if name.endswith(f"/{tensor}")]
        assert [leaf.sharding for leaf in moments] == [arrays[f"params/{tensor}"].sharding] * 2
    assert island._step._cache_size() == 1


class Turned(Curve):
    """Kernels of shape (in, out), a frozen stack, a constant, and a state that is merged."""

    def init(self, key: jax.Array) -> Any:
        made = super().init(key)
        return made | {name: made[name].T for name in ("first", "second")}

    def constants(self) -> Any:
        return {"shift": np.linspace(0, 0.01, 128 * 64, dtype=np.float32).reshape(128, 64)}

    def init_state(self, key: jax.Array) -> Any:
        return {"mean": jnp.zeros(64)}

    def loss(self, params: Any, batch: Any, *, state: Any, constants: Any, weights: Any) -> Any:  # type: ignore[override]
        turned = {"first": params["first"].T + constants["shift"], "second": params["second"].T}
        loss = super().loss(params | turned, batch | {"x": batch["x"] - state["mean"]})
        return loss * jnp.sum(weights) / ROWS, Aux(state={"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(batch["x"], 0)})

    def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
        if path == "stack":
            return Tensor(kind="frozen")
        if path.startswith("constants/"):
            return Tensor(kind="frozen", partition=P("tensor"))
        if path == "first":
            return Tensor(kind="matrix", output_axis=-1, partition=P("fsdp", "tensor"))
        return Tensor(kind="matrix", output_axis=-1) if path == "second" else Tensor(kind="vector")


@pytest.mark.parametrize("apart", [False, True])
def test_turned_kernels_frozen_tensors_constants_and_a_state_are_those_of_one_device(apart: bool) -> None:
    island = Island(Turned(), SETTINGS, make_mesh(MeshSettings(tensor=2)), apart=apart)
    single = Island(Turned(), SETTINGS)
    assert island.fragments() == single.fragments()  # frozen values and constants are gathered for their hashes
    assert island.arrays()["params/first"].sharding.shard_shape((128, 64)) == (64, 32)
    for fragment in island.fragments().fragments:
        # where init is traced, XLA may round a quotient otherwise
        np.testing.assert_allclose(island.read(fragment).to_host(), single.read(fragment).to_host(), rtol=1e-6)
    state = island.fragments().fragments[-1]
    assert state.state
    for each in (island, single):
        each.write(state, np.full(64, 0.25, np.float32))
    assert train(island, 3) == pytest.approx(train(single, 3), rel=1e-4)
    for name, values in island.state().items():
        if not name.startswith("optimizer/"):
            np.testing.assert_allclose(values, single.state()[name], atol=2e-3, err_msg=name)
    other = Island(Turned(), SETTINGS, make_mesh(MeshSettings(data=2)))
    other.load_state(island.state())
    np.testing.assert_array_equal(other.state()["state/mean"], island.state()["state/mean"])
    programs = (island._measure, island._move) if apart else (island._step,)
    assert [program._cache_size() for program in programs] == [1] * len(programs)


def test_a_device_holds_its_share_and_a_part_of_one_fragment() -> None:
    island = made("fsdp").twin()
    fragments = fragments_of(island)
    arrays, (whole, fragment) = island.arrays(), whole_and_fragment(island, fragments)
    for device in jax.devices():
        held = sum(s.data.nbytes for array in arrays.values() for s in array.addressable_shards if s.device == device)
        assert held <= 1.15 * whole / 4
    for each in fragments.fragments:
        read = [values for parts in island.read(each).pieces for _, values in parts]
        assert all(len(values.devices()) == 1 for values in read)
        assert sum(values.nbytes for values in read) == 4 * each.size <= fragment


def test_the_same_mesh_makes_the_same_bits_and_a_state_goes_to_any_other_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chunk.cut, "__defaults__", (5000,))
    island, again = made("fsdp").twin(), made("fsdp").twin()
    train(island, 2)
    saved, captured = island.state(), island.capture()
    assert max(chunk.size_bytes for chunk in captured.content.chunks) <= 5000
    state.save(tmp_path / "a.safetensors", bytes(8), "a", {}, captured.content)
    file = state.load(tmp_path / "a.safetensors", bytes(8), "a")
    for name, values in file.arrays().items():
        np.testing.assert_array_equal(values, saved[name], strict=True)
    again.load_state(saved)
    for each in (island, again):
        each.step(next(each.task.batches(0, 1, 0, 2)), 0.02).wait()
    wanted, remade = island.state(), again.state()
    assert any(not np.array_equal(saved[name], wanted[name]) for name in saved)
    for name in wanted:
        np.testing.assert_array_equal(remade[name], wanted[name])
    for mesh in ("data", "tensor"):
        other = made(mesh).twin()
        assert other.optimizer_layout() == island.optimizer_layout()
        for chunk in other.wanted(optimizer_only=True):
            other.put(chunk, file.read(chunk))
        for name, copied in other.arrays(optimizer_only=True).items():
            np.testing.assert_array_equal(np.asarray(copied), saved[name])
        assert not any(np.array_equal(values, saved[name]) for name, values in other.state().items() if name == "params/first")
        for chunk in other.wanted():
            other.put(chunk, file.read(chunk))
        for name, values in other.state().items():
            np.testing.assert_array_equal(values, saved[name])
        places = {name: leaf.sharding for name, leaf in other.twin().arrays().items()}
        assert {name: leaf.sharding for name, leaf in other.arrays().items()} == places


def test_masters_of_bfloat16_are_split_like_any_tensor() -> None:
    settings = run_settings(overrides={"inner.warmup_fraction": 0.0, "inner.optimizer": "adamw"})
    island, single = Island(Rounded(), settings, make_mesh(MeshSettings())), Island(Rounded(), settings)
    fragments, first = fragments_of(island), held_out(island)
    step = island.trace(first)[0].compile()
    np.testing.assert_allclose(train(island, 3), train(single, 3), rtol=5e-3)
    for fragment in fragments.fragments:  # the founder's values, and those that a step made of them
        ours, theirs = island.read(fragment).to_host(), single.read(fragment).to_host()
        assert np.mean(np.abs(ours - theirs) > 1e-3) < 0.02  # Adam's first steps go by the sign of gradients near zero, too
        island.write(fragment, theirs)
        np.testing.assert_array_equal(island.read(fragment).to_host(), theirs)
    assert island.evaluate() == pytest.approx(single.evaluate(), rel=5e-3)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(island.params())} == {"bfloat16", "float32"}
    whole, _ = whole_and_fragment(island, fragments)
    memory = step.memory_analysis()
    assert memory is not None
    assert memory.argument_size_in_bytes <= 1.15 * whole / 4 + ROWS * (64 + 33) + 1024
    assert memory.alias_size_in_bytes >= 0.98 * whole / 4
    assert island._step._cache_size() == 1


def test_a_batch_that_the_devices_do_not_divide() -> None:
    batch = {"x": np.zeros((6, 64), np.float32), "y": np.zeros((6, 33), np.float32)}
    with pytest.raises(SettingsError, match=r"6 rows .* mesh\.data = 1 times mesh\.fsdp = 4 does not divide: .* multiple of 4"):
        made("fsdp").check(batch)


AXES_OF_FOUR = [(data, fsdp, 4 // data // fsdp) for data in (1, 2, 4) for fsdp in (1, 2, 4) if 4 % (data * fsdp) == 0]


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("axes", AXES_OF_FOUR, ids=lambda axes: "x".join(map(str, axes)))
def test_the_rows_that_processes_make_are_the_whole_batch(axes: tuple[int, int, int], processes: int, tmp_path: Path) -> None:
    """Each device gets, of the rows that its process makes alone, those that it gets of the whole batch."""
    data, fsdp, tensor = axes
    (tmp_path / "text").write_bytes(np.random.default_rng(0).integers(1, 255, 20_000, np.uint8).tobytes())
    task = GptTask(TaskSettings(batch=8, context=32), str(tmp_path / "text"))
    mesh = make_mesh(MeshSettings(data=data, fsdp=fsdp, tensor=tensor))
    assert mesh is not None
    devices = list(mesh.devices.flat)
    groups = [devices[4 * p // processes : 4 * (p + 1) // processes] for p in range(processes)]
    owns = [rows_on(mesh, 8, group) for group in groups]
    assert owns[0].start == 0
    assert all(len(own) == max(8 // processes, 8 // (data * fsdp)) for own in owns)
    index = NamedSharding(mesh, ROW_SPEC).devices_indices_map((8, 33))
    start = 30  # an epoch has 73 batches: into the next one
    wholes = islice(task.batches(0, 1, 7, start), 60)
    parts = [task.batches(0, 1, 7, start, rows=own) for own in owns]
    for whole, *alone in zip(wholes, *parts, strict=False):
        together = {own.start: part for own, part in zip(owns, alone, strict=True)}
        np.testing.assert_array_equal(np.concatenate([together[at] for at in sorted(together)]), whole)
        for group, own, part in zip(groups, owns, alone, strict=True):
            np.testing.assert_array_equal(part, rows_alone(whole, own, 8))
            for device in group:
                here = part[shifted(index[device], (8, 33), own.start)]
                np.testing.assert_array_equal(here, whole[index[device]])


def test_an_axis_that_no_partition_names() -> None:
    with pytest.raises(SettingsError, match=r"mesh\.tensor = 2: no partition of task Curve names 'tensor'"):
        Island(Curve(), SETTINGS, make_mesh(MeshSettings(tensor=2)))


def test_reads_and_writes_have_no_collective() -> None:
    """The last test: of the programs that the others compiled, only steps speak to other devices."""
    programs = list(Path(os.environ["DUMP"]).glob("*after_optimizations.txt"))

    def collectives(name: str) -> list[set[str]]:
        texts = [file.read_text() for file in programs if re.search(rf"\.jit_{name}\.", file.name)]
        return [{kind for kind in COLLECTIVES if f" {kind}" in text} for text in texts]

    for local in ("_copy", "_put", "_mix"):
        assert len(collectives(local)) > FRAGMENTS
        assert not any(collectives(local)), local
    assert any("all-gather" in found for found in collectives("step"))
