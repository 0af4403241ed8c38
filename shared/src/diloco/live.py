"""A run as it happens, in a terminal: a status dictionary drawn to a given width and height, or as one plain line.

``render`` is pure: the same status and size give the same picture, so that it is tested, and printed as an SVG, without a
terminal. Everything is laid out by hand to exact widths, since a view that wraps one line too early is worse than none;
what does not fit is left out by its importance, columns first, then rows, with a line that says so.

The status (all keys but the first may be missing) is what the coordinator answers:

    run, preset, state ("waiting", "training", "closing", "finished"), wall_s, eta_s (None: unknown), tokens_budget,
    tokens_processed, tokens_merged, versions, rounds, nats_url, parameters (of the model)
    learners    {name: state, region, step, tokens, tokens_per_s, loss, step_s, busy_fraction, blocked_fraction, bytes_up,
                 bytes_down, rounds_merged, rounds_missed, seen_s_ago}
    shards      {name: region, fragments, rounds, versions, refused, bytes_in, bytes_out, seen_s_ago,
                 open: [{fragment, answers, quorum, waited_s}]}
    regions     {name: members, heard (of them), away_s (None: it is here), fragments, bytes_in, bytes_out}
    validation  [[wall_s, tokens, nats_per_byte], ...]            of the global model
    loss        {learner: [[wall_s, tokens, loss], ...]}
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from diloco.logs import printable, service_colour
from diloco.report.units import count, decimal, duration, share, size

Status = Mapping[str, Any]

MIN_WIDTH = 32
_WIDE = 112  # from here on the curve stands beside the tables
_ACCENT = "#3b9eff"
_GLOBAL = "bold default"
_FRAME = "grey37"
_STATES = {
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


def render(status: Status, width: int, height: int) -> RenderableType:
    """The whole view, at most ``width`` cells wide and ``height`` lines high (at least 32 by 4)."""
    width = max(width, MIN_WIDTH)
    head = _header(status, width, roomy=height >= 26)
    left = max(0, height - len(head))
    learners: Mapping[str, Any] = status.get("learners") or {}
    shards: Mapping[str, Any] = status.get("shards") or {}
    if width >= _WIDE:
        column = max(78, width * 11 // 20)
        rows = _share_rows(left, len(learners), len(shards), curve=0)
        tables = _tables(learners, shards, column, rows)
        curve_lines = min(max(rows.lines, 12), left)
        parts: list[RenderableType] = []
        if tables and curve_lines >= 5:
            grid = Table.grid(padding=0)
            grid.add_row(Group(*tables), _curve(status, width - column, curve_lines))
            parts.append(grid)
    else:
        rows = _share_rows(left, len(learners), len(shards), curve=7)
        parts = _tables(learners, shards, width, rows)
        if left - rows.lines >= 6:
            parts.append(_curve(status, width, min(left - rows.lines, 22)))
    return Group(*head, *parts)


def plain_line(status: Status) -> str:
    """The status as one line, for where there is no terminal."""
    learners: Mapping[str, Any] = status.get("learners") or {}
    parts = [
        duration(status.get("wall_s")),
        str(status.get("state", "waiting")),
        f"{count(status.get('tokens_processed', 0))} of {count(status.get('tokens_budget'))} tokens ({_progress_text(status)})",
        f"{count(_speed(learners))} tokens/s",
    ]
    if (loss := _mean(learner.get("loss") for learner in learners.values())) is not None:
        parts.append(f"loss {loss:.3f}")
    if (validation := _last_validation(status)) is not None:
        parts.append(f"validation {validation:.3f}")
    parts.append(f"{status.get('versions', 0)} versions")
    parts.append(f"up {size(_sum(learners, 'bytes_up'))}, down {size(_sum(learners, 'bytes_down'))}")
    parts.append(_states_text(learners) or "no learner yet")
    regions: Mapping[str, Any] = status.get("regions") or {}
    parts.extend(
        f"{name} away {duration(region['away_s'])}" for name, region in regions.items() if region.get("away_s") is not None
    )
    if status.get("eta_s") is not None and status.get("state") != "finished":
        parts.append(f"{duration(status['eta_s'])} left")
    return printable(" | ".join(parts))


def save_svg(status: Status, path: Path, *, width: int = 100, height: int = 32) -> None:
    """Write the view as an SVG picture of a terminal that needs no font and no file from elsewhere."""
    console = Console(
        record=True, file=io.StringIO(), width=width, height=height, force_terminal=True, color_system="truecolor",
        legacy_windows=False,
    )  # fmt: skip
    console.print(render(status, width, height))
    svg = console.export_svg(title="diloco up", theme=_SVG_THEME, code_format=_SVG_FORMAT, unique_id="diloco")
    path.write_text(svg, encoding="utf-8")


class LiveView:
    """The view kept up to date on a terminal's alternate screen; the last picture stays on the normal one.

    A context manager. Without :meth:`update` nothing is drawn; a new size of the terminal is taken over at the next one.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._last: Status | None = None

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()
        if self._last is not None:
            self._console.print(render(self._last, self._console.width, min(self._console.height - 1, 32)))

    def update(self, status: Status) -> None:
        """Draw this status now."""
        self._last = status
        self._live.update(render(status, self._console.width, self._console.height), refresh=True)


