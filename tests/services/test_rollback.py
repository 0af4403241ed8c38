"""Runs that go back to an earlier version while they go on: everybody does, once, and what was done since is merged no more."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.fixtures import Launch, Regions
from tests.made.fragment_vectors import scatter
from tests.made.run_checks import WAITS, newest_applied, rollbacks, save_directory, until_owned_by, waiting_settings
from tests.made.toy_replay import redo_toys
from tests.pace import DEADLINE_S, scaled_s
from tests.services.apart import REGIONS, apart, demand_one_log
from tests.services.cluster import NEVER_S, Cluster, Folded, check_accounts, small
from tests.services.toy import SAMPLES, Regression, Toy

from diloco.control.creation import KnownRun
from diloco.core.log.chain import Chain
from diloco.core.run.changes import Effective
from diloco.errors import RunError
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco.wire.entries import RolledBack
from diloco_ops.audit import verify
from diloco_ops.operate import rollback
from diloco_ops.reading import run_reader

pytestmark = pytest.mark.usefixtures("patient_commands")


async def go_back(cluster: Cluster, version: int, reason: str = "a spike") -> int:
    """``diloco rollback``, in this process."""
    return await asyncio.to_thread(rollback.rollback, save_directory(cluster), version, reason)


async def distance(cluster: Cluster, version: int) -> float:
    """How far the global model was from the truth at a version: 1 for the initial zeros."""
    async with run_reader.opened(save_directory(cluster)) as seen:
        tensors = seen.map.empty()
        for fragment in seen.map.fragments:
            scatter(
                fragment,
                (await seen.log.reader.state_at(fragment.index, version, seen.genesis, seen.genesis_check)).theta,
                tensors,
            )
        return Regression(cluster.settings).distance(tensors)


async def demand_one_run(cluster: Cluster) -> list[Folded]:
    """The run has ended by itself: all hold what the log says, accounts add up, and a look from outside finds nothing wrong."""
    await cluster.ended()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    for log in folded:
        assert log.passed_over == 0
        for toy in cluster.toys:
            np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)
    verdict = await verify.check(save_directory(cluster))
    wrong = [check for check in verdict.checks if check.state == "fails"]
    assert not wrong
    return folded


class Spoiler:
    """Pushes a learner's parameters away from the truth before each step, while it is on."""

    on = False

    def __call__(self, toy: Toy) -> None:
        if self.on and toy.task is not None:
            for tensor in toy.task.tensors.values():
                tensor += np.float32(3)


@pytest.mark.promise("an operator takes versions back while the run goes on")
async def test_a_run_that_a_bad_learner_drove_off_goes_on_from_where_it_was(launch: Launch) -> None:
    # whatever a merge does is let in, so that there is something to go back from
    judge_nothing = {"quarantine__factor": 0.0, "quarantine__merge_factor": 0.0}
    cluster = launch(waiting_settings(steps=120, log__archive=True, liveness__dead_s=NEVER_S, **judge_nothing))
    spoiler = Spoiler()
    for share in range(2):
        cluster.toy(share, **cluster.answers_held)
    cluster.toy(2, **cluster.answers_held | {"before_step": spoiler})
    await cluster.begin(until_step=0)
    await cluster.step_to_version(5)
    good = min(newest_applied(cluster))
    at_good = await distance(cluster, good)
    spoiler.on = True
    await cluster.step_to_version(good + 3)
    bad = min(newest_applied(cluster))
    assert await distance(cluster, bad) > 10 * at_good
    spoiler.on = False
    with cluster.slowly():
        cluster.gate.open()

        assert await go_back(cluster, good) == 0

    folded = await demand_one_run(cluster)
    assert rollbacks(folded) == {index: [(1, good)] for index in range(4)}
    for log in folded:
        [back] = [entry for entry in log.entries if entry.entry == "rollback"]
        [past] = [entry for entry in log.versions if entry.version == good]
        assert back.state_hash == past.state_hash
        assert back.version > bad
        after = [entry for entry in log.versions if entry.version > back.version]
        assert len(after) > 5  # it goes on
        assert {m.learner for entry in after for m in entry.members} == {"toy-0", "toy-1", "toy-2"}
    assert Regression(cluster.settings).distance(await cluster.tensors(folded)) < at_good
    assert len(cluster.events("rolled_back")) == 2  # one line of each syncer, which counts its other fragments
    # the training can be done again across it, bit by bit, but for what no tape has; and so can the merges
    lives = await redo_toys(cluster.directory)
    assert [(life.learner, bool(life.wrong)) for life in lives] == [("toy-0", False), ("toy-1", False), ("toy-2", True)]
    verdict = await verify.check(cluster.directory)
    assert {check.name: check.state for check in verdict.checks}["merges"] == "holds"


