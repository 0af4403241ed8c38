"""Whole runs over a real server: they end by themselves, everybody has the same bits, and the accounts add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.made.fixtures import Launch
from tests.made.run_checks import has_whole_rounds
from tests.services.cluster import NEVER_S, Cluster, Folded, check_accounts, small
from tests.services.toy import SAMPLES, Toy

from diloco.wire.control import Heartbeat
from diloco.wire.entries import Record
from diloco.wire.framing import unpack
from diloco.wire.offers import Offer

SILENT_STEPS = 30
NAMES = ["toy-0", "toy-1", "toy-2"]


async def end(cluster: Cluster) -> tuple[dict[str, Heartbeat], list[Folded]]:
    """Wait for the run's end, and check what holds of every run."""
    await cluster.ended()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    assert sum(heartbeat.tokens for heartbeat in heartbeats.values()) >= cluster.settings.tokens
    check_accounts(heartbeats, folded)
    for log in folded:
        assert log.passed_over == 0
        assert log.entries[-1].closing
        for toy in cluster.toys:
            np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)
    task = cluster.toys[0].task
    assert task is not None
    assert task.distance(await cluster.tensors(folded)) < 0.5  # of where it began: the global model has learnt
    assert not cluster.events("message_refused")
    return heartbeats, folded


def lost(heartbeats: dict[str, Heartbeat]) -> dict[str, int]:
    """Tokens that each learner lost, of all fragments together."""
    return {name: sum(heartbeat.lost_tokens) for name, heartbeat in heartbeats.items()}


def silent_at_first(toy: Toy) -> bool:
    """A learner whose work comes late: until others have made versions of every fragment it has nothing to answer with."""
    member = toy.member
    return member is not None and member.step >= SILENT_STEPS and min(member.versions()) >= 2


def keeps_pace(toy: Toy) -> bool:
    """Whether a learner may go on: by two sync intervals a version, however late versions come."""
    member = toy.member
    assert member is not None
    return member.step < 2 * member.run.created.round.steps * (min(member.versions()) + 2)


def first_answers(folded: list[Folded], name: str) -> list[Any]:
    """By fragment, what of a learner was merged first."""
    return [next(m for record in log.versions for m in record.members if m.learner == name) for log in folded]


async def stored_offers(cluster: Cluster) -> list[Offer]:
    """The last offer of every learner and fragment, as it still stands in the stream."""
    store, fragments = await cluster.store()
    offers = []
    for learner in NAMES:
        for fragment in fragments.fragments:
            subject = cluster.subjects.offer(fragment.index, learner)
            message = await (await cluster.link()).bulk.jetstream().get_last_msg(cluster.subjects.offer_stream, subject)
            assert message.data is not None
            offers.append(unpack(message.data, Offer, store.run)[0])
    return offers


@pytest.mark.promise("a run ends at its budget: all learners hold the same bits, and the log holds every token once")
async def test_run_ends_at_its_budget_and_merges_everybodys_work_once(launch: Launch) -> None:
    cluster = launch(small(round__quorum="all", round__steps=7, liveness__dead_s=NEVER_S))
    cluster.learners(**cluster.answers_held)
    await cluster.begin(until_step=0)
    await cluster.step_to_version(1)
    while not (status := await cluster.status())["tokens_merged"]:  # it hears of versions as learners do, and not before them
        cluster.check_alive()
    cluster.gate.open()

    heartbeats, folded = await end(cluster)

    assert status["state"] == "training"
    assert sorted(status["learners"]) == NAMES
    assert status["tokens_processed"] >= status["tokens_merged"] > 0
    for log in folded:
        # where each round waits for all, nothing at all is lost: the log holds every token that was processed
        assert log.entries[-1].tokens_merged == sum(heartbeat.tokens for heartbeat in heartbeats.values())
    [short] = cluster.events("run_is_short", "coordinator")
    assert short["rounds"] == 60 // 7
    [finished] = cluster.events("run_finished", "coordinator")
    assert finished["versions"] == sum(len(log.versions) for log in folded)


@pytest.mark.parametrize(("preset", "bits"), [("decoupled", 4), ("published", 16)])
@pytest.mark.promise("no learner waits for another: late work is dropped and counted")
async def test_late_work_is_overwritten(launch: Launch, preset: str, bits: int) -> None:
    cluster = launch(small(preset, shards=1, liveness__dead_s=NEVER_S))
    await start_with_a_late_learner(cluster)

    heartbeats, folded = await end(cluster)

    # what was done before the versions that it missed is gone, and counted as lost
    assert all(first > 0 for member in first_answers(folded, "toy-2") for _, first, _ in member.data)
    assert min(heartbeats["toy-2"].lost_tokens) >= SAMPLES * cluster.settings.round.steps
    assert {record.bits for log in folded for record in log.versions} == {bits}
    assert {offer.bits for offer in await stored_offers(cluster)} == {bits}


async def start_with_a_late_learner(cluster: Cluster) -> None:
    """Have two learners make two versions of every fragment without the third one, whose work comes late."""
    for share in range(2):
        cluster.toy(share, **cluster.answers_held)
    cluster.toy(2, hands_over=silent_at_first, **cluster.answers_held)
    await cluster.begin(coordinator=False, until_step=0)
    await cluster.step_to_version(2)
    cluster.gate.open()


async def test_streaming_waits_for_every_learner_and_overlaps(launch: Launch) -> None:
    whole: dict[str, Any] = {"fragments__strategy": "balanced", "fragments__layers": 1}  # the toy has no layers
    cluster = launch(small("streaming", shards=1, tokens=3 * 120 * SAMPLES, liveness__dead_s=NEVER_S, **whole))
    cluster.learners(may_step=keeps_pace)
    await cluster.begin(coordinator=False)

    heartbeats, folded = await end(cluster)

    for log in folded:
        regular = [record for record in log.versions if not record.closing]
        assert len(regular) >= 5
        for record in regular:
            assert [member.learner for member in record.members] == NAMES
            assert {member.weight for member in record.members} == {1.0}
        # each was applied one step after its answer, and that step was overwritten; after the last one there may be none
        overwritten = {heartbeat.lost_tokens[log.index] // SAMPLES for heartbeat in heartbeats.values()}
        assert overwritten <= {len(regular) - 1, len(regular)}
    assert {record.bits for log in folded for record in log.versions} == {32}


async def test_diloco_synchronises_the_whole_model_and_learners_wait(launch: Launch) -> None:
    # a model of more than a megabyte: its only fragment travels in parts
    cluster = launch(small("diloco", task__context=75_000, liveness__dead_s=NEVER_S))
    cluster.learners(hands_over=has_whole_rounds)
    await cluster.begin(coordinator=False)

    await cluster.ended()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()

    [log] = folded
    check_accounts(heartbeats, folded)
    records: list[Record] = log.versions
    assert len(records) >= 8
    for record in records[:-1]:
        assert [(member.learner, member.steps) for member in record.members] == [(name, 6) for name in NAMES]
        assert {member.base_version for member in record.members} == {record.version - 1}
        assert record.body is not None
        assert record.body.parts > 1
    assert all(any(heartbeat.state == "waiting" for heartbeat in cluster.heartbeats[name]) for name in NAMES)
    assert set(lost(heartbeats).values()) == {0}  # nothing is done that a version could overwrite
    for toy in cluster.toys:
        np.testing.assert_array_equal(toy.thetas[0], log.theta, strict=True)
        assert toy.task is not None
        assert toy.task.distance(await cluster.tensors(folded)) < 1
