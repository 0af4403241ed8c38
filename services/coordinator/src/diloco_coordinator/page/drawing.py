"""The page's parts, drawn no more often than their cost allows, and told apart by when they changed.

Viewers have no queues. Each part has the number of the drawing in which it changed last, and a viewer knows the number that it
has seen: it is sent the parts that changed since, as they are now. So a viewer that reads slowly gets fewer frames, never old
ones, and holds nothing up.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco import __version__
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco_report.page import PARTS, render_html

FRAME_S = 0.5  # between two drawings at least: a page moves twice a second
SHARE = 0.003  # of a core that drawing either group may take; with what sending takes one viewer costs less than 1 %
CURVED = ("loss", "course", "activity", "merges", "regions", "sample")  # parts that need the series; all others are quick

Report = Mapping[str, Any]


class PageSource(Protocol):
    """A coordinator, as its page sees it."""

    async def report(self) -> Report:
        """Return the run's report as of now, without its series."""

    async def series(self) -> Callable[[], Mapping[str, Any]]:
        """Return a function that makes the report's ``series``: it may take long, and runs in another thread."""

    @property
    def over(self) -> bool:
        """Whether the run is finished."""


@dataclass
class _Group:
    """Parts that are drawn together, and the moment from which they may be drawn again."""

    names: tuple[str, ...]
    due_s: float = 0.0
    ended: bool = False  # the end of a run that is over is drawn
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def nonce_of(run: bytes, process: bytes) -> str:
    """Return the nonce of one process's drawings of one run: RUN-PROCESS.

    RUN is of the run's identity and this software. A page that is sent another one loads itself again: at its address is
    another run by now, or a version with other parts and script.
    """
    return f"{hashlib.blake2b(run + __version__.encode(), digest_size=8).hexdigest()}-{process.hex()}"


@dataclass
class Drawing:
    """The parts of a page, as they were drawn last. ``nonce`` tells this process's numbers from another one's."""

    source: PageSource
    nonce: str
    log: Logger
    number: int = 0
    report: Report = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=lambda: dict.fromkeys(PARTS, ""))
    cost_s: float = 0.0  # processor time of all drawings
    _changed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    _complaint: Complaint = field(init=False)
    _quick: _Group = field(default_factory=lambda: _Group(tuple(name for name in PARTS if name not in CURVED)))
    _curved: _Group = field(default_factory=lambda: _Group(CURVED))

    def __post_init__(self) -> None:
        self._complaint = Complaint(self.log)

    @property
    def state(self) -> str:
        """Name of what is drawn, as :meth:`since` takes it."""
        return f"{self.nonce}.{self.number}"

    def since(self, state: str) -> dict[str, str]:
        """Return the parts that changed after a state; all, if another process drew it."""
        nonce, _, number = state.rpartition(".")
        seen = int(number) if nonce == self.nonce and number.isdecimal() and len(number) < 16 else -1
        return {name: self.parts[name] for name, changed in self._changed.items() if changed > seen}

    async def whole(self) -> str:
        """Return the page as one file that needs no server."""
        report, series = await self.source.report(), await self.source.series()
        return await asyncio.to_thread(lambda: render_html({**report, "series": series()}))

    async def draw(self, *, curves: bool = True) -> None:
        """Draw the parts that are due, or only the quick ones; of a run that is over, all.

        A report that cannot be drawn is logged: the page stays as it was.
        """
        for group in (self._quick, self._curved) if curves else (self._quick,):
            async with group.lock:
                now_s, over = asyncio.get_running_loop().time(), self.source.over
                if group.ended or (now_s < group.due_s and not over):
                    continue
                try:
                    cost_s = await self._draw(group)
                except Exception as error:  # a damaged history, or a defect, which must not end the process's own work
                    self._complaint.error("page_not_drawn", exc_info=error)
                    cost_s = 1.0
                self.cost_s += cost_s
                group.due_s, group.ended = now_s + max(FRAME_S, cost_s / SHARE), over

    async def _draw(self, group: _Group) -> float:
        began_s = time.thread_time()
        report = await self.source.report()
        series = await self.source.series() if group is self._curved else None
        here_s = time.thread_time() - began_s

        def work() -> tuple[dict[str, str], float]:
            began_s = time.thread_time()
            whole = report if series is None else {**report, "series": series()}
            return {name: PARTS[name](whole) for name in group.names}, time.thread_time() - began_s

        drawn, there_s = await asyncio.to_thread(work)
        changed = [name for name, text in drawn.items() if text != self.parts[name]]
        self.number += bool(changed)
        self._changed.update(dict.fromkeys(changed, self.number))
        self.parts.update(drawn)
        self.report = report
        return here_s + there_s