@pytest.mark.slow  # the simulation has many such schedules
async def test_owners_that_die_or_freeze_over_an_order_leave_it_to_others_who_carry_it_out_once(launch: Launch) -> None:
    patience = {"liveness__takeover_s": scaled_s(5.0), "liveness__dead_s": NEVER_S}  # none dies but those that the test kills
    cluster = launch(waiting_settings(steps=200, **patience))
    await cluster.create()
    services = {service.name: service for service in [cluster.syncer(index) for index in range(4)]}
    cluster.learners(**cluster.answers_held)
    await cluster.link()
    await cluster.all_ready()
    await cluster.step_to_version(2)
    good = min(newest_applied(cluster))
    await cluster.step_to_version(good + 2)
    await cluster.until(lambda: len(cluster.shard_heartbeats) == len(services), "all syncers are heard")
    [killed, frozen] = [name for name in services if cluster.shard_heartbeats[name].fragments]
    services[frozen].process.send_signal(signal.SIGSTOP)
    services[killed].process.send_signal(signal.SIGSTOP)
    ordered = asyncio.create_task(go_back(cluster, good))
    await asyncio.sleep(0)
    services[killed].kill()

    assert await ordered == 0

    services[frozen].process.send_signal(signal.SIGCONT)
    standbys = sorted(services.keys() - {killed, frozen})
    await until_owned_by(cluster, *standbys)
    at = newest_applied(cluster)
    # and once more, to what the run was after the first: by then there are two versions of that state
    await cluster.step_to_version(max(at) + 2)
    assert await go_back(cluster, max(at)) == 0
    cluster.gate.open()
    folded = await demand_one_run(cluster)
    assert rollbacks(folded) == {index: [(1, good), (2, max(at))] for index in range(4)}
    assert {entry.syncer for log in folded for entry in log.entries if entry.rolled_back} == set(standbys)


@pytest.mark.slow
async def test_a_learner_that_was_away_goes_on_from_where_the_run_went_and_not_from_what_it_had_saved(launch: Launch) -> None:
    cluster = launch(waiting_settings(steps=150, round__quorum=2, liveness__dead_s=scaled_s(10.0)))
    cluster.toy(0, **cluster.answers_held)
    cluster.toy(1, **cluster.answers_held)
    cluster.toy(2, checkpoint_s=0.2, leave_s=0.0, **cluster.answers_held)
    await cluster.begin(until_step=0)
    await cluster.step_to_version(4)
    good = min(newest_applied(cluster))
    await cluster.step_to_version(good + 2)
    leaver = cluster.toys[2]
    assert leaver.member is not None
    await cluster.step_until(leaver.member.step + 2)  # work that is not merged any more
    leaver.leave()
    await cluster.until(lambda: not leaver.running, "it has left")
    cluster.toys.remove(leaver)
    await cluster.until(lambda: cluster.heartbeats["toy-2"][-1].state == "left", "its last heartbeat")
    cluster.heartbeats.pop("toy-2")
    assert await go_back(cluster, good) == 0
    back = cluster.toy(2, **cluster.answers_held)
    await cluster.until(lambda: "toy-2" in cluster.heartbeats, "it is back")
    cluster.gate.open()
    assert cluster.events("checkpoint_restored", "toy-2")
    folded = await demand_one_run(cluster)
    assert back.finished
    for log in folded:
        [went_back] = [entry for entry in log.entries if entry.rolled_back]
        after = [entry for entry in log.versions if entry.version > went_back.version]
        bases = [member.base_version for entry in after for member in entry.members if member.learner == "toy-2"]
        assert bases
        assert min(bases) >= went_back.version


async def until_dropped(cluster: Cluster, version: int) -> None:
    """Wait until the first fragment's log does not have a version any more: its owner drops it behind a keyframe."""
    store, _ = await cluster.store()
    genesis = await store.reader.genesis()
    assert genesis is not None
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(RunError):
            while True:
                await store.reader.state_at(0, version, *genesis)
                await asyncio.sleep(0.1)


