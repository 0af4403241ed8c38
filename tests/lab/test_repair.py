"""The exponentiated Weibull distribution, against scipy's and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import exponweib

from diloco.errors import SettingsError
from diloco_lab.simulator.repair import RepairTime

SCALE_S = 100.0


@given(st.floats(0.2, 8), st.floats(0.4, 6), st.floats(0, 0.999))
def test_quantiles_are_those_of_scipy(exponent: float, shape: float, probability: float) -> None:
    ours = RepairTime(exponent, shape, SCALE_S).quantile_s(probability)
    assert ours == pytest.approx(float(exponweib.ppf(probability, exponent, shape, scale=SCALE_S)), rel=1e-6, abs=1e-6)


@given(st.integers(1, 6), st.floats(0.4, 6))
def test_mean_by_its_closed_form(exponent: int, shape: float) -> None:
    """For a whole exponent: a Gamma(1 + 1/c) times the sum over k below a of (-1)^k C(a - 1, k) (k + 1)^(-1 - 1/c)."""
    terms = [(-1) ** k * math.comb(exponent - 1, k) * (k + 1) ** (-1 - 1 / shape) for k in range(exponent)]
    expected = SCALE_S * exponent * math.gamma(1 + 1 / shape) * sum(terms)
    assert RepairTime(exponent, shape, SCALE_S).mean_s == pytest.approx(expected, rel=1e-9)


def test_the_longer_of_two_exponential_times_by_hand() -> None:
    """Exponent 2, shape 1: the longer of two repairs of mean 100 s each, 150 s on average."""
    assert RepairTime(2.0, 1.0, SCALE_S).mean_s == pytest.approx(150.0, rel=1e-12)
    assert RepairTime(2.0, 1.0, SCALE_S).quantile_s(0.25) == pytest.approx(100 * math.log(2))


@pytest.mark.parametrize("values", [(0.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, math.inf), (math.nan, 1.0, 1.0)])
def test_parameters_are_numbers_above_0(values: tuple[float, float, float]) -> None:
    with pytest.raises(SettingsError, match="expected a number above 0"):
        RepairTime(*values)
