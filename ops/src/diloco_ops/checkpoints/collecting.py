"""``diloco checkpoint collect``: the states of learners on other machines, brought together in a checkpoint.

A checkpoint's manifest states name, size and hash of each state. Each team copies its learners' states from their volumes. A
copy counts if its content has the hash. When the last one is there, the checkpoint is whole, and learners are told its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.control.whole import KEY, note_whole
from diloco.errors import BrokerError, DilocoError, FormatError, RunError
from diloco.process import files
from diloco.transport import Bucket
from diloco_ops.checkpoints import manifest
from diloco_ops.checkpoints.manifest import COPY_BYTES, RunCheckpoint, SavedFile, hash_of
from diloco_ops.operate.changing import Say
from diloco_ops.reading import run_reader
from diloco_report.units import size

NOTED_WITHIN_S = 5.0  # a write that a server denies is never answered


async def collect(path: Path, folders: Sequence[Path], say: Say = print) -> int:
    """Copy into a checkpoint the states that it lacks, from wherever they are in ``folders``.

    Return 0 if it is whole now, else 1.

    Raises:
        RunError: it is no checkpoint, a file of its run is damaged, or a folder is not there; or the disk is full.
    """
    taken = manifest.load(path)
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"{folder}: no such folder")
    taken.check_run()
    search = _Search(taken, list(_states(folders)))
    try:
        for name, missing in taken.absent().items():
            for file in missing:
                source = await asyncio.to_thread(search.bring, file)
                if source is not None:
                    say(f"{name}: {file.file}, {size(file.size_bytes)}, from {source}")
    except OSError as error:
        raise RunError(f"{path}: {error}; free space, and collect again: what was copied stays") from None
    for fault in search.faults:
        say(f"note: {fault}")
    if taken.absent():
        tell_absent(taken, say)
        return 1
    taken.check()
    say(f"{path}: whole, with {len(taken.manifest.learners)} learners' states")
    for note in await _tell_learners(taken):
        say(f"note: {note}")
    return 0


async def noted_whole(registry: Bucket, number: int) -> list[str]:
    """Tell learners that the checkpoint of this number is whole; return a note where the control store does not allow it."""
    try:
        async with asyncio.timeout(NOTED_WITHIN_S):
            await note_whole(registry, number)
    except (BrokerError, FormatError, TimeoutError):
        return [
            f"learners cannot be notified that this checkpoint is whole, and keep their newest eight states: key {KEY!r} "
            "cannot be written; if the control store's list is from an earlier version: diloco keys refresh"
        ]
    return []


def tell_absent(taken: RunCheckpoint, say: Say) -> None:
    """Say which learners' states a checkpoint lacks, and how they come."""
    for name, missing in taken.absent().items():
        say(f"not here yet: {name}, {size(sum(file.size_bytes for file in missing))}")
    number = taken.manifest.number
    copied = "these files" if number is None else f"checkpoints/{number} of each of these learners' state_dir"
    say(f"copy {copied}, then: diloco checkpoint collect {taken.path} FOLDER...")


def _states(folders: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.safetensors")):
            if path.is_file():
                yield path, path.stat().st_size


@dataclass
class _Search:
    """Looks for files by their hashes, those of the right name first."""

    taken: RunCheckpoint
    found: list[tuple[Path, int]]  # files that may be states, and their bytes
    faults: list[str] = field(default_factory=list)

    def bring(self, wanted: SavedFile) -> Path | None:
        """Copy a file into the checkpoint; return where it was, or None if it is in none of the folders.

        Raises:
            OSError: the disk is full, or a file cannot be read.
        """
        name, faults = Path(wanted.file).name, []
        for path, size_bytes in sorted(self.found, key=lambda each: each[0].name != name):
            named = path.name == name and path.parent.name == str(self.taken.manifest.number)
            if size_bytes != wanted.size_bytes:
                if named:
                    faults.append(f"{path}: has {size_bytes} bytes, expected {wanted.size_bytes}: it was copied by half")
            elif hash_of(path) == wanted.blake3:
                self._copy(path, wanted)
                return path
            elif named:
                faults.append(f"{path}: is damaged: its content does not have the hash that its learner stated")
        self.faults += faults
        return None

    def _copy(self, path: Path, wanted: SavedFile) -> None:
        def write(draft: Path) -> None:
            with path.open("rb") as source, draft.open("wb") as target:
                while block := source.read(COPY_BYTES):
                    target.write(block)
            if hash_of(draft) != wanted.blake3:
                raise RunError(f"{path}: changed while it was copied; collect again")

        files.replace(self.taken.path / wanted.file, write)


async def _tell_learners(taken: RunCheckpoint) -> list[str]:
    """Tell learners that a checkpoint is whole, through the run's directory that it lies in. Return notes."""
    directory, number = taken.path.resolve().parent.parent, taken.manifest.number
    if number is None:
        return []
    if not (directory / "run.json").is_file():
        return [
            f"{taken.path}: is outside a run's directory, so learners are not notified that it is whole, and keep more states"
        ]
    try:
        async with run_reader.reached(directory) as live:
            return await noted_whole(live.run.registry, number)
    except DilocoError as error:
        return [f"learners could not be notified that it is whole ({error}): collect again when the control store answers"]
