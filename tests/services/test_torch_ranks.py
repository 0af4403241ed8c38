"""Loops of PyTorch of several ranks, sharded in any way, are learners of a run beside others."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.fixtures import Launch
from tests.made.joining_processes import beside_services, ended, ended_at_last
from tests.made.rank_processes import rank_environments
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, Folded, check_accounts, fold_fragments, small

from diloco.errors import IslandError

pytest.importorskip("torch", reason="torch is not installed: make torch")

PROGRAM = Path(__file__).with_name("torch_ranks.py")
OF_JAX = Path(__file__).with_name("jax_loop.py")


class Ranks:
    """Starts the ranks of loops."""

    def __init__(self, cluster: Cluster, folder: Path, started: list[asyncio.subprocess.Process]) -> None:
        self.cluster, self.folder, self.started = cluster, folder, started

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    async def start(self, kind: str, world: int, name: str, *more: str) -> list[asyncio.subprocess.Process]:
        command = [sys.executable, str(PROGRAM), kind, self.cluster.url, self.cluster.name, name, str(self.out(name)), *more]
        pipe = asyncio.subprocess.PIPE
        begun = [
            await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe)
            for environment in rank_environments(world)
        ]
        self.started += begun
        return begun

    async def start_jax(self, name: str, abreast: int) -> asyncio.subprocess.Process:
        pipe, about = asyncio.subprocess.PIPE, (self.cluster.url, self.cluster.name, name, str(self.out(name)), str(abreast))
        process = await asyncio.create_subprocess_exec(sys.executable, str(OF_JAX), *about, stdout=pipe, stderr=pipe)
        self.started.append(process)
        return process

    def result(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        out = self.out(name)
        return json.loads(out.read_text()), dict(np.load(out.with_suffix(".npz")))


@asynccontextmanager
async def ranks_of(cluster: Cluster, folder: Path) -> AsyncIterator[Ranks]:
    """Begin the run's services, and yield what starts ranks."""
    async with beside_services(cluster) as started:
        yield Ranks(cluster, folder, started)


async def all_step(*processes: asyncio.subprocess.Process) -> list[str]:
    """Wait until each process has taken a step; return what it has said until then."""
    return await all_say("stepping\n", *processes)


async def all_say(what: str, *processes: asyncio.subprocess.Process) -> list[str]:
    """Wait until each process has printed a line with this; return what it has said until then."""
    said = []
    async with asyncio.timeout(DEADLINE_S):
        for process in processes:
            assert process.stdout is not None
            lines = list[bytes]()
            while not lines or what.encode() not in lines[-1]:
                lines.append(await process.stdout.readline())
                assert not process.stdout.at_eof(), lines
            said.append(b"".join(lines).decode())
    return said


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("tensor", 4), ("pipeline", 2)])
async def test_ranks_that_share_a_model_in_any_way_end_as_the_log_does(
    launch: Launch, tmp_path: Path, kind: str, world: int
) -> None:
    cluster = launch(small(learners=2))
    async with ranks_of(cluster, tmp_path) as ranks:
        abreast = "--abreast", str(world + 1)
        started = [*await ranks.start(kind, world, "island", *abreast), *await ranks.start("plain", 1, "alone", *abreast)]
        for code, err in await ended(*started):
            assert code == 0, err
    await ended_as_the_log(cluster, ranks, "island", "alone")


async def ended_as_the_log(cluster: Cluster, ranks: Ranks, *names: str) -> None:
    """Check that the loops end with the run's model, bit for bit, and that each is merged and has learned something."""
    await cluster.ended()
    folded = await cluster.folded()
    model = await cluster.tensors(folded)
    for name in names:
        about, values = ranks.result(name)
        assert about["losses"][-1] < about["losses"][0]
        assert values.keys() == model.keys()
        for path, tensor in model.items():
            np.testing.assert_array_equal(values[path], tensor.reshape(values[path].shape))
    merged = {member.learner for log in folded for record in log.versions for member in record.members}
    assert merged == set(names)


