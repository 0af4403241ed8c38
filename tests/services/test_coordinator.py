"""Coordinators that die, freeze, come back, and stand by, over a real server, while a run goes on."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

from tests.made.fixtures import Launch
from tests.services.cluster import Cluster, Service, small

from diloco.errors import BrokerError

STEPS = 400  # a toy takes 20 ms for one: eight seconds and more


def coordinator(cluster: Cluster, name: str) -> Service:
    return cluster.start(name, "diloco_coordinator", settings=cluster.settings.model_dump())


def led(cluster: Cluster, name: str) -> int:
    """How many times a coordinator began to lead."""
    return len(cluster.events("leading", name))


async def answers_within_s(cluster: Cluster, training: bool = True) -> float:
    """How long it takes until somebody answers for the status."""
    link, began_s = await cluster.link(), time.monotonic()
    while time.monotonic() - began_s < 30:
        answer = await link.request(cluster.subjects.status, b"", 0.3)
        if answer is not None and (not training or json.loads(answer).get("state") == "training"):
            return time.monotonic() - began_s
    raise BrokerError("nobody answers")


async def test_a_standby_takes_over_and_one_that_comes_back_stands_by(launch: Launch) -> None:
    cluster = launch(small(tokens=3 * STEPS * 16, round__steps=24))
    first = coordinator(cluster, "coordinator")
    await cluster.until(lambda: led(cluster, "coordinator") == 1, "the first leads")
    second = coordinator(cluster, "coordinator-1")
    await cluster.begin(coordinator=False)
    with cluster.slowly():
        await cluster.until(lambda: cluster.steps() > 30, "training")
        await answers_within_s(cluster)
        assert led(cluster, "coordinator-1") == 0

        first.kill()
        # 2 s of silence, a compare-and-set, and the log so far
        assert await answers_within_s(cluster) < 15
        assert led(cluster, "coordinator-1") == 1

        third = coordinator(cluster, "coordinator")
        await cluster.until(lambda: len(cluster.events("run_ready", "coordinator")) == 2, "the first is back")
        second.process.send_signal(signal.SIGSTOP)
        await cluster.until(lambda: led(cluster, "coordinator") == 2, "the first leads again")
        second.process.send_signal(signal.SIGCONT)
        await cluster.until(lambda: bool(cluster.events("stepped_down", "coordinator-1")), "the second steps down")
        assert await answers_within_s(cluster, training=False) < 15

    cluster.hurry()
    await cluster.ended()
    assert (second.process.returncode, third.process.returncode) == (0, 0)
    assert led(cluster, "coordinator-1") == 1
    # anyone who led when: each version is in the series once
    series = json.loads((cluster.directory / "series.json").read_text())
    drawn = sorted((merge["fragment"], merge["version"]) for merge in series["merges"])
    folded = await cluster.folded()
    assert drawn == [(log.index, record.version) for log in folded for record in log.versions]
    heartbeats = await cluster.finished_heartbeats()
    assert {name: learner["step"] for name, learner in series["learners"].items()} == {n: p.step for n, p in heartbeats.items()}


async def test_training_goes_on_without_a_coordinator_and_the_next_one_finds_the_run_as_it_is(launch: Launch) -> None:
    cluster = launch(small(tokens=3 * STEPS * 16))
    await cluster.begin()
    await cluster.until(lambda: cluster.steps() > 30, "training")
    [only] = [service for service in cluster.services if service.name == "coordinator"]
    only.kill()
    steps, rounds = cluster.steps(), sum(heartbeat.versions for heartbeat in cluster.shard_heartbeats.values())
    await cluster.until(
        lambda: cluster.steps() > steps + 100 and sum(p.versions for p in cluster.shard_heartbeats.values()) > rounds + 10,
        "steps and versions without a coordinator",
    )
    # one of the same name need not wait for the silence of the one that it follows
    with cluster.slowly():
        cluster.coordinator()
        await cluster.until(lambda: led(cluster, "coordinator") == 2, "it leads", 15)
        status: dict[str, Any] = {}
        while (
            len(status.get("learners", ())) < 3 or status["versions"] <= rounds
        ):  # it hears them one by one, and reads the log
            cluster.check_alive()
            status = await cluster.status()
    assert sorted(status["learners"]) == ["toy-0", "toy-1", "toy-2"]
    cluster.hurry()
    await cluster.ended()
