"""The report's pictures as SVG text: drawn from numbers alone, coloured by CSS variables, every name escaped.

Positions are in the pixels of the picture's own ``viewBox``. What the page's script needs to answer a pointer is in ``data-``
attributes; without the script the pictures are the same.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from diloco.report.units import count, decimal, duration, share

Point = tuple[float, float]

MAX_POINTS = 240  # of a line: means over as many parts of its extent
MAX_DOTS = 40  # of a strong line that are marked one by one
MAX_SPANS = 600  # of one learner's timeline
MAX_MERGES = 2500
MAX_FRAGMENTS = 64
LABEL_WIDTH = 130  # of an absence, from which on it is written into it
CARRIED = 2.0  # times the usual number of steps: an offer that holds more brings work along that was carried over

STATES = ("starting", "stepping", "sending", "waiting", "recovering", "closing", "leaving", "finished", "left", "gone")
_TIME_STEPS_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


@dataclass(frozen=True)
class Line:
    """A named line of a chart; ``css`` is its colour."""

    name: str
    css: str
    points: Sequence[Point]
    strong: bool = False


def nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    """About ``wanted`` round numbers within [low, high]: steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    return [round(step * index, 12) for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def time_ticks(end_s: float, wanted: int) -> list[float]:
    """About ``wanted`` round times from 0 to ``end_s``."""
    step = next((step for step in _TIME_STEPS_S if end_s / step <= wanted), None)
    if step is None:
        step = 86400 * math.ceil(end_s / wanted / 86400)
    return [float(step * index) for index in range(math.floor(end_s / step + 1e-9) + 1)]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most ``limit`` points, each the mean of those in one of as many equal parts of the line's extent."""
    if len(points) <= limit:
        return list(points)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / limit or 1.0
    parts: dict[int, list[Point]] = {}
    for point in points:
        parts.setdefault(min(limit - 1, max(0, int((point[0] - low) / width))), []).append(point)
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for _, part in sorted(parts.items())]


