"""Files that are named on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import SettingsError
from diloco.process import files
from diloco_lab.published import pictures
from diloco_lab.simulator.cluster import ClusterLearner
from diloco_lab.traces import tapes
from diloco_lab.traces.tapes import PlayedTape

Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="File for the picture.")]


def open_tape(path: Path, learners: Sequence[ClusterLearner]) -> PlayedTape:
    """Read a tape for these learners; name the failures that are left out.

    Raises:
        SettingsError: it cannot be read, or lasts for no time.
        FormatError: naming file and line: it is no tape, or names what there is not.
    """
    try:
        with path.open() as lines:
            played = tapes.read(lines, str(path), learners)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--tape {path}: {error}") from None
    if not played.duration_s:
        raise SettingsError(f"--tape {path}: duration_s is 0; set the tape's duration in its first line")
    if played.left_out:
        left_out = ", ".join(f"{number} of {kind}" for kind, number in sorted(played.left_out.items()))
        typer.echo(f"left out, because the simulator's learners are not affected: {left_out}", err=True)
    return played


def write(path: Path, text: str) -> None:
    """Write a file as a whole.

    Raises:
        SettingsError: it cannot be written.
    """
    try:
        files.replace_text(path, text)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error}") from None


def read(path: Path) -> str:
    """Read a file of text as a whole.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None


def ready(path: Path) -> None:
    """Find out that a file cannot be written before a long simulation instead of after it; makes its folder.

    Raises:
        SettingsError: it cannot be, and why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{path}: its folder cannot be made: {error.strerror}; name another file") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        what = "it is a folder" if path.is_dir() else "its folder cannot be written"
        raise SettingsError(f"{path}: {what}; name another file")


def write_picture(path: Path, picture: str) -> None:
    """Write a picture as a file of its own.

    Raises:
        SettingsError: it cannot be written.
    """
    write(path, pictures.standalone(picture))
