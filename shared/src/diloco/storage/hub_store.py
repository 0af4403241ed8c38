"""The port over huggingface_hub: a repository of models or of data on the Hugging Face hub.

``HF_ENDPOINT``, ``HF_TOKEN`` and the token of ``hf auth login`` count, as for that library. A place without a revision means
the newest commit of the branch ``main``. It is looked up once, so all files that one store reads are of the same commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from diloco.errors import ObjectExistsError, ObjectMissingError, ObjectStoreError
from diloco.settings.places import DATASETS, StoragePlace
from diloco.storage.object_store import StoredObject

Wanted = Iterable[Any]


class HubStore:
    """A repository as :class:`~diloco.storage.object_store.ObjectStore`."""

    def __init__(self, place: StoragePlace) -> None:
        name, _, revision = place.bucket.partition("@")
        is_data = name.startswith(f"{DATASETS}/")
        self._repository: dict[str, Any] = {
            "repo_id": name.removeprefix(f"{DATASETS}/"),
            "repo_type": "dataset" if is_data else "model",
        }
        self._revision, self._shown = revision or None, f"hf://{place.bucket}"
        self._api = huggingface_hub.HfApi()

    @cached_property
    def _commit(self) -> str:
        """The commit that is read."""
        return str(self._asked("", lambda: self._api.repo_info(revision=self._revision, **self._repository).sha))

    def head(self, key: str) -> StoredObject:
        """Return what a file is."""
        found = self._asked(key, lambda: self._api.get_paths_info(paths=[key], revision=self._commit, **self._repository))
        for each in found:
            if isinstance(each, huggingface_hub.hf_api.RepoFile):
                return _stored(each)
        raise ObjectMissingError(f"{self._shown}/{key}: there is no such file")

    def get(self, of: StoredObject, start: int, stop: int) -> bytes:
        """Return the bytes ``start`` to ``stop`` of a file."""
        if start == stop:
            return b""
        url = huggingface_hub.hf_hub_url(filename=of.key, revision=self._commit, **self._repository)
        headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}"}
        session = huggingface_hub.get_session()
        with self._errors(of.key), session.stream("GET", url, headers=headers, follow_redirects=True) as response:
            hf_raise_for_status(response)
            skip = 0 if response.status_code == 206 else start  # a whole file came
            content = b"".join(_cut(response.iter_bytes(), skip, stop - start))
        if len(content) != stop - start:
            raise ObjectStoreError(f"{self._shown}/{of.key}: the server sent {len(content)} bytes, expected {stop - start}")
        return content

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield all files below a folder."""

        def listed() -> list[Any]:
            where = {"path_in_repo": prefix} if prefix else {}
            return [*self._api.list_repo_tree(recursive=True, revision=self._commit, **where, **self._repository)]

        try:
            found = self._asked(prefix, listed)
        except ObjectMissingError:
            if prefix:
                return
            raise
        yield from (_stored(each) for each in found if isinstance(each, huggingface_hub.hf_api.RepoFile))

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Store a file by a commit; to ``create`` it, the commit has to follow one that does not have it."""
        parent = None
        if create:
            try:
                self.head(key)
            except ObjectMissingError:
                parent = self._commit
            else:
                raise ObjectExistsError(f"{self._shown}/{key}: exists already")
        self._committed(f"Write {key}", [huggingface_hub.CommitOperationAdd(key, data)], parent)

    def send(self, files: Sequence[tuple[str, Path]]) -> None:
        """Store files by one commit."""
        if files:
            added = [huggingface_hub.CommitOperationAdd(key, str(path)) for key, path in files]
            self._committed(f"Write {len(files)} files", added, None)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete files by one commit."""
        present = {found.key for found in self.list("")} & set(keys)
        if present:
            removed = [huggingface_hub.CommitOperationDelete(key) for key in sorted(present)]
            self._committed(f"Delete {len(removed)} files", removed, None)

    def _committed(self, message: str, operations: Wanted, parent: str | None) -> None:
        def commit() -> Any:
            return self._api.create_commit(
                operations=list(operations),
                commit_message=message,
                revision=self._revision,
                parent_commit=parent,
                **self._repository,
            )

        self._asked("", commit)
        self.__dict__.pop("_commit", None)  # what is read from now on is of the new one

    def _asked(self, key: str, ask: Callable[[], Any]) -> Any:
        with self._errors(key):
            return ask()

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        place = f"{self._shown}/{key}".rstrip("/")
        try:
            yield
        except GatedRepoError:
            raise ObjectStoreError(
                f"{place}: the repository is gated: accept its terms on its page, and give a token of that account (HF_TOKEN)"
            ) from None
        except RepositoryNotFoundError:
            raise ObjectMissingError(
                f"{place}: there is no such repository, or it is private and no token with rights to it was found (HF_TOKEN)"
            ) from None
        except RevisionNotFoundError:
            raise ObjectMissingError(f"{place}: there is no such revision") from None
        except EntryNotFoundError:
            raise ObjectMissingError(f"{place}: there is no such file") from None
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", None)
            if status in (401, 403):
                raise ObjectStoreError(
                    f"{place}: refused (status {status}): give a token with rights to it (HF_TOKEN)"
                ) from None
            if status == 412:
                raise ObjectExistsError(f"{place}: another commit came first") from None
            raise ObjectStoreError(f"{place}: the hub answered with an error (status {status})") from None
        except HFValidationError:
            raise ObjectStoreError(f"{place}: is no name of a repository") from None
        except OSError as error:
            raise ObjectStoreError(f"{place}: the hub does not answer ({type(error).__name__})") from None
        except Exception as error:  # errors of the library's HTTP client, whose module changes between its versions
            if not type(error).__module__.startswith(("httpx", "httpcore")):
                raise
            raise ObjectStoreError(f"{place}: the hub does not answer ({type(error).__name__})") from None


def _cut(blocks: Iterator[bytes], skip: int, size_bytes: int) -> Iterator[bytes]:
    """Yield so many bytes after those that are skipped; no more are taken in."""
    for block in blocks:
        part = block[skip : skip + size_bytes]
        skip = max(0, skip - len(block))
        size_bytes -= len(part)
        yield part
        if not size_bytes:
            return


def _stored(found: Any) -> StoredObject:
    return StoredObject(found.path, int(found.size), str(found.lfs.sha256 if found.lfs else found.blob_id))
