"""The paper's simulation results (arXiv 2604.21428, Tables 1 and 13), and the constants that it does not give.

The constants of Table 1 were fitted by ``diloco simulate goodput --fit`` (:mod:`diloco_lab.published.fit`) on the data-parallel
rows alone. Whatever is said of Decoupled DiLoCo is predicted from them. What is known: every chip is interrupted once a year on
average.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco_lab.simulator.cluster import Cluster, Costs
from diloco_lab.simulator.repair import RepairTime

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
LEARNERS = (1, 2, 4, 8, 16)
CHIPS_PER_SLICE = 256
# the time that a slice is away is skewed: an exponentiated Weibull with these, of which the mean alone matters
REPAIR_EXPONENT, REPAIR_SHAPE = 2.0, 1.0


@dataclass(frozen=True)
class Cell:
    """The published goodput and uptime of a row at a number of chips, as shares; None: the paper has no such cell."""

    goodput: float | None = None
    uptime: float | None = None


def _row(goodput: tuple[float, ...], uptime: tuple[float, ...]) -> dict[int, Cell]:
    return {chips: Cell(g, u) for chips, g, u in zip(CHIPS, goodput, uptime, strict=True)}


# Table 1, goodput and uptime: by strategy and learners, by chips
CELLS: dict[tuple[str, int], dict[int, Cell]] = {
    ("data-parallel", 1): _row((0.72, 0.57, 0.38, 0.27, 0.18), (0.72, 0.57, 0.38, 0.27, 0.18)),
    ("data-parallel-elastic", 1): _row((0.88, 0.80, 0.69, 0.58, 0.40), (0.88, 0.81, 0.69, 0.59, 0.42)),
    ("decoupled", 2): _row((0.94, 0.88, 0.80, 0.70, 0.54), (1.00, 0.97, 0.96, 0.90, 0.80)),
    ("decoupled", 4): _row((0.96, 0.93, 0.89, 0.82, 0.73), (1.00, 1.00, 0.99, 0.99, 0.99)),
    ("decoupled", 8): _row((0.98, 0.96, 0.94, 0.88, 0.80), (1.00, 1.00, 1.00, 1.00, 0.99)),
    ("decoupled", 16): _row((0.99, 0.98, 0.96, 0.93, 0.86), (1.00, 1.00, 1.00, 1.00, 0.99)),
}

# Table 13, Gbit/s of a datacenter's link for a compute utilisation, with a model of so many parameters:
# by seconds of a step and datacenters, by strategy and bits of a value
LINK_PARAMETERS = 5e9
UTILISATIONS = (0.5, 0.75, 0.9, 0.95, 0.99)
LINKS: dict[tuple[float, int], dict[tuple[str, int], tuple[float, ...]]] = {
    (1.0, 2): {
        ("data-parallel", 16): (49, 81, 104, 113, 195),
        ("decoupled", 16): (0.58, 1.2, 1.7, 1.9, 2.2),
        ("decoupled", 4): (0.15, 0.29, 0.43, 0.49, 0.53),
    },
    (5.0, 2): {
        ("data-parallel", 16): (9.5, 16, 21, 23, 49),
        ("decoupled", 16): (0.12, 0.23, 0.34, 0.39, 0.43),
        ("decoupled", 4): (0.03, 0.06, 0.08, 0.10, 0.11),
    },
    (1.0, 8): {
        ("data-parallel", 16): (85, 140, 183, 198, 391),
        ("decoupled", 16): (1.0, 2.0, 3.0, 3.3, 3.8),
        ("decoupled", 4): (0.26, 0.51, 0.75, 0.84, 0.94),
    },
    (5.0, 8): {
        ("data-parallel", 16): (17, 28, 37, 40, 49),
        ("decoupled", 16): (0.21, 0.40, 0.59, 0.68, 0.75),
        ("decoupled", 4): (0.05, 0.10, 0.15, 0.17, 0.19),
    },
}


def cell(strategy: str, learners: int, chips: int) -> Cell:
    """Return the published goodput and uptime of a cell of Table 1."""
    return CELLS.get((strategy, learners), {}).get(chips, Cell())


def link_gbit(step_s: float, datacenters: int, strategy: str, bits: int, utilisation: float) -> float | None:
    """Return the published rate in Gbit/s of a cell of Table 13; None: the paper has no such cell."""
    row = LINKS.get((step_s, datacenters), {}).get((strategy, bits))
    return dict(zip(UTILISATIONS, row, strict=True)).get(utilisation) if row else None


def repair_of(mean_s: float) -> RepairTime:
    """Return the distribution of a slice's time away that has this mean."""
    return RepairTime(REPAIR_EXPONENT, REPAIR_SHAPE, mean_s / RepairTime(REPAIR_EXPONENT, REPAIR_SHAPE, 1.0).mean_s)


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
