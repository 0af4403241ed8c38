"""The two sides of a learner of several processes: the process that leads, and those that follow.

Neither knows a framework. Both have the same methods, so that the work of a process (:mod:`diloco_learner.jax.together`) reads
alike on either side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from diloco.core.run import tape as events
from diloco.errors import IslandError
from diloco.member.instruments import Instruments
from diloco.processes.follower import Follower
from diloco.processes.leader import Leader
from diloco.settings.run import RunSettings
from diloco_learner.api.model import SharedModel, digest_of
from diloco_learner.data.feed import Batch, BatchFeed, Streams
from diloco_learner.run import parts
from diloco_learner.run.learner_metrics import ObservedMember, ObservedPart
from diloco_learner.run.parts import LeadingKeeper, PartKeeper
from diloco_learner.run.process import LearnerProcess
from diloco_learner.run.trainer import LookAhead
from diloco_learner.task_api import Batches


class Side(Protocol):
    """A process of a learner of several, as its work sees it."""

    @property
    def its(self) -> Leader | Follower:
        """The process's protocol side."""

    @property
    def look_ahead(self) -> LookAhead | None:
        """The call that the trainer makes in the middle of each step; None: it makes none."""

    def check_batch(self, tokens: int) -> None:
        """Check that the run takes batches of so many tokens.

        Raises:
            AdmissionError: it does not.
        """

    def join(self, about: Sequence[events.TapeEvent]) -> None:
        """Join the run; ``about`` is what the learner's tape says of its machines."""

    def batches(self, task: Batches, rows: range | None) -> Iterator[Batch]:
        """Return this process's ``rows`` of each batch that the learner trains on (None: whole batches)."""

    def restore(self, model: SharedModel) -> bool:
        """Begin from the newest checkpoint that all processes can begin from; False if there is none."""

    def begin_from_log(self) -> None:
        """Begin with what the log says of this learner."""

    def keeper(self, model: SharedModel) -> PartKeeper:
        """Return what saves this process's part of a state."""

    def show(self, instruments: Instruments) -> None:
        """Send what this process's instruments show, where it is the learner to the run."""

    def record_end(self, *, finished: bool) -> None:
        """Record how the learner has ended, on its tape."""

    def check_refused(self) -> None:
        """Check that the learner's work was not all refused.

        Raises:
            RefusedError: it was.
        """


class LeadingSide:
    """The process that leads: to the run it is the learner."""

    def __init__(self, process: LearnerProcess, leader: Leader) -> None:
        self.process, self.its, self.member = process, leader, leader.member
        self.look_ahead: LookAhead | None = leader.look_ahead

    def check_batch(self, tokens: int) -> None:
        """Check that the run takes batches of so many tokens."""
        self.member.admission.check_batch(tokens)

    def join(self, about: Sequence[events.TapeEvent]) -> None:
        """Join the run: the model is gathered from all processes if this learner founds it."""
        process, labels = self.process, self.process.exporter.labels()
        process.wait(self.its.join())
        process.exporter.observed = ObservedPart(self.its.part, labels, ObservedMember(self.member, process.transport, labels))
        for event in about:
            self.member.tape.record(event)

    def batches(self, task: Batches, rows: range | None) -> Iterator[Batch]:
        """Return batches of the shares that the learner holds."""
        return BatchFeed(task, self.process.run.created, self.member.leased, self.process.log, rows)

    def restore(self, model: SharedModel) -> bool:
        """Name one checkpoint after the other until all can begin from one."""
        return parts.restore(self.process, model, self.its.part, self.its)

    def begin_from_log(self) -> None:
        """Count steps on from the log."""
        self.member.count_steps()

    def keeper(self, model: SharedModel) -> PartKeeper:
        """Return what says besides when a state is saved."""
        return LeadingKeeper(model, self.its, self.process.settings, self.process.log)

    def show(self, instruments: Instruments) -> None:
        """Send what this process's instruments show."""
        self.member.show(instruments)

    def record_end(self, *, finished: bool) -> None:
        """Record the end, with the digest of the model that all processes have together."""
        part, run = self.its.part, self.process.thread.run
        try:
            digest = digest_of(self.member.map, lambda index: run(part.gather(index), lambda: False))
            self.member.tape.record(events.End(finished, digest))
        except IslandError as error:  # all have ended as decided, and this process stood still meanwhile
            self.process.log.warning("end_not_recorded", reason=str(error))

    def check_refused(self) -> None:
        """Check that the learner's work was not all refused."""
        self.process.wait(self.member.refusals.check())


class FollowingSide:
    """A process that follows: what is the learner's alone, its leader does."""

    look_ahead: LookAhead | None = None

    def __init__(self, process: LearnerProcess, follower: Follower) -> None:
        self.process, self.its = process, follower

    def check_batch(self, tokens: int) -> None:
        """Leave that to the leader."""

    def join(self, about: Sequence[events.TapeEvent]) -> None:
        """Load what this process carries."""
        self.process.wait(self.its.join())
        self.process.exporter.observed = ObservedPart(self.its.part, self.process.exporter.labels())

    def batches(self, task: Batches, rows: range | None) -> Iterator[Batch]:
        """Return the batches that the leader decides on."""
        return DecidedBatches(task, self.process.run.created, self.its, rows)

    def restore(self, model: SharedModel) -> bool:
        """Begin from the checkpoint that the leader names, if all can."""
        return parts.restore(self.process, model, self.its.part, None)

    def begin_from_log(self) -> None:
        """Leave that to the leader."""

    def keeper(self, model: SharedModel) -> PartKeeper:
        """Return what saves when the leader says so."""
        return PartKeeper(model, self.its, self.process.settings, self.process.log)

    def show(self, instruments: Instruments) -> None:
        """Leave that to the leader."""

    def record_end(self, *, finished: bool) -> None:
        """Leave that to the leader."""

    def check_refused(self) -> None:
        """Leave that to the leader."""


class DecidedBatches(Iterator[Batch]):
    """The batches that the leader decides on, for a process that does not lead; each is made once it is decided."""

    def __init__(self, task: Batches, settings: RunSettings, follower: Follower, rows: range | None) -> None:
        self.follower, self._streams = follower, Streams(task, settings, rows)

    def __next__(self) -> Batch:
        """Return the batch of the step after the next decision, once there is one.

        Raises:
            DataError: its data cannot be had here.
        """
        share, index = self.follower.next_batch()
        return Batch(share, index, self._streams.batch(share, index))
