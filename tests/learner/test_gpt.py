"""The model's shapes, its causality, and its parts by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.core.tensors.built_in import tensor_shapes
from diloco.settings.run import TaskSettings
from diloco_learner.jax import gpt

SHAPE = gpt.Shape(layers=2, width=16, heads=2, context=12)
WINDOWS = np.asarray(jax.random.randint(jax.random.key(2), (3, 13), 0, 256))

# compiled once: operation by operation, each is a program of its own
logits = jax.jit(gpt.logits, static_argnums=2)
loss_and_gradients = jax.jit(jax.value_and_grad(gpt.loss), static_argnums=2)


@pytest.fixture(scope="module")
def params() -> gpt.Params:
    params = gpt.init(jax.random.key(0), SHAPE)
    return params | {"head": jax.random.normal(jax.random.key(1), (256, 16))}


def test_shapes(params: gpt.Params) -> None:
    shapes = jax.tree.map(lambda leaf: leaf.shape, params, is_leaf=lambda leaf: isinstance(leaf, jax.Array))
    assert set(params["blocks"]) == {"0", "1"}
    assert shapes["blocks"]["0"] == {
        "attention": {"norm": (16,), "qkv": (48, 16), "out": (16, 16)},
        "mlp": {"norm": (16,), "gate_up": (96, 16), "down": (16, 48)},
    }
    assert (shapes["embedding"], shapes["head"], shapes["norm"]) == ((256, 16), (256, 16), (16,))
    assert jax.eval_shape(lambda: gpt.logits(params, jnp.zeros((3, 12), jnp.int32), SHAPE)).shape == (3, 12, 256)


@pytest.mark.parametrize("task", [{}, {"layers": 2, "width": 40, "heads": 2}])
def test_members_without_a_framework_know_its_tensors(task: dict[str, int]) -> None:
    settings = TaskSettings(**task)
    shape = gpt.Shape(settings.layers, settings.width, settings.heads, settings.context)
    made = jax.eval_shape(lambda: gpt.init(jax.random.key(0), shape))
    leaves = jax.tree_util.tree_flatten_with_path(made)[0]
    assert {"/".join(each.key for each in path): leaf.shape for path, leaf in leaves} == tensor_shapes(settings)


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    loss, _ = loss_and_gradients(gpt.init(jax.random.key(0), SHAPE), WINDOWS, SHAPE)
    assert float(loss) == pytest.approx(math.log(256), rel=1e-6)


def test_loss_is_the_mean_of_negative_log_probabilities(params: gpt.Params) -> None:
    scores = np.asarray(logits(params, WINDOWS[:, :-1], SHAPE), np.float64)
    probabilities = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = -np.mean([np.log(probabilities[b, t, WINDOWS[b, t + 1]]) for b in range(3) for t in range(12)])
    assert float(loss_and_gradients(params, WINDOWS, SHAPE)[0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("changed", [0, 5, 11])
def test_later_bytes_change_nothing_before_them(params: gpt.Params, changed: int) -> None:
    tokens = WINDOWS[:, :-1]
    later = tokens.copy()
    later[:, changed] = (later[:, changed] + 1) % 256
    before, after = (np.asarray(logits(params, each, SHAPE)) for each in (tokens, later))
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert (np.abs(before - after).max(axis=(0, 2)) > 1e-6)[changed:].all()


def test_rms_norm_by_hand() -> None:
    # mean square of (3, 4) is 12.5
    normed = gpt.rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(normed, [[3 / 12.5**0.5, 8 / 12.5**0.5]], rtol=1e-6)


def test_linear_takes_weights_as_out_by_in() -> None:
    np.testing.assert_array_equal(
        gpt.linear(jnp.array([1.0, 10.0]), jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])), [21, 43, 65]
    )


def test_rotation_leaves_dot_products_that_depend_on_distance_alone() -> None:
    table = gpt.rope_table(20, 8)
    query, key = (jnp.broadcast_to(row, (20, 8)) for row in jax.random.normal(jax.random.key(4), (2, 8)))
    products = np.asarray(gpt.rotate(query, table) @ gpt.rotate(key, table).T)
    for distance in (-7, 0, 3):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), atol=1e-5)
    assert abs(products[0, 1] - products[1, 0]) > 1e-2


def test_rotation_by_hand() -> None:
    # position 1, first pair (of channels 0 and 2) turns by 1 radian, second by 1/100
    turned = gpt.rotate(jnp.array([[0.0, 0, 0, 0], [1.0, 0, 0, 1]]), gpt.rope_table(2, 4))[1]
    np.testing.assert_allclose(turned, [math.cos(1), -math.sin(0.01), math.sin(1), math.cos(0.01)], rtol=1e-5)


def test_attention_by_hand_for_equal_scores() -> None:
    # queries of zero: each position averages the values up to itself
    weights = jnp.concatenate([jnp.zeros((2, 2)), jnp.eye(2), jnp.eye(2)])
    x = jnp.array([[[1.0, 0.0], [3.0, 4.0], [5.0, 2.0]]])
    mixed = gpt.attention({"qkv": weights, "out": jnp.eye(2)}, x, gpt.rope_table(3, 2), heads=1)
    np.testing.assert_allclose(mixed[0], [[1, 0], [2, 2], [3, 2]], rtol=1e-6)


def test_generated_bytes_follow_a_certain_model() -> None:
    # one byte after another: the head is sure of the next one whatever came before
    params = gpt.init(jax.random.key(0), SHAPE)
    params["embedding"] = jnp.eye(256, 16)
    params["blocks"] = jax.tree.map(jnp.zeros_like, params["blocks"])
    params["head"] = 100 * jnp.roll(jnp.eye(256, 16), 1, axis=0)
    drawn = gpt.generate(params, jax.random.key(5), jnp.array([2, 3]), shape=SHAPE, count=12, temperature=1.0)
    np.testing.assert_array_equal(drawn, np.arange(4, 16))


def test_generation_beyond_the_context_sees_the_newest_bytes(params: gpt.Params) -> None:
    cold = 1e-6  # the most likely byte each time
    drawn = gpt.generate(params, jax.random.key(6), jnp.array([1]), shape=SHAPE, count=30, temperature=cold)
    window = np.broadcast_to(np.asarray(drawn[29 - 12 : 29]), (3, 12))
    assert int(drawn[29]) == int(np.asarray(logits(params, window, SHAPE))[0, -1].argmax())


def halved(params: gpt.Params) -> gpt.Params:
    """The parameters with matrices in bfloat16."""
    half: gpt.Params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, params)
    return half


def test_matrices_in_bfloat16_are_those_of_float32_rounded_and_the_loss_is_about_the_same(params: gpt.Params) -> None:
    half = halved(params)
    made = gpt.init(jax.random.key(0), SHAPE, jnp.bfloat16)
    assert jax.tree.map(lambda leaf: leaf.dtype, made) == jax.tree.map(lambda leaf: leaf.dtype, half)
    assert half["blocks"]["0"]["attention"]["norm"].dtype == jnp.float32
    np.testing.assert_array_equal(made["blocks"]["1"]["mlp"]["down"], half["blocks"]["1"]["mlp"]["down"])
    assert jax.eval_shape(lambda: gpt.logits(half, jnp.asarray(WINDOWS[:, :-1]), SHAPE)).dtype == jnp.float32
    block = half["blocks"]["0"]["mlp"]
    between = jax.eval_shape(lambda x: gpt.mlp(block, gpt.rms_norm(x, block["norm"])), jnp.ones((1, 16), jnp.bfloat16))
    assert between.dtype == jnp.bfloat16

    expected, gradients = loss_and_gradients(params, WINDOWS, SHAPE)
    loss, rounded = loss_and_gradients(half, WINDOWS, SHAPE)
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(float(expected), rel=5e-3)
    for wanted, got in zip(jax.tree.leaves(gradients), jax.tree.leaves(rounded), strict=True):
        off = np.linalg.norm(np.asarray(got, np.float32) - np.asarray(wanted))
        assert off < 0.05 * np.linalg.norm(np.asarray(wanted))


def test_the_gradient_of_a_frequent_byte_adds_up_in_bfloat16(params: gpt.Params) -> None:
    # one byte at 3000 places, each with the same gradient: a sum in bfloat16 comes to a halt at 256 of them
    shape = gpt.Shape(layers=0, width=16, heads=2, context=3000)
    windows = jnp.full((1, 3001), 7)
    found = [loss_and_gradients(tree, windows, shape)[1]["embedding"][7] for tree in (params, halved(params))]
    whole, rounded = (np.asarray(gradient, np.float32) for gradient in found)
    assert np.linalg.norm(rounded - whole) < 0.02 * np.linalg.norm(whole)
