"""The unpublished constants, fitted to the published data-parallel rows; and what every prediction owes to each of them.

Least squares over all 20 cells (goodput and uptime, elastic and not), by the simulator itself. The same seeds serve all
trials, so that the sum of squares is a function of the constants alone; it is minimised by Nelder and Mead's method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from diloco_lab.published.published import CELLS, CHIPS, CHIPS_PER_SLICE, Constants
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import Cluster
from diloco_lab.simulator.outcome import Outcome, Scenario

FITTED_ROWS = (("data-parallel", False), ("data-parallel-elastic", True))
SEEDS = (1, 2)
DURATION_S = 2 * 86400.0  # at the most chips
MAX_TRIALS = 300
TOLERANCE = 2e-3  # of a constant, relative: where the search ends
SENSITIVITY_STEP = 0.1  # by which constants are changed


@dataclass(frozen=True)
class Residual:
    """A published cell and what was simulated for it."""

    strategy: str
    chips: int
    quantity: str
    published: float
    simulated: float


def simulate(constants: Constants, chips: int, learners: int, *, elastic: bool, seed: int, duration_s: float) -> Outcome:
    """Simulate a cluster that fails as in the paper; no round holds its learners up."""
    cluster = constants.apply(Cluster(chips, learners, CHIPS_PER_SLICE), elastic=elastic)
    return simulation.simulate(Scenario(cluster.split(seed), duration_s, seed))


def residuals(constants: Constants, seeds: Sequence[int], duration_s: float) -> list[Residual]:
    """Return the residuals of all data-parallel cells, those of more chips simulated for a shorter time."""
    found = []
    for strategy, elastic in FITTED_ROWS:
        for chips in CHIPS:
            length_s = duration_s * min(8.0, CHIPS[-1] / chips)
            runs = [simulate(constants, chips, 1, elastic=elastic, seed=seed, duration_s=length_s) for seed in seeds]
            cell = CELLS[strategy, 1][chips]
            for quantity in ("goodput", "uptime"):
                published = getattr(cell, quantity)
                simulated = float(np.mean([getattr(run, quantity) for run in runs]))
                found.append(Residual(strategy, chips, quantity, published, simulated))
    return found


def mean_error(found: Sequence[Residual]) -> float:
    """Mean absolute error, as a share."""
    return float(np.mean([abs(residual.simulated - residual.published) for residual in found]))


def fit(
    start: Constants, seeds: Sequence[int], duration_s: float, report: Callable[[int, Constants, float], None] | None = None
) -> Constants:
    """Find the constants with the least sum of squares, from ``start`` on. ``report`` is called with each trial."""
    from scipy.optimize import minimize  # takes as long to import as most simulations take

    trials = 0

    def error(logs: np.ndarray) -> float:
        nonlocal trials
        trials += 1
        constants = Constants(*map(float, np.exp(logs)))
        found = residuals(constants, seeds, duration_s)
        if report is not None:
            report(trials, constants, mean_error(found))
        return sum((residual.simulated - residual.published) ** 2 for residual in found)

    # the constants are scales: positive, and as likely to be twice as to be half of what is thought
    start_logs = np.log(astuple(start))
    simplex = np.vstack([start_logs, start_logs + 0.2 * np.eye(len(start_logs))])
    options = {"initial_simplex": simplex, "xatol": TOLERANCE, "fatol": 1e-6, "maxfev": MAX_TRIALS}
    best = minimize(error, start_logs, method="Nelder-Mead", options=options)
    return Constants(*(round(float(value), 2) for value in np.exp(best.x)))


def changed(constants: Constants, name: str, sign: int) -> Constants:
    """Return the constants with one of them larger (1) or smaller (-1) by :data:`SENSITIVITY_STEP`."""
    return replace(constants, **{name: getattr(constants, name) * (1 + sign * SENSITIVITY_STEP)})
