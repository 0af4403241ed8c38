"""Fetching the parts of a body with many requests on their way, bounded: the one rule for keyframes, entries and loans.

Each request for a part of 512 KiB takes a round trip. One at a time they bring 6.5 MB/s over a link of 80 ms, however fast it
is. At most :data:`MOST_BYTES` are on their way: more than 1 Gbit/s brings in 80 ms.

That much would wait for minutes in front of a thin link, and requests would time out. So the window begins with two parts. An
answer that waited less than :data:`QUEUE_S` behind others makes room for three more, which quadruples the window each round
trip. One that waited longer halves it, once a round trip; from then on an answer makes room for one. After an error the next
part goes alone. An answer's wait is its time less that of the fastest one since nothing was on its way, as LEDBAT (RFC 6817)
has it, or less :data:`ROUND_TRIP_S` at most.

Rejected: a fixed window, which fits one link; and a window from a measured rate, which is known only after the first parts.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from diloco.process.tasks import side_by_side
from diloco.wire.body import PART_BYTES

MOST_BYTES = 16 << 20  # 1 Gbit/s for 80 ms are 10 MB; the rest covers a reader that is late
MOST_PARTS = MOST_BYTES // PART_BYTES
FIRST_PARTS = 2
GROWTH_PARTS = 3  # for each answer in time, before the first one that is late
QUEUE_S = 0.2  # a part may wait so long for others: a tenth of the shortest time that one is waited for
ROUND_TRIP_S = 0.3  # between the farthest places on Earth; a part that takes longer alone is on a thin link

T = TypeVar("T")


class Prefetcher:
    """Fetches parts, those of all callers within one window; the parts of the call that began first go first.

    Construct one for all that shares a connection.
    """

    def __init__(self) -> None:
        self._window, self._growth, self._on_their_way, self._calls = FIRST_PARTS, GROWTH_PARTS, 0, 0
        self._fastest_s, self._halved_s = math.inf, -math.inf
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # heap: call, part

    async def fetch(self, count: int, fetch_one: Callable[[int], Awaitable[T]]) -> list[T]:
        """Return the results of ``fetch_one`` for 0 to ``count`` - 1, in this order, in whatever order they come.

        The first error ends the call, and is raised when no request of it is left. So does a cancellation.
        """
        self._calls += 1
        call, clock = self._calls, asyncio.get_running_loop().time

        async def fetch(index: int) -> T:
            await self._enter(call, index)
            try:
                began_s = clock()
                part = await fetch_one(index)
                self._fit(began_s, clock())
                return part
            except Exception:
                self._window, self._growth = 1, 1  # the link may be too slow for more within the time that a part is waited for
                raise
            finally:
                self._leave()

        return await side_by_side(count, MOST_PARTS, fetch)

    async def _enter(self, call: int, index: int) -> None:
        """Wait until the window has room for a part."""
        admitted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (call, index, admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self._leave()
            raise

    def _admit(self) -> None:
        while self._waiting and self._on_their_way < self._window:
            _, _, admitted = heapq.heappop(self._waiting)
            if not admitted.done():
                if not self._on_their_way:
                    self._fastest_s = math.inf
                self._on_their_way += 1
                admitted.set_result(None)

    def _leave(self) -> None:
        self._on_their_way -= 1
        asyncio.get_running_loop().call_soon(self._admit)  # when the same call has asked for its next part

    def _fit(self, began_s: float, now_s: float) -> None:
        """Fit the window to the time that an answer took."""
        took_s = now_s - began_s
        self._fastest_s = min(self._fastest_s, took_s)
        if took_s <= min(self._fastest_s, ROUND_TRIP_S) + QUEUE_S:
            self._window = min(MOST_PARTS, self._window + self._growth)
        elif began_s >= self._halved_s:  # else it was asked for with the window before
            self._window, self._growth, self._halved_s = max(1, self._window // 2), 1, now_s
