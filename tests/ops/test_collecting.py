"""States of learners on other machines, brought together in a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.made.whole_checkpoints import file_of, make_checkpoint

from diloco.errors import RunError, SettingsError
from diloco_ops.checkpoints import collecting
from diloco_ops.checkpoints.checkpoint import checkpoint
from diloco_ops.checkpoints.manifest import RunCheckpoint

STATES = {"ann": [b"state of ann", b"its second part"], "bob": [b"state of bob"]}


@pytest.fixture
def taken(tmp_path: Path) -> RunCheckpoint:
    """A checkpoint whose states are all on other machines."""
    return make_checkpoint(tmp_path / "whole" / "3", STATES, here=False)


def copy(folder: Path, learner: str, *, part: int = 0, content: bytes | None = None) -> None:
    """Put a state where a team's copy of its learner's volume has it."""
    path = folder / "checkpoints" / "7" / file_of(learner, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(STATES[learner][part] if content is None else content)


def collected(taken: RunCheckpoint, *folders: Path) -> tuple[int, list[str]]:
    said: list[str] = []
    return asyncio.run(collecting.collect(taken.path, folders, said.append)), said


def test_states_come_from_several_folders_and_are_named_until_all_are_there(taken: RunCheckpoint, tmp_path: Path) -> None:
    us, eu = tmp_path / "us", tmp_path / "eu"
    copy(us, "ann")
    copy(us, "ann", part=1)
    eu.mkdir()
    with pytest.raises(RunError, match=r"3: the states of ann, bob are on other machines; copy their checkpoints/7, then: dil"):
        taken.check()
    code, said = collected(taken, us, eu)
    assert code == 1
    assert said == [
        f"ann: learners/ann.safetensors, 12 B, from {us}/checkpoints/7/ann.safetensors",
        f"ann: learners/ann.part-1.safetensors, 15 B, from {us}/checkpoints/7/ann.part-1.safetensors",
        "not here yet: bob, 12 B",
        f"copy checkpoints/7 of each of these learners' state_dir, then: diloco checkpoint collect {taken.path} FOLDER...",
    ]
    copy(eu, "bob")
    code, said = collected(taken, eu)
    assert code == 0
    assert said[1] == f"{taken.path}: whole, with 2 learners' states"
    assert "outside a run's directory" in said[2]
    taken.check()
    assert (taken.path / "learners" / "ann.part-1.safetensors").read_bytes() == b"its second part"
    assert collected(taken)[0] == 0  # once more


def test_states_half_copied_damaged_or_of_another_checkpoint_are_named_and_not_taken(
    taken: RunCheckpoint, tmp_path: Path
) -> None:
    copy(tmp_path / "us", "ann", content=b"state of")
    copy(tmp_path / "us", "bob", content=b"STATE of bob")
    other = tmp_path / "us" / "checkpoints" / "6" / "bob.safetensors"
    other.parent.mkdir()
    other.write_bytes(b"an older state of bob")
    code, said = collected(taken, tmp_path / "us")
    assert code == 1
    assert said[:2] == [
        f"note: {tmp_path}/us/checkpoints/7/ann.safetensors: has 8 bytes, expected 12: it was copied by half",
        f"note: {tmp_path}/us/checkpoints/7/bob.safetensors: is damaged: its content does not have the hash that its learner "
        "stated",
    ]
    assert not (taken.path / "learners").exists()


def test_a_state_under_another_name_counts_by_its_hash(taken: RunCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "us").mkdir()
    (tmp_path / "us" / "copy of bob.safetensors").write_bytes(STATES["bob"][0])
    collected(taken, tmp_path / "us")
    assert list(taken.absent()) == ["ann"]


def test_what_cannot_be_collected_is_refused(taken: RunCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere: no such folder"):
        collected(taken, tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"is not a checkpoint"):
        asyncio.run(collecting.collect(tmp_path, [tmp_path]))
    (taken.path / "log.snapshot").write_bytes(b"lag")
    with pytest.raises(RunError, match=r"log\.snapshot: is damaged"):
        collected(taken, tmp_path)
    with pytest.raises(SettingsError, match=r"one DIR, or: collect CHECKPOINT FOLDER\.\.\.; not a b"):
        checkpoint([Path("a"), Path("b")])
    with pytest.raises(SettingsError, match=r"--out .*: diloco checkpoint collect takes only a place"):
        checkpoint([Path("collect"), taken.path], out=str(tmp_path))
