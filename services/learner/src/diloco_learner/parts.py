"""Checkpoints of a learner of several processes: each writes and reads the part that lies on its devices and that it carries.

The leader decides when a state is saved, and all save it as of the same boundary. A new generation begins from the newest one
that every process can begin from, whichever number of processes saved it: each needs the chunks of its shards, and the arrays
of the fragments that it carries now. So parts that other hosts saved have to be where it can read them.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco.core.learner import ACCOUNTS
from diloco.errors import RunError
from diloco.member import carrier, state
from diloco.member.leader import Leader
from diloco.member.part import Follower, Part, Saving
from diloco.member.state import Content, Saved, State
from diloco.process.observe import Logger
from diloco.settings.service import LearnerSettings
from diloco.wire.island import Candidate, Pending, Purpose, Told
from diloco_learner import checkpoint
from diloco_learner.beginning import Process
from diloco_learner.checkpoint import UNFIT, lend_from, note_cost
from diloco_learner.island import Island
from diloco_learner.pacing import Pacing
from diloco_learner.saver import Saver

TAKEN = "taken"


class PartKeeper:
    """Saves this process's part of each state that the leader wants saved. The trainer's thread calls it, at boundaries."""

    def __init__(self, island: Island, member: Leader | Follower, settings: LearnerSettings, log: Logger) -> None:
        group = member.part.group
        self.saves, self.settings, self.log = member, settings, log
        self.saver = Saver(island, member.part.run.identity, settings.name, log, group.index, group.count)
        self._lent, self._loans = member.part.lent, state.loans(settings.state_dir, settings.name, group.index)
        shutil.rmtree(self._loans, ignore_errors=True)  # what a process left behind that was killed

    def at_boundary(self) -> None:
        """Begin what was decided; wait for nothing but a state that cannot be copied to be read."""
        self.saver.is_busy()  # where the one before has failed, this learner ends
        saving = self.saves.saving
        if saving is not None:
            self.saver.settle()  # it is busy only where a learner leaves while it saves
            lends = saving.save.purpose == "loan"
            self.saver.begin(lambda content: self._save(saving, content), optimizer_only=lends)

    def close(self) -> None:
        """Wait for what is being saved."""
        self.saver.close()

    def _save(self, saving: Saving, content: Content) -> None:
        """Write a part, and tell the leader."""
        save, saved, file_hash = saving.save, None, b""
        match save.purpose:
            case "own":
                saved = self._save_own(saving, content)
            case "loan":
                saved = self._lend(saving, content)
            case "whole":
                path = state.snapshot(self.settings.state_dir, save.marker, self.settings.name, self.saver.index)
                saved = self.saver.save(path, save.name, (saving.accounts, saving.arrays), content)
                file_hash = b"" if saved is None else state.file_hash(path)
        self.saves.part_saved(saving, saved, file_hash or (saved.state_hash if saved else b""))

    def _save_own(self, saving: Saving, content: Content) -> Saved | None:
        """Keep the part before if it is of the newest checkpoint that all processes have."""
        path, previous = state.generations(self.settings.state_dir, self.settings.name, self.saver.index)
        keeps = state.is_of(path, self.saver.run, self.settings.name, saving.save.whole)
        dump = saving.accounts, saving.arrays
        return self.saver.save(path, saving.save.name, dump, content, previous if keeps else None)

    def _lend(self, saving: Saving, content: Content) -> Saved | None:
        lent = lend_from(self.saver, self._loans / f"{saving.number}.safetensors", saving.save.name, content)
        if lent is None:
            return None
        self._lent.keep(saving.number, lent)
        return Saved(lent.layout.size_bytes, lent.content_hash)


class LeadingKeeper(PartKeeper):
    """Says besides when a state is to be saved."""

    def __init__(self, island: Island, leader: Leader, settings: LearnerSettings, log: Logger) -> None:
        super().__init__(island, leader, settings, log)
        self.leader, self._saves = leader, False
        self._pacing = Pacing(settings.checkpoint_s, time.monotonic(), leader.step)
        leader.wanted = self._wanted
        leader.describe_optimizer(island.optimizer_layout(), island.optimizer_owners())

    def at_boundary(self) -> None:
        """Begin what was decided, and note what the last one has cost once all processes have ended with it."""
        now_s, step = time.monotonic(), self.leader.step
        if self._saves and not self.leader.is_saving:
            self._saves = False
            note_cost(self._pacing, now_s, step, self.log)
        saving = self.saves.saving
        if saving is not None:
            self._saves = True
            self._pacing.begin(now_s, step, saving.save.purpose)
        super().at_boundary()

    def _wanted(self) -> Purpose | None:
        now_s, lender = time.monotonic(), self.leader.lender
        if self._saves:
            return None
        if lender.wanted and self._pacing.may_lend(now_s):
            return "loan"
        if lender.wanted:
            lender.give_none()
        return "own" if self._pacing.due(now_s) else None


@dataclass(frozen=True)
class _Fit:
    """A checkpoint that this process can begin from."""

    path: Path
    saved: State
    offers: list[list[Pending]]  # by fragment: those whose fate it does not know
    carried: carrier.Restored


def restore(process: Process, island: Island, part: Part, leader: Leader | None) -> bool:
    """Go on from the newest checkpoint that all processes can begin from; False if there is none: the log has the model.

    The leader, given in its own process, names one after the other, and says why one is refused.
    """
    group, name, log = part.group, process.settings.name, process.log
    island.wanted()  # all make their optimizer's arrays here, and none of them alone
    fits = iter(()) if leader is None else _fitting(process, island, part, leader)
    for number in itertools.count():
        stage, fit = f"checkpoint {number}", next(fits, None)
        said = None if leader is None else Candidate(stage, fit.saved.set_name if fit else None, fit.offers if fit else [])
        candidate = process.wait(group.hear_leader(Candidate, stage, said))
        if candidate.name is None:
            return False
        problem = ""
        if leader is None:
            try:
                saved = state.load_set(process.settings.state_dir, process.run.identity, name, candidate.name, group.index)
                fit = _fit(Path(candidate.name), saved, candidate.offers, part, island)
            except UNFIT as error:
                problem = str(error)
        differs = process.wait(group.difference(stage, {"checkpoint": problem}))
        taken = None
        if leader is not None and fit is not None:
            taken = Told(f"{stage}, taken", TAKEN if _restored(leader, fit, differs, log) else "")
        if process.wait(group.hear_leader(Told, f"{stage}, taken", taken)).text != TAKEN:
            continue
        assert fit is not None
        part.carrier.restore(fit.carried)
        if leader is None:
            checkpoint.put(fit.saved, island)
            log.info("checkpoint_restored", set=fit.saved.set_name)
        else:
            leader.note_restored(fit.saved.set_name)
            checkpoint.take_over(fit.path, fit.saved, island, leader, log)
        return True
    raise AssertionError("a generation ends with the leader's last word")


def _fitting(process: Process, island: Island, part: Part, leader: Leader) -> Iterator[_Fit]:
    """Yield the checkpoints that the leader can begin from, the newest first; name those from which it cannot."""
    for path in state.generations(process.settings.state_dir, process.settings.name):
        if path.exists():
            try:
                saved = state.load(path, process.run.identity, process.settings.name)
                fit = _fit(path, saved, leader.unmerged_of(saved.accounts), part, island)
            except UNFIT as error:
                process.log.warning("checkpoint_refused", file=str(path), reason=str(error))
            else:
                yield fit


def _fit(path: Path, saved: State, offers: list[list[Pending]], part: Part, island: Island) -> _Fit:
    """Check that this process finds all that it needs in a state: for its devices, and of the fragments that it carries.

    Raises:
        RunError, LookupError, ValueError: it does not.
    """
    checkpoint.check(saved, island)
    carrying = part.carrier
    arrays = {name: array for index in carrying.fragments for name, array in saved.arrays(f"{ACCOUNTS}{index}/").items()}
    try:
        return _Fit(path, saved, offers, carrying.loaded(offers, arrays))
    except LookupError as error:
        raise RunError(
            f"checkpoint: accounts of a fragment that this process carries are not there ({error}): another process of this "
            "learner saved them; give its processes one state_dir that all of them see"
        ) from None


def _restored(leader: Leader, fit: _Fit, differs: str, log: Logger) -> bool:
    """Have the leader go on with a checkpoint's accounts; if it cannot, or others cannot begin from it, say so."""
    reason = differs
    if not reason:
        try:
            leader.restore(fit.saved.accounts, {})
        except UNFIT as error:
            reason = str(error)
    if reason:
        log.warning("checkpoint_refused", file=str(fit.path), reason=reason)
    return not reason
