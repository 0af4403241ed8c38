"""The part of a page that shows a run's course besides its losses: rates, and what learners say of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diloco_report import html, rates
from diloco_report.drawing.curves import CurveLine, Point, gaps
from diloco_report.drawing.lines import Quantity, line_chart
from diloco_report.facts import Report, absences, colours, natural
from diloco_report.units import finite

ALL = "all"  # the line of all learners together

# of what learners say: place in a point, name, title with the unit, quantity, and what it is
_SAID: tuple[tuple[int, str, str, Quantity, str], ...] = (
    (
        1,
        "learning-rate",
        "Learning rate (no unit)",
        Quantity("learning rate"),
        "Of the inner optimizer, by the run's schedule.",
    ),
    (2, "gradient-norm", "Gradient norm (no unit)", Quantity("gradient norm"), "Of all parameters together, before clipping."),
    (3, "processor", "Processor (cores)", Quantity("cores"), "Cores that the learner's process kept busy."),
    (4, "memory", "Memory (bytes)", Quantity("memory", "bytes"), "Resident memory of the learner's process."),
    (5, "device-memory", "Device memory (bytes)", Quantity("device memory", "bytes"), "In use on the learner's own devices."),
)


def course(report: Report) -> str:
    """Draw the course of a run; nothing, before it has one."""
    charts = [*_rates(report), *_said(report)]
    if not charts:
        return ""
    css = colours(report)
    named = [(name, css[name]) for name in css] + [(ALL, "var(--global)")]
    return html.section("Over time", "A point is the mean over a short stretch.", html.toggles(named) + html.pair(*charts))


def _rates(report: Report) -> Iterable[str]:
    each, together = rates.tokens_per_s(report)
    if not together:
        return
    whole = CurveLine(ALL, "var(--global)", together, strong=True)
    lines = [*_lines(each, report), whole]
    said, moments = "Trained by each learner, and by all.", absences(report)
    yield _chart("Tokens a second", "tokens-rate", Quantity("tokens/s", "count"), lines, said, moments)
    versions = [CurveLine(ALL, "var(--global)", rates.versions_per_s(report), strong=True)]
    said = "Versions of fragments that were merged."
    yield _chart("Merges a second", "merges-rate", Quantity("merges/s", empty="Nothing was merged."), versions, said)
    behind = _lines(rates.versions_behind(report), report)
    said = "How many versions the bases of a learner's merged offers were behind."
    yield _chart("Lag (versions)", "lag", Quantity("versions behind", empty="Nothing was merged."), behind, said)


def _said(report: Report) -> Iterable[str]:
    said: Mapping[str, Sequence[Sequence[Any]]] = (report.get("series") or {}).get("gauges") or {}
    for place, name, title, quantity, meaning in _SAID:
        points = {
            str(learner): [(float(point[0]), float(point[place])) for point in found if finite(point[place])]
            for learner, found in said.items()
        }
        if any(points.values()):
            yield _chart(title, name, quantity, _lines(points, report), meaning)


def _lines(points: Mapping[str, Sequence[Point]], report: Report) -> list[CurveLine]:
    css = colours(report)
    return [
        CurveLine(name, css.get(name, "var(--soft)"), points[name], breaks=gaps([at_s for at_s, _ in points[name]]))
        for name in sorted(points, key=natural)
    ]


def _chart(
    title: str,
    name: str,
    quantity: Quantity,
    lines: Sequence[CurveLine],
    meaning: str,
    moments: Sequence[tuple[float, str]] = (),
) -> str:
    drawn = line_chart(lines, {}, axis="time", label="wall time", name=name, quantity=quantity, moments=moments)
    return html.subhead(title, meaning) + drawn
