"""A region under identities is away for five minutes: no message of its learners, or of the others, is refused afterwards."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.pace import DEADLINE_S
from tests.services.apart import REGIONS, Region, apart
from tests.services.cluster import some_versions
from tests.services.forking import Nursery
from tests.services.secured import make_keys, members
from tests.services.toy import SAMPLES, SLOW, SLOW_STEP_S

from diloco.core.run.grant_bounds import CLOCKS_S
from diloco.process.observe import get_logger
from diloco.service.rundir import RunDirectory
from diloco_ops.audit import verify
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.reading.run_reader import opened
from diloco_ops.up.embedded import CONTROL, Embedded, server_name
from diloco_ops.wan.config import checked
from diloco_ops.wan.relay import Relay

RUN = "long-cut"
AWAY = "eu"
AWAY_S = 300.0
BESIDE_S = 40.0  # of training besides, before and after
CATCHING_UP_S = 3 * DEADLINE_S  # from the region's return to the run's end: it has minutes of steps left to take


def granted(path: Path, regions: Sequence[str]) -> Folder:
    """Keys of which every learner was granted exactly what it does."""
    servers = {CONTROL: ["control"], **{server_name(region): [region] for region in regions}}
    keys = make_keys(path, RUN, members(len(regions), len(regions), regions), regions=regions, servers=servers)
    for share in range(len(regions)):
        entry = keys.roster.identity(f"toy-{share}")
        assert entry is not None
        keys.grant(entry.model_copy(update={"batch_tokens": SAMPLES, "min_step_s": SLOW_STEP_S}))
    return keys


@asynccontextmanager
async def secured(nursery: Nursery, path: Path, regions: Sequence[str]) -> AsyncIterator[Region]:
    """A run in regions whose servers accept no process without an identity, with learners that are processes."""
    keys = granted(path / "keys", regions)
    settings = apart(
        tokens=round((len(regions) * BESIDE_S + (len(regions) - 1) * AWAY_S) / SLOW_STEP_S) * SAMPLES,
        learners=len(regions),
        shards=len(regions),
        regions__names=list(regions),
        regions__away_s=10.0,
        log__keyframe_factor=10.0,
    )
    embedded = Embedded(path / "servers", regions)
    for name, server in embedded.servers.items():
        embedded.servers[name] = Server(server.directory, server.port, keys=keys.server_folder(name))
    links: dict[str, Any] = dict(embedded.links())
    links["links"] = {name: {"delay_s": 0.005} for name in links["links"]}
    relay = Relay(checked(links, "links"), get_logger())
    async with AsyncExitStack() as made:
        made.callback(embedded.stop)
        for name in embedded.servers:
            embedded.start(name)
        await relay.start()
        made.push_async_callback(relay.close)
        run = Region(nursery, path / RUN, RUN, settings, embedded, relay, {})
        run.identity = str(keys.path / "identities" / "{name}.identity")
        made.push_async_callback(run.close)
        run.start("coordinator", "diloco_coordinator", settings=settings.model_dump(), **run.place(0))
        run.syncers()
        for share in range(len(regions)):
            run.toy_process(share, slow=SLOW, **run.place(share))
        operator = run.identity.format(name="operator")
        us = run.server("us").url
        RunDirectory(run.directory, RUN, run.url, None, settings, nats_bulk_url=us, identity=operator).save()
        yield run


async def cut_links(run: Region) -> None:
    """Its learner trains on, and stores its offers at home; the others' work is merged without it."""
    run.relay.cut(run.lines(AWAY))
    await asyncio.sleep(AWAY_S)
    run.relay.heal(run.lines(AWAY))


async def stop_all(run: Region) -> None:
    """Its server, syncer and learner stand still, as in a machine that sleeps; the other one of two commits nothing alone."""
    services = [service for service in run.services if service.name in ("toy-1", "syncer-1")]

    def send(number: signal.Signals) -> None:
        run.server(AWAY).send_signal(number)
        for service in services:
            service.process.send_signal(number)

    send(signal.SIGSTOP)
    try:
        await asyncio.sleep(AWAY_S)
    finally:
        send(signal.SIGCONT)


async def most_steps(run: Region) -> int:
    """Of any learner in one merge: that are in it, or were lost by then, since versions were made without them."""
    async with opened(run.directory) as seen:
        found = [
            max(member.steps, member.lost_tokens // SAMPLES)
            for fragment in seen.map.fragments
            async for head in seen.log.entries.heads(
                lambda refusal: None, 1, await seen.log.reader.end_sequence(fragment.index), fragment=fragment.index
            )
            for member in head.record.members
        ]
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("regions", "away"), [(REGIONS, cut_links), (("us", AWAY), stop_all)], ids=["cut of three", "stopped of two"]
)
# nats-py lets go of connections, unclosed, on which no greeting came in time
@pytest.mark.filterwarnings("ignore:Exception ignored in.*StreamWriter:pytest.PytestUnraisableExceptionWarning")
async def test_a_region_that_was_away_for_minutes_is_believed(
    nursery: Nursery, tmp_path: Path, regions: Sequence[str], away: Any
) -> None:
    async with secured(nursery, tmp_path, regions) as run:
        await run.link()
        names = {f"toy-{share}" for share in range(len(regions))}
        await run.until(lambda: run.heartbeats.keys() >= names, "learners are heard")
        await some_versions(run, of=sorted(names))
        before = run.heartbeats["toy-1"][-1].step

        await away(run)

        await run.until(
            lambda: all(service.process.poll() == 0 for service in run.services), "the run ends by itself", CATCHING_UP_S
        )
        heartbeats = await run.finished_heartbeats()
        assert heartbeats["toy-1"].step > before
        assert await most_steps(run) > CLOCKS_S / SLOW_STEP_S  # as many as are believed because time has passed
        verdict = await verify.check(run.directory)
        assert verdict.holds, verdict
        held = {check.name for check in verdict.checks if check.state == "holds"}
        assert held >= {"log", "keyframes", "tapes", "offers", "data"}
        assert not run.wronged()
