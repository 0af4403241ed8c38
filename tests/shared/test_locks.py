"""Locks on files: one process at a time, one sentence where a file system has none, or grants them to all."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

from diloco.errors import RunError, SettingsError
from diloco.process import locks
from diloco.settings import folders

HOLDER = """
import sys
from pathlib import Path
from diloco.process import locks
from diloco.settings import folders
print(locks.hold(Path(sys.argv[1]), folders.RUN), flush=True)
sys.stdin.read()
"""


def test_a_lock_is_one_process_s_until_it_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    assert not locks.is_taken(path)
    first = locks.take(path, folders.CACHE)
    assert first is not None
    assert locks.is_taken(path)
    assert locks.take(path, folders.CACHE) is None
    assert locks.take_alone(path, folders.CACHE, patience_s=0.0) is None
    first.close()
    assert not locks.is_taken(path)
    again = locks.take_alone(path, folders.CACHE)
    assert again is not None
    again.close()


def test_one_that_waits_goes_on_when_the_lock_is_free(tmp_path: Path) -> None:
    first, waited = locks.wait_for(tmp_path / "lock", folders.CACHE), threading.Event()

    def wait() -> None:
        with locks.wait_for(tmp_path / "lock", folders.CACHE):
            waited.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not waited.is_set()
    first.close()
    assert waited.wait(DEADLINE_S)
    thread.join()


@pytest.mark.services
def test_a_lock_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert locks.take(path, folders.RUN) is None
    finally:
        holder.kill()
        holder.communicate()
    free = locks.take(path, folders.RUN)
    assert free is not None
    free.close()


def test_a_lock_that_is_granted_twice_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)  # as some network file systems do
    with pytest.raises(RunError) as refused:
        locks.hold(tmp_path / "lock", folders.RUN)
    assert str(refused.value) == (
        f"--run-dir: {tmp_path} cannot be locked: its file system grants one lock twice; set --run-dir to a folder on a file "
        "system with locks, such as a local disk"
    )


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()  # as little a file that can be written as another user's
    with pytest.raises(SettingsError) as refused:
        locks.take(tmp_path / "lock", folders.CACHE)
    assert str(refused.value) == (
        f"cache_dir: {tmp_path / 'lock'} cannot be written: Is a directory; set cache_dir (DILOCO_CACHE_DIR) to a folder that "
        "this process may write"
    )
