"""Several runs, or arms of experiments, on one page in the report's look: losses, end values, settings that differ.

Losses are drawn on one axis only where they are of one unit and one text; all others get charts of their own, and the page says
so. All that comes from a run is escaped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from diloco_report import html
from diloco_report.drawing.curves import CurveLine, Point
from diloco_report.drawing.lines import Axis, line_chart
from diloco_report.missing import MissingCells
from diloco_report.units import MISSING, count, decimal, duration, finite, share, size

MAX_RUNS = 24
MAX_MEANS = 60  # of a training curve
AXES: tuple[tuple[Axis, str], ...] = (("tokens", "tokens"), ("time", "time"), ("bytes", "bytes, both ways"))
_PLACES: dict[Axis, Any] = {"tokens": lambda tokens: f"{count(tokens)} tokens", "time": duration, "bytes": size}
AT_END = ("loss_initial", "parameters")  # figures that a run's report has, and nothing before it
OF_ARMS = ("spread", "seeds")  # figures that only an arm of an experiment has
FINISHED = "finished"  # state of a run that is over
_COLOURS = 8  # --s0 to --s7 of the style sheet
_DASHES = ("", "7 4", "2 3")  # of as many runs each, in their order


class LossSample(NamedTuple):
    """A loss, and how far the run had come: seconds, tokens of all learners, and their bytes both ways; None: not known."""

    loss: float
    tokens: float | None
    time: float | None
    bytes: float | None


@dataclass(frozen=True)
class ComparedRun:
    """A run, or an arm of an experiment.

    ``state``: in a word or two. ``units``: of its losses; None: not known. ``text``: that they are of, in words; entries
    with the same words have the same text. ``parameters``: None: not known. ``validation``, ``training``: losses of the
    global model, and of all learners. ``ends``: figures at the end, or by now, by the keys of :data:`ENDS`. ``values``:
    further losses and metrics. ``settings``: by dotted name. ``changes``: made while it went on. ``notes``: for people.
    ``arm``: whether it is an arm of an experiment.
    """

    name: str
    source: str
    state: str
    units: str | None = None
    text: str = ""
    parameters: int | None = None
    validation: Sequence[LossSample] = ()
    training: Sequence[LossSample] = ()
    ends: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[str] = ()
    notes: Sequence[str] = ()
    arm: bool = False

    @property
    def kind(self) -> tuple[str, str]:
        """The unit and the text of its losses, in words: those of another kind say nothing beside them."""
        return self.units or "units not known", self.text or "data not known"


# figures at the end: key, title, form
ENDS: tuple[tuple[str, str, Any], ...] = (
    ("loss", "loss", lambda value: decimal(value, 4)),
    ("spread", "spread", lambda value: decimal(value, 4)),
    ("seeds", "seeds", count),
    ("loss_initial", "at first", lambda value: decimal(value, 4)),
    ("tokens", "tokens", count),
    ("merged", "merged", lambda value: share(value, 1)),
    ("time_s", "time", duration),
    ("rate", "tokens/s", count),
    ("bytes_up", "sent", size),
    ("bytes_down", "received", size),
    ("versions", "versions", count),
    ("blocked", "blocked", lambda value: share(value, 2)),
    ("parameters", "parameters", count),
)


_Shown = tuple[int, ComparedRun, Sequence[LossSample]]  # an entry's place, for its colour, and one of its curves


def render(entries: Sequence[ComparedRun]) -> str:
    """Return the page as text; names of entries differ, and there are at most ``MAX_RUNS``."""
    parts = (_headline, _unlike, _losses, _together, _ends, _values, _settings, _changes)
    header = f"""<span class="preset">{_counted(entries)}</span>
