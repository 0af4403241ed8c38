"""Coordinators that die, freeze, come back, and stand by, over a real server, while a run goes on."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import msgspec
import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, Service, small, some_versions

from diloco.wire import framing
from diloco.wire.control import CoordinatorHeartbeat

TOKENS = 10**9  # the run ends when the test has seen all else


def coordinator(cluster: Cluster, name: str) -> Service:
    return cluster.start(name, "diloco_coordinator", settings=cluster.settings.model_dump())


def led(cluster: Cluster, name: str) -> int:
    """How many times a coordinator began to lead."""
    return len(cluster.events("leading", name))


def leader(cluster: Cluster) -> str:
    """Who began to lead last, by the revisions of the leader's key."""
    terms = {
        values["revision"]: name for name in ("coordinator", "coordinator-1") for values in cluster.events("leading", name)
    }
    return terms[max(terms)] if terms else "none"


def series(cluster: Cluster) -> dict[str, Any]:
    """What the leader has written of the run's course, if it has yet."""
    file = cluster.directory / "series.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


async def training_status(cluster: Cluster) -> dict[str, Any]:
    """Wait until a coordinator answers that the run trains: the answer."""
    async with asyncio.timeout(DEADLINE_S):
        while (status := await cluster.status())["state"] != "training":
            await asyncio.sleep(0.1)
    return status


async def test_a_standby_takes_over_and_one_that_comes_back_stands_by(launch: Launch) -> None:
    cluster = launch(small(tokens=TOKENS, round__steps=24))
    first = coordinator(cluster, "coordinator")
    await cluster.until(lambda: led(cluster, "coordinator") > 0, "the first leads")
    second = coordinator(cluster, "coordinator-1")
    await cluster.begin(coordinator=False)
    await cluster.until(lambda: cluster.steps() > 30, "training")
    await training_status(cluster)

    first.kill()
    await cluster.until(lambda: leader(cluster) == "coordinator-1", "the second leads")
    await training_status(cluster)

    third = coordinator(cluster, "coordinator")
    await cluster.until(lambda: len(cluster.events("run_ready", "coordinator")) == 2, "the first is back")
    second.process.send_signal(signal.SIGSTOP)
    await cluster.until(lambda: leader(cluster) == "coordinator", "the first leads again")
    second.process.send_signal(signal.SIGCONT)
    await cluster.until(lambda: bool(cluster.events("stepped_down", "coordinator-1")), "the second steps down")
    await training_status(cluster)
    # who leads next goes on from it, though no learner may be heard any more
    await cluster.until(lambda: len(series(cluster).get("learners", {})) == 3, "the series has all learners")
    await some_versions(cluster)

    await cluster.use_up()
    assert (second.process.returncode, third.process.returncode) == (0, 0)
    terms = [values["revision"] for values in cluster.events("leading")]
    assert len(terms) == len(set(terms)), "each term has one leader"
    # anyone who led when: each version is in the series once
    drawn = sorted((merge["fragment"], merge["version"]) for merge in series(cluster)["merges"])
    folded = await cluster.folded()
    assert drawn == [(log.index, record.version) for log in folded for record in log.versions]
    heartbeats = await cluster.finished_heartbeats()
    learners = series(cluster)["learners"]
    assert learners.keys() == heartbeats.keys()
    # of a learner that was late at the end, the coordinator may not have heard the last word
    assert all(0 < learners[name]["step"] <= heartbeat.step for name, heartbeat in heartbeats.items())


async def test_a_coordinator_that_is_told_that_the_run_is_over_looks_into_the_logs(launch: Launch) -> None:
    """Whoever has stolen a coordinator's identity can say so, and that it leads."""
    cluster = launch(small(tokens=TOKENS))
    coordinator(cluster, "coordinator")
    await cluster.until(lambda: led(cluster, "coordinator") > 0, "the first leads")
    second = coordinator(cluster, "coordinator-1")
    await cluster.begin(coordinator=False)
    await cluster.until(lambda: cluster.steps() > 30, "training")
    link = await cluster.link()
    lie = CoordinatorHeartbeat("stolen", 1, finished=True, software="0")
    await link.publish(cluster.subjects.coordinator, framing.pack(lie, cluster.run_id))
    registry = await link.bucket(cluster.subjects.bucket, create=False)
    await registry.put("coordinator", msgspec.msgpack.encode(["stolen", bytes(8)]))
    await cluster.until(
        lambda: bool(cluster.events("stepped_down", "coordinator")), "the leader finds another one in its place"
    )
    await cluster.until(lambda: len(cluster.events("leading")) > 1, "one of them leads again")
    assert all(service.process.poll() is None for service in cluster.services)
    await cluster.use_up()
    assert second.process.returncode == 0


@pytest.mark.promise("training goes on without a coordinator")
async def test_training_goes_on_without_a_coordinator_and_the_next_one_finds_the_run_as_it_is(launch: Launch) -> None:
    cluster = launch(small(tokens=TOKENS))
    await cluster.begin()
    await cluster.until(lambda: cluster.steps() > 30, "training")
    [only] = [service for service in cluster.services if service.name == "coordinator"]
    only.kill()
    steps, rounds = cluster.steps(), sum(heartbeat.versions for heartbeat in cluster.shard_heartbeats.values())
    await cluster.until(
        lambda: cluster.steps() > steps + 100 and sum(p.versions for p in cluster.shard_heartbeats.values()) > rounds + 10,
        "steps and versions without a coordinator",
    )
    cluster.coordinator()
    await cluster.until(lambda: led(cluster, "coordinator") > 1, "another one leads")
    status: dict[str, Any] = {}
    async with asyncio.timeout(DEADLINE_S):
        while (
            len(status.get("learners", ())) < 3 or status["versions"] <= rounds
        ):  # it hears them one by one, and reads the log
            status = await training_status(cluster)
    assert sorted(status["learners"]) == ["toy-0", "toy-1", "toy-2"]
    await cluster.use_up()
