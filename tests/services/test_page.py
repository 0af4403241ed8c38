"""The page of a run, over a real server: of the leader, of a standby, and of the standby when the leader has died."""

from __future__ import annotations

import asyncio
import json
import urllib.request

from tests.made.fixtures import Launch
from tests.services.cluster import Cluster, Service, small

from diloco.control.history import unpack
from diloco.errors import FenceError
from diloco_coordinator.history import History

STEPS = 400


def coordinator(cluster: Cluster, name: str) -> Service:
    """A coordinator with a folder of its own, as on a machine of its own; only its log is where all others are."""
    own = cluster.directory / name
    own.mkdir()
    (cluster.directory / "logs").mkdir(exist_ok=True)
    (own / "logs").symlink_to(cluster.directory / "logs")
    place = {"page_address": "127.0.0.1:0", "state_dir": str(own)}
    return cluster.start(name, "diloco_coordinator", settings=cluster.settings.model_dump(), **place)


async def page(cluster: Cluster, name: str) -> str:
    """The page as a coordinator serves it."""
    await cluster.until(lambda: bool(cluster.events("page_served", name)), f"{name} serves the page")
    url = f"http://127.0.0.1:{cluster.events('page_served', name)[-1]['port']}/"

    def get() -> str:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


async def shows(cluster: Cluster, name: str, *texts: str) -> str:
    """Wait until a coordinator's page has all of these texts; they are drawn again within seconds."""
    found = ""
    for _ in range(400):
        found = await page(cluster, name)
        if all(text in found for text in texts):
            return found
        cluster.check_alive()
        await asyncio.sleep(0.1)
    raise AssertionError(f"{name}: {texts} not in {found}")


async def test_a_standbys_page_shows_the_run_and_goes_on_when_the_leader_has_died(launch: Launch) -> None:
    cluster = launch(small(tokens=3 * STEPS * 16, round__steps=24))
    first = coordinator(cluster, "coordinator")
    await cluster.until(lambda: bool(cluster.events("leading", "coordinator")), "the first leads")
    coordinator(cluster, "coordinator-1")
    await cluster.begin(coordinator=False)
    with cluster.slowly():
        await cluster.until(lambda: cluster.steps() > 60, "training")
        leads = await shows(cluster, "coordinator", "toy-2", "data-chart", "coordinator leads", "syncer-0")
        assert "stands by" not in leads
        # two machines: nothing but the bucket is shared; the leader stores the history every ten seconds
        stands_by = await shows(cluster, "coordinator-1", "stands by", "toy-2", "data-chart", "coordinator leads")
        assert "training" in stands_by

        registry = await (await cluster.link()).bucket(cluster.subjects.bucket, create=False)
        own = History(registry)
        stored = await own.read()
        assert stored is not None
        points = {name: learner["points"] for name, learner in stored.curves["learners"].items()}
        first.kill()
        taken_over = await shows(cluster, "coordinator-1", "coordinator-1 leads", "coordinator leads", "toy-2", "data-chart")
        assert "stands by" not in taken_over

        # what the first one saw is still known, from the very beginning
        async def again() -> History:
            late = History(registry)
            for _ in range(400):
                found = await late.read()
                if found is not None and found.term > stored.term:
                    for name, known in points.items():
                        now = found.curves["learners"][name]["points"]
                        assert now[: len(known)] == known
                    return late
                await asyncio.sleep(0.1)
            raise AssertionError("the second one stores no history")

        await again()
        # a leader that was frozen, and goes on with what it knew
        try:
            await own.write(b"old", stored.term)
        except FenceError:
            pass
        else:
            raise AssertionError("an old leader wrote over its successor's history")
        value = await registry.get("history")
        assert value is not None
        assert unpack(value[0]).term > stored.term
    cluster.hurry()
    await cluster.ended()
    series = json.loads((cluster.directory / "coordinator-1" / "series.json").read_text())
    ended = (cluster.directory / "coordinator-1" / "report.html").read_text()
    assert "data-chart" in ended
    assert "toy-2" in ended
    assert "Steps blocked" in ended  # the figures of a run that is over
    assert {merge["fragment"] for merge in series["merges"]} == set(range(len(await cluster.folded())))