<button id="theme" type="button">Light or dark</button>"""
    return html.document(
        "Side by side",
        header,
        "\n".join(filter(None, (part(entries) for part in parts))),
        html.inlined(html.script(*html.SCRIPT)),
    )


def groups(entries: Sequence[ComparedRun]) -> dict[tuple[str, str], list[ComparedRun]]:
    """Return the entries by the kind of their losses."""
    found: dict[tuple[str, str], list[ComparedRun]] = {}
    for entry in entries:
        found.setdefault(entry.kind, []).append(entry)
    return found


def notes(entries: Sequence[ComparedRun]) -> list[str]:
    """Return the notes of all entries, each once, with the names of those that have it."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        for note in entry.notes:
            names.setdefault(note, []).append(entry.name)
    return [f"{', '.join(those)}: {note}." for note, those in names.items()]


def differing(entries: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the settings whose values are not the same in all entries, with the value of each; None: it has none."""
    names = dict.fromkeys(name for entry in entries for name in entry.settings)
    rows = {name: [entry.settings.get(name) for entry in entries] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def loss_at(points: Sequence[Point], x: float) -> float | None:
    """Return the loss at a place between two points of a curve, in proportion; None: the curve does not reach it."""
    after = bisect_left(points, x, key=lambda point: point[0])
    if after == len(points) or (after == 0 and points[0][0] > x):
        return None
    if after == 0 or points[after][0] == x:
        return points[after][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def curve(samples: Sequence[LossSample], axis: Axis) -> list[Point]:
    """Return the points of a curve, in the order of the axis; samples of which that is not known are left out."""
    points = [(float(x), sample.loss) for sample in samples if (x := getattr(sample, axis)) is not None]
    return sorted(points, key=lambda point: point[0])


# --- parts of the page ----------------------------------------------------------------------------------------------


def _headline(entries: Sequence[ComparedRun]) -> str:
    figures = []
    for entry in entries:
        ends = entry.ends
        far = [
            f"{count(ends['tokens'])} tokens" if finite(ends.get("tokens")) else "",
            duration(ends["time_s"]) if finite(ends.get("time_s")) else "",
        ]
        more = [entry.units or "", entry.state, *far, "" if finite(ends.get("loss")) else "no validation loss was measured"]
        figures.append(html.figure(entry.name, decimal(ends.get("loss")), "", escape(", ".join(filter(None, more)))))
    return f'<div class="figures">{"".join(figures)}</div>'


def _unlike(entries: Sequence[ComparedRun]) -> str:
    """Say how far these runs can be compared at all."""
    said = []
    kinds = groups(entries)
    if len(kinds) > 1:
        each = "; ".join(f"{_kind(kind)}: {', '.join(entry.name for entry in members)}" for kind, members in kinds.items())
        said.append(f"Losses of {len(kinds)} kinds, which cannot be compared and are drawn separately. {each}.")
    sizes = {entry.name: entry.parameters for entry in entries if entry.parameters is not None}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{name} {count(number)}" for name, number in sizes.items())
        said.append(f"The models differ. Parameters: {each}.")
    tasks = [name for name in differing([entry for entry in entries if entry.settings]) if name.startswith("task.")]
    if tasks:
        said.append(f"The tasks differ, in {', '.join(tasks)}.")
    said += notes(entries)
    rows = [
        [_named(entry, place), *map(escape, (entry.state, *entry.kind)), f"<code>{escape(entry.source)}</code>"]
        for place, entry in enumerate(entries)
    ]
    table = html.wide(html.table(("run", "state", "losses in", "of", "from"), rows))
    return html.section("The runs", "", "".join(html.note(sentence) for sentence in said) + table)


def _losses(entries: Sequence[ComparedRun]) -> str:
    kinds = groups(entries)
    sections = []
    for number, (kind, members) in enumerate(kinds.items()):
        drawn = [(place, entry) for place, entry in enumerate(entries) if entry in members]
        shown = [(place, entry) for place, entry in drawn if entry.validation or entry.training]
        if shown:
            parts = (
                "<h3>Validation: the global model, on text that no learner has seen</h3>"
                + _curves([(place, entry, entry.validation) for place, entry in shown], f"validation-{number}", strong=True),
                "<h3>Training: all learners, a mean over each short stretch</h3>"
                + _curves(
                    [(place, entry, _means(entry.training)) for place, entry in shown], f"training-{number}", strong=False
                ),
            )
            title = f"Loss: {_kind(kind)}" if len(kinds) > 1 else "Loss"
            units = "" if len(kinds) > 1 else f"In {_kind(kind)}."
            legend = html.toggles((entry.name, _css(place)) for place, entry in shown)
            sections.append(html.section(title, units, legend + html.pair(*parts)))
    return "\n".join(sections) or html.section("Loss", "", '<p class="empty">No loss was recorded yet.</p>')


def _means(samples: Sequence[LossSample]) -> list[LossSample]:
    """Return the means of as many parts of a curve at most as a picture can show of a loss as noisy as one step's."""
    size_ = -(-len(samples) // MAX_MEANS) or 1
    parts = [samples[begin : begin + size_] for begin in range(0, len(samples), size_)]
    return [LossSample(*(_mean(values) for values in zip(*part, strict=True))) for part in parts]  # type: ignore[arg-type]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _curves(shown: Sequence[_Shown], name: str, *, strong: bool) -> str:
    return html.switch(name, [(label, _chart(shown, axis, label, f"{name}-{axis}", strong=strong)) for axis, label in AXES])


def _chart(shown: Sequence[_Shown], axis: Axis, label: str, name: str, *, strong: bool) -> str:
    lines = [
        CurveLine(entry.name, _css(place), curve(samples, axis), strong=strong, dash=_dash(place))
        for place, entry, samples in shown
    ]
    left_out = [entry.name for (_, entry, samples), line in zip(shown, lines, strict=True) if samples and not line.points]
    short = [entry.name for (_, entry, samples), line in zip(shown, lines, strict=True) if 1 == len(line.points) < len(samples)]
    said = f"Not known, and left out: {', '.join(left_out)}. " if left_out else ""
    said += f"Known only at the end: {', '.join(short)}." if short else ""
    return html.note(said.strip()) + line_chart(lines, {}, axis=axis, label=label, name=name)


def _together(entries: Sequence[ComparedRun]) -> str:
    """Compare losses where all curves of a kind have come: at the same tokens, time and bytes."""
    tables = []
    for kind, members in groups(entries).items():
        columns: list[tuple[str, list[tuple[float | None, str]]]] = []  # by entry its loss, and why there is none
        members = [entry for entry in members if len(entry.validation) > 1]
        for axis, _ in AXES:
            curves = [curve(entry.validation, axis) for entry in members]
            ends = [points[-1][0] for points in curves if len(points) > 1]
            if len(ends) > 1:
                there = [(loss_at(points, min(ends)), _not_there(points, axis)) for points in curves]
                columns.append((f"at {_PLACES[axis](min(ends))}", there))
        if columns:
            dashes = MissingCells()
            rows = []
            for number, entry in enumerate(members):
                cells = [(title, *values[number]) for title, values in columns]
                drawn = [dashes.cell(decimal(loss, 4), entry.name, title, why) for title, loss, why in cells]
                rows.append([escape(entry.name), *drawn])
            head = f"<h3>{escape(_kind(kind))}</h3>" if len(groups(entries)) > 1 else ""
            tables.append(head + html.wide(html.table(("run", *(title for title, _ in columns)), rows)) + dashes.note())
    said = "Validation loss where the shortest curve ends, by tokens, time and bytes; interpolated between two points."
    return html.section("As far as all have come", said, "".join(tables)) if tables else ""


def _ends(entries: Sequence[ComparedRun]) -> str:
    known = [end for end in ENDS if any(finite(entry.ends.get(end[0])) for entry in entries)]
    dashes = MissingCells()
    rows = []
    for place, entry in enumerate(entries):
        ends = [dashes.cell(form(entry.ends.get(key)), entry.name, title, _no_end(entry, key)) for key, title, form in known]
        rows.append([_named(entry, place), *ends, escape(entry.kind[0])])
    said = (
        "At the end, or by now; for an arm, means over its seeds. Sent, received: by all learners. Blocked: the "
        "learner that was blocked most."
    )
    head = ("run", *(title for _, title, _ in known), "losses in")
    return html.section("End values", said, html.wide(html.table(head, rows)) + dashes.note())


def _values(entries: Sequence[ComparedRun]) -> str:
    names = dict.fromkeys(name for entry in entries for name in entry.values)
    dashes = MissingCells()
    rows = []
    for name in names:
        values = [(entry, decimal(entry.values.get(name), 4)) for entry in entries]
        rows.append([escape(name), *(dashes.cell(text, entry.name, name, _no_value(entry, name)) for entry, text in values)])
    table = html.wide(html.table(("value", *(entry.name for entry in entries)), rows)) + dashes.note()
    return html.section("Values", "Of the global model at the end.", table) if rows else ""


def _settings(entries: Sequence[ComparedRun]) -> str:
    rows = differing(entries)
    alike = len({name for entry in entries for name in entry.settings}) - len(rows)
    if not rows:
        return html.section("Settings that differ", f"None: all {alike} are the same.", "")
    cells = [[escape(name), *(MISSING if value is None else escape(str(value)) for value in row)] for name, row in rows.items()]
    table = html.wide(html.table(("setting", *(entry.name for entry in entries)), cells))
    none = (
        f" {MISSING} means that a run does not have the setting, or no value for it."
        if any(None in row for row in rows.values())
        else ""
    )
    return html.section("Settings that differ", f"As runs were created with them. {alike} others are the same.{none}", table)


def _changes(entries: Sequence[ComparedRun]) -> str:
    rows = [[escape(entry.name), escape(change)] for entry in entries for change in entry.changes]
    said = "Made while the runs went on."
    return html.section("Changes", said, html.wide(html.table(("run", "change"), rows))) if rows else ""


# --- small parts ----------------------------------------------------------------------------------------------------


def _counted(entries: Sequence[ComparedRun]) -> str:
    """Return how many there are, in words: ``2 runs``, ``1 run and 3 arms of experiments``."""
    arms = sum(entry.arm for entry in entries)
    runs = len(entries) - arms
    said = [f"{runs} run{'s' if runs > 1 else ''}"] if runs else []
    said += [f"{arms} arms of experiments" if arms > 1 else "1 arm of an experiment"] if arms else []
    return " and ".join(said)


def _no_end(entry: ComparedRun, key: str) -> str:
    """Return why an entry does not have one of :data:`ENDS`."""
    if entry.ends.get(key) is not None:
        return "not a finite number"
    if key in OF_ARMS:
        return "one seed has no spread" if entry.arm else "only an arm of an experiment has it"
    return _not_recorded(entry, key in AT_END)


def _no_value(entry: ComparedRun, name: str) -> str:
    """Return why an entry does not have a further loss or metric."""
    return "not a finite number" if name in entry.values else _not_recorded(entry, at_end=True)


def _not_recorded(entry: ComparedRun, at_end: bool) -> str:
    if entry.arm:
        return "its experiment did not record it"
    if entry.state == FINISHED:
        return "the run did not record it"
    return "known when the run is over" if at_end else "not recorded yet"


def _not_there(points: Sequence[Point], axis: Axis) -> str:
    """Return why a curve has no loss where the shortest one ends."""
    if not points:
        return f"its losses are not known by {axis}"
    return "known only at its end" if len(points) == 1 else f"its first loss is at {_PLACES[axis](points[0][0])}"


def _kind(kind: tuple[str, str]) -> str:
    return f"{kind[0]}, {kind[1]}"


def _named(entry: ComparedRun, place: int) -> str:
    return f'<i style="background:{_css(place)}"></i>{escape(entry.name)}'


def _css(place: int) -> str:
    return f"var(--s{place % _COLOURS})"


def _dash(place: int) -> str:
    return _DASHES[place // _COLOURS % len(_DASHES)]
