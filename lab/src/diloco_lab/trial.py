"""A trial: one training run in virtual time, by the services themselves and with real models.

Everything is what a live run has: fragment map, codec, merge, fold, rounds, the learners' protocol side, the syncers. In place
of clock and network is a :mod:`diloco_lab.virtual.world`, and a learner's step takes as long as its *pace* says, whatever this
machine takes for it. So a trial is the same each time, and what happens between learners does not depend on the load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from diloco.control import creation
from diloco.core.accounts import StepDone
from diloco.core.fragments import FragmentMap, TensorSpec, build_map
from diloco.errors import RunError
from diloco.member.member import Member
from diloco.process.observe import Logger, get_logger
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings, SyncerSettings
from diloco.wire import framing
from diloco.wire.entries import Record
from diloco.wire.subjects import Subjects
from diloco_lab.virtual.transport import CONTROL
from diloco_lab.virtual.world import Process, World
from diloco_learner.feed import Feed
from diloco_learner.inner import learning_rate
from diloco_learner.island import Island
from diloco_learner.task import Task
from diloco_learner.trainer import carry_out
from diloco_syncer.shard import Shard

RUN = "trial"
IDLE_S = 0.05  # a learner that waits looks again
LIMIT_S = 1e7  # virtual: four months

Pace = Callable[[], Iterator[float]]  # seconds of one step after another, without end


def steady(step_s: float) -> Pace:
    """Return the pace of a machine whose every step takes as long."""

    def steps() -> Iterator[float]:
        while True:
            yield step_s

    return steps


@dataclass(frozen=True)
class Result:
    """The end of a trial.

    Attributes:
        loss: of the global model, rebuilt from the log, on the task's validation batches, in the task's units.
        versions: by fragment.
        members: learners merged into a version, on average.
        tokens, merged: processed by all learners; merged, on average over fragments.
        bytes_up: sent by a learner, on average.
        state_hashes: by fragment, of every version in order.
        virtual_s, wall_s: the run's time, and this machine's.
    """

    loss: float
    versions: list[int]
    members: float
    tokens: int
    merged: float
    bytes_up: float
    state_hashes: list[list[bytes]]
    virtual_s: float
    wall_s: float


@dataclass(frozen=True)
class Trial:
    """A run to be played; ``paces`` has one for each learner.

    Raises (:meth:`play`):
        RunError: a process failed, or the run did not come to its end.
    """

    settings: RunSettings
    task: Task
    paces: Sequence[Pace]

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
    """The processes of a trial: a creator of the run, its syncers and its learners."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.settings.seed)
        self.trial, self.settings = trial, trial.settings
        self.logger: Logger = get_logger()
        first = Island(trial.task, trial.settings)
        self.islands = [first, *(first.twin() for _ in trial.paces[1:])]
        specs = [TensorSpec(*tensor) for tensor in self.islands[0].tensors()]
        self.map: FragmentMap = build_map(specs, self.settings.fragments.count, self.settings.fragments.strategy)
        self.members: list[Member | None] = [None] * len(trial.paces)
        self.processes = [Process(self, "creator", CONTROL, self._create)]
        self.processes += [Process(self, f"syncer-{i}", CONTROL, self._sync) for i in range(self.settings.shards)]
        self.processes += [Process(self, f"learner-{i}", CONTROL, partial(self._learn, i)) for i in range(len(self.islands))]
        for process in self.processes:
            process.start()

    async def _create(self, process: Process) -> None:
        await creation.create(process.transport, RUN, self.settings)

    async def _sync(self, process: Process) -> None:
        run = await creation.find(process.transport, RUN, self.logger)
        shard = Shard(
            process.transport, run, await creation.find_map(run), SyncerSettings(name=process.name, run=RUN), self.logger
        )
        await shard.serve()

    async def _learn(self, index: int, process: Process) -> None:
        run = await creation.find(process.transport, RUN, self.logger)
        settings = LearnerSettings(name=process.name, run=RUN, share=index)
        member = self.members[index] = Member(process.transport, run, self.map, settings, self.logger)
        island, tokens = self.islands[index], self.trial.task.tokens_per_batch
        await member.join(lambda: [island.read(fragment).to_host() for fragment in self.map.fragments])
        member.count_steps(tokens)
        loan = await member.borrow(island.optimizer_layout())
        if loan is not None:
            island.load_optimizer(loan.arrays)
        feed = Feed(self.trial.task, run.created, member.leased, self.logger)
        pace, batch, done = self.trial.paces[index](), next(feed), None
        while True:
            boundary = member.boundary(done)
            done = None
            carry_out(boundary, island, member, self.settings)
            if boundary.finished:
                break
            if boundary.stop or boundary.wait:
                await asyncio.sleep(IDLE_S)
                continue
            output, step_s = island.step(batch.data, learning_rate(self.settings, member.moment())), next(pace)
            await asyncio.sleep(step_s)
            done = StepDone(tokens, batch.share, batch.index, output.wait(), step_s, 0.0)
            batch = next(feed)
        await member.close()

    def result(self, wall_s: float) -> Result:
        """Evaluate the global model, and count what the log has."""
        members = [member for member in self.members if member is not None]
        island = self.islands[0]
        for fragment, state in zip(self.map.fragments, members[0].learner.fragments, strict=True):
            assert state.values is not None
            island.write(fragment, state.values.base.copy())
        identity, log = framing.run_id(RUN, self.settings.digest()), Subjects(RUN)
        stream = self.control.streams[log.log_stream]
        records: list[list[Record]] = []
        for fragment in self.map.fragments:
            heads = [stream.get(sequence) for sequence in stream.by_subject.get(log.record(fragment.index), ())]
            entries = [framing.unpack(head.data, Record, identity)[0] for head in heads if head is not None]
            records.append([entry for entry in entries if entry.makes_version])
        tokens = sum(member.learner.accounts.tokens for member in members)
        return Result(
            loss=island.evaluate(),
            versions=[len(entries) for entries in records],
            members=float(np.mean([len(entry.members) for entries in records for entry in entries])),
            tokens=tokens,
            merged=float(np.mean([entries[-1].tokens_merged for entries in records])) / tokens,
            bytes_up=float(np.mean([member.transport.bytes_out for member in members])),
            state_hashes=[[entry.state_hash for entry in entries] for entries in records],
            virtual_s=self.now_s,
            wall_s=wall_s,
        )
