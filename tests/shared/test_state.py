"""A learner's state as a file: the same comes back, and nothing else passes for it."""

from __future__ import annotations

import errno
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from diloco.core.tensors.chunks import Chunk
from diloco.errors import RunError
from diloco.states import state
from diloco.states.state import Content, StateFilePart
from diloco.states.statefolder import StateFolder

RUN = b"\x01" * 8
ACCOUNTS: dict[str, Any] = {"step": 12, "fragments": [{"after": [1, 2], "data": [[0, 3, 4]]}], "loss": 0.1}
ARRAYS: dict[str, NDArray[Any]] = {
    "params/w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "optimizer/count": np.array(7, np.int32),
    "accounts/0/body": np.arange(5, dtype=np.uint8),
    "accounts/0/none": np.empty((0, 3), np.float32),
}


def save(path: Path, previous: Path | None = None, **accounts: Any) -> state.Saved:
    return state.save(path, RUN, "learner-0", ACCOUNTS | accounts, Content.of(ARRAYS), previous)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "learner-0.safetensors"
    saved = save(path)
    loaded = state.load(path, RUN, "learner-0")
    assert loaded.accounts == ACCOUNTS
    assert loaded.digest == saved.digest
    assert loaded.arrays().keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded.arrays()[name], array, strict=True)
    assert path.stat().st_size == saved.size_bytes
    assert blake3(path.read_bytes()).digest() == state.file_hash(path)
    for name, array in load_file(path).items():  # as anybody reads such files
        np.testing.assert_array_equal(array, ARRAYS[name], strict=True)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20),
        hnp.arrays(st.sampled_from([np.float32, np.int32, np.uint8]), hnp.array_shapes(min_dims=0, max_side=4, min_side=0)),
        max_size=5,
    )
)
def test_any_arrays_come_back(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, NDArray[Any]]) -> None:
    path = tmp_path_factory.mktemp("state") / "a.safetensors"
    arrays = {name: array for name, array in arrays.items() if name != "__metadata__"}
    state.save(path, RUN, "a", {}, Content.of(arrays))
    loaded = state.load(path, RUN, "a").arrays()
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)


def test_the_one_before_is_kept(tmp_path: Path) -> None:
    path, previous = StateFolder(tmp_path, "learner-0").generations()
    for step in (1, 2, 3):
        save(path, previous, step=step)
    assert state.load(path, RUN, "learner-0").accounts["step"] == 3
    assert state.load(previous, RUN, "learner-0").accounts["step"] == 2
    assert sorted(file.name for file in path.parent.iterdir()) == ["learner-0.previous.safetensors", "learner-0.safetensors"]


def test_a_full_disk_leaves_the_one_before_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, previous = StateFolder(tmp_path, "learner-0").generations()
    save(path, previous, step=1)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, previous, step=2)
    assert state.load(path, RUN, "learner-0").accounts["step"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["learner-0.safetensors"]


def test_damage_anywhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path)
    good = path.read_bytes()
    state.load(path, RUN, "learner-0")
    refused = 0
    for at in range(0, len(good), 3):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x20]) + good[at + 1 :])
        try:
            loaded = state.load(path, RUN, "learner-0")
        except RunError:
            refused += 1
        else:  # a bit that makes no difference, as in the padding of the header
            assert loaded.accounts == ACCOUNTS
            for name, array in ARRAYS.items():
                np.testing.assert_array_equal(loaded.arrays()[name], array, strict=True)
    assert refused > 0.95 * len(good) / 3


@pytest.mark.parametrize("kept", [0, 1, 8, 200, -1])
def test_truncated_files_are_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "a.safetensors"
    save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RunError, match="not a whole state of learner learner-0"):
        state.load(path, RUN, "learner-0")


def test_foreign_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path)
    with pytest.raises(RunError, match="its run is '0101010101010101', expected '0202020202020202'"):
        state.load(path, b"\x02" * 8, "learner-0")
    with pytest.raises(RunError, match="its learner is 'learner-0', expected 'learner-1'"):
        state.load(path, RUN, "learner-1")
    path.write_bytes(b"something else")
    with pytest.raises(RunError, match="not a whole state"):
        state.load(path, RUN, "learner-0")
    with pytest.raises(RunError, match="not a whole state"):
        state.load(tmp_path / "missing.safetensors", RUN, "learner-0")


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path)
    path.write_bytes(path.read_bytes().replace(b"diloco-learner-5", b"diloco-learner-9"))
    with pytest.raises(RunError, match="its format is 'diloco-learner-9', expected 'diloco-learner-5'"):
        state.load(path, RUN, "learner-0")


