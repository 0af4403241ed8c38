"""The island's step, and reading and writing fragments, on a model small enough to follow by hand."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, build_map
from diloco.errors import RunError, SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.states.state import Content
from diloco_learner.jax import holding
from diloco_learner.jax.beginning import prepare_copies
from diloco_learner.jax.island import Island


def whole(content: Content) -> dict[str, NDArray[Any]]:
    """Return the arrays of a content, each value of them given once."""
    arrays: dict[str, NDArray[Any]] = {}
    given: dict[str, NDArray[np.int8]] = {}
    for chunk, values in zip(content.chunks, content.values, strict=True):
        arrays.setdefault(chunk.name, np.empty(chunk.shape, chunk.dtype))[chunk.where] = values
        given.setdefault(chunk.name, np.zeros(chunk.shape, np.int8))[chunk.where] += 1
    assert all((counts == 1).all() for counts in given.values())
    return arrays


class Quadratic:
    """Loss: half the squared distance of all parameters from the batch's target, a number."""

    tokens_per_batch = 1

    def init(self, key: jax.Array) -> Any:
        return {"a": {"matrix": jnp.arange(12.0).reshape(4, 3)}, "list": [jnp.ones(5), jnp.float32(2.0)]}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        return sum((0.5 * jnp.sum((leaf - batch) ** 2) for leaf in jax.tree.leaves(params)), jnp.float32(0))

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[np.float32]:
        while True:
            yield np.float32(share)

    def validation(self) -> Sequence[np.float32]:
        return [np.float32(0), np.float32(1)]

    def is_embedding(self, path: str) -> bool:
        return path == "list/0"


SETTINGS: RunSettings = run_settings(overrides={"inner.weight_decay": 0.0, "inner.optimizer": "adamw"})


@pytest.fixture
def island() -> Island:
    return Island(Quadratic(), SETTINGS)


@pytest.fixture
def fragments(island: Island) -> FragmentMap:
    """Four fragments; the matrix is cut by rows, the scalar shares one with the first of its pieces."""
    return build_map(island.tensors(), 4)


def values(island: Island, fragments: FragmentMap) -> list[NDArray[np.float32]]:
    return [island.read(fragment).to_host() for fragment in fragments.fragments]


def test_tensors_are_named_by_their_keys(island: Island) -> None:
    assert island.tensors() == [TensorSpec("a/matrix", (4, 3)), TensorSpec("list/0", (5,), True), TensorSpec("list/1", ())]


def test_read_gives_what_the_map_gathers(island: Island, fragments: FragmentMap) -> None:
    tensors = {"a/matrix": np.arange(12, dtype=np.float32).reshape(4, 3), "list/0": np.ones(5, np.float32)}
    tensors["list/1"] = np.array(2, np.float32)
    for fragment in fragments.fragments:
        np.testing.assert_array_equal(island.read(fragment).to_host(), fragment.gather(tensors))
        out = np.zeros(fragment.size, np.float32)
        assert island.read(fragment).to_host(out) is out
        np.testing.assert_array_equal(out, fragment.gather(tensors))


def test_first_step_moves_by_the_learning_rate(island: Island, fragments: FragmentMap) -> None:
    # Adam's first update is the gradient's sign
    before = values(island, fragments)
    output = island.step(np.float32(20), 0.5)
    assert output.wait() == pytest.approx(0.5 * (sum((20 - i) ** 2 for i in range(12)) + 5 * 19**2 + 18**2))
    assert float(output.grad_norm) == pytest.approx(math.sqrt(2 * output.wait()))
    for old, new in zip(before, values(island, fragments), strict=True):
        np.testing.assert_allclose(new, old + 0.5, rtol=1e-4)


def test_a_step_of_two_programs_changes_nothing_before_the_second_and_then_what_one_program_does(island: Island) -> None:
    apart = Island(Quadratic(), SETTINGS, apart=True)
    assert len(apart.trace(np.float32(20))) == 2
    for target in (20.0, 7.0, math.nan, 3.0):
        before, whole = apart.state(), island.step(np.float32(target), 0.5)
        output = apart.begin_step(np.float32(target), 0.5)
        np.testing.assert_equal(output.wait(), whole.wait())
        kept = apart.settled()
        for chunk, values in zip(kept.chunks, kept.values, strict=True):
            np.testing.assert_array_equal(values, before[chunk.name][chunk.where])
        assert {chunk.name for chunk in kept.chunks} == before.keys()
        apart.finish_step()
        for name, values in island.state().items():
            np.testing.assert_allclose(apart.state()[name], values, rtol=1e-6, err_msg=name)
    apart.finish_step()  # there is none
    np.testing.assert_array_equal(apart.state()["params/list/0"], island.state()["params/list/0"])


