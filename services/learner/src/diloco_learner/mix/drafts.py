"""Folders of the cache that are made once, whole or not at all, however many processes want them."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from diloco.process import locks
from diloco.settings import folders

LEFT_S = 3600.0  # a process that makes tokens writes some every few seconds

Found = TypeVar("Found")


def make_once(folder: Path, find: Callable[[Path], Found | None], fill: Callable[[Path], None]) -> Found:
    """Return what ``find`` finds in a folder; ``fill`` fills it first if that is nothing.

    It is filled as a draft of this process's own: a process of another machine may be making the same folder.
    """
    found = find(folder)
    if found is None:
        _make(folder, find, fill)
        found = find(folder)
    assert found is not None
    return found


def _make(folder: Path, find: Callable[[Path], Found | None], fill: Callable[[Path], None]) -> None:
    _remove_left(folder.parent)
    draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.draft")
    draft.mkdir(parents=True)
    try:
        fill(draft)
        if find(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
    except OSError:
        if find(folder) is None:  # else the other process was faster by a moment
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _remove_left(folder: Path) -> None:
    """Remove drafts whose processes were killed."""
    for draft in folder.glob("*.draft"):
        with suppress(OSError):  # it was renamed or removed meanwhile
            written_s = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
            if time.time() - written_s > LEFT_S:
                shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def locked(cache: Path) -> Iterator[Path]:
    """Make the folder of tokens, and let one process of the machine at a time fill it: the others then find it full.

    Raises:
        SettingsError: it cannot be written, or its file system has no locks.
    """
    folder = folders.made(cache)
    with locks.wait_for(folder / "lock", folders.CACHE):
        yield folder
