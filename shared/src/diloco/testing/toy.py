"""A learner without a framework: NumPy vectors, each step of which goes a tenth of the way to one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.core.learner.accounts import StepDone
from diloco.core.learner.delta import VersionWrite
from diloco.core.run.leases import RoundRobin
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, cut_model
from diloco.member.arrays import Boundary
from diloco.member.member import Member
from diloco.process.observe import get_logger
from diloco.settings.service import LearnerSettings
from diloco.testing.world import VirtualProcess

Vector = NDArray[np.float32]

TENSORS = [TensorSpec("matrix", (16, 16)), TensorSpec("bias", (256,))]  # of the model with which a toy founds a run
IDLE_S = 0.05  # a learner that waits looks again
RATE = 0.1


class ToyLearner:
    """A learner of a run in virtual time. Its steps take ``step_s`` and have ``tokens`` tokens.

    Without ``founds`` it waits for another learner's model, whatever that is, and trains a copy of it.
    """

    tensors: Sequence[TensorSpec] = TENSORS

    def __init__(self, process: VirtualProcess, run_name: str, *, step_s: float, tokens: int, founds: bool) -> None:
        self.process, self.run_name = process, run_name
        self.step_s, self.tokens, self.founds = step_s, tokens, founds
        self.values: list[Vector] = []  # by fragment

    async def serve(self, began: Callable[[Member], None]) -> None:
        """Join the run, and train to its end."""
        transport, log = self.process.transport, get_logger()
        run = await creation.find(transport, self.run_name, log)
        fragments = cut_model(self.tensors, run.created.fragments) if self.founds else await creation.find_map(run)
        member = Member(transport, run, fragments, LearnerSettings(name=self.process.name, run=self.run_name), log)
        began(member)
        try:
            self.values = [np.zeros(fragment.size, np.float32) for fragment in fragments.fragments]
            await member.join(lambda fragment: self.values[fragment.index].copy())
            member.count_steps()
            await self._train(member, run, fragments)
        finally:
            await member.close()

    async def _train(self, member: Member, run: KnownRun, fragments: FragmentMap) -> None:
        dealt, done = RoundRobin(), None
        while True:
            boundary = member.boundary(done)
            done = None
            self._carry_out(member, boundary)
            if boundary.finished:
                return
            if boundary.stop or boundary.wait:
                await asyncio.sleep(IDLE_S)
                continue
            share, batch = dealt.next(member.leased())
            await asyncio.sleep(self.step_s)
            loss = self.step(share, batch)
            done = StepDone(tokens=self.tokens, share=share, batch=batch, loss=loss, busy_s=self.step_s, blocked_s=0.0)

    def step(self, share: int, batch: int) -> float:
        """Take a step on a batch, and return its loss."""
        for values in self.values:
            values += RATE * (1 - values)
        return float(np.mean([np.square(1 - values).mean() for values in self.values]))

    def offered(self, index: int) -> Vector:
        """Return what is offered of a fragment: its values, float32 [size of the fragment]."""
        return self.values[index].copy()

    def _carry_out(self, member: Member, boundary: Boundary) -> None:
        for index, write in boundary.applies:
            self._write(index, write)
        for index in boundary.reads:
            values = self.offered(index)
            member.submit(index, lambda values=values: values)  # type: ignore[misc]

    def _write(self, index: int, write: VersionWrite) -> None:
        new = write.theta.copy()
        if write.reference is not None:
            new += self.values[index] - write.reference[:]
        self.values[index] = new
