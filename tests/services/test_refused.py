"""A learner whose offers its run refuses hears why, and ends with an error."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, small
from tests.services.secured import make_keys, members, serving
from tests.services.toy import STEP_S, Regression

import diloco
from diloco.errors import RefusedError
from diloco_learner.joining import JoinedRun

RUN = "refused"
LEARNER = "toy-0"


def _numbers(share: int, shares: int, seed: int, start: int) -> Iterator[int]:
    return itertools.count(start)


def _join(cluster: Cluster, tokens: int, identity: Path | None = None) -> JoinedRun:
    run: JoinedRun = diloco.join(
        cluster.url,
        run=cluster.name,
        name=LEARNER,
        params=dict(Regression(cluster.settings).tensors),
        tokens=tokens,
        identity=identity,
        within_s=DEADLINE_S,
        leave_s=0.1,
    )
    return run


def _train(joined: JoinedRun, enough: Callable[[JoinedRun], bool]) -> None:
    """Take steps that move nothing, until the run is over or it is ``enough``."""
    with joined as run:
        for _ in run.batches(_numbers):
            time.sleep(STEP_S)
            run.step(run.params)
            if enough(run):
                return


@asynccontextmanager
async def _granted(launch: Launch, tmp_path: Path, min_step_s: float) -> AsyncIterator[JoinedRun]:
    """A run of one learner, which was granted one step in so many seconds."""
    keys = make_keys(tmp_path / "keys", RUN, members(1, 1))
    entry = keys.roster.identity(LEARNER)
    assert entry is not None
    keys.grant(entry.model_copy(update={"batch_tokens": 4, "min_step_s": min_step_s}))
    with serving(keys, tmp_path / "nats") as server:
        cluster = launch(small(learners=1, tokens=10**9, shards=1), server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        cluster.liars = {LEARNER}
        cluster.coordinator()
        cluster.syncer(0)
        await cluster.link()
        yield _join(cluster, 4, keys.identity_file(LEARNER))


@pytest.mark.promise("a learner whose offers are refused ends with an error and the reason")
async def test_a_loop_that_is_faster_than_its_grant_ends_with_the_reason(launch: Launch, tmp_path: Path) -> None:
    async with _granted(launch, tmp_path, min_step_s=1e6) as joined:
        with pytest.raises(RefusedError) as ended:
            await asyncio.to_thread(_train, joined, lambda run: False)
    assert f"learner {LEARNER}: its last 3 offers of fragment" in str(ended.value)
    assert "is impossible: steps since genesis" in str(ended.value)
    assert "this learner's grant" in str(ended.value)
    assert joined.refused.keys() == {"claim"}
    assert joined.refused["claim"] >= 3


async def test_a_loop_that_ends_by_itself_with_nothing_merged_ends_with_the_reason(launch: Launch, tmp_path: Path) -> None:
    async with _granted(launch, tmp_path, min_step_s=1e6) as joined:
        with pytest.raises(RefusedError, match=r"none of its work was merged, and [0-9]+ of its offers were refused"):
            await asyncio.to_thread(_train, joined, lambda run: bool(run.refused))


async def test_steps_of_few_tokens_are_merged(launch: Launch) -> None:
    """The settings describe the built-in task, of 2,048 tokens a batch; the loop has another model, and 16 tokens a step."""
    cluster = launch(small(learners=1, tokens=5000, task__name="gpt", task__batch=16, task__context=128))
    cluster.coordinator()
    cluster.syncers()
    await cluster.link()
    joined = _join(cluster, 16)
    await asyncio.to_thread(_train, joined, lambda run: False)
    await cluster.ended()
    assert joined.refused == {}
    assert all(len(log.versions) >= 10 for log in await cluster.folded())
