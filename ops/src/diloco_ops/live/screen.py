"""A run as it happens, in a terminal: a status dictionary drawn to a given width and height, or as one plain line.

``render`` is pure: the same status and size give the same picture, so that it is tested without a
terminal. Everything is laid out by hand to exact widths, since a view that wraps one line too early is worse than none;
what does not fit is left out by its importance, columns first, then rows, with a line that says so.

The status (all keys but the first may be missing) is what the coordinator answers:

    run, preset, state ("waiting", "training", "closing", "finished"), wall_s, eta_s (None: unknown), tokens_before
    (of runs that this one continues), tokens_budget, tokens_processed, tokens_merged, versions, rounds, nats_url, parameters
    (of the model)
    learners    {name: state, region, step, tokens, tokens_per_s, loss, step_s, busy_fraction, blocked_fraction, bytes_up,
                 bytes_down, rounds_merged, rounds_missed, seen_s_ago}
    shards      {name: region, fragments, rounds, versions, refused, bytes_in, bytes_out, seen_s_ago,
                 open: [{fragment, answers, quorum, waited_s}]}
    regions     {name: members, heard (of them), away_s (None: it is here), fragments, bytes_in, bytes_out}
    page        address of the run's page, where it is known here
    news        what happened last, where that is not long ago
    starting    what is being started, while there is no learner yet
    failures    {evaluator: the error of its task's code; learner: why its steps are in vain}
    epochs      {source of a mix of data: so often have merged tokens gone over it}
    validation  [[wall_s, tokens, loss], ...]                     of the global model
    units       of the losses
    loss        {learner: [[wall_s, tokens, loss], ...]}
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diloco.process.logs import printable
from diloco_ops.live.curve import loss_curve
from diloco_ops.live.lanes import LEGEND, lane
from diloco_ops.live.parts import ACCENT, STATES, Status, bar, clean, ends, mean, panel, speed, states_text, total
from diloco_ops.live.rows import Shown, window_text
from diloco_ops.live.tables import TableRows, learner_names, make_tables, share_rows, whole_width
from diloco_ops.live.watched import Watched
from diloco_report.facts import natural
from diloco_report.units import count, decimal, duration, share, size, times

MIN_WIDTH = 32
NEWS_S = 30.0  # for which an event stays in the head of the view
ENDING = "the services end, then the report is made"  # after the end of training
_WIDE = 112  # from here on the curve stands beside the tables
_LEAST_LANES = 3  # fewer of many say little
_LANE_NAME = 16
_WHOLE_CURVE = 14  # lines
LINKED = 16  # lines, from which on the page's address has one


def render(status: Status, width: int, height: int, watched: Watched | None = None) -> RenderableType:
    """Draw the whole view, at most ``width`` cells wide and ``height`` lines high (at least 32 by 4).

    ``watched``, where the run has been followed: lanes are drawn of it, if there is room.
    """
    width = max(width, MIN_WIDTH)
    head = glance(status, width, roomy=height >= 26, linked=height >= LINKED) + _failures(status, width)[: height // 4 - 1]
    left = max(0, height - len(head))
    learners: Mapping[str, Any] = status.get("learners") or {}
    shards: Mapping[str, Any] = status.get("shards") or {}
    if width >= _WIDE:
        column = max(78, width * 11 // 20)
        rows = share_rows(left, len(learners), len(shards), curve=0)
        tables = make_tables(status, column, rows)
        curve_lines = min(max(rows.lines, 12), left)
        parts: list[RenderableType] = []
        if tables and curve_lines >= 5:
            grid = Table.grid(padding=0)
            grid.add_row(Group(*tables), loss_curve(status, width - column, curve_lines))
            parts.append(grid)
        if watched is not None:
            parts += _lanes(watched, status, width, left - max(rows.lines, curve_lines))
    else:
        rows = share_rows(left, len(learners), len(shards), curve=7)
        parts = make_tables(status, width, rows)
        if left - rows.lines >= 6:
            parts.append(loss_curve(status, width, min(left - rows.lines, 22)))
    return Group(*head, *parts)


def render_whole(status: Status, width: int | None = None) -> RenderableType:
    """Draw the status with all learners and syncers, for a file or a ticket: as wide as all names in full need, or as asked."""
    learners: Mapping[str, Any] = status.get("learners") or {}
    shards: Mapping[str, Any] = status.get("shards") or {}
    width = whole_width(learners, shards) if width is None else max(width, MIN_WIDTH)
    tables = make_tables(status, width, TableRows(max(1, len(learners)), max(1, len(shards))))
    return Group(*glance(status, width), *_failures(status, width), *tables, loss_curve(status, width, _WHOLE_CURVE))


def plain_line(status: Status) -> str:
    """Return the status as one line, for where there is no terminal."""
    learners: Mapping[str, Any] = status.get("learners") or {}
    parts = [
        duration(status.get("wall_s")),
        str(status.get("state", "waiting")),
        f"{count(status.get('tokens_processed', 0))} of {count(status.get('tokens_budget'))} tokens ({_progress_text(status)})"
        + _after(status),
        f"{count(_rate(status))} tokens/s",
    ]
    if (loss := mean(learner.get("loss") for learner in learners.values())) is not None:
        parts.append(f"loss {loss:.3f}")
    if (validation := _last_validation(status)) is not None:
        parts.append(f"validation {validation:.3f}")
    parts.append(f"{status.get('versions', 0)} versions")
    parts.append(f"up {size(total(learners, 'bytes_up'))}, down {size(total(learners, 'bytes_down'))}")
    parts.append(states_text(learners) or "no learner yet")
    regions: Mapping[str, Any] = status.get("regions") or {}
    parts.extend(
        f"{name} away {duration(region['away_s'])}" for name, region in regions.items() if region.get("away_s") is not None
    )
    if status.get("state") == "finished":
        parts.append(ENDING)
    elif status.get("eta_s") is not None:
        parts.append(f"{duration(status['eta_s'])} left")
    return printable(" | ".join(parts))


def failure_lines(status: Status) -> list[str]:
    """Return a line for each member that says by which error it does not do its work."""
    return [printable(f"{name}: {failure}") for name, failure in (status.get("failures") or {}).items()]


def _failures(status: Status, width: int) -> list[Text]:
    """Draw the errors in full, as lines."""
    lines = [line for failure in failure_lines(status) for line in textwrap.wrap(failure, width - 2, break_on_hyphens=False)]
    return [Text(f" {line}", STATES["gone"], no_wrap=True, overflow="ellipsis") for line in lines]


def _lanes(watched: Watched, status: Status, width: int, height: int) -> list[RenderableType]:
    """Draw what each learner did, as many of them as fit; nothing if hardly any would."""
    names = sorted(status.get("learners") or {}, key=natural)
    shown, rows = Shown(), min(len(names), height - 2)
    if rows < max(1, min(len(names), _LEAST_LANES)):
        return []
    run_s = float(status.get("wall_s") or 0.0)
    from_s, to_s = shown.span(run_s)
    room = width - 5 - _LANE_NAME
    shown_names = learner_names(status, _LANE_NAME)
    lines = [ends(shown_names[name], lane(watched.lane(name), from_s, to_s, room), width - 4) for name in names[:rows]]
    return [panel(lines, f"learners, {window_text(shown.window_s, run_s)}", width, LEGEND)]


class LiveView:
    """The view kept up to date on a terminal's alternate screen; the last picture stays on the normal one.

    A context manager. A new size of the terminal is taken over at the next :meth:`update` or :meth:`wait`.
    ``watched``: the run, of which nothing else is told. ``page``: the address of its page.
    """

    def __init__(self, console: Console, watched: Watched, page: str | None = None) -> None:
        self._console, self._watched, self._page = console, watched, page
        self._live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._last: Status | None = None

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()
        if self._last is not None:
            last = {key: value for key, value in self._last.items() if key != "news"}
            self._console.print(render(last, self._console.width, min(self._console.height - 1, 32), self._watched))

    def wait(self, starting: str, wall_s: float) -> None:
        """Draw what is being started, since ``wall_s`` seconds, while the run has no learner yet."""
        status = {"run": self._watched.name, "state": "starting", "wall_s": wall_s, "starting": starting, "page": self._page}
        self._live.update(render(status, self._console.width, self._console.height), refresh=True)

    def update(self, status: Status) -> None:
        """Draw this status now."""
        status = {**status, "page": self._page}
        self._last = status
        now_s = time.monotonic()
        self._watched.answer(status, now_s)
        recent = [each for each in self._watched.events if not each.minor and self._watched.run_s(now_s) - each.at_s < NEWS_S]
        if status.get("state") == "finished":
            status["news"] = f"finished: {ENDING}"
        elif recent:
            status["news"] = f"{duration(recent[-1].at_s)}  {recent[-1].who}: {recent[-1].text}"
        self._live.update(render(status, self._console.width, self._console.height, self._watched), refresh=True)


def glance(status: Status, width: int, *, roomy: bool = False, linked: bool = True) -> list[Text]:
    """Draw the run in three lines: name and state, progress, and the most important figures.

    A run with regions has one more, and ``linked`` one with a page has another.
    """
    state = str(status.get("state", "waiting"))
    title = Text(" ").append("diloco", f"bold {ACCENT}").append(f"  {clean(status.get('run', 'run'))}", "bold")
    if preset := status.get("preset"):
        title.append(f"  {clean(preset)}", "dim")
    right = Text().append(f"● {clean(state)}", STATES.get(state, "")).append(f"  {duration(status.get('wall_s', 0))}", "bold")
    if status.get("eta_s") is not None and state != "finished":
        right.append(f"  {duration(status['eta_s'])} left", "dim")
    right.append(" ")

    tokens = f"{count(status.get('tokens_processed', 0))} / {count(status.get('tokens_budget'))} tokens{_after(status)}"
    figures = Text(f" {_progress_text(status):>5}", "bold")
    if width >= 56:
        figures.append(f"  {tokens} ", "not bold")
    progress = bar(_progress(status), max(4, width - figures.cell_len - 1), ACCENT)
    lines = [ends(title, right, width), Text(" ").append_text(progress).append_text(figures)]
    facts = [_facts(status, width)]
    if regions := status.get("regions"):
        facts.append(_regions(regions, width))
    if frozen := status.get("frozen"):
        facts.append(_frozen(frozen, width))
    if linked and (news := status.get("news")):
        facts.append(Text(f" {clean(news, width - 2)}", STATES["sending"], no_wrap=True, overflow="ellipsis"))
    if linked and (page := status.get("page")):
        facts.append(Text(" page ", "dim", no_wrap=True, overflow="ellipsis").append(clean(page, width - 6), "underline"))
    return [Text(""), *lines, *facts, Text("")] if roomy else [*lines, *facts]


def _frozen(frozen: Mapping[str, Any], width: int) -> Text:
    """Draw the frozen base of an adapter: its name without folders, its size, and the hash that all learners' bases have."""
    name = clean(frozen["model"]).rpartition("/")[2] if frozen.get("model") else f"{frozen['tensors']} tensors"
    line = Text(" frozen ", "dim", no_wrap=True, overflow="ellipsis").append(name, "bold")
    return line.append(f"   {count(frozen['values'])} values   hash {clean(frozen['hash'])}", "dim")


