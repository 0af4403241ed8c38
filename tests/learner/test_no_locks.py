"""A file system without locks is named in one line, with another place."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import DilocoError
from diloco.service import rundir, volume
from diloco_learner.jax import programs
from diloco_learner.mix import drafts


@contextmanager
def _claimed(path: Path) -> Iterator[None]:
    volume.claim(path, "demo")
    yield


LOCKED: dict[str, tuple[Callable[[Path], AbstractContextManager[Any]], str]] = {
    "run": (rundir.locked, "--run-dir"),
    "service": (_claimed, "DILOCO_STATE_DIR"),
    "mix": (drafts.locked, "DILOCO_CACHE_DIR"),
    "programs": (lambda path: programs.compiled_once(path, "step", lambda: False), "DILOCO_CACHE_DIR"),
}


@pytest.mark.parametrize("name", LOCKED)
def test_a_file_system_without_locks_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock, other_place = LOCKED[name]
    with pytest.raises(DilocoError) as refused, lock(tmp_path):
        pass
    text = str(refused.value)
    assert str(tmp_path) in text
    assert "cannot be locked" in text
    assert other_place in text
    assert "\n" not in text


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DilocoError, match=r"^--run-dir: .* cannot be written: Not a directory; set --run-dir to"),
        rundir.locked(tmp_path / "file" / "run"),
    ):
        pass
