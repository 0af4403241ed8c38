"""Checkpoints of several processes: which parts are kept, and from which checkpoint all of them begin again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from blake3 import blake3
from structlog.testing import capture_logs
from tests.pace import DEADLINE_S

from diloco.core.run.tape import Restored, TapeEvent
from diloco.core.tensors.chunks import Chunk
from diloco.member.peer import Lendable
from diloco.process.observe import get_logger
from diloco.processes.follower import Follower
from diloco.processes.group import Group
from diloco.processes.leader import Leader
from diloco.processes.meeting import free_port
from diloco.processes.part import Part, Saving
from diloco.settings.service import LearnerSettings, ProcessesSettings
from diloco.states import state
from diloco.states.state import Content, Saved
from diloco.states.statefolder import StateFolder
from diloco.wire.process_messages import Pending, Purpose, Save, facts
from diloco_learner.jax.island import Island
from diloco_learner.run.checkpoint import check
from diloco_learner.run.parts import PartKeeper, restore
from diloco_learner.run.process import LearnerProcess, LoopThread

RUN = b"\x05" * 8
PENDING = [[], [Pending((3, 4), 8, False)]]
LOGS = 100.0  # base of a fragment as the log has it


class Carrier:
    """Plays the carrier of one fragment, whose base is one number."""

    def __init__(self, index: int) -> None:
        self.fragments = [index]
        self.base = -1.0

    def loaded(self, offers: Any, arrays: Any, bare: Any) -> Any:
        assert offers == PENDING
        return LOGS if self.fragments[0] in bare else arrays[f"accounts/{self.fragments[0]}/base"][0]

    def restore(self, base: Any) -> None:
        self.base = float(base)


class Accounts:
    """Plays the leader, and its member."""

    def __init__(self) -> None:
        self.step, self.whole, self.fails = 0, "", False
        self.recorded: list[TapeEvent] = []
        self.tape = SimpleNamespace(record=self.recorded.append)
        self.member = self  # its accounts are the leader's

    def unmerged_of(self, plain: dict[str, Any], bare: Any) -> list[list[Pending]]:
        return PENDING

    def restore(self, plain: dict[str, Any], arrays: Any, bare: Any) -> None:
        if self.fails:
            raise ValueError("its accounts are not of this model")
        self.step = plain["step"]

    def note_restored(self, name: str) -> None:
        self.whole = name


class EmptyBucket:
    """Plays a run's bucket that names no whole checkpoint."""

    async def get(self, key: str) -> None:
        return None


class Member:
    """Plays a process's member that is told what to save."""

    def __init__(self, index: int) -> None:
        self.saving: Saving | None = None
        self.ended: list[Saved | None] = []
        self.hashes: list[bytes] = []
        self.lent: dict[int, Lendable] = {}
        keep = SimpleNamespace(keep=self.lent.__setitem__)
        group = SimpleNamespace(place=index, size=2, missed=False)
        run = SimpleNamespace(identity=RUN, registry=EmptyBucket())
        at_once = SimpleNamespace(call_soon_threadsafe=lambda spawn, work: asyncio.run(work))
        self.part = SimpleNamespace(group=group, run=run, lent=keep, loop=at_once, tasks=SimpleNamespace(spawn=None))

    def part_saved(self, saving: Saving, saved: Saved | None, content_hash: bytes) -> None:
        self.ended.append(saved)
        self.hashes.append(content_hash)


class Halves:
    """An island whose first tensor is split over two processes; each has all of the second one. It plays no device."""

    def __init__(self, index: int | None) -> None:
        """Begin with zeros, as one of the two processes; None: as the only one."""
        rows = (0, 4) if index is None else (2 * index, 2 * index + 2)
        self.chunks = [
            Chunk("params/w", (4, 3), "float32", (rows[0], 0), (rows[1], 3)),
            Chunk.whole("params/b", (2,), "float32"),
        ]
        self.values = {chunk: np.zeros(chunk.lengths, np.float32) for chunk in self.chunks}

    def step(self) -> None:
        for values in self.values.values():
            values += 1

    def capture(self, *, optimizer_only: bool = False) -> Any:
        copied = [self.values[chunk].copy() for chunk in self.chunks]
        return SimpleNamespace(content=Content(self.chunks, copied), held=False)

    def wanted(self, *, optimizer_only: bool = False) -> list[Chunk]:
        return self.chunks

    def put(self, chunk: Chunk, values: Any) -> None:
        self.values[chunk] = values

    def check_state(self, layout: Any) -> None:
        assert layout == {
            name: Chunk.whole(name, shape, "float32") for name, shape in (("params/b", (2,)), ("params/w", (4, 3)))
        }


