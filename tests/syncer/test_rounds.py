"""The loop over rounds: opened, announced, merged and closed, on a real log; offers are handed to the rounds by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.made.heartbeats import learner_heartbeat
from tests.made.syncer_parts import SIZE, Begun, begin, change, offer
from tests.pace import DEADLINE_S, scaled_s

from diloco.control.changes import ChangesFollower
from diloco.core.run.changes import Rollback
from diloco.core.syncer.bandwidth import Bandwidth
from diloco.nats.transport import NatsTransport
from diloco.process.tasks import end
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Announcement
from diloco.wire.quarantines import unpack_outliers
from diloco_syncer.context import clock_s
from diloco_syncer.links import LinkWatch
from diloco_syncer.offers.quarantine import OutlierRecord
from diloco_syncer.owning.governor import Governor
from diloco_syncer.owning.owner import FragmentOwner
from diloco_syncer.rounds import RoundLoop, RoundNews

pytestmark = pytest.mark.services

DEAD_S = scaled_s(2.0)


@dataclass
class Owned:
    """A governor that owns what the test gives it, and notes what it loses."""

    owned: dict[int, FragmentOwner]
    over: bool = False
    ending: bool = False  # no log is closed
    lost: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)

    async def lose(self, owner: FragmentOwner) -> None:
        del self.owned[owner.index]
        self.lost.append(owner.index)

    async def take_again(self, owner: FragmentOwner, group: asyncio.TaskGroup) -> None:
        await self.lose(owner)
        self.again.append(owner.index)


@dataclass
class Pace:
    """Links with room for everything."""

    bandwidth: Bandwidth


@dataclass
class Running:
    """A loop over one owner's rounds."""

    begun: Begun
    owner: FragmentOwner
    governor: Owned
    outliers: OutlierRecord
    news: RoundNews
    announced: asyncio.Queue[Announcement] = field(default_factory=asyncio.Queue)

    def hear(self, step: int, *learners: str, **changes: Any) -> None:
        """Learners of the newest version have taken so many steps."""
        for learner in learners:
            values = {"tokens": 10 * step, "step_s": 0.1} | changes
            self.begun.context.roster.hear(learner_heartbeat(learner, step, self.owner.chain.version, 0, **values), clock_s())
        self.news.tell()

    async def until(self, *, version: int) -> None:
        while self.owner.chain.version < version:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(link: NatsTransport, **overrides: Any) -> AsyncIterator[Running]:
    begun = await begin(link, **overrides)
    owner, news = await begun.taken_over(), RoundNews()
    governor = Owned({0: owner})
    context = begun.context

    def changed() -> None:
        context.roster.change(context.run.in_force, context.run.now.excluded, context.run.now.on_trial)
        owner.round.drop_unfit()
        news.tell()

    follower = ChangesFollower(link, context.run, context.log, changed)
    outliers = OutlierRecord(context, follower, 1, lambda: governor.owned)
    links = cast(LinkWatch, Pace(Bandwidth(context.run.created, [])))
    loop = RoundLoop(context, cast(Governor, governor), links, outliers, news)
    made = Running(begun, owner, governor, outliers, news)

    async def heard(message: Heard) -> None:
        announcement, _, _ = framing.unpack(message.data, Announcement, context.run.identity)
        made.announced.put_nowait(announcement)

    await link.subscribe(context.store.subjects.round(0), heard)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        task, stating = group.create_task(loop.run(group)), group.create_task(outliers.work())
        yield made
        governor.over = True
        news.tell()
        await end(task, stating)


async def test_a_round_opens_is_announced_until_its_offers_are_in_and_becomes_a_version(link: NatsTransport) -> None:
    async with running(link) as made:
        made.hear(4, "ann", "bob")
        for _ in range(2):  # repeated: the first may not have been heard
            announcement = await made.announced.get()
            assert (announcement.version, announcement.epoch, announcement.closing) == (1, 1, False)
        for learner in ("ann", "bob"):
            assert made.owner.round.hold(offer(made.owner, learner, 1.0)) is None
        made.news.tell()
        await made.until(version=1)
    counts = made.begun.context.counts
    assert (counts.rounds, counts.versions, counts.merged_members) == (1, 1, 2)


async def test_an_order_to_go_back_comes_before_rounds(link: NatsTransport) -> None:
    async with running(link) as made:
        made.hear(4, "ann")
        await made.announced.get()
        made.owner.round.hold(offer(made.owner, "ann", 1.0))
        made.news.tell()
        await made.until(version=1)
        run = made.begun.context.run
        change(run, Rollback(0, [0]))
        made.news.tell()
        await made.until(version=2)
    assert not made.owner.replica.theta.any()


async def test_a_fragment_that_another_process_has_appended_to_is_lost(link: NatsTransport) -> None:
    async with running(link) as made:
        made.hear(4, "ann")
        await made.announced.get()
        await made.begun.taken_over(context=made.begun.another("syncer-1"))
        with capture_logs() as logs:
            made.owner.round.hold(offer(made.owner, "ann", 1.0))
            made.news.tell()
            while not made.governor.lost:
                await asyncio.sleep(0.005)
    assert "version_fenced" in [entry["event"] for entry in logs]
    assert not made.owner.busy


