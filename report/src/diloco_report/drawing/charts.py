"""The report's pictures as SVG text: drawn from numbers alone, coloured by CSS variables, every name escaped.

Positions are in the pixels of the picture's own ``viewBox``. What the page's script needs to answer a pointer is in ``data-``
attributes; without the script the pictures are the same.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from diloco_report.colours import cut_middle, short_names
from diloco_report.drawing.curves import Point
from diloco_report.drawing.frame import across, text_at, time_ticks, upright
from diloco_report.units import clock, decimal, duration, share

ROW_NAME = 14  # characters of a row's name
TICK_WIDTH = 40  # pixels of a time below an axis
NAMES_WIDTH = 100  # pixels of the rows' names
MAX_SPANS = 600  # of one learner's timeline
ALL_SPANS, LEAST_SPANS = 6000, 60  # of all together, and of each, however many there are
MAX_MERGES = 2500
MAX_FRAGMENTS = 64
LABEL_WIDTH = 130  # of an absence, from which on it is written into it
LONG = 2.0  # times the usual number of steps: of an offer that holds more, the time of its work is drawn

STATES = ("starting", "stepping", "sending", "waiting", "recovering", "closing", "leaving", "finished", "left", "gone")


def bars(rows: Sequence[tuple[str, float | None, str, str]]) -> str:
    """Draw bars from zero, one a row: (label, value, its text, colour); an unknown value has no bar."""
    known = [value for _, value, _, _ in rows if value is not None and math.isfinite(value)]
    if not known:
        return '<p class="empty">Nothing to compare.</p>'
    longest = max(known) or 1.0
    drawn = []
    for name, value, text, css in rows:
        part = max(0.005, value / longest) if value is not None and math.isfinite(value) else 0.0
        bar = f'<i style="width:{100 * part:.1f}%;background:{css}"></i>' if part else ""
        drawn.append(f'<tr><th scope="row">{escape(name)}</th><td>{bar}</td><td>{escape(text)}</td></tr>')
    return f'<table class="bars"><tbody>{"".join(drawn)}</tbody></table>'


def timeline(activity: Mapping[str, Sequence[tuple[float, float, str]]], end_s: float) -> str:
    """Draw one row a learner, coloured by its state; gaps are times in which it was not heard."""
    if not activity or not end_s > 0:
        return '<p class="empty">No activity was recorded.</p>'
    wide, left, right, row, thick = 1120, 110, 12, 26, 16
    high = len(activity) * row
    scale = (wide - left - right) / end_s
    parts, names = [time_axis(end_s, left, scale, high)], []
    shown = short_names(list(activity), ROW_NAME)
    for number, (name, spans) in enumerate(activity.items()):
        y = number * row + (row - thick) / 2
        names.append(row_name(shown[name], left, number * row + row / 2))
        for start_s, stop_s, state in joined_spans(spans, end_s, min(MAX_SPANS, max(LEAST_SPANS, ALL_SPANS // len(activity)))):
            css = f"var(--state-{state})" if state in STATES else "var(--muted)"
            log_head = f"{name}\n{state}\n{moment(start_s)} to {moment(stop_s)}"
            parts.append(
                f'<rect x="{left + start_s * scale:.1f}" y="{y:.1f}" width="{max(0.6, (stop_s - start_s) * scale):.1f}" '
                f'height="{thick}" style="fill:{css}" data-tip="{escape(log_head)}"/>'
            )
    label = f"States of {len(activity)} learners over {duration(end_s)}"
    return _lanes(names, parts, wide, high + 24, label)


def merges(rounds: Sequence[Mapping[str, Any]], colours: Mapping[str, str], end_s: float) -> tuple[str, int]:
    """Draw every version of every fragment: a column of one mark a learner that had a part in it, in the learners' order.

    A pale mark: the offer was made from an older version than the newest. Returns the picture and how many of the rounds
    are in it (evenly spread, if there are too many).
    """
    fragments = sorted({int(merged["fragment"]) for merged in rounds})[:MAX_FRAGMENTS]
    if not fragments or not end_s > 0:
        return '<p class="empty">Nothing was merged.</p>', 0
    rounds = [merged for merged in rounds if int(merged["fragment"]) in set(fragments)]
    drawn = spread(rounds, MAX_MERGES)
    wide, left, right, mark = 1120, 110, 12, 5.0
    lane = 4 if len(colours) <= 4 else 3 if len(colours) <= 8 else 2
    row = len(colours) * lane + 6
    scale = (wide - left - right - mark) / end_s
    high = len(fragments) * row
    lanes = {name: number for number, name in enumerate(colours)}
    places = {fragment: number * row for number, fragment in enumerate(fragments)}
    marks: dict[tuple[str, bool], list[str]] = {}
    absent: list[str] = []
    hits = []
    for merged in drawn:
        x, y = left + float(merged["wall_s"]) * scale, places[int(merged["fragment"])] + 3
        members = {str(name): (weight, staleness) for name, weight, staleness, _ in merged["members"]}
        for name, number in lanes.items():
            rect = f"M{x:.1f} {y + number * lane:.1f}h{mark:g}v{lane - 0.6:g}h-{mark:g}z"
            if name in members:
                marks.setdefault((name, bool(members[name][1])), []).append(rect)
            else:
                absent.append(rect)
        hits.append(
            f'<rect class="hit" x="{x - 1:.1f}" y="{y - 2:.1f}" width="{mark + 2:g}" height="{row - 2}" '
            f'data-tip="{escape(_merge_log_head(merged, members))}"/>'
        )
    parts = [time_axis(end_s, left, scale, high), *(across("grid", left, wide - right, y) for y in places.values())]
    names = [row_name(f"fragment {fragment}", left, y + row / 2) for fragment, y in places.items()]
    parts.append(f'<path class="absent" d="{"".join(absent)}"/>')
    for (name, stale), rects in marks.items():
        faded = ";opacity:.45" if stale else ""
        parts.append(f'<path d="{"".join(rects)}" style="fill:{colours[name]}{faded}" data-name="{escape(name)}"/>')
    parts.extend(hits)
    label = f"Learners in each of {len(drawn)} merges of {len(fragments)} fragments over {duration(end_s)}"
    return _lanes(names, parts, wide, high + 24, label), len(drawn)


def spread(rounds: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """Return at most ``most`` merges: those of every second version, or of every fourth, and so on, of each fragment."""
    every = 1
    while len(rounds) > most:
        every *= 2
        rounds = [merged for merged in rounds if int(merged["version"]) % every == 0]
    return rounds


def _merge_log_head(merged: Mapping[str, Any], members: Mapping[str, tuple[float, int]]) -> str:
    lines = [
        f"fragment {merged['fragment']}, version {merged['version']}",
        f"at {moment(float(merged['wall_s']))}; quorum after {decimal(merged.get('quorum_s'), 2)} s, "
        f"merged after {decimal(merged.get('duration_s'), 2)} s",
    ]
    for name, (weight, staleness) in members.items():
        late = f", {staleness} version{'s' if staleness != 1 else ''} behind" if staleness else ""
        lines.append(f"{name}  {share(weight, 1)}{late}")
    return "\n".join(lines)


def _began_s(points: Sequence[Point], at_s: float, steps: int) -> float:
    """Return when a learner began the last ``steps`` of its steps until ``at_s``; between two times it went evenly."""
    reached = 0.0
    path: list[Point] = []
    for time_s, step in points:  # a process that begins again may have to take some steps once more
        if step > reached:
            path.append((time_s, step))
            reached = step
    if not path:
        return at_s
    began = max(0.0, _between(path, at_s) - steps)
    return min(at_s, _between([(step, time_s) for time_s, step in path], began))


def _between(points: Sequence[Point], x: float) -> float:
    """Interpolate at ``x`` on the way from the origin through points that grow both ways; beyond them, return the last."""
    after = bisect_right(points, x, key=lambda point: point[0])
    if after == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[after - 1] if after else (0.0, 0.0), points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True)
class ChartRegion:
    """A region of a run, as it is drawn: its learners, each with times (s) and its step then, and when it was away."""

    name: str
    css: str
    learners: Mapping[str, Sequence[Point]]
    absences: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Regional:
    """The picture of :func:`regions`: a lane a learner below its region's title, in it a row a fragment."""

    groups: Sequence[ChartRegion]
    fragments: Sequence[int]
    end_s: float
    wide: int = 1120
    left: int = 110
    right: int = 1108
    mark: float = 4.0
    title: int = 22
    gap: int = 5

    @property
    def lane(self) -> float:
        return min(72.0, max(14.0, 480 / sum(len(group.learners) for group in self.groups)))

    @property
    def row(self) -> float:
        return self.lane / len(self.fragments)

    @property
    def scale(self) -> float:
        """Pixels a second."""
        return (self.right - self.left - self.mark) / self.end_s

    def tops(self) -> tuple[list[float], dict[str, float], float]:
        """Return where each group begins, where each learner's lane does, and where the last one ends."""
        begins, lanes, y = [], {}, 0.0
        for group in self.groups:
            begins.append(y)
            y += self.title
            for name in group.learners:
                lanes[name] = y
                y += self.lane + self.gap
        return begins, lanes, y

    def rect(self, x: float, y: float, length: float) -> str:
        """Return the path of a rectangle one row high."""
        return f"M{x:.1f} {y:.1f}h{length:.1f}v{max(0.8, self.row - 0.5):.1f}h-{length:.1f}z"


