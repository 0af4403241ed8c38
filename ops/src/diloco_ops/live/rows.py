"""Tables that a person goes through: learners, fragments and syncers, in an order, with one chosen, and lanes over time.

Pure. Rows are exactly as wide as asked; the chosen one has a mark, so that it is found without colour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from diloco_ops.live import lanes
from diloco_ops.live.parts import Status, clean
from diloco_ops.live.tables import (
    LANE,
    LEARNER_COLUMNS,
    SHARD_COLUMNS,
    Column,
    fit,
    heading,
    learner_cells,
    learner_names,
    names_in,
    open_round,
    row_of,
    shard_cells,
)
from diloco_ops.live.watched import Watched, WatchedFragment
from diloco_report.facts import natural
from diloco_report.units import MISSING, count, duration, finite

MIN_WIDTH, MIN_HEIGHT = 66, 12  # of a terminal that these fit
MARK = "▸ "
MIN_LANE, MIN_MERGE_LANE = 30, 20  # cells: of learners, whose other figures are in detail; of fragments
WINDOWS = (60.0, 600.0, 3600.0, None)  # seconds that a lane shows; None: the whole run


@dataclass(frozen=True)
class Shown:
    """How tables are shown: place of the order in a view's orders, the row that is chosen, and the time that lanes show."""

    order: int = 0
    descending: bool = False
    chosen: str | None = None
    window_s: float | None = WINDOWS[1]

    def span(self, run_s: float) -> tuple[float, float]:
        """Return the stretch of time that a lane shows at ``run_s``, in seconds of the run."""
        return (0.0 if self.window_s is None else max(0.0, run_s - self.window_s)), max(run_s, 1.0)


@dataclass(frozen=True)
class ScreenTable:
    """Rows in their order, by the names under which they are chosen; ``heading`` and each ``row`` are as wide as asked."""

    names: Sequence[str]
    heading: Text
    row: Callable[[str], Text]


_Key = Callable[[str, Mapping[str, Any]], Any]
_LANE_COLUMN = Column(LANE, LANE, MIN_LANE, 0, right=False)
_WITH_LANE = ("name", "state", "region", "step", "speed", "loss", "merged")
_LANED = (*(column for column in LEARNER_COLUMNS if column.key in _WITH_LANE), _LANE_COLUMN)
_FRAGMENT_COLUMNS = (
    Column("name", "fragment", 8, 0, right=False),
    Column("version", "version", 7, 0),
    Column("owner", "owner", 11, 1, right=False),
    Column("epoch", "epoch", 5, 4),
    Column("size", "size", 6, 5),
    Column("round", "round", 12, 0, right=False),
    Column("merged", "last merge", 11, 2, right=False),
    replace(_LANE_COLUMN, width=MIN_MERGE_LANE),
)


def _figure(key: str) -> _Key:
    return lambda _, row: -row[key] if finite(row.get(key)) else float("inf")


LEARNER_ORDERS: tuple[tuple[str, _Key], ...] = (
    ("name", lambda name, _: natural(name)),
    ("doing", lambda _, row: str(row.get("state"))),
    ("step", _figure("step")),
    ("tok/s", _figure("tokens_per_s")),
    ("loss", _figure("loss")),
    ("missed", _figure("rounds_missed")),
    ("silence", _figure("seen_s_ago")),
    ("region", lambda _, row: str(row.get("region") or "")),
)
SHARD_ORDERS: tuple[tuple[str, _Key], ...] = (
    ("name", lambda name, _: natural(name)),
    ("rounds", _figure("rounds")),
    ("refused", _figure("refused")),
    ("silence", _figure("seen_s_ago")),
)
FRAGMENT_ORDERS: tuple[tuple[str, _Key], ...] = (
    ("fragment", lambda name, _: int(name)),
    ("version", _figure("version")),
    ("owner", lambda _, row: natural(row["owner"])),
    ("oldest merge", _figure("merged_s_ago")),
    ("open round", _figure("waited_s")),
)


ORDERS = {"learners": LEARNER_ORDERS, "fragments": FRAGMENT_ORDERS, "syncers": SHARD_ORDERS}


def order_of(table: str, shown: Shown) -> str:
    """Return how a table is sorted, in words."""
    orders = ORDERS[table]
    return orders[shown.order % len(orders)][0] + (", turned" if shown.descending else "")


def learners(watched: Watched, status: Status, shown: Shown, run_s: float, width: int) -> ScreenTable:
    """Return all learners: figures, and a lane of what each did."""
    rows: Mapping[str, Any] = status.get("learners") or {}
    names = _ordered(rows, LEARNER_ORDERS, shown)
    columns = fit(_LANED, rows, width - len(MARK), flexible=LANE)
    from_s, to_s = shown.span(run_s)
    lane_width, shown_names = columns[-1].width, learner_names(status, columns[0].width)

    def cells(name: str) -> dict[str, Text]:
        return learner_cells(rows[name], 0) | {
            "name": shown_names[name],
            LANE: lanes.lane(watched.lane(name), from_s, to_s, lane_width),
        }

    return _table(names, columns, cells, shown)


