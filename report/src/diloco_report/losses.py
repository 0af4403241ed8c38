"""The part of a page that shows losses: of the global model and of each learner, over tokens and over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_report import compared, html
from diloco_report.drawing import curves
from diloco_report.drawing.lines import Axis, line_chart
from diloco_report.facts import Report, absences, colours, natural, units_of
from diloco_report.terms import meaning
from diloco_report.units import finite


def losses(report: Report) -> str:
    """Draw the losses of the learners and of the global model, over tokens and over time."""
    series = report.get("series") or {}
    css_of = colours(report)
    # by line: wall time, tokens of the whole run, loss
    drawn = [
        (name, css_of.get(name, "var(--soft)"), [(point[0], point[1], point[3]) for point in points if finite(point[3])])
        for name, points in sorted((series.get("learners") or {}).items(), key=lambda item: natural(str(item[0])))
    ]
    whole: list[tuple[Any, ...]] = [(point[0], point[1], point[2]) for point in series.get("global") or [] if finite(point[2])]
    end = (report.get("wall_s"), report.get("tokens_merged"), report.get("val_loss"))
    # the newest loss is carried on by no point of its own: a flat end would look like a plateau
    if whole and not report.get("now") and all(finite(value) for value in end) and end[2] != whole[-1][2]:
        whole.append(end)
    drawn.append(("global", "var(--global)", whole))
    rolled_back, away = series.get("rollbacks") or [], absences(report)

    def chart(place: int, key: str, axis: Axis, label: str) -> str:
        lines = [
            curves.CurveLine(
                name,
                css,
                [(point[place], point[2]) for point in points],
                strong=name == "global",
                breaks=() if name == "global" else curves.gaps([point[0] for point in points]),
            )
            for name, css, points in drawn
        ]
        moments = [(moment[key], f"back to {moment['to_version']}") for moment in rolled_back]
        moments += away if axis == "time" else []
        return line_chart(lines, compared.baselines(report), axis=axis, label=label, name=axis, moments=moments)

    units, counted = units_of(report).capitalize(), compared.baselines(report)
    return html.section(
        "Loss",
        (f"{units}. " if units else "")
        + "Learners: training loss, as a mean over each short stretch. Global: validation loss of "
        "the model that the log holds, against the tokens merged by then."
        + (f" Dashed: models that only count which bytes follow which: {_named(counted)}." if counted else "")
        + (" Upright: the run was rolled back to that version." if rolled_back else "")
        + (" Upright: from a region that is away no process is heard." if away else ""),
        html.toggles((name, css) for name, css, _ in drawn)
        + html.pair(
            _subhead(report, "over tokens") + chart(1, "tokens", "tokens", "tokens"),
            _subhead(report, "over wall time") + chart(0, "wall_s", "time", "wall time"),
        ),
    )


def _subhead(report: Report, over: str) -> str:
    """Draw a chart's title, which has the unit of the loss where the task names it: ``Nats per byte over tokens``."""
    return html.subhead(f"{units_of(report).capitalize() or 'Loss'} {over}", meaning(f"Loss {over}"))


def _named(counted: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {loss:.2f}" for name, loss in counted.items())
