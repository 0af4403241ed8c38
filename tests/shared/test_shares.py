"""A learner's hold on its shares, over a bucket as small as a bucket can be."""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from diloco.control.admission import Admission
from diloco.control.creation import KnownRun
from diloco.control.shares import Claims, key_of
from diloco.core.run import leases
from diloco.core.run.leases import ClaimedShare, RoundRobin, ShareClaim
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import FenceError
from diloco.member.shares import HEARTBEAT_RANGES, LeaseClient
from diloco.process.observe import Counted, Logger
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.transport import Bucket

SETTINGS = RunSettings(learners=2)
MAP = build_map([TensorSpec("w", (8, 8))], 1)


class Quiet:
    def __getattr__(self, level: str) -> Any:
        return lambda event, **values: None


class Keys:
    """A bucket with compare-and-set; ``before_write`` is what another process does just before a write."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, int]] = {}
        self.revision = 0
        self.reads = 0
        self.before_write: list[Callable[[], object]] = []
        for name in ("ann", "bob"):
            self.admit(name)

    def admit(self, name: str) -> None:
        self.put_now(f"member.{name}", msgspec.msgpack.encode(Admission(name, 1, SETTINGS.digest(), MAP.digest, None)))

    async def get(self, key: str) -> tuple[bytes, int] | None:
        self.reads += 1
        return self.values.get(key)

    async def after(self, keys: str, revision: int) -> tuple[str, bytes, int] | None:
        self.reads += 1
        newer = [(at, key, value) for key, (value, at) in self.values.items() if at > revision and fnmatch.fnmatch(key, keys)]
        at, key, value = min(newer, default=(0, "", b""))
        return (key, value, at) if at else None

    async def create(self, key: str, value: bytes) -> int:
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        if self.before_write:
            self.before_write.pop(0)()
        if revision != self.values.get(key, (b"", 0))[1]:
            raise FenceError("another revision")
        return self.put_now(key, value)

    async def put(self, key: str, value: bytes) -> int:
        raise NotImplementedError

    def put_now(self, key: str, value: bytes) -> int:
        self.revision += 1
        self.values[key] = value, self.revision
        return self.revision

    def claim(self, learner: str, *entries: ClaimedShare) -> None:
        """Have a learner write a claim."""
        self.put_now(key_of(learner), ShareClaim(learner, 1, list(entries)).pack())


@pytest.fixture
def bucket() -> Keys:
    return Keys()


@pytest.fixture
def run(bucket: Keys) -> KnownRun:
    return KnownRun("run", SETTINGS, cast(Bucket, bucket))


def learner(run: KnownRun, name: str, share: int | None = None, incarnation: int = 1) -> LeaseClient:
    log = cast(Logger, Quiet())
    return LeaseClient(run, LearnerSettings(name=name, share=share), incarnation, MAP, Counted(log), log)


async def table(run: KnownRun) -> list[tuple[str | None, int]]:
    """Holder and next batch of each share."""
    read = await Claims(run, "eve", MAP, Counted(cast(Logger, Quiet()))).read()
    return [(lease.holder, lease.next) for lease in leases.fold(read, SETTINGS.learners).leases.values()]


def train(holder: LeaseClient, round_robin: RoundRobin, steps: int) -> list[tuple[int, int]]:
    """Steps of a trainer that books at once what it is dealt."""
    dealt = [round_robin.next(holder.leased()) for _ in range(steps)]
    for share, batch in dealt:
        holder.book(share, batch, 16)
    return dealt


async def test_two_that_join_at_once_get_different_shares(run: KnownRun, bucket: Keys) -> None:
    bucket.before_write.append(lambda: bucket.claim("ann", ClaimedShare(0, True, 0, 0, 0)))
    bob = learner(run, "bob", 0)
    await bob.take({})
    assert await table(run) == [("ann", 0), ("bob", 0)]
    assert bob.leased() == {1: 0}


async def test_two_readings_at_once_find_the_same(run: KnownRun, bucket: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    get = bucket.get

    async def slow(key: str) -> tuple[bytes, int] | None:
        for _ in range(0 if key.startswith("share.") else 9):  # the admission comes when both ask for it
            await asyncio.sleep(0)
        return await get(key)

    monkeypatch.setattr(bucket, "get", slow)
    bucket.claim("bob", ClaimedShare(0, True, 0, 0, 0))
    claims = Claims(run, "ann", MAP, Counted(cast(Logger, Quiet())))
    first, second = await asyncio.gather(claims.read(), claims.read())
    assert first == second
    assert list(first) == ["bob"]


async def test_a_learner_begins_at_the_furthest_of_claims_log_and_checkpoint(run: KnownRun, bucket: Keys) -> None:
    bucket.claim("bob", ClaimedShare(0, False, 10, 0, 0), ClaimedShare(1, True, 0, 0, 0))
    for ends, restored, expected in (({}, [], 10), ({0: 25}, [], 25), ({0: 25}, [(0, 40)], 40), ({}, [(0, 5), (1, 99)], 10)):
        ann = learner(run, "ann")
        await ann.take(ends)
        ann.restore(restored)
        assert ann.leased() == {0: expected}


async def test_what_is_held_on_is_dealt_on_however_far_the_log_has_come(run: KnownRun, bucket: Keys) -> None:
    ann, round_robin = learner(run, "ann", 0), RoundRobin()
    await ann.take({})
    assert train(ann, round_robin, 3) == [(0, 0), (0, 1), (0, 2)]
    reads = bucket.reads
    await ann.look({0: 2}, 1)
    assert bucket.reads - reads == 2  # of the newest claim, and after it: where nothing has changed
    assert train(ann, round_robin, 2) == [(0, 3), (0, 4)]
    assert ann.trained() == [(0, 0, 5)]
    assert ann.positions() == [(0, 5)]


async def test_who_finds_its_share_taken_over_takes_another_and_trains_meanwhile(run: KnownRun, bucket: Keys) -> None:
    ann, round_robin = learner(run, "ann", 0), RoundRobin()
    await ann.take({})
    train(ann, round_robin, 3)
    bucket.claim("bob", ClaimedShare(0, True, 3, 0, bucket.revision), ClaimedShare(1, True, 0, 0, 0))
    assert train(ann, round_robin, 1) == [(0, 3)]
    await ann.look({}, 1)
    assert train(ann, round_robin, 2) == [(2, 0), (2, 1)]
    assert await table(run) == [("bob", 3), ("bob", 0), ("ann", 0)]


async def test_a_share_that_comes_back_goes_on_behind_its_last_holder(run: KnownRun, bucket: Keys) -> None:
    ann, round_robin = learner(run, "ann", 0), RoundRobin()
    await ann.take({})
    train(ann, round_robin, 3)
    bucket.claim("bob", ClaimedShare(0, False, 50, 0, bucket.revision))  # bob was here since the last look
    await ann.look({0: 60}, 1)
    assert train(ann, round_robin, 2) == [(0, 60), (0, 61)]


async def test_a_share_moves_to_one_that_has_none_without_a_batch_repeated_or_left_out(run: KnownRun, bucket: Keys) -> None:
    bucket.claim("bob", ClaimedShare(0, True, 0, 0, 0), ClaimedShare(1, True, 0, 0, 0))
    bob, ann, round_robin, other = learner(run, "bob"), learner(run, "ann"), RoundRobin(), RoundRobin()
    await bob.take({})
    await ann.take({})
    done = train(bob, round_robin, 12) + train(ann, other, 1)
    assert [share for share, _ in done] == [0] * 8 + [1] * 4 + [2]
    in_flight = [round_robin.next(bob.leased()) for _ in range(2)]  # dealt, and not booked yet
    assert in_flight == [(1, 4), (1, 5)]
    await bob.look({}, 1)  # lets go of share 1
    dealt = [round_robin.next(bob.leased()) for _ in range(2)]
    assert [share for share, _ in dealt] == [0, 0]
    for share, batch in in_flight:
        bob.book(share, batch, 16)
    await bob.look({}, 2)
    assert (await table(run))[1] == ("bob", 0)  # not before all that was dealt is booked
    for share, batch in dealt:
        bob.book(share, batch, 16)
    await bob.look({}, 3)
    assert await table(run) == [("bob", 0), (None, 6), ("ann", 0)]
    await ann.look({}, 1)
    assert sorted(ann.leased()) == [1, 2]
    await ann.look({}, 2)  # lets go of its further lap
    done = train(ann, other, 3)
    assert done == [(1, 6), (1, 7), (1, 8)]
    await ann.look({}, 3)
    assert await table(run) == [("bob", 0), ("ann", 6), (None, 1)]
    assert ann.leased() == {1: 9}


async def test_who_leaves_frees_all_with_its_positions(run: KnownRun, bucket: Keys) -> None:
    bucket.claim("ann", ClaimedShare(0, True, 0, 0, 0), ClaimedShare(1, True, 7, 0, 0))
    ann, round_robin = learner(run, "ann", incarnation=2), RoundRobin()
    await ann.take({1: 9})
    assert train(ann, round_robin, 10)[-2:] == [(1, 9), (1, 10)]
    await ann.leave()
    assert await table(run) == [(None, 8), (None, 11)]


async def test_an_older_process_leaves_the_claim_of_a_younger_one_of_its_name(run: KnownRun) -> None:
    old, young = learner(run, "ann"), learner(run, "ann", incarnation=2)
    await old.take({})
    await young.take({})
    await old.look({}, 1)
    await old.leave()
    assert await table(run) == [("ann", 0), (None, 0)]


async def test_the_share_of_a_silent_learner_is_taken_over(run: KnownRun, bucket: Keys) -> None:
    bucket.claim("bob", ClaimedShare(1, True, 0, 0, 0))
    ann = learner(run, "ann")
    await ann.take({})
    for now_s in range(0, 31, 3):
        assert list(ann.leased()) == [0]
        ann.hear("ann", now_s)
        await ann.look({1: 12}, now_s)
    assert ann.leased() == {0: 0, 1: 12}
    assert await table(run) == [("ann", 0), ("ann", 12)]


@pytest.mark.parametrize(
    "value", [b"no claim", bytes(1 << 20), ShareClaim("ann", 1, [ClaimedShare(1, True, 2**62, 0, 0)]).pack()]
)
async def test_a_claim_that_cannot_be_is_passed_over_and_its_writer_named(run: KnownRun, bucket: Keys, value: bytes) -> None:
    bucket.put_now(key_of("bob"), value)
    bucket.admit("eve")
    bucket.put_now(key_of("eve"), ShareClaim("bob", 1, [ClaimedShare(1, True, 0, 0, 0)]).pack())
    bucket.put_now(key_of("stranger"), ShareClaim("stranger", 1, [ClaimedShare(0, True, 0, 0, 0)]).pack())
    ann = learner(run, "ann", 1)
    await ann.take({1: 30})
    assert await table(run) == [(None, 0), ("ann", 30)]
    assert {sender for sender, _ in ann.refused.counts()} == {"share.bob", "share.eve"}
    bob = learner(run, "bob")  # its own damaged claim is replaced
    await bob.take({})
    assert await table(run) == [("bob", 0), ("ann", 30)]


async def test_a_server_that_lost_claims_is_read_anew(run: KnownRun, bucket: Keys) -> None:
    ann, bob = learner(run, "ann", 0), learner(run, "bob", 1)
    before = dict(bucket.values), bucket.revision
    await ann.take({})
    await bob.take({})
    await ann.look({}, 1)
    bucket.values, bucket.revision = dict(before[0]), before[1]
    bucket.admit("bob")
    await bob.look({}, 2)  # at the revision that ann's had
    await ann.look({}, 2)
    assert (list(ann.leased()), list(bob.leased())) == ([0], [1])
    assert await table(run) == [("ann", 0), ("bob", 0)]


async def test_a_heartbeat_tells_the_newest_ranges_each_whole(run: KnownRun) -> None:
    ann = learner(run, "ann")
    for share in range(HEARTBEAT_RANGES + 4):
        for batch in range(3):
            ann.book(share, batch, 16)
    ann.book(2, 3, 16)
    expected = [(2, 0, 4)] + [(share, 0, 3) for share in range(5, HEARTBEAT_RANGES + 4)]
    assert ann.trained() == expected
    ann.book(2, 9, 16)  # leased again, further on
    assert ann.trained()[0] == (2, 9, 1)
