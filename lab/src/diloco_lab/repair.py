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


@dataclass(frozen=True)
class Repair:
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
        """The delay that a share ``probability`` (0 to below 1) of all does not exceed."""
        return self.scale_s * math.pow(-math.log1p(-math.pow(probability, 1 / self.exponent)), 1 / self.shape)

    @property
    def mean_s(self) -> float:
        """The mean delay: the integral of what is left over time, by the trapezoidal rule over the time's logarithm.

        Its integrand falls off exponentially to one side and faster to the other, where the rule is exact to the last digits.
        """
        times = np.arange(-40.0, math.log(745.0) / self.shape, 0.01 / max(1.0, self.shape))
        left = -np.expm1(self.exponent * np.log(-np.expm1(-np.exp(self.shape * times))))
        return self.scale_s * float(np.sum(left * np.exp(times)) * (times[1] - times[0]))
