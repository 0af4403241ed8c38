"""Tables of the live view: learners and syncers, by columns and rows that fit."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from diloco.process.logs import service_colour
from diloco_ops.live.names import least_name_width, name_width
from diloco_ops.live.parts import DOT, STATES, Status, bar, clean, learner_colours, panel, states_text
from diloco_report.colours import short_names
from diloco_report.facts import natural
from diloco_report.units import count, decimal, share, size


@dataclass(frozen=True)
class TableRows:
    """How many rows each table gets, and the lines that both take with their frames."""

    learners: int
    shards: int

    @property
    def lines(self) -> int:
        return (self.learners + 3 if self.learners else 0) + (self.shards + 3 if self.shards else 0)


def share_rows(lines: int, learners: int, shards: int, *, curve: int) -> TableRows:
    learners, shards = max(learners, 1), max(shards, 1)
    for wanted in (
        TableRows(learners, shards),
        TableRows(learners, min(shards, 2)),
        TableRows(max(min(learners, 4), lines - curve - 3 - (min(shards, 2) + 3)), min(shards, 2)),
    ):
        if wanted.lines + curve <= lines:
            return wanted
    rest = lines - (min(shards, 2) + 3) - 3
    if rest >= 1:
        return TableRows(min(learners, rest), min(shards, 2))
    return TableRows(max(0, min(learners, lines - 3)), 0)


def make_tables(status: Status, width: int, rows: TableRows) -> list[RenderableType]:
    learners, shards = status.get("learners") or {}, status.get("shards") or {}
    tables: list[RenderableType] = []
    if rows.learners:
        note = states_text(learners) if learners else ""
        tables.append(panel(_learners(status, width - 4, rows.learners), "learners", width, note))
    if rows.shards:
        refused = sum(shard.get("refused", 0) for shard in shards.values())
        note = f"{refused} messages refused" if refused else ""
        tables.append(panel(_shards(shards, width - 4, rows.shards), "syncers", width, note))
    return tables


@dataclass(frozen=True)
class Column:
    """A column of a fixed width; ``rank`` 0 always stays, the highest goes first where the terminal is narrow."""

    key: str
    header: str
    width: int
    rank: int
    right: bool = True


LANE = "lane"
REGION = Column("region", "region", 6, 3, right=False)  # in a run with regions
LEARNER_COLUMNS = (
    Column("name", "learner", 11, 0, right=False),
    Column("state", "doing", 10, 0, right=False),
    REGION,
    Column("step", "step", 6, 1),
    Column("speed", "tok/s", 6, 2),
    Column("loss", "loss", 6, 0),
    Column("busy", "busy", 5, 6),
    Column("up", "up", 7, 4),
    Column("down", "down", 7, 5),
    Column("merged", "merg/miss", 9, 3),
)
SHARD_COLUMNS = (
    Column("name", "syncer", 11, 0, right=False),
    REGION,
    Column("fragments", "frag.", 5, 5),
    Column("rounds", "rounds", 6, 1),
    Column("in", "in", 7, 3),
    Column("out", "out", 7, 4),
    Column("open", " open rounds", 12, 0, right=False),
)


def fit(columns: Sequence[Column], members: Mapping[str, Any], width: int, *, flexible: str) -> list[Column]:
    """Return the columns that fit, the name as wide as it needs; ``flexible`` takes the remaining width.

    Columns give way until names can be told apart (:func:`short_names`).
    """
    longest, least = name_width(members), least_name_width(members)
    columns = [replace(column, width=max(column.width, least)) if column.key == "name" else column for column in columns]
    placed = any(member.get("region") for member in members.values())
    chosen = [column for column in columns if placed or column is not REGION]
    while sum(column.width + 1 for column in chosen) - 1 > width and any(column.rank for column in chosen):
        chosen.remove(max(chosen, key=lambda column: column.rank))
    spare = width - (sum(column.width + 1 for column in chosen) - 1)
    fitted = []
    for column in chosen:
        if column.key == "name":
            extra = min(max(0, longest - column.width), max(0, spare))
            spare -= extra
            column = replace(column, width=column.width + extra + min(0, spare))
            spare = max(0, spare)
        fitted.append(column)
    return [
        replace(column, width=column.width + (spare if column.key == LANE else min(spare, 60)))
        if column.key == flexible
        else column
        for column in fitted
    ]


def row_of(columns: Sequence[Column], cells: Mapping[str, Text]) -> Text:
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


def whole_width(learners: Mapping[str, Any], shards: Mapping[str, Any]) -> int:
    """Return the width of tables in which all columns have room, and all names stand in full; at least 80."""

    def width(columns: Sequence[Column], members: Mapping[str, Any]) -> int:
        return sum(max(column.width, name_width(members) if column.key == "name" else 0) + 1 for column in columns) - 1

    return max(80, 4 + width(LEARNER_COLUMNS, learners), 4 + width(SHARD_COLUMNS, shards))


def heading(columns: Sequence[Column]) -> Text:
    return row_of(columns, {column.key: Text(column.header, "dim") for column in columns})


def _learners(status: Status, width: int, rows: int) -> list[Text]:
    learners: Mapping[str, Any] = status.get("learners") or {}
    if not learners:
        text = clean(status.get("starting") or "waiting for the first learner …", width * (rows + 1))
        wrapped = textwrap.wrap(text, width, max_lines=rows + 1, placeholder=" …")  # in the heading's place, too
        return [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in wrapped]
    columns = fit(LEARNER_COLUMNS, learners, width, flexible="busy")
    shown, hidden = cut(learners, rows)
    busy_width = next((column.width for column in columns if column.key == "busy"), 0)
    lines = [heading(columns)]
    names = learner_names(status, columns[0].width)
    lines += [row_of(columns, learner_cells(learner, busy_width) | {"name": names[name]}) for name, learner in shown.items()]
    if hidden:
        lines.append(Text(f"+ {len(hidden)} more: {states_text(hidden)}", "dim", no_wrap=True, overflow="ellipsis"))
    return lines


def learner_names(status: Status, width: int) -> dict[str, Text]:
    """Return the cell of each learner's name: its colour, and what tells it from others, in ``width`` cells."""
    colours = learner_colours(status)
    shown = short_names([clean(name) for name in colours], width - len(DOT))
    return {name: Text(DOT, colour).append(shown[clean(name)], "default") for name, colour in colours.items()}