def loss_range(lines: Sequence[Line], references: Mapping[str, float]) -> Point:
    """From just below the lowest value to the 90th percentile, and so that the reference lines are in the picture."""
    values = sorted(y for line in lines for _, y in line.points)
    low, high = values[0], values[min(len(values) - 1, len(values) * 9 // 10)]
    wanted = [value for name, value in references.items() if name != "unigram"]
    low, high = min([low, *wanted]), max([high, *wanted])
    margin = max(0.04 * (high - low), 0.02)
    return max(0.0, low - margin), high + margin


def line_chart(
    lines: Sequence[Line], references: Mapping[str, float], *, time: bool, label: str, moments: Sequence[tuple[float, str]] = ()
) -> str:
    """Loss over time (s) or over tokens, with dashed lines at the references; answers the pointer with every line's value.

    ``moments``: where on the level axis something happened to the whole run, and what.
    """
    wide, high, left, right, top, bottom = 560, 320, 44, 12, 14, 40
    lines = [Line(line.name, line.css, thin(line.points), line.strong) for line in lines if line.points]
    if not lines:
        return '<p class="empty">No loss was recorded.</p>'
    end = max(line.points[-1][0] for line in lines) or 1.0
    low, top_value = loss_range(lines, references)

    def x(value: float) -> float:
        return left + (wide - left - right) * value / end

    def y(value: float) -> float:
        return high - bottom - (high - top - bottom) * (value - low) / (top_value - low)

    form: Callable[[float], str] = duration if time else count
    clip = "clip-time" if time else "clip-tokens"
    area = f'x="{left}" y="{top}" width="{wide - left - right}" height="{high - top - bottom}"'
    parts = [f'<clipPath id="{clip}"><rect {area}/></clipPath>']
    for tick in nice_ticks(low, top_value, 6):
        parts.append(across("grid", left, wide - right, y(tick)))
        parts.append(text_at("tick", left - 8, y(tick) + 4, "end", f"{tick:.4g}"))
    ticks = time_ticks(end, 6) if time else nice_ticks(0, end, 6)
    parts.extend(text_at("tick", x(tick), high - bottom + 18, "middle", form(tick)) for tick in ticks)
    parts.append(text_at("axis", (left + wide - right) / 2, high - 4, "middle", label))
    for name, value in references.items():
        if low <= value <= top_value:
            parts.append(across("reference", left, wide - right, y(value)))
            parts.append(text_at("reference", wide - right, y(value) - 5, "end", f"{name} {value:.2f}"))
    for at, name in moments:
        parts.append(f'<line class="reference" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{top}" y2="{high - bottom}"/>')
        beyond = x(at) > (left + wide - right) / 2
        parts.append(text_at("reference", x(at) + (-5 if beyond else 5), top + 10, "end" if beyond else "start", name))
    for line in sorted(lines, key=lambda line: line.strong):
        path = "".join(f"{'L' if n else 'M'}{x(px):.1f} {y(py):.1f}" for n, (px, py) in enumerate(line.points))
        kind = "line strong" if line.strong else "line"
        parts.append(
            f'<path class="{kind}" clip-path="url(#{clip})" d="{path}" style="stroke:{line.css}" '
            f'data-name="{escape(line.name)}"/>'
        )
        if line.strong and len(line.points) <= MAX_DOTS:
            parts.extend(
                f'<circle class="dot" clip-path="url(#{clip})" cx="{x(px):.1f}" cy="{y(py):.1f}" r="3.5" '
                f'style="fill:{line.css}" data-name="{escape(line.name)}"/>'
                for px, py in line.points
            )
    parts.append(f'<line class="cross" y1="{top}" y2="{high - bottom}" x1="{left}" x2="{left}"/>')
    data = {
        "left": left,
        "right": wide - right,
        "end": end,
        "time": time,
        "lines": [
            {
                "name": line.name,
                "css": line.css,
                "x": [_short(px) for px, _ in line.points],
                "y": [_short(py) for _, py in line.points],
            }
            for line in sorted(lines, key=lambda line: not line.strong)
        ],
    }
    return (
        f'<svg class="chart" viewBox="0 0 {wide} {high}" role="img" aria-label="Loss over {escape(label)}" '
        f'data-chart="{escape(json.dumps(data, separators=(",", ":")))}">{"".join(parts)}</svg>'
    )


def bars(rows: Sequence[tuple[str, float | None, str, str]], *, label_width: int = 96) -> str:
    """Horizontal bars from zero: (label, value, its text, colour); a value that is not known has no bar."""
    known = [value for _, value, _, _ in rows if value is not None and math.isfinite(value)]
    if not known:
        return '<p class="empty">Nothing to compare.</p>'
    wide, step, thick, text_width = 560, 27, 13, 96
    scale = (wide - label_width - text_width) / (max(known) or 1.0)
    parts = []
    for number, (name, value, text, css) in enumerate(rows):
        y = number * step
        length = max(2.0, value * scale) if value is not None and math.isfinite(value) else 0.0
        parts.append(text_at("label", label_width - 10, y + 17, "end", _cut(name, 15)))
        parts.append(f'<rect x="{label_width}" y="{y + 6}" width="{length:.1f}" height="{thick}" rx="3" style="fill:{css}"/>')
        parts.append(text_at("value", label_width + length + 8, y + 17, "start", text))
    return f'<svg class="bars" viewBox="0 0 {wide} {len(rows) * step}" role="img">{"".join(parts)}</svg>'


def timeline(activity: Mapping[str, Sequence[tuple[float, float, str]]], end_s: float) -> str:
    """One row a learner, coloured by what it was doing; gaps are times in which it was not heard."""
    if not activity or not end_s > 0:
        return '<p class="empty">No activity was recorded.</p>'
    wide, left, right, row, thick = 1120, 110, 12, 26, 16
    high = len(activity) * row
    scale = (wide - left - right) / end_s
    parts = [time_axis(end_s, left, scale, high)]
    for number, (name, spans) in enumerate(activity.items()):
        y = number * row + (row - thick) / 2
        parts.append(row_name(name, left, number * row + row / 2))
        for start_s, stop_s, state in joined_spans(spans, end_s):
            css = f"var(--state-{state})" if state in STATES else "var(--muted)"
            tip = f"{name}\n{state}\n{moment(start_s)} to {moment(stop_s)}"
            parts.append(
                f'<rect x="{left + start_s * scale:.1f}" y="{y:.1f}" width="{max(0.6, (stop_s - start_s) * scale):.1f}" '
                f'height="{thick}" style="fill:{css}" data-tip="{escape(tip)}"/>'
            )
    return f'<svg class="rows" viewBox="0 0 {wide} {high + 24}" role="img">{"".join(parts)}</svg>'


def merges(rounds: Sequence[Mapping[str, Any]], colours: Mapping[str, str], end_s: float) -> tuple[str, int]:
    """Every version of every fragment: a column of one mark a learner, in the learners' order, left out where it had no part.

    A pale mark: the offer was made from an older version than the newest. Returns the picture and how many of the rounds
    are in it (evenly spread, if there are too many).
    """
    fragments = sorted({int(merged["fragment"]) for merged in rounds})[:MAX_FRAGMENTS]
    if not fragments or not end_s > 0:
        return '<p class="empty">Nothing was merged.</p>', 0
    rounds = [merged for merged in rounds if int(merged["fragment"]) in set(fragments)]
    drawn = rounds[:: -(-len(rounds) // MAX_MERGES)]
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
            f'data-tip="{escape(_merge_tip(merged, members))}"/>'
        )
    parts = [time_axis(end_s, left, scale, high)]
    for fragment, y in places.items():
        parts.append(across("grid", left, wide - right, y))
        parts.append(row_name(f"fragment {fragment}", left, y + row / 2))
    parts.append(f'<path class="absent" d="{"".join(absent)}"/>')
    for (name, stale), rects in marks.items():
        faded = ";opacity:.45" if stale else ""
        parts.append(f'<path d="{"".join(rects)}" style="fill:{colours[name]}{faded}" data-name="{escape(name)}"/>')
    parts.extend(hits)
    return f'<svg class="rows" viewBox="0 0 {wide} {high + 24}" role="img">{"".join(parts)}</svg>', len(drawn)


def _merge_tip(merged: Mapping[str, Any], members: Mapping[str, tuple[float, int]]) -> str:
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
    """When a learner began the last ``steps`` of the steps that it had taken by ``at_s``; between two times it went evenly."""
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
    """The value at ``x``, not below 0, on the way from the origin through points that grow both ways; beyond them the last."""
    after = bisect_right(points, x, key=lambda point: point[0])
    if after == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[after - 1] if after else (0.0, 0.0), points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True)
class Group:
    """A region of a run, as it is drawn: its learners, each with times (s) and its step then, and when it was away."""

    name: str
    css: str
    learners: Mapping[str, Sequence[Point]]
    absences: Sequence[tuple[float, float]]


def regions(rounds: Sequence[Mapping[str, Any]], groups: Sequence[Group], homes: Mapping[str, str], end_s: float) -> str:
    """Who was merged when: a lane a learner, in it a row a fragment, and a mark for each of its offers that was merged.

    A mark has the colour of the region that owned the fragment then; ``homes`` gives each syncer's. From a mark whose offer
    held much more work than usual a pale line goes back over the time that the work took. Shaded: the region was away.
    """
    fragments = sorted({int(merged["fragment"]) for merged in rounds})[:MAX_FRAGMENTS]
    lanes = [name for group in groups for name in group.learners]
    if not fragments or not lanes or not end_s > 0:
        return '<p class="empty">Nothing was merged.</p>'
    rounds = [merged for merged in rounds if int(merged["fragment"]) in set(fragments)]
    drawn = rounds[:: -(-len(rounds) // MAX_MERGES)]
    wide, left, right, mark, title, gap = 1120, 110, 12, 4.0, 22, 5
    lane = min(72.0, max(14.0, 480 / len(lanes)))
    row = lane / len(fragments)
    scale = (wide - left - right - mark) / end_s
    rows = {fragment: number * row for number, fragment in enumerate(fragments)}
    colours = {group.name: group.css for group in groups}
    steps = sorted(int(member[3]) for merged in rounds for member in merged["members"])
    usual = steps[len(steps) // 2] if steps else 0

    tops: dict[str, float] = {}
    parts, y = [], 0.0
    for group in groups:
        height = title + len(group.learners) * (lane + gap)
        parts.append(across("grid", left, wide - right, y))
        parts.append(f'<rect x="{left - 108}" y="{y + 7:.1f}" width="10" height="10" rx="3" style="fill:{group.css}"/>')
        parts.append(text_at("region", left - 92, y + 16, "start", group.name))
        for from_s, to_s in group.absences:
            x, length = left + from_s * scale, max(1.0, (to_s - from_s) * scale)
            said = f"not heard, {duration(from_s)} to {duration(to_s)}"
            parts.append(
                f'<rect class="away" x="{x:.1f}" y="{y:.1f}" width="{length:.1f}" height="{height:.1f}" '
                f'data-tip="{escape(group.name)}: {said}"/>'
            )
            if length >= LABEL_WIDTH:
                parts.append(text_at("away", x + length / 2, y + 16, "middle", said))
        for number, name in enumerate(group.learners):
            tops[name] = y + title + number * (lane + gap)
            parts.append(row_name(name, left, tops[name] + lane / 2))
        y += height

    marks: dict[str, list[str]] = {}
    carried: dict[str, list[str]] = {}
    paces = {name: points for group in groups for name, points in group.learners.items()}
    for merged in drawn:
        css = colours.get(homes.get(str(merged.get("syncer")), ""), "var(--soft)")
        at_s = float(merged["wall_s"])
        x = left + at_s * scale
        for name, _, _, held in merged["members"]:
            if str(name) not in tops:
                continue
            top = tops[str(name)] + rows[int(merged["fragment"])]
            marks.setdefault(css, []).append(f"M{x:.1f} {top:.1f}h{mark:g}v{max(0.8, row - 0.5):.1f}h-{mark:g}z")
            if held > CARRIED * usual:
                back = (at_s - _began_s(paces[str(name)], at_s, held)) * scale
                carried.setdefault(css, []).append(
                    f"M{x - back:.1f} {top:.1f}h{back:.1f}v{max(0.8, row - 0.5):.1f}h-{back:.1f}z"
                )
    parts.insert(0, time_axis(end_s, left, scale, y))
    parts.extend(f'<path class="carried" d="{"".join(rects)}" style="fill:{css}"/>' for css, rects in carried.items())
    parts.extend(f'<path d="{"".join(rects)}" style="fill:{css}"/>' for css, rects in marks.items())
    away = [
        f"{group.name} was not heard from {duration(from_s)} to {duration(to_s)}"
        for group in groups
        for from_s, to_s in group.absences
    ]
    label = "; ".join([f"Merged offers over time, by learner, in {len(groups)} regions", *away])
    return f'<svg class="rows" viewBox="0 0 {wide} {y + 24:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def joined_spans(spans: Sequence[tuple[float, float, str]], end_s: float) -> list[tuple[float, float, str]]:
    """The spans, neighbours of one state joined; if still too many, equal parts, each with the state it was longest in."""
    joined: list[tuple[float, float, str]] = []
    for start_s, stop_s, state in spans:
        if joined and joined[-1][2] == state and start_s - joined[-1][1] < 0.002 * end_s:
            joined[-1] = (joined[-1][0], stop_s, state)
        else:
            joined.append((start_s, stop_s, state))
    if len(joined) <= MAX_SPANS:
        return joined
    part_s = end_s / MAX_SPANS
    shares: list[dict[str, float]] = [{} for _ in range(MAX_SPANS)]
    for start_s, stop_s, state in joined:
        first, last = (min(MAX_SPANS - 1, max(0, int(moment_s / part_s))) for moment_s in (start_s, stop_s))
        for part in range(first, last + 1):
            inside_s = min(stop_s, (part + 1) * part_s) - max(start_s, part * part_s)
            shares[part][state] = shares[part].get(state, 0.0) + max(0.0, inside_s)
    return [
        (part * part_s, (part + 1) * part_s, max(states, key=lambda state: states[state]))
        for part, states in enumerate(shares)
        if sum(states.values()) > 0.5 * part_s
    ]


def time_axis(end_s: float, left: float, scale: float, high: float) -> str:
    """Lines from 0 down to ``high``, ``scale`` pixels a second, with their times below."""
    return "".join(
        f'<line class="grid" x1="{left + tick * scale:.1f}" x2="{left + tick * scale:.1f}" y1="0" y2="{high}"/>'
        + text_at("tick", left + tick * scale, high + 17, "middle", duration(tick))
        for tick in time_ticks(end_s, 12)
    )


def row_name(name: str, left: float, middle: float) -> str:
    """A row's name, to the left of where the row begins."""
    return text_at("label", left - 12, middle + 4, "end", _cut(name, 14))


def text_at(kind: str, x: float, y: float, anchor: str, text: str) -> str:
    """``text``, escaped, of the style sheet's class ``kind``."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def across(kind: str, left: float, right: float, y: float) -> str:
    """A level line of the style sheet's class ``kind``."""
    return f'<line class="{kind}" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def moment(value_s: float) -> str:
    """Seconds as ``12:05.3``."""
    minutes, seconds = divmod(value_s, 60)
    return f"{int(minutes)}:{seconds:04.1f}"


def _short(value: float) -> float:
    return float(f"{value:.5g}")
