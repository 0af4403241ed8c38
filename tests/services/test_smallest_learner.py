"""A learner that was written from ``docs/protocol.md`` alone takes part in a run of our services, and is merged."""

from __future__ import annotations

import asyncio

import numpy as np
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.protocol.smallest_learner import SmallestLearner, Tensors
from tests.services.cluster import Cluster, check_accounts, small
from tests.services.toy import SAMPLES, SLOW_STEP_S, Regression

from diloco.log.stream import pass_over

NAME = "smallest"


def learner(cluster: Cluster) -> SmallestLearner:
    """A smallest learner of the toys' task."""
    task = Regression(cluster.settings)

    def step(tensors: Tensors, share: int, batch: int) -> float:
        task.tensors = tensors
        return task.step(share, batch)

    return SmallestLearner(cluster.url, cluster.name, NAME, 2, step, SAMPLES, SLOW_STEP_S)


async def merged(cluster: Cluster, lives: int) -> None:
    """Wait until each fragment's log has merged offers of so many processes of it."""
    store, fragments = await cluster.store()
    async with asyncio.timeout(DEADLINE_S):
        for fragment in fragments.fragments:
            incarnations = set[int]()
            while len(incarnations) < lives:
                cluster.check_alive()
                await asyncio.sleep(0.1)
                if stop := await store.reader.end_sequence(fragment.index):
                    async for head in store.entries.heads(pass_over, stop_sequence=stop, fragment=fragment.index):
                        incarnations |= {member.incarnation for member in head.record.members if member.learner == NAME}


async def test_it_is_merged_and_its_accounts_add_up_over_a_restart(launch: Launch) -> None:
    cluster = launch(small(tokens=3 * 160 * SAMPLES))
    for share in range(2):
        cluster.toy(share)
    await cluster.begin()
    with cluster.slowly():  # the run lasts until both have taken part
        first = asyncio.ensure_future(learner(cluster).train())
        await merged(cluster, 1)
        first.cancel()  # it dies without a word, and leaves no checkpoint
        await asyncio.wait([first])
        second = learner(cluster)
        training = asyncio.ensure_future(second.train())
        await merged(cluster, 2)
    cluster.hurry()
    await training
    await cluster.ended()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    for log, fragment in zip(folded, second.fragments, strict=True):
        np.testing.assert_array_equal(fragment.base, log.theta, strict=True)
        assert log.passed_over == 0
    assert not cluster.events("message_refused")