def _facts(status: Status, width: int) -> Text:
    learners: Mapping[str, Any] = status.get("learners") or {}
    up, down = total(learners, "bytes_up"), total(learners, "bytes_down")
    facts: list[tuple[str, str]] = []
    if (validation := _last_validation(status)) is not None:
        facts.append((decimal(validation), " validation loss"))
    facts.append((f"↑ {size(up)} ↓ {size(down)}", ""))
    parallel = _data_parallel_bytes(status)
    if parallel and up + down:
        by, word = times(parallel / (up + down))
        facts.append((f"{by}×", f" {word} than data-parallel"))
    facts.append((count(_rate(status)), " tokens/s"))
    if status.get("tokens_processed"):
        facts.append((share(status.get("tokens_merged", 0) / status["tokens_processed"]), " merged"))
    facts.append((str(status.get("versions", 0)), " versions"))
    facts += [(decimal(value, 2), f" epochs of {clean(name)}") for name, value in (status.get("epochs") or {}).items()]
    line = Text(" ")
    for number, (value, unit) in enumerate(facts):
        part = Text("   " if number else "").append(value, "bold").append(unit, "dim")
        if line.cell_len + part.cell_len < width:
            line.append_text(part)
    return line


def _regions(regions: Mapping[str, Any], width: int) -> Text:
    """Draw all regions in one line, with as much of each as fits beside the others."""
    for more in (2, 1, 0):
        line = Text(" ", no_wrap=True, overflow="ellipsis")
        for number, (name, region) in enumerate(regions.items()):
            line.append("   " if number else "").append_text(_region(name, region, more))
        if line.cell_len <= width:
            break
    return line