class Saved2:
    """Two processes that save what a leader decides."""

    def __init__(self, folders: list[Path]) -> None:
        self.generation, self.number = 7, 0
        self.islands, self.members = [Halves(index) for index in (0, 1)], [Member(index) for index in (0, 1)]
        self.keepers = [
            PartKeeper(
                cast(Island, island), cast(Follower, member), LearnerSettings(name="ann", state_dir=folder), get_logger()
            )
            for island, member, folder in zip(self.islands, self.members, folders, strict=True)
        ]

    def save(self, whole: str = "", *, killed: int | None = None, purpose: Purpose = "own") -> str:
        """Take a step and save; a process that is killed does not come to it. Return the checkpoint's name."""
        self.number += 1
        name = f"{self.generation}, boundary {self.number}"
        for index, (island, member, keeper) in enumerate(zip(self.islands, self.members, self.keepers, strict=True)):
            island.step()
            accounts = {"step": self.number} if index == 0 else {}
            arrays = {f"accounts/{index}/base": np.full(3, self.number, np.float32)}
            member.saving = Saving(self.number, Save(purpose, name, whole, 4 if purpose == "whole" else 0), accounts, arrays)
            if index != killed:
                keeper.at_boundary()
                keeper.saver.settle()
        return name


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


class Again:
    """Two processes that begin again, with folders of their own or one."""

    def __init__(self, loop: LoopThread, folders: list[Path], *, fails: bool = False) -> None:
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self.accounts, self.carriers = Accounts(), [Carrier(0), Carrier(1)]
        self.accounts.fails = fails
        self.islands = [Halves(index) for index in (0, 1)]
        self.done: list[bool | None] = [None, None]
        self.problems: list[BaseException] = []
        groups: list[Group] = []

        def begin(index: int) -> None:
            settings = LearnerSettings(
                name="ann", state_dir=folders[index], processes=ProcessesSettings(count=2, index=index, address=address)
            )

            async def meet() -> Group:
                group = Group(settings, RUN, get_logger())
                groups.append(group)
                await group.meet(facts({}), 8)
                return group

            try:
                group = loop.run(meet(), lambda: False)
                run = SimpleNamespace(identity=RUN)
                asking = SimpleNamespace(
                    settings=settings, run=run, log=get_logger(), wait=lambda work: loop.run(work, lambda: False)
                )
                process = cast(LearnerProcess, asking)
                part = cast(Part, SimpleNamespace(group=group, carrier=self.carriers[index], run=run))
                leader = cast(Leader, self.accounts) if index == 0 else None
                self.done[index] = restore(process, cast(Island, self.islands[index]), part, leader)
            except BaseException as error:
                self.problems.append(error)

        threads = [threading.Thread(target=begin, args=(index,)) for index in (0, 1)]
        with capture_logs() as self.logs:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
        for group in groups:
            group.ending()
        for group in groups:
            loop.run(group.close(), lambda: False)
        assert self.problems == []

    @property
    def refused(self) -> list[str]:
        return [entry["reason"] for entry in self.logs if entry["event"] == "checkpoint_refused"]

    def began_from(self, step: int, bases: tuple[float, float] | None = None) -> None:
        assert self.done == [True, True]
        assert self.accounts.step == step
        assert tuple(carrier.base for carrier in self.carriers) == (bases or (step, step))
        assert [type(event) for event in self.accounts.recorded] == [Restored]
        for island in self.islands:
            for values in island.values.values():
                np.testing.assert_array_equal(values, step)


def test_all_begin_from_the_newest_checkpoint_of_which_all_parts_are_there(tmp_path: Path, loop: LoopThread) -> None:
    saving = Saved2([tmp_path, tmp_path])
    first = saving.save()
    saving.save(whole=first, killed=1)
    again = Again(loop, [tmp_path, tmp_path])
    again.began_from(1)
    assert again.accounts.whole == first
    [reason] = again.refused
    assert "is missing from" in reason


def keep(folder: Path, step: int) -> str:
    """What the leader of three keeps of a step, of which all have died that carried fragment 1; return its name."""
    content = Content([Chunk.whole("params/w", (4, 3), "float32")], [np.full((4, 3), step, np.float32)])
    small = {"params/b": np.full(2, step, np.float32), "accounts/0/base": np.full(3, step, np.float32)}
    name, accounts = f"7, kept at boundary {step}", {"step": step, "fragments": [{}, {}]}
    part = state.StateFilePart(0, 3, name)
    state.save(StateFolder(folder, "ann").kept(), RUN, "ann", accounts, content + Content.of(small), part=part)
    return name


