"""A learner's checkpoints: its own, regularly; those of a whole run, when it is asked; and what it lends to a peer.

All of them begin at a boundary, and are of this boundary. :mod:`diloco_learner.run.saver` writes them; a loan is written to a
file too, and served from there. The next one begins when it has ended. :mod:`diloco_learner.run.pacing` says when its own are
due, so that steps are held up for two parts of a hundred of the time at most.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from diloco.core.learner.learner import ACCOUNTS, Dump
from diloco.core.run import tape as events
from diloco.core.tensors.chunks import Chunk
from diloco.errors import RunError
from diloco.member.member import Member
from diloco.member.peer import Layout
from diloco.process.observe import Logger
from diloco.settings.service import LearnerSettings
from diloco.states import state
from diloco.states.state import UNFIT, Content, State
from diloco.states.statefolder import StateFolder
from diloco.wire.control import MarkerAnswer, MarkerDeclined, SnapshotMarker
from diloco.wire.fields import MAX_TEXT
from diloco.wire.process_messages import Purpose
from diloco_learner.api.model import SavedModel
from diloco_learner.run.pacing import Pacing
from diloco_learner.run.saver import Saver


class CheckpointKeeper:
    """Saves and lends an island's state, for a learner of one process. The trainer's thread calls it, at boundaries."""

    def __init__(self, island: SavedModel, member: Member, settings: LearnerSettings, log: Logger) -> None:
        self.island, self.member, self.settings, self.log = island, member, settings, log
        self.saver = Saver(island, member.run.identity, settings.name, log)
        self._pacing = Pacing(settings.checkpoint_s, time.monotonic(), member.step)
        self._saves = False
        self._loans = StateFolder(settings.state_dir, settings.name).loans()
        shutil.rmtree(self._loans, ignore_errors=True)  # what a process left behind that was killed

    def at_boundary(self) -> None:
        """Begin what is due; wait for nothing but a state that cannot be copied to be read."""
        if self.saver.is_busy():
            return
        now_s, lender = time.monotonic(), self.member.lender
        if self._saves:
            self._saves = False
            note_cost(self._pacing, now_s, self.member.step, self.log)
        if lender.wanted and not self._pacing.may_lend(now_s):
            lender.give_none()
        elif lender.wanted:
            step, versions = self.member.step, self.member.versions()
            self._begin("loan")
            self.member.tape.record(events.Copied())
            self.saver.begin(lambda content: self._lend(step, versions, content), optimizer_only=True)
            return
        marker = self.member.marker_due()
        dump = self.member.dump() if marker is not None or self._pacing.due(now_s) else None
        if dump is None:
            return
        if marker is not None:
            versions = self.member.versions()
            self.member.note_copied(marker)
            self._begin("whole")
            self.saver.begin(lambda content: self._answer(marker, versions, dump, content))
        else:
            self._begin("own")
            self.saver.begin(lambda content: self._save_own(dump, content))

    def save_last(self) -> None:
        """Save the state of a learner that ends, when what is being saved has been."""
        self.close()
        self._save_own(self.member.checkpoint(), self.island.capture().content)

    def close(self) -> None:
        """Wait for what is being saved."""
        self.saver.close()

    def _begin(self, purpose: Purpose) -> None:
        self._saves = True
        self._pacing.begin(time.monotonic(), self.member.step, purpose)

    def _save_own(self, dump: Dump, content: Content) -> None:
        path, previous = StateFolder(self.settings.state_dir, self.settings.name).generations()
        saved = self.saver.save(path, self._name(dump), dump, content, previous)
        if saved is not None:
            self.member.note_saved(saved.digest)

    def _answer(self, marker: SnapshotMarker, versions: list[int], dump: Dump, content: Content) -> None:
        path = StateFolder(self.settings.state_dir, self.settings.name).snapshot(marker.number)
        saved = self.saver.save(path, self._name(dump), dump, content)
        if saved is None:
            reason = self.saver.failure[:MAX_TEXT]
            self.member.answer_marker(MarkerDeclined(self.settings.name, marker.number, "not_saved", reason))
            return
        self.member.note_saved(saved.digest)
        step, file_hash = dump[0]["step"], state.file_hash(path)
        self.member.answer_marker(
            MarkerAnswer(
                learner=self.settings.name,
                number=marker.number,
                step=step,
                versions=versions,
                size_bytes=saved.size_bytes,
                file_hash=file_hash,
            )
        )

    def _name(self, dump: Dump) -> str:
        return f"{self.member.admission.incarnation}, step {dump[0]['step']}"

    def _lend(self, step: int, versions: list[int], content: Content) -> None:
        lent = lend_from(self.saver, self._loans / f"{step}.safetensors", f"loan, step {step}", content)
        if lent is None:
            self.member.lender.give_none()
        else:
            self.member.lend(step, versions, lent)


def note_cost(pacing: Pacing, now_s: float, step: int, log: Logger) -> None:
    """Note at a boundary that a saving has ended, and say where it puts off the next checkpoint."""
    held_up_s, pause_s = pacing.end(now_s, step)
    if pause_s > pacing.interval_s > 0:
        log.debug("checkpoint_put_off", held_up_s=round(held_up_s, 3), pause_s=round(pause_s, 3))


def lend_from(saver: Saver, path: Path, name: str, content: Content) -> LentState | None:
    """Write what is to be lent to a file; None if the disk does not take it."""
    if saver.write(path, name, {}, content, None, failure="state_not_saved_to_lend") is None:
        return None
    try:
        return LentState(path, state.load(path, saver.run, saver.learner))
    except RunError as error:
        saver.complain("state_not_saved_to_lend", path, error)
        return None


class LentState:
    """An optimizer state in a file, which is lent from there."""

    def __init__(self, path: Path, saved: State) -> None:
        self._path = path
        self._saved: State | None = saved  # it keeps the file open, and its room on the disk taken
        self.layout, self.content_hash = Layout.of(saved.layout()), saved.state_hash

    def read(self, wanted: Chunk) -> NDArray[Any]:
        """Return a chunk, any dtype [its lengths].

        Raises:
            RunError: it is not there any more.
        """
        saved = self._saved
        if saved is None:
            raise RunError(f"{self._path}: array {wanted.name!r} cannot be read: it is no longer lent")
        return saved.read(wanted)

    def drop(self) -> None:
        """Remove the file."""
        self._saved = None
        self._path.unlink(missing_ok=True)


def own_states(settings: LearnerSettings, island: SavedModel, run: bytes, log: Logger) -> Iterator[tuple[Path, State]]:
    """Yield the learner's own checkpoints that are whole and fit its model, the newest first. ``run``: the run's identity.

    Each file is read and checked when it is asked for. One that is damaged or foreign is named and left alone.
    """
    for path in StateFolder(settings.state_dir, settings.name).generations():
        if not path.exists():
            continue
        try:
            saved = state.load(path, run, settings.name)
            check(saved, island)
        except UNFIT as error:
            log.warning("checkpoint_refused", file=str(path), reason=str(error))
        else:
            yield path, saved


def restore(states: Iterable[tuple[Path, State]], island: SavedModel, member: Member, log: Logger) -> bool:
    """Go on from the first of these checkpoints whose accounts fit the run; False if there is none.

    One whose accounts do not is named and left alone. Without a checkpoint the learner begins from the log.
    """
    for path, saved in states:
        try:
            member.restore(saved.accounts, saved.arrays(ACCOUNTS))
        except UNFIT as error:
            log.warning("checkpoint_refused", file=str(path), reason=str(error))
            continue
        take_over(path, saved, island, member, log)
        return True
    return False


def take_over(path: Path, saved: State, island: SavedModel, member: Member, log: Logger) -> None:
    """Take over the model of a checkpoint that has been checked, and whose accounts the member goes on with."""
    put(saved, island)
    member.tape.record(events.Restored(saved.digest))
    log.info("checkpoint_restored", file=path.name, step=member.step)


def take_up(island: SavedModel, member: Member, state_dir: Path, log: Logger) -> bool:
    """Begin with the optimizer state that a learner of the run before has ended with, unless this run has merged something."""
    continued = member.run.created.continues
    if continued is None or member.learner.peers() is not None:
        return False
    found = state_before(island, state_dir, member.settings.name, bytes.fromhex(continued.identity), log)
    if found is None:
        return False
    put(found.saved, island, optimizer_only=True)
    member.note_state_before(found.learner, found.saved.digest)
    return True


@dataclass(frozen=True)
class Before:
    """The state with which a learner of the run that this one continues has ended."""

    learner: str
    saved: State


def state_before(island: SavedModel, state_dir: Path, learner: str, run: bytes, log: Logger) -> Before | None:
    """Return the last state of the learner of this name in a run before, or else of the first one that fits; None: none does.

    ``run``: that run's identity. An optimizer without a state needs none.
    """
    if not island.optimizer_layout().arrays:
        return None
    for name, path in sorted(state.ended_before(state_dir, run), key=lambda found: found[0] != learner):
        try:
            saved = state.load(path, run, name)
            check(saved, island)
        except UNFIT as error:
            log.warning("checkpoint_refused", file=str(path), reason=str(error))
        else:
            return Before(name, saved)
    return None


def put(saved: State, island: SavedModel, *, optimizer_only: bool = False) -> None:
    """Write a state that has been checked, or the optimizer's alone, into this process's shards."""
    for chunk in island.wanted(optimizer_only=optimizer_only):
        island.put(chunk, saved.read(chunk))


def check(saved: State, island: SavedModel) -> None:
    """Check that a state is one of this island's model, and that this process finds all that its devices need.

    Raises:
        RunError: it is not, or it does not.
    """
    wanted = island.wanted()
    absent = next((chunk for chunk in wanted if not saved.has(chunk)), None)
    if absent is not None and saved.missing:
        raise RunError(
            f"checkpoint: array {absent.name!r} is missing from {absent.start} to {absent.stop}: another process of this "
            "learner saved it; give all its processes the same shared state_dir, or the mesh that they had"
        )
    island.check_state({name: whole for name, whole in saved.layout().items() if not name.startswith(ACCOUNTS)})
    for chunk in wanted:
        saved.check(chunk)