def regions(rounds: Sequence[Mapping[str, Any]], groups: Sequence[ChartRegion], homes: Mapping[str, str], end_s: float) -> str:
    """Draw who was merged when: a lane a learner, in it a row a fragment, and a mark for each of its offers that was merged.

    A mark has the colour of the region that owned the fragment then; ``homes`` gives each syncer's. From a mark whose offer
    held much more work than usual a pale line goes back over the time that the work took. Shaded: the region was away.
    """
    fragments = sorted({int(merged["fragment"]) for merged in rounds})[:MAX_FRAGMENTS]
    if not fragments or not any(group.learners for group in groups) or not end_s > 0:
        return '<p class="empty">Nothing was merged.</p>'
    rounds = [merged for merged in rounds if int(merged["fragment"]) in set(fragments)]
    lanes = _Regional(groups, fragments, end_s)
    begins, _, end = lanes.tops()
    parts, names = [time_axis(end_s, lanes.left, lanes.scale, end)], []
    for group, top, bottom in zip(groups, begins, [*begins[1:], end], strict=True):
        parts += _group(group, lanes, top, bottom)
        names += _group_names(group, lanes, top)
    parts += _merged_offers(rounds, lanes, homes)
    away = [
        f"{group.name} was not heard from {duration(from_s)} to {duration(to_s)}"
        for group in groups
        for from_s, to_s in group.absences
    ]
    label = "; ".join([f"Merged offers over time, by learner, in {len(groups)} regions", *away])
    return _lanes(names, parts, lanes.wide, end + 24, label)


