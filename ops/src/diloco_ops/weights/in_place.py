"""Weights at a place in object storage, or on the hub: written on this machine first, and sent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from diloco.errors import RunError, SettingsError
from diloco.settings.places import StoragePlace
from diloco.storage.opening import open_store

# read first by the libraries for which a folder is written: without them it is no model, and they are sent last
LAST = ("config.json", "adapter_config.json", "_CHECKPOINT_METADATA")


def files_of(written: Path) -> Mapping[str, Path]:
    """Return the files of what was written by their names below it, those last that are sent last; a file's is empty."""
    if written.is_file():
        return {"": written}
    found = {str(path.relative_to(written)): path for path in sorted(written.rglob("*")) if path.is_file()}
    return dict(sorted(found.items(), key=lambda each: each[0] in LAST))


def check_free(place: StoragePlace, *, folder: bool) -> None:
    """Find out that a place can take weights: a folder has to be empty, but for what every new repository of the hub has.

    Raises:
        SettingsError: something is there, or nothing can be written there.
        ObjectStoreError: the store cannot be reached or refuses.
    """
    if place.scheme == "https" or (not place.key and place.scheme != "hf"):
        what = "a web server takes no files" if place.scheme == "https" else "names a bucket alone"
        raise SettingsError(f"{place}: {what}; name a file or folder below s3://, gs://, az:// or hf://")
    if folder:
        kept = {".gitattributes", "README.md"} if place.scheme == "hf" else set()
        there = next((each for each in open_store(place).list(place.key) if each.key not in kept), None)
        if there is not None:
            raise SettingsError(f"{place}: is no empty folder, it has {there.key}; name a new one")


@contextmanager
def draft_in(directory: Path, name: str) -> Iterator[Path]:
    """Yield the path of a draft on the disk of a run's directory, which is removed at the end.

    Raises:
        RunError: the directory cannot be written.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="draft-", dir=directory)
    except OSError as error:
        raise RunError(f"{directory}: no draft of the weights can be written there: {error.strerror}") from None
    with made as folder:
        yield Path(folder) / name


def send(written: Path, place: StoragePlace) -> None:
    """Send a file or a folder to a place.

    Raises:
        ObjectStoreError: the store cannot be reached or refuses; a folder may be there in part, without its configuration.
    """
    open_store(place).send([(place.below(name).key, path) for name, path in files_of(written).items()])
