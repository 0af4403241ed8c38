"""A learner's checkpoints: what is saved is the state as of a boundary, and what is restored is the newest that is whole."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray
from structlog.testing import capture_logs
from tests.made.trainer_script import SETTINGS, Slope
from tests.pace import DEADLINE_S

from diloco.core.learner.learner import Dump
from diloco.core.learner.markers import MarkerReply
from diloco.core.run.tape import Borrowed, Copied, Restored, TapeEvent
from diloco.errors import RunError
from diloco.member.member import Member
from diloco.member.peer import Lendable
from diloco.process import files
from diloco.process.observe import get_logger
from diloco.settings.run import ContinuedRun
from diloco.settings.service import LearnerSettings
from diloco.states import state, statefolder
from diloco.states.state import Content
from diloco.states.statefolder import StateFolder
from diloco.wire.control import MarkerAnswer, MarkerDeclined, SnapshotMarker
from diloco_learner.jax import holding
from diloco_learner.jax.island import Island
from diloco_learner.run import checkpoint
from diloco_learner.run.checkpoint import CheckpointKeeper, own_states, restore

RUN = b"\x05" * 8


class Bookkeeper:
    """Plays a member whose accounts are its number of steps and one array."""

    def __init__(self) -> None:
        self.run, self.lender = SimpleNamespace(identity=RUN), SimpleNamespace(wanted=False)
        self.admission = SimpleNamespace(incarnation=1)
        self.step = 0
        self.busy = False  # a fragment is being encoded
        self.marker: SnapshotMarker | None = None
        self.answers: list[MarkerReply] = []
        self.saved: list[bytes] = []
        self.lent: list[tuple[int, list[int], Lendable]] = []
        self.recorded: list[TapeEvent] = []
        self.tape = SimpleNamespace(record=self.recorded.append)

    def dump(self) -> Dump | None:
        return None if self.busy else self.checkpoint()

    def checkpoint(self) -> Dump:
        self.recorded.append(Copied())
        return {"step": self.step}, {"accounts/0/base": np.full(3, self.step, np.float32)}

    def versions(self) -> list[int]:
        return [self.step]

    def marker_due(self) -> SnapshotMarker | None:
        return self.marker

    def note_copied(self, marker: SnapshotMarker) -> None:
        assert marker is self.marker

    def answer_marker(self, answer: MarkerReply) -> None:
        self.answers.append(answer)
        self.marker = None

    def note_saved(self, digest: bytes) -> None:
        self.saved.append(digest)

    def lend(self, step: int, versions: list[int], state: Lendable) -> None:
        self.lender.wanted = False
        self.lent.append((step, versions, state))

    def restore(self, plain: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        np.testing.assert_array_equal(arrays["accounts/0/base"], np.full(3, plain["step"], np.float32))
        self.step = plain["step"]


class Rig:
    """An island, its keeper, and a folder."""

    def __init__(self, folder: Path, *, checkpoint_s: float = 1e-9) -> None:
        self.island, self.accounts = Island(Slope(), SETTINGS), Bookkeeper()
        self.settings = LearnerSettings(name="ann", state_dir=folder, checkpoint_s=checkpoint_s)
        self.keeper = CheckpointKeeper(self.island, cast(Member, self.accounts), self.settings, get_logger())
        self.path, self.previous = StateFolder(folder, "ann").generations()

    def step(self) -> dict[str, NDArray[Any]]:
        """One step, and its boundary; the state then."""
        self.island.step(np.float32(1), 0.1).wait()
        self.accounts.step += 1
        now = self.island.state()
        self.keeper.at_boundary()
        return now

    def settle(self) -> None:
        """Wait until what was begun is done."""
        if self.keeper.saver.job is not None:
            self.keeper.saver.job.result()

    def restored(self) -> tuple[bool, list[str]]:
        """Whether another process of this learner goes on from a checkpoint, and what it logs."""
        self.again = Island(Slope(), SETTINGS)
        self.accounts_again = Bookkeeper()
        with capture_logs() as logs:
            states = own_states(self.settings, self.again, RUN, get_logger())
            done = restore(states, self.again, cast(Member, self.accounts_again), get_logger())
        return done, [f"{entry['event']} {Path(entry['file']).name}" for entry in logs]

    def check(self, expected: dict[str, NDArray[Any]], step: int) -> None:
        assert self.accounts_again.step == step
        for name, values in self.again.state().items():
            np.testing.assert_array_equal(values, expected[name], strict=True)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_checkpoint_is_the_state_as_of_its_boundary(rig: Rig) -> None:
    at_boundary = rig.step()
    for _ in range(5):  # it is written while training goes on
        rig.island.step(np.float32(1), 0.1).wait()
    rig.settle()
    assert rig.restored() == (True, ["checkpoint_restored ann.safetensors"])
    rig.check(at_boundary, 1)
    assert rig.accounts.recorded == [Copied()]
    assert rig.accounts_again.recorded == [Restored(rig.accounts.saved[0])]


def test_no_boundary_waits_for_the_one_before(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, save = threading.Event(), threading.Event(), state.save

    def slowly(*arguments: Any) -> state.Saved:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        return save(*arguments)

    monkeypatch.setattr(state, "save", slowly)
    first = rig.step()
    assert begun.wait(DEADLINE_S)
    for _ in range(3):
        rig.step()
    assert rig.accounts.recorded == [Copied()]  # nothing more was begun
    may_end.set()
    rig.settle()
    assert rig.restored()[0]
    rig.check(first, 1)


def test_a_fragment_that_is_being_encoded_puts_it_off(rig: Rig) -> None:
    rig.accounts.busy = True
    rig.step()
    rig.settle()
    assert not rig.path.exists()
    rig.accounts.busy = False
    rig.step()
    rig.settle()
    assert rig.path.exists()


def test_one_that_holds_steps_up_puts_off_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(checkpoint, "time", clock)
    rig = Rig(tmp_path, checkpoint_s=10.0)

    def step(step_s: float) -> None:
        clock.now_s += step_s
        rig.step()
        rig.settle()

    for _ in range(10):
        step(1.0)  # saved at 10 s
    assert len(rig.accounts.recorded) == 1
    step(3.0)  # 2 s longer than usual: no other one before 13 + 50 * 2 = 113 s
    for _ in range(99):
        step(1.0)
    assert len(rig.accounts.recorded) == 1
    step(1.0)
    assert len(rig.accounts.recorded) == 2


def test_a_loan_that_held_steps_up_puts_off_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(checkpoint, "time", clock)
    rig = Rig(tmp_path, checkpoint_s=0.0)
    lender = rig.accounts.lender
    lender.give_none = lambda: setattr(lender, "wanted", False)

    def step(step_s: float, *, wanted: bool = False) -> int:
        lender.wanted = wanted
        clock.now_s += step_s
        rig.step()
        rig.settle()
        assert not lender.wanted
        return len(rig.accounts.lent)

    for _ in range(10):
        assert step(1.0) == 0
    assert step(1.0, wanted=True) == 1
    assert step(3.0) == 1  # 2 s longer than usual: no other one for 100 s
    assert step(99.0, wanted=True) == 1
    assert step(1.0, wanted=True) == 2


def test_none_but_the_last_where_no_interval_is_set(tmp_path: Path) -> None:
    rig = Rig(tmp_path, checkpoint_s=0.0)
    now = rig.step()
    rig.settle()
    assert not rig.path.exists()
    rig.keeper.save_last()
    assert rig.restored()[0]
    rig.check(now, 1)


def damage(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def of_another_run(path: Path) -> None:
    state.save(path, b"\x09" * 8, "ann", {"step": 9}, Content.of({}))


def of_another_model(path: Path) -> None:
    state.save(path, RUN, "ann", {"step": 9}, Content.of({"params/y": np.zeros(3, np.float32)}))


def of_nothing(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [damage, truncate, of_another_run, of_another_model, of_nothing])
def test_one_that_is_unfit_is_named_and_the_one_before_used(rig: Rig, spoil: Callable[[Path], None]) -> None:
    first = rig.step()
    rig.settle()
    rig.step()
    rig.settle()
    spoil(rig.path)
    invalid = rig.path.read_bytes()
    assert rig.restored() == (True, ["checkpoint_refused ann.safetensors", "checkpoint_restored ann.previous.safetensors"])
    rig.check(first, 1)
    assert rig.path.read_bytes() == invalid  # left alone
    spoil(rig.previous)
    done, said = rig.restored()
    assert not done
    assert said == ["checkpoint_refused ann.safetensors", "checkpoint_refused ann.previous.safetensors"]
    rig.check(Island(Slope(), SETTINGS).state(), 0)  # nothing of them was taken over


def test_a_crash_between_two_renames_leaves_the_one_before(rig: Rig) -> None:
    rig.step()
    rig.settle()
    second = rig.step()
    rig.settle()
    rig.path.replace(rig.previous)  # what a process did that died before it renamed its draft
    rig.path.with_name(f"{rig.path.name}.draft").write_bytes(b"half")
    assert rig.restored() == (True, ["checkpoint_restored ann.previous.safetensors"])
    rig.check(second, 2)


def test_without_any_nothing_is_said(rig: Rig) -> None:
    assert rig.restored() == (False, [])


def test_a_full_disk_ends_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rig.step()
    rig.settle()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with capture_logs() as logs, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for _ in range(3):
            rig.step()
            rig.settle()
    assert [entry["event"] for entry in logs] == ["checkpoint_not_saved"]  # once
    assert "No space left" in logs[0]["reason"]
    assert rig.restored()[0]
    rig.check(first, 1)
    last = rig.step()  # there is space again
    rig.settle()
    assert rig.restored()[0]
    rig.check(last, 5)


def test_a_mark_is_answered_with_a_file_of_its_own(tmp_path: Path) -> None:
    rig = Rig(tmp_path, checkpoint_s=0.0)
    rig.accounts.marker = SnapshotMarker(4, [1])
    rig.step()
    rig.settle()
    [answer] = rig.accounts.answers
    path = StateFolder(tmp_path, "ann").snapshot(4)
    raw = path.read_bytes()
    assert answer == MarkerAnswer("ann", 4, 1, [1], len(raw), blake3(raw).digest())
    assert not rig.path.exists()


def test_a_mark_at_a_full_disk_is_declined_once_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, checkpoint_s=0.0)
    rig.accounts.marker = SnapshotMarker(4, [1])

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        rig.step()
        rig.settle()
    assert rig.accounts.answers == [MarkerDeclined("ann", 4, "not_saved", "[Errno 28] No space left on device")]
    assert not StateFolder(tmp_path, "ann").snapshot(4).exists()


def test_a_peer_gets_the_optimizer_state_of_a_boundary(tmp_path: Path) -> None:
    rig = Rig(tmp_path, checkpoint_s=0.0)
    rig.accounts.lender.wanted = True
    now = rig.step()
    rig.island.step(np.float32(1), 0.1).wait()
    rig.settle()
    [(step, versions, lent)] = rig.accounts.lent
    assert (step, versions) == (1, [1])
    wholes = lent.layout.wholes()
    assert {whole.name for whole in wholes} == {name for name in now if name.startswith("optimizer/")}
    for whole in wholes:
        np.testing.assert_array_equal(lent.read(whole), now[whole.name], strict=True)
    assert len(list(StateFolder(tmp_path, "ann").loans().iterdir())) == 1
    lent.drop()
    assert not list(StateFolder(tmp_path, "ann").loans().iterdir())
    with pytest.raises(RunError, match="cannot be read"):
        lent.read(wholes[0])
    state.save(StateFolder(tmp_path, "ann").loans() / "7.safetensors", RUN, "ann", {}, Content.of({}))
    Rig(tmp_path)
    assert not StateFolder(tmp_path, "ann").loans().exists()  # what a process left behind that was killed


def test_where_no_copy_fits_the_next_step_waits_until_the_state_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "COPY_BYTES", 0)
    rig = Rig(tmp_path)
    begun, may_end, hash_of = threading.Event(), threading.Event(), files.replace

    def slowly(path: Path, write: Callable[[Path], None], previous: Path | None = None) -> None:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        hash_of(path, write, previous)

    monkeypatch.setattr(files, "replace", slowly)
    boundary = threading.Thread(target=rig.step)
    boundary.start()
    assert begun.wait(DEADLINE_S)
    boundary.join(0.05)
    assert boundary.is_alive()
    may_end.set()
    boundary.join(DEADLINE_S)
    at_boundary = rig.island.state()
    for _ in range(3):
        rig.island.step(np.float32(1), 0.1).wait()
    rig.settle()
    assert rig.restored()[0]
    rig.check(at_boundary, 1)


BEFORE = b"\x07" * 8  # identity of the run that this one continues


def beginner(rig: Rig, merged: list[str] | None = None, run: bytes = BEFORE) -> tuple[Member, list[TapeEvent]]:
    """A member of a run that continues another one, of which others' work is ``merged``; and what its tape has of states."""
    taken: list[TapeEvent] = []
    continues = ContinuedRun(run="old", identity=run.hex(), tokens=9, batches=[4])
    member = SimpleNamespace(
        run=SimpleNamespace(created=SETTINGS.model_copy(update={"continues": continues})),
        learner=SimpleNamespace(peers=lambda: merged),
        settings=rig.settings,
        tape=SimpleNamespace(record=taken.append),
        log=get_logger(),
    )
    member.note_state_before = partial(Member.note_state_before, cast(Member, member))
    return cast(Member, member), taken


