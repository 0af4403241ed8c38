"""The terminal of ``diloco top``: views, keys, and the run at a glance above them.

Views are pure functions (:mod:`diloco_ops.live`) that give lines of exact widths; here is which one is shown, and the keys.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import Static

from diloco.errors import DilocoError
from diloco.process import logs
from diloco_ops.live import details, rows
from diloco_ops.live.curve import loss_lines
from diloco_ops.live.lanes import LEGENDS
from diloco_ops.live.parts import Status, clean, learner_colours
from diloco_ops.live.rows import MIN_HEIGHT, MIN_WIDTH, ScreenTable, Shown
from diloco_ops.live.screen import LINKED, glance
from diloco_ops.live.watched import SILENT_S
from diloco_ops.top.feed import RunFeed
from diloco_ops.up import pages
from diloco_report.units import duration

T = TypeVar("T")
DRAW_S = 0.5  # as often as a coordinator is asked
VIEWS = ("learners", "fragments", "syncers", "events", "logs", "loss")
TABLES = VIEWS[:3]
MAX_ALERTS = 2
SAMPLE_LINES = 6  # below the curves of the loss
KEYS = (
    ("1 to 6, tab", "another view"),
    ("up, down, j, k", "choose another row or line"),
    ("page up, page down, home, end", "further"),
    ("enter, escape", "details of the chosen row, and back"),
    ("s, r", "sort by another column; reverse the order"),
    ("w", "change the time span of the lanes"),
    ("v", "show or hide versions among the events"),
    ("?, h", "this help, with the symbols of the lanes"),
    ("q, ctrl+c", "end"),
)


class Top(App[None]):
    """One run in a terminal."""

    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Static { background: ansi_default; color: ansi_default; height: auto; }
    #body { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number + 1), f"view({number})", show=False) for number in range(len(VIEWS))),
        Binding("tab", "next_view(1)", show=False, priority=True),
        Binding("shift+tab", "next_view(-1)", show=False, priority=True),
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("pagedown", "move(10)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
        Binding("enter", "detail", show=False),
        Binding("escape", "table", show=False),
        Binding("s", "sort", show=False),
        Binding("r", "turn", show=False),
        Binding("w", "window", show=False),
        Binding("v", "versions", show=False),
        Binding("question_mark,h", "help", show=False),
        Binding("q,ctrl+c,ctrl+q", "quit", show=False, priority=True),
    ]

    def __init__(self, feed: RunFeed, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: the one by which ``feed`` tells its times."""
        super().__init__(ansi_color=True)
        self._clock_s = clock
        self.feed, self.watched = feed, feed.watched
        self.failure: DilocoError | None = None
        self.page = pages.link_of(feed.directory) if feed.local else None
        self.view = 0
        self.tables = dict.fromkeys(TABLES, Shown())
        self.in_detail = self.helping = self.with_versions = False
        self.above = 0  # lines of events or logs below the last one shown
        self._listening: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        """Return the parts, from top to bottom."""
        yield Static(id="head", markup=False)
        yield Static(id="body", markup=False)
        yield Static(id="foot", markup=False)

    def on_mount(self) -> None:
        """Begin to listen and to draw."""
        self._listening = asyncio.create_task(self.feed.listen())
        self._listening.add_done_callback(self._stopped)
        self.set_interval(DRAW_S, self.draw)
        self.draw()

    def on_resize(self, _: Resize) -> None:
        """Draw for the new size, once it is in force."""
        self.call_after_refresh(self.draw)

    async def on_unmount(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    def _stopped(self, listening: asyncio.Task[None]) -> None:
        """End with the error that ended the listening."""
        if listening.cancelled() or (error := listening.exception()) is None:
            return
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, DilocoError):
            self.failure = error
            self.exit()
        else:
            self._handle_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    # ---- drawing

    def draw(self) -> None:
        """Draw everything as of now."""
        if not self.is_running or not self.query("#body"):
            return
        width, height = self.size
        head: list[Text]
        body: list[Text] = []
        foot: list[Text] = []
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            head = [Text(f"{width} x {height}: too small, at least {MIN_WIDTH} x {MIN_HEIGHT}")]
        else:
            head, body, foot = self.picture(width, height, self._clock_s())
        for name, lines in (("#head", head), ("#body", body), ("#foot", foot)):
            self.query_one(name, Static).update(Text("\n").join(lines))

    def picture(self, width: int, height: int, now_s: float) -> tuple[list[Text], list[Text], list[Text]]:
        """Return the lines of the head, the body and the foot, which fill a terminal of this size."""
        status, run_s = self.watched.status(now_s), self.watched.run_s(now_s)
        head = [
            *glance({**status, "page": self.page}, width, linked=height >= LINKED),
            *self._alerts(now_s, width),
            self._tabs(width),
        ]
        foot = [self._foot(run_s, width)]
        room = height - len(head) - len(foot)
        return head, self._body(status, run_s, width, room)[:room], foot

    def _body(self, status: Status, run_s: float, width: int, room: int) -> list[Text]:
        if self.helping:
            lines = [Text(f" {keys:<31}").append(said, "dim") for keys, said in KEYS]
            return [_cut(line, width) for line in (*lines, Text(), *(Text(f" {said}") for said in LEGENDS))]
        name = VIEWS[self.view]
        if name in TABLES:
            return self._table(name, status, run_s, width, room)
        if name == "events":
            events = [event for event in self.watched.events if self.with_versions or not event.minor]
            return self._tail(events, details.event_line, width, room, "nothing has happened yet")
        if name == "logs":
            said = "no line yet" if self.feed.local else "the services' logs are not on this machine; events are in view 4"
            return self._tail(self.feed.lines, _log_line, width, room, said)
        title = Text(f" loss, {self.watched.units}" if self.watched.units else " loss", "bold")
        sample = details.sample(self.watched, run_s, width, SAMPLE_LINES) if room >= 3 * SAMPLE_LINES else []
        losses, points = status.get("loss") or {}, status.get("validation") or []
        curves = loss_lines(losses, points, learner_colours(status), width - 1, room - 1 - len(sample))
        return [title, *curves, *sample]

    def _table(self, name: str, status: Status, run_s: float, width: int, room: int) -> list[Text]:
        table, shown = self._rows(name, status, run_s, width), self.tables[name]
        if not table.names:
            return [Text(f" no {name} yet", "dim")]
        if shown.chosen not in table.names:
            shown = self.tables[name] = replace(shown, chosen=table.names[0])
            table = self._rows(name, status, run_s, width)
        chosen = str(shown.chosen)
        if not self.in_detail:
            return rows.scrolled(table, chosen, room)
        if name == "fragments":
            return details.fragment(self.watched, status, int(chosen), run_s, width, room)
        drawn = details.learner if name == "learners" else details.syncer
        return drawn(self.watched, status, chosen, run_s, width, room)

    def _rows(self, name: str, status: Status, run_s: float, width: int) -> ScreenTable:
        shown = self.tables[name]
        if name == "learners":
            return rows.learners(self.watched, status, shown, run_s, width)
        if name == "fragments":
            return rows.fragments(self.watched, status, shown, run_s, width)
        return rows.syncers(status, shown, width)

    def _tail(self, items: Sequence[T], line: Callable[[T, int], Text], width: int, room: int, none: str) -> list[Text]:
        if not items:
            return [Text(f" {none}", "dim")]
        self.above = max(0, min(self.above, len(items) - room))
        last = len(items) - self.above
        return [line(item, width) for item in items[max(0, last - room) : last]]

    def _alerts(self, now_s: float, width: int) -> list[Text]:
        said = [f"! {text}" for text in self.watched.alerts[:MAX_ALERTS]]
        if more := len(self.watched.alerts) - len(said):
            said[-1] += f"  (and {more} more)"
        if not self.feed.transport.connected:
            said.insert(0, "! no connection to the server; this is the last known state of the run")
        elif (silent_s := self.watched.silent_s(now_s)) > SILENT_S:
            said.insert(0, f"! no coordinator answers for {duration(silent_s)}; members are shown by their heartbeats")
        return [_cut(Text(f" {clean(text, width)}", "bold #e5873a"), width) for text in said]

    def _tabs(self, width: int) -> Text:
        line = Text(" ", no_wrap=True)
        for number, name in enumerate(VIEWS):
            mine = number == self.view
            line.append(f"[{number + 1} {name}]" if mine else f" {number + 1} {name} ", "bold reverse" if mine else "dim")
        return _cut(line, width)

    def _foot(self, run_s: float, width: int) -> Text:
        name = VIEWS[self.view]
        said = ["? keys", "q end"]
        if self.in_detail and name in TABLES:
            said.insert(0, "esc back  ↑↓ next one")
        elif name in TABLES:
            shown = self.tables[name]
            said.insert(0, f"↑↓ enter  s by {rows.order_of(name, shown)}  r turn")
            if name != "syncers":
                said.insert(1, f"w {rows.window_text(shown.window_s, run_s)}")
        elif name == "events":
            said.insert(0, "↑↓  v " + ("without versions" if self.with_versions else "with versions"))
        line = Text(" " + "   ".join(said), "dim", no_wrap=True)
        return _cut(line, width)

    # ---- keys

    def action_view(self, number: int) -> None:
        """Show another view."""
        self.view, self.in_detail, self.helping, self.above = number, False, False, 0
        self.draw()

    def action_next_view(self, by: int) -> None:
        """Show the view after this one, or the one before."""
        self.action_view((self.view + by) % len(VIEWS))

    def action_move(self, by: int) -> None:
        """Choose another row, or show other lines."""
        name = VIEWS[self.view]
        if name in TABLES:
            now_s = self._clock_s()
            table = self._rows(name, self.watched.status(now_s), self.watched.run_s(now_s), self.size.width)
            if table.names:
                shown = self.tables[name]
                at = table.names.index(shown.chosen) if shown.chosen in table.names else 0
                self.tables[name] = replace(shown, chosen=table.names[max(0, min(len(table.names) - 1, at + by))])
        else:
            self.above = max(0, self.above - by)
        self.draw()

    def action_detail(self) -> None:
        """Show all of the chosen row, or the table again."""
        self.in_detail = not self.in_detail and VIEWS[self.view] in TABLES
        self.draw()

    def action_table(self) -> None:
        """Show the table again."""
        self.in_detail = self.helping = False
        self.draw()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._show(lambda shown: replace(shown, order=shown.order + 1))

    def action_turn(self) -> None:
        """Sort the other way round."""
        self._show(lambda shown: replace(shown, descending=not shown.descending))

    def action_window(self) -> None:
        """Let lanes show another stretch of time."""
        self._show(lambda shown: replace(shown, window_s=rows.next_window(shown.window_s)))

    def _show(self, change: Callable[[Shown], Shown]) -> None:
        name = VIEWS[self.view]
        if name in TABLES:
            self.tables[name] = change(self.tables[name])
            self.draw()

    def action_versions(self) -> None:
        """Show versions among the events, or leave them out."""
        self.with_versions = not self.with_versions
        self.draw()

    def action_help(self) -> None:
        """Show the keys, or no longer."""
        self.helping = not self.helping
        self.draw()


def _log_line(entry: logs.LogLine, width: int) -> Text:
    return _cut(logs.render(entry).split("\n")[0], width)


def _cut(line: Text, width: int) -> Text:
    line.no_wrap = True
    if line.cell_len > width:
        line.truncate(width, overflow="ellipsis")
    return line
