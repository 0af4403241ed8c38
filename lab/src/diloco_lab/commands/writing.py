"""Files that commands write: pages and pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import SettingsError
from diloco.files import replace_text
from diloco_lab import pictures

Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="Its picture, as a file of its own.")]


def ready(option: str, path: Path) -> None:
    """Find out that a file cannot be written before a long simulation instead of after it; makes its folder.

    Raises:
        SettingsError: naming the option, and why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{option} {path}: its folder cannot be made: {error.strerror}; name another file") from None
    if path.is_dir():
        raise SettingsError(f"{option} {path}: it is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise SettingsError(f"{option} {path}: its folder cannot be written; name another file")


def write(option: str, path: Path, text: str) -> None:
    """Write a file that was found :func:`ready`; a reader sees the old one or the new one.

    Raises:
        SettingsError: naming the option, and why.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        raise SettingsError(f"{option} {path}: cannot be written: {error.strerror}") from None


def write_picture(path: Path, picture: str) -> None:
    """Write a picture as a file of its own.

    Raises:
        SettingsError: it cannot be written.
    """
    write("--svg", path, pictures.standalone(picture))
