"""NATS under fire: a server that is away, frozen, slow, full, or has lost writes; and one of three that dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.made.asking import asked
from tests.made.fixtures import Launch, MakeServer
from tests.pace import DEADLINE_S
from tests.services.cluster import (
    Cluster,
    check_accounts,
    check_all_merged,
    check_kept,
    newest_entries,
    small,
    some_versions,
)

from diloco.errors import BrokerError
from diloco.nats import append, streams
from diloco.nats.connection import NatsLink
from diloco.nats.pull import Puller
from diloco.process.observe import get_logger
from diloco.process.retry import until_available
from diloco.process.tasks import end
from diloco_ops.broker.server import Server, cluster

ATTEMPTS = 3  # to start three servers
# an attempt to connect to a frozen server is given up by nats-py without closing its socket, which is collected later
LEFT_OPEN = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@asynccontextmanager
async def away(server: Server) -> AsyncIterator[None]:
    """Killed, and started again later."""
    server.kill()
    yield
    await asyncio.to_thread(server.start)


@asynccontextmanager
async def frozen(server: Server) -> AsyncIterator[None]:
    server.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


@asynccontextmanager
async def slow(server: Server) -> AsyncIterator[None]:
    """A tenth of its speed."""

    async def hinder() -> None:
        while True:
            async with frozen(server):
                await asyncio.sleep(0.18)
            await asyncio.sleep(0.02)

    hindering = asyncio.create_task(hinder())
    try:
        yield
    finally:
        await end(hindering)


@pytest.mark.parametrize(
    ("trouble", "seconds"),
    [
        (away, 4.0),
        pytest.param(frozen, 8.0, marks=[LEFT_OPEN, pytest.mark.slow]),
        pytest.param(slow, 3.0, marks=pytest.mark.slow),
        pytest.param(away, 60.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.promise("learners train on while the NATS server is away, and catch up")
async def test_learners_train_on_while_the_server_is_not_there_and_all_catch_up(
    make_server: MakeServer, launch: Launch, trouble: Callable[[Server], AbstractAsyncContextManager[None]], seconds: float
) -> None:
    server = make_server()
    run = launch(small(tokens=10**9), server.url)
    await run.begin()
    await some_versions(run)
    before = await newest_entries(run)

    async with trouble(server):
        steps = own_steps(run)
        await asyncio.sleep(seconds)  # at least
        # one that waits for versions would stop within a round or two
        many = 4 * run.settings.round.steps
        await run.until(lambda: all(after - was > many for was, after in zip(steps, own_steps(run), strict=True)), "steps")

    await some_versions(run)
    await run.use_up()
    await check_kept(run, before)


def own_steps(run: Cluster) -> list[int]:
    """Of the learners in this process, without asking the server."""
    return [toy.member.step for toy in run.toys if toy.member is not None]


@pytest.mark.promise("full storage delays versions and loses nothing")
async def test_a_full_stream_holds_versions_up_until_there_is_room(launch: Launch) -> None:
    run = launch(small(tokens=10**9))
    await run.begin()
    await some_versions(run)
    link = await run.link()
    api, name = link.bulk.jetstream(), run.subjects.log_stream
    info = await asked(partial(api.stream_info, name))
    with run.slowly():
        await asked(partial(api.update_stream, info.config.evolve(max_bytes=info.state.bytes + 1)))
        await run.until(lambda: bool(run.events("storage_full")), "a version does not fit")
        steps = own_steps(run)
        await run.until(lambda: min(np.subtract(own_steps(run), steps)) > 20, "learners train on")
        await asked(partial(api.update_stream, info.config))

    await some_versions(run)
    await run.use_up()

    heartbeats, folded = await run.finished_heartbeats(), await run.folded()
    check_accounts(heartbeats, folded)
    for log in folded:
        assert log.passed_over == 0
        check_all_merged(heartbeats, log)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Server]]:
    for attempt in itertools.count():  # another process may have taken a port
        servers = cluster(tmp_path / f"servers-{attempt}")
        try:
            for server in servers:
                server.start()
            break
        except BrokerError:
            for server in servers:
                server.kill()
            if attempt == ATTEMPTS:
                raise
    yield servers
    for server in servers:
        server.kill()


async def test_of_three_servers_the_leader_is_killed(three: list[Server], launch: Launch) -> None:
    url = ",".join(server.url for server in three)
    settings = small(log__replicas=3, task__context=75_000, fragments__count=3, tokens=10**9)
    run = launch(settings, url)  # a model whose largest fragment travels in parts
    await run.begin()
    await some_versions(run)
    link = await run.link()
    info = await asked(partial(link.bulk.jetstream().stream_info, run.subjects.log_stream))
    assert info.config.num_replicas == 3
    [leader] = [server for server in three if info.cluster.leader == f"server-{server.routes[0]}"]
    before = await newest_entries(run)

    await asyncio.to_thread(leader.kill)

    await some_versions(run)
    await run.use_up()
    await check_kept(run, before)


async def test_a_reader_whose_consumer_was_given_to_a_server_that_has_just_died_has_another_made(three: list[Server]) -> None:
    """For some seconds the others take it for alive: a third of the consumers go there, and they are not answered for."""
    async with contextlib.AsyncExitStack() as opened:
        links = []
        for number in range(2):
            links.append(await NatsLink.open(three[0].url, three[0].url, f"reader-{number}", get_logger(), DEADLINE_S))
            opened.push_async_callback(links[-1].close)
        await until_available(partial(streams.ensure, links[0], "READ", ["read.>"], replicas=3), get_logger())
        storing = partial(append.append, links[0], "read.it", b"x", message_id="1", fence=None, timeout_s=DEADLINE_S)
        await until_available(storing, get_logger())

        await asyncio.to_thread(three[2].kill)

        async def read(link: NatsLink) -> bytes:
            return (await anext(aiter(Puller(link, "READ", ["read.>"], 1)))).data

        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.gather(*[read(link) for link in links for _ in range(6)]) == [b"x"] * 12


async def test_a_server_that_lost_what_it_had_acknowledged_takes_everybody_back(
    make_server: MakeServer, launch: Launch, tmp_path: Path
) -> None:
    server = make_server()
    run = launch(small(tokens=10**9), server.url)
    await run.begin()
    await some_versions(run)
    # as a disk would be after a crash of a machine whose server does not sync every message
    server.send_signal(signal.SIGSTOP)
    older = tmp_path / "older"
    shutil.copytree(server.directory / "jetstream", older)
    server.send_signal(signal.SIGCONT)
    await some_versions(run, more=4)
    lost = max(heartbeats[-1].versions[0] for heartbeats in run.heartbeats.values())
    with run.slowly():  # who is to take them back must not have ended
        server.kill()
        shutil.rmtree(server.directory / "jetstream")
        shutil.move(older, server.directory / "jetstream")
        await asyncio.to_thread(server.start)
        await run.until(lambda: all(run.events("log_rewound", toy.name) for toy in run.toys), "all have gone back")
    await run.until(lambda: min(heard[-1].versions[0] for heard in run.heartbeats.values()) > lost - 4, "it goes on")
    await run.use_up()

    heartbeats, folded = await run.finished_heartbeats(), await run.folded()
    check_accounts(heartbeats, folded)  # what was merged by versions that are gone is lost, and counted
    assert folded[0].versions[-1].version > lost - 4
    for log in folded:
        assert log.passed_over == 0
        assert sum(heartbeat.lost_tokens[log.index] for heartbeat in heartbeats.values()) > 0
        for toy in run.toys:
            np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)