def _group(group: ChartRegion, lanes: _Regional, top: float, bottom: float) -> list[str]:
    """Draw the line above a region, and its absences."""
    left = lanes.left
    parts = [across("grid", left, lanes.right, top)]
    for from_s, to_s in group.absences:
        x, length = left + from_s * lanes.scale, max(1.0, (to_s - from_s) * lanes.scale)
        said = f"not heard, {duration(from_s)} to {duration(to_s)}"
        parts.append(
            f'<rect class="away" x="{x:.1f}" y="{top:.1f}" width="{length:.1f}" height="{bottom - top:.1f}" '
            f'data-tip="{escape(group.name)}: {said}"/>'
        )
        if length >= LABEL_WIDTH:
            parts.append(text_at("away", x + length / 2, top + 16, "middle", said))
    return parts


def _group_names(group: ChartRegion, lanes: _Regional, top: float) -> list[str]:
    """Draw a region's title and its learners' names."""
    left, (_, tops, _) = lanes.left, lanes.tops()
    shown = short_names([name for each in lanes.groups for name in each.learners], ROW_NAME)
    return [
        f'<rect x="{left - 108}" y="{top + 7:.1f}" width="10" height="10" rx="3" style="fill:{group.css}"/>',
        text_at("region", left - 92, top + 16, "start", group.name),
        *(row_name(shown[name], left, tops[name] + lanes.lane / 2) for name in group.learners),
    ]


