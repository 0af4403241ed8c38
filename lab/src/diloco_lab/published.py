"""The paper's simulation results (arXiv 2604.21428, algorithm.md section 6), and the constants that it does not give.

The constants were fitted by ``diloco simulate goodput --fit`` (:mod:`diloco_lab.fit`) on the data-parallel rows alone. Whatever
is said of Decoupled DiLoCo is predicted from them. What is known: every chip is interrupted once a year on average.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco_lab.cluster import Cluster, Costs
from diloco_lab.repair import Repair

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
LEARNERS = (1, 2, 4, 8, 16)
CHIPS_PER_SLICE = 256
# the time that a slice is away is skewed: an exponentiated Weibull with these, of which the mean alone matters
REPAIR_EXPONENT, REPAIR_SHAPE = 2.0, 1.0


@dataclass(frozen=True)
class Cell:
    """A published share of a row at a number of chips; None: not published to us."""

    goodput: float | None = None
    uptime: float | None = None


def _row(goodput: tuple[float, ...], uptime: tuple[float, ...]) -> dict[int, Cell]:
    return {chips: Cell(g, u) for chips, g, u in zip(CHIPS, goodput, uptime, strict=True)}


# by strategy and learners, by chips
CELLS: dict[tuple[str, int], dict[int, Cell]] = {
    ("data-parallel", 1): _row((0.72, 0.57, 0.38, 0.27, 0.18), (0.72, 0.57, 0.38, 0.27, 0.18)),
    ("data-parallel-elastic", 1): _row((0.88, 0.80, 0.69, 0.58, 0.40), (0.88, 0.81, 0.69, 0.59, 0.42)),
    ("decoupled", 8): {1_200_000: Cell(0.88)},
}


def cell(strategy: str, learners: int, chips: int) -> Cell:
    """Return the published values of a cell."""
    return CELLS.get((strategy, learners), {}).get(chips, Cell())


def repair_of(mean_s: float) -> Repair:
    """Return the distribution of a slice's time away that has this mean."""
    return Repair(REPAIR_EXPONENT, REPAIR_SHAPE, mean_s / Repair(REPAIR_EXPONENT, REPAIR_SHAPE, 1.0).mean_s)


@dataclass(frozen=True)
class Constants:
    """The constants that the simulation needs and the paper does not give.

    The slice size is not fitted beside the mean repair time: what is away is their product over the time between interruptions.
    """

    step_s: float
    downscale_s: float
    upscale_s: float
    gather_s: float
    restart_s: float
    repair_s: float  # mean

    def apply(self, cluster: Cluster, *, elastic: bool) -> Cluster:
        """Return a cluster with these constants."""
        costs = Costs(elastic, self.downscale_s, self.upscale_s, self.gather_s, self.restart_s)
        repair = repair_of(self.repair_s)
        return replace(cluster, step_s=self.step_s, costs=costs, repair=repair)


FITTED = Constants(step_s=5.69, downscale_s=21.7, upscale_s=12.7, gather_s=66.6, restart_s=82.0, repair_s=1324.0)
