"""An evening and a morning (`docs/teams.md`): services end by themselves when they are asked to, whatever servers do."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import Any

import msgspec
import pytest
from tests.made.fixtures import Regions
from tests.pace import DEADLINE_S, scaled_s
from tests.services.apart import Region, apart
from tests.services.cluster import Service, some_versions

from diloco.wire.control import Heartbeat

SYNCER_GRACE_S, LEARNER_GRACE_S = 20.0, 40.0  # of deploy/datacenter/compose.yml, deploy/systemd and deploy/kubernetes
LASTS: dict[str, Any] = {"tokens": 10**9}


def of(run: Region, kind: str) -> list[Service]:
    return [service for service in run.services if service.name.startswith(kind)]


async def end(services: list[Service], within_s: float) -> None:
    """Ask services to end; all do by themselves, in order, in time."""
    began_s = time.monotonic()
    for service in services:
        service.process.terminate()
    for service in services:
        assert await asyncio.to_thread(service.process.wait, DEADLINE_S) == 0, service.said
    assert time.monotonic() - began_s < scaled_s(within_s)


async def begin(run: Region, leave_s: float = 2.0) -> None:
    """Start everything but servers, learners as processes, and wait until all learners are there."""
    run.services.clear()
    run.coordinator()
    run.syncers()
    for share in range(3):
        run.toy_process(share, leave_s=leave_s, **run.place(share))
    await run.link()
    await run.until(lambda: len(run.heartbeats) == 3, "all learners are there")
    await some_versions(run)


async def test_learners_then_syncers_then_servers_end_with_all_work_merged_and_go_on_in_the_morning(regions: Regions) -> None:
    run = await regions(apart(**LASTS))
    await begin(run, leave_s=DEADLINE_S)
    await end(of(run, "toy"), 2 * DEADLINE_S)
    held: dict[str, Heartbeat] = {}
    for service in of(run, "toy"):
        said = json.loads((run.directory / f"{service.name}.json").read_text())
        last = held[service.name] = msgspec.convert(said["heartbeat"], Heartbeat)
        assert last.state == "left"
        assert set(last.fragment_tokens) == {0}, "its last work is merged"
    await end(of(run, "syncer"), SYNCER_GRACE_S)
    left = {service.name for service in of(run, "syncer") if run.events("left", service.name)}
    assert left == {service.name for service in of(run, "syncer")}
    await end(of(run, "coordinator"), SYNCER_GRACE_S)
    run.embedded.stop()

    for name in run.embedded.servers:
        run.embedded.start(name)
    run.heartbeats.clear()
    await begin(run)
    read = await run.read("us", closed=False)
    for name, last in held.items():
        assert run.heartbeats[name][-1].step > last.step
        for log, lost_tokens in zip(read, last.lost_tokens, strict=True):
            merged = sum(m.tokens for record in log.versions for m in record.members if m.learner == name)
            merged += log.before.get(name, 0)  # the log may begin at a keyframe by now
            assert merged >= last.tokens - lost_tokens


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["gone", "silent"])
async def test_where_servers_went_first_all_end_by_themselves_all_the_same(regions: Regions, number: signal.Signals) -> None:
    run = await regions(apart(**LASTS))
    await begin(run)
    servers = list(run.embedded.servers.values())
    for server in servers:
        server.send_signal(number)
    try:
        await end(of(run, "syncer") + of(run, "coordinator"), SYNCER_GRACE_S)
    finally:
        for server in servers:
            server.send_signal(signal.SIGCONT)