def _merged_offers(rounds: Sequence[Mapping[str, Any]], lanes: _Regional, homes: Mapping[str, str]) -> list[str]:
    """Draw a mark for each merged offer, and before them the pale lines of those that held much more work than usual."""
    _, tops, _ = lanes.tops()
    rows = {fragment: number * lanes.row for number, fragment in enumerate(lanes.fragments)}
    colours = {group.name: group.css for group in lanes.groups}
    paces = {name: points for group in lanes.groups for name, points in group.learners.items()}
    steps = sorted(int(member[3]) for merged in rounds for member in merged["members"])
    usual = steps[len(steps) // 2] if steps else 0
    marks: dict[str, list[str]] = {}
    long: dict[str, list[str]] = {}
    for merged in spread(rounds, MAX_MERGES):
        css = colours.get(homes.get(str(merged.get("syncer")), ""), "var(--soft)")
        at_s = float(merged["wall_s"])
        x = lanes.left + at_s * lanes.scale
        for name, _, _, held in merged["members"]:
            if str(name) not in tops:
                continue
            top = tops[str(name)] + rows[int(merged["fragment"])]
            marks.setdefault(css, []).append(lanes.rect(x, top, lanes.mark))
            if held > LONG * usual:
                back = (at_s - _began_s(paces[str(name)], at_s, held)) * lanes.scale
                long.setdefault(css, []).append(lanes.rect(x - back, top, back))
    pale = [f'<path class="long" d="{"".join(rects)}" style="fill:{css}"/>' for css, rects in long.items()]
    return pale + [f'<path d="{"".join(rects)}" style="fill:{css}"/>' for css, rects in marks.items()]


def _lanes(names: Sequence[str], parts: Sequence[str], wide: int, high: float, label: str) -> str:
    """Return a picture of rows over time in two: the names stay in sight where the rows scroll."""
    rows = f'viewBox="{NAMES_WIDTH} 0 {wide - NAMES_WIDTH} {high:.0f}" role="img" aria-label="{escape(label)}"'
    beside = f'viewBox="0 0 {NAMES_WIDTH} {high:.0f}" aria-hidden="true"'
    return (
        f'<div class="lanes"><svg class="names" {beside}>{"".join(names)}</svg>'
        f'<svg class="rows" {rows}>{"".join(parts)}</svg></div>'
    )


def joined_spans(
    spans: Sequence[tuple[float, float, str]], end_s: float, most: int = MAX_SPANS
) -> list[tuple[float, float, str]]:
    """Join neighbouring spans of one state; if there are more than ``most``, return equal parts with their longest states."""
    joined: list[tuple[float, float, str]] = []
    for start_s, stop_s, state in spans:
        if joined and joined[-1][2] == state and start_s - joined[-1][1] < 0.002 * end_s:
            joined[-1] = (joined[-1][0], stop_s, state)
        else:
            joined.append((start_s, stop_s, state))
    if len(joined) <= most:
        return joined
    part_s = end_s / most
    shares: list[dict[str, float]] = [{} for _ in range(most)]
    for start_s, stop_s, state in joined:
        first, last = (min(most - 1, max(0, int(moment_s / part_s))) for moment_s in (start_s, stop_s))
        for part in range(first, last + 1):
            inside_s = min(stop_s, (part + 1) * part_s) - max(start_s, part * part_s)
            shares[part][state] = shares[part].get(state, 0.0) + max(0.0, inside_s)
    return [
        (part * part_s, (part + 1) * part_s, max(states, key=lambda state: states[state]))
        for part, states in enumerate(shares)
        if sum(states.values()) > 0.5 * part_s
    ]


def time_axis(end_s: float, left: float, scale: float, high: float) -> str:
    """Draw lines from 0 down to ``high``, ``scale`` pixels a second, with their times below."""
    return "".join(
        upright("grid", left + tick * scale, 0, high)
        + text_at("tick", left + tick * scale, high + 17, _anchor(tick * scale, end_s * scale), duration(tick))
        for tick in time_ticks(end_s, 12)
    )


def horizontal(end_s: float) -> str:
    """Return a sentence for the axis of :func:`time_axis`."""
    return f"Horizontal: wall time ({clock(end_s)})."


def _anchor(x: float, end: float) -> str:
    """Return the anchor of a time at ``x`` of an axis so long, at whose ends a text in the middle would be cut."""
    return "start" if x < TICK_WIDTH / 2 else "end" if x > end - TICK_WIDTH / 2 else "middle"


def row_name(name: str, left: float, middle: float) -> str:
    """Draw a row's name, to the left of where the row begins."""
    return text_at("label", left - 12, middle + 4, "end", cut_middle(name, ROW_NAME))


def moment(value_s: float) -> str:
    """Format seconds as ``12:05.3``."""
    minutes, seconds = divmod(value_s, 60)
    return f"{int(minutes)}:{seconds:04.1f}"
