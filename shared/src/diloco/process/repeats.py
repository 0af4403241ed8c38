"""Repeated lines of a log: the first one is written, and a count when they stop.

Two lines are alike if they have the same event and level and name the same things. Numbers do not count, nor do numbers and
hashes within sentences: the same trouble of another fragment, version or sequence is alike. Only warnings and errors are
held back. A line at ``info`` that names the same thing ends a burst, so each loss of a connection that comes back is written.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from structlog.typing import EventDict

QUIET_S = 10.0  # a burst is over when no such line comes for so long
SAY_EVERY_S = 60.0  # of a burst that goes on
MAX_BURSTS = 128  # that are known at a time
MAX_FRAGMENTS = 64  # that a count lists
MAX_WORDS = 200  # characters of a sentence that are compared

HELD_BACK = ("warning", "error")
SENTENCES = ("reason", "error", "message", "subject", "where")  # keys of text in which numbers and hashes do not count
_NUMBER = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")


@dataclass
class Burst:
    """Lines that are alike.

    Attributes:
        values: of the newest line.
        names: texts that the lines have in common.
        left_out: lines since one was written, or since they were last counted.
        since_s: time of the first line that was left out.
        fragments: of the lines that were left out.
    """

    level: str
    values: dict[str, Any]
    names: frozenset[str]
    last_s: float
    said_s: float
    left_out: int = 0
    since_s: float = 0.0
    fragments: set[int] = field(default_factory=set)

    def leave_out(self, values: Mapping[str, Any], now_s: float) -> None:
        """Count a line instead of writing it."""
        if not self.left_out:
            self.since_s = now_s
        self.left_out += 1
        self.last_s, self.values = now_s, dict(values)
        fragment = values.get("fragment")
        if isinstance(fragment, int) and len(self.fragments) < MAX_FRAGMENTS:
            self.fragments.add(fragment)

    def count(self, now_s: float) -> EventDict:
        """Return the line that says how many were left out, with the values of the last one, and begin to count again."""
        line = {key: value for key, value in self.values.items() if key not in ("event", "level", "traceback", "fragment")}
        line |= {"event": "lines_repeated", "level": self.level, "repeated": self.values["event"], "count": self.left_out}
        line["within_s"] = round(self.last_s - self.since_s, 1)
        if self.fragments:
            line["fragments"] = sorted(self.fragments)
        self.left_out, self.said_s = 0, now_s
        self.fragments.clear()
        return line


class Repeats:
    """Decides which lines are written. Pure: times are handed in, in seconds."""

    def __init__(self) -> None:
        self._bursts: dict[Hashable, Burst] = {}  # the one that was quiet for longest comes first

    def take(self, values: Mapping[str, Any], now_s: float) -> tuple[list[EventDict], bool]:
        """Take a line; return counts to be written before it, and whether it is written itself."""
        counts, level, names = self.due(now_s), values["level"], _names(values)
        if level not in HELD_BACK:
            if level == "info":
                counts += [
                    count for key, burst in list(self._bursts.items()) if burst.names & names for count in self._end(key)
                ]
            return counts, True
        key = (level, values["event"], names, _sentences(values))
        burst = self._bursts.pop(key, None)
        if burst is not None:
            self._bursts[key] = burst
            burst.leave_out(values, now_s)
            return counts, False
        if len(self._bursts) >= MAX_BURSTS:
            counts += self._end(next(iter(self._bursts)))
        self._bursts[key] = Burst(level, dict(values), names, now_s, now_s)
        return counts, True

    def due(self, now_s: float) -> list[EventDict]:
        """Return counts of bursts that are over, or go on for long."""
        counts: list[EventDict] = []
        for key, burst in list(self._bursts.items()):
            if now_s - burst.last_s >= QUIET_S:
                counts += self._end(key)
            elif burst.left_out and now_s - burst.said_s >= SAY_EVERY_S:
                counts.append(burst.count(now_s))
        return counts

    def next_s(self) -> float | None:
        """Return the time at which a count is due; None if no line was left out."""
        times = [min(each.last_s + QUIET_S, each.said_s + SAY_EVERY_S) for each in self._bursts.values() if each.left_out]
        return min(times, default=None)

    def end(self) -> list[EventDict]:
        """Return all counts: the process ends."""
        return [count for key in list(self._bursts) for count in self._end(key)]

    def _end(self, key: Hashable) -> list[EventDict]:
        burst = self._bursts.pop(key)
        return [burst.count(burst.last_s)] if burst.left_out else []


def _names(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the texts of a line that are no sentences, those in lists included."""
    names: set[str] = set()
    for key, value in values.items():
        if key not in ("event", "level", "traceback", *SENTENCES):
            names.update(each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, str))
    return frozenset(names)


def _sentences(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_NUMBER.sub("#", str(values[key])[:MAX_WORDS]) for key in SENTENCES if key in values)


class WriteOnce:
    """structlog's processor that holds repeated lines back; it writes counts when they are due, in a thread of its own."""

    def __init__(self, write: Callable[[EventDict], None]) -> None:
        """Write counts with ``write``; callable from any thread."""
        self._write, self._repeats = write, Repeats()
        self._lock = threading.RLock()  # an error in a destructor is logged in whatever thread is here
        self._timer: threading.Timer | None = None

    def __call__(self, logger: Any, method: str, values: EventDict) -> EventDict:
        with self._lock:
            counts, wanted = self._repeats.take(values, time.monotonic())
            self._wake()
        for count in counts:
            self._write(count)
        if not wanted:
            raise structlog.DropEvent
        return values

    def end(self) -> None:
        """Write all counts, and wait for no more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            counts = self._repeats.end()
        for count in counts:
            self._write(count)

    def _wake(self) -> None:
        due_s = self._repeats.next_s()
        if self._timer is None and due_s is not None:
            self._timer = threading.Timer(max(0.0, due_s - time.monotonic()), self._on_time)
            self._timer.daemon = True
            self._timer.start()

    def _on_time(self) -> None:
        with self._lock:
            self._timer = None
            counts = self._repeats.due(time.monotonic())
            self._wake()
        for count in counts:
            self._write(count)
