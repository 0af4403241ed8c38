"""A trial: one training run in virtual time, by the services themselves and with real models.

Everything is what a live run has: fragment map, codec, merge, fold, rounds, the learners' protocol side, the syncers. In place
of clock and network is a :mod:`diloco.testing.world`, and a learner's step takes as long as its *pace* says, whatever this
machine takes for it. So a trial is the same each time, and what happens between learners does not depend on the load.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from diloco.control import creation
from diloco.control.changes import append_changes
from diloco.core.learner.schedule import learning_rate
from diloco.core.run.changes import Action, Effective, Set
from diloco.errors import RunError
from diloco.member.member import Member
from diloco.member.peer import InMemory
from diloco.process.observe import Logger, get_logger
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.testing.server import matches
from diloco.testing.virtual_transport import CONTROL
from diloco.testing.world import VirtualProcess, World
from diloco.wire import framing
from diloco.wire.entries import Record
from diloco.wire.subjects import Subjects
from diloco_lab.batches import RowShare, take_rows
from diloco_lab.loss_history import LossPoint, point
from diloco_lab.paces.dropped import DroppingTransport
from diloco_lab.paces.step_clocks import clock_of, present_s
from diloco_lab.paces.times import Clock, Paces
from diloco_learner.api.model import Vector
from diloco_learner.data.feed import BatchFeed
from diloco_learner.jax.island import Island
from diloco_learner.run.trainer import carry_out, counted_step
from diloco_learner.task import Task, rows_of
from diloco_syncer.virtual import serve

RUN = "trial"
IDLE_S = 0.05  # a learner that waits looks again
LIMIT_S = 1e7  # virtual: four months


@dataclass(frozen=True)
class Result:
    """The end of a trial.

    Attributes:
        model: values of the global model, rebuilt from the log, by fragment.
        loss: of this model on the task's validation batches, in the task's units.
        versions: by fragment.
        members: learners merged into a version, on average.
        tokens: processed by all learners.
        merged, lost, held: shares of them, on average over fragments: in a version; in none, by the run's rules or because
            their process was killed; neither, with a learner at the end.
        shares: of the versions, by learner: in how many it is.
        bytes_up: sent by a learner, on average.
        goodput: share of the learners' time until the last step in which they trained, lost slices left out. Absences are not
            their time.
        history: losses of the global model as training went on.
        state_hashes: by fragment, of every version in order.
        virtual_s, wall_s: the run's time, and this machine's.
    """

    model: list[Vector]
    loss: float
    versions: list[int]
    members: float
    tokens: int
    merged: float
    lost: float
    held: float
    shares: list[float]
    bytes_up: float
    goodput: float
    history: list[LossPoint]
    state_hashes: list[list[bytes]]
    virtual_s: float
    wall_s: float


@dataclass(frozen=True)
class Trial:
    """A run to be played, in those times. ``changes``: settings after a share of the token budget, in order.

    ``sample_s``: time between two losses of the history; None: it has none. ``island`` makes the model whose twins its learners
    are.

    Raises (:meth:`play`):
        RunError: a process failed, or the run did not come to its end.
    """

    settings: RunSettings
    task: Task
    paces: Paces
    changes: Sequence[tuple[float, Mapping[str, Any]]] = ()
    sample_s: float | None = None
    island: Callable[[Task, RunSettings], Island] = Island

    def play(self) -> Result:
        """Train to the end of the token budget."""
        began_s = time.perf_counter()
        world = _Training(self)
        world.scheduler.run(LIMIT_S)
        world.dispose()
        if world.error is not None:
            raise RunError(f"trial: {type(world.error).__name__}: {world.error}") from world.error
        return world.result(time.perf_counter() - began_s)


class _Training(World):
    """The processes of a trial: a creator of the run, its syncers, an operator if it has changes, and its learners."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.settings.seed)
        self.trial, self.settings = trial, trial.settings
        self.logger: Logger = get_logger()
        self.first = trial.island(trial.task, trial.settings)  # never trained: all processes begin as its twins
        self.map = self.first.fragments()
        paces = trial.paces.learners
        self.members: list[Member | None] = [None] * len(paces)
        self.trained = 0  # tokens
        self.useful_s = self.trained_s = 0.0  # of all learners; when the last step of one ended
        self.rows = [RowShare() for _ in paces]
        self.steps, self.offers = [clock_of(pace) for pace in paces], [Clock(pace.offers) for pace in paces]
        self.commits, self.subjects = Clock(trial.paces.commits), Subjects(RUN)
        others = [VirtualProcess(self, "creator", CONTROL, self._create)]
        others += [
            VirtualProcess(self, f"syncer-{i}", CONTROL, partial(serve, run_name=RUN)) for i in range(self.settings.shards)
        ]
        if trial.changes:
            others.append(VirtualProcess(self, "operator", CONTROL, self._operate))
        self.learners = [_Learner(self, i) for i in range(len(paces))]
        self.processes = [*others, *self.learners]
        self.history: list[LossPoint] = []
        for process in others:
            process.start()
        for learner, pace in zip(self.learners, paces, strict=True):
            self._at(pace.begins_s, learner.start)
            for from_s, until_s in pace.away:
                self._at(from_s, learner.crash, "away")
                self._at(until_s, learner.start)
        if trial.sample_s is not None:
            self.shown = self.first.twin()
            self.later(trial.sample_s, self._sample, trial.sample_s)

    def _at(self, when_s: float, action: Callable[..., object], *args: object) -> None:
        if when_s:
            self.later(when_s, action, *args)
        else:
            action(*args)

    def append_s(self, process: VirtualProcess, subject: str) -> float:
        """Return how much longer an offer or a record takes than any other message."""
        if isinstance(process, _Learner):
            return self.offers[process.index].next_s() if matches(self.subjects.offer("*"), subject) else 0.0
        return self.commits.next_s() if matches(self.subjects.record("*"), subject) else 0.0

    def look_for_end(self) -> None:
        """End when all have that are there: who is away when the run ends does not come back."""
        over = all(process.ended for process in self.processes if not isinstance(process, _Learner))
        if over and all(learner.ended or not learner.alive for learner in self.learners):
            self.scheduler.stopped = True

    async def _create(self, process: VirtualProcess) -> None:
        await creation.create(process.transport, RUN, self.settings)

    async def _operate(self, process: VirtualProcess) -> None:
        run = await creation.find(process.transport, RUN, self.logger)
        for after, settings in self.trial.changes:
            while self.trained < after * self.settings.tokens:
                await asyncio.sleep(IDLE_S)
            await append_changes(process.transport, run, partial(_sets, settings), author=process.name)

    async def learn(self, index: int, process: VirtualProcess) -> None:
        """Train a learner to the end of the run, from the log and a peer's optimizer state on."""
        run = await creation.find(process.transport, RUN, self.logger)
        settings = LearnerSettings(name=process.name, run=RUN, share=index)
        member = self.members[index] = Member(process.transport, run, self.map, settings, self.logger)
        island = self.first.twin()
        await member.join(lambda fragment: island.read(fragment).to_host())
        member.count_steps()
        wanted = island.wanted(optimizer_only=True)
        if await member.borrow(island.optimizer_layout(), wanted, island.put) is None:
            island.forget_optimizer()
        feed = BatchFeed(self.trial.task, run.created, member.leased, self.logger)
        batch, done = next(feed), None
        while True:
            boundary = member.boundary(done)
            done = None
            carry_out(boundary, island, member, self.settings)
            if member.lender.wanted:
                state = island.arrays(optimizer_only=True)
                lent = InMemory({name: np.array(values) for name, values in state.items()})
                member.lend(member.step, member.versions(), lent)
            if boundary.finished:
                break
            if boundary.stop or boundary.wait:
                await asyncio.sleep(IDLE_S)
                continue
            rate = learning_rate(self.settings, member.moment())
            timed, most = self.steps[index].step(self.now_s), self.trial.task.tokens_per_batch
            data, tokens = self._what_is_left(index, batch.data, timed.share)
            output = island.step(data, rate, (batch.share, batch.index))
            await asyncio.sleep(timed.step_s)
            done = replace(counted_step(output, batch, tokens), loss=output.wait(), busy_s=timed.step_s, most=most)
            self.trained += done.tokens
            self.useful_s, self.trained_s = self.useful_s + timed.useful_s, self.now_s
            batch = next(feed)
        await member.close()

    def _what_is_left(self, index: int, batch: Any, share: float) -> tuple[Any, int]:
        """Return the rows of a batch that a share of a learner's slices trains on, and the most tokens that they have."""
        tokens = self.trial.task.tokens_per_batch
        if share == 1:
            return batch, tokens
        whole = rows_of(self.trial.task, batch)
        rows = self.rows[index].rows(whole, share)
        return take_rows(batch, whole, range(rows)), tokens * rows // whole

    def _sample(self, every_s: float) -> None:
        """Note the loss of the global model, as a learner that is there knows it."""
        known = next((member for member in self.members if member is not None and member.step), None)
        if known is not None:
            self.history.append(point(self.now_s, self.trained, self._loss(self.shown, known)))
        self.later(every_s, self._sample, every_s)

    def _loss(self, island: Island, member: Member) -> float:
        for fragment, state in zip(self.map.fragments, member.learner.fragments, strict=True):
            assert state.values is not None
            island.write(fragment, state.values.base.copy())
        return island.evaluate()

    def result(self, wall_s: float) -> Result:
        """Evaluate the global model, and count what the log has."""
        members = [member for member in self.members if member is not None]
        loss = self._loss(self.first, members[0])
        if self.trial.sample_s is not None:
            self.history.append(point(self.now_s, self.trained, loss))
        identity, log = framing.run_id(RUN, self.settings.digest()), self.subjects
        stream = self.control.streams[log.log_stream]
        records: list[list[Record]] = []
        for fragment in self.map.fragments:
            heads = [stream.get(sequence) for sequence in stream.by_subject.get(log.record(fragment.index), ())]
            entries = [framing.unpack(head.data, Record, identity)[0] for head in heads if head is not None]
            records.append([entry for entry in entries if entry.makes_version])
        merged = float(np.mean([entries[-1].tokens_merged for entries in records])) / self.trained
        held = float(np.mean([[state.delta.tokens for state in member.learner.fragments] for member in members]))
        held *= len(members) / self.trained
        versions = [{member.learner for member in entry.members} for entries in records for entry in entries]
        return Result(
            model=[self.first.read(fragment).to_host() for fragment in self.map.fragments],
            loss=loss,
            versions=[len(entries) for entries in records],
            members=float(np.mean([len(members) for members in versions])),
            tokens=self.trained,
            merged=merged,
            lost=1 - merged - held,
            held=held,
            shares=[float(np.mean([learner.name in members for members in versions])) for learner in self.learners],
            bytes_up=float(np.mean([member.transport.bytes_out for member in members])),
            goodput=self.useful_s / sum(present_s(pace, self.trained_s) for pace in self.trial.paces.learners),
            history=self.history,
            state_hashes=[[entry.state_hash for entry in entries] for entries in records],
            virtual_s=self.now_s,
            wall_s=wall_s,
        )


def _sets(values: Mapping[str, Any], effective: Effective) -> list[Action]:
    return [Set(key, value) for key, value in values.items()]


class _Learner(VirtualProcess):
    """A learner's process, which comes and goes."""

    def __init__(self, world: _Training, index: int) -> None:
        super().__init__(world, f"learner-{index}", CONTROL, partial(world.learn, index))
        self.index, self._members = index, world.members
        self._offers, self._share = world.subjects.offer("*"), world.trial.paces.dropped
        self._chance = random.Random(f"{world.settings.seed}/{self.name}/offers")

    def at_start(self) -> None:
        """Lose some of its offers, if the paces say so."""
        if self._share:
            self.transport = DroppingTransport(self, self._offers, self._share, self._chance)

    def crash(self, why: str) -> None:
        """Kill it at once: what it held is lost."""
        if self.alive:
            self._members[self.index] = None
        super().crash(why)
