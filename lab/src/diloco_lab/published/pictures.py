"""Pictures of simulations as SVG text: in a page with :mod:`diloco_report`'s style sheet, or by :func:`standalone` as a file.

Positions are in the pixels of a picture's own ``viewBox``. Without data the picture is a sentence, as in the report of a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from diloco_lab.bandwidth import Curve
from diloco_lab.simulator.cluster import MICROS, ClusterLearner
from diloco_lab.simulator.goodput import GoodputRow
from diloco_lab.simulator.lifetime import Stretch
from diloco_lab.simulator.outcome import MergedVersion
from diloco_lab.simulator.recovery import RecoveryNeeds
from diloco_report.drawing.charts import joined_spans, moment, row_name, time_axis
from diloco_report.drawing.frame import across, nice_ticks, spread, text_at
from diloco_report.html import style
from diloco_report.units import count, share

COLOURS = {
    "data-parallel": "var(--s5)",
    "data-parallel-elastic": "var(--s1)",
    "diloco": "var(--s2)",
    "streaming": "var(--s3)",
    "decoupled": "var(--s0)",
}
STATES = {
    "stepping": "var(--state-stepping)",
    "stepping slowly": "var(--state-sending)",
    "waiting": "var(--state-waiting)",
    "reconfiguring": "var(--state-recovering)",
    "beginning again": "var(--state-gone)",
    "not heard": "var(--state-starting)",
}
WIDTH = 1120
LANE = 15  # height of a learner's bar in a timeline
LABEL = 15  # pixels from one label to the next below it
LETTER = 7  # pixels of a letter, at most on average
SLOW = 1.01  # times a learner's own step time, from which on it steps slowly

Quantity = Literal["goodput", "uptime"]
_MEANINGS: dict[Quantity, str] = {
    "goodput": "Goodput: share of the allocated chip time that went into steps that count",
    "uptime": "Uptime: share of the time in which some learner took a step",
}


@dataclass(frozen=True)
class PicturedFault:
    """A fault of a learner, written above its bar."""

    at_us: int
    learner: str
    text: str


def goodput(rows: Sequence[GoodputRow]) -> str:
    """Draw goodput against chips, a line for each strategy and M."""
    return _by_chips(rows, "goodput")


def uptime(rows: Sequence[GoodputRow]) -> str:
    """Draw uptime against chips, a line for each strategy and M."""
    return _by_chips(rows, "uptime")


def _by_chips(rows: Sequence[GoodputRow], quantity: Quantity) -> str:
    """Draw means with their 95 % intervals as a band; hollow marks are published values."""
    if not rows:
        return '<p class="empty">Nothing was simulated.</p>'
    keys = list(dict.fromkeys((row.strategy, row.learners) for row in rows))
    numbers = sorted({row.chips for row in rows})
    left, right, top, bottom = 52, 250, 38, 46
    high = max(454, top + bottom + LABEL * len(keys))
    x = _log_scale(numbers[0], numbers[-1], left + 16, WIDTH - right - 16)

    def y(value: float) -> float:
        return high - bottom - (high - top - bottom) * value

    parts = [text_at("title", 4, 16, "start", _MEANINGS[quantity]), *_share_axis(y, left, WIDTH - right)]
    ticks = _apart(numbers, x, 46)
    parts += [text_at("tick", x(number), high - bottom + 18, "middle", count(number)) for number in ticks]
    parts.append(text_at("axis", (left + WIDTH - right) / 2, high - 6, "middle", "chips, of all learners together"))
    marks: list[str] = []
    ends: list[tuple[float, float, str, str]] = []
    most = max(row.learners for row in rows)
    for strategy, learners in keys:
        css = COLOURS.get(strategy, "var(--soft)")
        line = sorted((row for row in rows if (row.strategy, row.learners) == (strategy, learners)), key=lambda row: row.chips)
        name = strategy if {key for key in keys if key[0] == strategy} == {(strategy, 1)} else f"{strategy}, M = {learners}"
        means = [(x(row.chips), y(getattr(row, quantity))) for row in line]
        lows = [(x(row.chips), y(getattr(row, f"{quantity}_low"))) for row in line]
        highs = [(x(row.chips), y(getattr(row, f"{quantity}_high"))) for row in line]
        # more learners, a stronger line
        opacity = 0.45 + 0.55 * math.log2(learners) / math.log2(most) if strategy == "decoupled" and most > 1 else 1.0
        parts.append(f'<path class="band" d="{_path([*highs, *lows[::-1]])}Z" style="fill:{css};opacity:.16"/>')
        parts.append(f'<path class="line strong" d="{_path(means)}" style="stroke:{css};opacity:{opacity:.2f}"/>')
        for row, (px, py) in zip(line, means, strict=True):
            low, mean, up = (100 * getattr(row, f"{quantity}{end}") for end in ("_low", "", "_high"))
            said = f"{name}, {count(row.chips)} chips: {quantity} {mean:.1f} % ({low:.1f} to {up:.1f})"
            parts.append(_dot(px, py, 2.5, f"fill:{css};opacity:{opacity:.2f}", said))
            known = getattr(row, f"published_{quantity}")
            if known is not None:
                said = f"{name}, {count(row.chips)} chips: published {quantity} {share(known)}"
                marks.append(_dot(px, y(known), 4.5, f"fill:none;stroke:{css};stroke-width:1.75", said, "published"))
        ends.append((*means[-1], css, f"{name}: {share(getattr(line[-1], quantity), 1)}"))
    ends.sort(key=lambda end: end[1])
    for place, (px, py, css, said) in zip(spread([end[1] for end in ends], LABEL, top, high - bottom), ends, strict=True):
        edge = WIDTH - right + 26
        parts.append(f'<path d="M{px + 5:.1f} {py:.1f}L{edge - 8} {place:.1f}h5" style="fill:none;stroke:{css};opacity:.6"/>')
        parts.append(text_at("label", edge, place + 4, "start", said))
    if marks:
        parts.append(_dot(left + 14, high - bottom - 18, 4.5, "fill:none;stroke:var(--soft);stroke-width:1.75", "", "key"))
        parts.append(text_at("tick", left + 26, high - bottom - 14, "start", "published; bands: 95 % interval"))
    return _svg(high, f"{quantity} against chips", [*parts, *marks])


@dataclass(frozen=True)
class _Frame:
    """A stretch of time, and its place in a picture of ``WIDTH`` pixels."""

    from_us: int
    until_us: int
    left: int = 110
    right: int = 24

    @property
    def end_s(self) -> float:
        """Return how long it is."""
        return (self.until_us - self.from_us) / MICROS

    @property
    def scale(self) -> float:
        """Return the pixels of a second."""
        return (WIDTH - self.left - self.right) / self.end_s

    def s(self, at_us: int) -> float:
        """Return a time, not beyond an edge, in seconds since the beginning."""
        return (min(max(at_us, self.from_us), self.until_us) - self.from_us) / MICROS

    def x(self, at_us: int) -> float:
        """Return the place of a time, not beyond an edge."""
        return self.left + self.s(at_us) * self.scale


def timeline(
    learners: Sequence[ClusterLearner],
    stretches: Mapping[str, Sequence[Stretch]],
    versions: Sequence[MergedVersion],
    from_us: int,
    until_us: int,
    events: Sequence[PicturedFault] = (),
) -> str:
    """Draw each learner's states; below, the number of slices that compute, and of learners merged into each version.

    ``stretches`` are those of each learner, in order, by its name.
    """
    if not learners or until_us <= from_us:
        return '<p class="empty">No learner was simulated.</p>'
    frame, parts, seen, y = _Frame(from_us, until_us), [], set[str](), 4.0
    for learner in learners:
        own = [event for event in events if event.learner == learner.name and from_us <= event.at_us < until_us]
        for event in own:
            begin = min(frame.x(event.at_us), WIDTH - frame.right - LETTER * len(event.text))
            parts.append(text_at("value", begin, y + 11, "start", event.text))
        y += 15 if own else 0
        parts += _lane(frame, learner, stretches.get(learner.name, ()), y, seen)
        y += LANE + 7

    total = sum(learner.slices for learner in learners)
    panel, base = 84, y + 14 + 84
    parts += _panel_axis("slices", "at work", total, frame, base, panel)
    at_work = working(learners, stretches, from_us, until_us)
    places = [(frame.x(at_us), base - panel * slices / total) for at_us, slices in at_work]
    area = f"M{frame.left} {base:.1f}" + "".join(f"H{px:.1f}V{py:.1f}" for px, py in places)
    closed = f"{area}H{WIDTH - frame.right}V{base:.1f}Z"
    parts.append(f'<path class="slices" d="{closed}" style="fill:var(--accent);opacity:.35"/>')

    panel, base = 64, base + 24 + 64
    parts += _panel_axis("learners in", "a version", len(learners), frame, base, panel)
    bars = "".join(
        f"M{frame.x(version.committed_us):.1f} {base:.1f}V{base - panel * len(version.members) / len(learners):.1f}"
        for version in versions
        if from_us <= version.committed_us < until_us
    )
    parts.append(f'<path class="versions" d="{bars}" style="fill:none;stroke:var(--s2);stroke-width:2;opacity:.75"/>')
    axis = time_axis(frame.end_s, frame.left, frame.scale, base)
    return _svg(base + 50, f"What {len(learners)} learners did over time", [axis, *parts, *_state_key(seen, frame.left, base)])


def _lane(frame: _Frame, learner: ClusterLearner, stretches: Iterable[Stretch], y: float, seen: set[str]) -> list[str]:
    """Draw one learner's states as a bar at ``y``; the states drawn are added to ``seen``."""
    parts = [row_name(learner.name, frame.left, y + LANE / 2)]
    spans = [
        (frame.s(begin), frame.s(end), state)
        for begin, end, state in _spans(learner, stretches)
        if end > frame.from_us and begin < frame.until_us
    ]
    from_s = frame.from_us / MICROS
    for begin_s, stop_s, state in joined_spans(spans, frame.end_s):
        seen.add(state)
        said = f"{learner.name}: {state}, {moment(from_s + begin_s)} to {moment(from_s + stop_s)}"
        width = max(0.6, (stop_s - begin_s) * frame.scale)
        parts.append(
            f'<rect x="{frame.left + begin_s * frame.scale:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{LANE}" style="fill:{STATES[state]}"><title>{escape(said)}</title></rect>'
        )
    return parts


