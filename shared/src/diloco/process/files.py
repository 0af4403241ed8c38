"""Files that are whole or not there: the one way in which a service changes files on its own disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def replace(path: Path, write: Callable[[Path], None], previous: Path | None = None) -> None:
    """Let ``write`` make a draft, and put it in the place of ``path`` once it is on the disk: a crash leaves one or the other.

    With ``previous`` given, the old file is kept there, in the place of the one kept before.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the old file is as it was and the draft is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            path.replace(previous)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def drafted_bytes(folder: Path) -> int:
    """Return the size of the drafts in a folder: another number, as long as something is being written there."""
    found = 0
    for draft in folder.glob("*.draft"):
        with contextlib.suppress(FileNotFoundError):  # it has become a file
            found += draft.stat().st_size
    return found


def replace_text(path: Path, text: str) -> None:
    """Replace a file by text, in UTF-8, as :func:`replace`."""

    def write(draft: Path) -> None:
        draft.write_text(text, encoding="utf-8")

    replace(path, write)
