"""One learner, fragment or syncer with all that is known of it, as lines of text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import chop_cells
from rich.text import Text

from diloco.process.logs import printable
from diloco_ops.live import lanes
from diloco_ops.live.curve import loss_lines
from diloco_ops.live.parts import STATES, Status, clean, learner_colours
from diloco_ops.live.rows import WINDOWS, Shown, open_rounds_of, window_text
from diloco_ops.live.tables import open_round
from diloco_ops.live.watched import RunEvent, Watched
from diloco_report.facts import natural
from diloco_report.units import MISSING, count, decimal, duration, share, size

LABEL = 14  # cells of a fact's name
LAST_MERGES = 5
CURVE_LINES = 8


def learner(watched: Watched, status: Status, name: str, run_s: float, width: int, height: int) -> list[Text]:
    """Return a learner's figures, its lanes over all stretches of time, its loss, and what happened to it."""
    row: Mapping[str, Any] = (status.get("learners") or {}).get(name, {})
    state = str(row.get("state", MISSING))
    lines = [_title(f"learner {clean(name)}", width), _fact("doing", Text(clean(state), STATES.get(state, "")), width)]
    step, tokens = clean(row.get("step", MISSING)), [count(row.get(key)) for key in ("tokens", "tokens_merged", "lost_tokens")]
    facts = {
        "step": f"{step}, {decimal(row.get('step_s'))} s each, {count(row.get('tokens_per_s'))} tokens/s",
        "loss": decimal(row.get("loss"), 4),
        "tokens": f"{tokens[0]} processed, {tokens[1]} merged, {tokens[2]} lost",
        "versions": f"in {count(row.get('rounds_merged'))}, not in {count(row.get('rounds_missed'))}",
        "time": f"{share(row.get('busy_fraction'), 1)} a step in flight, {share(row.get('blocked_fraction'), 2)} blocked",
        "network": f"{size(row.get('bytes_up'))} up, {size(row.get('bytes_down'))} down",
        "heard": f"{_ago(row.get('seen_s_ago'))}{_where(row)}",
    }
    lines += [_fact(label, text, width) for label, text in facts.items()]
    spans = watched.lane(name)
    for label, from_s, to_s in _windows(run_s):
        lines.append(_fact(label, lanes.lane(spans, from_s, to_s, width - LABEL), width))
    points = (status.get("loss") or {}).get(name) or []
    if points and height - len(lines) >= CURVE_LINES + 3:
        lines += loss_lines({name: points}, [], learner_colours(status), width, CURVE_LINES)
    return _with_events(lines, watched.events_of(name), height, width)


def fragment(watched: Watched, status: Status, index: int, run_s: float, width: int, height: int) -> list[Text]:
    """Return a fragment's round, its owner, its merges over all stretches of time, who was in them, and what happened."""
    known = watched.fragments.get(index)
    if known is None:
        return [_title(f"fragment {index}", width)]
    opened = open_rounds_of(status).get(index)
    lines = [
        _title(f"fragment {index}", width),
        _fact("version", f"{known.version} of {clean(known.owner or MISSING)}, epoch {_or_missing(known.epoch)}", width),
        _fact("size", f"{count(known.parameters)} parameters", width),
        _fact("round", Text("none is open", "dim") if opened is None else _round(opened), width),
    ]
    merges = [(at_s, len(members)) for at_s, _, members in known.merges]
    for label, from_s, to_s in _windows(run_s):
        lines.append(_fact(label, lanes.merge_lane(merges, from_s, to_s, width - LABEL), width))
    for at_s, version, members in known.merges[-1 : -LAST_MERGES - 1 : -1]:
        merged = ", ".join(clean(member) for member in members) or "none"
        lines.append(_fact(f"version {version}", f"{_ago(run_s - at_s)}: {merged}", width))
    shares = Counter(member for _, _, members in known.merges for member in members)
    if shares:
        said = "  ".join(
            f"{clean(member)} {number}/{len(known.merges)}"
            for member, number in sorted(shares.items(), key=lambda item: natural(item[0]))
        )
        lines.append(_fact("members", said, width))
    return _with_events(lines, watched.events_of(f"fragment {index}"), height, width)


