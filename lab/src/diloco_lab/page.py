"""All that the simulator says of the published tables on one page that opens without a network and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape

from diloco.report import html
from diloco.report.units import count, duration, share
from diloco_lab import bandwidth, pictures, published
from diloco_lab.bandwidth import Job
from diloco_lab.goodput import QUANTITIES, Conditions, Row, cell_text, mean_error, notes
from diloco_lab.published import Constants
from diloco_lab.storm import DURATION_S, Storm

SOURCE = "arXiv 2604.21428"
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
    """What is on the page."""

    rows: Sequence[Row]
    conditions: Conditions
    seeds: int
    days: float
    storm: Storm
    job: Job


def render(contents: Contents) -> str:
    """The page as text."""
    body = [_headline(contents), _goodput(contents), _uptime(contents), _constants(contents), _storm(contents.storm), _links(contents.job)]
    return html.document("Simulated", f'<span class="preset">beside {SOURCE}</span>', "\n".join(body))


def pictures_of(contents: Contents) -> dict[str, str]:
    """The page's pictures, by name."""
    storm = contents.storm
    return {
        "goodput": pictures.goodput(contents.rows),
        "uptime": pictures.uptime(contents.rows),
        "storm": pictures.timeline(
            storm.learners, storm.stretches, storm.versions, 0, round(DURATION_S * 1_000_000), storm.events
        ),
        "bandwidth": pictures.utilisation(bandwidth.curves(contents.job, bandwidth.all_schedules())),
    }
