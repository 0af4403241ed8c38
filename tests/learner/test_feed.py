"""Batches by lease: what a learner trains on, and that nothing changes for one that keeps its share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from diloco.core.run.leases import BLOCK_BATCHES, data_of
from diloco.errors import DataError, SettingsError
from diloco.process.observe import get_logger
from diloco.settings.run import RunSettings, TaskSettings
from diloco_learner.data.feed import BatchFeed
from diloco_learner.task import GptTask, Task

SETTINGS = RunSettings(learners=2, seed=7)


class Numbers:
    """A task whose batches say what they are; ``made`` counts the streams that were begun."""

    def __init__(self) -> None:
        self.made = 0

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[tuple[int, int, int, int]]:
        self.made += 1
        index = start
        while True:
            yield share, shares, seed, index
            index += 1


def test_one_share_is_read_as_one_stream_from_where_the_lease_begins() -> None:
    task = Numbers()
    feed = BatchFeed(cast(Task, task), SETTINGS, lambda: {1: 5}, get_logger())
    batches = list(islice(feed, 30))
    assert [(batch.share, batch.index) for batch in batches] == [(1, 5 + i) for i in range(30)]
    assert [batch.data for batch in batches] == [(1, 2, 7, 5 + i) for i in range(30)]
    assert task.made == 1


def test_shares_in_turn_are_two_streams_and_a_further_lap_has_an_order_of_its_own() -> None:
    task = Numbers()
    feed = BatchFeed(cast(Task, task), SETTINGS, lambda: {0: 0, 3: 4}, get_logger())
    batches = list(islice(feed, 4 * BLOCK_BATCHES))
    part, seed = data_of(3, 2, 7)
    assert part == 1
    assert seed != 7
    assert {batch.data[:3] for batch in batches if batch.share == 3} == {(1, 2, seed)}
    assert [batch.data[3] for batch in batches if batch.share == 3] == [4 + i for i in range(2 * BLOCK_BATCHES)]
    assert [batch.data for batch in batches if batch.share == 0] == [(0, 2, 7, i) for i in range(2 * BLOCK_BATCHES)]
    assert task.made == 2


def test_a_share_leased_again_further_on_is_read_from_there() -> None:
    leased: dict[int, int] = {0: 0}
    feed = BatchFeed(cast(Task, Numbers()), SETTINGS, lambda: leased, get_logger())
    assert [next(feed).index for _ in range(3)] == [0, 1, 2]
    leased = {1: 0}
    assert (next(feed).share, next(feed).index) == (1, 1)
    leased = {}
    batch = next(feed)
    assert (batch.share, batch.index, batch.data[3]) == (1, 2, 2)
    leased = {0: 40}
    batch = next(feed)
    assert (batch.share, batch.index, batch.data[3]) == (0, 40, 40)


class Partial(Numbers):
    """Has no data of share 1."""

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[tuple[int, int, int, int]]:
        if share == 1:
            raise DataError("share 1: nothing here")
        return super().batches(share, shares, seed, start)


def test_a_share_without_data_here_is_left_out_unless_it_is_the_only_one() -> None:
    feed = BatchFeed(cast(Task, Partial()), SETTINGS, lambda: {0: 0, 1: 0}, get_logger())
    assert [(batch.share, batch.index) for batch in islice(feed, 20)] == [(0, i) for i in range(20)]
    with pytest.raises(DataError, match="share 1: nothing here"):
        next(BatchFeed(cast(Task, Partial()), SETTINGS, lambda: {1: 0}, get_logger()))


@pytest.mark.parametrize("share", [0, 1])
def test_the_batches_of_a_share_are_those_of_the_task(tmp_path: Path, share: int) -> None:
    (tmp_path / "text.txt").write_text("".join(chr(97 + i % 23) for i in range(4000)))
    task = GptTask(TaskSettings(layers=1, width=16, heads=2, context=8, batch=4), str(tmp_path / "text.txt"))
    expected: list[Any] = list(islice(task.batches(share, 2, 7, 3), 100))
    fed = list(islice(BatchFeed(task, SETTINGS, lambda: {share: 3}, get_logger()), 100))
    for batch, wanted in zip(fed, expected, strict=True):
        np.testing.assert_array_equal(batch.data, wanted)


def test_batches_that_end_are_named() -> None:
    class Ends(Numbers):
        def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[tuple[int, int, int, int]]:
            return islice(super().batches(share, shares, seed, start), max(0, 3 - start))

    feed = BatchFeed(cast(Task, Ends()), SETTINGS, lambda: {1: 0}, get_logger())
    assert [next(feed).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(SettingsError, match=r"batches\(\) of share 1 ended before batch 3; batches\(\) must not end"):
        next(feed)
