"""Small parts of the live view: colours, panels, bars, and sums over learners."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from diloco.process.logs import COLOURS, printable
from diloco_report.colours import assigned, terminal
from diloco_report.facts import natural

Status = Mapping[str, Any]

DOT = "● "  # before a name, in its colour
ACCENT = "#3b9eff"
FRAME = "grey37"
STATES = {
    "starting": "grey62",
    "stepping": "#2fae72",
    "sending": "#d9b02b",
    "waiting": "#e5873a",
    "recovering": "#c66bd6",
    "closing": "#24b3c2",
    "leaving": "#24b3c2",
    "finished": "grey70",
    "left": "grey70",
    "gone": "#e2557a",
    "ejected": "#e2557a",
    "quarantined": "#e2557a",
    "training": "#2fae72",
}


def panel(body: Sequence[Text], title: str, width: int, note: str | Text) -> Panel:
    head = Text().append(title, "bold default")
    if note:
        shown = note.copy() if isinstance(note, Text) else Text(note, "default dim")
        room = width - cell_len(title) - 10
        if room >= 8:
            shown.truncate(room, overflow="ellipsis")
            head = Text().append(title, "bold default").append(" · ", FRAME).append_text(shown)
    for line in body:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Panel(Group(*body), title=head, title_align="left", box=box.ROUNDED, border_style=FRAME, width=width, padding=(0, 1))


def bar(fraction: float, width: int, style: str) -> Text:
    halves = round(min(1.0, max(0.0, fraction)) * width * 2)
    full, half = divmod(halves, 2)
    return Text().append("━" * full + "╸" * half, style).append("─" * (width - full - half), FRAME)


def ends(left: Text, right: Text, width: int) -> Text:
    room = width - right.cell_len - 1
    if left.cell_len > room:
        left.truncate(max(0, room), overflow="ellipsis")
    return left.append(" " * max(1, width - left.cell_len - right.cell_len)).append_text(right)


def clean(value: object, most: int = 48) -> str:
    text = printable(str(value))
    return text if len(text) <= most else set_cell_size(text, most - 1).rstrip() + "…"


def speed(learners: Mapping[str, Any]) -> float:
    return float(sum(learner.get("tokens_per_s") or 0 for learner in learners.values()))


def total(learners: Mapping[str, Any], key: str) -> int:
    return sum(int(learner.get(key) or 0) for learner in learners.values())


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def learner_colours(status: Status) -> dict[str, str]:
    """Return a colour (``#rrggbb``) of its own for each learner of a status: a shade of its region's, as the page has it."""
    learners: Mapping[str, Any] = status.get("learners") or {}
    regions = {name: str(learner.get("region") or "") for name, learner in learners.items()}
    places = assigned(sorted(learners, key=natural), regions, list(status.get("regions") or {}))
    return {name: terminal(COLOURS, *place) for name, place in places.items()}


def states_text(learners: Mapping[str, Any]) -> str:
    counts: dict[str, int] = {}
    for learner in learners.values():
        state = clean(learner.get("state", "unknown"))
        counts[state] = counts.get(state, 0) + 1
    return ", ".join(f"{number} {state}" for state, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
