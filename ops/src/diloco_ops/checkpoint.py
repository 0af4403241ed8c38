"""Checkpoints of a whole run, taken while it goes on: ``diloco checkpoint DIR``.

A checkpoint is a consistent cut in the sense of Chandy and Lamport (Distributed Snapshots, 1985). The *cut* is a vector of
versions, one of each fragment, read from the log; up to it the log is kept, later entries never happened. The vector
goes to all learners (the marker), and each saves its state at its first step boundary with all of these versions applied.
The state of all others is a fold of the log. The log is copied last, so that it holds all that any state is based on. No member
waits for anything.

Offers in flight need no recording: an offer is cumulative and its work is in its learner's value until a version merges it,
and which of a learner's offers are merged at the cut stands in the log's cursors. So offers are not in a checkpoint.

A learner may have gone beyond the cut when the marker reaches it. Then the marker is repeated with a newer vector, some times;
after that the state is taken as it is, and the part that belongs to later versions is lost, and counted, when it is resumed.

Files: ``manifest.json`` (written last: without it a folder is no checkpoint), ``log.snapshot``, ``bucket.snapshot`` and
``learners/<name>.safetensors``.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from blake3 import blake3

from diloco import __version__
from diloco.control.changes import read_changes
from diloco.control.gate import HeartbeatGate
from diloco.control.hearing import hear
from diloco.core.chain import NO_ENTRY
from diloco.errors import MessageError, RunError, SettingsError
from diloco.member import state
from diloco.process import files
from diloco.process.tasks import end
from diloco.settings.run import RunSettings
from diloco.settings.validation import parse
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Heartbeat, MarkerAnswer, SnapshotMarker
from diloco.wire.fields import MemberName
from diloco.wire.subjects import Subjects
from diloco_ops import run_reader
from diloco_ops.broker import snapshot
from diloco_ops.broker.snapshot import Snapshot
from diloco_ops.run_reader import RunReader
from diloco_report.units import duration, size

FORMAT = "diloco-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
FOLDER = "whole"  # of a run's directory, where its checkpoints are
MAX_MANIFEST_BYTES = 64 << 20

MAX_AHEAD = 1_000_000  # of the numbers of checkpoints whose folders were deleted
HEAR_S = 1.2  # beyond two heartbeats: the time in which each living learner is heard
MARKER_EVERY_S = 0.2  # a marker is not stored, and may be lost
MARKER_TIMEOUT_S = 60.0  # longer than a step, and than saving a large state
ATTEMPTS = 4
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


class SavedLearner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A learner's state; its step and versions are not known if it was saved on leaving."""

    saved: SavedFile
    step: int | None
    versions: list[int] | None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a checkpoint consists of."""

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
        manifest = self.manifest
        saved = [manifest.log.saved, manifest.bucket.saved, *(learner.saved for learner in manifest.learners.values())]
        for file in saved:
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
        if head.get("version") != VERSION:
            raise RunError(
                f"{file}: made by version {head.get('made_by')} of diloco (format {head.get('version')}); this is "
                f"{__version__} (format {VERSION}): go on from it with the version that made it"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path}: is no checkpoint, or one that was never finished (it has no {MANIFEST})") from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{file}: damaged: {error}") from None
    if manifest.hash != manifest.right_hash():
        raise RunError(f"{file}: damaged: its content does not have the hash that it states")
    names = [manifest.log.saved.file, manifest.bucket.saved.file, *(x.saved.file for x in manifest.learners.values())]
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
        raise RunError(f"{file}: names a file outside of the checkpoint")
    subjects = Subjects(manifest.run)
    for stream, name in ((manifest.log, subjects.log_stream), (manifest.bucket, f"KV_{subjects.bucket}")):
        if stream.config.get("name") != name or not isinstance(stream.state.get("last_seq"), int):
            raise RunError(f"{file}: damaged: its {stream.saved.file} is of stream {stream.config.get('name')!r}, not {name!r}")
    try:
        return Checkpoint(path, manifest, parse(RunSettings, manifest.settings, str(file)))
    except SettingsError as error:
        raise RunError(f"{file}: the settings of its run are not those of this version of diloco: {error}") from None


def numbered(directory: Path) -> dict[int, Path]:
    """Folders of a run's checkpoints by number, whole or not."""
    folder = directory / FOLDER
    found = folder.iterdir() if folder.is_dir() else []
    return {int(path.name): path for path in found if path.name.isdecimal() and path.is_dir()}


