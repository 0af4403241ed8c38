"""The passphrase of a run's authority: of a file that the environment names, or typed at a terminal; never an argument."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

from diloco.errors import SettingsError
from diloco.settings.folders import PASSPHRASE_VARIABLE
from diloco_ops.keys.writing import check_secret

MIN_LETTERS = 12
MAX_BYTES = 1024


def known() -> bytes:
    """Return the passphrase that the authority's key is under.

    Raises:
        SettingsError: there is neither a file nor a terminal, or the file cannot be used.
    """
    path = os.environ.get(PASSPHRASE_VARIABLE)
    if path:
        return of_file(Path(path))
    if not sys.stdin.isatty():
        raise SettingsError(
            "ca.key is under a passphrase, and there is no terminal to ask for it: name a file that holds it in "
            f"{PASSPHRASE_VARIABLE}"
        )
    return getpass.getpass("passphrase of ca.key: ").encode()


def chosen(file: Path | None) -> bytes:
    """Return a new passphrase: of a file, else typed twice.

    Raises:
        SettingsError: it is too short, typed differently, or there is neither a file nor a terminal.
    """
    if file is not None:
        return _checked(of_file(file))
    if not sys.stdin.isatty():
        raise SettingsError("there is no terminal to ask for the new passphrase: name a file that holds it with --new-file")
    first = getpass.getpass("new passphrase of ca.key: ")
    if getpass.getpass("once more: ") != first:
        raise SettingsError("the two passphrases differ: nothing is changed")
    return _checked(first.encode())


def of_file(path: Path) -> bytes:
    """Return the first line of a file that only its owner can read.

    Raises:
        SettingsError: it cannot be read, others can read it, or it is too long or empty.
    """
    try:
        check_secret(path)
        with path.open("rb") as file:
            line = file.read(MAX_BYTES + 1).splitlines()[:1]
    except OSError as error:
        raise SettingsError(f"passphrase file {path}: cannot be read: {error.strerror}") from None
    if not line or not line[0] or len(line[0]) > MAX_BYTES:
        raise SettingsError(f"passphrase file {path}: its first line must be the passphrase, of at most {MAX_BYTES} bytes")
    return line[0]


def _checked(passphrase: bytes) -> bytes:
    if len(passphrase) < MIN_LETTERS:
        raise SettingsError(f"the passphrase has {len(passphrase)} letters: give it at least {MIN_LETTERS}")
    return passphrase