def _region(name: str, region: Mapping[str, Any], more: int) -> Text:
    away_s = region.get("away_s")
    line = Text().append(clean(name), "bold")
    if away_s is not None:
        line.append(f" away {duration(away_s)}", STATES["gone"])
    else:
        line.append(f" {region.get('heard', 0)}/{region.get('members', 0)}", STATES["stepping"])
    if more:
        line.append(f" {region.get('fragments', 0)} fragments", "dim")
    if more > 1:
        line.append(f" ↑ {size(region.get('bytes_out'))} ↓ {size(region.get('bytes_in'))}", "dim")
    return line


def _data_parallel_bytes(status: Status) -> float:
    """Return the bytes that a ring all-reduce of bfloat16 gradients would have sent and received for the same steps.

    They are 2 (M-1)/M of the model each way, each step, by each of the M learners.
    """
    learners: Mapping[str, Any] = status.get("learners") or {}
    ring = 2 * (len(learners) - 1) / len(learners) if learners else 0.0
    return 2 * total(learners, "step") * ring * 2 * (status.get("parameters") or 0)


def _rate(status: Status) -> float:
    """Return the tokens a second: now, or over the whole run that is finished."""
    wall_s = float(status.get("wall_s") or 0.0)
    if status.get("state") == "finished" and wall_s > 0:
        return float(status.get("tokens_processed", 0)) / wall_s
    return speed(status.get("learners") or {})


def _progress(status: Status) -> float:
    budget = status.get("tokens_budget") or 0
    return min(1.0, max(0.0, status.get("tokens_processed", 0) / budget)) if budget else 0.0


def _after(status: Status) -> str:
    before = status.get("tokens_before") or 0
    return f" after {count(before)}" if before else ""


def _progress_text(status: Status) -> str:
    return f"{math.floor(100 * _progress(status))} %"  # 100 % only when it is


def _last_validation(status: Status) -> float | None:
    points = status.get("validation") or []
    return points[-1][2] if points and points[-1][2] is not None else None