def test_all_begin_from_what_was_kept_though_parts_are_missing_until_there_is_a_newer_checkpoint(
    tmp_path: Path, loop: LoopThread
) -> None:
    saving = Saved2([tmp_path, tmp_path])
    saving.save()
    name = keep(tmp_path, 9)
    again = Again(loop, [tmp_path, tmp_path])
    again.began_from(9, bases=(9, LOGS))
    assert again.accounts.whole == name
    saving.generation = 8
    newer = saving.save(whole=name)
    assert StateFolder(tmp_path, "ann").kept().exists(), "all parts have it, and not yet the state that is saved now"
    Again(loop, [tmp_path, tmp_path]).began_from(2)
    saving.save(whole=newer)
    assert not StateFolder(tmp_path, "ann").kept().exists()


def test_a_process_that_cannot_save_leaves_the_others_with_the_one_that_all_have(tmp_path: Path, loop: LoopThread) -> None:
    saving = Saved2([tmp_path, tmp_path])
    first = saving.save()
    for _ in range(3):  # its disk is full
        saving.save(whole=first, killed=1)
    assert [member.ended.count(None) for member in saving.members] == [0, 0]
    Again(loop, [tmp_path, tmp_path]).began_from(1)


def test_parts_that_another_host_has_are_asked_for_by_name(tmp_path: Path, loop: LoopThread) -> None:
    Saved2([tmp_path / "0", tmp_path / "0"]).save()
    again = Again(loop, [tmp_path / "0", tmp_path / "1"])
    assert again.done == [False, False]
    [reason] = again.refused
    assert "process 1 differs from process 0 in checkpoint: " in reason
    assert "no part of checkpoint '7, boundary 1' of ann found" in reason


def test_on_hosts_of_their_own_each_begins_from_its_part(tmp_path: Path, loop: LoopThread) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    Saved2(folders).save()
    Again(loop, folders).began_from(1)


def test_accounts_that_do_not_fit_are_taken_over_by_nobody(tmp_path: Path, loop: LoopThread) -> None:
    Saved2([tmp_path, tmp_path]).save()
    again = Again(loop, [tmp_path, tmp_path], fails=True)
    assert again.done == [False, False]
    assert again.refused == ["its accounts are not of this model"]
    assert [carrier.base for carrier in again.carriers] == [-1, -1]


def test_a_part_for_a_whole_run_is_known_by_its_files_hash_and_replaces_none_of_the_own(tmp_path: Path) -> None:
    saved = Saved2([tmp_path, tmp_path])
    saved.save()
    own = [StateFolder(tmp_path, "ann").generations(index)[0].read_bytes() for index in (0, 1)]
    saved.save(purpose="whole")
    for index, member in enumerate(saved.members):
        raw = StateFolder(tmp_path, "ann").snapshot(4, index).read_bytes()
        assert member.hashes[-1] == blake3(raw).digest()
        assert StateFolder(tmp_path, "ann").generations(index)[0].read_bytes() == own[index]
    assert state.load(StateFolder(tmp_path, "ann").snapshot(4), RUN, "ann").missing == 0


def test_a_part_that_is_lent_is_kept_until_it_is_dropped(tmp_path: Path) -> None:
    saved = Saved2([tmp_path, tmp_path])
    saved.save(purpose="loan")
    for index, member in enumerate(saved.members):
        lent = member.lent[1]
        assert member.hashes == [lent.content_hash]
        np.testing.assert_array_equal(lent.read(saved.islands[index].chunks[0]), 1)
        assert len(list(StateFolder(tmp_path, "ann").loans(index).iterdir())) == 1
        lent.drop()
        assert not list(StateFolder(tmp_path, "ann").loans(index).iterdir())


def test_without_any_all_begin_from_the_log(tmp_path: Path, loop: LoopThread) -> None:
    again = Again(loop, [tmp_path, tmp_path])
    assert again.done == [False, False]
    assert again.refused == []


def test_the_parts_of_two_processes_are_read_by_one(tmp_path: Path) -> None:
    Saved2([tmp_path, tmp_path]).save()
    loaded = state.load(StateFolder(tmp_path, "ann").generations()[0], RUN, "ann")
    assert loaded.accounts == {"step": 1}
    assert {name for name in loaded.layout() if name.startswith("accounts/")} == {"accounts/0/base", "accounts/1/base"}
    check(loaded, cast(Island, Halves(None)))
    for values in loaded.arrays("params/").values():
        np.testing.assert_array_equal(values, 1)
