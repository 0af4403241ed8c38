"""``diloco attach``: looking at a run whose services were not started by ``diloco up``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import structlog
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import small, some_versions
from tests.services.toy import SAMPLES, Regression

import diloco
from diloco.errors import RunError
from diloco.service import rundir
from diloco_learner.joining import JoinedRun
from diloco_learner.tensors import Kind, Tensor
from diloco_ops.audit import verify
from diloco_ops.broker.server import Server
from diloco_ops.reading import inspect
from diloco_ops.reading.attach import attach
from diloco_ops.weights.export import export

KINDS: dict[str, Kind] = {"linear/weight": "matrix", "linear/bias": "vector", "table": "embedding"}  # of the toys' tensors


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


async def test_a_run_that_ended_elsewhere_is_said_to_be_over(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = launch(small(tokens=3 * 30 * SAMPLES))
    await cluster.begin()
    await cluster.ended()
    path = tmp_path / "attached"
    await asyncio.to_thread(attach, path, cluster.name, cluster.url)
    folded = await cluster.folded()
    versions = [log.versions[-1].version for log in folded]
    capsys.readouterr()

    await asyncio.to_thread(inspect.status, path, json_=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["state"]) == (cluster.name, "finished")
    assert [fragment["version"] for fragment in shown["fragments"]] == versions
    await asyncio.to_thread(inspect.status, path, json_=False)
    assert f"run {cluster.name} is over: 4 fragments at versions {min(versions)} to" in capsys.readouterr().out

    verdict = await verify.check(path)
    assert verdict.holds
    [report] = [check for check in verdict.checks if check.name == "report"]
    assert report.found == "there is none here: the run is over, and its report is in its coordinator's state_dir"

    await asyncio.to_thread(export, [str(path), str(tmp_path / "weights.safetensors")])
    assert f"run {cluster.name} (over)" in capsys.readouterr().out

    joined = diloco.join(
        cluster.url, run=cluster.name, name="late", params=dict(Regression(cluster.settings).tensors), tokens=SAMPLES,
        within_s=DEADLINE_S, tensor=lambda path, shape: Tensor(kind=KINDS[path]),
    )  # fmt: skip
    with structlog.testing.capture_logs() as events:
        await asyncio.to_thread(_take_part, joined)
    assert [event["event"] for event in events].count("run_is_over") == 1


def _take_part(joined: JoinedRun) -> None:
    with joined as run:
        assert run.over
        assert list(run.batches(lambda share, shares, seed, start: iter(()))) == []


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
