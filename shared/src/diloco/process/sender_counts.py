"""Counts by sender and reason whose number is bounded, since both may come from the wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_PAIRS = 1024  # of sender and reason
OTHERS = ("*", "*")  # the pair of all that are counted beyond


class SenderCounts:
    """Counts by (sender, reason), and the time of the last one of each sender. Callable from any thread."""

    def __init__(self, limit: int = MAX_PAIRS, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._counts: dict[tuple[str, str], int] = {}
        self._last_s: dict[str, float] = {}  # by sender
        self._lock = threading.Lock()

    def add(self, sender: str, reason: str) -> tuple[tuple[str, str], int]:
        """Count one. Return the pair under which it counts, and its count."""
        with self._lock:
            pair = (sender, reason)
            if pair not in self._counts and len(self._counts) >= self._limit:
                pair = OTHERS
            count = self._counts[pair] = self._counts.get(pair, 0) + 1
            self._last_s[pair[0]] = self._clock()
            return pair, count

    @property
    def total(self) -> int:
        """Number of all that were counted."""
        with self._lock:
            return sum(self._counts.values())

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the counts by (sender, reason), as a copy."""
        with self._lock:
            return dict(self._counts)

    def ages_s(self) -> dict[str, float]:
        """Return the time since the last one of each sender."""
        now_s = self._clock()
        with self._lock:
            return {sender: now_s - last_s for sender, last_s in self._last_s.items()}
