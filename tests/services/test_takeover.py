"""Fragments change hands: owners die, freeze, join and leave; standbys take over. What is in the log stays as it is."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.made.fixtures import Launch
from tests.made.run_checks import owned, until_owned_by
from tests.pace import scaled_s
from tests.services.cluster import NEVER_S, Cluster, Folded, Service, small
from tests.services.toy import SAMPLES

from diloco.control import tables
from diloco.control.creation import KnownRun
from diloco.core.syncer.ownership import OwnersTable
from diloco.settings.run import RunSettings


async def table(cluster: Cluster) -> OwnersTable:
    store, fragments = await cluster.store()
    registry = await store.transport.bucket(cluster.subjects.bucket, create=False)
    found, _ = await tables.owners(KnownRun(cluster.name, cluster.settings, registry), len(fragments.fragments)).read()
    assert found is not None
    return found


async def whole_run_is_in_the_log(cluster: Cluster) -> list[Folded]:
    """The run ends by itself; all hold what the log says, and all that was processed is in it, once."""
    cluster.gate.open()
    cluster.hurry()
    await cluster.ended()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    store, _ = await cluster.store()
    genesis = await store.reader.genesis()
    assert genesis is not None
    for log in folded:
        assert log.passed_over == 0
        chain = (await store.reader.load(log.index, *genesis)).replica.chain
        merged = log.entries[-1].tokens_merged if log.entries else chain.tokens_merged
        assert merged == sum(heartbeat.tokens - heartbeat.lost_tokens[log.index] for heartbeat in heartbeats.values())
        for toy in cluster.toys:
            np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)
    return folded


def takeovers(folded: list[Folded]) -> Mapping[int, list[tuple[int, str]]]:
    """By fragment: epochs and owners, in order."""
    return {log.index: [(e.epoch, e.syncer) for e in log.entries if e.entry == "takeover"] for log in folded}


async def begin(cluster: Cluster, syncers: int) -> list[Service]:
    await cluster.create()
    services = [cluster.syncer(index) for index in range(syncers)]
    cluster.learners(**cluster.answers_held)
    await cluster.link()
    await cluster.all_ready()
    await cluster.step_to_version(2)
    return services


def settings(**changes: Any) -> RunSettings:
    # an owner that gets no processor time for a while is not to be replaced: tests say who is
    patience = {"liveness__takeover_s": scaled_s(5.0), "liveness__dead_s": NEVER_S}
    return small(**{"tokens": 3 * 100 * SAMPLES} | patience | changes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.promise("a standby syncer takes over from an owner that dies or freezes")
async def test_a_standby_takes_over_from_an_owner_that_dies_or_freezes(launch: Launch, how: signal.Signals) -> None:
    cluster = launch(settings())
    services = await begin(cluster, 4)  # two share the fragments, two race for a dead one's
    holders = (await table(cluster)).holders
    [gone, other], standbys = holders, {"syncer-0", "syncer-1", "syncer-2", "syncer-3"} - set(holders)
    [process] = [service for service in services if service.name == gone]
    await until_owned_by(cluster, gone, other)
    had = owned(cluster, gone)
    assert had
    stood_by = len(cluster.events("standing_by", gone))
    process.process.send_signal(how)
    process.killed = how == signal.SIGKILL

    await cluster.until(lambda: any(owned(cluster, name) == had for name in standbys), "a standby owns them")
    await cluster.step_to_version(4)
    if how == signal.SIGSTOP:
        process.process.send_signal(signal.SIGCONT)
        await cluster.until(lambda: len(cluster.events("standing_by", gone)) > stood_by, "the old owner has understood")
    [successor] = [name for name in standbys if owned(cluster, name)]
    assert set((await table(cluster)).holders) == {other, successor}

    folded = await whole_run_is_in_the_log(cluster)

    for log in folded:
        expected = [(1, gone), (2, successor)] if log.index in had else [(1, other)]
        assert takeovers(folded)[log.index] == expected
        # parameters and momentum went over as they were, and made versions before and after
        for before, after in itertools.pairwise(log.entries):
            if after.entry == "takeover":
                assert after.state_hash == before.state_hash
                assert after.version == before.version
        writers = [record.syncer for record in log.versions]
        assert writers == sorted(writers, key=[owner for _, owner in expected].index)  # never again the old one
        assert set(writers) == {owner for _, owner in expected}


async def test_syncers_join_and_leave_a_run_that_goes_on(launch: Launch) -> None:
    cluster = launch(settings(shards=3, fragments__count=6))
    services = await begin(cluster, 2)
    await until_owned_by(cluster, "syncer-0", "syncer-1")

    _, fragments = await cluster.store()
    sizes = [fragment.size for fragment in fragments.fragments]

    def spread() -> int:
        loads = [sum(sizes[index] for index in owned(cluster, f"syncer-{k}")) for k in range(3)]
        return max(loads) - min(loads)

    cluster.syncer(2)
    await until_owned_by(cluster, "syncer-0", "syncer-1", "syncer-2")
    await cluster.until(lambda: spread() <= max(sizes), "no syncer owns more than a fragment above its share")
    await cluster.step_to_version(4)

    services[0].process.send_signal(signal.SIGTERM)
    await cluster.until(lambda: services[0].process.poll() == 0, "it has left")
    assert cluster.events("left", "syncer-0")
    await until_owned_by(cluster, "syncer-1", "syncer-2")

    await whole_run_is_in_the_log(cluster)

    # the owners agreed on every change of hands: no append was fenced, and no residual was lost
    for event in ("version_fenced", "residual_reset", "takeover_retried", "keyframe_not_stored"):
        assert not cluster.events(event)


async def test_the_only_syncer_leaves_and_comes_back_to_its_own_residual(launch: Launch) -> None:
    cluster = launch(settings(shards=1))
    [only] = await begin(cluster, 1)
    only.process.send_signal(signal.SIGTERM)
    await cluster.until(lambda: only.process.poll() == 0, "it has left")
    before = cluster.events("handed_over")
    assert sorted(event["fragment"] for event in before) == [0, 1, 2, 3]
    assert len(cluster.events("keyframe_stored")) == 4
    cluster.syncer(0)

    await whole_run_is_in_the_log(cluster)

    again = [event for event in cluster.events("taken_over") if event["epoch"] == 2]
    assert {(e["fragment"], e["version"]) for e in again} == {(e["fragment"], e["version"]) for e in before}
    assert not cluster.events("residual_reset")


async def test_of_two_processes_with_one_name_the_older_says_so_and_ends(launch: Launch) -> None:
    cluster = launch(settings(shards=1))
    [older] = await begin(cluster, 1)
    cluster.start("syncer-0", "diloco_syncer", state_dir=str(cluster.directory / "of another machine"))

    [(code, said)] = await cluster.refused(older)

    assert code == 5
    assert "a newer process has joined as 'syncer-0'" in said
    await whole_run_is_in_the_log(cluster)
