"""Checkpoints of a run whose learners are on other machines: what is stated, collected, and dropped."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, small, some_versions
from tests.services.toy import SAMPLES, STEP_S, Regression

import diloco
from diloco.control import creation
from diloco.control.whole import WholeCheckpoints, read_whole
from diloco.errors import RunError
from diloco.states.statefolder import StateFolder
from diloco_learner.tensors import Kind, Tensor
from diloco_ops.checkpoints import checkpoint, collecting, manifest
from diloco_ops.reading.attach import attached
from diloco_ops.up import resume

pytestmark = pytest.mark.usefixtures("patient_commands")
KINDS: dict[str, Kind] = {"linear/weight": "matrix", "linear/bias": "vector", "table": "embedding"}  # of the toys' tensors


class OwnLoop(threading.Thread):
    """A training loop that joins a run, and keeps whatever checkpoints it likes by itself."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(name="own-loop")
        self.cluster, self.ends = cluster, threading.Event()

    def run(self) -> None:
        params = dict(Regression(self.cluster.settings).tensors)
        with diloco.join(
            self.cluster.url, run=self.cluster.name, name="own-loop", params=params, tokens=SAMPLES,
            within_s=DEADLINE_S, tensor=lambda path, shape: Tensor(kind=KINDS[path]),
        ) as joined:  # fmt: skip
            params = joined.params
            for _ in joined.batches(_samples):
                if self.ends.is_set():
                    break
                time.sleep(STEP_S)
                params = joined.step(params, loss=1.0)


def _samples(share: int, shares: int, seed: int, start: int) -> Iterator[tuple[int, int]]:
    return ((share, index) for index in itertools.count(start))


async def taken(path: Path) -> tuple[list[str], list[str]]:
    """Take a checkpoint, and return the learners whose states are elsewhere, and what was said."""
    said: list[str] = []
    return await checkpoint.take_and_tell(path, say=said.append), said


async def whole_numbers(run: Cluster) -> WholeCheckpoints | None:
    return await read_whole((await creation.open_run(await run.link(), run.name, run.settings)).registry)


async def test_states_on_other_machines_are_collected_and_older_ones_are_dropped(launch: Launch, tmp_path: Path) -> None:
    run = launch(small(tokens=10**9))
    await run.begin()
    loop = OwnLoop(run)
    loop.start()
    try:
        await run.until(lambda: "own-loop" in run.heartbeats, "the loop has joined")
        await some_versions(run, more=1)
        seen = tmp_path / "seen"  # the operator's machine: learners' disks are elsewhere
        await attached(seen, run.name, run.url)

        numbers, paths = [], []
        for taking in (1, 2, 3):
            with run.slowly():
                absent, said = await taken(seen)
            assert absent == ["toy-0", "toy-1", "toy-2"]
            assert "with checkpoints of their own: own-loop" in said
            assert not any("own-loop" in line for line in said if line.startswith("note: "))
            newest = manifest.load(max(manifest.numbered(seen / manifest.FOLDER).items())[1])
            number = newest.manifest.number
            assert number is not None
            numbers.append(number)
            paths.append(newest.path)  # an attempt that was given up has a number, too, and leaves no folder
            assert said[-1].endswith(f"then: diloco checkpoint collect {newest.path} FOLDER...")
            with pytest.raises(RunError, match="the states of toy-0, toy-1, toy-2 are on other machines"):
                newest.check()
            if taking < 3:
                assert await collecting.collect(newest.path, [run.directory], said.append) == 0
                newest.check()
        assert await whole_numbers(run) == WholeCheckpoints(numbers[1], numbers[0])

        with run.slowly():
            await taken(seen)  # on hearing its marker learners drop what is superseded

        def kept() -> set[int]:
            return set(StateFolder(run.directory, "toy-0").snapshots())

        await run.until(lambda: min(kept()) == numbers[0], "states of attempts before the whole ones are gone")
        assert {numbers[0], numbers[1], numbers[2]} <= kept()
        assert not {number for number in kept() if numbers[0] < number < numbers[1]}
        found = await asyncio.to_thread(resume.find, paths[1])
        assert sorted(found.checkpoint.manifest.learners) == ["toy-0", "toy-1", "toy-2"]
        assert found.checkpoint.manifest.keep_own == ["own-loop"]
    finally:
        loop.ends.set()
        await asyncio.to_thread(loop.join)