async def test_what_cannot_be_gone_back_to_is_refused_before_anything_is_ordered(launch: Launch) -> None:
    # a keyframe at every version, and of the log what is between the last two of them
    cluster = launch(waiting_settings(steps=60, log__keyframe_factor=0.001, log__keep_bytes=0))
    cluster.learners(**cluster.answers_held)
    await cluster.begin(until_step=0)
    await cluster.step_to_version(5)
    await until_dropped(cluster, 1)
    with pytest.raises(
        RunError, match=r"fragment 0: version 1 is not in the log, which has those from \d+ to the newest; how far"
    ):
        await go_back(cluster, 1)
    with pytest.raises(RunError, match="no fragment is beyond version 9999; they are at versions "):
        await go_back(cluster, 9999)
    cluster.gate.open()
    link = await cluster.link()
    registry = await link.bucket(cluster.subjects.bucket, create=False)
    assert await registry.get("changes") is None
    await cluster.ended()
    with pytest.raises(RunError, match="is ending: the logs of 4 of its 4 fragments are closed"):
        await go_back(cluster, 5)


def seen_of(path: Path, settings: RunSettings, *, live: bool = True) -> run_reader.RunReader:
    """A run of which nothing but its settings is to be looked at."""
    directory = RunDirectory(path, "run", "nats://127.0.0.1:1", None, settings)
    return run_reader.RunReader(directory, None, KnownRun("run", settings, None), None, None, None, b"", live, {}, {})  # type: ignore[arg-type]


def chain(fragment: int, version: int, **changes: Any) -> Chain:
    return Chain(fragment, version, 1, bytes(32), 0, bytes(32), **changes)


@pytest.mark.parametrize(
    ("chains", "version", "orders", "reason"),
    [
        ([chain(0, 5), chain(1, 7)], 7, {}, "no fragment is beyond version 7; they are at versions 5 to 7"),
        ([chain(0, 5), chain(1, 7, closed=True)], 4, {}, "the logs of 1 of its 2 fragments are closed; .* --resume-at 4$"),
        # fragment 0 would go on beyond 4 as soon as its owner came to its order
        (
            [chain(0, 5), chain(1, 7)],
            6,
            {0: (3, 4)},
            "change 3 takes fragments 0 back to version 4, but the owners have not done so yet",
        ),
        ([chain(0, 5, rolled_back=RolledBack(9, 2, 4))], 4, {}, "has carried out change 9, but the server has only 3 changes"),
        ([chain(0, 5), chain(1, 7)], 4, {0: (3, 2)}, ""),  # this one takes its place
        ([chain(0, 5, rolled_back=RolledBack(3, 2, 4)), chain(1, 7)], 6, {0: (3, 2)}, ""),
    ],
)
def test_what_is_refused_by_what_is_known(
    chains: list[Chain], version: int, orders: dict[int, tuple[int, int]], reason: str, tmp_path: Path
) -> None:
    seen = seen_of(tmp_path, waiting_settings())
    now = Effective(seen.run.created, 3, rollbacks=orders)
    beyond = [chain for chain in chains if chain.version > version]
    with pytest.raises(RunError, match=reason) if reason else contextlib.nullcontext():
        rollback._check(seen, version, now, chains, beyond)


async def test_where_a_run_cannot_go_back_it_is_told_another_way(tmp_path: Path) -> None:
    def refused(settings: RunSettings, *, live: bool) -> str:
        seen = seen_of(tmp_path, settings, live=live)
        with pytest.raises(RunError) as error:
            asyncio.run(rollback.order(seen, 3, "", print))
        return str(error.value)

    another_way = f"diloco up --run-dir NEW --resume {tmp_path} --resume-at 3"
    lockstep = await asyncio.to_thread(refused, small("data-parallel"), live=True)
    assert "trains in lockstep" in lockstep
    assert another_way in lockstep
    stopped = await asyncio.to_thread(refused, waiting_settings(), live=False)
    assert "run 'run' is not running" in stopped
    assert another_way in stopped


@pytest.mark.parametrize("merge", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_run_in_regions_goes_back_in_all_of_them(regions: Regions, merge: bool) -> None:
    changes = {"regions__merge": merge, "regions__away_s": 600.0, "liveness__dead_s": NEVER_S}
    run = await regions(apart(learners=6 if merge else 3, tokens=(6 if merge else 3) * 45 * SAMPLES, **WAITS, **changes))
    run.learners(**run.answers_held)
    await run.begin(until_step=0)
    await run.step_to_version(2)
    good = min(newest_applied(run))
    await run.step_to_version(good + 2)
    run.save()
    with run.slowly():
        run.gate.open()
        assert await asyncio.to_thread(rollback.rollback, run.directory, good, "") == 0
    await run.ended()
    read = {region: await run.read(region) for region in REGIONS}
    demand_one_log(*read.values())
    check_accounts(await run.finished_heartbeats(), read["us"])
    assert rollbacks(read["us"]) == {index: [(1, good)] for index in range(len(read["us"]))}
    verdict = await verify.check(run.directory)
    assert verdict.holds, verdict
