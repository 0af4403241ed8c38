"""The outer step by hand and against float64; what a fold returns and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diloco.core.tensors import outer, quantise
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.settings.presets import run_settings

Vector = NDArray[np.float32]
SIZES = [1, 63, 64, 65, 1000, outer.CHUNK - 1, outer.CHUNK, outer.CHUNK + 1, 2 * outer.CHUNK + 100]


DECAYS = [((5, 0.1), (9, 0.0), (10**9, 0.3)), ((10**9, 0.1),)]


def random(n: int, seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def nesterov(theta: Vector, momentum: Vector, delta: Vector, learning_rate: float, mu: float) -> None:
    outer.NESTEROV.at(1, learning_rate, mu)(0, theta, [momentum], delta)


def test_nesterov_by_hand() -> None:
    # learning rate 1/2, mu 1/2; all of it exact in float32
    theta, momentum = np.array([10, -4], np.float32), np.zeros(2, np.float32)
    steps = [
        # delta, momentum = mu * momentum + delta, theta -= (delta + mu * momentum) / 2
        ((1, 0), (1, 0), (9.25, -4)),
        ((2, -8), (2.5, -8), (7.625, 2)),
        ((-1, 4), (0.25, 0), (8.0625, 0)),
        ((0, 0), (0.125, 0), (8.03125, 0)),
    ]
    for delta, expected_momentum, expected_theta in steps:
        nesterov(theta, momentum, np.array(delta, np.float32), 0.5, 0.5)
        assert momentum.tolist() == list(expected_momentum)
        assert theta.tolist() == list(expected_theta)


def test_without_momentum_it_is_plain_descent() -> None:
    theta, momentum = np.array([1, 2], np.float32), np.array([7, 7], np.float32)
    nesterov(theta, momentum, np.array([4, -4], np.float32), 0.25, 0.0)
    assert theta.tolist() == [0, 3]


def test_a_steady_gradient_is_amplified_by_the_momentum() -> None:
    # momentum settles at delta / (1 - mu), each step at learning_rate * delta / (1 - mu)
    theta, momentum, delta = np.zeros(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.float32)
    for _ in range(300):
        before = float(theta[0])
        nesterov(theta, momentum, delta, 0.3, 0.9)
    assert momentum[0] == pytest.approx(10, rel=1e-5)
    assert before - float(theta[0]) == pytest.approx(3, rel=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_many_folds_against_float64(bits: int) -> None:
    n, rate, mu = 1000, 0.3, 0.9
    theta, momentum = random(n, 0), np.zeros(n, np.float32)
    wide_theta, wide_momentum = theta.astype(np.float64), np.zeros(n)
    for seed in range(1, 30):
        body = quantise.quantise(random(n, seed), bits)
        delta = quantise.dequantise(body, n, bits).astype(np.float64)
        wide_momentum = mu * wide_momentum + delta
        wide_theta -= rate * (delta + mu * wide_momentum)
        outer.fold(theta, momentum, body, bits, outer.NESTEROV.at(1, rate, mu))
    np.testing.assert_allclose(theta, wide_theta, atol=2e-5)
    np.testing.assert_allclose(momentum, wide_momentum, atol=2e-5)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("n", SIZES)
def test_a_fold_is_the_step_of_the_decoded_body(n: int, bits: int) -> None:
    theta, momentum, body = random(n, 0), random(n, 1), quantise.quantise(random(n, 2), bits)
    whole_theta, whole_momentum = theta.copy(), momentum.copy()
    nesterov(whole_theta, whole_momentum, quantise.dequantise(body, n, bits), 0.3, 0.9)
    state_hash = outer.fold(theta, momentum, body, bits, outer.NESTEROV.at(1, 0.3, 0.9))
    assert theta.tobytes() == whole_theta.tobytes()
    assert momentum.tobytes() == whole_momentum.tobytes()
    halves = blake3(whole_theta.tobytes()).digest() + blake3(whole_momentum.tobytes()).digest()
    assert state_hash == outer.state_hash(theta, momentum) == blake3(halves).digest()


@pytest.mark.parametrize("n", SIZES)
def test_a_fold_into_another_array_leaves_the_parameters_alone(n: int) -> None:
    theta, momentum, body = random(n, 0), random(n, 1), quantise.quantise(random(n, 2), 4)
    before, content = theta.tobytes(), body.tobytes()
    step = outer.NESTEROV.at(1, 0.3, 0.9)
    out, in_place, its_momentum = np.empty(n, np.float32), theta.copy(), momentum.copy()
    state_hash = outer.fold(theta, momentum, body, 4, step, theta_out=out)
    assert state_hash == outer.fold(in_place, its_momentum, body, 4, step)
    assert theta.tobytes() == before
    assert body.tobytes() == content
    assert out.tobytes() == in_place.tobytes()
    assert momentum.tobytes() == its_momentum.tobytes()


def test_one_bit_changes_the_state_hash() -> None:
    theta, momentum = random(1000, 0), random(1000, 1)
    state_hash = outer.state_hash(theta, momentum)
    assert outer.state_hash(momentum, theta) != state_hash
    for array in (theta, momentum):
        array.view(np.uint32)[999] ^= 1
        assert outer.state_hash(theta, momentum) != state_hash
        array.view(np.uint32)[999] ^= 1
    assert outer.state_hash(theta, momentum) == state_hash


def test_adamw_by_hand() -> None:
    # means from zeros: 0.1 g and 0.05 g^2, of which the corrections for that leave g and g^2: an update of the gradient's sign;
    # only the first value decays: 4 - 0.1 * (1 + 0.5 * 4), and 4 - 0.1 * -1
    theta, moments = np.full(2, 4, np.float32), np.zeros(4, np.float32)
    outer.AdamW(0.95, ((1, 0.5), (2, 0.0))).at(1, 0.1, 0.9)(
        0, theta, [moments[:2], moments[2:]], np.array([30, -0.5], np.float32)
    )
    np.testing.assert_allclose(theta, [3.7, 4.1], rtol=1e-6)
    np.testing.assert_allclose(moments, [3, -0.05, 45, 0.0125], rtol=1e-6)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("decays", DECAYS)
def test_adamw_of_many_versions_is_that_of_float64(bits: int, decays: tuple[tuple[int, float], ...]) -> None:
    n, beta1, beta2, adamw = 1000, 0.9, 0.95, outer.AdamW(0.95, decays)
    theta, moments = random(n, 0), np.zeros(2 * n, np.float32)
    wide, mean, square = theta.astype(np.float64), np.zeros(n), np.zeros(n)
    decay = np.empty(n)
    for until, value in reversed(decays):
        decay[:until] = value
    for version in range(1, 41):
        body, rate = quantise.quantise(random(n, version) / np.float32(100), bits), 0.01 / version
        gradient = quantise.dequantise(body, n, bits).astype(np.float64)
        mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2
        update = mean / (1 - beta1**version) / (np.sqrt(square / (1 - beta2**version)) + 1e-8)
        wide -= rate * (update + decay * wide)
        outer.fold(theta, moments, body, bits, adamw.at(version, rate, beta1))
    np.testing.assert_allclose(theta, wide, rtol=3e-5, atol=1e-6)
    np.testing.assert_allclose(moments, np.concatenate([mean, square]), rtol=3e-5, atol=1e-9)


@pytest.mark.parametrize("n", SIZES)
def test_adamw_by_chunks_has_the_bits_of_the_whole(n: int) -> None:
    decays = ((n // 3 + 1, 0.1), (n // 2 + 1, 0.0), (n, 0.2)) if n > 6 else ((n, 0.1),)
    step = outer.AdamW(0.95, decays).at(3, 0.01, 0.9)
    theta, moments, body = random(n, 0), np.abs(random(2 * n, 1)), quantise.quantise(random(n, 2), 16)
    whole, whole_moments = theta.copy(), moments.copy()
    step(0, whole, [whole_moments[:n], whole_moments[n:]], quantise.dequantise(body, n, 16))
    out, its_moments = np.empty(n, np.float32), moments.copy()
    state_hash = outer.fold(theta, its_moments, body, 16, step, theta_out=out)
    assert theta.tobytes() == random(n, 0).tobytes()
    assert out.tobytes() == whole.tobytes()
    assert its_moments.tobytes() == whole_moments.tobytes()
    thirds = [blake3(vector.tobytes()).digest() for vector in (whole, whole_moments[:n], whole_moments[n:])]
    assert state_hash == outer.state_hash(whole, whole_moments) == blake3(b"".join(thirds)).digest()
    assert state_hash == outer.fold(theta, moments, body, 16, step)


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 10**7))
def test_a_power_is_that_of_the_library_but_for_rounding(base: float, exponent: int) -> None:
    # each of at most 2 * 24 products rounds, and an error of one is doubled by each square after it
    assert outer.power(base, exponent) == pytest.approx(base**exponent, rel=2e-16 * max(1, 2 * exponent), abs=1e-300)
    if exponent < 3:
        assert outer.power(base, exponent) == [1.0, base, base * base][exponent]


def test_matrices_decay_and_vectors_do_not() -> None:
    tensors = [
        TensorSpec("a", (2, 3)),
        TensorSpec("b", (5,)),
        TensorSpec("c", (7, 1)),
        TensorSpec("d", ()),
        TensorSpec("e", (2, 2)),
    ]
    fragment = build_map(tensors, 1).fragments[0]
    made = outer.optimizer(
        run_settings("data-parallel", {"fragments.count": 1, "shards": 1, "inner.weight_decay": 0.25}), fragment
    )
    assert made == outer.AdamW(0.95, ((6, 0.25), (11, 0.0), (18, 0.25), (19, 0.0), (23, 0.25)))
    assert outer.optimizer(run_settings(), fragment) == outer.NESTEROV
