"""A version that keeps progress, written in one pass, has the bits of the operations one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline, EncodedOffer, Offered
from diloco.core.tensors import quantise
from diloco.wire.fields import Bits

Vector = NDArray[np.float32]
SPECIAL = np.array([0.0, -0.0, 1e-45, -3e-39, np.inf, -np.inf, np.nan, 3.4e38], np.float32)


def values_of(rng: np.random.Generator, size: int) -> Vector:
    """Return values of many magnitudes, of which some are subnormal, zero, infinite or NaN."""
    values: Vector = (rng.standard_normal(size) * 10.0 ** rng.integers(-44, 30, size)).astype(np.float32)
    special = rng.random(size) < 0.1
    values[special] = rng.choice(SPECIAL, special.sum())
    return values


def body_of(rng: np.random.Generator, size: int, bits: Bits) -> NDArray[np.uint8]:
    with np.errstate(over="ignore"):
        finite = np.nan_to_num(values_of(rng, size), posinf=1e30, neginf=-1e30).clip(-1e30, 1e30)
    return quantise.quantise(finite, bits)


@given(
    seed=st.integers(0, 1 << 32),
    start=st.integers(0, 1100),
    count=st.sampled_from([0, 1, 63, 64, 65, 1000, 1024, 3000]),
    behind=st.sampled_from([0, 1, 64, 100]),
    bits=st.sampled_from([1, 2, 4, 8, 16, 32]),
    error_bits=st.sampled_from([8, 32]),
    has_error=st.booleans(),
    alpha=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_it_has_the_bits_of_the_operations_one_by_one(
    seed: int, start: int, count: int, behind: int, bits: Bits, error_bits: Bits, has_error: bool, alpha: float
) -> None:
    rng, size = np.random.default_rng(seed), start + count + behind
    base, theta, values = values_of(rng, size), values_of(rng, size), values_of(rng, count)
    encoded = EncodedOffer(body_of(rng, size, bits), body_of(rng, size, error_bits))
    error = body_of(rng, size, error_bits) if has_error else None
    with np.errstate(all="ignore"):
        moved = quantise.dequantise(encoded.body, size, bits) + quantise.dequantise(encoded.rest, size, error_bits)
        moved = -moved if error is None else quantise.dequantise(error, size, error_bits) - moved
        where = slice(start, start + count)
        expected = theta[where] + (values - (base[where] + moved[where]))
        if alpha:
            expected = np.float32(alpha) * values + np.float32(1 - alpha) * expected
    theta.flags.writeable = False  # as a version may be that others read, too
    Baseline(base, Offered(encoded, bits, error, error_bits)).keep_progress(values, theta, start, alpha)
    are_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), are_nan)  # what a NaN is besides, IEEE 754 leaves open
    np.testing.assert_array_equal(values[~are_nan].view(np.uint32), expected[~are_nan].view(np.uint32))


def test_without_an_offer_there_is_nothing_to_compute() -> None:
    with pytest.raises(ValueError, match="nothing was offered"):
        Baseline(np.zeros(3, np.float32)).keep_progress(np.zeros(3, np.float32), np.zeros(3, np.float32), 0, 0.0)
