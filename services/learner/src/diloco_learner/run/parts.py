"""Checkpoints of a learner of several processes: each writes and reads the part that lies on its devices and that it carries.

The leader decides when a state is saved, and all save it as of the same boundary. A new generation begins from the newest one
that every process can begin from, whichever number of processes saved it: each needs the chunks of its shards, and the arrays
of the fragments that it carries now. So parts that other hosts saved have to be where it can read them.
"""

from __future__ import annotations

import shutil
import time
from functools import partial

from diloco.member.snapshots import drop_superseded
from diloco.process.observe import Logger
from diloco.processes import restoring
from diloco.processes.follower import ProcessSide
from diloco.processes.leader import Leader
from diloco.processes.part import Part, Saving
from diloco.settings.service import LearnerSettings
from diloco.states import state
from diloco.states.state import Content, Saved
from diloco.states.statefolder import StateFolder
from diloco.wire.process_messages import Purpose
from diloco_learner.api.model import SharedModel
from diloco_learner.run import checkpoint
from diloco_learner.run.checkpoint import lend_from, note_cost
from diloco_learner.run.pacing import Pacing
from diloco_learner.run.process import LearnerProcess
from diloco_learner.run.saver import Saver


class PartKeeper:
    """Saves this process's part of each state that the leader wants saved. The trainer's thread calls it, at boundaries."""

    def __init__(self, island: SharedModel, its: ProcessSide, settings: LearnerSettings, log: Logger) -> None:
        group = its.part.group
        self.saves, self.settings, self.log = its, settings, log
        self.saver = Saver(
            island=island, run=its.part.run.identity, learner=settings.name, log=log, index=group.place, count=group.size
        )
        self._lent, self._loans = its.part.lent, StateFolder(settings.state_dir, settings.name).loans(group.place)
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
                if self.saver.index:  # the leader drops what it sees, on hearing the marker; this disk may be another one
                    self._drop_superseded(save.marker)
                path = StateFolder(self.settings.state_dir, self.settings.name).snapshot(save.marker, self.saver.index)
                saved = self.saver.save(path, save.name, (saving.accounts, saving.arrays), content)
                file_hash = b"" if saved is None else state.file_hash(path)
        self.saves.part_saved(saving, saved, file_hash or (saved.state_hash if saved else b""))

    def _drop_superseded(self, marker: int) -> None:
        part = self.saves.part
        dropping = drop_superseded(part.run.registry, self.settings, marker, self.log)
        part.loop.call_soon_threadsafe(part.tasks.spawn, dropping)

    def _save_own(self, saving: Saving, content: Content) -> Saved | None:
        """Keep the part before if it is of the newest checkpoint that all processes have."""
        missed = self.saves.part.group.missed
        place = restoring.own_place(self.settings, self.saver.run, self.saver.index, saving.save, missed=missed)
        if place is None:
            return None
        path, previous = place
        return self.saver.save(path, saving.save.name, (saving.accounts, saving.arrays), content, previous)

    def _lend(self, saving: Saving, content: Content) -> Saved | None:
        lent = lend_from(self.saver, self._loans / f"{saving.number}.safetensors", saving.save.name, content)
        if lent is None:
            return None
        self._lent.keep(saving.number, lent)
        return Saved(lent.layout.size_bytes, lent.content_hash)


class LeadingKeeper(PartKeeper):
    """Says besides when a state is to be saved."""

    def __init__(self, island: SharedModel, leader: Leader, settings: LearnerSettings, log: Logger) -> None:
        super().__init__(island, leader, settings, log)
        self.leader, self._saves = leader, False
        self._pacing = Pacing(settings.checkpoint_s, time.monotonic(), leader.member.step)
        leader.wanted = self._wanted
        leader.describe_optimizer(island.optimizer_layout(), island.optimizer_owners())

    def at_boundary(self) -> None:
        """Begin what was decided, and note what the last one has cost once all processes have ended with it."""
        now_s, step = time.monotonic(), self.leader.member.step
        if self._saves and not self.leader.is_saving:
            self._saves = False
            note_cost(self._pacing, now_s, step, self.log)
        saving = self.saves.saving
        if saving is not None:
            self._saves = True
            self._pacing.begin(now_s, step, saving.save.purpose)
        super().at_boundary()

    def _wanted(self) -> Purpose | None:
        now_s, lender = time.monotonic(), self.leader.member.lender
        if self._saves:
            return None
        if lender.wanted and self._pacing.may_lend(now_s):
            return "loan"
        if lender.wanted:
            lender.give_none()
        return "own" if self._pacing.due(now_s) else None


def restore(process: LearnerProcess, island: SharedModel, part: Part, leader: Leader | None) -> bool:
    """Go on from the newest checkpoint that all processes can begin from; False if there is none: the log has the model.

    The leader is given in its own process.
    """
    island.wanted()  # all make their optimizer's arrays here, and none of them alone
    check = partial(checkpoint.check, island=island)
    fit = process.wait(restoring.begin_again(process.settings, part, leader, check, process.log))
    if fit is None:
        return False
    if leader is None:
        checkpoint.put(fit.saved, island)
        process.log.info("checkpoint_restored", set=fit.saved.set_name)
    else:
        checkpoint.take_over(fit.path, fit.saved, island, leader.member, process.log)
    return True
