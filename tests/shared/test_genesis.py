"""Founding a run, in virtual time: one learner does, however long it takes, and another one if it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diloco.control import creation
from diloco.control.genesis import await_genesis, decision
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import RunError
from diloco.log.log import Log
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco.testing.virtual_transport import CONTROL
from diloco.testing.world import VirtualProcess, World

DEAD_S, FRAGMENTS = 5.0, 6
SETTINGS = run_settings("decoupled", {"fragments.count": FRAGMENTS, "liveness.dead_s": DEAD_S})
MAP = build_map([TensorSpec(f"w{index}", (8,)) for index in range(FRAGMENTS)], FRAGMENTS)


class Founding:
    """Two learners that would found a run; the first begins sooner, and takes so long to give each fragment."""

    def __init__(self, fragment_s: float, dies_s: float | None = None) -> None:
        self.fragment_s, self.dies_s = fragment_s, dies_s
        self.gave: dict[str, int] = {"ann": 0, "bob": 0}  # fragments
        self.founders: dict[str, str] = {}  # by learner: who founded the run, by the record that it found

    def play(self) -> None:
        world = World(1)
        for name in self.gave:
            process = VirtualProcess(world, name, CONTROL, self._serve)
            world.processes.append(process)
            process.start()
        if self.dies_s is not None:
            world.later(self.dies_s, world.processes[0].crash, "it dies")
        world.scheduler.run(1000.0)
        world.dispose()
        if world.error is not None:
            raise world.error

    async def _serve(self, process: Any) -> None:
        if process.name == "bob":
            await asyncio.sleep(1.0)
        run = await creation.create(process.transport, "run", SETTINGS)
        log = Log(process.transport, "run", run.identity, MAP, SETTINGS)

        async def initial(index: int) -> NDArray[np.float32]:
            self.gave[process.name] += 1
            await asyncio.sleep(self.fragment_s if process.name == "ann" else 0.0)
            return np.zeros(MAP.fragments[index].size, np.float32)

        genesis, _ = await await_genesis(run, log, process.name, initial, get_logger())
        self.founders[process.name] = genesis.founder


@pytest.mark.parametrize("fragment_s", [0.1, 0.9 * DEAD_S])  # the latter: 27 s in all
def test_a_founder_that_goes_on_is_not_replaced(fragment_s: float) -> None:
    founding = Founding(fragment_s)
    founding.play()
    assert founding.founders == {"ann": "ann", "bob": "ann"}
    assert founding.gave == {"ann": FRAGMENTS, "bob": 0}


@pytest.mark.parametrize("dies_s", [1.5, 2.5 * DEAD_S])
def test_one_that_is_gone_is_replaced(dies_s: float) -> None:
    founding = Founding(0.9 * DEAD_S, dies_s)
    founding.play()
    assert founding.founders == {"bob": "bob"}
    assert founding.gave["bob"] == FRAGMENTS


def test_of_two_that_found_it_the_slower_one_goes_by_the_other_ones_record() -> None:
    founding = Founding(3 * DEAD_S)  # so long it says nothing
    founding.play()
    assert founding.founders == {"ann": "bob", "bob": "bob"}
    assert founding.gave["ann"] < FRAGMENTS, "it learns that it was replaced, and gives no more"


def test_a_run_whose_log_was_purged_is_not_founded_again() -> None:
    world, said = World(1), list[str]()

    async def serve(process: Any) -> None:
        run = await creation.create(process.transport, "run", SETTINGS)
        log = Log(process.transport, "run", run.identity, MAP, SETTINGS)

        async def initial(index: int) -> NDArray[np.float32]:
            return np.zeros(MAP.fragments[index].size, np.float32)

        await await_genesis(run, log, "ann", initial, get_logger())
        await process.transport.purge(log.subjects.log_stream, ">", 2**62)
        with pytest.raises(RunError) as refused:
            await await_genesis(run, log, "ann", initial, get_logger())
        said.append(str(refused.value))
        assert await log.reader.genesis() is None

    play_alone(world, serve)
    [reason] = said
    assert reason.startswith("run 'run': the bucket's key 'genesis' says that the run was founded, but its log is empty")
    assert "diloco up --resume" in reason


def test_a_founder_that_dies_between_the_key_and_the_record_is_completed() -> None:
    world, founders = World(1), list[str]()

    async def serve(process: Any) -> None:
        run = await creation.create(process.transport, "run", SETTINGS)
        log = Log(process.transport, "run", run.identity, MAP, SETTINGS)
        hashes = [await log.writer.append_first(f.index, np.ones(f.size, np.float32)) for f in MAP.fragments]

        async def dies(frame: bytes) -> bool:
            await decision(run)(frame)
            return False  # the record is never stored

        await log.writer.conclude("ann", SETTINGS.digest(), hashes, dies)
        assert await log.reader.genesis() is None
        genesis, _ = await await_genesis(run, log, "bob", None, get_logger())
        founders.append(genesis.founder)
        assert list(genesis.fragments) == hashes

    play_alone(world, serve)
    assert founders == ["ann"]


def play_alone(world: World, serve: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    process = VirtualProcess(world, "ann", CONTROL, serve)
    world.processes.append(process)
    process.start()
    world.scheduler.run(1000.0)
    world.dispose()
    if world.error is not None:
        raise world.error
