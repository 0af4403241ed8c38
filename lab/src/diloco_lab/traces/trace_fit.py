"""Fit rates and repairs to a trace of failures: maximum likelihood, with 95 % intervals.

*Interruptions* are a Poisson process in the time that units are there: its rate is events over that time, its interval
Garwood's exact one (1936). A Weibull distribution is fitted to the times from a repair to the same unit's next interruption;
its shape is 1 if the rate is constant. *Repairs* are an exponentiated Weibull distribution
(:mod:`diloco_lab.simulator.repair`). Both are censored on the right by the end of the observation. An interruption that touches
its beginning counts as time away only, since its length is unknown. The intervals of shapes and repairs are those of the
profile likelihood: all values at which the best fit is no less likely than the best of all by half of chi-square's 95 % point.

Pure; deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize
from scipy.stats import CensoredData, chi2, ecdf

from diloco.errors import DataError, SettingsError
from diloco_lab.simulator.repair import RepairTime, log_mean
from diloco_lab.traces.trace import Outage, Trace

Floats = NDArray[np.float64]

LEVEL = 0.95
FEW = 30
# a likelihood that still rises here is not bounded by the data
BOUNDS = {"exponent": (0.05, 100.0), "shape": (0.1, 20.0)}
NAMES = ("exponent", "shape", "scale")
_LOG_BOUNDS = [(math.log(low), math.log(high)) for low, high in BOUNDS.values()] + [(-math.inf, math.inf)]


@dataclass(frozen=True)
class FittedValue:
    """The most likely value, and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fitted:
    """A trace in numbers. Shapes have no unit."""

    units: int
    up_s: float  # time that units were there, all of them together
    interruptions: int
    repairs: int
    open_repairs: int  # not ended when the observation did
    mean_between_s: FittedValue  # of one unit
    mean_between_chip_s: FittedValue | None  # of one chip; None: the chips of a unit are not given
    between_shape: FittedValue | None  # Weibull; 1: interruptions at a constant rate; None: too few units failed twice
    repair_exponent: FittedValue
    repair_shape: FittedValue
    repair_scale_s: FittedValue
    mean_repair_s: FittedValue
    repair_distance: float  # Kolmogorov-Smirnov, between the fit and Kaplan and Meier's estimate
    notes: list[str]

    @property
    def repair(self) -> RepairTime:
        """Return the most likely distribution of repairs."""
        return RepairTime(self.repair_exponent.value, self.repair_shape.value, self.repair_scale_s.value)


def fit(trace: Trace, units: int | None = None, chips_per_unit: int | None = None) -> Fitted:
    """Fit a trace.

    Args:
        trace: the observed units and outages.
        units: number of units observed, including those that never failed; None: the units that are named.
        chips_per_unit: chips of a unit, any of which takes it out; gives the time between interruptions of one chip.

    Raises:
        SettingsError: fewer units than the trace names.
        DataError: fewer than two repairs, or all of one length.
    """
    named = len(trace.joined_s)
    if units is not None and units < named:
        raise SettingsError(f"--units {units}: the trace names {named}")
    count = named if units is None else units
    begun = [outage for outage in trace.outages if outage.start_s > 0]
    repairs = _repairs(begun, trace.duration_s)
    up_s = math.fsum(
        [(count - named) * trace.duration_s]
        + [trace.duration_s - joined_s for joined_s in trace.joined_s.values()]
        + [outage.start_s - outage.end_s for outage in trace.outages]
    )
    between = mean_between(len(begun), up_s)
    gaps = _gaps(trace)
    weibull = _Likelihood(gaps, exponent=1.0) if len(gaps.seen) > 1 and np.ptp(gaps.seen) > 0 else None
    model = _Likelihood(repairs)
    fitted = Fitted(
        units=count,
        up_s=up_s,
        interruptions=len(begun),
        repairs=len(repairs.seen),
        open_repairs=len(repairs.cut),
        mean_between_s=between,
        mean_between_chip_s=None if chips_per_unit is None else _times(between, chips_per_unit),
        between_shape=None if weibull is None else weibull.estimate("shape"),
        repair_exponent=model.estimate("exponent"),
        repair_shape=model.estimate("shape"),
        repair_scale_s=model.estimate("scale"),
        mean_repair_s=model.estimate("mean"),
        repair_distance=model.distance(),
        notes=[],
    )
    fitted.notes.extend(_notes(fitted, trace, given=units is not None))
    return fitted