def test_a_reading_outlives_the_steps_after_it(island: Island, fragments: FragmentMap) -> None:
    expected = [vector.copy() for vector in values(island, fragments)]
    readings = [island.read(fragment) for fragment in fragments.fragments]
    for _ in range(3):
        island.step(np.float32(20), 0.5).wait()
    for fragment in fragments.fragments:
        island.write(fragment, np.zeros(fragment.size, np.float32))
    got: list[NDArray[np.float32]] = []
    thread = threading.Thread(target=lambda: got.extend(reading.to_host() for reading in readings))
    thread.start()
    thread.join()
    for vector, wanted in zip(got, expected, strict=True):
        np.testing.assert_array_equal(vector, wanted)
        vector += 1  # the caller's own


def test_write_replaces_its_fragment_alone(island: Island, fragments: FragmentMap) -> None:
    for index, fragment in enumerate(fragments.fragments):
        before = values(island, fragments)
        theta = np.linspace(-1, -2, fragment.size, dtype=np.float32)
        island.write(fragment, theta)
        for other, vector in enumerate(values(island, fragments)):
            np.testing.assert_array_equal(vector, theta if other == index else before[other])


def test_write_replaces_nan(island: Island, fragments: FragmentMap) -> None:
    fragment = fragments.fragments[0]
    island.write(fragment, np.full(fragment.size, np.nan, np.float32))
    island.write(fragment, np.ones(fragment.size, np.float32))
    assert (island.read(fragment).to_host() == 1).all()


def test_write_keeps_progress_and_mixes(island: Island, fragments: FragmentMap) -> None:
    for fragment in fragments.fragments:
        value = island.read(fragment).to_host()
        theta, reference = np.full_like(value, 10), value - 4
        island.write(fragment, theta, reference, 0.0)  # 10 + 4
        np.testing.assert_allclose(island.read(fragment).to_host(), 14.0)
        island.write(fragment, theta, None, 0.25)  # 0.25 * 14 + 0.75 * 10
        np.testing.assert_allclose(island.read(fragment).to_host(), 11.0)
        island.write(fragment, theta, theta - 1, 0.5)  # 0.5 * 11 + 0.5 * (10 + 2)
        np.testing.assert_allclose(island.read(fragment).to_host(), 11.5)


def test_prepare_compiles_and_changes_nothing(island: Island, fragments: FragmentMap) -> None:
    before = values(island, fragments)
    island.prepare(fragments)
    prepare_copies(island)
    island.trace(np.float32(1))[0].compile()
    made: list[str] = []  # programs that were traced, lowered or compiled

    def note(event: str, duration_secs: float, **about: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            made.append(f"{event} {about.get('fun_name')}")

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        island.rehearse(np.float32(1))
        for old, new in zip(before, values(island, fragments), strict=True):
            np.testing.assert_array_equal(old, new)
        island.step(np.float32(1), 0.1).wait()
        island.capture()
        island.capture(optimizer_only=True)
        for fragment, theta in zip(fragments.fragments, before, strict=True):
            island.read(fragment)
            island.write(fragment, theta)
            island.write(fragment, theta, theta, 0.5)
        assert made == []
        island.step(np.ones(1, np.float32), 0.1).wait()
        assert made  # a batch of another shape takes another program
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("target", [np.nan, np.inf, 1e30])  # 1e30: its square is not finite
def test_a_step_that_is_not_finite_changes_nothing(island: Island, target: float) -> None:
    island.step(np.float32(3), 0.1).wait()
    before = island.state()
    output = island.step(np.float32(target), 0.1)
    assert not bool(output.finite)
    assert math.isnan(output.wait())
    after = island.state()
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_evaluate_averages_the_validation_batches() -> None:
    squares = sum(i**2 for i in range(12)) + 5 + 4
    from_one = sum((i - 1) ** 2 for i in range(12)) + 1
    assert Island(Quadratic(), SETTINGS).evaluate() == pytest.approx((0.5 * squares + 0.5 * from_one) / 2)


def test_state_continues_exactly(island: Island) -> None:
    for _ in range(3):
        island.step(np.float32(3), 0.1).wait()
    state = island.state()
    other = Island(Quadratic(), SETTINGS)
    other.load_state(state)
    for each in (island, other):
        each.step(np.float32(4), 0.1).wait()
    ours, theirs = island.state(), other.state()
    assert any(not np.array_equal(ours[name], state[name]) for name in state)
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])
    for name in state:  # what was saved belongs to no step
        assert state[name].flags.owndata


def test_a_copy_is_the_state_as_of_when_it_was_queued(island: Island) -> None:
    island.step(np.float32(3), 0.1).wait()
    state = island.state()
    captured, optimizer = island.capture(), island.capture(optimizer_only=True)
    assert not captured.held
    for target in (4, 5):
        island.step(np.float32(target), 0.1).wait()
    copies, copied = whole(captured.content), whole(optimizer.content)
    assert copies.keys() == state.keys()
    for name, values in copies.items():
        np.testing.assert_array_equal(values, state[name], strict=True)
    assert copied.keys() == {name for name in state if name.startswith("optimizer/")}
    for name, values in copied.items():
        np.testing.assert_array_equal(values, state[name], strict=True)