def fragments(watched: Watched, status: Status, shown: Shown, run_s: float, width: int) -> ScreenTable:
    """Return all fragments: version, owner and epoch, the open round, the last merge, and a lane of the merges."""
    opened = open_rounds_of(status)
    rows = {
        str(index): {
            "version": fragment.version,
            "owner": fragment.owner,
            "merged_s_ago": run_s - fragment.merges[-1][0] if fragment.merges else None,
            "waited_s": opened.get(index, {}).get("waited_s"),
        }
        for index, fragment in watched.fragments.items()
    }
    names = _ordered(rows, FRAGMENT_ORDERS, shown)
    columns = fit(_FRAGMENT_COLUMNS, {}, width - len(MARK), flexible=LANE)
    from_s, to_s = shown.span(run_s)
    lane_width = columns[-1].width

    def cells(name: str) -> dict[str, Text]:
        fragment = watched.fragments[int(name)]
        merges = [(at_s, len(members)) for at_s, _, members in fragment.merges]
        return {
            "name": Text(f"f{name}"),
            "version": Text(str(fragment.version), "bold"),
            "owner": Text(clean(fragment.owner or MISSING)),
            "epoch": Text(clean(MISSING if fragment.epoch is None else fragment.epoch)),
            "size": Text(count(fragment.parameters)),
            "round": open_round(opened[int(name)]) if int(name) in opened else Text("none", "dim"),
            "merged": _last_merge(fragment, run_s),
            LANE: lanes.merge_lane(merges, from_s, to_s, lane_width),
        }

    return _table(names, columns, cells, shown)


def syncers(status: Status, shown: Shown, width: int) -> ScreenTable:
    """Return all syncers, each with its open rounds."""
    rows: Mapping[str, Any] = status.get("shards") or {}
    names = _ordered(rows, SHARD_ORDERS, shown)
    columns = fit(SHARD_COLUMNS, rows, width - len(MARK), flexible="open")
    texts, open_width = names_in(columns, rows), columns[-1].width
    return _table(names, columns, lambda name: shard_cells(name, texts[name], rows[name], open_width), shown)


def open_rounds_of(status: Status) -> dict[int, Mapping[str, Any]]:
    """Return the open rounds by fragment, as their syncers say."""
    found: dict[int, Mapping[str, Any]] = {}
    for shard in (status.get("shards") or {}).values():
        for opened in shard.get("open") or []:
            if isinstance(opened, Mapping) and isinstance(opened.get("fragment"), int):
                found[opened["fragment"]] = opened
    return found


def scrolled(table: ScreenTable, chosen: str | None, height: int) -> list[Text]:
    """Return the heading, and as many rows as fit below it, among them the one that is chosen."""
    room = max(0, height - 1)
    at = table.names.index(chosen) if chosen in table.names else 0
    first = max(0, min(at - room // 2, len(table.names) - room))
    return [table.heading, *map(table.row, table.names[first : first + room])][: max(0, height)]


def _ordered(rows: Mapping[str, Mapping[str, Any]], orders: Sequence[tuple[str, _Key]], shown: Shown) -> list[str]:
    _, key = orders[shown.order % len(orders)]
    names = sorted(rows, key=natural)
    names.sort(key=lambda name: key(name, rows[name]), reverse=shown.descending)
    return names


def _table(
    names: Sequence[str], columns: Sequence[Column], cells: Callable[[str], Mapping[str, Text]], shown: Shown
) -> ScreenTable:
    def row(name: str) -> Text:
        mine = name == shown.chosen
        line = Text(MARK if mine else " " * len(MARK), no_wrap=True).append_text(row_of(columns, cells(name)))
        if mine:
            line.stylize("reverse")
        return line

    head = Text(" " * len(MARK), no_wrap=True).append_text(heading(columns))
    return ScreenTable(names, head, row)


def _last_merge(fragment: WatchedFragment, run_s: float) -> Text:
    if not fragment.merges:
        return Text(MISSING, "dim")
    at_s, _, members = fragment.merges[-1]
    return Text(f"{len(members)} in").append(f", {duration(run_s - at_s)}", "dim")


def next_window(window_s: float | None) -> float | None:
    """Return the next stretch of time that lanes may show."""
    return WINDOWS[(WINDOWS.index(window_s) + 1) % len(WINDOWS)]


def window_text(window_s: float | None, run_s: float) -> str:
    """Return how a stretch of time is called at ``run_s``: a run that is not as old is shown whole."""
    return "whole run" if window_s is None or run_s <= window_s else f"last {duration(window_s)}"