def _repairs(begun: Sequence[Outage], duration_s: float) -> _Sample:
    """Return the lengths of outages whose beginning was seen.

    Raises:
        DataError: fewer than two ended, or all took equally long.
    """
    repairs = _Sample(
        np.array([outage.end_s - outage.start_s for outage in begun if outage.end_s < duration_s]),
        np.array([outage.end_s - outage.start_s for outage in begun if outage.end_s >= duration_s]),
    )
    if len(repairs.seen) < 2:
        raise DataError(
            f"{len(repairs.seen)} repairs were seen from beginning to end; a fit needs two, and an honest one {FEW}"
        )
    if np.ptp(repairs.seen) == 0:
        raise DataError(f"all {len(repairs.seen)} repairs took {repairs.seen[0]:g} s; there is no distribution to fit")
    return repairs


def _notes(fitted: Fitted, trace: Trace, *, given: bool) -> Iterator[str]:
    """Yield the limits of a fit; ``given``: the number of units was."""
    if not given:
        yield f"the {fitted.units} units that the trace names are taken for all there were, as --units is not given"
    if trace.outages[0].start_s <= 0:
        yield "interruptions that touch the beginning of the time observed count as time away only"
    shape = fitted.between_shape
    if shape is None:
        yield "too few units failed again after a repair to tell whether interruptions come at a constant rate"
    elif not shape.low <= 1 <= shape.high:
        how = "in bunches, or more often to some units" if shape.high < 1 else "more evenly than by chance"
        yield f"interruptions do not come at a constant rate: they come {how}, and a constant rate is only their mean"
    if fitted.repairs < FEW:
        yield f"{fitted.repairs} repairs are few: the intervals are wide, and approximate"
    for name, estimate in (("exponent", fitted.repair_exponent), ("shape", fitted.repair_shape)):
        low, high = BOUNDS[name]
        if estimate.low < 1.001 * low or estimate.high > 0.999 * high:
            yield f"the repairs do not bound the {name}: its interval ends where the search does"


def mean_between(events: int, up_s: float) -> FittedValue:
    """Return the mean time between the events (above 0) of a Poisson process in ``up_s``, with Garwood's interval."""
    outside = (1 - LEVEL) / 2
    most, least = chi2.ppf(1 - outside, 2 * events + 2) / 2, chi2.ppf(outside, 2 * events) / 2
    return FittedValue(up_s / events, up_s / float(most), up_s / float(least))


def _times(estimate: FittedValue, factor: float) -> FittedValue:
    return FittedValue(estimate.value * factor, estimate.low * factor, estimate.high * factor)


@dataclass(frozen=True)
class _Sample:
    """Times above 0, float64: those whose ends were seen, and those cut by the end of the observation."""

    seen: Floats
    cut: Floats


def _gaps(trace: Trace) -> _Sample:
    """Return the times from a repair to the unit's next interruption; units' ages at the beginning are unknown."""
    seen, since = [], dict[str, float]()
    for outage in trace.outages:
        if outage.unit in since:
            seen.append(outage.start_s - since[outage.unit])
        since[outage.unit] = outage.end_s
    return _Sample(np.array(seen), np.array([trace.duration_s - end_s for end_s in since.values() if end_s < trace.duration_s]))


