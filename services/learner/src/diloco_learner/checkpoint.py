"""A learner's checkpoints: its own, regularly; those of a whole run, when it is asked; and what it lends to a peer.

All of them begin at a boundary with a copy that is queued on the device, between two steps, and with the accounts' arrays,
which nobody writes to any more. A thread brings the copy to the host, hashes it and writes it; the next one begins when it has
ended. :mod:`diloco_learner.pacing` says when its own are due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from diloco.core import tape as events
from diloco.core.learner import ACCOUNTS, Dump
from diloco.errors import DilocoError
from diloco.member import state
from diloco.member.member import Member
from diloco.member.peer import Layout
from diloco.member.state import Saved
from diloco.process.observe import Logger
from diloco.settings.service import LearnerSettings
from diloco.wire.control import MarkerAnswer, SnapshotMarker
from diloco_learner.island import Island
from diloco_learner.pacing import Pacing


class Keeper:
    """Saves and lends an island's state. The trainer's thread calls it, at boundaries."""

    def __init__(self, island: Island, member: Member, settings: LearnerSettings, log: Logger) -> None:
        self.island, self.member, self.settings, self.log = island, member, settings, log
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._job: Future[None] | None = None
        self._pacing = Pacing(settings.checkpoint_s, time.monotonic(), member.step)
        self._complained = False

    def at_boundary(self) -> None:
        """Begin what is due; waits for nothing."""
        if self._job is not None:
            if not self._job.done():
                return
            self._job.result()
            self._job = None
            self._note_cost()
        if self.member.lender.wanted:
            step, versions, copies = self.member.step, self.member.versions(), self.island.copy_optimizer()
            self.member.tape.record(events.Copied())
            self._begin(lambda: self._lend(step, versions, copies))
            return
        marker = self.member.marker_due()
        regular = self._pacing.due(time.monotonic())
        dump = self.member.dump() if marker is not None or regular else None
        if dump is None:
            return
        copies = self.island.copy()
        if marker is not None:
            versions = self.member.versions()
            self.member.note_copied(marker)
            self._begin(lambda: self._answer(marker, versions, dump, copies))
        else:
            self._pacing.begin_own(time.monotonic())
            self._begin(lambda: self._save_own(dump, copies))

    def save_last(self) -> None:
        """Save the state of a learner that ends, when what is being saved has been."""
        self.close()
        self._save_own(self.member.checkpoint(), self.island.copy())

    def close(self) -> None:
        """Wait for what is being saved."""
        self._worker.shutdown()

    def _begin(self, job: Callable[[], None]) -> None:
        self._pacing.begin(time.monotonic(), self.member.step)
        self._job = self._worker.submit(job)

    def _note_cost(self) -> None:
        held_up_s, pause_s = self._pacing.end(time.monotonic(), self.member.step)
        if pause_s > self.settings.checkpoint_s > 0:
            self.log.debug("checkpoint_put_off", held_up_s=round(held_up_s, 3), pause_s=round(pause_s, 3))

    def _save_own(self, dump: Dump, copies: Mapping[str, jax.Array]) -> None:
        path, previous = state.generations(self.settings.state_dir, self.settings.name)
        saved = self._save(path, dump, copies, previous)
        if saved is not None:
            self.member.note_saved(saved.digest)

    def _answer(self, marker: SnapshotMarker, versions: list[int], dump: Dump, copies: Mapping[str, jax.Array]) -> None:
        saved = self._save(state.snapshot(self.settings.state_dir, marker.number, self.settings.name), dump, copies)
        if saved is not None:
            self.member.note_saved(saved.digest)
            step = dump[0]["step"]
            answer = MarkerAnswer(self.settings.name, marker.number, step, versions, saved.size_bytes, saved.file_hash)
            self.member.answer_marker(answer)

    def _save(self, path: Path, dump: Dump, copies: Mapping[str, jax.Array], previous: Path | None = None) -> Saved | None:
        """Write a state; None if the disk does not take it, which is no reason to end."""
        accounts, arrays = dump
        began_s = time.monotonic()
        try:
            saved = state.save(
                path, self.member.run.identity, self.settings.name, accounts, arrays | _to_host(copies), previous
            )
        except OSError as error:
            if not self._complained:
                self.log.warning("checkpoint_not_saved", file=str(path), reason=str(error))
            self._complained = True
            return None
        self._complained = False
        took_s = round(time.monotonic() - began_s, 3)
        self.log.debug("checkpoint_saved", file=path.name, step=accounts["step"], bytes=saved.size_bytes, took_s=took_s)
        return saved

    def _lend(self, step: int, versions: list[int], copies: Mapping[str, jax.Array]) -> None:
        self.member.lend(step, versions, Layout.of(copies), _to_host(copies))


def restore(settings: LearnerSettings, island: Island, member: Member, log: Logger) -> bool:
    """Go on from the newest checkpoint that is whole and fits; False if there is none, and the learner begins from the log.

    One that is damaged or foreign is named and left alone.
    """
    for path in state.generations(settings.state_dir, settings.name):
        if not path.exists():
            continue
        try:
            saved = state.load(path, member.run.identity, settings.name)
            own = {name: array for name, array in saved.arrays.items() if not name.startswith(ACCOUNTS)}
            island.check_state(own)
            member.restore(saved.accounts, saved.arrays)
            island.load_state(own)
        except (DilocoError, LookupError, TypeError, ValueError, OverflowError) as error:
            log.warning("checkpoint_refused", file=str(path), reason=str(error))
            continue
        member.tape.record(events.Restored(saved.digest))
        log.info("checkpoint_restored", file=path.name, step=member.step)
        return True
    return False


def _to_host(copies: Mapping[str, jax.Array]) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(values) for name, values in copies.items()}