def last_state(rig: Rig, name: str) -> dict[str, NDArray[Any]]:
    """Have the run before end with a state of a learner of this name, which is as the rig's is after one more step."""
    rig.island.step(np.float32(1), 0.1).wait()
    now = rig.island.state()
    path = statefolder.part_file(statefolder.states_before(rig.settings.state_dir), name, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    state.save(path, BEFORE, name, {"step": 9}, Content.of(now))
    return now


def of_optimizer(arrays: dict[str, NDArray[Any]]) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in arrays.items() if name.startswith("optimizer/")}


def test_a_run_that_continues_another_begins_with_the_optimizers_of_its_learners(rig: Rig) -> None:
    others, own = last_state(rig, "aaa"), last_state(rig, "ann")
    new, (member, taken) = Island(Slope(), SETTINGS), beginner(rig)
    fresh = new.state()
    assert of_optimizer(own) != of_optimizer(others) != of_optimizer(fresh)

    assert checkpoint.take_up(new, member, rig.settings.state_dir, get_logger())

    saved = state.load(statefolder.states_before(rig.settings.state_dir) / "ann.safetensors", BEFORE, "ann")
    assert taken == [Borrowed("ann", saved.digest)]
    assert of_optimizer(new.state()) == of_optimizer(own)
    np.testing.assert_array_equal(new.state()["params/x"], fresh["params/x"])  # parameters are the log's
    damage(saved.files[0])
    with capture_logs() as logs:
        assert checkpoint.take_up(new, member, rig.settings.state_dir, get_logger())
    assert [entry["event"] for entry in logs] == ["checkpoint_refused", "state_taken_up"]
    assert Path(logs[0]["file"]).name == "ann.safetensors"
    assert logs[1]["learner"] == "aaa"  # another one's is better than none
    assert of_optimizer(new.state()) == of_optimizer(others)


def test_an_optimizer_state_of_the_run_before_is_not_taken_up(rig: Rig) -> None:
    last_state(rig, "ann")
    new, folder = Island(Slope(), SETTINGS), rig.settings.state_dir
    for member, taken in (beginner(rig, merged=["bob"]), beginner(rig, merged=[]), beginner(rig, run=b"\x08" * 8)):
        assert not checkpoint.take_up(new, member, folder, get_logger())
        assert taken == []
    begun, taken = beginner(rig)
    begun.run.created = SETTINGS  # it continues none
    assert not checkpoint.take_up(new, begun, folder, get_logger())