# --- header ---------------------------------------------------------------------------------------------------------


def _header(status: Status, width: int, *, roomy: bool) -> list[RenderableType]:
    state = str(status.get("state", "waiting"))
    title = Text(" ").append("diloco", f"bold {_ACCENT}").append(f"  {_clean(status.get('run', 'run'))}", "bold")
    if preset := status.get("preset"):
        title.append(f"  {_clean(preset)}", "dim")
    right = Text().append(f"● {_clean(state)}", _STATES.get(state, "")).append(f"  {duration(status.get('wall_s', 0))}", "bold")
    if status.get("eta_s") is not None and state != "finished":
        right.append(f"  {duration(status['eta_s'])} left", "dim")
    right.append(" ")

    tokens = f"{count(status.get('tokens_processed', 0))} / {count(status.get('tokens_budget'))} tokens"
    figures = Text(f" {_progress_text(status):>5}", "bold")
    if width >= 56:
        figures.append(f"  {tokens} ", "not bold")
    bar = _bar(_progress(status), max(4, width - figures.cell_len - 1), _ACCENT)
    lines: list[RenderableType] = [_ends(title, right, width), Text(" ").append_text(bar).append_text(figures)]
    facts = [_facts(status, width)]
    if regions := status.get("regions"):
        facts.append(_regions(regions, width))
    return [Text(""), *lines, *facts, Text("")] if roomy else [*lines, *facts]


def _facts(status: Status, width: int) -> Text:
    learners: Mapping[str, Any] = status.get("learners") or {}
    up, down = _sum(learners, "bytes_up"), _sum(learners, "bytes_down")
    facts: list[tuple[str, str]] = []
    if (validation := _last_validation(status)) is not None:
        facts.append((decimal(validation), " validation loss"))
    facts.append((f"↑ {size(up)} ↓ {size(down)}", ""))
    parallel = _data_parallel_bytes(status)
    if parallel and up + down:
        facts.append((f"{parallel / (up + down):.1f}×", " less than data-parallel"))
    facts.append((count(_speed(learners)), " tokens/s"))
    if status.get("tokens_processed"):
        facts.append((share(status.get("tokens_merged", 0) / status["tokens_processed"]), " merged"))
    facts.append((str(status.get("versions", 0)), " versions"))
    line = Text(" ")
    for number, (value, unit) in enumerate(facts):
        part = Text("   " if number else "").append(value, "bold").append(unit, "dim")
        if line.cell_len + part.cell_len < width:
            line.append_text(part)
    return line


def _regions(regions: Mapping[str, Any], width: int) -> Text:
    """All regions in one line, with as much of each as fits beside the others."""
    for more in (2, 1, 0):
        line = Text(" ", no_wrap=True, overflow="ellipsis")
        for number, (name, region) in enumerate(regions.items()):
            line.append("   " if number else "").append_text(_region(name, region, more))
        if line.cell_len <= width:
            break
    return line


