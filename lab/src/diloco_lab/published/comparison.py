"""How far simulated cells are from the published ones of arXiv 2604.21428: Table 1 in points, Table 13 in per cent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from diloco_lab import bandwidth
from diloco_lab.bandwidth import ModelJob, Named
from diloco_lab.published import fit, published
from diloco_lab.simulator import goodput
from diloco_report.units import count

HEAD = ("published cells", "number", "mean error", "bias", "worst")
FITTED = {strategy for strategy, _ in fit.FITTED_ROWS}
COARSE = 0.99  # Table 13's data-parallel cells of this utilisation are apart: half a point of tolerance is half of what is left


@dataclass(frozen=True)
class Errors:
    """The errors of a group of cells: simulated less published, in points or in per cent of the published value.

    Attributes:
        mean: of the absolute errors.
        bias: the mean of the errors.
        worst: the error that is furthest from 0, and ``cell`` is where.
    """

    group: str
    unit: str
    cells: int
    mean: float
    bias: float
    worst: float
    cell: str

    def texts(self) -> list[str]:
        """Return the cells of a table, as :data:`HEAD` names them."""
        numbers = (f"{self.mean:.2f}", f"{self.bias:+.2f}", f"{self.worst:+.1f}")
        mean, bias, worst = (f"{number} {self.unit}" for number in numbers)
        return [self.group, str(self.cells), mean, bias, f"{worst} ({self.cell})"]

    def sentence(self) -> str:
        """Return them in words."""
        group, cells, mean, bias, worst = self.texts()
        return f"{group}, {cells} published cells: mean error {mean}, bias {bias}, worst {worst}"


def errors(group: str, unit: str, cells: Iterable[tuple[str, float]]) -> list[Errors]:
    """Return the errors of a group of (cell, error); none if it has no cell."""
    known = list(cells)
    if not known:
        return []
    values = [value for _, value in known]
    cell, worst = max(known, key=lambda one: abs(one[1]))
    mean = sum(map(abs, values)) / len(values)
    return [Errors(group=group, unit=unit, cells=len(known), mean=mean, bias=sum(values) / len(values), worst=worst, cell=cell)]


def of_goodput(rows: Sequence[goodput.GoodputRow]) -> list[Errors]:
    """Return the errors of Table 1's cells. Rows that the constants were fitted to are one group, predicted rows another."""
    found: list[Errors] = []
    for quantity in goodput.QUANTITIES:
        for group, fitted in (("data-parallel, fitted", True), ("decoupled, predicted", False)):
            known = [
                (f"{_where(row)}, {count(row.chips)} chips", 100 * (getattr(row, quantity) - of_paper))
                for row in rows
                if (row.strategy in FITTED) == fitted and (of_paper := getattr(row, f"published_{quantity}")) is not None
            ]
            found += errors(f"{quantity}, {group}", "points", known)
    return found


def _where(row: goodput.GoodputRow) -> str:
    return row.strategy if row.strategy in FITTED else f"M = {row.learners}"


def of_links(rows: Iterable[bandwidth.BandwidthRow]) -> list[Errors]:
    """Return the errors of Table 13's cells."""
    known = [(row, of_paper) for row in rows if (of_paper := row.published_gbit) is not None]
    groups: tuple[tuple[str, Callable[[bandwidth.BandwidthRow], bool]], ...] = (
        ("decoupled", lambda row: row.strategy == "decoupled"),
        ("data-parallel, up to 95 %", lambda row: row.strategy == "data-parallel" and row.utilisation < COARSE),
        ("data-parallel, 99 %", lambda row: row.strategy == "data-parallel" and row.utilisation >= COARSE),
    )
    return [
        each
        for group, fits in groups
        for each in errors(
            group, "%", [(_link(row), 100 * (row.gbit_per_s / of_paper - 1)) for row, of_paper in known if fits(row)]
        )
    ]


def _link(row: bandwidth.BandwidthRow) -> str:
    return f"{row.bits} bits, {bandwidth.percent(row.utilisation)}, {row.step_s:g} s, {row.datacenters} datacenters"


def links() -> list[tuple[ModelJob, list[Named], list[list[bandwidth.BandwidthRow]]]]:
    """Return for each job of Table 13 its schedules and their rates: those of its cells, and Decoupled's training schedule."""
    found = []
    for (step_s, datacenters), rows in published.LINKS.items():
        job = ModelJob(published.LINK_PARAMETERS, step_s, datacenters)
        named: list[Named] = [
            (strategy, name, schedule)
            for strategy, bits in rows
            for name, schedule in bandwidth.schedules(strategy, {"bits": bits}).items()
            if name == "table" or strategy == "decoupled"
        ]
        found.append((job, named, bandwidth.needed(job, named, published.UTILISATIONS)))
    return found


def link_rows(
    found: Iterable[tuple[ModelJob, list[Named], list[list[bandwidth.BandwidthRow]]]],
) -> list[bandwidth.BandwidthRow]:
    """Return the rows of what :func:`links` returned, one after another."""
    return [row for _, _, rates in found for rows in rates for row in rows]