def _state_key(seen: Collection[str], left: float, base: float) -> list[str]:
    """Draw the colours of the states that a timeline shows."""
    parts = []
    for state in (state for state in STATES if state in seen):
        parts.append(f'<rect x="{left:.1f}" y="{base + 32:.1f}" width="11" height="11" rx="3" style="fill:{STATES[state]}"/>')
        parts.append(text_at("label", left + 17, base + 42, "start", state))
        left += 45 + LETTER * len(state)
    return parts


def _spans(learner: ClusterLearner, stretches: Iterable[Stretch]) -> list[tuple[int, int, str]]:
    """Return (from, until, state) of a learner, in order."""
    spans = []
    for stretch in stretches:
        state: str = stretch.kind
        if state == "stepping" and stretch.step_us > SLOW * learner.step_s * MICROS:
            state = "stepping slowly"
        elif stretch.lost:
            state = "beginning again"
        elif state == "absent":
            state = "not heard"
        begin_us, end_us = stretch.silent_us or (stretch.end_us, stretch.end_us)
        if stretch.lost and begin_us > stretch.start_us:  # it was killed in the middle of a step
            spans.append((stretch.start_us, begin_us, "stepping"))
            spans.append((begin_us, stretch.end_us, state))
        elif stretch.kind in ("stepping", "waiting") and end_us > begin_us:
            spans += [(stretch.start_us, begin_us, state), (begin_us, min(end_us, stretch.end_us), "not heard")]
            spans.append((min(end_us, stretch.end_us), stretch.end_us, state))
        else:
            spans.append((stretch.start_us, stretch.end_us, state))
    return [span for span in spans if span[1] > span[0]]