def _region(name: str, region: Mapping[str, Any], more: int) -> Text:
    away_s = region.get("away_s")
    line = Text().append(_clean(name), "bold")
    if away_s is not None:
        line.append(f" away {duration(away_s)}", _STATES["gone"])
    else:
        line.append(f" {region.get('heard', 0)}/{region.get('members', 0)}", _STATES["stepping"])
    if more:
        line.append(f" {region.get('fragments', 0)} fragments", "dim")
    if more > 1:
        line.append(f" ↑ {size(region.get('bytes_out'))} ↓ {size(region.get('bytes_in'))}", "dim")
    return line


def _data_parallel_bytes(status: Status) -> float:
    """What a ring all-reduce of bfloat16 gradients would have sent and received for the same steps: 2 (M-1)/M of the model
    each way, each step, by each of the M learners."""
    learners: Mapping[str, Any] = status.get("learners") or {}
    ring = 2 * (len(learners) - 1) / len(learners) if learners else 0.0
    return 2 * _sum(learners, "step") * ring * 2 * (status.get("parameters") or 0)


def _progress(status: Status) -> float:
    budget = status.get("tokens_budget") or 0
    return min(1.0, max(0.0, status.get("tokens_processed", 0) / budget)) if budget else 0.0


def _progress_text(status: Status) -> str:
    return f"{math.floor(100 * _progress(status))} %"  # 100 % only when it is


def _last_validation(status: Status) -> float | None:
    points = status.get("validation") or []
    return points[-1][2] if points and points[-1][2] is not None else None


# --- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """How many rows each table gets, and the lines that both take with their frames."""

    learners: int
    shards: int

    @property
    def lines(self) -> int:
        return (self.learners + 3 if self.learners else 0) + (self.shards + 3 if self.shards else 0)


def _share_rows(lines: int, learners: int, shards: int, *, curve: int) -> _Rows:
    learners, shards = max(learners, 1), max(shards, 1)
    for wanted in (
        _Rows(learners, shards),
        _Rows(learners, min(shards, 2)),
        _Rows(max(min(learners, 4), lines - curve - 3 - (min(shards, 2) + 3)), min(shards, 2)),
    ):
        if wanted.lines + curve <= lines:
            return wanted
    rest = lines - (min(shards, 2) + 3) - 3
    if rest >= 1:
        return _Rows(min(learners, rest), min(shards, 2))
    return _Rows(max(0, min(learners, lines - 3)), 0)


def _tables(learners: Mapping[str, Any], shards: Mapping[str, Any], width: int, rows: _Rows) -> list[RenderableType]:
    tables: list[RenderableType] = []
    if rows.learners:
        note = _states_text(learners) if learners else ""
        tables.append(_panel(_learners(learners, width - 4, rows.learners), "learners", width, note))
    if rows.shards:
        refused = sum(shard.get("refused", 0) for shard in shards.values())
        note = f"{refused} messages refused" if refused else ""
        tables.append(_panel(_shards(shards, width - 4, rows.shards), "syncer shards", width, note))
    return tables


@dataclass(frozen=True)
class _Column:
    """A column of a fixed width; ``rank`` 0 always stays, the highest goes first where the terminal is narrow."""

    key: str
    header: str
    width: int
    rank: int
    right: bool = True


_REGION = _Column("region", "region", 6, 3, right=False)  # in a run with regions
_LEARNER_COLUMNS = (
    _Column("name", "learner", 11, 0, right=False),
    _Column("state", "doing", 10, 0, right=False),
    _REGION,
    _Column("step", "step", 6, 1),
    _Column("speed", "tok/s", 6, 2),
    _Column("loss", "loss", 6, 0),
    _Column("busy", "busy", 5, 6),
    _Column("up", "up", 7, 4),
    _Column("down", "down", 7, 5),
    _Column("merged", "merg/miss", 9, 3),
)
_SHARD_COLUMNS = (
    _Column("name", "shard", 11, 0, right=False),
    _REGION,
    _Column("fragments", "frag.", 5, 5),
    _Column("rounds", "rounds", 6, 1),
    _Column("in", "in", 7, 3),
    _Column("out", "out", 7, 4),
    _Column("open", " open rounds", 12, 0, right=False),
)


