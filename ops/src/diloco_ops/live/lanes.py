"""Lanes of the live views: what a learner did, and when a fragment was merged, a character for each stretch of time.

Pure. A state has a character of its own, so that lanes are read without colour.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from diloco.control.status import Span
from diloco_ops.live.parts import FRAME, STATES

GLYPHS = {
    "starting": "s",
    "stepping": "━",
    "sending": "▲",
    "waiting": "·",
    "recovering": "r",
    "closing": "c",
    "leaving": "l",
    "left": "l",
    "finished": "=",
    "ejected": "x",
    "quarantined": "x",
}
LEGEND = "━ stepping  ▲ sending  · waiting  r recovering  c closing  gap: not heard"
LEGENDS = (
    LEGEND,
    "s starting  l leaving  = finished  x excluded",
    "fragments: number of learners in a merge, the fewest in each cell; + is ten or more",
)


def behind(spans: Sequence[Span], end_s: float) -> list[Span]:
    """Return the parts of spans after a moment."""
    return [(max(a, end_s), b, state) for a, b, state in spans if b > end_s]


def lane(spans: Sequence[Span], from_s: float, to_s: float, width: int) -> Text:
    """Draw the states of a stretch of time, each cell that which fills most of it; a gap where a learner was not heard."""
    line = Text()
    cell_s = max(to_s - from_s, 1e-9) / max(1, width)
    at, cells = 0, list(spans)
    for number in range(width):
        a, b = from_s + number * cell_s, from_s + (number + 1) * cell_s
        while at < len(cells) and cells[at][1] <= a:
            at += 1
        filled: dict[str, float] = {}
        for start, end, state in cells[at:]:
            if start >= b:
                break
            filled[state] = filled.get(state, 0.0) + min(end, b) - max(start, a)
        state = max(filled, key=lambda each: filled[each], default="")
        # a span is as long as heartbeats say: half a cell without any is a gap
        if sum(filled.values()) < 0.5 * cell_s and not (filled and number == width - 1):
            state = ""
        line.append(GLYPHS.get(state, "?" if state else " "), STATES.get(state, ""))
    return line


def merge_lane(merges: Sequence[tuple[float, int]], from_s: float, to_s: float, width: int) -> Text:
    """Draw merges over a stretch of time: a cell has the fewest members of a merge in it, ``+`` for ten or more.

    ``merges``: time and number of members, in the order of time.
    """
    cell_s = max(to_s - from_s, 1e-9) / max(1, width)
    fewest: dict[int, int] = {}
    for at_s, members in merges:
        if from_s <= at_s <= to_s:
            cell = min(width - 1, int((at_s - from_s) / cell_s))
            fewest[cell] = min(members, fewest.get(cell, members))
    line = Text()
    for cell in range(width):
        if cell in fewest:
            line.append("+" if fewest[cell] > 9 else str(fewest[cell]), "bold")
        else:
            line.append("─", FRAME)
    return line
