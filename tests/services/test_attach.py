"""``diloco attach``: looking at a run whose services were not started by ``diloco up``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import small, some_versions

import diloco
from diloco.errors import RunError
from diloco.service import rundir
from diloco_ops import verify
from diloco_ops.attach import attach
from diloco_ops.broker.server import Server


@pytest.mark.promise("a run that was started elsewhere is attached to and verified")
async def test_a_run_that_others_started_is_verified_with_the_tapes_of_all_places(launch: Launch, tmp_path: Path) -> None:
    cluster = launch(small(tokens=10**9))
    await cluster.begin()
    await some_versions(cluster)
    cluster.gate.close()
    path = tmp_path / "attached"
    await asyncio.to_thread(attach, path, cluster.name, cluster.url)
    assert rundir.load(path).settings == cluster.settings

    (path / "us").symlink_to(cluster.directory)  # where its services keep their files
    (path / "eu").mkdir()
    verdict = await verify.check(path)
    assert verdict.holds
    assert verdict.live
    states = {check.name: check.state for check in verdict.checks}
    assert (states["log"], states["tapes"]) == ("holds", "holds")


async def test_a_run_elsewhere_is_opened_by_its_address(launch: Launch) -> None:
    cluster = launch(small(tokens=10**9))
    with pytest.raises(RunError, match=f"run '{cluster.name}': not at nats://"):
        await asyncio.to_thread(diloco.open, cluster.url, run=cluster.name)
    await cluster.begin()
    await some_versions(cluster)
    async with asyncio.timeout(DEADLINE_S):  # until its coordinator has heard what the learners say of their steps
        while sum(bool(one.get("loss")) for one in (await cluster.status()).get("learners", {}).values()) < 3:
            await asyncio.sleep(0.1)
    run = await asyncio.to_thread(diloco.open, cluster.url, run=cluster.name)
    status = await asyncio.to_thread(run.status)
    assert {"toy-0", "toy-1"} <= set(status["learners"])
    assert {row["owner"] for row in await asyncio.to_thread(run.metrics)} >= {"run", "toy-0", "toy-1"}
    versions = await asyncio.to_thread(run.versions)
    assert [one["fragment"] for one in versions] == list(range(cluster.settings.fragments.count))
    assert all(one["version"] > 0 and not one["closed"] for one in versions)
    first, last = await asyncio.to_thread(run.params, 0), await asyncio.to_thread(run.params)
    assert first.keys() == last.keys()
    assert any(np.any(first[path] != last[path]) for path in first)
    cluster.gate.close()


async def test_what_cannot_be_attached_to_is_refused_and_nothing_is_written(
    launch: Launch, nats_server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "attached"
    with pytest.raises(RunError, match=r"run 'nobodys': not at nats://127\.0\.0\.1"):
        await asyncio.to_thread(attach, path, "nobodys", nats_server.url)
    cluster = launch(small(shards=2, regions__names=["us", "eu"]))
    await cluster.create()
    with pytest.raises(RunError, match="has the regions us, eu: give the server of one with --bulk"):
        await asyncio.to_thread(attach, path, cluster.name, cluster.url)
    assert not path.exists()
    path.mkdir()
    (path / "report.json").write_text("{}")
    with pytest.raises(RunError, match="holds a finished run"):
        await asyncio.to_thread(attach, path, cluster.name, cluster.url)