def _fit(columns: Sequence[_Column], members: Mapping[str, Any], width: int, *, flexible: str) -> list[_Column]:
    """The columns that fit, the name as wide as it needs to be where there is room, ``flexible`` taking what is left."""
    name_width = _name_width(members)
    placed = any(member.get("region") for member in members.values())
    chosen = [column for column in columns if placed or column is not _REGION]
    while sum(column.width + 1 for column in chosen) - 1 > width and any(column.rank for column in chosen):
        chosen.remove(max(chosen, key=lambda column: column.rank))
    spare = width - (sum(column.width + 1 for column in chosen) - 1)
    fitted = []
    for column in chosen:
        if column.key == "name":
            extra = min(max(0, name_width - column.width), max(0, spare))
            spare -= extra
            column = _Column("name", column.header, column.width + extra + min(0, spare), 0, right=False)
            spare = max(0, spare)
        fitted.append(column)
    return [
        _Column(column.key, column.header, column.width + min(spare, 60), column.rank, column.right)
        if column.key == flexible
        else column
        for column in fitted
    ]


def _row(columns: Sequence[_Column], cells: Mapping[str, Text]) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for number, column in enumerate(columns):
        if number:
            line.append(" ")
        cell = cells[column.key].copy()
        if cell.cell_len > column.width:
            cell.truncate(column.width, overflow="ellipsis")
        pad = " " * (column.width - cell.cell_len)
        line.append_text(Text(pad).append_text(cell) if column.right else cell.append(pad))
    return line


def _heading(columns: Sequence[_Column]) -> Text:
    return _row(columns, {column.key: Text(column.header, "dim") for column in columns})


def _learners(learners: Mapping[str, Any], width: int, rows: int) -> list[Text]:
    if not learners:
        return [Text("waiting for the first learner …", "dim")]
    columns = _fit(_LEARNER_COLUMNS, learners, width, flexible="busy")
    shown, hidden = _cut(learners, rows)
    busy_width = next((column.width for column in columns if column.key == "busy"), 0)
    lines = [_heading(columns)]
    for name, learner in shown.items():
        state = str(learner.get("state", ""))
        quiet = "dim" if state in ("gone", "finished") else ""
        cells = {
            "name": _name(name),
            "state": Text(_clean(state), _STATES.get(state, "")),
            "region": Text(_clean(learner.get("region") or "")),
            "step": Text(str(learner.get("step", 0)), quiet),
            "speed": Text(count(learner.get("tokens_per_s")), quiet),
            "loss": Text(decimal(learner.get("loss")), quiet or "bold"),
            "busy": _busy(learner.get("busy_fraction"), busy_width),
            "up": Text(size(learner.get("bytes_up")), quiet),
            "down": Text(size(learner.get("bytes_down")), quiet),
            "merged": _merged(learner),
        }
        lines.append(_row(columns, cells))
    if hidden:
        lines.append(Text(f"+ {len(hidden)} more: {_states_text(hidden)}", "dim", no_wrap=True, overflow="ellipsis"))
    return lines


def _merged(learner: Mapping[str, Any]) -> Text:
    missed = learner.get("rounds_missed", 0)
    return Text(count(learner.get("rounds_merged", 0))).append("/", "dim").append(count(missed), "#e5873a" if missed else "dim")


def _busy(fraction: float | None, width: int) -> Text:
    if fraction is None or width < 10:
        return Text(share(fraction))
    return _bar(fraction, width - 6, _STATES["stepping"]).append(f" {share(fraction):>5}")


def _shard_activity(shard: Mapping[str, Any], width: int) -> Text:
    state = shard.get("state", "owner")
    if state == "owner":
        return _open_rounds(shard.get("open") or [], width)
    return Text("stands by" if state == "standby" else state, "dim", no_wrap=True)


def _shards(shards: Mapping[str, Any], width: int, rows: int) -> list[Text]:
    if not shards:
        return [Text("waiting for the first syncer …", "dim")]
    columns = _fit(_SHARD_COLUMNS, shards, width, flexible="open")
    shown, hidden = _cut(shards, rows)
    open_width = next(column.width for column in columns if column.key == "open")
    lines = [_heading(columns)]
    for name, shard in shown.items():
        cells = {
            "name": _name(name),
            "region": Text(_clean(shard.get("region") or "")),
            "fragments": Text(str(shard.get("fragments", 0))),
            "rounds": Text(str(shard.get("rounds", 0))),
            "in": Text(size(shard.get("bytes_in"))),
            "out": Text(size(shard.get("bytes_out"))),
            "open": Text(" ").append_text(_shard_activity(shard, open_width - 1)),
        }
        lines.append(_row(columns, cells))
    if hidden:
        lines.append(Text(f"+ {len(hidden)} more", "dim"))
    return lines


