"""Events in virtual time, one after another."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

# the order of events at one moment; looks are in the order of fragments
BOUNDARY, MESSAGE, LOOK = 0, 1, 2


class Events:
    """The queue of events, up to a time."""

    def __init__(self, until_us: int) -> None:
        self.until_us = until_us
        self._queue: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0

    def at(self, at_us: int, order: int, act: Callable[..., None], *arguments: Any) -> None:
        """Have ``act`` called at a time, with the time and these arguments."""
        if at_us <= self.until_us:
            self._pushed += 1
            heapq.heappush(self._queue, (at_us, order, self._pushed, act, arguments))

    def play(self) -> None:
        """Play all events, and those that follow from them."""
        while self._queue:
            at_us, _, _, act, arguments = heapq.heappop(self._queue)
            act(at_us, *arguments)