def working(
    learners: Iterable[ClusterLearner], stretches: Mapping[str, Sequence[Stretch]], from_us: int, until_us: int
) -> list[tuple[int, int]]:
    """Return (from when on, how many slices of all learners take part in a step), in order of time."""
    changes: dict[int, int] = {from_us: 0}
    for learner in learners:
        for stretch in stretches.get(learner.name, ()):
            if stretch.kind != "stepping":
                continue
            last_us = stretch.start_us + (stretch.steps - 1) * stretch.step_us
            silent_us = stretch.silent_us or (stretch.end_us, stretch.end_us)
            for begin_us, end_us, slices in (
                (stretch.start_us, last_us, stretch.slices),
                (last_us, silent_us[0], stretch.last_slices),
                (min(silent_us[1], stretch.end_us), stretch.end_us, stretch.last_slices),
            ):
                begin_us, end_us = max(begin_us, from_us), min(end_us, until_us)
                if begin_us < end_us:
                    changes[begin_us] = changes.get(begin_us, 0) + slices
                    changes[end_us] = changes.get(end_us, 0) - slices
    found: list[tuple[int, int]] = []
    now = 0
    for at_us in sorted(changes):
        now += changes[at_us]
        if at_us < until_us and (not found or found[-1][1] != now):
            found.append((at_us, now))
    return found


