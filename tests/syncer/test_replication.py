"""A region whose log is behind the others' gets what it misses, in such a way that its readers follow."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from structlog.testing import capture_logs
from tests.made.fixtures import MakeServer
from tests.made.regional_parts import Apart, begun_apart, entries_between_notices, make_versions
from tests.pace import DEADLINE_S

from diloco.core.log.quorum import NOTICE_EVERY
from diloco.log.follower import LogFollower
from diloco.log.stream import RefusedEntry
from diloco.nats import streams
from diloco.process.observe import get_logger
from diloco.process.tasks import end

pytestmark = pytest.mark.services


async def lose_log(apart: Apart, region: str) -> None:
    link = await apart.open(region)
    await streams.delete(link, apart.log(link).subjects.log_stream)


@pytest.mark.parametrize("lost", [False, True], ids=["", "its disk is lost"])
@pytest.mark.parametrize("behind", [65, pytest.param(400, marks=pytest.mark.slow)])
async def test_an_owner_whose_own_region_is_far_behind_brings_it_up_so_that_all_readers_follow(
    make_server: MakeServer, behind: int, lost: bool
) -> None:
    async with begun_apart(make_server) as apart, asyncio.TaskGroup() as group:
        absent = await apart.member("eu", group)
        ap = await apart.member("ap", group)
        us = await apart.member("us", group, unreached=["eu"])
        await apart.run.registry.put("owners", b"")  # there have been some
        await absent.regions.close()
        old = await us.take(group)
        await make_versions(old, behind)
        await old.stop()
        if lost:
            await lose_log(apart, "eu")

        eu = await apart.member("eu", group)
        refused: list[RefusedEntry] = []
        follower = LogFollower(eu.context.store, apart.genesis, refused.append, get_logger(), in_place=True)
        await follower.load(0)
        with capture_logs() as logs:
            following = group.create_task(_follow(follower))
            new = await eu.take(group)
            async with asyncio.timeout(DEADLINE_S):
                while follower.copies[0].replica.chain.head != new.chain.head:
                    await asyncio.sleep(0.05)
        await end(following)

        assert (new.chain.version, refused) == (behind, [])
        assert not [line for line in logs if line["event"] == "log_reloaded"]
        assert max(await entries_between_notices(eu.context.store, 0)) <= NOTICE_EVERY
        loaded = await LogFollower(eu.context.store, apart.genesis, refused.append, get_logger(), in_place=True).load(0)
        assert loaded.replica.chain.head == new.chain.head
        await new.stop()
        for member in (us, ap, eu):
            await member.regions.close()


async def _follow(follower: LogFollower) -> None:
    async with contextlib.aclosing(follower.follow([0])) as events:
        async for _ in events:
            pass