def syncer(watched: Watched, status: Status, name: str, run_s: float, width: int, height: int) -> list[Text]:
    """Return a syncer's figures, its fragments and open rounds, and what happened to it."""
    row: Mapping[str, Any] = (status.get("shards") or {}).get(name, {})
    owned = sorted(index for index, known in watched.fragments.items() if known.owner == name)
    lines = [
        _title(f"syncer {clean(name)}", width),
        _fact("doing", clean(row.get("state", MISSING)), width),
        _fact("fragments", ", ".join(map(str, owned)) or "none", width),
        _fact("rounds", f"{count(row.get('rounds'))}, {count(row.get('versions'))} versions", width),
        _fact("network", f"{size(row.get('bytes_in'))} in, {size(row.get('bytes_out'))} out", width),
        _fact("refused", f"{count(row.get('refused'))} messages", width),
        _fact("heard", f"{_ago(row.get('seen_s_ago'))}{_where(row)}", width),
    ]
    lines += [_fact(f"round of {opened.get('fragment')}", _round(opened), width) for opened in row.get("open") or []]
    return _with_events(lines, watched.events_of(name), height, width)


def event_line(event: RunEvent, width: int) -> Text:
    """Return an event as one line: when, who, and what happened."""
    line = Text(f"{duration(event.at_s):>8} ", "dim", no_wrap=True)
    line.append(f"{clean(event.who):<12} ", "bold").append(clean(event.text, width), "dim" if event.minor else "")
    return _cut(line, width)


def sample(watched: Watched, run_s: float, width: int, most: int) -> list[Text]:
    """Return the newest sample of the global model, and when it was drawn, in ``most`` lines at most; none if there is none."""
    if watched.sample is None:
        return []
    at_s, version, text = watched.sample
    title = Text(f" a sample of version {count(version)}, {duration(max(0.0, run_s - at_s))} ago", "bold")
    lines = [part for line in text.strip().split("\n") for part in chop_cells(printable(line), width - 2) or [""]]
    return [title, *(Text(f" {line}", "dim") for line in lines[: most - 1])]


def _windows(run_s: float) -> list[tuple[str, float, float]]:
    """Return the stretches of time that are shorter than the run, and the whole run."""
    shorter = [window_s for window_s in WINDOWS if window_s is not None and window_s < run_s]
    return [(window_text(window_s, run_s), *Shown(window_s=window_s).span(run_s)) for window_s in (*shorter, None)]


def _with_events(lines: list[Text], events: Sequence[RunEvent], height: int, width: int) -> list[Text]:
    room = height - len(lines) - 1
    if room > 0 and events:
        lines = [*lines, Text("events", "dim"), *(event_line(event, width) for event in events[-room:])]
    return lines[:height]


def _title(text: str, width: int) -> Text:
    return _cut(Text(text, "bold", no_wrap=True), width)


def _fact(label: str, value: str | Text, width: int) -> Text:
    line = Text(f"{label:<{LABEL}}", "dim", no_wrap=True)
    return _cut(line.append_text(value if isinstance(value, Text) else Text(value, "default")), width)


def _cut(line: Text, width: int) -> Text:
    if line.cell_len > width:
        line.truncate(width, overflow="ellipsis")
    return line


def _round(opened: Mapping[str, Any]) -> Text:
    return open_round(opened).append(f", {opened.get('answers', 0)} offers, quorum {opened.get('quorum', 1)}", "dim")


def _ago(value_s: object) -> str:
    said = duration(value_s)
    return said if said == MISSING else f"{said} ago"


def _where(row: Mapping[str, Any]) -> str:
    region, software = row.get("region"), row.get("software")
    return (f", in {clean(region)}" if region else "") + (f", diloco {clean(software)}" if software else "")


def _or_missing(value: object) -> str:
    return MISSING if value is None else clean(value)