def utilisation(curves: Sequence[Curve]) -> str:
    """Draw compute utilisation against a link's rate, one panel for each schedule; hollow marks are published values."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return '<p class="empty">No strategy was given.</p>'
    names = list(dict.fromkeys(curve.schedule for curve in curves))
    left, right, top, bottom, between, gap = 52, 24, 64, 46, 54, 104
    high = 420
    wide = (WIDTH - left - right - between * (len(names) - 1)) / len(names)
    rates = [gbit for curve in curves for gbit, _ in curve.points]

    def y(value: float) -> float:
        return high - bottom - (high - top - bottom) * value

    parts, marks = [], []
    for number, name in enumerate(names):
        begin = left + number * (wide + between)
        x = _log_scale(min(rates), max(rates), begin, begin + wide)
        parts.append(text_at("region", begin, 16, "start", f"schedule: {name}"))
        parts += _share_axis(y, begin, begin + wide)
        powers = [10.0**power for power in range(math.ceil(math.log10(min(rates))), math.floor(math.log10(max(rates))) + 1)]
        for gbit in _apart(powers, x, 40):
            parts.append(f'<line class="grid" x1="{x(gbit):.1f}" x2="{x(gbit):.1f}" y1="{top}" y2="{high - bottom}"/>')
            parts.append(text_at("tick", x(gbit), high - bottom + 18, "middle", f"{gbit:g}"))
        parts.append(text_at("axis", begin + wide / 2, high - 6, "middle", "Gbit/s of a datacenter's link, each way"))
        own = [curve for curve in curves if curve.schedule == name]
        drawn: list[Sequence[tuple[float, float]]] = []
        ends: list[tuple[float, float, str, str]] = []
        for curve in own:
            css = COLOURS.get(curve.strategy, "var(--soft)")
            dashed = ";stroke-dasharray:9 9" if curve.points in drawn else ""  # another line shows between the dashes
            drawn.append(curve.points)
            line = [(x(gbit), y(value)) for gbit, value in curve.points]
            parts.append(f'<path class="line strong" d="{_path(line)}" style="stroke:{css}{dashed}"/>')
            reached = next((point for point, (_, value) in zip(line, curve.points, strict=True) if value >= 0.9), line[-1])
            ends.append((*reached, css, curve.strategy))
            for gbit, value in curve.published:
                said = f"{curve.strategy}: published {gbit:g} Gbit/s for {share(value)}"
                style_ = f"fill:none;stroke:{css};stroke-width:1.75"
                marks.append(_dot(x(gbit), y(value), 4.5, style_, said, "published"))
        ends.sort()
        places = spread([end[0] for end in ends], gap, begin + gap / 2, begin + wide - gap / 2)
        for place, (px, py, css, said) in zip(places, ends, strict=True):
            parts.append(
                f'<path d="M{place:.1f} {top - 19}V{top - 13}L{px:.1f} {top - 3}V{py - 5:.1f}" '
                f'style="fill:none;stroke:{css};opacity:.6"/>'
            )
            parts.append(text_at("label", place, top - 24, "middle", said))
    if marks:
        parts.append(_dot(left + 14, top + 20, 4.5, "fill:none;stroke:var(--soft);stroke-width:1.75", "", "key"))
        parts.append(text_at("tick", left + 26, top + 24, "start", "published"))
    return _svg(high, "Compute utilisation against bandwidth", [*parts, *marks])


def recovery(named: Sequence[tuple[str, RecoveryNeeds]]) -> str:
    """Draw the downtime of recovering learners against the link, a line each; hollow marks are where it becomes 0."""
    left, right, top, bottom, high = 52, 150, 14, 46, 360
    most = 2.0 * max((one.steps for _, one in named), default=0)
    if not most:
        return '<p class="empty">No recovery was given.</p>'
    low, up = 0.5, 16.0  # bits a step for each parameter
    x = _log_scale(low, up, left, WIDTH - right)

    def y(steps: float) -> float:
        return high - bottom - (high - top - bottom) * min(1.0, steps / most)

    parts, marks = [], []
    for tick in nice_ticks(0, most, 5):
        parts += [across("grid", left, WIDTH - right, y(tick)), text_at("tick", left - 8, y(tick) + 4, "end", f"{tick:g}")]
    for rate in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        parts.append(text_at("tick", x(rate), high - bottom + 18, "middle", f"{rate:g}"))
    said = "bits a step for each parameter of the link; upwards: downtime in steps"
    parts.append(text_at("axis", (left + WIDTH - right) / 2, high - 6, "middle", said))
    rates = [low * (up / low) ** (part / 200) for part in range(201)]
    for number, (name, one) in enumerate(named):
        css = f"var(--s{number})"
        line = [(x(rate), y(one.downtime_steps(rate))) for rate in rates if one.downtime_steps(rate) <= most]
        parts.append(f'<path class="line strong" d="{_path(line)}" style="stroke:{css}"/>')
        parts.append(text_at("label", line[0][0] + 8, top + 12 + LABEL * number, "start", name))
        said = f"{name}: no downtime from {one.free_rate:.3g} bits a step on"
        marks.append(_dot(x(one.free_rate), y(0), 4.5, f"fill:none;stroke:{css};stroke-width:1.75", said, "free"))
    return _svg(high, "Downtime of a recovering learner against its link", [*parts, *marks])


def standalone(svg: str) -> str:
    """Return a picture as a file of its own: with its part of the style sheet, in the light colours, on a card.

    The colours are written out, since some viewers of SVG know no variables.

    Raises:
        ValueError: it is a sentence and no picture.
    """
    found = re.match(r'<svg class="rows" viewBox="0 0 ([\d.]+) ([\d.]+)"([^>]*)>', svg)
    if found is None:
        raise ValueError(f"no picture: {svg[:80]}")
    wide, high, margin = float(found[1]), float(found[2]), 12
    sheet = style()
    colours = dict(re.findall(r"(--[\w-]+): (#\w+)", sheet[: sheet.index("}")]))
    rules = [line for line in sheet.splitlines() if re.match(r"svg (text|\.(grid|line|tick))", line)]
    box = f'x="{-margin}" y="{-margin}" width="{wide + 2 * margin:g}" height="{high + 2 * margin:g}"'
    whole = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-margin} {-margin} {wide + 2 * margin:g} {high + 2 * margin:g}" '
        f'width="{wide + 2 * margin:g}" height="{high + 2 * margin:g}"{found[3]}>'
        f'<style>{" ".join(rules)}</style><rect {box} rx="14" style="fill:var(--card)"/>{svg[found.end() :]}\n'
    )
    return re.sub(r"var\((--[\w-]+)\)", lambda use: colours[use[1]], whole)


# ---- small parts


def _log_scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """Return a logarithmic scale from ``begin`` to ``end``; a scale of one number has it in the middle."""
    if high <= low:
        return lambda value: (begin + end) / 2
    return lambda value: begin + (end - begin) * math.log(value / low) / math.log(high / low)


def _apart(numbers: Iterable[float], x: Callable[[float], float], least: float) -> list[float]:
    """Return those of ``numbers``, from the first on, that are ``least`` pixels apart, so that each has room for a label."""
    kept: list[float] = []
    for number in numbers:
        if not kept or x(number) - x(kept[-1]) >= least:
            kept.append(number)
    return kept


def _share_axis(y: Callable[[float], float], left: float, right: float) -> list[str]:
    parts = []
    for tick in nice_ticks(0, 1, 5):
        parts.append(across("grid", left, right, y(tick)))
        parts.append(text_at("tick", left - 8, y(tick) + 4, "end", share(tick)))
    return parts


def _panel_axis(name: str, more: str, most: int, frame: _Frame, base: float, high: float) -> list[str]:
    return [
        across("grid", frame.left, WIDTH - frame.right, base),
        across("grid", frame.left, WIDTH - frame.right, base - high),
        text_at("tick", frame.left - 12, base + 4, "end", "0"),
        text_at("tick", frame.left - 12, base - high + 4, "end", count(most)),
        text_at("label", frame.left - 12, base - high / 2 - 4, "end", name),
        text_at("label", frame.left - 12, base - high / 2 + 10, "end", more),
    ]


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(points))


def _dot(x: float, y: float, radius: float, css: str, said: str, kind: str = "mean") -> str:
    title = f"<title>{escape(said)}</title>" if said else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" style="{css}">{title}</circle>'


def _svg(high: float, label: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    return f'<svg class="rows" viewBox="0 0 {WIDTH} {high:.0f}" role="img" aria-label="{escape(label)}">{body}</svg>'
