"""Ownership of a service's folder by one run, so that files of two runs are never mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco import __version__
from diloco.errors import RunError
from diloco.process import locks
from diloco.settings import folders
from diloco.settings.validation import shown

FORMAT = 1  # of the folder: grows when an older version would misread the files of a newer one
NAME = "volume.json"
MAX_BYTES = 4096


def claim(folder: Path, run: str) -> None:
    """Note that a folder is a run's, or find that it is already. Services that share one may call it at the same time.

    Raises:
        RunError: it is another run's, a newer version's or damaged, or cannot be written, or its file system has no locks.
    """
    path = folder / NAME
    with locks.wait_for(path, folders.STATE) as file:
        try:
            file.seek(0)
            raw = file.read(MAX_BYTES)
            if not raw:
                said = {"format": FORMAT, "run": run, "software": __version__}
                file.write(json.dumps(said).encode() + b"\n")
                file.flush()
                return
        except OSError as error:
            raise folders.STATE.not_writable(path, error) from None
    _check(path, raw, run)


def check(folder: Path, run: str) -> None:
    """Check a folder as :func:`claim`, without a change to it."""
    path = folder / NAME
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES)
    except OSError:  # it has no owner yet
        return
    if raw:
        _check(path, raw, run)


def _check(path: Path, raw: bytes, run: str) -> None:
    folder = path.parent
    try:
        said: Any = json.loads(raw)
        written, owner = int(said["format"]), str(said["run"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise _damaged(path, error) from None
    if written > FORMAT:
        raise RunError(
            f"{folder}: was written by the newer diloco {shown(said.get('software'))} (format {written}), and this is "
            f"{__version__} (format {FORMAT}): start that version, or give this service another folder (state_dir)"
        )
    if owner != run:
        raise RunError(
            f"{folder}: holds the files of run {shown(owner)}, not of {run!r}: give this service another folder "
            "(state_dir), or empty this folder"
        )


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(
        f"{path}: damaged ({error}); the file names the run that the folder belongs to: remove the file if "
        "the folder belongs to this run"
    )