def test_a_state_that_no_copy_fits_beside_is_read_as_it_is_and_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "COPY_BYTES", 1000)
    monkeypatch.setattr(Chunk.cut, "__defaults__", (1000,))
    island, other = (Island(Wide(), SETTINGS) for _ in range(2))
    island.rehearse(np.float32(1))
    island.step(np.float32(3), 0.1).wait()
    state, captured = island.state(), island.capture()
    assert captured.held
    assert max(chunk.size_bytes for chunk in captured.content.chunks) <= 1000
    copies = whole(captured.content)
    for name in state:
        np.testing.assert_array_equal(copies[name], state[name], strict=True)
    island.step(np.float32(3), 0.1).wait()  # nothing of it is held back
    for chunk in other.wanted():
        other.put(chunk, copies[chunk.name][chunk.where])
    for name, values in other.state().items():
        np.testing.assert_array_equal(values, state[name], strict=True)


def test_a_peers_optimizer_state_and_other_parameters(island: Island) -> None:
    for _ in range(3):
        island.step(np.float32(3), 0.1).wait()
    lent = whole(island.capture(optimizer_only=True).content)
    other = Island(Quadratic(), SETTINGS)
    assert other.optimizer_layout() == island.optimizer_layout()
    before = other.state()
    other.load_optimizer(lent)
    after, wanted = other.state(), island.state()
    for name in after:
        expected = before if name.startswith("params/") else wanted
        np.testing.assert_array_equal(after[name], expected[name], strict=True)


def test_checkpoints_of_other_models_are_refused(island: Island) -> None:
    state = island.state()
    missing = {name: array for name, array in state.items() if name != "params/list/0"}
    with pytest.raises(RunError, match="'params/list/0' is missing"):
        island.load_state(missing)
    with pytest.raises(RunError, match="'params/more' is not in this model"):
        island.load_state(state | {"params/more": np.zeros(1)})
    with pytest.raises(RunError, match=r"'params/list/0' has shape \(4,\) of float32, this model's has \(5,\) of float32"):
        island.load_state(state | {"params/list/0": np.zeros(4, np.float32)})


class Wide(Quadratic):
    """A tensor of five chunks of 1000 bytes, and one of a row longer than a chunk."""

    def init(self, key: jax.Array) -> Any:
        return {"list": [jnp.ones((20, 60)), jnp.ones((2, 300)), jnp.ones(())]}


class Empty(Quadratic):
    def init(self, key: jax.Array) -> Any:
        return {}


def test_a_model_without_parameters() -> None:
    with pytest.raises(SettingsError, match="no parameters"):
        Island(Empty(), SETTINGS)


def test_a_task_without_samples(island: Island) -> None:
    assert island.sample(0, 10) is None


def test_for_an_outer_adamw_a_step_makes_a_gradient_alone(fragments: FragmentMap) -> None:
    def gradients(island: Island) -> list[NDArray[np.float32]]:
        return [island.snapshot(fragment).to_host() for fragment in fragments.fragments]

    island = Island(Quadratic(), run_settings("data-parallel", {"inner.clip_norm": 1e3}))
    island.prepare(fragments)
    prepare_copies(island)
    before = values(island, fragments)
    assert not any(vector.any() for vector in gradients(island))
    assert island.step(np.float32(0.5), 1.0).wait() > 0
    for begun, now, gradient in zip(before, values(island, fragments), gradients(island), strict=True):
        np.testing.assert_array_equal(now, begun)
        np.testing.assert_array_equal(gradient, begun - np.float32(0.5))  # that of half a squared distance is the distance
    assert math.isnan(island.step(np.float32(np.nan), 1.0).wait())
    for begun, gradient in zip(before, gradients(island), strict=True):
        np.testing.assert_array_equal(gradient, begun - np.float32(0.5))
    assert island.optimizer_layout().arrays == ()
    assert island.arrays(optimizer_only=True) == {}

    other = Island(Quadratic(), run_settings("data-parallel"))
    other.load_state(island.state())
    for own, its in zip(values(other, fragments) + gradients(other), before + gradients(island), strict=True):
        np.testing.assert_array_equal(own, its)

    first, *others = fragments.fragments
    theta = np.ones(first.size, np.float32)
    other.write(first, theta, theta)  # the log was loaded, at the version that the gradient is of
    assert gradients(other)[0].any()
    other.write(first, theta)
    assert not gradients(other)[0].any()
    assert (values(other, fragments)[0] == 1).all()
    for fragment in others:
        np.testing.assert_array_equal(gradients(other)[fragment.index], gradients(island)[fragment.index])


def test_a_batch_that_is_another_one_than_the_first_is_refused_when_it_comes(island: Island) -> None:
    island.check(np.float32(1))
    island.step(np.float64(2), 0.1)  # which JAX has as float32
    island.evaluation()  # whose batches may have other shapes
    said = r"batches\(\) gave the batch as float32\[\] and then as float32\[2\]: .* each time \(.*test_island\.py, line \d+\)"
    with pytest.raises(SettingsError, match=said):
        island.step(np.zeros(2, np.float32), 0.1)
