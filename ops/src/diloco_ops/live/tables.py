"""Tables of the live view: learners and syncers, by columns and rows that fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from diloco.process.logs import service_colour
from diloco_ops.live.parts import STATES, bar, clean, panel, states_text
from diloco_report.units import count, decimal, share, size


@dataclass(frozen=True)
class _Rows:
    """How many rows each table gets, and the lines that both take with their frames."""

    learners: int
    shards: int

    @property
    def lines(self) -> int:
        return (self.learners + 3 if self.learners else 0) + (self.shards + 3 if self.shards else 0)


def share_rows(lines: int, learners: int, shards: int, *, curve: int) -> _Rows:
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


def make_tables(learners: Mapping[str, Any], shards: Mapping[str, Any], width: int, rows: _Rows) -> list[RenderableType]:
    tables: list[RenderableType] = []
    if rows.learners:
        note = states_text(learners) if learners else ""
        tables.append(panel(_learners(learners, width - 4, rows.learners), "learners", width, note))
    if rows.shards:
        refused = sum(shard.get("refused", 0) for shard in shards.values())
        note = f"{refused} messages refused" if refused else ""
        tables.append(panel(_shards(shards, width - 4, rows.shards), "syncers", width, note))
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
    _Column("name", "syncer", 11, 0, right=False),
    _REGION,
    _Column("fragments", "frag.", 5, 5),
    _Column("rounds", "rounds", 6, 1),
    _Column("in", "in", 7, 3),
    _Column("out", "out", 7, 4),
    _Column("open", " open rounds", 12, 0, right=False),
)


def _fit(columns: Sequence[_Column], members: Mapping[str, Any], width: int, *, flexible: str) -> list[_Column]:
    """Return the columns that fit, the name as wide as it needs; ``flexible`` takes the remaining width."""
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
            "state": Text(clean(state), STATES.get(state, "")),
            "region": Text(clean(learner.get("region") or "")),
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
        lines.append(Text(f"+ {len(hidden)} more: {states_text(hidden)}", "dim", no_wrap=True, overflow="ellipsis"))
    return lines


def _merged(learner: Mapping[str, Any]) -> Text:
    missed = learner.get("rounds_missed", 0)
    return Text(count(learner.get("rounds_merged", 0))).append("/", "dim").append(count(missed), "#e5873a" if missed else "dim")


def _busy(fraction: float | None, width: int) -> Text:
    if fraction is None or width < 10:
        return Text(share(fraction))
    return bar(fraction, width - 6, STATES["stepping"]).append(f" {share(fraction):>5}")


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
            "region": Text(clean(shard.get("region") or "")),
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
    """Draw each open round as ``f12 ●●○``, offers that came and those missing to the quorum; with its age if it fits."""
    if not rounds:
        return Text("none", "dim")
    line = Text()
    for number, opened in enumerate(rounds):
        answers, quorum = int(opened.get("answers", 0)), int(opened.get("quorum", 1))
        part = Text("  " if number else "").append(f"f{opened.get('fragment')} ", "dim")
        style = STATES["stepping"] if answers >= quorum else STATES["sending"]
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
    return Text("● ", service_colour(name)).append(clean(name), "default")


def _name_width(names: Iterable[str]) -> int:
    return min(24, max(cell_len(clean(name)) for name in names) + 2)


def _cut(members: Mapping[str, Any], rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    items = sorted(members.items(), key=lambda item: _natural(item[0]))
    kept = len(items) if len(items) <= rows else max(0, rows - 1)
    return dict(items[:kept]), dict(items[kept:])


def _natural(name: str) -> tuple[str, int, str]:
    stem, _, number = name.rpartition("-")
    return (stem, int(number), name) if stem and number.isdecimal() and len(number) < 10 else (name, -1, name)
