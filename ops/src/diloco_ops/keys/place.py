"""The folder of ``diloco keys``, where a command names none: outside of any checkout, or where an older one is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from diloco.errors import SettingsError
from diloco.settings.folders import KEYS_VARIABLE, expanded

DEFAULT = Path("~/diloco-keys")
BEFORE = Path("operator")  # where docs/deploy.md had it, in the checkout: one that is there goes on being used


def default_folder() -> Path:
    """Return the folder where a command names none.

    Raises:
        SettingsError: no home directory is known.
    """
    stated = os.environ.get(KEYS_VARIABLE)
    if stated:
        return expanded(Path(stated), KEYS_VARIABLE)
    return BEFORE if (BEFORE / "keys.toml").exists() else expanded(DEFAULT, f"the default of {KEYS_VARIABLE}")


def folder_and(words: Sequence[str] | None, *names: str) -> tuple[Path, list[str]]:
    """Return the folder and the words behind it, of a command that takes ``[DIR]`` and these names.

    Raises:
        SettingsError: there are more words than these, or fewer.
    """
    given = list(words or [])
    if len(given) == len(names):
        return default_folder(), given
    if len(given) == len(names) + 1:
        return Path(given[0]), given[1:]
    expected = " ".join(("[DIR]", *names))
    raise SettingsError(f"expected {expected}, got {len(given)} words" + (f": {' '.join(given)}" if given else ""))


def folder_and_files(words: Sequence[str]) -> tuple[Path, list[Path]]:
    """Return the folder and the files, of a command that takes ``[DIR]`` and files: a first word that is a folder is DIR.

    Raises:
        SettingsError: there is no file.
    """
    paths = [Path(word) for word in words]
    folder, files = (paths[0], paths[1:]) if paths and paths[0].is_dir() else (default_folder(), paths)
    if not files:
        raise SettingsError("expected [DIR] FILE..., got no file")
    return folder, files
