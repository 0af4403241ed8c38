"""The outer step by hand and against float64; what a fold returns and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core import outer, quantise

Vector = NDArray[np.float32]
SIZES = [1, 63, 64, 65, 1000, outer.CHUNK - 1, outer.CHUNK, outer.CHUNK + 1, 2 * outer.CHUNK + 100]


def random(n: int, seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


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
        outer.nesterov(theta, momentum, np.array(delta, np.float32), 0.5, 0.5)
        assert momentum.tolist() == list(expected_momentum)
        assert theta.tolist() == list(expected_theta)


def test_without_momentum_it_is_plain_descent() -> None:
    theta, momentum = np.array([1, 2], np.float32), np.array([7, 7], np.float32)
    outer.nesterov(theta, momentum, np.array([4, -4], np.float32), 0.25, 0.0)
    assert theta.tolist() == [0, 3]


def test_a_steady_gradient_is_amplified_by_the_momentum() -> None:
    # momentum settles at delta / (1 - mu), each step at learning_rate * delta / (1 - mu)
    theta, momentum, delta = np.zeros(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.float32)
    for _ in range(300):
        before = float(theta[0])
        outer.nesterov(theta, momentum, delta, 0.3, 0.9)
    assert momentum[0] == pytest.approx(10, rel=1e-5)
    assert before - float(theta[0]) == pytest.approx(3, rel=1e-4)


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_many_folds_against_float64(bits: int) -> None:
    n, rate, mu = 1000, 0.3, 0.9
    theta, momentum = random(n, 0), np.zeros(n, np.float32)
    wide_theta, wide_momentum = theta.astype(np.float64), np.zeros(n)
    for seed in range(1, 30):
        body = quantise.quantise(random(n, seed), bits)
        delta = quantise.dequantise(body, n, bits).astype(np.float64)
        wide_momentum = mu * wide_momentum + delta
        wide_theta -= rate * (delta + mu * wide_momentum)
        outer.fold(theta, momentum, body, bits, rate, mu)
    np.testing.assert_allclose(theta, wide_theta, atol=2e-5)
    np.testing.assert_allclose(momentum, wide_momentum, atol=2e-5)


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("n", SIZES)
def test_a_fold_is_the_step_of_the_decoded_body(n: int, bits: int) -> None:
    theta, momentum, body = random(n, 0), random(n, 1), quantise.quantise(random(n, 2), bits)
    whole_theta, whole_momentum = theta.copy(), momentum.copy()
    outer.nesterov(whole_theta, whole_momentum, quantise.dequantise(body, n, bits), 0.3, 0.9)
    state_hash = outer.fold(theta, momentum, body, bits, 0.3, 0.9)
    assert theta.tobytes() == whole_theta.tobytes()
    assert momentum.tobytes() == whole_momentum.tobytes()
    halves = blake3(whole_theta.tobytes()).digest() + blake3(whole_momentum.tobytes()).digest()
    assert state_hash == outer.state_hash(theta, momentum) == blake3(halves).digest()


@pytest.mark.parametrize("n", SIZES)
def test_a_fold_into_another_array_leaves_the_parameters_alone(n: int) -> None:
    theta, momentum, body = random(n, 0), random(n, 1), quantise.quantise(random(n, 2), 4)
    before, content = theta.tobytes(), body.tobytes()
    out, in_place, its_momentum = np.empty(n, np.float32), theta.copy(), momentum.copy()
    state_hash = outer.fold(theta, momentum, body, 4, 0.3, 0.9, theta_out=out)
    assert state_hash == outer.fold(in_place, its_momentum, body, 4, 0.3, 0.9)
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
