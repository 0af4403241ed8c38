"""How long a slice of chips is away after one of them was interrupted: the exponentiated Weibull distribution.

``F(t) = (1 - exp(-(t / scale)^shape))^exponent`` (Mudholkar and Srivastava, 1993). ``exponent`` 1 is the Weibull
distribution, and ``shape`` 1 beside it the exponential one. The paper draws its delays from it (arXiv 2604.21428, algorithm.md
section 6), with parameters that are unpublished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from diloco.errors import SettingsError

_STEP = 0.03


@dataclass(frozen=True)
class RepairTime:
    """An exponentiated Weibull distribution of seconds."""

    exponent: float
    shape: float
    scale_s: float

    def __post_init__(self) -> None:
        for name in ("exponent", "shape", "scale_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingsError(f"repair.{name} = {value!r}, expected a number above 0")

    def quantile_s(self, probability: float) -> float:
        """Return the delay that a share ``probability`` (0 to below 1) of all does not exceed."""
        return self.scale_s * math.pow(-math.log1p(-math.pow(probability, 1 / self.exponent)), 1 / self.shape)

    @property
    def mean_s(self) -> float:
        """The mean delay."""
        return self.scale_s * math.exp(log_mean(math.log(self.exponent), math.log(self.shape)))


def log_mean(log_exponent: float, log_shape: float) -> float:
    """Return the logarithm of the mean at scale 1: ``z^(1/shape)`` integrated over the distribution of ``z``.

    By the trapezoid rule over ``log z``, which errs by little more than rounding where the integrand fades at both ends.
    (scipy's quadrature loses small exponents.)
    """
    exponent, power = math.exp(log_exponent), math.exp(-log_shape)
    log_z = np.arange(-40 / (exponent + power), math.log(20 * power + 100), _STEP)
    z = np.exp(log_z)
    below = np.where(log_z < -30, log_z, np.log(-np.expm1(-np.maximum(z, 1e-300))))
    terms = (power + 1) * log_z + log_exponent - z + (exponent - 1) * below
    largest = float(terms.max())
    return largest + math.log(_STEP * float(np.exp(terms - largest).sum()))
