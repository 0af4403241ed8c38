"""Files that are whole or not there, whenever the process that writes them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.process import files

pytestmark = pytest.mark.services

# a process that writes "three" in the place of "two", and dies before its n-th call of what touches the disk
DIES = """
import os, signal, sys
from pathlib import Path
from diloco.process import files

folder, doomed = Path(sys.argv[1]), int(sys.argv[2])
calls = 0

def dying(call):
    def wrapped(*arguments):
        global calls
        calls += 1
        if calls == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return wrapped

os.fsync, Path.replace = dying(os.fsync), dying(Path.replace)
files.replace(folder / "a", lambda draft: dying(draft.write_text)("three") and None, folder / "a.previous")
"""


def writer(text: str) -> Callable[[Path], None]:
    """What writes a draft of this text."""

    def write(draft: Path) -> None:
        draft.write_text(text)

    return write


@pytest.mark.parametrize(
    ("number", "newest", "previous"),
    [
        (1, "two", "one"),  # before the draft is written
        (2, "two", "one"),  # before it is on the disk
        (3, "two", "one"),  # before the old one is put aside
        (4, None, "two"),  # between the two renames
        (5, "three", "two"),  # not at all
    ],
)
def test_a_crash_at_any_moment_leaves_the_newest_or_the_one_before(
    tmp_path: Path, number: int, newest: str | None, previous: str
) -> None:
    path, kept = tmp_path / "a", tmp_path / "a.previous"
    for text in ("one", "two"):
        files.replace(path, writer(text), kept)

    ended = subprocess.run([sys.executable, "-c", DIES, str(tmp_path), str(number)], check=False)

    assert ended.returncode == (0 if number == 5 else -signal.SIGKILL)
    assert (path.read_text() if path.exists() else None, kept.read_text()) == (newest, previous)
    files.replace(path, writer("four"), kept)
    assert path.read_text() == "four"
    assert kept.read_text() == (newest or previous)  # what was put aside is not lost by the next one
    assert sorted(os.listdir(tmp_path)) == ["a", "a.previous"]