async def test_offers_whose_sum_overflows_are_named_and_the_version_is_made_without_them(link: NatsTransport) -> None:
    learners = ("ann", "bob", "cat")
    async with running(link, learners=3, **{"round.quorum": "all"}) as made:
        made.hear(4, *learners)
        await made.announced.get()
        with capture_logs() as logs:
            for learner, value in zip(learners, (3e38, 1.0, 3e38), strict=True):
                made.owner.round.hold(offer(made.owner, learner, value))
            made.news.tell()
            await made.until(version=1)  # though the quorum is all: these have answered
    assert made.governor.again == []
    [told] = [entry for entry in logs if entry["event"] == "merge_not_finite"]
    assert told["learners"] == ["ann", "cat"]
    assert made.begun.context.refused.counts() == {(name, "UnmergeableError"): 1 for name in ("ann", "cat")}
    np.testing.assert_array_equal(made.owner.replica.theta, np.full(SIZE, -1.0, np.float32))


async def test_a_merge_that_moves_too_far_is_made_without_the_offer_that_does_it(link: NatsTransport) -> None:
    async with running(link, **{"outer.momentum": 0.5}) as made:
        for version, (mine, liars) in enumerate(((1.0, 1.0), (1.0, 1.0), (1.0, 3e37)), 1):
            for step in (8 * version - 8, 8 * version - 4):  # when the version was applied, and when the round is due
                made.hear(step, "ann", "bob")
            await made.announced.get()
            for learner, value in (("ann", mine), ("bob", liars)):
                made.owner.round.hold(offer(made.owner, learner, value, number=version))
            made.news.tell()
            await made.until(version=version)
    # 1 and 0.5 times 1 before it: the momentum is 1.5 in each of 64 values, of norm 12; 0.5 * 1.5 + 1 after the third version
    np.testing.assert_array_equal(made.owner.replica.momentum, np.full(SIZE, 1.75, np.float32))
    assert made.begun.context.refused.counts() == {("bob", "UnmergeableError"): 1}
    assert made.begun.context.counts.merged_members == 5


async def test_a_fresh_owner_that_would_leave_out_all_offers_waits_until_it_has_heard_of_everybody(link: NatsTransport) -> None:
    async with running(link, **{"outer.momentum": 0.5, "liveness.dead_s": DEAD_S}) as made:
        began_s = clock_s()
        made.hear(4, "ann", "bob")
        await made.announced.get()
        with capture_logs() as logs:
            for learner in ("ann", "bob"):  # both as far as nothing has moved: what everybody does is the usual
                made.owner.round.hold(offer(made.owner, learner, 1e6))
            made.news.tell()
            while not made.owner.chain.version:
                made.hear(4, "ann", "bob")
                await asyncio.sleep(0.1)
        waited_s = clock_s() - began_s
    [told] = [entry for entry in logs if entry["event"] == "merge_put_off"]
    assert told["learners"] == ["ann", "bob"]
    assert 0 < told["wait_s"] <= DEAD_S
    assert made.owner.chain.version == 1
    assert waited_s > told["wait_s"] - 0.1
    # once only these two can come, the larger is left out (of two alike, the last by name), and the other is what all do
    assert made.begun.context.refused.counts() == {("bob", "UnmergeableError"): 1}
    assert made.begun.context.counts.merged_members == 1


async def test_outliers_are_left_out_and_their_learner_is_quarantined_until_its_offers_are_sound(link: NatsTransport) -> None:
    learners = ("ann", "bob", "cat")
    settings = {"learners": 3, "fragments.count": 1, "quarantine.factor": 10.0, "round.quorum": "all"}
    async with running(link, **settings) as made:
        run, owner = made.begun.context.run, made.owner
        made.hear(4, *learners)
        await made.announced.get()
        for learner, value in zip(learners, (1.0, 1.0, 1000.0), strict=True):
            owner.round.hold(offer(owner, learner, value))
        made.news.tell()
        await made.until(version=1)  # though the quorum is all: cat has answered
        while not run.now.outlying.quarantined:
            await asyncio.sleep(0.005)
        assert run.now.excluded == made.begun.context.roster.on_trial == {"cat"}
        assert made.begun.context.refused.counts() == {("cat", "UnmergeableError"): 1}
        assert await run.registry.get("changes") is None
        stored = await run.registry.get("quarantine.syncer-0")
        assert stored is not None
        stated = unpack_outliers(stored[0], "syncer-0")
        assert stated is not None
        assert [(seen.learner, seen.fragment, seen.norm, seen.threshold) for seen in stated.outliers] == [("cat", 0, 8000, 80)]

        for version, value in ((2, 1000.0), (3, 1.0)):  # its offers are judged, and not merged
            for step in (8 * version - 8, 8 * version - 4):
                made.hear(step, "ann", "bob")
            await made.announced.get()
            judged = owner.round.hold(offer(owner, "cat", value, number=version))
            assert judged is not None
            assert judged.text == "cat is quarantined: its offer is judged, and not merged"
            for learner in ("ann", "bob"):
                owner.round.hold(offer(owner, learner, 1.0, number=version))
            made.news.tell()
            await made.until(version=version)
        while run.now.excluded:
            await asyncio.sleep(0.005)
        assert owner.round.hold(offer(owner, "cat", 1.0, number=4)) is None
    assert made.begun.context.counts.merged_members == 6
