"""Files and folders of places, brought to this machine: :func:`fetched` returns a local path with the same content.

The cache is a folder of ``cache_dir``:

* ``blobs/ID``: the content of one object. The identity is of its place, size and etag, so another content is another file.
  ``ID.part`` is a download that goes on where it stopped.
* ``places/PLACE/VIEW/NAME``: a place as it was listed once. Its files are hard links to blobs, with the names that they have
  there.
* ``places/PLACE/last.json``: the view that the place had last, which is taken where the store does not answer.
* ``places/PLACE.filling``: locked by the process that brings a place; the others wait, and find it.
* ``places/PLACE.used``: locked, shared, by each process that uses the place, until it ends. Where the disk has no room, places
  that no process uses are dropped, those first that were used longest ago.

Places may have blobs in common, so a blob's download is locked, too.
"""

from __future__ import annotations

import fnmatch
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from blake3 import blake3

from diloco.errors import DataError, ObjectMissingError, ObjectStoreError, SettingsError
from diloco.process import files, locks, observe
from diloco.settings import folders
from diloco.settings.places import StoragePlace, parse_place
from diloco.settings.places import is_remote as is_remote
from diloco.storage.object_store import ObjectStore, StoredObject
from diloco.storage.opening import open_store

FOLDER = "storage"  # of cache_dir
BLOBS, PLACES, LAST, WHOLE = "blobs", "places", "last.json", "whole"
PART, USED, FILLING = ".part", ".used", ".filling"
RANGE_BYTES = 16 << 20  # of one request
FOOTER_BYTES = 1 << 16  # read at once where a few bytes are asked for
AHEAD = 4  # ranges of one object, and objects, in flight
RESERVE_BYTES = 1 << 30  # that a disk keeps free, or 5 % of it where that is less
MOST_FILES = 1_000_000  # below one place
# files of a model that this project reads; repositories often have the same weights in other formats, too
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
MODEL_FILES = ("*.safetensors", *TOKENIZER_FILES)


@dataclass(frozen=True)
class Selection:
    """The parts of each file that are brought; the rest are holes, which read as zeros.

    ``name`` tells selections apart. ``ranges`` returns beginnings and ends of parts, given a file to read from; it raises
    DataError.
    """

    name: str
    ranges: Callable[[BinaryIO], list[tuple[int, int]]]


def fetched(place: str, cache_dir: Path | None = None, *, only: Sequence[str] = (), select: Selection | None = None) -> Path:
    """Bring a file or a folder from a place to this machine; return its path, which ends in the place's name.

    What was brought before is not brought again as long as it is the same there. While the store does not answer, what a place
    had last is returned.

    Args:
        place: ``s3://``, ``gs://``, ``az://``, ``hf://`` or ``https://``.
        cache_dir: the setting of that name; by default that of the environment.
        only: patterns of names; of a folder, files whose names match none of them are left out.
        select: parts of files; all other bytes are left out.

    Raises:
        DataError: a file has no such parts.
        SettingsError: it is no place; or the cache cannot be written, or has no room.
        ObjectMissingError: nothing is there.
        ObjectStoreError: the store cannot be reached or refuses, and nothing was brought before.
    """
    wanted = parse_place(place)
    cached = _CachedPlace(folders.made((cache_dir or folders.cache_dir()) / FOLDER), wanted, only, select)
    cached.hold()
    try:
        store = open_store(wanted)
        listed = find_objects(store, wanted, only)
    except ObjectMissingError:
        raise
    except ObjectStoreError as error:
        last = cached.last()
        if last is None:
            raise
        observe.get_logger().warning("storage_unreachable", place=str(wanted), reason=str(error), using=str(last))
        return last
    return cached.fill(store, listed)


def local_path(given: str | Path, cache_dir: Path | None = None, *, only: Sequence[str] = ()) -> Path:
    """Return a path that was given, or that of what lies at the place that was given, as :func:`fetched` does and raises."""
    return fetched(str(given), cache_dir, only=only) if is_remote(given) else Path(given)


def find_objects(store: ObjectStore, place: StoragePlace, only: Sequence[str] = ()) -> list[tuple[str, StoredObject]]:
    """Return the objects of a place with their names below it; a file's is empty.

    Raises:
        ObjectMissingError: there is none.
        ObjectStoreError: the store cannot be reached or refuses, or has names that no folder can have.
    """
    if place.key:
        try:
            return [("", store.head(place.key))]
        except ObjectMissingError:
            if place.scheme == "https":
                raise
    found = []
    for each in store.list(place.key):
        name = each.key.removeprefix(place.key).lstrip("/")
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise ObjectStoreError(f"{place}: has an object {name!r}, which no local folder can have")
        if not only or any(fnmatch.fnmatchcase(name.rpartition("/")[2], pattern) for pattern in only):
            found.append((name, each))
        if len(found) > MOST_FILES:
            raise ObjectStoreError(f"{place}: has more than {MOST_FILES} files")
    found = _without_markers(found, place)
    if not found:
        raise ObjectMissingError(f"{place}: there is no such object, and no folder of this name with files in it")
    return sorted(found, key=lambda each: each[0])


