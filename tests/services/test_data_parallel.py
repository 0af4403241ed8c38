"""The preset data-parallel over a real server: AdamW on averaged gradients, and learners that go and come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.made.fixtures import Launch
from tests.made.fragment_vectors import scatter
from tests.pace import scaled_s
from tests.services.cluster import Cluster, Folded, check_accounts, small
from tests.services.toy import SAMPLES, Regression

from diloco.settings.run import RunSettings
from diloco.wire.entries import Record

NAMES = ["toy-0", "toy-1", "toy-2"]
Tensors = dict[str, NDArray[np.float64]]


def rounded(values: NDArray[Any]) -> NDArray[np.float64]:
    """As bfloat16."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float64)


def steps(folded: Sequence[Folded]) -> list[list[Record]]:
    """The versions of all fragments that each step of the run made; of one gradient a learner, the same in all of them."""
    versions = [list(records) for records in zip(*(log.versions for log in folded), strict=True)]
    for records in versions:
        for record in records:
            assert [member.steps for member in record.members] == [1] * len(record.members)
            assert [member.base_version for member in record.members] == [record.version - 1] * len(record.members)
            assert {member.weight for member in record.members} == {SAMPLES}
    return versions


def batches(record: Record) -> dict[str, tuple[int, int]]:
    """Share and index of the batch of each member's gradient."""
    return {member.learner: (member.data[0][0], member.data[0][1]) for member in record.members}


def rate(settings: RunSettings, tokens: int) -> float:
    """A linear warm-up, then a cosine."""
    inner, done = settings.inner, min(tokens / settings.tokens, 1)
    if done < inner.warmup_fraction:
        return inner.learning_rate * done / inner.warmup_fraction
    cosine = (1 + math.cos(math.pi * (done - inner.warmup_fraction) / (1 - inner.warmup_fraction))) / 2
    return inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * cosine)


def adamw(settings: RunSettings, versions: Sequence[Sequence[Record]]) -> Tensors:
    """All steps in float64, each from the batches that its versions state."""
    task, inner = Regression(settings), settings.inner
    params = {path: tensor.astype(np.float64) for path, tensor in task.tensors.items()}
    mean = {path: np.zeros_like(values) for path, values in params.items()}
    square = {path: np.zeros_like(values) for path, values in params.items()}
    tokens = 0
    for number, records in enumerate(versions, start=1):
        task.tensors = {path: values.astype(np.float32) for path, values in params.items()}
        gradients = [task.gradients(*batch)[1] for _, batch in sorted(batches(records[0]).items())]
        eta = rate(settings, tokens)
        assert [record.learning_rate for record in records] == [pytest.approx(eta)] * len(records)
        for path, values in params.items():
            gradient = rounded(np.mean([rounded(own[path]) for own in gradients], axis=0))
            mean[path] += (1 - inner.beta1) * (gradient - mean[path])
            square[path] += (1 - inner.beta2) * (gradient**2 - square[path])
            update = mean[path] / (1 - inner.beta1**number) / (np.sqrt(square[path] / (1 - inner.beta2**number)) + 1e-8)
            values -= eta * (update + (inner.weight_decay if values.ndim > 1 else 0) * values)
        tokens = records[0].tokens_merged + records[0].tokens_lost
    return params


async def check_offers(cluster: Cluster, folded: Sequence[Folded], versions: Sequence[Sequence[Record]]) -> int:
    """Each offer merged is the gradient in bfloat16, to the last bit, at the version that it states. Return their number."""
    log, fragments = await cluster.store()
    task, checked = Regression(cluster.settings), 0
    for records in versions:
        for fragment, each in zip(fragments.fragments, folded, strict=True):
            scatter(fragment, each.thetas[records[0].version - 1], task.tensors)
        for learner, batch in batches(records[0]).items():
            gradients = {path: gradient.astype(np.float32) for path, gradient in task.gradients(*batch)[1].items()}
            for fragment, record in zip(fragments.fragments, records, strict=True):
                member = next(member for member in record.members if member.learner == learner)
                found = await log.archive.offer(record, member)
                assert found is not None
                sent, gradient = found[1].view(ml_dtypes.bfloat16), fragment.gather(gradients)
                np.testing.assert_array_equal(sent, gradient.astype(ml_dtypes.bfloat16), strict=True)
                checked += 1
    return checked


async def test_a_run_is_that_of_adamw_on_averaged_gradients(launch: Launch) -> None:
    cluster = launch(small("data-parallel", tokens=3 * 30 * SAMPLES, inner__learning_rate=0.1, log__archive=True))
    await cluster.begin()
    await cluster.ended()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()

    check_accounts(heartbeats, folded)
    versions = steps(folded)
    assert len(versions) >= cluster.settings.tokens // (3 * SAMPLES)
    for records in versions:
        assert [batches(record) for record in records] == [batches(records[0])] * len(folded)
    assert await check_offers(cluster, folded, versions) >= 3 * len(folded) * (len(versions) - 2)
    whole = [sorted(batches(records[0])) == NAMES for records in versions]
    assert sum(whole) >= len(versions) - 2  # but for the end, which not all learners hear of at the same step
    expected, tensors = adamw(cluster.settings, versions), await cluster.tensors(folded)
    for path, values in expected.items():
        assert np.abs(values).max() > 0.5
        # a gradient that is rounded to bfloat16 the other way moves its parameter by up to a 256th of a step
        np.testing.assert_allclose(tensors[path], values, atol=5e-3, err_msg=path)
    for toy in cluster.toys:
        for log in folded:
            np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)


@pytest.mark.slow  # about a minute
async def test_a_learner_that_dies_is_left_out_and_comes_back_into_step(launch: Launch) -> None:
    cluster = launch(small("data-parallel", tokens=3 * 100 * SAMPLES, liveness__dead_s=scaled_s(2.0)))
    cluster.gate.close()
    for share in range(2):
        cluster.toy(share)
    mortal = cluster.toy_process(2)
    cluster.coordinator()
    cluster.syncers()
    await cluster.link()
    await cluster.all_ready()
    await cluster.until(
        lambda: any(p.state == "stepping" for p in cluster.heartbeats.get("toy-2", ())), "the third is ready, too"
    )
    await cluster.step_until(20)
    fragments = {fragment.index for fragment in (await cluster.store())[1].fragments}

    def of_all() -> set[int]:
        return {event["fragment"] for event in cluster.events("version_committed") if event["members"] == 3}

    await cluster.until(lambda: of_all() == fragments, "all three are in step")

    mortal.kill()
    await cluster.step_until(30)  # the others, which do not wait for it
    cluster.gate.close()  # they rest until it is there again, whatever that takes
    cluster.heartbeats.pop("toy-2", None)
    cluster.toy_process(2)
    await cluster.until(lambda: "toy-2" in cluster.heartbeats, "it is heard again")
    cluster.gate.open()
    await cluster.ended()

    folded = await cluster.folded()
    versions = steps(folded)
    members = [[sorted(batches(record)) for record in records] for records in versions]
    alone = [number for number, own in enumerate(members) if own == [NAMES[:2]] * len(folded)]
    together = [number for number, own in enumerate(members) if own == [NAMES] * len(folded)]
    assert min(together) < min(alone) < max(together)
    # in step: what it sends is its gradient at the others' parameters, the same one to all fragments
    returned = [versions[number] for number in together if number > max(alone)]
    assert len(returned) >= 5
    for records in returned:
        assert [batches(record) for record in records] == [batches(records[0])] * len(folded)
