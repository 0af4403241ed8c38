"""Learners that come, leave and come back: with and without a checkpoint, with and without notice."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

import numpy as np
import pytest
from tests.made.fixtures import Launch
from tests.made.run_checks import newest_applied
from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import NEVER_S, Cluster, Service, check_accounts, small, some_versions
from tests.services.toy import SAMPLES, Regression

from diloco.control import admission, creation
from diloco.core.tensors.fragments import build_map
from diloco.states import state
from diloco.states.statefolder import StateFolder
from diloco.wire.control import Heartbeat

JAX_S = 2 * DEADLINE_S  # it is imported, and compiles, too


@pytest.mark.promise("a learner that is asked to end has its last work merged")
async def test_a_learner_that_leaves_has_its_last_work_merged(launch: Launch) -> None:
    cluster = launch(small(tokens=3 * 150 * SAMPLES, round__steps=80, round__quorum="all", liveness__dead_s=NEVER_S))
    for share in range(3):
        cluster.toy(share, leave_s=DEADLINE_S, **cluster.answers_held)
    await cluster.begin(until_step=0)
    leaver = cluster.toys[2]
    await cluster.step_until(15)  # the first round is due at 20: what each holds of every fragment is not due yet
    leaver.leave()
    last = await left(cluster, "toy-2")
    assert not any(last.steps)
    assert not any(last.lost_tokens)
    steps = {heartbeat.step for heartbeat in cluster.heartbeats["toy-2"] if heartbeat.state == "leaving"}
    assert len(steps) == 1  # it takes none while it leaves
    cluster.toys.remove(leaver)
    cluster.gate.open()
    cluster.hurry()
    await cluster.ended()
    folded = await cluster.folded()
    for log in folded:
        assert sum(m.tokens for record in log.versions for m in record.members if m.learner == "toy-2") == last.tokens


async def left(cluster: Cluster, name: str) -> Heartbeat:
    """Wait until a learner in a thread has left, and return its last word."""
    [toy] = [toy for toy in cluster.toys if toy.name == name]
    await cluster.until(lambda: not toy.running, "it has left")
    await cluster.until(lambda: cluster.heartbeats[name][-1].state == "left", "its last heartbeat")
    return cluster.heartbeats[name][-1]


async def test_a_learner_that_nobody_merges_leaves_in_time_and_counts_on_from_its_checkpoint(launch: Launch) -> None:
    cluster = launch(small(learners=1, shards=1, round__steps=1000, tokens=60 * SAMPLES))
    cluster.coordinator()
    syncer = cluster.syncer(0)
    first = cluster.toy(0, leave_s=0.5, **cluster.answers_held)
    await cluster.link()
    await cluster.all_ready()
    await cluster.step_until(20)
    syncer.kill()
    first.leave()
    last = await left(cluster, "toy-0")
    assert min(last.steps) == 20
    cluster.gate.open()
    cluster.toys.clear()
    cluster.syncer(0)
    cluster.toy(0)
    await cluster.ended()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    assert heartbeats["toy-0"].step > last.step
    for log in folded:  # nothing of its work was lost, though most of it was done by the first process
        assert sum(m.tokens for record in log.versions for m in record.members) == heartbeats["toy-0"].tokens
        assert heartbeats["toy-0"].lost_tokens[log.index] == 0


@pytest.mark.promise("a killed learner goes on from its own checkpoint and replays what it missed")
async def test_killed_learner_goes_on_from_its_own_checkpoint(launch: Launch) -> None:
    # learners wait for versions, so that these come however slow the machine is; two answers make one
    cluster = launch(
        small(shards=1, tokens=3 * 150 * SAMPLES, round__learners_wait=True, round__quorum=2, liveness__dead_s=scaled_s(1.0))
    )
    for share in range(2):
        cluster.toy(share, **cluster.answers_held)
    cluster.coordinator()
    cluster.syncer(0)
    await cluster.link()
    await cluster.all_ready()
    cluster.gate.close()
    killed = cluster.toy_process(2, checkpoint_s=0.1)
    await cluster.until(lambda: bool(cluster.heartbeats.get("toy-2")), "the process has joined")
    cluster.gate.open(until_step=60)
    await cluster.until(lambda: min(newest_applied(cluster)) >= 2, "versions that all have applied")
    await cluster.until(lambda: len(cluster.events("checkpoint_saved", "toy-2")) >= 2, "checkpoints")
    killed.kill()
    first = cluster.heartbeats["toy-2"][-1]
    saved = [event["step"] for event in cluster.events("checkpoint_saved", "toy-2")]
    cluster.gate.open(until_step=90)
    await some_versions(cluster, of=["toy-0", "toy-1"])
    cluster.toy_process(2, checkpoint_s=0.1)
    await cluster.until(lambda: cluster.heartbeats["toy-2"][-1].incarnation > first.incarnation, "it has joined again")
    cluster.gate.open()
    await cluster.ended()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    [restored] = cluster.events("checkpoint_restored", "toy-2")
    assert restored["step"] >= saved[-1]  # the kill may have come between writing a checkpoint and saying so
    assert heartbeats["toy-2"].incarnation > first.incarnation
    for log in folded:
        for toy in cluster.toys:
            np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)


async def test_a_restarted_learner_of_a_million_steps_is_believed_by_all(launch: Launch) -> None:
    """It is heard before it has restored its checkpoint, and then again: no process takes the difference for steps."""
    cluster = launch(small(learners=1, shards=1, tokens=10**9))
    cluster.coordinator()
    cluster.syncer(0)
    learner = cluster.toy(0, leave_s=DEADLINE_S, **cluster.answers_held)
    await cluster.link()
    await cluster.all_ready()
    await cluster.step_until(20)
    learner.leave()
    last = await left(cluster, "toy-0")
    file, _ = StateFolder(cluster.directory, "toy-0").generations()
    saved = state.load(file, cluster.run_id, "toy-0")
    state.save(file, cluster.run_id, "toy-0", saved.accounts | {"step": 10**6}, state.Content.of(saved.arrays()))

    def of_now() -> list[Heartbeat]:
        return [heartbeat for heartbeat in cluster.heartbeats["toy-0"] if heartbeat.incarnation > last.incarnation]

    async def believed(step: int) -> str:
        """Wait until the coordinator shows such a step or a later one, but none before; return the learner's state."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                shown = (await cluster.status())["learners"]["toy-0"]
                if shown["step"] >= step and (step or not shown["step"]):
                    return str(shown["state"])
                await asyncio.sleep(0.05)

    heard = threading.Event()
    cluster.toys.clear()
    cluster.toy(0, before_restore=lambda toy: cast(None, heard.wait(DEADLINE_S)), **cluster.answers_held)
    assert await believed(0) == "starting"
    versions = of_now()[-1].versions
    heard.set()
    cluster.gate.open()
    assert await believed(10**6) in ("recovering", "stepping", "sending")
    await cluster.until(lambda: min(of_now()[-1].versions) > max(versions), "its work is merged")
    assert "starting" not in {heartbeat.state for heartbeat in of_now() if heartbeat.step}, "it was said before, and not again"
    assert not cluster.events("message_refused")


