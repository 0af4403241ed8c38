"""The parts of a checkpoint of a whole run: its manifest, and the files that the manifest names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from diloco import __version__
from diloco.errors import RunError, SettingsError
from diloco.settings.run import RunSettings
from diloco.settings.validation import parse
from diloco.wire.fields import MemberName
from diloco.wire.subjects import Subjects

FORMAT = "diloco-checkpoint"
VERSION, OF_REGIONS = 2, 3  # the second one: of runs with regions, whose logs an earlier version would misread
OF_PARTS = 4  # of learners that are several processes, and leave as many files, whether the run has regions or not
MANIFEST = "manifest.json"
FOLDER = "whole"  # of a run's directory, where its checkpoints are
MAX_MANIFEST_BYTES = 64 << 20
COPY_BYTES = 1 << 20


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one fragment's log stands: its last entry's version, place in the stream and hash (0 and zeros: there is none)."""

    version: int
    sequence: int
    entry_hash: str


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the checkpoint."""

    file: str
    size_bytes: int
    blake3: str


class SavedStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream as the server packed it."""

    saved: SavedFile
    config: dict[str, Any]
    state: dict[str, Any]


class SavedLearner(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A learner's state; its step and versions are not known if it was saved on leaving."""

    saved: SavedFile
    step: int | None
    versions: list[int] | None
    parts: list[SavedFile] = []  # of its further processes, in their order

    @property
    def files(self) -> list[SavedFile]:
        """All parts of the state, in the order of the processes."""
        return [self.saved, *self.parts]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that a checkpoint consists of. In a run with regions the log is one region's, which has all that is committed."""

    format: str
    version: int
    made_by: str
    run: MemberName
    settings: dict[str, Any]
    data: str | None
    map_digest: str
    created_at_s: float
    fragments: list[Cut]
    log: SavedStream
    bucket: SavedStream
    learners: dict[MemberName, SavedLearner]
    hash: str  # BLAKE3 of this manifest as JSON with an empty hash
    residuals: SavedFile | None = None  # of fragments' last merges, where only another region's log has them

    @property
    def files(self) -> list[SavedFile]:
        """All files but the manifest itself."""
        states = (file for learner in self.learners.values() for file in learner.files)
        saved = [self.log.saved, self.bucket.saved, *states]
        return saved if self.residuals is None else [*saved, self.residuals]

    def right_hash(self) -> str:
        """Return the value that ``hash`` must have."""
        return blake3(msgspec.json.encode(msgspec.structs.replace(self, hash=""))).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is whole; :meth:`check` looks at the files."""

    path: Path
    manifest: Manifest
    settings: RunSettings

    def check(self) -> None:
        """Compare every file with its hash.

        Raises:
            RunError: one is missing, or has another content than was saved.
        """
        for file in self.manifest.files:
            path = self.path / file.file
            if not path.is_file():
                raise RunError(f"{path}: missing")
            if path.stat().st_size != file.size_bytes:
                raise RunError(f"{path}: has {path.stat().st_size} bytes, the checkpoint's manifest says {file.size_bytes}")
            if hash_of(path) != file.blake3:
                raise RunError(f"{path}: is damaged: its content does not have the hash that the checkpoint's manifest states")


def load(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest.

    Raises:
        RunError: there is none (then it was never finished), it is damaged, or of another format version.
    """
    file = path / MANIFEST
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise RunError(f"{file}: {file.stat().st_size} bytes are too many for a checkpoint's manifest")
        text = file.read_bytes()
        head = msgspec.json.decode(text)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise RunError(f"{file}: is no manifest of a checkpoint")
        if head.get("version") not in (VERSION, OF_REGIONS, OF_PARTS):
            raise RunError(
                f"{file}: made by version {head.get('made_by')} of diloco (format {head.get('version')}); this is "
                f"{__version__} (formats {VERSION} to {OF_PARTS}): go on from it with the version that made it"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path}: is no checkpoint, or one that was never finished (it has no {MANIFEST})") from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{file}: damaged: {error}") from None
    if manifest.hash != manifest.right_hash():
        raise RunError(f"{file}: damaged: its content does not have the hash that it states")
    if any(Path(saved.file).is_absolute() or ".." in Path(saved.file).parts for saved in manifest.files):
        raise RunError(f"{file}: names a file outside of the checkpoint")
    subjects = Subjects(manifest.run)
    for stream, name in ((manifest.log, subjects.log_stream), (manifest.bucket, f"KV_{subjects.bucket}")):
        if stream.config.get("name") != name or not isinstance(stream.state.get("last_seq"), int):
            raise RunError(f"{file}: damaged: its {stream.saved.file} is of stream {stream.config.get('name')!r}, not {name!r}")
    try:
        return Checkpoint(path, manifest, parse(RunSettings, manifest.settings, str(file)))
    except SettingsError as error:
        raise RunError(f"{file}: the settings of its run are not those of this version of diloco: {error}") from None


def numbered(folder: Path) -> dict[int, Path]:
    """Return the folders in a folder whose names are numbers, by number: those of checkpoints, whole or not."""
    found = folder.iterdir() if folder.is_dir() else []
    return {int(path.name): path for path in found if path.name.isdecimal() and path.is_dir()}


def hash_of(path: Path) -> str:
    """BLAKE3 of a file, in hex."""
    hasher = blake3()
    with path.open("rb") as file:
        while block := file.read(COPY_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
