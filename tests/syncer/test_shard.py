"""The service: it hears, refuses what does not fit, says how it is, and leaves."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from structlog.testing import capture_logs
from tests.made.fixtures import MakeServer
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.made.regional_parts import begun_apart
from tests.made.syncer_parts import Begun, begin
from tests.pace import DEADLINE_S

from diloco.control import creation
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.process.tasks import end
from diloco.settings.service import SyncerSettings
from diloco.wire import framing
from diloco.wire.control import SnapshotMarker
from diloco_syncer.shard import Shard

pytestmark = pytest.mark.services


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(link: NatsTransport) -> AsyncIterator[tuple[Begun, Shard]]:
    begun = await begin(link)
    shard = Shard(link, begun.context.run, begun.context.map, begun.context.settings, get_logger())
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(shard.serve())
        await until(lambda: len(shard.owned) == 2)
        yield begun, shard
        await shard.leave()


async def test_it_says_what_it_owns_and_hands_it_over_as_it_leaves(link: NatsTransport) -> None:
    with capture_logs() as logs:
        async with serving(link) as (_, shard):
            heartbeat = shard.heartbeat()
            assert (heartbeat.state, heartbeat.fragments, heartbeat.closed, heartbeat.open) == ("owner", [0, 1], [], [])
            assert shard.waits_for() is None
    assert (shard.heartbeat().state, shard.heartbeat().fragments) == ("leaving", [])
    assert [entry["event"] for entry in logs][-1] == "left"


def test_a_syncer_that_is_cancelled_closes_its_connections_to_other_regions(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its readers are ended with the event loop, and asyncio finds tasks of theirs that no one waits for."""

    async def work() -> None:
        opened: list[NatsTransport] = []

        async def connect(url: str) -> NatsTransport:
            opened.append(await NatsTransport.open(url, url, "far", get_logger(), DEADLINE_S))
            return opened[-1]

        async with asyncio.timeout(DEADLINE_S), begun_apart(make_server) as apart:
            shards = []
            for own in apart.servers:
                link = await apart.open(own)
                run = await creation.open_run(link, "run", apart.settings)
                others = {region: partial(connect, server.url) for region, server in apart.servers.items() if region != own}
                settings = SyncerSettings(name=f"syncer-{own}", run="run", region=own)
                shards.append(Shard(link, run, apart.map, settings, get_logger(), connect=others))
            serving = [asyncio.ensure_future(shard.serve()) for shard in shards]
            await until(lambda: any(map(asyncio.Future.done, serving)) or sum(len(shard.owned) for shard in shards) == 2)
            await end(*serving)
            assert all(task.cancelled() for task in serving)
            assert [transport.bulk.is_closed for transport in opened] == 6 * [True]

    asyncio.run(work())
    gc.collect()
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio" and each.levelno >= logging.ERROR] == []


async def test_messages_that_do_not_fit_are_counted_by_sender_and_kind(link: NatsTransport) -> None:
    async with serving(link) as (begun, shard):
        subjects, run = begun.context.store.subjects, begun.context.run.identity
        with capture_logs() as logs:
            for subject, message in (
                (subjects.shard("eve"), shard_heartbeat("eve", 1, fragments=[2])),
                (subjects.heartbeat("ann"), learner_heartbeat("ann", 1, 0, 0, tokens=10, step_s=0.1, steps=[1])),
                (subjects.marker, SnapshotMarker(1, [0, 0, 0])),
            ):
                await link.publish(subject, framing.pack(message, run))
            await link.publish(subjects.heartbeat("bob"), b"nothing of ours")
            await until(lambda: shard.refused.total == 4)
    reasons = sorted(entry["reason"] for entry in logs if entry["event"] == "message_refused")
    assert [reason for reason in reasons if "fragment" in reason] == [
        "heartbeat of ann has 2, 1, 2, 2 values, the run has 2 fragments",
        "heartbeat of eve names fragment 2, the run has 2",
        "marker 1 names 3 fragments, not 2",
    ]


async def test_a_snapshot_marker_has_the_residuals_of_its_versions_kept_once(link: NatsTransport) -> None:
    async with serving(link) as (begun, shard):
        store, run = begun.context.store, begun.context.run.identity
        shard.owned[0].copy.keyframe_version = -1  # as if the newest keyframe were of another version
        for _ in range(2):
            await link.publish(store.subjects.marker, framing.pack(SnapshotMarker(1, [0, 7]), run))
        await until(lambda: shard.owned[0].has_keyframe)
        assert len(await store.reader.keyframe_sequences(0)) == 2
        assert len(await store.reader.keyframe_sequences(1)) == 1
