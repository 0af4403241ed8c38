"""The page of a run, over a real server: of the leader, of a standby, and of the standby when the leader has died."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, Service, small

from diloco.control.history import unpack
from diloco.errors import FenceError
from diloco_coordinator.history import RunHistory

COORDINATORS = ("coordinator", "coordinator-1")


def coordinator(cluster: Cluster, name: str) -> Service:
    """A coordinator with a folder of its own, as on a machine of its own; only its log is where all others are."""
    own = cluster.directory / name
    own.mkdir()
    (cluster.directory / "logs").mkdir(exist_ok=True)
    (own / "logs").symlink_to(cluster.directory / "logs")
    place: dict[str, Any] = {"page_address": "127.0.0.1:0", "state_dir": str(own), "report_follows": True}
    return cluster.start(name, "diloco_coordinator", settings=cluster.settings.model_dump(), **place)


async def page(cluster: Cluster, name: str) -> str:
    """The page as a coordinator serves it."""
    await cluster.until(lambda: bool(cluster.events("page_served", name)), f"{name} serves the page")
    url = f"http://127.0.0.1:{cluster.events('page_served', name)[-1]['port']}/"

    def get() -> str:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


async def shows(cluster: Cluster, name: str, *texts: str) -> str:
    """Wait until a coordinator's page has all of these texts; they are drawn again within seconds."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await page(cluster, name)
            if all(text in found for text in texts):
                return found
            cluster.check_alive()
            await asyncio.sleep(0.1)


async def who_leads(cluster: Cluster) -> tuple[str, str]:
    """Wait until both pages show the run, and agree on who leads it: its name, and that of the one that stands by.

    Where processes stall, one coordinator takes the other's place.
    """
    both = ("toy-2", "syncer-0", "data-chart", "training")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            pages = {name: await page(cluster, name) for name in COORDINATORS}
            waiting = [name for name, found in pages.items() if "stands by" in found]
            [leader, *more] = [name for name in COORDINATORS if name not in waiting] or [""]
            if leader and not more and all(text in found for found in pages.values() for text in (*both, f"{leader} leads")):
                return leader, waiting[0]
            cluster.check_alive()
            await asyncio.sleep(0.1)


async def learners_points(own: RunHistory) -> tuple[int, dict[str, list[Any]]]:
    """The term of the stored history, and its points by learner."""
    stored = await own.read()
    if stored is None:
        return 0, {}
    return stored.term, {name: learner["points"] for name, learner in stored.curves["learners"].items()}


@pytest.mark.promise("the live page goes on when the coordinator dies")
async def test_a_standbys_page_shows_the_run_and_goes_on_when_the_leader_has_died(launch: Launch) -> None:
    cluster = launch(small(tokens=10**9, round__steps=24))
    services = {COORDINATORS[0]: coordinator(cluster, COORDINATORS[0])}
    await cluster.until(lambda: bool(cluster.events("leading", COORDINATORS[0])), "the first leads")
    services[COORDINATORS[1]] = coordinator(cluster, COORDINATORS[1])
    await cluster.begin(coordinator=False)
    with cluster.slowly():
        await cluster.until(lambda: cluster.steps() > 60, "training")
        registry = await (await cluster.link()).bucket(cluster.subjects.bucket, create=False)
        own = RunHistory(registry)
        # two machines: nothing but the bucket is shared; the leader stores the history every ten seconds
        async with asyncio.timeout(DEADLINE_S):
            while not (await learners_points(own))[0]:
                await asyncio.sleep(0.1)
        leader, standby = await who_leads(cluster)
        term, points = await learners_points(own)
        assert points
        services[leader].kill()
        taken_over = await shows(cluster, standby, f"{standby} leads", f"{leader} leads", "toy-2", "data-chart")
        assert "stands by" not in taken_over

        # what the first one saw is still known, from the very beginning
        late = RunHistory(registry)
        async with asyncio.timeout(DEADLINE_S):
            while (await learners_points(late))[0] <= term:
                await asyncio.sleep(0.1)
        _, found = await learners_points(late)
        for name, known in points.items():
            assert found[name][: len(known)] == known
        # a leader that was frozen, and goes on with what it knew
        with pytest.raises(FenceError):
            await own.write(b"old", term)
        value = await registry.get("history")
        assert value is not None
        assert unpack(value[0]).term > term
    await cluster.use_up()
    series = json.loads((cluster.directory / standby / "series.json").read_text())
    ended = (cluster.directory / standby / "report.html").read_text()
    assert "data-chart" in ended
    assert "toy-2" in ended
    assert "Steps blocked" in ended  # the figures of a run that is over
    assert "Preliminary, as of 20" in ended  # as where diloco up goes on to write the final report
    assert {merge["fragment"] for merge in series["merges"]} == set(range(len(await cluster.folded())))
