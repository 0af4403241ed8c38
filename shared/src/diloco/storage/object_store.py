"""The port to object storage: all that this project asks of a bucket, a repository of the hub, or a web server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

PART_BYTES = 8 << 20  # of an upload of several parts: at most 10,000 of them are allowed, so 80 GB
MOST_PARTS = 10_000


@dataclass(frozen=True)
class StoredObject:
    """An object: its key below the bucket, its size, and the server's mark of its content (empty: the server has none)."""

    key: str
    size_bytes: int
    etag: str


class ObjectStore(Protocol):
    """One bucket. Calls block; all may be called from several threads.

    Every method raises :class:`~diloco.errors.ObjectStoreError` where the store cannot be reached or refuses, in one line
    without credentials.
    """

    def head(self, key: str) -> StoredObject:
        """Return what an object is.

        Raises:
            ObjectMissingError: there is none.
        """

    def get(self, of: StoredObject, start: int, stop: int) -> Buffer:
        """Return the bytes ``start`` to ``stop`` of an object, in whatever buffer they came.

        Raises:
            ObjectMissingError: there is none, or it has another content than ``of`` says.
        """

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield all objects below a folder, in any order; nothing where there are none."""

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Store an object, whole or not at all.

        Raises:
            ObjectExistsError: ``create`` was asked, and there is one already.
        """

    def send(self, files: Sequence[tuple[str, Path]]) -> None:
        """Store files by their keys, one after another in this order, large ones in parts; each is whole or not there."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are passed over."""
