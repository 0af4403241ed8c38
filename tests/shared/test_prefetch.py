"""Parts fetched ahead: their order, the bound of bytes on their way, and the rate over links of any speed, in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from diloco.errors import FormatError
from diloco.process.prefetch import MOST_BYTES, Prefetcher
from diloco.testing.loop import ProcessLoop, Scheduler
from diloco.wire.body import PART_BYTES

T = TypeVar("T")
GBIT = 1e9 / 8  # bytes a second
MBIT = 1e6 / 8


def play(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in virtual time."""
    scheduler = Scheduler()

    def failed(error: BaseException | str) -> None:
        raise AssertionError(error)

    loop = ProcessLoop(scheduler, random.Random(0), failed)  # type: ignore[abstract]
    task: asyncio.Task[T] = loop.create_task(work())
    scheduler.run(math.inf)
    return task.result()


class Link:
    """A link of a rate and a round trip; requests cost no bytes. The server sends parts in the order of the requests."""

    def __init__(self, bytes_per_s: float, round_trip_s: float, timeout_s: float = math.inf) -> None:
        self.part_s, self.round_trip_s, self.timeout_s = PART_BYTES / bytes_per_s, round_trip_s, timeout_s
        self.free_s, self.under_way, self.most, self.slowest_s = 0.0, 0, 0, 0.0
        self.asked: list[int] = []

    async def part(self, index: int) -> int:
        now_s = asyncio.get_running_loop().time()
        self.asked.append(index)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.free_s = max(self.free_s, now_s + self.round_trip_s / 2) + self.part_s
        took_s = self.free_s + self.round_trip_s / 2 - now_s
        try:
            await asyncio.sleep(min(took_s, self.timeout_s))
        finally:
            self.under_way -= 1
        if took_s > self.timeout_s:
            raise TimeoutError
        self.slowest_s = max(self.slowest_s, took_s)
        return index


async def fetch_s(prefetcher: Prefetcher, count: int, fetch_one: Callable[[int], Awaitable[int]]) -> float:
    """Return how long parts take, all of them in order."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    assert await prefetcher.fetch(count, fetch_one) == list(range(count))
    return clock() - began_s


def test_parts_that_come_in_reverse_are_returned_in_order() -> None:
    async def one(index: int) -> str:
        await asyncio.sleep(10 - index)
        return f"part {index}"

    assert play(lambda: Prefetcher().fetch(8, one)) == [f"part {index}" for index in range(8)]
    assert play(lambda: Prefetcher().fetch(0, one)) == []


@pytest.mark.parametrize(("rate", "round_trip_s"), [(GBIT, 0.08), (200 * MBIT, 0.08), (GBIT, 0.001)])
def test_a_long_fast_link_is_used_within_the_bound_of_bytes_on_their_way(rate: float, round_trip_s: float) -> None:
    """500 MB of parts: one at a time they would take 84 s over 80 ms, besides their own time."""
    link, count = Link(rate, round_trip_s), 1000
    took_s = play(lambda: fetch_s(Prefetcher(), count, link.part))
    assert count * PART_BYTES / rate / took_s > 0.85
    assert link.most * PART_BYTES <= MOST_BYTES
    assert link.slowest_s < 2.0


def test_callers_share_one_bound_and_the_first_goes_first() -> None:
    link, prefetcher = Link(GBIT, 0.08), Prefetcher()
    ended: list[int] = []

    async def caller(number: int) -> None:
        await fetch_s(prefetcher, 100, link.part)
        ended.append(number)

    async def all_callers() -> None:
        await asyncio.gather(*(caller(number) for number in range(4)))

    play(all_callers)
    assert link.most * PART_BYTES == MOST_BYTES
    assert ended == [0, 1, 2, 3]
    for begun in range(0, 400, 100):  # no part of a later call goes before one of an earlier
        assert sorted(link.asked[begun : begun + 100]) == list(range(100))


@pytest.mark.parametrize(
    ("rate_mbit_s", "timeout_s"), [(8.5, 2.0), (12.0, 2.0), (20.0, 2.0), (40.0, 2.0), (100.0, 2.0), (2.0, 5.0)]
)
def test_no_part_waits_so_long_for_others_that_it_is_asked_for_again(rate_mbit_s: float, timeout_s: float) -> None:
    """A loan's part is waited for 2 s, one of a log 5 s: all 16 MiB at once would take 16 s over 8.5 Mbit/s."""
    link = Link(rate_mbit_s * MBIT, 0.08, timeout_s)
    took_s = play(lambda: fetch_s(Prefetcher(), 60, link.part))
    assert 60 * PART_BYTES / (rate_mbit_s * MBIT) / took_s > 0.85


def test_after_an_error_parts_go_alone_until_one_comes_soon() -> None:
    """Over 1 Mbit/s two parts take 8.4 s, one 4.2 s."""
    link, prefetcher = Link(1 * MBIT, 0.08, 5.0), Prefetcher()

    async def retried() -> float:
        with pytest.raises(TimeoutError):
            await prefetcher.fetch(10, link.part)
        assert link.under_way == 0
        link.free_s = 0.0  # the requests that were given up are not answered
        return await fetch_s(prefetcher, 10, link.part)

    assert play(retried) == pytest.approx(10 * (PART_BYTES / MBIT + 0.08))


def test_the_first_error_ends_the_call_and_leaves_no_request() -> None:
    link, prefetcher = Link(GBIT, 0.08), Prefetcher()

    async def one(index: int) -> int:
        if index == 40:
            raise FormatError("part 41 of 100 is missing")
        return await link.part(index)

    async def twice() -> float:
        with pytest.raises(FormatError, match="part 41 of 100 is missing"):
            await prefetcher.fetch(100, one)
        assert link.under_way == 0
        assert len(link.asked) < 100
        return await fetch_s(prefetcher, 100, link.part)  # nothing of the window was lost

    play(twice)
    assert link.most * PART_BYTES == MOST_BYTES


def test_a_call_that_is_cancelled_gives_its_room_to_others() -> None:
    link, prefetcher = Link(GBIT, 0.08), Prefetcher()

    async def cancelled() -> None:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(prefetcher.fetch(1000, link.part))
            second = group.create_task(fetch_s(prefetcher, 200, link.part))
            await asyncio.sleep(1.0)
            assert link.most * PART_BYTES == MOST_BYTES
            first.cancel()
            await second
        assert link.under_way == 0

    play(cancelled)