@pytest.mark.slow
async def test_loops_of_every_kind_are_learners_of_one_run(launch: Launch, tmp_path: Path) -> None:
    kinds = {"fsdp": 2, "ddp": 2, "hsdp": 4, "pipeline": 2, "plain": 1}
    processes = sum(kinds.values()) + 1
    cluster = launch(small(learners=len(kinds) + 1, tokens=60_000))
    async with ranks_of(cluster, tmp_path) as ranks:
        started = [await ranks.start_jax("jax", processes)]
        for kind, world in kinds.items():
            started += await ranks.start(kind, world, kind, "--abreast", str(processes))
        for code, err in await ended(*started):
            assert code == 0, err
    await ended_as_the_log(cluster, ranks, "jax", *kinds)


async def test_ranks_learn_as_one_process_does(launch: Launch, tmp_path: Path) -> None:
    losses = []
    for kind, world in (("plain", 1), ("fsdp", 2)):
        # what a version makes of its one learner's work is that work, at whatever step it comes
        plain_outer: dict[str, Any] = {
            "outer__learning_rate": 1.0,
            "outer__momentum": 0.0,
            "codec__offer_bits": 32,
            "codec__record_bits": 32,
        }
        cluster = launch(small(learners=1, tokens=200 * 16, **plain_outer))
        async with ranks_of(cluster, tmp_path) as ranks:
            for code, err in await ended(*await ranks.start(kind, world, kind)):
                assert code == 0, err
        losses.append(ranks.result(kind)[0]["losses"])
        await cluster.ended()
    assert len(losses[0]) == 200
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-4)


async def test_a_rank_that_is_killed_ends_the_others_and_all_begin_again_together(launch: Launch, tmp_path: Path) -> None:
    cluster = launch(small(learners=2, tokens=200_000))
    async with ranks_of(cluster, tmp_path) as ranks:
        alone = await ranks.start("plain", 1, "alone")
        island = await ranks.start("fsdp", 2, "island")
        await all_step(*alone, *island)
        await until_merged(cluster, "island", 1)
        island[1].kill()
        (code, err), _ = await ended(*island)
        # within a collective of the loop's own, gloo sees it first
        assert code == IslandError.exit_code or (code == 1 and "third_party/gloo" in err), err
        assert "learner island, process 0: process 1 is gone" in err or "by peer" in err, err
        await ranks.start("fsdp", 2, "island")
        await until_merged(cluster, "island", 2)


async def test_a_rank_that_is_killed_while_all_join_ends_the_others(launch: Launch, tmp_path: Path) -> None:
    cluster = launch(small(learners=1))
    await cluster.link()
    async with ended_at_last() as started:
        island = await Ranks(cluster, tmp_path, started).start("ddp", 2, "island")
        await all_say("waiting_for_run", *island)  # none of the run's services is there to make it
        island[1].kill()
        (code, err), _ = await ended(*island)
        assert code == 1, err
        assert "IslandError: rank 0 of 2: rank 1 was lost while all ranks joined: no sign of life from it for 10 s" in err


async def until_merged(cluster: Cluster, name: str, incarnations: int) -> None:
    """Wait until work of so many processes of a learner's name is merged."""
    store, _ = await cluster.store()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            folded = await fold_fragments(store, cluster.settings, closed_by_now=False)
            members = [member for log in folded for record in log.versions for member in record.members]
            if len({member.incarnation for member in members if member.learner == name}) >= incarnations:
                return
            await asyncio.sleep(0.2)


@pytest.mark.parametrize(("what", "values"), [("tokens", ("16", "8")), ("versions", ("2.15.0", "2.14.0"))])
async def test_ranks_that_differ_are_refused(launch: Launch, tmp_path: Path, what: str, values: tuple[str, str]) -> None:
    cluster = launch(small(learners=1))
    async with ranks_of(cluster, tmp_path) as ranks:
        for code, err in await ended(*await ranks.start("ddp", 2, "island", f"--{what}", *values)):
            assert code != 0
            fact = {"versions": "torch"}.get(what, what)
            assert f"process 1 differs from process 0 in {fact}: {values[1]} there, {values[0]} at process 0" in err