def test_a_state_of_the_format_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    metadata = {
        "format": "diloco-learner-3",
        "run": RUN.hex(),
        "learner": "learner-0",
        "accounts": json.dumps(ACCOUNTS),
        "hashes": json.dumps({name: blake3(array.tobytes()).hexdigest() for name, array in ARRAYS.items()}),
    }
    metadata["hash"] = blake3(json.dumps([*metadata.values()]).encode()).hexdigest()
    save_file(ARRAYS, path, metadata)
    loaded = state.load(path, RUN, "learner-0")
    assert loaded.accounts == ACCOUNTS
    assert loaded.digest.hex() == metadata["hash"][:16]
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded.arrays()[name], array, strict=True)


def test_a_chunk_is_asked_for_when_the_one_before_is_on_its_way_to_the_disk(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.int32).reshape(4, 15)
    chunks = list(Chunk.whole("a", array.shape, "int32").cut(60))
    alive: list[weakref.ref[NDArray[Any]]] = []

    def values() -> Iterator[NDArray[Any]]:
        for chunk in chunks:
            assert not any(ref() is not None for ref in alive)
            made = array[chunk.where].copy()
            alive.append(weakref.ref(made))
            yield made
            del made

    path = tmp_path / "a.safetensors"
    state.save(path, RUN, "a", {}, Content(chunks, values()))
    assert sorted(load_file(path)) == [f"a[{row}:{row + 1},0:15]" for row in range(4)]
    loaded = state.load(path, RUN, "a")
    np.testing.assert_array_equal(loaded.arrays()["a"], array, strict=True)
    column = Chunk("a", (4, 15), "int32", (1, 3), (4, 5))
    np.testing.assert_array_equal(loaded.read(column), array[1:4, 3:5], strict=True)


def test_a_state_stays_what_was_checked_when_the_next_one_takes_its_place(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32)
    halves = list(Chunk.whole("a", (12,), "float32").cut(24))

    def save_parts(set_name: str, values: NDArray[Any], note: str) -> None:
        for index, half in enumerate(halves):
            path, content = StateFolder(tmp_path, "ann").generations(index)[0], Content([half], [values[half.where]])
            state.save(path, RUN, "ann", {"note": note}, content, part=StateFilePart(index, 2, set_name))

    save_parts("step 1", values, "")
    own, other = (StateFolder(tmp_path, "ann").generations(index)[0] for index in (0, 1))
    loaded = state.load(own, RUN, "ann")
    for half in halves:
        loaded.check(half)
    save_parts("step 2", values + 1, 1000 * "longer accounts, so that arrays begin elsewhere; ")
    np.testing.assert_array_equal(loaded.arrays()["a"], values, strict=True)
    own.unlink()
    other.unlink()
    np.testing.assert_array_equal(loaded.arrays()["a"], values, strict=True)


def test_the_parts_of_several_processes_are_one_state(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    halves = [Chunk("a", (4, 3), "float32", (first, 0), (first + 2, 3)) for first in (0, 2)]

    def save_part(index: int, set_name: str) -> None:
        path, previous = StateFolder(tmp_path, "ann").generations(index)
        content = Content([halves[index]], [array[halves[index].where]])
        state.save(path, RUN, "ann", {"part": index}, content, previous, StateFilePart(index, 2, set_name))

    def load_part(index: int, generation: int = 0) -> state.State:
        return state.load(StateFolder(tmp_path, "ann").generations(index)[generation], RUN, "ann")

    for index in (0, 1):
        save_part(index, "step 1")
    for index in (0, 1):
        loaded = load_part(index)
        assert loaded.accounts == {"part": index}
        np.testing.assert_array_equal(loaded.arrays()["a"], array, strict=True)
    array += 1
    save_part(0, "step 2")  # and the other process is killed before it saves
    assert load_part(0).has(halves[0])
    assert not load_part(0).has(halves[1])
    with pytest.raises(RunError, match=r"array 'a' is not there from \(0, 0\) to \(4, 3\)"):
        load_part(0).arrays()
    np.testing.assert_array_equal(load_part(0, 1).arrays()["a"], array - 1, strict=True)
    save_part(1, "step 2")
    other = StateFolder(tmp_path, "ann").generations(1)[0]
    good = other.read_bytes()
    other.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # in the file of another process: what is not needed of it is not read
    np.testing.assert_array_equal(load_part(0).read(halves[0]), array[:2], strict=True)
    for read in (load_part(0).check, load_part(0).read):
        with pytest.raises(RunError, match="'a' does not have the hash that it lists"):
            read(halves[1])
    with pytest.raises(RunError, match="'a' does not have the hash that it lists"):
        load_part(1)
    other.write_bytes(good)
    np.testing.assert_array_equal(load_part(1).arrays()["a"], array, strict=True)
