"""Files of keys: written with their final access rights from the beginning, and refused where others can read secrets."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from diloco.errors import SettingsError
from diloco.nats.identity import OTHERS_MODES
from diloco.process import files

SECRET, PUBLIC = 0o600, 0o644


def write(path: Path, text: str | bytes, mode: int) -> None:
    """Write a file, whole or not at all.

    Raises:
        SettingsError: it cannot be written.
    """

    def fill(draft: Path) -> None:
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text.encode() if isinstance(text, str) else text)

    try:
        files.replace(path, fill)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None


def check_secret(path: Path) -> None:
    """Refuse a secret that others may read.

    Raises:
        SettingsError: they may.
        OSError: it is not there.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & OTHERS_MODES:
        raise SettingsError(f"{path}: has mode {mode:04o}: others on this machine can read it; chmod 600 {path}")


def make_private(path: Path) -> None:
    """Make a folder that only its owner can enter.

    Raises:
        SettingsError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        reason = f"{error.strerror}; look at its permissions, or name another place"
        raise SettingsError(f"{path}: cannot be made: {reason}") from None


def identity_text(values: Mapping[str, Any]) -> str:
    """Return the text of an identity file.

    OpenSSL reads the blocks in it in this order: the process's certificate first, the authority last.
    """
    head = "# A reader of this file can act as this process: hand it over by a safe way, and keep no copy."
    return f"{head}\n{toml_text(values)}"


def toml_text(values: Mapping[str, Any]) -> str:
    """Return TOML of the values that are there, with texts of several lines as such."""
    there = {name: value for name, value in values.items() if value is not None}
    return tomli_w.dumps(there, multiline_strings=True)
