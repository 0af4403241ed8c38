"""Processes that die at once, in the middle of a run, and are started again."""

from __future__ import annotations

import json

import numpy as np
from blake3 import blake3
from tests.made.fixtures import Launch, MakeServer
from tests.services.cluster import check_accounts, check_kept, newest_entries, small, some_versions
from tests.services.toy import SAMPLES


async def test_killed_learner_comes_back_and_its_unmerged_work_is_lost(launch: Launch) -> None:
    cluster = launch(small(shards=1, liveness__dead_s=1.0, tokens=3 * 400 * SAMPLES, round__steps=12))
    for share in range(2):
        cluster.toy(share)
    cluster.coordinator()
    cluster.syncer(0)
    await cluster.link()
    await cluster.all_ready()
    killed = cluster.toy_process(2)
    await cluster.until(lambda: bool(cluster.heartbeats.get("toy-2")), "the process has joined")
    cluster.gate.open()
    await some_versions(cluster)
    killed.kill()
    first = cluster.heartbeats["toy-2"][-1].incarnation
    await some_versions(cluster, of=["toy-0", "toy-1"])  # the others go on
    cluster.gate.close()
    again = cluster.toy_process(2)
    await cluster.until(lambda: cluster.heartbeats["toy-2"][-1].incarnation > first, "the process has joined again")
    cluster.gate.open()

    await cluster.ended()

    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    lives = heartbeats["toy-2"].incarnation
    assert lives > first
    merged_of_first = []
    for log in folded:
        members = [m for record in log.versions for m in record.members if m.learner == "toy-2"]
        incarnations = [member.incarnation for member in members]
        assert incarnations == sorted(incarnations)
        assert set(incarnations) == {first, lives}  # both lives worked for the run
        of_first = [member for member in members if member.incarnation == first]
        merged_of_first.append((sum(member.tokens for member in of_first), of_first[-1].lost_tokens))
    # it counts on from the furthest of its fragments; what the others had not got by then is lost
    known = max(merged + lost for merged, lost in merged_of_first)
    assert heartbeats["toy-2"].tokens == known + heartbeats["toy-2"].step * SAMPLES
    for lost, (merged, _) in zip(heartbeats["toy-2"].lost_tokens, merged_of_first, strict=True):
        assert lost >= known - merged
    result = json.loads((cluster.directory / "toy-2.json").read_text())
    assert again.process.returncode == 0
    assert result["finished"]
    assert result["thetas"] == {str(log.index): blake3(log.theta.tobytes()).hexdigest() for log in folded}


async def test_killed_syncer_takes_its_fragments_over_again(launch: Launch) -> None:
    # the only one; keyframes are written and what is below them purged all the time, so that the log is loaded from the middle
    cluster = launch(small(shards=1, log__keyframe_factor=0.2, tokens=3 * 120 * SAMPLES))
    cluster.learners()
    await cluster.create()
    [killed] = cluster.syncers()
    await cluster.all_ready()
    with cluster.slowly():
        cluster.gate.open()
        await cluster.until(lambda: bool(cluster.events("keyframe_stored", "syncer-0")), "a keyframe")
        await some_versions(cluster)
        killed.kill()
        at_death = cluster.heartbeats["toy-0"][-1].versions
        away_from = cluster.steps()
        await cluster.until(lambda: cluster.steps() >= away_from + 3 * 12, "learners go on without it")
    cluster.gate.close()
    cluster.syncer(0)
    await cluster.until(lambda: len(cluster.events("serving", "syncer-0")) == 2, "it serves again")
    cluster.gate.open()

    await cluster.ended()

    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    store, _ = await cluster.store()
    genesis = await store.reader.genesis()
    assert genesis is not None
    for log in folded:
        for toy in cluster.toys:
            np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)
        chain = (await store.reader.load(log.index, *genesis)).replica.chain
        # every owner's first word raises the epoch by one: 1 at first, 2 when it had been taken over again
        assert (log.entries[-1].epoch if log.entries else chain.epoch) == 2
        assert (log.entries[-1].version if log.entries else chain.version) > at_death[log.index] + 2
        # no offer is in two versions: all that was processed, and was not too late for its round, is in the log, once
        merged = log.entries[-1].tokens_merged if log.entries else chain.tokens_merged
        assert merged == sum(heartbeat.tokens - heartbeat.lost_tokens[log.index] for heartbeat in heartbeats.values())
    assert [event["fragments"] for event in cluster.events("serving", "syncer-0")] == [4, 4]


async def test_killed_nats_server_loses_nothing(make_server: MakeServer, launch: Launch) -> None:
    server = make_server()
    cluster = launch(small(tokens=3 * 150 * SAMPLES), server.url)
    await cluster.begin()
    await some_versions(cluster)
    before = await newest_entries(cluster)
    server.kill()
    server.start()

    cluster.hurry()
    await cluster.ended()

    await check_kept(cluster, before)
    assert cluster.events("nats_reconnected", "syncer-0")
