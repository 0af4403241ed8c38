"""Versions are made evenly, with real processes: from two cycles after a syncer was killed and came back."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter

import pytest
from tests.made.fixtures import Launch
from tests.services.cluster import Cluster, small, some_versions

FRAGMENTS = H = 12
STEP_S = 0.4
SETTLED, WATCHED = 2 * H, 4 * H  # steps of the reference


async def watch(cluster: Cluster, began_s: list[float]) -> None:
    """Note when the first learner by name, the reference, is heard with each new step."""
    step = 0
    while True:
        heard = cluster.heartbeats.get("toy-0")
        if heard and heard[-1].step > step:
            step = heard[-1].step
            began_s.append(time.time())
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_versions_are_even_two_cycles_after_the_only_syncer_was_killed(launch: Launch) -> None:
    settings = small(shards=1, fragments__count=FRAGMENTS, round__steps=H, tokens=10**9, task__width=24)
    cluster = launch(settings)
    cluster.learners()
    for toy in cluster.toys:
        toy.step_s = STEP_S
    await cluster.begin(coordinator=False)
    began_s: list[float] = []
    watching = asyncio.create_task(watch(cluster, began_s))
    await some_versions(cluster, 2)
    [syncer] = [service for service in cluster.services if service.name == "syncer-0"]
    syncer.kill()
    await asyncio.sleep(1.0)
    cluster.syncer(0)
    await some_versions(cluster, 1)
    first = len(began_s) + SETTLED
    await cluster.until(lambda: len(began_s) > first + WATCHED, "some cycles more")
    watching.cancel()
    await cluster.use_up()
    steps = began_s[first : first + WATCHED + 1]
    made_s = [record.committed_at_s for log in await cluster.folded() for record in log.versions]
    each = Counter(bisect_left(steps, at_s) for at_s in made_s if steps[0] < at_s <= steps[-1])
    counts = [each[step] for step in range(1, WATCHED + 1)]
    assert max(counts) <= 4, counts
    assert "00000" not in "".join(map(str, counts)), counts
