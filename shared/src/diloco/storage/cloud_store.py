"""The port over obstore, a binding of the Rust crate object_store: S3 and what speaks like it, GCS, Azure, and web servers.

Credentials come from where each cloud's own tools look: the environment, workload identity, instance metadata, and for S3 the
profiles of :mod:`diloco.storage.aws_profiles`. They stay inside obstore. Errors of servers may repeat parts of a request, so of
them only the code and the status are shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from diloco.errors import DataError, ObjectExistsError, ObjectMissingError, ObjectStoreError, SettingsError
from diloco.settings.places import StoragePlace
from diloco.storage import aws_profiles
from diloco.storage.object_store import MOST_PARTS, PART_BYTES, StoredObject

if TYPE_CHECKING:
    from typing_extensions import Buffer

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # of a server that speaks S3
AUTHORITIES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE")  # files of certificates that are trusted besides the system's
REQUEST_S = 300.0  # one request, of at most a few MiB: a link of 0.5 Mbit/s is fast enough
RETRY_S = 30.0  # an error that passes is retried for so long
RETRIES = 5
AT_ONCE = 4  # parts of one upload in flight
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_CREDENTIALS = re.compile(r"169\.254\.|metadata\.google|credential|IMDS|imds", re.I)
_NO_BUCKET = "NoSuchBucket"
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired")


def open_cloud(place: StoragePlace) -> CloudStore:
    """Return the bucket of a place, with the configuration and credentials of the environment.

    Raises:
        SettingsError: the environment names a file or profile that is not there, or an address that is none.
    """
    options = _client_options()
    retry: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
    shown = f"{place.scheme}://{place.bucket}"
    made: obstore.store.ObjectStore
    try:
        if place.scheme == "s3":
            config = aws_profiles.of_environment()
            endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), config.pop("endpoint", None))
            if endpoint:
                _check_endpoint(endpoint)
                config["endpoint"] = endpoint
                options["allow_http"] = endpoint.startswith("http://")
            made = S3Store(place.bucket, client_options=options, retry_config=retry, config=config)  # type: ignore[arg-type]
        elif place.scheme == "gs":
            made = GCSStore(place.bucket, client_options=options, retry_config=retry)
        elif place.scheme == "az":
            made = AzureStore(place.bucket, client_options=options, retry_config=retry)
        else:
            made = HTTPStore(f"https://{place.bucket}", client_options=options, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise SettingsError(f"{shown}: its configuration in the environment cannot be used: {_why(error)}") from None
    return CloudStore(made, shown)


def _client_options() -> Any:
    options: dict[str, Any] = {"timeout": timedelta(seconds=REQUEST_S)}
    for name in AUTHORITIES:
        if file := os.environ.get(name):
            try:
                options["root_certificate"] = Path(file).read_bytes()
            except OSError as error:
                raise SettingsError(f"environment: {name} = {file}: cannot be read: {error.strerror}") from None
            break
    return options


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and not parts.query
    except ValueError:
        usable = False
    if not usable:
        raise SettingsError(
            f"environment: {ENDPOINTS[1]}: expected http:// or https://, a host and a port, without user information or a query"
        )


class CloudStore:
    """A bucket of obstore's as :class:`~diloco.storage.object_store.ObjectStore`. ``shown`` names it in errors."""

    def __init__(self, store: obstore.store.ObjectStore, shown: str) -> None:
        self._store, self._shown = store, shown

    def head(self, key: str) -> StoredObject:
        """Return what an object is."""
        with self._errors(key):
            return _stored(obstore.head(self._store, key))

    def get(self, of: StoredObject, start: int, stop: int) -> Buffer:
        """Return the bytes ``start`` to ``stop`` of an object."""
        if start == stop:
            return b""
        options: Any = {}
        if (start, stop) != (0, of.size_bytes):
            options["range"] = (start, stop)
        if of.etag and not of.etag.startswith("W/"):  # a weak mark equals none in this comparison
            options["if_match"] = of.etag
        with self._errors(of.key):
            result = obstore.get(self._store, of.key, options=options)
            now = _stored(result.meta)
            if (now.size_bytes, now.etag) != (of.size_bytes, of.etag):  # before its bytes are taken in
                raise ObjectMissingError(f"{self._shown}/{of.key}: was replaced while it was read; read it again")
            return self._whole(of.key, result.stream(stop - start), stop - start)

    def _whole(self, key: str, blocks: Iterable[Buffer], size_bytes: int) -> Buffer:
        """Return blocks as one, which is to have so many bytes; no more are taken in, whatever the server sends."""
        found: list[Buffer] = []
        came = 0
        for block in blocks:
            came += len(memoryview(block))
            if came > size_bytes:
                break
            found.append(block)
        if came != size_bytes:
            what = "more" if came > size_bytes else f"only {came}"
            raise ObjectStoreError(f"{self._shown}/{key}: the server sent {what} bytes, expected {size_bytes}")
        return found[0] if len(found) == 1 else b"".join(found)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield all objects below a folder."""
        if isinstance(self._store, HTTPStore):
            raise DataError(f"{self._shown}/{prefix}: a web server does not list folders: name a file")
        with self._errors(prefix):
            for chunk in obstore.list(self._store, prefix or None):
                yield from (_stored(meta) for meta in chunk if meta["path"] != prefix)

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Store an object."""
        with self._errors(key):
            obstore.put(self._store, key, data, mode="create" if create else "overwrite", use_multipart=False)

    def send(self, files: Sequence[tuple[str, Path]]) -> None:
        """Store files one after another."""
        for key, path in files:
            part = max(PART_BYTES, -(-path.stat().st_size // MOST_PARTS))
            with self._errors(key):
                obstore.put(self._store, key, path, chunk_size=part, max_concurrency=AT_ONCE)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        for key in keys:
            with self._errors(key):
                try:
                    obstore.delete(self._store, key)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Turn obstore's errors into this project's, each in one line without anything that a server repeated."""
        place = f"{self._shown}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            what = "there is no such bucket" if _NO_BUCKET in str(error) else "there is no such object"
            raise ObjectMissingError(f"{place}: {what}") from None
        except AlreadyExistsError:
            raise ObjectExistsError(f"{place}: exists already") from None
        except PreconditionError:
            raise ObjectMissingError(f"{place}: was replaced while it was read; read it again") from None
        except NotSupportedError:
            raise ObjectStoreError(f"{place}: the server does not support this (a range, or a conditional write)") from None
        except (BaseError, ValueError) as error:
            if _NO_BUCKET in str(error):
                raise ObjectMissingError(f"{place}: there is no such bucket") from None
            raise ObjectStoreError(f"{place}: {_why(error)}") from None


def _stored(meta: Any) -> StoredObject:
    changed = meta["last_modified"]
    return StoredObject(meta["path"], meta["size"], meta["e_tag"] or (f"W/{changed.isoformat()}" if changed else ""))


def _why(error: BaseException) -> str:
    """Return the reason of an error: only codes and statuses of what the server said."""
    text = str(error)
    code, status = _CODE.search(text), _STATUS.search(text)
    said = ", ".join(([f"status {status[1]}"] if status else []) + ([code[1]] if code else []))
    if code and code[1] in _EXPIRED:
        return f"the credentials have expired ({said}): renew them"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or (status and status[1] in ("401", "403")):
        return f"refused ({said or 'permission denied'}): check the credentials and their rights (docs/storage.md)"
    if said:
        return f"the server answered with an error ({said})"
    if _CREDENTIALS.search(text):
        return "no credentials were found: set them in the environment or a profile (docs/storage.md)"
    if isinstance(error, ValueError):
        return "its name or its configuration cannot be used"
    return "the server does not answer, or its certificate is not trusted"