class _Likelihood:
    """The likelihood of an exponentiated Weibull distribution, by the logarithms of its exponent, shape and scale.

    The mean can take the scale's place: given exponent and shape either fixes the other.
    """

    def __init__(self, sample: _Sample, *, exponent: float | None = None) -> None:
        self._sample = sample
        self._unit_s = float(np.median(sample.seen))  # so that the scale is about 1
        self._logs = (np.log(sample.seen / self._unit_s), np.log(sample.cut / self._unit_s))
        self._held = {} if exponent is None else {0: math.log(exponent)}
        starts = [np.array([log_a, log_c, 0.0]) for log_a in (-1.5, 0.0, 1.5, 3.0) for log_c in (-0.7, 0.3)]
        climbed = [self._climb(start, self._held, of_mean=False) for start in starts]
        self._best, self._most = max(climbed, key=lambda point: point[1])

    def estimate(self, name: str) -> FittedValue:
        """Return the estimate of the exponent, the shape, the scale or the mean."""
        of_mean = name == "mean"
        index = 2 if of_mean else NAMES.index(name)
        best = self._best.copy()
        if of_mean:
            best[2] += log_mean(best[0], best[1])
        edges = (self._edge(best, index, step, of_mean=of_mean) for step in (-0.1, 0.1))
        unit = self._unit_s if index == 2 else 1.0
        return FittedValue(*(unit * math.exp(log) for log in (float(best[index]), *edges)))

    def _edge(self, inner: Floats, index: int, step: float, *, of_mean: bool) -> float:
        """Return how far a coordinate can go in the direction of ``step`` before the best fit with it is too unlikely."""
        bound = _LOG_BOUNDS[index][step > 0]
        enough = self._most - float(chi2.ppf(LEVEL, 1)) / 2

        def profile(value: float) -> tuple[Floats, float]:
            return self._climb(inner, self._held | {index: value}, of_mean=of_mean)

        while True:
            here = float(inner[index])
            there = min(here + step, bound) if step > 0 else max(here + step, bound)
            point, likelihood = profile(there)
            if likelihood < enough:
                return float(brentq(lambda value: profile(value)[1] - enough, here, there, xtol=1e-6))
            if there == bound:
                return bound
            inner, step = point, 2 * step

    def distance(self) -> float:
        """Return Kolmogorov and Smirnov's distance of the fit to the estimate of Kaplan and Meier."""
        steps = ecdf(CensoredData(uncensored=self._sample.seen, right=self._sample.cut)).cdf
        log_a, log_c, log_s = self._best
        z = np.exp(math.exp(log_c) * (np.log(steps.quantiles / self._unit_s) - log_s))
        fitted = np.power(-np.expm1(-z), math.exp(log_a))
        after = steps.probabilities
        before = np.concatenate([[0.0], after[:-1]])
        return float(np.maximum(np.abs(fitted - after), np.abs(fitted - before)).max())

    def _climb(self, start: Floats, held: Mapping[int, float], *, of_mean: bool) -> tuple[Floats, float]:
        """Return the most likely point with the ``held`` coordinates fixed, and its likelihood.

        ``start`` and the point: float64 [3], the logarithms of exponent, shape and scale (or mean).
        """
        free = [index for index in range(3) if index not in held]
        point = start.copy()
        for index, value in held.items():
            point[index] = value
        size = len(self._sample.seen)

        def falling(values: Floats) -> tuple[float, Floats]:
            at = point.copy()
            at[free] = values
            if of_mean:
                at[2] -= log_mean(at[0], at[1])
            value, slope = self._value(*at)
            if of_mean:
                slope[:2] -= slope[2] * _log_mean_slope(at[0], at[1])
            return -value / size, -slope[free] / size

        # L-BFGS-B needs as many steps, but its linear algebra's threads spin for seconds where other work has the cores
        found = minimize(
            falling, point[free], jac=True, method="TNC", bounds=[_LOG_BOUNDS[index] for index in free],
            options={"ftol": 1e-13, "gtol": 1e-7, "maxfun": 2000},
        )  # fmt: skip
        point[free] = found.x
        return point, -float(found.fun) * size

    def _value(self, log_a: float, log_c: float, log_s: float) -> tuple[float, Floats]:
        """Return the logarithm of the likelihood, and its slope, float64 [3]."""
        a, c = math.exp(log_a), math.exp(log_c)
        seen, cut = (np.clip(c * (logs - log_s), -690.0, 690.0) for logs in self._logs)
        z, below, ratio = _terms(seen)
        value = len(z) * (log_a + log_c) + float(np.sum(seen - self._logs[0] - z + (a - 1) * below))
        by_z = 1 - z + (a - 1) * ratio
        slope = np.array([len(z) + a * np.sum(below), len(z) + np.sum(by_z * seen), -c * np.sum(by_z)])
        if len(cut):
            z, below, ratio = _terms(cut)
            far = z > 36  # where below is -exp(-z) to the last bit
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                value += float(np.sum(np.where(far, log_a - z, np.log(-np.expm1(a * below)))))
                weight = 1 / np.expm1(-a * below)
                by_z = np.where(far, -z, -weight * a * ratio)
                by_a = np.where(far, 1.0, -weight * a * below)
            slope += [np.sum(by_a), np.sum(by_z * cut), -c * np.sum(by_z)]
        return value, slope


def _terms(log_z: Floats) -> tuple[Floats, Floats, Floats]:
    """Return ``z``, ``log(1 - exp(-z))`` and the slope of the latter by ``log z``, each float64 [times] as ``log_z`` is."""
    z = np.exp(log_z)
    share = -np.expm1(-z)
    return z, np.log(share), z * np.exp(-z) / share


def _log_mean_slope(log_a: float, log_c: float) -> Floats:
    step = 1e-5
    return np.array(
        [
            log_mean(log_a + step, log_c) - log_mean(log_a - step, log_c),
            log_mean(log_a, log_c + step) - log_mean(log_a, log_c - step),
        ]
    ) / (2 * step)
