"""Object stores for tests that need no server: obstore's own, in memory or in a folder, and one whose process dies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import obstore.store
import pytest

from diloco.storage import fetching
from diloco.storage.cloud_store import CloudStore
from diloco.storage.object_store import ObjectStore, StoredObject

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Killed(BaseException):
    """The process is killed here: nothing may catch it as an error."""


def memory_store(shown: str = "s3://bucket") -> CloudStore:
    return CloudStore(obstore.store.MemoryStore(), shown)


def folder_store(folder: Path, shown: str = "s3://bucket") -> CloudStore:
    return CloudStore(obstore.store.LocalStore(folder, mkdir=True), shown)


def use(monkeypatch: pytest.MonkeyPatch, store: ObjectStore, *modules: object) -> None:
    """Have a store be that of every place, in these modules that open stores, and where places are fetched."""
    for module in (fetching, *modules):
        monkeypatch.setattr(module, "open_store", lambda place: store)


class DyingStore:
    """A store in whose ``dies_at``-th request (from 1) the process is killed: before it is carried out, or after.

    A file that is sent is one request, as far as its content is concerned: it is whole or not there.
    """

    def __init__(self, store: ObjectStore, dies_at: int | None = None, *, after: bool = False) -> None:
        self.store, self.dies_at, self.after, self.requests = store, dies_at, after, list[str]()

    def head(self, key: str) -> StoredObject:
        with_key = self._begin(f"head {key}")
        found = self.store.head(key)
        self._end(with_key)
        return found

    def get(self, of: StoredObject, start: int, stop: int) -> Buffer:
        number = self._begin(f"get {of.key} {start}")
        found = self.store.get(of, start, stop)
        self._end(number)
        return found

    def list(self, prefix: str) -> Iterator[StoredObject]:
        number = self._begin(f"list {prefix}")
        found = [*self.store.list(prefix)]
        self._end(number)
        return iter(found)

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        number = self._begin(f"put {key}")
        self.store.put(key, data, create=create)
        self._end(number)

    def send(self, files: Sequence[tuple[str, Path]]) -> None:
        for key, path in files:
            number = self._begin(f"send {key}")
            self.store.send([(key, path)])
            self._end(number)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            number = self._begin(f"delete {key}")
            self.store.delete([key])
            self._end(number)

    def _begin(self, request: str) -> int:
        self.requests.append(request)
        if len(self.requests) == self.dies_at and not self.after:
            raise Killed(request)
        return len(self.requests)

    def _end(self, number: int) -> None:
        if number == self.dies_at and self.after:
            raise Killed(self.requests[number - 1])