async def test_an_incarnation_grows_though_the_clock_jumps_back(launch: Launch) -> None:
    cluster = launch(small())
    run = await creation.create(await cluster.link(), cluster.name, cluster.settings)
    fragments = build_map(Regression(cluster.settings).specs, 4)

    async def join(name: str, incarnation: int) -> int:
        return await admission.join(run, name, incarnation, fragments, cluster.settings.digest())

    assert [await join("ann", incarnation) for incarnation in (1000, 2000, 500, 2001, 2002)] == [1000, 2000, 2001, 2002, 2003]
    assert (await admission.admitted(run, "ann", fragments.digest)).incarnation == 2003
    assert sorted(await asyncio.gather(*(join("bob", 7) for _ in range(5)))) == [7, 8, 9, 10, 11]
    assert (await admission.admitted(run, "bob", fragments.digest)).incarnation == 11
    await run.registry.put("member.cat", b"no admission")
    assert await join("cat", 7) == 7


@pytest.mark.slow  # test_up goes on with real learners; toys return above
async def test_a_real_learner_returns_with_its_checkpoint_and_without(launch: Launch) -> None:
    """One of two GPTs is killed, and goes on from its checkpoint; killed again without one, it borrows an optimizer state."""
    cluster = launch(
        small(
            learners=2,
            shards=1,
            tokens=10**9,
            fragments__count=3,
            task__name="gpt",
            task__layers=1,
            task__width=16,
            task__heads=2,
            task__context=16,
            task__batch=2,
        )
    )
    text = cluster.directory / "text.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(4000)))
    shared = {"data": str(text), "checkpoint_s": 0.3, "cache_dir": str(cluster.directory / "cache"), "leave_s": 0.0}

    def learner(index: int) -> Service:
        return cluster.start(f"learner-{index}", "diloco_learner", share=index, slow=20.0, **shared)

    def programs() -> set[str]:
        return {path.name for path in (cluster.directory / "cache").glob("jit_step-*-cache")}

    cluster.coordinator()
    cluster.syncer(0)
    learner(0)
    killed = learner(1)
    await cluster.link()
    name, (file, previous) = "learner-1", StateFolder(cluster.directory, "learner-1").generations()
    await cluster.until(
        lambda: previous.exists() and min(cluster.heartbeats[name][-1].versions) >= 2, "checkpoints and versions", JAX_S
    )

    killed.kill()
    first, compiled = cluster.heartbeats[name][-1], programs()
    file.write_bytes(previous.read_bytes()[:-1])  # torn by more than a kill can
    killed = learner(1)
    await cluster.until(lambda: cluster.heartbeats[name][-1].incarnation > first.incarnation, "it has joined again", JAX_S)
    await some_versions(cluster, 1, of=[name])
    [refused] = cluster.events("checkpoint_refused", name)
    assert str(file) in refused["file"]
    [restored] = cluster.events("checkpoint_restored", name)
    assert restored["file"] == "learner-1.previous.safetensors"
    assert 0 < restored["step"] <= first.step

    killed.kill()
    second, before = cluster.heartbeats[name][-1], len(cluster.events("state_from_peer", name))
    for path in StateFolder(cluster.directory, name).generations():
        path.unlink(missing_ok=True)
    learner(1)
    await cluster.until(lambda: cluster.heartbeats[name][-1].incarnation > second.incarnation, "it has joined once more", JAX_S)
    await some_versions(cluster, 1, of=[name])
    borrowed, lent = cluster.events("state_from_peer", name), cluster.events("state_lent", "learner-0")
    assert len(borrowed) == before + 1  # the first time, it may have come when the other was at work already
    assert borrowed[-1]["learner"] == "learner-0"
    assert borrowed[-1]["step"] == lent[-1]["step"] > 0
    assert programs() == compiled != set()  # anyone who begins again need not compile its step


async def test_of_two_learners_with_one_name_the_older_says_so_and_ends(launch: Launch) -> None:
    cluster = launch(small(learners=1, shards=1, tokens=10**9, liveness__lease_s=scaled_s(2.0), liveness__dead_s=scaled_s(2.0)))
    cluster.coordinator()
    cluster.syncer(0)
    await cluster.link()
    older = cluster.toy_process(0)
    await cluster.until(lambda: "toy-0" in cluster.heartbeats, "the older one")
    younger = cluster.toy_process(0, state_dir=str(cluster.directory / "of another machine"))

    [(code, said)] = await cluster.refused(older)

    assert code == 5
    assert "a newer process has joined as 'toy-0', so this one ends" in said
    step = cluster.heartbeats["toy-0"][-1].step
    await cluster.until(lambda: cluster.heartbeats["toy-0"][-1].step > step + 20, "the younger one to train on")
    assert younger.process.poll() is None
