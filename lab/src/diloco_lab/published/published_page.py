"""All that the simulator says of the published tables on one page that opens without a network and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from html import escape

from diloco_lab import bandwidth
from diloco_lab.bandwidth import ModelJob
from diloco_lab.published import comparison, mixed, pictures, published
from diloco_lab.published.comparison import Errors
from diloco_lab.published.published import Constants
from diloco_lab.simulator import goodput, recovery
from diloco_lab.simulator.cluster import MICROS
from diloco_lab.simulator.goodput import FleetConditions, GoodputRow, mean_error, notes
from diloco_lab.simulator.storm import DURATION_S, Storm
from diloco_report import html
from diloco_report.units import count, duration, share

SOURCE = "arXiv 2604.21428"
HEADLINE_CHIPS = 1_200_000
MEANINGS = {
    "step_s": "a step's own time, s",
    "downscale_s": "an elastic learner goes on without failed slices after, s",
    "upscale_s": "slices that are back are taken in within, s",
    "gather_s": "the first slice that is back waits for others at most, s",
    "restart_s": "a job that is not elastic, or killed, begins again after, s",
    "repair_s": "a failed slice is away for, on average, s",
}


@dataclass(frozen=True)
class Contents:
    """The contents of the page."""

    rows: Sequence[GoodputRow]
    conditions: FleetConditions
    seeds: int
    days: float
    by_quorum: Sequence[mixed.Found]
    storm: Storm
    job: ModelJob

    @cached_property
    def pictures(self) -> dict[str, str]:
        """The page's pictures, by name."""
        storm, until_us = self.storm, round(DURATION_S * MICROS)
        return {
            "goodput": pictures.goodput(self.rows),
            "uptime": pictures.uptime(self.rows),
            "storm": pictures.timeline(storm.learners, storm.stretches, storm.versions, 0, until_us, storm.events),
            "bandwidth": pictures.utilisation(bandwidth.curves(self.job, bandwidth.all_schedules())),
            "recovery": pictures.recovery(recovery.NAMED),
        }


def render(contents: Contents) -> str:
    """Return the page as text."""
    parts = (_headline, _goodput, _uptime, _mixed, _constants, _storm, _links, _recovery)
    header = f'<span class="preset">beside {SOURCE}</span>'
    return html.document("Simulated", header, "\n".join(part(contents) for part in parts), html.inlined())


def _headline(contents: Contents) -> str:
    known = [row for row in contents.rows if row.published_goodput is not None and row.chips == HEADLINE_CHIPS]
    figures = [
        html.figure(
            _name(row),
            share(row.goodput, 1),
            "goodput",
            f"{count(row.chips)} chips; published {share(row.published_goodput)}",
        )
        for row in known
    ]
    error = mean_error(contents.rows)
    if error is not None:
        figures.append(html.figure("Published cells", f"{100 * error:.2f}", "points", "mean absolute error"))
    return f'<div class="figures">{"".join(figures)}</div>'


def _goodput(contents: Contents) -> str:
    said = "Share of the allocated chip time that went into steps that count. Hollow: published."
    return html.section("Goodput", said, html.wide(contents.pictures["goodput"]) + _cells(contents.rows, "goodput"))


def _uptime(contents: Contents) -> str:
    said = "Share of the time in which some learner took a step."
    notes_ = "".join(html.note(text) for text in notes(contents.rows, contents.conditions, contents.seeds, contents.days))
    cells = _cells(contents.rows, "uptime") + _errors(comparison.of_goodput(contents.rows))
    return html.section("Uptime", said, html.wide(contents.pictures["uptime"]) + cells + notes_)


def _mixed(contents: Contents) -> str:
    said = (
        f"{mixed.LEARNERS} learners that do not fail: the steps of half of them take {100 * mixed.SLOWER - 100:.0f} % longer, "
        f"and each step varies by {100 * mixed.STEP_SPREAD:.0f} %. In slots, a round asks all learners at once; by reports, as "
        "Algorithm 2 counts, it asks those that have ended a step. In brackets what is published (Table 5)."
    )
    return html.section("Mixed hardware", said, _table(*mixed.table(contents.by_quorum)))


def _cells(rows: Sequence[GoodputRow], quantity: str) -> str:
    return _table(*goodput.table(rows, quantity))


def _errors(found: Sequence[Errors]) -> str:
    return _table(comparison.HEAD, [each.texts() for each in found])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return html.wide(html.table(list(head), [[escape(cell) for cell in each] for each in rows]))


def _constants(contents: Contents) -> str:
    constants = contents.conditions.constants
    fitted = constants == published.FITTED
    rows = [[field.name, f"{getattr(constants, field.name):g}", escape(MEANINGS[field.name])] for field in fields(Constants)]
    said = (
        "The paper does not give these. They were fitted to its data-parallel rows alone; all that is said of other "
        "strategies is predicted from them."
        if fitted
        else "Chosen for this page."
    )
    return html.section("Constants", said, html.wide(html.table(["constant", "value", "meaning"], rows)))


def _storm(contents: Contents) -> str:
    storm = contents.storm
    said = (
        f"{duration(DURATION_S)} of {len(storm.learners)} learners on 1.2m chips: what fails anyway, and a tape of failures "
        f"beside it. Goodput {share(storm.outcome.goodput, 1)}, uptime {share(storm.outcome.uptime, 1)}, "
        f"{count(storm.outcome.versions)} versions."
    )
    return html.section("A storm of failures", said, html.wide(contents.pictures["storm"]))


def _links(contents: Contents) -> str:
    job, named = contents.job, bandwidth.all_schedules()
    said = (
        f"Gbit/s of a datacenter's link, each way, for a compute utilisation: {bandwidth.of(job)}. Schedule table: as for the "
        "published figures, which are in brackets; training: that of the product's preset. Below: how far all published cells "
        "are from ours, over four settings of a step's time and the number of datacenters."
    )
    cells = _table(*bandwidth.table(named, bandwidth.needed(job, named, published.UTILISATIONS)))
    errors = _errors(comparison.of_links(comparison.link_rows(comparison.links())))
    return html.section("Bandwidth", said, html.wide(contents.pictures["bandwidth"]) + cells + errors)


def _recovery(contents: Contents) -> str:
    job = contents.job
    said = (
        "A learner that comes back fetches parameters and optimizer state while versions go on over the same link. The H steps "
        f"of a cycle are free; what takes longer is downtime. {job.parameters:g} parameters, {job.step_s:g} s a step."
    )
    cells = _table(*recovery.table(recovery.rows(recovery.NAMED, job.parameters, job.step_s)))
    return html.section("Recovery", said, html.wide(contents.pictures["recovery"]) + cells)


def _name(row: GoodputRow) -> str:
    return row.strategy if row.learners == 1 else f"{row.strategy}, M = {row.learners}"
