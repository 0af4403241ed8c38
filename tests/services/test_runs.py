"""``diloco runs``: what servers hold of runs, and removing it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import nats
import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import small, some_versions

from diloco.errors import RunError
from diloco_ops.broker.server import Server
from diloco_ops.reading import runs

pytestmark = pytest.mark.usefixtures("patient_commands")


async def test_a_run_is_listed_shown_and_removed_once_nobody_is_heard(
    launch: Launch, nats_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    url = nats_server.url
    cluster = launch(small(tokens=10**9, round__steps=12, log__archive=True))
    await cluster.begin()
    await some_versions(cluster, 1)

    seen: dict[str, Any] = {"members": []}
    while not {"coordinator", "syncer-0", "syncer-1", "toy-0", "toy-1", "toy-2"} <= set(seen["members"]):
        cluster.check_alive()
        await asyncio.to_thread(runs.list_, url, json_=True)
        [seen] = [run for run in json.loads(capsys.readouterr().out) if run["run"] == cluster.name]
    assert seen["state"] == "going on"
    streams = [f"DILOCO_{cluster.name}_{kind}" for kind in ("ARCHIVE", "LOG", "OFFERS")] + [f"KV_DILOCO_{cluster.name}"]
    assert [part["stream"] for part in seen["streams"]] == streams
    assert seen["created_s"] <= seen["last_s"]
    with pytest.raises(RunError, match=r"is live: .*toy-0.* heard; stop it first, or give --force"):
        await asyncio.to_thread(runs.remove, cluster.name, url)

    other = launch(small())
    await other.create()
    for toy in cluster.toys:
        await asyncio.to_thread(toy.stop)
    for service in cluster.services:
        service.kill()
    capsys.readouterr()
    shown = ""
    while "members heard: none" not in shown:  # the server may pass on what was sent before
        await asyncio.to_thread(runs.show, cluster.name, url)
        shown = capsys.readouterr().out
    assert f"run {cluster.name}: stopped after" in shown
    await asyncio.to_thread(runs.remove, cluster.name, url)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said] == streams  # the bucket last
    with pytest.raises(RunError, match="not found at"):
        await asyncio.to_thread(runs.remove, cluster.name, url)
    await asyncio.to_thread(runs.list_, url)
    left = capsys.readouterr().out
    assert cluster.name not in left
    assert f"{other.name}" in left  # untouched
    assert "not begun" in left


async def test_what_is_left_of_a_run_without_its_bucket_can_be_seen_and_removed(
    launch: Launch, nats_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = launch(small())
    await cluster.create()
    link = await nats.connect(nats_server.url, connect_timeout=DEADLINE_S)
    await link.jetstream(timeout=DEADLINE_S).delete_stream(f"KV_DILOCO_{cluster.name}")
    await link.close()
    await asyncio.to_thread(runs.show, cluster.name, nats_server.url, json_=True)
    assert json.loads(capsys.readouterr().out)["state"] == "partial: it has no bucket"
    await asyncio.to_thread(runs.remove, cluster.name, nats_server.url)
    with pytest.raises(RunError, match="not found at"):
        await asyncio.to_thread(runs.show, cluster.name, nats_server.url)


async def test_of_a_run_with_regions_every_server_is_to_be_named(launch: Launch, nats_server: Server) -> None:
    cluster = launch(small(shards=2, regions__names=["us", "eu"]))
    await cluster.create()
    with pytest.raises(RunError, match="has the regions us, eu: give the server of each with --bulk"):
        await asyncio.to_thread(runs.remove, cluster.name, nats_server.url)
    await asyncio.to_thread(runs.remove, cluster.name, nats_server.url, [nats_server.url])
