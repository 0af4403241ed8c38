"""The owner of a place where weights are published: the run that created the object ``owner.json`` there.

The object must not exist when it is created, so of two runs that begin at once one is refused. It has a token that only the
owner's directory has, too: runs of the same name and settings on two machines are two runs.
"""

from __future__ import annotations

import json
import platform
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from diloco.errors import ObjectExistsError, ObjectStoreError, SettingsError
from diloco.process import files
from diloco.service.rundir import RunDirectory
from diloco.settings.places import parse_place
from diloco.storage.opening import open_store

OBJECT = "owner.json"
FILE = "publishing.json"  # in a run's directory
MAX_BYTES = 1 << 16


def claim(to: str, run: str, token: str | None) -> str:
    """Make a run the owner of the place ``to``, and find out that it can be written. Return the owner's token.

    ``token``: of a run that has claimed it before.

    Raises:
        SettingsError: another run owns it.
        ObjectStoreError: it cannot be written.
    """
    place = parse_place(to, "publish.to =")
    try:
        store, key = open_store(place), place.below(OBJECT).key
        mine = {"run": run, "token": token or secrets.token_hex(8), "host": platform.node(), "claimed_at_s": time.time()}
        content = json.dumps(mine, indent=1).encode()
        try:
            store.put(key, content, create=True)
        except ObjectExistsError:
            found = store.head(key)
            other = decode_owner(bytes(store.get(found, 0, min(found.size_bytes, MAX_BYTES))))
            if token is None or other.get("token") != token:
                raise SettingsError(
                    f"publish.to = {place}: run {other.get('run')!r} of {other.get('host')} publishes there; choose another "
                    f"place, or, if that run is over, delete {place.below(OBJECT)}"
                ) from None
            store.put(key, content)
    except ObjectStoreError as error:
        raise ObjectStoreError(f"publish.to = {place}: cannot be written: {error}") from None
    return str(mine["token"])


@contextmanager
def claimed(directory: RunDirectory) -> Iterator[None]:
    """Make a run the owner of the place where it publishes, if it does; a new run gives it back if it cannot be begun.

    Raises:
        SettingsError, ObjectStoreError: as :func:`claim`.
    """
    to, before = directory.settings.publish.to, read(directory.path)
    if not to:
        yield
        return
    token = claim(to, directory.name, before)
    try:
        yield
    except BaseException:
        if before is None:
            with suppress(ObjectStoreError):
                place = parse_place(to)
                open_store(place).delete([place.below(OBJECT).key])
        raise
    write(directory.path, token)


def decode_owner(data: bytes) -> dict[str, Any]:
    """Return what an owner's object says; nothing where it is damaged."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read(directory: Path) -> str | None:
    """Return the token that a run's directory has; None: it has claimed no place yet."""
    try:
        return str(json.loads((directory / FILE).read_text())["token"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(directory: Path, token: str) -> None:
    """Keep a token in a run's directory."""
    files.replace_text(directory / FILE, json.dumps({"token": token}))
