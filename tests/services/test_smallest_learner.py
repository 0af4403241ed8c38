"""A learner that was written from ``docs/protocol.md`` alone takes part in a run of our services, and is merged."""

from __future__ import annotations

import asyncio

import numpy as np
from tests.protocol.smallest_learner import SmallestLearner, Tensors
from tests.services.cluster import DEADLINE_S, Cluster, check_accounts, small
from tests.services.conftest import Launch
from tests.services.toy import SAMPLES, STEP_S, Regression

from diloco.log.stream import pass_over

NAME = "smallest"


def learner(cluster: Cluster) -> SmallestLearner:
    """A smallest learner of the toys' task."""
    task = Regression(cluster.settings)

    def step(tensors: Tensors, share: int, batch: int) -> float:
        task.tensors = tensors
        return task.step(share, batch)

    return SmallestLearner(cluster.url, cluster.name, NAME, 2, step, SAMPLES, STEP_S)


async def is_merged(cluster: Cluster) -> bool:
    """Whether each fragment's log has merged an offer of it."""
    store, fragments = await cluster.store()
    for fragment in fragments.fragments:
        stop, learners = await store.reader.end_sequence(fragment.index), set[str]()
        if stop:
            async for head in store.entries.heads(pass_over, stop_sequence=stop, fragment=fragment.index):
                learners.update(member.learner for member in head.record.members)
        if NAME not in learners:
            return False
    return True


async def test_it_is_merged_and_its_accounts_add_up_over_a_restart(launch: Launch) -> None:
    cluster = launch(small(tokens=3 * 160 * SAMPLES))
    for share in range(2):
        cluster.toy(share)
    await cluster.begin()
    first = asyncio.ensure_future(learner(cluster).train())
    async with asyncio.timeout(DEADLINE_S):
        while not await is_merged(cluster):
            cluster.check_alive()
            await asyncio.sleep(0.05)
    first.cancel()  # it dies without a word, and leaves no checkpoint
    await asyncio.wait([first])
    second = learner(cluster)

    await second.train()

    await cluster.ended()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    for log, fragment in zip(folded, second.fragments, strict=True):
        np.testing.assert_array_equal(fragment.base, log.theta, strict=True)
        merged = [member for record in log.versions for member in record.members if member.learner == NAME]
        assert len({member.incarnation for member in merged}) == 2
        assert log.passed_over == 0
    assert not cluster.events("message_refused")