async def test_ranks_with_data_of_their_own_leave_together_before_the_end(launch: Launch, tmp_path: Path) -> None:
    cluster = launch(small(learners=2, tokens=200_000))
    async with ranks_of(cluster, tmp_path) as ranks:
        await ranks.start("plain", 1, "alone", "--abreast", "3")
        for code, err in await ended(*await ranks.start("ddp", 2, "island", "--abreast", "3", "--own", "--most-steps", "40")):
            assert code == 0, err
        await cluster.until(lambda: cluster.heartbeats["island"][-1].state == "left", "the island has left")
    last = cluster.heartbeats["island"][-1]
    assert (last.step, last.tokens) == (40, 40 * 16), "no step counts that was only looked ahead to"
    assert set(last.steps) == {0}, "nothing is unmerged"


def check_each_batch_once(folded: list[Folded]) -> None:
    """No batch of a share is in two merges of a fragment."""
    for log in folded:
        merged = [
            (share, batch)
            for record in log.versions
            for member in record.members
            for share, first, count in member.data
            for batch in range(first, first + count)
        ]
        assert len(merged) == len(set(merged)), f"fragment {log.index}"


async def check_end(cluster: Cluster, ranks: Ranks, name: str) -> None:
    """Of a run that is over: no work of a learner was lost unknown, none merged twice, and its model is the log's."""
    folded = await cluster.folded()
    heard = await cluster.finished_heartbeats()
    check_accounts(heard, folded)
    check_each_batch_once(folded)
    about, values = ranks.result(name)
    assert heard[name].step == about["steps"] > len(about["losses"]), "it has counted on from its checkpoint"
    for path, tensor in (await cluster.tensors(folded)).items():
        np.testing.assert_array_equal(values[path], tensor.reshape(values[path].shape))


async def test_a_loop_that_is_killed_goes_on_from_its_own_checkpoint_as_the_same_learner(
    launch: Launch, tmp_path: Path
) -> None:
    cluster = launch(small(learners=2, tokens=10**9))
    saved = "--checkpoints", str(tmp_path / "saved")
    async with ranks_of(cluster, tmp_path) as ranks:
        other = await ranks.start("plain", 1, "other")
        for incarnation in (1, 2, 3):
            [loop] = await ranks.start("plain", 1, "loop", *saved)
            await all_step(loop)
            await until_merged(cluster, "loop", incarnation)
            await cluster.until((tmp_path / "saved" / "newest").exists, "it has saved itself")
            if incarnation < 3:
                loop.kill()
        await cluster.use_up()
        for code, err in await ended(loop, *other):
            assert code == 0, err
    await check_end(cluster, ranks, "loop")


@pytest.mark.parametrize(("kind", "then", "ranks_then"), [("fsdp", "fsdp", 2), ("ddp", "plain", 1), ("fsdp", "fsdp", 4)])
async def test_ranks_go_on_from_their_own_checkpoint_also_as_another_number(
    launch: Launch, tmp_path: Path, kind: str, then: str, ranks_then: int
) -> None:
    first = await begin_again(launch(small(learners=2, tokens=10**9)), tmp_path, kind, then, ranks_then, "--partly")
    assert ("loop_state_incomplete" in first) == (ranks_then != 2)


async def test_files_of_all_ranks_are_put_together_for_another_number(launch: Launch, tmp_path: Path) -> None:
    first = await begin_again(launch(small(learners=2, tokens=10**9)), tmp_path, "ddp", "plain", 1, "--by-rank")
    assert "loop_state_incomplete" not in first, "nothing of any rank is dropped"


async def begin_again(cluster: Cluster, tmp_path: Path, kind: str, then: str, ranks_then: int, how: str) -> str:
    """Kill an island of two ranks that has saved itself, and start it again; return what it has said until it stepped."""
    saved = "--checkpoints", str(tmp_path / "saved"), how
    async with ranks_of(cluster, tmp_path) as ranks:
        other = await ranks.start("plain", 1, "other")
        island = await ranks.start(kind, 2, "island", *saved)
        await all_step(*island, *other)
        await until_merged(cluster, "island", 1)
        await cluster.until((tmp_path / "saved" / "newest").exists, "it has saved itself")
        island[1].kill()
        await ended(*island)
        again = await ranks.start(then, ranks_then, "island", *saved)
        first, *_ = await all_step(*again)
        assert "loop_state_restored" in first
        await until_merged(cluster, "island", 2)
        await cluster.use_up()
        for code, err in await ended(*again, *other):
            assert code == 0, err
    await check_end(cluster, ranks, "island")
    return first