def _open_rounds(rounds: Sequence[Mapping[str, Any]], width: int) -> Text:
    """Each open round as ``f12 ●●○``: offers that came, and those still missing to the quorum; with its age if it fits."""
    if not rounds:
        return Text("none", "dim")
    line = Text()
    for number, opened in enumerate(rounds):
        answers, quorum = int(opened.get("answers", 0)), int(opened.get("quorum", 1))
        part = Text("  " if number else "").append(f"f{opened.get('fragment')} ", "dim")
        style = _STATES["stepping"] if answers >= quorum else _STATES["sending"]
        if max(answers, quorum) <= 6:
            part.append("●" * answers, style).append("○" * max(0, quorum - answers), "dim")
        else:
            part.append(f"{answers}/{quorum}", style)
        part.append(f" {opened.get('waited_s', 0.0):.1f}s", "dim")
        rest = len(rounds) - number
        reserve = len(f" +{rest - 1}") if rest > 1 else 0
        if line.cell_len + part.cell_len + reserve > width:
            return line.append(f"{' ' if number else ''}+{rest}", "dim")
        line.append_text(part)
    return line


def _name(name: str) -> Text:
    return Text("● ", service_colour(name)).append(_clean(name), "default")


def _name_width(names: Iterable[str]) -> int:
    return min(24, max(cell_len(_clean(name)) for name in names) + 2)


