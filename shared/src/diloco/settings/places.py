"""Places: names of what lies elsewhere, ``SCHEME://BUCKET/KEY``, told apart from local paths.

``s3://bucket/key``, ``gs://bucket/key`` and ``az://container/key`` are objects in object storage. ``https://host/path`` is a
file on a web server. ``hf://org/name/path``, ``hf://org/name@revision/path`` and ``hf://datasets/org/name/path`` are files of a
repository on the Hugging Face hub. A key that ends with a slash, or that no object has, names a folder.

A place never contains credentials: it stands in settings, run directories, logs and reports.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from dataclasses import dataclass, replace
from typing import TypeGuard
from urllib.parse import unquote, urlsplit

from diloco.errors import SettingsError

SCHEMES = ("s3", "gs", "az", "hf", "https")
DATASETS = "datasets"  # first part of a repository of data on the hub
MOST_CHARACTERS = 4096
_MARK = "://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")  # a colon or an @ would be user information


def checked_place(text: str, setting: str, *, known: bool = True) -> str:
    """Return a setting's text. If it names a place, find out that it can be stored and shown, for pydantic's validators.

    ``known``: a text with an unknown scheme is no place, but means something to the user's own code.

    Raises:
        ValueError: it is no place, or may hold credentials (:func:`parse_place`).
    """
    if is_remote(text) or (has_scheme(text) and not known):
        try:
            parse_place(text, f"{setting} =")
        except SettingsError as error:
            raise ValueError(str(error)) from None
    return text


def loggable(text: str) -> str:
    """Return a text as a log may have it: a place that may hold credentials is left out, but for its scheme."""
    if has_scheme(text):
        try:
            parse_place(text)
        except SettingsError:
            return f"{text.partition(_MARK)[0][:16]}{_MARK}..."
    return text


@dataclass(frozen=True)
class StoragePlace:
    """An object or a folder of objects. ``bucket`` is a bucket, a container, a host with its port, or a repository."""

    scheme: str
    bucket: str
    key: str  # without a slash at its beginning and its end; empty: all of the bucket

    def __str__(self) -> str:
        """Return the place as users write it."""
        return f"{self.scheme}{_MARK}{self.bucket}" + (f"/{self.key}" if self.key else "")

    def below(self, name: str) -> StoragePlace:
        """Return the place with a relative ``name`` below this folder."""
        return replace(self, key=f"{self.key}/{name}".strip("/"))

    def relative(self, path: str) -> StoragePlace:
        """Return the place that a relative path names, seen from this folder.

        Raises:
            SettingsError: it leads out of the bucket.
        """
        key = posixpath.normpath(f"{self.key}/{path}").strip("/")
        if key == ".." or key.startswith("../"):
            raise SettingsError(f"{path}: leads out of {self.scheme}{_MARK}{self.bucket}, as seen from {self}")
        return replace(self, key="" if key == "." else key)

    @property
    def parent(self) -> StoragePlace:
        """The folder that has this place."""
        return replace(self, key=self.key.rpartition("/")[0])

    @property
    def name(self) -> str:
        """The last part of the key, or of the bucket where there is no key."""
        return (self.key or self.bucket).rpartition("/")[2]


def is_remote(text: object) -> bool:
    """Return whether a text names a place of a known scheme rather than a local path."""
    return isinstance(text, str) and _MARK in text and text.partition(_MARK)[0] in SCHEMES


def has_scheme(text: object) -> TypeGuard[str]:
    """Return whether a text has a scheme, known or not; :func:`parse_place` says what is wrong with an unknown one."""
    return isinstance(text, str) and _MARK in text


def parse_place(text: str, setting: str = "") -> StoragePlace:
    """Return the place that a text names. ``setting`` begins the sentence of an error.

    Raises:
        SettingsError: its scheme is unknown, it lacks a bucket, its key has empty or relative parts, or it has user
            information, a query or a fragment, which may hold credentials. The message does not repeat these.
    """
    scheme, mark, rest = text.partition(_MARK)
    begin = f"{setting} " if setting else ""
    if not mark or scheme not in SCHEMES:
        shown = f"{scheme[:16]}{_MARK}..." if mark else text[:MOST_CHARACTERS]
        close = difflib.get_close_matches(scheme, SCHEMES, n=1, cutoff=0.3)
        hint = f" (did you mean {close[0]}://?)" if close else ""
        raise SettingsError(f"{begin}{shown}: unknown scheme{hint}; expected {', '.join(each + _MARK for each in SCHEMES)}")
    refuse_credentials(text, setting)
    if len(text) > MOST_CHARACTERS or any(character.isspace() and character != " " for character in text):
        raise SettingsError(
            f"{begin}{scheme}{_MARK}...: is no place: longer than {MOST_CHARACTERS} characters, or has a line break"
        )
    return _of_hub(rest, f"{begin}{text}") if scheme == "hf" else _of_bucket(scheme, rest, begin)


def refuse_credentials(text: str, setting: str = "") -> None:
    """Find out that a text of a known scheme holds no credentials; ``setting`` begins the sentence of an error.

    Raises:
        SettingsError: it has user information, a query or a fragment. The message does not repeat these.
    """
    scheme, _, rest = text.partition(_MARK)
    if not is_remote(text):
        return
    authority = rest.partition("/")[0]
    host = authority.rpartition("@")[2].partition("?")[0].partition("#")[0] if scheme != "hf" else "..."
    signs = {"user information": "@" in authority, "a query": "?" in rest, "a fragment": "#" in rest}
    for what, is_there in signs.items():
        if is_there:
            safe = f"{setting} {scheme}{_MARK}{host[:MOST_CHARACTERS]}".lstrip()
            raise SettingsError(
                f"{safe}: has {what}: leave it out; credentials come from the environment or a profile (docs/storage.md)"
            )


def _of_bucket(scheme: str, rest: str, begin: str) -> StoragePlace:
    bucket, _, key = rest.partition("/")
    if scheme == "https":
        key = unquote(key)
        try:
            usable = bool(urlsplit(f"//{bucket}").hostname) and urlsplit(f"//{bucket}").port != 0
        except ValueError:
            usable = False
        if not usable:
            raise SettingsError(f"{begin}https{_MARK}...: names no server; expected https://HOST/PATH")
    elif not _BUCKET.fullmatch(bucket):
        raise SettingsError(f"{begin}{scheme}{_MARK}...: names no bucket; expected {scheme}{_MARK}BUCKET/KEY")
    shown = f"{begin}{scheme}{_MARK}{rest}"
    return StoragePlace(scheme, bucket, _checked_key(key, shown))


def _of_hub(rest: str, shown: str) -> StoragePlace:
    parts = rest.split("/")
    count = 3 if parts[0] == DATASETS else 2
    if len(parts) < count or not all(parts[:count]):
        raise SettingsError(
            f"{shown}: names no repository; expected hf://ORG/NAME, hf://ORG/NAME@REVISION/FILE or hf://{DATASETS}/ORG/NAME"
        )
    return StoragePlace("hf", "/".join(parts[:count]), _checked_key("/".join(parts[count:]), shown))


def _checked_key(key: str, shown: str) -> str:
    stripped = key.strip("/")
    if any(part in ("", ".", "..") for part in stripped.split("/")) and stripped:
        raise SettingsError(f"{shown}: its key has an empty or relative part ('//', '.' or '..'): leave it out")
    return stripped
