"""Ownership of a service's folder by one run, so that files of two runs are never mixed."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from diloco import __version__
from diloco.errors import RunError
from diloco.settings.validation import shown

FORMAT = 1  # of the folder: grows when an older version would misread the files of a newer one
NAME = "volume.json"
MAX_BYTES = 4096


def claim(folder: Path, run: str) -> None:
    """Note that a folder is a run's, or find that it is already. Services that share one may call it at the same time.

    Raises:
        RunError: it is another run's, a newer version's or damaged, or cannot be written.
    """
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read(MAX_BYTES)
            if not text:
                file.write(json.dumps({"format": FORMAT, "run": run, "software": __version__}) + "\n")
                return
    except UnicodeDecodeError as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise RunError(f"{folder}: this service's folder (state_dir) cannot be written: {error.strerror}") from None
    _check(path, text, run)


def check(folder: Path, run: str) -> None:
    """Check a folder as :func:`claim`, without a change to it."""
    path = folder / NAME
    try:
        with path.open() as file:
            text = file.read(MAX_BYTES)
    except OSError:  # it has no owner yet
        return
    except UnicodeDecodeError as error:
        raise _damaged(path, error) from None
    if text:
        _check(path, text, run)


def _check(path: Path, text: str, run: str) -> None:
    folder = path.parent
    try:
        said: Any = json.loads(text)
        written, owner = int(said["format"]), str(said["run"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise _damaged(path, error) from None
    if written > FORMAT:
        raise RunError(
            f"{folder}: was written by diloco {shown(said.get('software'))} (format {written}), which is newer than this one "
            f"({__version__}, format {FORMAT}): start that version, or give this one another folder (state_dir)"
        )
    if owner != run:
        raise RunError(
            f"{folder}: holds the files of run {shown(owner)}, not of {run!r}: give this service another folder (state_dir), "
            "or empty this one"
        )


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(f"{path}: damaged ({error}): it says which run the folder is of; remove it if it is this one's")
