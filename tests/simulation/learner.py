"""A learner of the simulation: the real :class:`diloco.member.member.Member`, and a trainer whose steps can be told apart.

A step adds 1 to one value of every fragment, a value that no other step of the run touches. So an offer of 32 bits shows
which steps it holds, and the merged model how much of each step came in.

In a run of the kind ``state`` the second fragment is of state that is merged: offers of it are its values as they are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diloco.control import creation
from diloco.core.learner.accounts import StepDone
from diloco.core.learner.delta import VersionWrite
from diloco.core.learner.learner import Dump
from diloco.core.run.leases import RoundRobin
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.member.arrays import Boundary
from diloco.member.member import Member
from diloco.member.peer import InMemory, Layout
from diloco.wire.control import MarkerAnswer

if TYPE_CHECKING:
    from tests.simulation.world import Process

Vector = NDArray[np.float32]

STEPS = 512  # most that a run may take: the size of a fragment
SPECS = [TensorSpec("a", (16, 32)), TensorSpec("b", (512,))]
FRAGMENTS = build_map(SPECS, 2, "balanced")
STATEFUL = build_map([SPECS[0], replace(SPECS[1], state=True)], 2, "balanced")
LAYOUT = Layout((("optimizer", (8,), "float32"),))
IDLE_S = 0.2
LEAVE_S = 2.0
SAVE_S = 0.3
SAVED_BOUNDARIES = 0.1


@dataclass
class Step:
    """One inner step of the run; its index is the value that it adds to."""

    learner: str
    generation: int  # of its process
    tokens: int
    share: int
    batch: int
    applied: dict[int, int]  # by fragment: the version that its learner held


class Learner:
    """One learner process."""

    def __init__(self, process: Process) -> None:
        self.process, self.world = process, process.world
        self.name, self.map = process.name, process.world.map
        self.values: list[Vector] = []
        # for an outer AdamW: since the versions that were written last, not in the values; of state they stay zero
        self.gradients: list[Vector] = []
        self.applied: dict[int, int] = {}  # by fragment: version last written into the model
        self.done: StepDone | None = None
        self.round_robin = RoundRobin()
        self.optimizer = np.full(8, process.rng.random(), np.float32)
        self.must_apply: dict[int, int] = {}  # by fragment: what was the newest version when it began
        self.must_pass: dict[int, int] = {}  # by share of the data: the end of what was merged when it began
        self.leaving = False
        self.saving = False
        self.member: Member | None = None
        self.marker: tuple[int, bool] | None = None  # the newest marker's number, and whether it came before its versions did
        self.marking = False  # a state that a marker asked for is being saved

    async def serve(self) -> None:
        """Join the run, and train to its end or until asked to stop."""
        process, world = self.process, self.world
        run = await creation.find(process.transport, world.run_name, world.logger)
        member = self.member = Member(process.transport, run, self.map, world.learner_settings(process), world.logger)
        # its own, and nothing of it may come into the run unless it founds it
        self.values = [process.noise(fragment.size) for fragment in self.map.fragments]
        if run.created.outer.optimizer == "adamw":
            self.gradients = [np.zeros(fragment.size, np.float32) for fragment in self.map.fragments]
        self.must_apply, self.must_pass = world.known(process), world.reference.ends() if world.regional is None else {}
        try:
            await member.join(lambda fragment: np.zeros(fragment.size, np.float32))
            if not self._restore(member):
                stateless = run.created.outer.optimizer == "adamw"  # its optimizer's state is the log's
                borrowed: dict[str, NDArray[Any]] = {}
                layout = Layout(()) if stateless else LAYOUT
                loan = await member.borrow(layout, layout.wholes(), lambda chunk, values: borrowed.update({chunk.name: values}))
                if stateless:
                    world.check_stateless(self.name, member)
                if loan is not None:
                    world.check_loan(loan.peer, loan.step, borrowed)
            await self._train(member)
        finally:
            await member.close()
            await process.transport.close()

    def bases(self) -> list[Vector]:
        """Return by fragment the version applied last."""
        assert self.member is not None
        return [state.values.base for state in self.member.learner.fragments if state.values is not None]

    async def _train(self, member: Member) -> None:
        process = self.process
        while True:
            if process.stopping and not self.leaving:
                self.leaving = True
                member.leave(LEAVE_S)
            self._look_for_mark(member)
            boundary = member.boundary(self.done)
            self.done = None
            last = {index: place for place, (index, _) in enumerate(boundary.applies)}
            for place, (index, applied) in enumerate(boundary.applies):
                self._write(index, applied, member.versions()[index] if last[index] == place else None)
            if process.rng.random() < 0.2:
                await asyncio.sleep(0.003)  # the loop's thread runs between a boundary and what follows from it
            self._hand_over(member, boundary)
            self._keep(member)
            if boundary.finished:
                return
            if boundary.ended:
                await self._leave(member)
                return
            if boundary.stop or boundary.wait:
                await asyncio.sleep(IDLE_S * process.rng.random())
                continue
            await self._step(member)

    def _hand_over(self, member: Member, boundary: Boundary) -> None:
        for index in boundary.reads:
            snapshot = (self.gradients if self._held(index) else self.values)[index].copy()
            member.submit(index, lambda snapshot=snapshot: snapshot)  # type: ignore[misc]

    def _held(self, index: int) -> bool:
        """Whether a step leaves a fragment's values as they are, and is held as a gradient."""
        return bool(self.gradients) and not self.map.fragments[index].state

    def _write(self, index: int, applied: VersionWrite, version: int | None) -> None:
        if applied.reset and self.marker is not None:
            self.marker = self.marker[0], False  # what was between was never seen
        new = applied.theta.copy()
        if applied.reference is not None:
            new += self.values[index] - applied.reference[:]
        self.values[index] = new
        if self._held(index) and applied.reference is None:
            self.gradients[index] = np.zeros_like(new)
        before, reference = self.applied.get(index, -1), self.world.reference
        self.applied[index] = reference.applied(self.name, index, applied.theta, before, version)

    async def _step(self, member: Member) -> None:
        process, world = self.process, self.world
        share, batch = self.round_robin.next(member.leased())
        index = world.take_step(
            Step(self.name, process.generation, process.tokens, share, batch, dict(self.applied)), self.must_pass
        )
        began_s = world.now_s
        await asyncio.sleep(process.step_s * (0.5 + process.rng.random()))
        for fragment in range(len(self.values)):
            if self._held(fragment):
                self.gradients[fragment][index] -= 1
            else:
                self.values[fragment][index] += 1
        self.optimizer += 1
        self.done = StepDone(process.tokens, share, batch, 1.0, world.now_s - began_s, 0.0)

    # ---- its disk, and its peers

    def _look_for_mark(self, member: Member) -> None:
        marker = member.learner.markers.marker
        if marker is not None and (self.marker is None or self.marker[0] != marker.number):
            self.marker = marker.number, all(own <= cut for own, cut in zip(member.versions(), marker.versions, strict=True))

    def _keep(self, member: Member) -> None:
        """Save the state now and then, and when a marker asks for it; lend the optimizer's to who asks for that."""
        marker = member.marker_due()
        if marker is not None and not self.marking and member.dump() is not None:
            member.note_copied(marker)
            self.marking = True
            # versions of several fragments come to a region in another order than they were made
            exact = self.marker == (marker.number, True) and self.world.regional is None
            self.world.check_marked(self.name, member, marker.versions, exact)
            answer = MarkerAnswer(self.name, marker.number, member.step, member.versions(), 1, bytes(32))
            self.process.loop.call_later(SAVE_S * self.process.rng.random(), self._answer, member, answer)
        if member.lender.wanted:
            self.world.lent[self.name, member.step] = self.optimizer.copy()
            member.lend(member.step, member.versions(), InMemory({"optimizer": self.optimizer.copy()}))
        if self.saving or self.process.rng.random() > SAVED_BOUNDARIES:
            return
        dump = member.dump()
        if dump is not None:
            self.saving = True
            # the accounts' arrays are copied as late as a thread that writes them may come to them
            self.process.loop.call_later(SAVE_S * self.process.rng.random(), self._save, dump, self._model())

    def _answer(self, member: Member, answer: MarkerAnswer) -> None:
        member.answer_marker(answer)
        self.marking = False

    def _model(self) -> dict[str, Any]:
        """Return a copy of the model's side of the state."""
        copied = {
            name: [vector.copy() for vector in vectors]
            for name, vectors in (("values", self.values), ("gradients", self.gradients))
        }
        return copied | {"applied": dict(self.applied)}

    def _save(self, dump: Dump, model: dict[str, Any]) -> None:
        self.process.save({"dump": dump} | model)
        self.saving = False

    async def _leave(self, member: Member) -> None:
        while member.learner.encoding:
            await asyncio.sleep(0.01)
        self._save(member.checkpoint(), self._model())

    def _restore(self, member: Member) -> bool:
        saved: dict[str, Any] | None = self.process.load()
        if saved is None:
            return False
        member.restore(*saved["dump"])
        self.values, self.gradients, self.applied = saved["values"], saved["gradients"], saved["applied"]
        return True
