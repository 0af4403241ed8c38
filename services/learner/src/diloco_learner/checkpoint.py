"""A learner's checkpoints: its own, regularly; those of a whole run, when it is asked; and what it lends to a peer.

All of them begin at a boundary, and are of this boundary. A thread reads the island's state chunk by chunk
(:mod:`diloco_learner.holding`), hashes and writes it, and then the accounts' arrays, which nobody writes to any more; a loan
is written to a file too, and served from there. So the host never holds more than a few chunks. The next one begins when it
has ended.

Where the devices have room for a copy of the state, the copy is queued between two steps, and training goes on meanwhile. Where
they have not, the next step waits until the thread has read the state from the devices: then a checkpoint takes no memory, and
steps are held up as long as the disk takes its bytes. :mod:`diloco_learner.pacing` says when its own are due, so that this is
two parts of a hundred of the time at most.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from numpy.typing import NDArray

from diloco.core import tape as events
from diloco.core.chunks import Chunk
from diloco.core.learner import ACCOUNTS, Dump
from diloco.errors import DilocoError, RunError
from diloco.member import state
from diloco.member.member import Member
from diloco.member.peer import Layout
from diloco.member.state import Content, Saved, State
from diloco.process.observe import Logger
from diloco.settings.service import LearnerSettings
from diloco.wire.control import MarkerAnswer, SnapshotMarker
from diloco_learner.island import Capture, Island
from diloco_learner.pacing import Pacing


class Keeper:
    """Saves and lends an island's state. The trainer's thread calls it, at boundaries."""

    def __init__(self, island: Island, member: Member, settings: LearnerSettings, log: Logger) -> None:
        self.island, self.member, self.settings, self.log = island, member, settings, log
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._job: Future[None] | None = None
        self._pacing = Pacing(settings.checkpoint_s, time.monotonic(), member.step)
        self._complained = False
        self._lending = False  # what is being saved is a loan
        self._lends_after_s = -math.inf
        self._part = jax.process_index()
        self._loans = state.loans(settings.state_dir, settings.name)
        shutil.rmtree(self._loans, ignore_errors=True)  # what a process left behind that was killed

    @property
    def is_saving(self) -> bool:
        """Whether a state was begun to be saved or lent, and no boundary has found that ended."""
        return self._job is not None

    def at_boundary(self) -> None:
        """Begin what is due; wait for nothing but a state that cannot be copied to be read."""
        if self._job is not None:
            if not self._job.done():
                return
            self._job.result()
            self._job = None
            self._note_cost()
        if self.member.lender.wanted and time.monotonic() < self._lends_after_s:
            self.member.lender.give_none()
        elif self.member.lender.wanted:
            self._lending = True
            step, versions = self.member.step, self.member.versions()
            capture = self.island.capture(optimizer_only=True)
            self.member.tape.record(events.Copied())
            self._begin(capture, lambda content: self._lend(step, versions, content))
            return
        marker = self.member.marker_due()
        regular = self._pacing.due(time.monotonic())
        dump = self.member.dump() if marker is not None or regular else None
        if dump is None:
            return
        capture = self.island.capture()
        if marker is not None:
            versions = self.member.versions()
            self.member.note_copied(marker)
            self._begin(capture, lambda content: self._answer(marker, versions, dump, content))
        else:
            self._pacing.begin_own(time.monotonic())
            self._begin(capture, lambda content: self._save_own(dump, content))

    def save_last(self) -> None:
        """Save the state of a learner that ends, when what is being saved has been."""
        self.close()
        self._save_own(self.member.checkpoint(), self.island.capture().content)

    def close(self) -> None:
        """Wait for what is being saved."""
        self._worker.shutdown()

    def _begin(self, capture: Capture, job: Callable[[Content], None]) -> None:
        self._pacing.begin(time.monotonic(), self.member.step)
        read = threading.Event()

        def values() -> Iterator[NDArray[Any]]:
            yield from capture.content.values
            read.set()

        def work() -> None:
            try:
                job(Content(capture.content.chunks, values()))
            finally:
                read.set()

        self._job = self._worker.submit(work)
        if capture.held:
            read.wait()

    def _note_cost(self) -> None:
        held_up_s, pause_s = self._pacing.end(time.monotonic(), self.member.step)
        if self._lending:  # or who asks for loans could hold up all steps
            self._lends_after_s, self._lending = time.monotonic() + pause_s, False
        if pause_s > self.settings.checkpoint_s > 0:
            self.log.debug("checkpoint_put_off", held_up_s=round(held_up_s, 3), pause_s=round(pause_s, 3))

    def _save_own(self, dump: Dump, content: Content) -> None:
        path, previous = state.generations(self.settings.state_dir, self.settings.name, self._part)
        saved = self._save(path, dump, content, previous)
        if saved is not None:
            self.member.note_saved(saved.digest)

    def _answer(self, marker: SnapshotMarker, versions: list[int], dump: Dump, content: Content) -> None:
        path = state.snapshot(self.settings.state_dir, marker.number, self.settings.name, self._part)
        saved = self._save(path, dump, content)
        if saved is not None:
            self.member.note_saved(saved.digest)
            step, file_hash = dump[0]["step"], state.file_hash(path)
            answer = MarkerAnswer(self.settings.name, marker.number, step, versions, saved.size_bytes, file_hash)
            self.member.answer_marker(answer)

    def _save(self, path: Path, dump: Dump, content: Content, previous: Path | None = None) -> Saved | None:
        """Write a state; None if the disk does not take it, which is no reason to end."""
        accounts, arrays = dump
        part = state.Part(self._part, jax.process_count(), f"{self.member.admission.incarnation}, step {accounts['step']}")
        began_s = time.monotonic()
        try:
            saved = state.save(
                path, self.member.run.identity, self.settings.name, accounts, content + Content.of(arrays), previous, part
            )
        except OSError as error:
            self._complain("checkpoint_not_saved", path, error)
            return None
        self._complained = False
        took_s = round(time.monotonic() - began_s, 3)
        self.log.debug("checkpoint_saved", file=path.name, step=accounts["step"], bytes=saved.size_bytes, took_s=took_s)
        return saved

    def _lend(self, step: int, versions: list[int], content: Content) -> None:
        path = self._loans / f"{step}.safetensors"
        try:
            state.save(path, self.member.run.identity, self.settings.name, {}, content)
            lent = Lent(path, state.load(path, self.member.run.identity, self.settings.name))
        except (OSError, RunError) as error:
            self._complain("state_not_saved_to_lend", path, error)
            self.member.lender.give_none()
        else:
            self.member.lend(step, versions, lent)

    def _complain(self, event: str, path: Path, error: Exception) -> None:
        if not self._complained:
            self.log.warning(event, file=str(path), reason=str(error))
        self._complained = True


class Lent:
    """An optimizer state in a file, which is lent from there."""

    def __init__(self, path: Path, saved: State) -> None:
        self._path, self._saved = path, saved
        self.layout, self.content_hash = Layout.of(saved.layout()), saved.state_hash

    def read(self, wanted: Chunk) -> NDArray[Any]:
        """Return a chunk, any dtype [its lengths].

        Raises:
            RunError: it is not there any more.
        """
        return self._saved.read(wanted)

    def drop(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def restore(settings: LearnerSettings, island: Island, member: Member, log: Logger) -> bool:
    """Go on from the newest checkpoint that is whole and fits; False if there is none, and the learner begins from the log.

    One that is damaged or foreign is named and left alone.
    """
    paths = state.generations(settings.state_dir, settings.name, jax.process_index())
    if not any(path.exists() for path in paths):  # saved by fewer processes
        paths = state.generations(settings.state_dir, settings.name)
    for path in paths:
        if not path.exists():
            continue
        try:
            saved = state.load(path, member.run.identity, settings.name)
            _check(saved, island)
            member.restore(saved.accounts, saved.arrays(ACCOUNTS))
        except (DilocoError, LookupError, TypeError, ValueError, OverflowError) as error:
            log.warning("checkpoint_refused", file=str(path), reason=str(error))
            continue
        for chunk in island.wanted():
            island.put(chunk, saved.read(chunk))
        member.tape.record(events.Restored(saved.digest))
        log.info("checkpoint_restored", file=path.name, step=member.step)
        return True
    return False


def _check(saved: State, island: Island) -> None:
    """Check that a state is one of this island's model, and that this process finds all that its devices need.

    Raises:
        RunError: it is not, or it does not.
    """
    island.check_state({name: whole for name, whole in saved.layout().items() if not name.startswith(ACCOUNTS)})
    for chunk in island.wanted():
        if not saved.has(chunk):
            raise RunError(
                f"checkpoint: array {chunk.name!r} is not there from {chunk.start} to {chunk.stop}: another process of this "
                "learner saved it; give its processes one state_dir that all of them see, or the mesh that they had"
            )
        saved.check(chunk)
