"""Tapes as files: one for each process, in ``tapes/`` of its state directory (:mod:`diloco.core.run.tape` is the format).

No decision of a service depends on its tape. Flushed events are with the operating system, so that they survive the process;
they are not forced to the disk, so that no step waits for that.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from diloco.core.run import tape
from diloco.core.run.lives import Life, read_lives
from diloco.core.run.tape import Header, Scan, TapeEvent
from diloco.errors import FormatError, RunError
from diloco.process.observe import Logger
from diloco.settings.service import ServiceSettings

FOLDER = "tapes"
REFUSED_SUFFIX = ".refused"
MAX_WAITING_BYTES = 1 << 20
MAX_TAPE_BYTES = 1 << 32


class Recorder(Protocol):
    """A receiver of a process's events. Callable from any thread."""

    def record(self, event: TapeEvent) -> None:
        """Note an event, without waiting."""

    def flush(self) -> None:
        """Hand the noted events to the operating system."""


class Unrecorded:
    """A recorder that keeps nothing: for members that are never replayed."""

    def record(self, event: TapeEvent) -> None:
        return

    def flush(self) -> None:
        return


class TapeFile:
    """A process's tape. It continues the tape of the same run and name; one that cannot be read is put aside, whole.

    Events that cannot be written (a full disk, another process of this name) are tried again with the next event. Once
    ``MAX_WAITING_BYTES`` of them wait they are dropped, and a :class:`~diloco.core.run.tape.Gap` has their number.
    """

    def __init__(self, directory: Path, name: str, run: bytes, log: Logger) -> None:
        self.path, self.log = directory / FOLDER / f"{name}{tape.SUFFIX}", log
        self._header = Header(run, name)
        self._noting, self._writing = threading.Lock(), threading.Lock()
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._dropped = 0
        self._complained = False
        self._place = 0
        self._file: int | None = None  # open once there is something to write

    @classmethod
    def begin(cls, settings: ServiceSettings, run: bytes, wall_s: float, log: Logger) -> Self:
        """Open the tape of a service other than a learner, and note its start."""
        begun = cls(settings.state_dir, settings.name, run, log)
        begun.record(tape.Start(int(wall_s * 1000), 0, ()))
        begun.flush()
        return begun

    def record(self, event: TapeEvent) -> None:
        raw = tape.encode(event)
        with self._noting:
            if self._waiting_bytes + len(raw) > MAX_WAITING_BYTES:
                self._dropped += len(self._waiting)
                self._waiting, self._waiting_bytes = [], 0
            self._waiting.append(raw)
            self._waiting_bytes += len(raw)

    def flush(self) -> None:
        with self._writing:
            with self._noting:
                waiting, dropped = self._waiting, self._dropped
                self._waiting, self._waiting_bytes, self._dropped = [], 0, 0
            if dropped:
                waiting = [tape.encode(tape.Gap(dropped)), *waiting]
            if not waiting:
                return
            try:
                file = self._open() if self._file is None else self._file
                self._write(file, waiting)
                self._complained = False
            except OSError as error:
                if not self._complained:
                    self.log.warning("tape_not_written", file=str(self.path), reason=str(error))
                self._complained = True
                with self._noting:
                    self._waiting = waiting + self._waiting
                    self._waiting_bytes += sum(map(len, waiting))

    def close(self) -> None:
        """Flush, and close the file."""
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                place = self._whole_bytes()
                if place is not None:
                    os.ftruncate(file, place)
                    os.lseek(file, place, os.SEEK_SET)
                    self._file, self._place = file, place
                    return file
            except OSError:
                os.close(file)
                raise
            os.close(file)  # the tape was put aside

    def _write(self, file: int, waiting: list[bytes]) -> None:
        raw = b"" if self._place else self._header.pack()
        raw += b"".join(tape.blocks(waiting, self._header.hash, self._place + len(raw)))
        try:
            written = os.write(file, raw)
            if written < len(raw):
                raise OSError(f"{written} of {len(raw)} bytes were written")
            self._place += written
        except OSError:
            # a part of a block would make all that follows unreadable
            os.ftruncate(file, self._place)
            os.lseek(file, self._place, os.SEEK_SET)
            raise

    def _whole_bytes(self) -> int | None:
        """Return the place after the last whole block, where this process continues; None if the tape was put aside."""
        if not self.path.exists() or not self.path.stat().st_size:
            return 0
        try:
            found = load(self.path, self._header.run)
            if found.scan.header != self._header:
                raise RunError(f"{self.path}: is the tape of {found.scan.header.name!r}")
            if found.scan.damaged_at is not None:
                raise RunError(found.problem)
        except RunError as error:
            aside = next(
                path
                for i in range(1, 1 << 16)
                if not (path := self.path.with_name(f"{self.path.name}.{i}{REFUSED_SUFFIX}")).exists()
            )
            self.path.replace(aside)
            self.log.warning("tape_refused", file=str(self.path), kept_as=aside.name, reason=str(error))
            return None
        if found.scan.torn_bytes:
            self.log.info("tape_torn", file=str(self.path), dropped_bytes=found.scan.torn_bytes)
        return found.scan.good_bytes


@dataclass(frozen=True)
class Tape:
    """A tape as read."""

    path: Path
    data: bytes
    scan: Scan

    @property
    def name(self) -> str:
        return self.scan.header.name

    @property
    def problem(self) -> str:
        """The tape's damage; empty if it has none. A torn end is no damage: the process died while it wrote."""
        if self.scan.damaged_at is None:
            return ""
        rest = len(self.data) - self.scan.damaged_at
        return f"{self.path}: damaged at byte {self.scan.damaged_at}; the {rest} bytes from there on are not read"

    def events(self) -> Iterator[TapeEvent]:
        """Yield all its events.

        Raises:
            RunError: a block holds bytes that no writer of this version writes.
        """
        try:
            yield from tape.events(self.data, self.scan)
        except FormatError as error:
            raise RunError(f"{self.path}: {error}") from None

    def lives(self) -> list[Life]:
        """Return the lives of a learner's process.

        Raises:
            RunError: the events make no sense.
        """
        try:
            return read_lives(self.events())
        except FormatError as error:
            raise RunError(f"{self.path}: {error}") from None


def load(path: Path, run: bytes) -> Tape:
    """Read a tape.

    Raises:
        RunError: it cannot be read, is none, is of another format version or run, or its header is damaged.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_TAPE_BYTES:
            raise RunError(f"{path}: {size_bytes} bytes, more than a tape's {MAX_TAPE_BYTES}")
        data = path.read_bytes()
        scan = tape.scan(data)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    except FormatError as error:
        raise RunError(f"{path}: {error}") from None
    if scan.header.run != run:
        raise RunError(f"{path}: belongs to run {scan.header.run.hex()}, expected {run.hex()}")
    return Tape(path, data, scan)


def load_all(directory: Path, run: bytes) -> tuple[list[Tape], list[str]]:
    """Read all tapes of a run's directory, sorted by name; return them, and the troubles with unreadable or damaged ones.

    Services may keep their files in several folders of the run's directory, one a region.
    """
    tapes, problems = [], []
    for path in sorted([*directory.glob(f"{FOLDER}/*"), *directory.glob(f"*/{FOLDER}/*")]):
        if path.suffix == REFUSED_SUFFIX:
            problems.append(f"{path}: could not be read by its own process, which renamed it")
        elif path.suffix == tape.SUFFIX and path.stat().st_size:
            try:
                found = load(path, run)
            except RunError as error:
                problems.append(str(error))
                continue
            tapes.append(found)
            problems += [found.problem] if found.problem else []
    return tapes, problems
