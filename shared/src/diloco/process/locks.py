"""Locks on files (``flock``), taken in one way, with one sentence where a folder cannot have them.

The system ends a lock with its process, however that ends, and whether or not the file is removed.
"""

from __future__ import annotations

import atexit
import fcntl
import time
from pathlib import Path
from typing import IO

from diloco.settings.folders import ChosenFolder

LOOK_S = 0.05  # 20 looks a second cost nothing
NO_LOCKS = "its file system grants one lock twice"
_held: list[IO[bytes]] = []  # until this process ends


def wait_for(path: Path, chosen: ChosenFolder) -> IO[bytes]:
    """Lock a file, which is made if need be, until the returned one is closed; wait until no other process has the lock.

    ``chosen``: the setting that the folder is of.

    Raises:
        DilocoError: the file cannot be written, or its file system has no locks; of the class that ``chosen`` states.
    """
    return _locked(path, chosen, fcntl.LOCK_EX)


def take(path: Path, chosen: ChosenFolder) -> IO[bytes] | None:
    """Lock a file as :func:`wait_for`, but return None at once if another process has the lock."""
    try:
        return _locked(path, chosen, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def take_alone(path: Path, chosen: ChosenFolder, patience_s: float = LOOK_S) -> IO[bytes] | None:
    """Lock a file as :func:`take`, where two processes with the lock would damage files; wait ``patience_s`` for it at most.

    Raises:
        DilocoError: as :func:`take`; or the file system grants the lock to others, too.
    """
    deadline_s = time.monotonic() + patience_s
    while (file := take(path, chosen)) is None:
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(LOOK_S)
    if (again := take(path, chosen)) is not None:
        file.close()
        again.close()
        raise chosen.not_lockable(path.parent, NO_LOCKS)
    return file


def hold(path: Path, chosen: ChosenFolder, patience_s: float = LOOK_S) -> bool:
    """Lock a file as :func:`take_alone` until this process ends; False: another process has the lock."""
    file = take_alone(path, chosen, patience_s)
    if file is not None:
        _held.append(file)
    return file is not None


def share(path: Path, chosen: ChosenFolder) -> None:
    """Lock a file until this process ends, beside other processes that share it; wait while one has it by itself.

    Raises:
        DilocoError: as :func:`wait_for`.
    """
    if not path.exists() or all(file.name != str(path) for file in _held):  # it may have been deleted since
        _held.append(_locked(path, chosen, fcntl.LOCK_SH))


@atexit.register
def _release() -> None:
    for file in _held:
        file.close()


def _locked(path: Path, chosen: ChosenFolder, how: int) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise chosen.not_writable(path.parent, error) from None
    try:
        file = path.open("a+b")
    except OSError as error:  # the file is another user's
        raise chosen.not_writable(path, error) from None
    try:
        fcntl.flock(file, how)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise
        raise chosen.not_lockable(path.parent, error.strerror or str(error)) from None
    return file


def is_taken(path: Path) -> bool:
    """Return whether a process has the lock of a file; False where that cannot be known."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
