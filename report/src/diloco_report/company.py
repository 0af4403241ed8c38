"""The part of a page that shows who was merged with whom in a run with regions, and the bytes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_report import html
from diloco_report.colours import HUES
from diloco_report.drawing import charts
from diloco_report.facts import Report, natural, ratio, until_s
from diloco_report.units import count, duration, size

MAX_PERIODS = 9


def company(report: Report) -> str:
    """Draw each learner's merges in a run with regions, and the traffic between them."""
    regions: Mapping[str, Mapping[str, Any]] = report.get("regions") or {}
    if not regions:
        return ""
    points, end_s = (report.get("series") or {}).get("learners") or {}, until_s(report)
    groups = [
        charts.ChartRegion(
            str(name),
            f"var(--s{place % HUES})",
            {
                str(member): [(float(at_s), float(step)) for at_s, _, step, _ in points.get(member, ())]
                for member in sorted(region["learners"], key=natural)
            },
            [(float(from_s), end_s if to_s is None else float(to_s)) for from_s, to_s in region["absences"]],
        )
        for place, (name, region) in enumerate(regions.items())
    ]
    homes = {str(syncer): str(name) for name, region in regions.items() for syncer in region["syncers"]}
    rounds: Sequence[Mapping[str, Any]] = (report.get("series") or {}).get("merges") or []
    legend = html.legend((group.name, group.css) for group in groups)
    return html.section(
        "Who was merged with whom",
        "A lane for each learner, and in it a row for each fragment: a mark is an offer that was merged, in the colour of the "
        "region that owned the fragment then. A pale line goes back from an offer that brought more work than usual, over the "
        "time in which it was done. Shaded: no process of the region was heard. " + charts.horizontal(end_s),
        legend + html.wide(charts.regions(rounds, groups, homes, end_s), newest=True) + _periods(report) + _borders(report),
    )


def _periods(report: Report) -> str:
    periods: Sequence[Mapping[str, Any]] = report.get("together") or []
    tables = "".join(_period(period) for period in periods[:MAX_PERIODS])
    left_out = f" Only the first {MAX_PERIODS} of {len(periods)} periods are shown." if len(periods) > MAX_PERIODS else ""
    said = "In how many versions two learners were merged together; with itself: in how many a learner was merged." + left_out
    return (
        html.subhead("Merged together") + html.note(said) + html.wide(f'<div class="periods">{tables}</div>') if tables else ""
    )


def _period(period: Mapping[str, Any]) -> str:
    learners = [str(name) for name in period["learners"]]
    away = f"{', '.join(str(name) for name in period['away'])} away" if period["away"] else "all here"
    when = f"{duration(period['from_s'])} to {duration(period['to_s'])}: {away}, {count(period['versions'])} versions"
    rows = []
    for name, row in zip(learners, period["together"], strict=True):
        cells = [f'<td style="{_shade(ratio(times, period["versions"]))}">{count(times)}</td>' for times in row]
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in learners)
    return (
        f"<table><caption>{escape(when)}</caption><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _shade(part: float | None) -> str:
    return f"background:color-mix(in srgb, var(--accent) {round(45 * min(1.0, part or 0.0))}%, transparent)"


def _borders(report: Report) -> str:
    borders: Sequence[Mapping[str, Any]] = (report.get("traffic") or {}).get("borders") or []
    if not borders:
        return ""
    emulated = any(border.get("link") for border in borders)
    head = ("from and to", "syncers' payload", *(("link: bulk", "control", "headers") if emulated else ()))
    rows = []
    for border in borders:
        link: Mapping[str, Any] = border.get("link") or {}
        sizes = [link.get(key) for key in ("bulk_bytes", "control_bytes", "header_bytes_estimated")] if emulated else []
        ends = escape(f"{border.get('from', '')} → {border.get('to', '')}")
        rows.append([ends, *(size(value) for value in [border.get("payload_bytes"), *sizes])])
    said = "Messages as the syncers on both sides count them" + (
        "; and everything that the emulated links carried, with estimated TCP and IP headers." if emulated else "."
    )
    return html.subhead("Bytes between regions") + html.note(said) + html.wide(html.table(head, rows, of="borders"))
