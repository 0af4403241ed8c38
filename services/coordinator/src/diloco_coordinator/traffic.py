"""Bytes over learners' links in the course of a run: what all learners together have sent and received by when.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_POINTS = 2000  # every second one goes when there are more
EVERY_S = 1.0  # a curve needs no more
NONE = (0, 0, 0)

Point = tuple[float, int, int]  # time, bytes sent, bytes received


class TrafficTotals:
    """Totals of all learners over time. A learner's counters begin at 0 with each of its processes; totals never fall."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._sent = self._received = 0
        self._last: dict[str, tuple[int, int, int]] = {}  # by learner: incarnation, bytes sent and received
        self._totals: dict[str, tuple[int, int]] = {}  # by learner: sent and received by all of its processes

    def hear(self, learner: str, incarnation: int, sent: int, received: int, now_s: float) -> None:
        """Take in a learner's counters."""
        began, before_sent, before_received = self._last.get(learner, NONE)
        if incarnation < began:
            return
        if (began and incarnation > began) or sent < before_sent or received < before_received:
            before_sent = before_received = 0
        more_sent, more_received = max(0, sent - before_sent), max(0, received - before_received)
        self._sent += more_sent
        self._received += more_received
        total_sent, total_received = self._totals.get(learner, (0, 0))
        self._totals[learner] = total_sent + more_sent, total_received + more_received
        self._last[learner] = incarnation, sent, received
        if not self.points or now_s - self.points[-1][0] >= EVERY_S:
            self.points.append((round(now_s, 3), self._sent, self._received))
            if len(self.points) > MAX_POINTS:
                self.points = self.points[::2]

    def of(self, learner: str) -> dict[str, Any]:
        """Return what a learner's processes have sent and received, and the counters that were heard last, for its series."""
        sent, received = self._totals.get(learner, (0, 0))
        return {"bytes_up": sent, "bytes_down": received, "bytes_counted": list(self._last.get(learner, NONE))}

    def until(self, now_s: float) -> list[list[float]]:
        """Return the points, the last one as of now."""
        points = self.points + ([(round(now_s, 3), self._sent, self._received)] if self.points else [])
        return [list(point) for point in points]

    @classmethod
    def resumed(cls, points: Iterable[Sequence[float]], learners: Mapping[str, Mapping[str, Any]]) -> TrafficTotals:
        """Go on from the series of an earlier process: its points, and by learner what it heard.

        Raises:
            KeyError, TypeError, ValueError: they are damaged.
        """
        made = cls()
        made.points = [(float(at_s), int(sent), int(received)) for at_s, sent, received in points]
        if made.points:
            _, made._sent, made._received = made.points[-1]
            made._totals = {name: (int(heard["bytes_up"]), int(heard["bytes_down"])) for name, heard in learners.items()}
            # an older version's series have the counters of the last process alone, and not which it was: 0 stands for it
            counted = {name: heard.get("bytes_counted") or (0, *made._totals[name]) for name, heard in learners.items()}
            made._last = {name: (int(began), int(sent), int(received)) for name, (began, sent, received) in counted.items()}
        return made
