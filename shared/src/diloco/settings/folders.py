"""Folders of the account that a process runs as, which may have no home directory, or none that it can write."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import DilocoError, RunError, SettingsError

CACHE_DIR = Path("~/.cache/diloco/jax")  # the default of `cache_dir`; ~ is looked up when a process uses it
CACHE_VARIABLE = "DILOCO_CACHE_DIR"
KEYS_VARIABLE = "DILOCO_KEYS"  # names the folder of `diloco keys`
PASSPHRASE_VARIABLE = "DILOCO_CA_PASSPHRASE_FILE"  # names the file with the passphrase of its authority


@dataclass(frozen=True)
class ChosenFolder:
    """A folder that a setting or an option chooses, as errors name it.

    ``variable``: of the environment that sets it, too. ``error``: the class of its errors.
    """

    name: str
    variable: str = ""
    error: type[DilocoError] = SettingsError

    @property
    def setting(self) -> str:
        """The setting, and its variable."""
        return f"{self.name} ({self.variable})" if self.variable else self.name

    def not_writable(self, path: Path, error: OSError) -> DilocoError:
        """Return the error that says that the folder, or a file in it, cannot be written."""
        return self.error(
            f"{self.name}: {path} cannot be written: {error.strerror}; set {self.setting} to a folder that this process may "
            "write"
        )

    def not_lockable(self, path: Path, why: str) -> DilocoError:
        """Return the error that says that the folder's file system has no locks."""
        return self.error(
            f"{self.name}: {path} cannot be locked: {why}; set {self.setting} to a folder on a file system with locks, such as "
            "a local disk"
        )


CACHE = ChosenFolder("cache_dir", CACHE_VARIABLE)
STATE = ChosenFolder("state_dir", "DILOCO_STATE_DIR", RunError)
RUN = ChosenFolder("--run-dir", error=RunError)


def cache_dir() -> Path:
    """Return the ``cache_dir`` of a process without learner's settings: as the environment states it, or the default."""
    return Path(os.environ.get(CACHE_VARIABLE, CACHE_DIR))


def user_cache() -> Path | None:
    """Return the folder of this account's caches, by XDG's rule; None: it has no home directory."""
    if stated := os.environ.get("XDG_CACHE_HOME"):
        return Path(stated)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def expanded(path: Path, setting: str) -> Path:
    """Return a path with the home directory in place of ``~``.

    Raises:
        SettingsError: no home directory is known; ``setting`` is what names the path.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        home = path.parts[0]
        why = f"HOME is not set, and user id {os.getuid()} has no account" if home == "~" else "there is no such account"
        raise SettingsError(f"{setting} = {path}: no home directory is known for {home} ({why}): give a full path") from None


def made(folder: Path) -> Path:
    """Make ``cache_dir``, or a folder below it, and return its path without ``~``.

    Raises:
        SettingsError: no home directory is known, or this process cannot write the folder.
    """
    whole = expanded(folder, CACHE.setting)
    try:
        whole.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=whole).close()
    except OSError as error:
        raise CACHE.not_writable(whole, error) from None
    return whole


def can_write(folder: Path) -> bool:
    """Return whether this process may write a folder, or may make it; nothing is made."""
    for place in (folder, *folder.parents):
        if os.path.exists(place):
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return False


def temporary(prefix: str = "diloco-") -> tempfile.TemporaryDirectory[str]:
    """Make a folder for temporary files, which is removed at the end of the ``with``.

    Raises:
        SettingsError: no folder for temporary files can be written.
    """
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise SettingsError(
            f"TMPDIR: no temporary file can be made: {error.strerror}; set TMPDIR to a folder that this process may write"
        ) from None