def learner_cells(learner: Mapping[str, Any], busy_width: int) -> dict[str, Text]:
    """Return the cells of a learner's figures; :func:`learner_names` has its name's."""
    state = str(learner.get("state", ""))
    quiet = "dim" if state in ("gone", "finished") else ""
    return {
        "state": Text(clean(state), STATES.get(state, "")),
        "region": Text(clean(learner.get("region") or "")),
        "step": Text(clean(learner.get("step", 0)), quiet),
        "speed": Text(count(learner.get("tokens_per_s")), quiet),
        "loss": Text(decimal(learner.get("loss")), quiet or "bold"),
        "busy": _busy(learner.get("busy_fraction"), busy_width),
        "up": Text(size(learner.get("bytes_up")), quiet),
        "down": Text(size(learner.get("bytes_down")), quiet),
        "merged": _merged(learner),
    }


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
        return open_rounds(shard.get("open") or [], width)
    return Text("stands by" if state == "standby" else state, "dim", no_wrap=True)


def _shards(shards: Mapping[str, Any], width: int, rows: int) -> list[Text]:
    if not shards:
        return [Text("waiting for the first syncer …", "dim")]
    columns = fit(SHARD_COLUMNS, shards, width, flexible="open")
    names = names_in(columns, shards)
    shown, hidden = cut(shards, rows)
    open_width = next(column.width for column in columns if column.key == "open")
    lines = [heading(columns)]
    lines += [row_of(columns, shard_cells(name, names[name], shard, open_width)) for name, shard in shown.items()]
    if hidden:
        lines.append(Text(f"+ {len(hidden)} more", "dim"))
    return lines


def shard_cells(name: str, shown: str, shard: Mapping[str, Any], open_width: int) -> dict[str, Text]:
    return {
        "name": name_cell(name, shown),
        "region": Text(clean(shard.get("region") or "")),
        "fragments": Text(clean(shard.get("fragments", 0))),
        "rounds": Text(clean(shard.get("rounds", 0))),
        "in": Text(size(shard.get("bytes_in"))),
        "out": Text(size(shard.get("bytes_out"))),
        "open": Text(" ").append_text(_shard_activity(shard, open_width - 1)),
    }


def open_rounds(rounds: Sequence[Mapping[str, Any]], width: int) -> Text:
    """Draw each open round as ``f12 ●●○ 0.4s``, as many as fit."""
    if not rounds:
        return Text("none", "dim")
    line = Text()
    for number, opened in enumerate(rounds):
        part = Text("  " if number else "").append(f"f{opened.get('fragment')} ", "dim").append_text(open_round(opened))
        rest = len(rounds) - number
        reserve = len(f" +{rest - 1}") if rest > 1 else 0
        if line.cell_len + part.cell_len + reserve > width:
            return line.append(f"{' ' if number else ''}+{rest}", "dim")
        line.append_text(part)
    return line


def open_round(opened: Mapping[str, Any]) -> Text:
    """Draw a round as ``●●○ 0.4s``: offers that came and those missing to the quorum, and its age."""
    answers, quorum = int(opened.get("answers", 0)), int(opened.get("quorum", 1))
    style = STATES["stepping"] if answers >= quorum else STATES["sending"]
    if max(answers, quorum) <= 6:
        line = Text("●" * answers, style).append("○" * max(0, quorum - answers), "dim")
    else:
        line = Text(f"{answers}/{quorum}", style)
    return line.append(f" {opened.get('waited_s', 0.0):.1f}s", "dim")


def name_cell(name: str, shown: str) -> Text:
    return Text(DOT, service_colour(name)).append(shown, "default")


def cut(members: Mapping[str, Any], rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    items = sorted(members.items(), key=lambda item: natural(item[0]))
    kept = len(items) if len(items) <= rows else max(0, rows - 1)
    return dict(items[:kept]), dict(items[kept:])


def names_in(columns: Sequence[Column], names: Iterable[str]) -> dict[str, str]:
    """Return each syncer's name as it is shown in its column."""
    width = next(column.width for column in columns if column.key == "name")
    known = list(names)
    shown = short_names([clean(name) for name in known], width - len(DOT))
    return {name: shown[clean(name)] for name in known}