def _cut(members: Mapping[str, Any], rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    items = sorted(members.items(), key=lambda item: _natural(item[0]))
    kept = len(items) if len(items) <= rows else max(0, rows - 1)
    return dict(items[:kept]), dict(items[kept:])


def _natural(name: str) -> tuple[str, int, str]:
    stem, _, number = name.rpartition("-")
    return (stem, int(number), name) if stem and number.isdecimal() and len(number) < 10 else (name, -1, name)


def _states_text(learners: Mapping[str, Any]) -> str:
    counts: dict[str, int] = {}
    for learner in learners.values():
        state = _clean(learner.get("state", "unknown"))
        counts[state] = counts.get(state, 0) + 1
    return ", ".join(f"{number} {state}" for state, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


# --- the curve ------------------------------------------------------------------------------------------------------

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class _Canvas:
    """Braille dots, 2 by 4 a cell; a cell has the colour of the line drawn last through it."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._bits = [[0] * columns for _ in range(rows)]
        self._styles = [[""] * columns for _ in range(rows)]

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Join points, the origin at the bottom left and (1, 1) at the top right; what lies above is left out.

        The cells it goes through lose what was drawn in them before, so that the line on top stays thin.
        """
        mine: set[tuple[int, int]] = set()
        wide, high = self.columns * 2 - 1, self.rows * 4 - 1
        dots = [(round(x * wide), round((1 - y) * high)) for x, y in points]
        for start, end in zip(dots, dots[1:] or dots, strict=False):
            steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
            for step in range(steps + 1):
                x = round(start[0] + (end[0] - start[0]) * step / steps)
                y = round(start[1] + (end[1] - start[1]) * step / steps)
                if y < 0:
                    continue
                if (y // 4, x // 2) not in mine:
                    mine.add((y // 4, x // 2))
                    self._bits[y // 4][x // 2] = 0
                self._bits[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
                self._styles[y // 4][x // 2] = style

    def text(self, row: int) -> Text:
        line = Text()
        for bits, style in zip(self._bits[row], self._styles[row], strict=True):
            line.append(chr(0x2800 + bits) if bits else " ", style)
        return line


def _curve(status: Status, width: int, lines: int) -> RenderableType:
    learners = {name: _points(points) for name, points in sorted((status.get("loss") or {}).items())}
    validation = _points(status.get("validation") or [])
    drawn = [points for points in (*learners.values(), validation) if points]
    rows, columns = lines - 3, width - 4 - 6
    if not drawn:
        body = [Text("")] * (rows // 2) + [Text("no loss yet", "dim", justify="center")]
        return _panel(body + [Text("")] * (rows + 1 - len(body)), "loss", width, "")
    end_s = max(max(points[-1][0] for points in drawn), 1e-9)
    low, high = _range(drawn)
    canvas = _Canvas(columns, rows)
    for name, points in learners.items():
        canvas.line([_place(point, end_s, low, high) for point in points], service_colour(name))
    canvas.line([_place(point, end_s, low, high) for point in validation], _GLOBAL)
    ticks = {0, rows // 2, rows - 1} if rows > 4 else {0, rows - 1}
    labelled = {row: high - (high - low) * row / (rows - 1) for row in ticks}
    body = []
    for row in range(rows):
        label = f"{labelled[row]:5.2f}" if row in labelled else " " * 5
        body.append(Text(label, "dim").append("┤" if row in labelled else "│", _FRAME).append_text(canvas.text(row)))
    axis = f"{' ' * 5}└0:00"
    body.append(Text(axis + f"{duration(end_s):>{width - 4 - len(axis)}}", "dim"))
    legend = Text().append("● each learner  ", "default dim").append("━ global", _GLOBAL) if validation else ""
    return _panel(body, "loss, nats per byte", width, legend)


def _points(points: Iterable[Sequence[float | None]]) -> list[tuple[float, float]]:
    return [
        (float(point[0]), float(point[2]))
        for point in points
        if point[0] is not None and point[2] is not None and math.isfinite(point[2])
    ]


def _range(drawn: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """From the lowest value to the 90th percentile, so that the steep beginning does not flatten all that follows."""
    values = sorted(value for points in drawn for _, value in points)
    low, high = values[0], values[min(len(values) - 1, len(values) * 9 // 10)]
    margin = max(0.02 * (high - low), 0.01)
    return max(0.0, low - margin), high + margin


def _place(point: tuple[float, float], end_s: float, low: float, high: float) -> tuple[float, float]:
    return min(1.0, max(0.0, point[0] / end_s)), max(0.0, (point[1] - low) / (high - low))


# --- small parts ----------------------------------------------------------------------------------------------------


def _panel(body: Sequence[Text], title: str, width: int, note: str | Text) -> Panel:
    head = Text().append(title, "bold default")
    if note:
        shown = note.copy() if isinstance(note, Text) else Text(note, "default dim")
        room = width - cell_len(title) - 10
        if room >= 8:
            shown.truncate(room, overflow="ellipsis")
            head = Text().append(title, "bold default").append(" · ", _FRAME).append_text(shown)
    for line in body:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Panel(
        Group(*body), title=head, title_align="left", box=box.ROUNDED, border_style=_FRAME, width=width, padding=(0, 1)
    )


def _bar(fraction: float, width: int, style: str) -> Text:
    halves = round(min(1.0, max(0.0, fraction)) * width * 2)
    full, half = divmod(halves, 2)
    return Text().append("━" * full + "╸" * half, style).append("─" * (width - full - half), _FRAME)


def _ends(left: Text, right: Text, width: int) -> Text:
    room = width - right.cell_len - 1
    if left.cell_len > room:
        left.truncate(max(0, room), overflow="ellipsis")
    return left.append(" " * max(1, width - left.cell_len - right.cell_len)).append_text(right)


def _clean(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= 48 else set_cell_size(text, 47).rstrip() + "…"


def _speed(learners: Mapping[str, Any]) -> float:
    return float(sum(learner.get("tokens_per_s") or 0 for learner in learners.values()))


def _sum(learners: Mapping[str, Any], key: str) -> int:
    return sum(int(learner.get(key) or 0) for learner in learners.values())


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


_SVG_THEME = TerminalTheme(
    background=(13, 17, 23),
    foreground=(201, 209, 217),
    normal=[(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255), (57, 197, 207)],
    bright=[(110, 118, 129), (255, 161, 152), (86, 211, 100), (227, 179, 65), (121, 192, 255), (210, 168, 255), (86, 212, 221)],
)

_SVG_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 16px; font-weight: 600; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
