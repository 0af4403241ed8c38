"""The parts of a checkpoint of a whole run: its manifest, and the files that the manifest names."""

from __future__ import annotations

from collections.abc import Iterable
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
OF_OTHERS = 5  # states are, or were, on other machines; or learners keep checkpoints of their own
MANIFEST = "manifest.json"
FOLDER = "whole"  # of a run's directory, where its checkpoints are
MAX_MANIFEST_BYTES = 64 << 20
COPY_BYTES = 1 << 20


class FragmentCut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    fragments: list[FragmentCut]
    log: SavedStream
    bucket: SavedStream
    learners: dict[MemberName, SavedLearner]
    hash: str  # BLAKE3 of this manifest as JSON with an empty hash
    residuals: SavedFile | None = None  # of fragments' last merges, where only another region's log has them
    number: int | None = None  # of the marker, where states are on other machines: the name of their folders there
    keep_own: list[MemberName] = []  # learners that leave no state: their training loops keep checkpoints of their own

    @property
    def files(self) -> list[SavedFile]:
        """All files but the manifest itself."""
        return [*self.of_run, *(file for learner in self.learners.values() for file in learner.files)]

    @property
    def of_run(self) -> list[SavedFile]:
        """The files of the run itself, without its learners' states."""
        saved = [self.log.saved, self.bucket.saved]
        return saved if self.residuals is None else [*saved, self.residuals]

    def right_hash(self) -> str:
        """Return the value that ``hash`` must have."""
        return blake3(msgspec.json.encode(msgspec.structs.replace(self, hash=""))).hexdigest()


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint whose manifest is whole; :meth:`check` looks at the files."""

    path: Path
    manifest: Manifest
    settings: RunSettings

    def absent(self) -> dict[str, list[SavedFile]]:
        """Return by learner the files of its state that are not here: they are on its own machine until they are collected."""
        missing = {
            name: [file for file in learner.files if not (self.path / file.file).is_file()]
            for name, learner in sorted(self.manifest.learners.items())
        }
        return {name: files for name, files in missing.items() if files}

    def check(self) -> None:
        """Compare every file with its hash.

        Raises:
            RunError: one is missing, or has another content than was saved.
        """
        self.check_run()
        absent = self.absent()
        if absent and self.manifest.number is not None:
            raise RunError(
                f"{self.path}: the states of {', '.join(absent)} are on other machines; copy their checkpoints/"
                f"{self.manifest.number}, then: diloco checkpoint collect {self.path} FOLDER..."
            )
        self._check(file for learner in self.manifest.learners.values() for file in learner.files)

    def check_run(self) -> None:
        """Compare the files of the run itself with their hashes, as :meth:`check` does and raises."""
        self._check(self.manifest.of_run)

    def _check(self, files: Iterable[SavedFile]) -> None:
        for file in files:
            path = self.path / file.file
            if not path.is_file():
                raise RunError(f"{path}: missing")
            if path.stat().st_size != file.size_bytes:
                raise RunError(f"{path}: has {path.stat().st_size} bytes, the checkpoint's manifest says {file.size_bytes}")
            if hash_of(path) != file.blake3:
                raise RunError(f"{path}: is damaged: its content does not have the hash that the checkpoint's manifest states")


def load(path: Path) -> RunCheckpoint:
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
            raise RunError(f"{file}: is not a checkpoint's manifest")
        if head.get("version") not in range(VERSION, OF_OTHERS + 1):
            raise RunError(
                f"{file}: made by version {head.get('made_by')} of diloco (format {head.get('version')}); this is "
                f"{__version__} (formats {VERSION} to {OF_OTHERS}): continue from it with the version that made it"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path}: is not a checkpoint, or is incomplete: it has no {MANIFEST}") from None
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
        return RunCheckpoint(path, manifest, parse(RunSettings, manifest.settings, str(file)))
    except SettingsError as error:
        raise RunError(f"{file}: this version of diloco does not accept the settings of its run: {error}") from None


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