def _without_markers(found: list[tuple[str, StoredObject]], place: StoragePlace) -> list[tuple[str, StoredObject]]:
    """Leave out the empty objects by which some tools mark folders.

    Raises:
        ObjectStoreError: another object has the name of a folder.
    """
    folders = {str(parent) for name, _ in found for parent in PurePosixPath(name).parents}
    for name, each in found:
        if name in folders and each.size_bytes:
            raise ObjectStoreError(f"{place}: has an object {name!r} and objects below it, which no local folder can have")
    return [(name, each) for name, each in found if name not in folders]


def _in_ranges(store: ObjectStore, of: StoredObject, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes ``start`` to ``stop`` of an object, in order; a few ranges are asked for ahead."""
    if stop - start <= RANGE_BYTES:
        yield memoryview(store.get(of, start, stop))
        return
    begins = range(start, stop, RANGE_BYTES)
    with ThreadPoolExecutor(AHEAD, "storage-range") as pool:
        asked = []
        for begin in begins:
            asked.append(pool.submit(store.get, of, begin, min(begin + RANGE_BYTES, stop)))
            if len(asked) == AHEAD:
                yield memoryview(asked.pop(0).result())
        for each in asked:
            yield memoryview(each.result())


@dataclass(frozen=True)
class _CachedPlace:
    """A place in the cache, whose folder is ``cache``."""

    cache: Path
    place: StoragePlace
    only: Sequence[str]
    select: Selection | None

    @property
    def folder(self) -> Path:
        about = (str(self.place), *self.only, *(() if self.select is None else ("", self.select.name)))
        return self.cache / PLACES / blake3("\0".join(about).encode()).hexdigest(16)

    def hold(self) -> None:
        """Keep the place from being dropped until this process ends."""
        used = self.folder.with_suffix(USED)
        locks.share(used, folders.CACHE)
        os.utime(used)

    def last(self) -> Path | None:
        """Return what the place had last; None: nothing, or it is not whole."""
        try:
            view = self.folder / Path(str(json.loads((self.folder / LAST).read_text())["view"])).name
        except (OSError, ValueError, LookupError, TypeError):
            return None
        found = view / self.place.name
        return found if (view / WHOLE).exists() and found.exists() else None

    def fill(self, store: ObjectStore, listed: Sequence[tuple[str, StoredObject]]) -> Path:
        """Return the path of the place's objects, after all of them were brought, by this process or by another.

        Raises:
            SettingsError: there is no room for them, or the cache cannot be written.
            ObjectStoreError: one cannot be read.
        """
        with locks.wait_for(self.folder.with_suffix(FILLING), folders.CACHE):
            return self._fill(store, listed)

    def _fill(self, store: ObjectStore, listed: Sequence[tuple[str, StoredObject]]) -> Path:
        blobs = [(name, each, self._blob(each)) for name, each in listed]
        view = self.folder / blake3("".join(f"{name}\0{blob.name}\n" for name, _, blob in blobs).encode()).hexdigest(16)
        target = view / self.place.name
        try:
            if not (view / WHOLE).exists():
                missing = {blob: each for _, each, blob in blobs if not blob.exists()}
                if self.select is None:
                    self._make_room(sum(each.size_bytes - _part_bytes(blob) for blob, each in missing.items()))
                _for_all(lambda pair: self._bring(store, *pair), [(each, blob) for blob, each in missing.items()])
                for name, _, blob in blobs:
                    _link(blob, target / name if name else target)
                (view / WHOLE).touch()
            files.replace_text(self.folder / LAST, json.dumps({"place": str(self.place), "view": view.name}))
        except OSError as error:
            raise SettingsError(
                f"{self.place}: cannot be kept in {self.cache}: {error.strerror or error}; set {folders.CACHE.setting} to a "
                "folder with room that this process may write"
            ) from None
        return target

    def _blob(self, of: StoredObject) -> Path:
        about = f"{self.place.scheme}://{self.place.bucket}/{of.key}\0{of.size_bytes}\0{of.etag}" + (
            f"\0{self.select.name}" if self.select else ""
        )
        return self.cache / BLOBS / blake3(about.encode()).hexdigest(16)

    def _bring(self, store: ObjectStore, of: StoredObject, blob: Path) -> None:
        """Download an object, from where an earlier download of it stopped, unless it is there."""
        part = blob.with_name(f"{blob.name}{PART}")
        with locks.wait_for(part, folders.CACHE) as file:
            if blob.exists():  # another process brought it meanwhile
                part.unlink(missing_ok=True)
                return
            if self.select is not None:
                self._bring_parts(store, of, part, self.select)
                part.replace(blob)
                return
            have = os.fstat(file.fileno()).st_size
            if have > of.size_bytes or not of.etag:  # without a mark, what is there may be of another content
                file.truncate(0)
                have = 0
            for block in _in_ranges(store, of, have, of.size_bytes):
                file.write(block)
                have += len(block)
            if have != of.size_bytes:
                raise ObjectStoreError(f"{of.key}: the server sent {have} bytes, expected {of.size_bytes}")
            file.flush()
            os.fsync(file.fileno())
            part.replace(blob)

    def _bring_parts(self, store: ObjectStore, of: StoredObject, target: Path, select: Selection) -> None:
        """Fill a file with the selected parts of an object."""
        try:
            parts = select.ranges(cast(BinaryIO, io.BufferedReader(StoredFile(store, of), FOOTER_BYTES)))
        except DataError as error:
            raise DataError(f"{self.place}: {of.key}: {error}") from None
        self._make_room(sum(stop - start for start, stop in parts))
        with target.open("wb") as file:  # the locked one only appends
            file.truncate(of.size_bytes)
            for start, stop in parts:
                file.seek(start)
                for block in _in_ranges(store, of, start, stop):
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def _make_room(self, needed_bytes: int) -> None:
        """Drop places that no process uses until there is room.

        Raises:
            SettingsError: there is none.
        """
        while (free := room_bytes(self.cache)) < needed_bytes:
            if not _drop_oldest(self.cache):
                raise SettingsError(
                    f"{self.place}: {needed_bytes / 1e9:.3f} GB are to be kept in {self.cache}, whose disk has room for "
                    f"{max(0, free) / 1e9:.3f} GB: free some, or set {folders.CACHE.setting} to a folder on a larger disk"
                )


class StoredFile(io.RawIOBase):
    """An object as a file of Python's to read from; each read is a request."""

    def __init__(self, store: ObjectStore, of: StoredObject) -> None:
        self._store, self._of, self._at = store, of, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place in the object; return it."""
        self._at = offset + (0, self._at, self._of.size_bytes)[whence]
        return self._at

    def tell(self) -> int:
        """Return where the next byte is read."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; return how many there were."""
        stop = max(self._at, min(self._at + len(buffer), self._of.size_bytes))
        block = memoryview(self._store.get(self._of, self._at, stop) if stop > self._at else b"")
        buffer[: len(block)] = block
        self._at += len(block)
        return len(block)


def room_bytes(folder: Path) -> int:
    """Return how many bytes may be written on the disk of a folder; a reserve is left for others."""
    disk = shutil.disk_usage(folder)
    return disk.free - min(RESERVE_BYTES, disk.total // 20)


def _drop_oldest(cache: Path) -> bool:
    """Drop the place that was used longest ago, of those that no process uses; return whether there was one."""
    for used in sorted((cache / PLACES).glob(f"*{USED}"), key=lambda path: path.stat().st_mtime):
        place = used.with_suffix("")
        if not place.exists() or (lock := locks.take(used, folders.CACHE)) is None:
            continue
        with lock:
            inodes = {path.stat().st_ino for path in place.rglob("*") if path.is_file()}
            shutil.rmtree(place, ignore_errors=True)
            for blob in (cache / BLOBS).iterdir():
                with suppress(FileNotFoundError):
                    if blob.stat().st_ino in inodes and blob.stat().st_nlink == 1:  # of no other place
                        blob.unlink()
        return True
    return False


def _part_bytes(blob: Path) -> int:
    """Return how much of a blob an earlier download brought."""
    part = blob.with_name(f"{blob.name}{PART}")
    return part.stat().st_size if part.exists() else 0


def _link(blob: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # of an earlier attempt, or of another process
        os.link(blob, target)


def _for_all(work: Callable[[Any], None], items: Sequence[Any]) -> None:
    """Do work on all items, a few at a time; after an error begin no more of them."""
    with ThreadPoolExecutor(AHEAD, "storage-object") as pool:
        try:
            for _ in pool.map(work, items):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
