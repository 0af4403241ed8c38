"""A learner's hold on its shares, over a bucket as small as a bucket can be."""

from __future__ import annotations

from typing import Any, cast

import pytest

from diloco import membership
from diloco.core import leases
from diloco.core.leases import Lease, Rota, Shares
from diloco.errors import FenceError
from diloco.membership import Run
from diloco.observe import Logger
from diloco.settings import LearnerSettings, RunSettings
from diloco.shares import PULSED_RANGES, Leaseholder
from diloco.transport import Bucket


class Quiet:
    def __getattr__(self, level: str) -> Any:
        return lambda event, **values: None


class OneKey:
    """A bucket with compare-and-set; ``before_write`` is what somebody else does just before a write."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.revision = 0
        self.before_write: list[Shares] = []

    async def get(self, key: str) -> tuple[bytes, int] | None:
        assert key == "shares"
        return None if self.value is None else (self.value, self.revision)

    async def create(self, key: str, value: bytes) -> int:
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        if self.before_write:
            self.put_now(self.before_write.pop(0).pack())
        if revision != self.revision:
            raise FenceError("another revision")
        return self.put_now(value)

    async def put(self, key: str, value: bytes) -> int:
        raise NotImplementedError

    def put_now(self, value: bytes) -> int:
        self.value, self.revision = value, self.revision + 1
        return self.revision


@pytest.fixture
def bucket() -> OneKey:
    return OneKey()


@pytest.fixture
def run(bucket: OneKey) -> Run:
    return Run("run", RunSettings(learners=2), cast(Bucket, bucket))


def learner(run: Run, name: str, share: int | None = None, incarnation: int = 1) -> Leaseholder:
    settings = LearnerSettings(name=name, share=share)
    return Leaseholder(run, settings, incarnation, cast(Logger, Quiet()))


async def table(run: Run) -> list[tuple[str | None, int]]:
    """Holder and next batch of each share."""
    found, _ = await membership.shares(run)
    return [(lease.holder, lease.next) for lease in found.leases]


def train(holder: Leaseholder, rota: Rota, steps: int) -> list[tuple[int, int]]:
    """Steps of a trainer that books at once what it is dealt."""
    dealt = [rota.next(holder.leased()) for _ in range(steps)]
    for share, batch in dealt:
        holder.book(share, batch, 16)
    return dealt


async def test_two_that_join_at_once_get_different_shares(run: Run, bucket: OneKey) -> None:
    bucket.before_write.append(Shares([Lease(0, "ann", 1, 0), Lease(1, None, 0, 0)]))
    bob = learner(run, "bob", 0)
    await bob.take({})
    assert await table(run) == [("ann", 0), ("bob", 0)]
    assert bob.leased() == {1: 0}


async def test_a_learner_begins_at_the_furthest_of_table_log_and_checkpoint(run: Run, bucket: OneKey) -> None:
    bucket.put_now(Shares([Lease(0, None, 0, 10), Lease(1, "bob", 1, 0)]).pack())
    for ends, restored, expected in (({}, [], 10), ({0: 25}, [], 25), ({0: 25}, [(0, 40)], 40), ({}, [(0, 5), (1, 99)], 25)):
        ann = learner(run, "ann")
        await ann.take(ends)
        ann.restore(restored)
        assert ann.leased() == {0: expected}


async def test_what_is_held_on_is_dealt_on_however_far_the_log_has_come(run: Run) -> None:
    ann, rota = learner(run, "ann", 0), Rota()
    await ann.take({})
    assert train(ann, rota, 3) == [(0, 0), (0, 1), (0, 2)]
    await ann.look({0: 2})
    assert train(ann, rota, 2) == [(0, 3), (0, 4)]
    assert ann.trained() == [(0, 0, 5)]
    assert ann.positions() == [(0, 5)]


async def test_who_finds_its_share_given_away_takes_another_and_trains_meanwhile(run: Run, bucket: OneKey) -> None:
    ann, rota = learner(run, "ann", 0), Rota()
    await ann.take({})
    train(ann, rota, 3)
    bucket.put_now(Shares([Lease(0, "bob", 1, 3), Lease(1, "bob", 1, 0)]).pack())
    assert train(ann, rota, 1) == [(0, 3)]
    await ann.look({})
    assert train(ann, rota, 2) == [(2, 0), (2, 1)]
    assert await table(run) == [("bob", 3), ("bob", 0), ("ann", 0)]


async def test_a_share_that_comes_back_goes_on_behind_whoever_had_it(run: Run, bucket: OneKey) -> None:
    ann, rota = learner(run, "ann", 0), Rota()
    await ann.take({})
    train(ann, rota, 3)
    bucket.put_now(Shares([Lease(0, "ann", 1, 50), Lease(1, None, 0, 0)]).pack())  # bob was here since the last look
    await ann.look({0: 60})
    assert train(ann, rota, 2) == [(0, 50), (0, 51)]


async def test_a_share_moves_to_one_that_has_none_without_a_batch_repeated_or_left_out(run: Run, bucket: OneKey) -> None:
    bucket.put_now(Shares([Lease(0, "bob", 1, 0), Lease(1, "bob", 1, 0)]).pack())
    bob, ann, rota, other = learner(run, "bob"), learner(run, "ann"), Rota(), Rota()
    await bob.take({})
    await ann.take({})
    done = train(bob, rota, 12) + train(ann, other, 1)
    assert [share for share, _ in done] == [0] * 8 + [1] * 4 + [2]
    in_flight = [rota.next(bob.leased()) for _ in range(2)]  # dealt, and not booked yet
    assert in_flight == [(1, 4), (1, 5)]
    await bob.look({})  # lets go of share 1
    dealt = [rota.next(bob.leased()) for _ in range(2)]
    assert [share for share, _ in dealt] == [0, 0]
    for share, batch in in_flight:
        bob.book(share, batch, 16)
    await bob.look({})
    assert (await table(run))[1] == ("bob", 0)  # not before all that was dealt is booked
    for share, batch in dealt:
        bob.book(share, batch, 16)
    await bob.look({})
    assert await table(run) == [("bob", 0), (None, 6), ("ann", 0)]
    await ann.look({})
    assert sorted(ann.leased()) == [1, 2]
    await ann.look({})  # lets go of its further lap
    done = train(ann, other, 3)
    assert done == [(1, 6), (1, 7), (1, 8)]
    await ann.look({})
    assert await table(run) == [("bob", 0), ("ann", 6), (None, 1)]
    assert ann.leased() == {1: 9}


async def test_who_leaves_frees_all_with_its_positions(run: Run, bucket: OneKey) -> None:
    bucket.put_now(Shares([Lease(0, "ann", 1, 0), Lease(1, "ann", 1, 7)]).pack())
    ann, rota = learner(run, "ann", incarnation=2), Rota()
    await ann.take({1: 9})
    assert train(ann, rota, 10)[-2:] == [(1, 9), (1, 10)]
    await ann.leave()
    assert await table(run) == [(None, 8), (None, 11)]


async def test_a_damaged_table_is_replaced(run: Run, bucket: OneKey) -> None:
    bucket.put_now(b"no table")
    ann = learner(run, "ann", 1)
    await ann.take({1: 30})
    assert await table(run) == [(None, 0), ("ann", 30)]
    assert leases.unpack(bucket.value or b"").leases[1].incarnation == 1


async def test_a_pulse_tells_the_newest_ranges_each_whole(run: Run) -> None:
    ann = learner(run, "ann")
    for share in range(PULSED_RANGES + 4):
        for batch in range(3):
            ann.book(share, batch, 16)
    ann.book(2, 3, 16)
    expected = [(2, 0, 4)] + [(share, 0, 3) for share in range(5, PULSED_RANGES + 4)]
    assert ann.trained() == expected
    ann.book(2, 9, 16)  # leased again, further on
    assert ann.trained()[0] == (2, 9, 1)
