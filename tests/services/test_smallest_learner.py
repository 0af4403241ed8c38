"""A learner that was written from ``docs/protocol.md`` alone takes part in a run of our services, and is merged."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.protocol.smallest_learner import SmallestLearner, Tensors
from tests.services.cluster import Cluster, check_accounts, small
from tests.services.toy import SAMPLES, SLOW_STEP_S, Regression

from diloco.log.stream import pass_over
from diloco.process.observe import get_logger
from diloco.process.retry import until_available

NAME = "smallest"


def learner(cluster: Cluster) -> SmallestLearner:
    """A smallest learner of the toys' task."""
    task = Regression(cluster.settings)

    def step(tensors: Tensors, share: int, batch: int) -> float:
        task.tensors = tensors
        return task.step(share, batch)

    return SmallestLearner(cluster.url, cluster.name, NAME, 2, step, SAMPLES, SLOW_STEP_S)


async def merged(cluster: Cluster, lives: int, training: asyncio.Future[None]) -> None:
    """Wait until each fragment's log has merged offers of so many processes of it, while one trains."""
    store, fragments = await cluster.store()

    async def incarnations(fragment: int) -> set[int]:
        stop = await store.reader.end_sequence(fragment)
        heads = store.entries.heads(pass_over, stop_sequence=stop, fragment=fragment)
        records = [head.record async for head in heads] if stop else []
        return {member.incarnation for record in records for member in record.members if member.learner == NAME}

    async with asyncio.timeout(DEADLINE_S):
        for fragment in fragments.fragments:
            while len(await until_available(partial(incarnations, fragment.index), get_logger())) < lives:
                assert not training.done(), training
                cluster.check_alive()
                await asyncio.sleep(0.1)


@pytest.mark.promise("a learner written from docs/protocol.md alone takes part")
async def test_it_is_merged_and_its_accounts_add_up_over_a_restart(launch: Launch) -> None:
    cluster = launch(small(tokens=10**9))
    for share in range(2):
        cluster.toy(share)
    await cluster.begin()
    with cluster.slowly():  # few versions, until both have taken part
        first = asyncio.ensure_future(learner(cluster).train())
        await merged(cluster, 1, first)
        first.cancel()  # it dies without a word, and leaves no checkpoint
        await asyncio.wait([first])
        second = learner(cluster)
        training = asyncio.ensure_future(second.train())
        await merged(cluster, 2, training)
    await cluster.use_up()
    await training
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    for log, fragment in zip(folded, second.fragments, strict=True):
        np.testing.assert_array_equal(fragment.base, log.theta, strict=True)
        assert log.passed_over == 0
    assert not cluster.events("message_refused")