async def take(path: Path, out: Path | None = None) -> tuple[Checkpoint, list[str]]:
    """Take a checkpoint of the run in ``path``: live, or stopped. Also return notes on its defects.

    Raises:
        RunError: there is no run, it has ended, or ``out`` is taken.
        BrokerError: its server is not there, or fell silent.
        OSError: the disk is full; nothing is left behind.
    """
    async with run_reader.opened(path) as run:
        if run.directory.finished:
            raise RunError(
                f"{path}: this run is finished, and takes no checkpoint any more; an earlier one can be gone on from: "
                "diloco up --resume; its log can be read: diloco verify"
            )
        if run.run.regions:
            raise RunError(f"{path}: this run has regions, and checkpoints know one server only; its logs are in each region")
        number = max([0, *numbered(run.directory.path), *_numbers(run.directory.path / "checkpoints")]) + 1
        folder = out or run.directory.path / FOLDER / str(number)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder}: exists and is not empty; choose another --out")
        with suppress(MessageError, SettingsError):  # a list that makes no sense changes nothing, here as elsewhere
            run.run.adopt((await read_changes(run.run)).records)
        with _made(folder):
            taker = _Taker(run, folder, number)
            states = await taker.snapshot() if run.live else taker.left_states()
            await taker.save(states)
        return load(folder), taker.problems


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder; remove it again if anything goes wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@dataclass
class _Taker:
    """Takes one checkpoint."""

    run: RunReader
    folder: Path
    number: int
    problems: list[str] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    _newest: int = 0  # of the markers that some learner has answered
    _heartbeats: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    _answers: dict[str, MarkerAnswer] = field(default_factory=dict)

    @property
    def _subjects(self) -> Subjects:
        return self.run.log.subjects

    # ---- the cut

    async def snapshot(self) -> dict[str, tuple[Path, MarkerAnswer | None]]:
        """Have the learners save their states at one cut; return the files by learner."""
        run, transport = self.run.run, self.run.transport
        gate = HeartbeatGate(run, self.run.map, None, self._hear_heartbeat)
        await transport.subscribe(self._subjects.heartbeat(), gate.hear)
        await hear(transport, self._subjects.marker_answer(), MarkerAnswer, run.identity, self._hear_answer, None)
        reading = asyncio.create_task(gate.work())
        try:
            return await self._snapshot()
        finally:
            await end(reading)

    async def _snapshot(self) -> dict[str, tuple[Path, MarkerAnswer | None]]:
        await asyncio.sleep(HEAR_S + 2 * self.run.run.in_force.liveness.heartbeat_s)
        for attempt in range(ATTEMPTS):
            self.cuts = await self._heads()
            versions = [cut.version for cut in self.cuts]
            last = attempt == ATTEMPTS - 1
            await self._until_answered(versions)
            beyond = [name for name, answer in self._answers.items() if answer.versions != versions]
            without_residual = await self._without_residual()
            if (not beyond and not without_residual and await self._kept()) or last:
                break
            self._forget()
            self.number += 1
        if beyond:
            self.problems.append(
                f"{', '.join(sorted(beyond))}: went beyond the cut before the marker came; what later versions hold is lost"
            )
        if without_residual:
            names = ", ".join(map(str, without_residual))
            self.problems.append(f"fragments {names}: what rounding has left over of their last merge begins at zero")
        return {name: (self._state_of(name), answer) for name, answer in sorted(self._answers.items())}

    def _state_of(self, learner: str) -> Path:
        return self.run.directory.path / "checkpoints" / str(self.number) / f"{learner}.safetensors"

    def _forget(self) -> None:
        """Forget an attempt that failed."""
        shutil.rmtree(self.run.directory.path / "checkpoints" / str(self.number), ignore_errors=True)
        self._answers.clear()

    async def _heads(self) -> list[Cut]:
        return list(await asyncio.gather(*(self._head(fragment.index) for fragment in self.run.map.fragments)))

    async def _head(self, index: int) -> Cut:
        head = await self.run.log.reader.newest(index)
        return Cut(0, 0, NO_ENTRY.hex()) if head is None else Cut(head.record.version, head.sequence, head.entry_hash.hex())

    async def _until_answered(self, versions: list[int]) -> None:
        """Repeat the marker until every living learner has answered.

        Learners hear no marker older than one that they have answered, and answers outlive the folders that numbers come from.
        """
        began_s = time.monotonic()
        while missing := self._living() - self._answers.keys():
            if time.monotonic() - began_s > MARKER_TIMEOUT_S:
                self.problems.append(
                    f"{', '.join(sorted(missing))}: no state within {MARKER_TIMEOUT_S:g} s; begins from the log"
                )
                return
            if self._newest > self.number:
                self.number = self._newest + 1
                self._answers.clear()
            frame = framing.pack(SnapshotMarker(self.number, versions), self.run.run.identity)
            await self.run.transport.publish(self._subjects.marker, frame)
            await asyncio.sleep(MARKER_EVERY_S)

    def _living(self) -> set[str]:
        oldest_s = time.monotonic() - self.run.run.in_force.liveness.dead_s
        return {
            name
            for name, (heartbeat, heard_s) in self._heartbeats.items()
            if heartbeat.state not in ("finished", "leaving", "left") and heard_s >= oldest_s
        }

    async def _hear_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._heartbeats[heartbeat.learner] = (heartbeat, time.monotonic())

    async def _hear_answer(self, answer: MarkerAnswer, _: Heard) -> None:
        if answer.learner not in self._heartbeats or answer.number > self.number + MAX_AHEAD:
            return  # of no learner, or of a checkpoint that was never taken: the numbers would come to their end
        if answer.number == self.number and len(answer.versions) == len(self.run.map.fragments):
            self._answers[answer.learner] = answer
        self._newest = max(self._newest, answer.number)

    async def _kept(self) -> bool:
        """Whether the log still goes back to the cut: keyframes are written, and entries below them dropped, all the time."""
        for index, cut in enumerate(self.cuts):
            oldest = await self.run.log.reader.oldest_keyframe(index)
            if oldest is None or oldest.entry_sequence > cut.sequence:
                return False
        return True

    async def _without_residual(self) -> list[int]:
        """Fragments whose owner did not keep the residual of the cut's version; it may have gone on to the next one."""
        newest = await asyncio.gather(*(self.run.log.reader.newest_keyframe(index) for index in range(len(self.cuts))))
        return [
            index
            for index, (cut, found) in enumerate(zip(self.cuts, newest, strict=True))
            if cut.version and (found is None or found[0].version != cut.version)
        ]

    def left_states(self) -> dict[str, tuple[Path, MarkerAnswer | None]]:
        """Return the states that learners of a stopped run saved when they left: of each the newest whole one."""
        directory = self.run.directory.path
        folder = directory / state.FOLDER
        names = {path.name.split(".")[0] for path in folder.glob("*.safetensors")} if folder.is_dir() else set()
        found: dict[str, tuple[Path, MarkerAnswer | None]] = {}
        for name in sorted(names):
            for path in state.generations(directory, name):
                if path.exists() and name not in found:
                    try:
                        state.load(path, self.run.run.identity, name)
                    except RunError as error:
                        self.problems.append(f"{error}; passed over")
                    else:
                        found[name] = (path, None)
        return found

    # ---- the files

    async def save(self, states: Mapping[str, tuple[Path, MarkerAnswer | None]]) -> None:
        """Copy the states, the bucket and the log, in this order, and write the manifest."""
        learners: dict[str, SavedLearner] = {}
        for name, (path, answer) in states.items():
            try:
                saved = await asyncio.to_thread(self._copy, path, Path("learners") / f"{name}.safetensors")
                if answer is not None and saved.blake3 != answer.file_hash.hex():
                    raise RunError(f"{path}: is not what {name} says that it wrote")
            except (FileNotFoundError, RunError) as error:
                self.problems.append(f"{name}: no state ({error}); begins from the log")
                continue
            learners[name] = SavedLearner(saved, answer.step if answer else None, answer.versions if answer else None)
        if self.run.live:
            shutil.rmtree(self.run.directory.path / "checkpoints" / str(self.number), ignore_errors=True)
        else:
            self.cuts = await self._heads()
        directory = self.run.directory
        bucket = await self._stream(f"KV_{self._subjects.bucket}", "bucket")
        manifest = Manifest(
            FORMAT,
            VERSION,
            __version__,
            directory.name,
            directory.settings.model_dump(),
            directory.data,
            self.run.map.digest.hex(),
            time.time(),
            self.cuts,
            await self._stream(self._subjects.log_stream, "log"),
            bucket,
            learners,
            "",
        )
        manifest = msgspec.structs.replace(manifest, hash=manifest.right_hash())
        encoded = msgspec.json.encode(manifest)
        files.replace(self.folder / MANIFEST, lambda draft: _write(draft, encoded))

    async def _stream(self, stream: str, name: str) -> SavedStream:
        file = f"{name}.snapshot"
        taken: Snapshot = await snapshot.save(self.run.transport, stream, self.folder / file)
        return SavedStream(SavedFile(file, taken.size_bytes, taken.blake3), dict(taken.config), dict(taken.state))

    def _copy(self, source: Path, name: Path) -> SavedFile:
        target = self.folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        return SavedFile(str(name), target.stat().st_size, hash_of(target))


def hash_of(path: Path) -> str:
    """BLAKE3 of a file, in hex."""
    hasher = blake3()
    with path.open("rb") as file:
        while block := file.read(COPY_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory.")],
    out: Annotated[Path | None, typer.Option(help="Where to put it; default: the next number in DIR/whole.")] = None,
) -> None:
    """Take a checkpoint of a whole run, without a pause."""
    began_s = time.monotonic()
    try:
        taken, problems = asyncio.run(take(directory, out))
    except OSError as error:
        raise RunError(f"{directory}: no checkpoint was taken: {error}; the run goes on") from None
    manifest = taken.manifest
    versions = [cut.version for cut in manifest.fragments]
    saved = [manifest.log.saved, manifest.bucket.saved, *(learner.saved for learner in manifest.learners.values())]
    for problem in problems:
        print(f"note: {problem}")
    print(
        f"checkpoint of run {manifest.run}: versions {min(versions)} to {max(versions)} of {len(versions)} fragments, "
        f"{len(manifest.learners)} learners' states, {size(sum(file.size_bytes for file in saved))}, "
        f"in {duration(time.monotonic() - began_s)}"
    )
    print(f"go on from it with: diloco up --resume {taken.path} --run-dir NEW")
