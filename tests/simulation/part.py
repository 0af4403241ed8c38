"""One process of an island in the simulation: the real member, links and checkpoints, and a trainer that is a coroutine.

Its devices are vectors of which it has some rows; all others are NaN, so that whatever is taken from there is noticed. As in
:class:`tests.simulation.learner.Learner` a step adds 1 to one value of each fragment: here at the process that has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tests.simulation.invariants import Violation, demand
from tests.simulation.learner import FRAGMENTS, IDLE_S, LEAVE_S, SAVE_S

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.core.learner.accounts import StepDone
from diloco.core.learner.delta import VersionWrite
from diloco.core.run.leases import RoundRobin
from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.rows import LEADER, carriers
from diloco.elastic import coming, rescue
from diloco.elastic.assembly import ElasticAssembly
from diloco.elastic.renewing import Renewing
from diloco.elastic.rescue import Rescue
from diloco.errors import IslandError
from diloco.log.log import Log
from diloco.member.arrays import Boundary
from diloco.member.member import Member
from diloco.process.observe import Counted
from diloco.process.tape import Unrecorded
from diloco.processes import restoring
from diloco.processes.follower import Follower, ProcessSide
from diloco.processes.group import WATCH_S, Group
from diloco.processes.leader import Leader
from diloco.processes.part import Part, Saving
from diloco.states import state
from diloco.states.state import Content, Saved, State
from diloco.states.statefolder import StateFolder
from diloco.testing import threads
from diloco.wire.process_messages import Decided, Kept, Ping, Purpose, facts

if TYPE_CHECKING:
    from tests.simulation.island import Generation, IslandProcess

Vector = NDArray[np.float32]

SAVED_BOUNDARIES = 0.2
NEWS_S = 0.01  # something new comes to a leader that waits
AHEAD = 0.3  # share of boundaries that begin before the step has ended
CHANGING_S = 0.05  # longest that a process goes from one boundary to the next


class News(threading.Condition):
    """The trainer's condition: a coroutine awaits what a thread would wait for, and must never come too early."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[asyncio.Future[None]] = []

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def wait(self, timeout: float | None = None) -> bool:
        raise Violation("a trainer waits for what is not there")

    async def come(self) -> None:
        """Await the next notice."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future


class WatchedGroup(Group):
    """A group whose watch is played, too: it goes on while the loop is stuck, and stands still with its process."""

    process: IslandProcess

    def _begin_to_watch(self) -> None:
        self.loop = self.process.loop
        self._tick()

    def _tick(self) -> None:
        if self.loop.dead or (self.loop.held is None and not self.look()):
            return
        self.process.world.later(WATCH_S, self._tick)

    def end(self, error: IslandError) -> None:
        self.process.give_up(error)

    def end_as_it_is(self, error: IslandError) -> None:
        """End this process in earnest, in a thread."""
        super().end(error)


class WatchedPart(Part):
    """A part that remembers the decision carried out last."""

    decided: Decided

    def boundary(self) -> Any:
        self.decided, writes = super().boundary()
        return self.decided, writes


class WatchedRescue(Rescue):
    """A rescue whose outcome is looked at."""

    worker: Worker

    def save(self, kept: Kept) -> None:
        super().save(kept)
        self.worker.island.note_kept(self.worker, kept, self._accounts)


class Worker:
    """All that a process does from its begin to its end."""

    side: ProcessSide
    part: WatchedPart
    group: WatchedGroup
    renewing: Renewing
    rescue: WatchedRescue
    generation: Generation

    def __init__(self, process: IslandProcess) -> None:
        self.process, self.world, self.island = process, process.world, process.island
        self.values = [np.zeros(fragment.size, np.float32) for fragment in FRAGMENTS.fragments]
        self.applied: dict[int, int] = {}  # by fragment: version last written into the model
        self.must_apply: dict[int, int] = {}  # by fragment: what was the newest version when it began
        self.must_pass: dict[int, int] = {}
        self.trains = False
        self.round_robin = RoundRobin()
        self.leaving = False
        self.leader: Leader | None = None  # where this process is it
        self.follower: Follower | None = None  # where it is not
        self._begun: int | None = None  # the step whose outcome is not in the values yet, of one that is two programs
        self._job: asyncio.Task[None] | None = None

    @property
    def member(self) -> Member:
        """The learner, as it is to the run: of the process that leads."""
        assert self.leader is not None
        return self.leader.member

    async def serve(self) -> bool:
        """Be one of a generation's processes to its end; return whether the run is over."""
        process, world, island = self.process, self.world, self.island
        run = await creation.find(process.transport, world.run_name, process.log)
        elastic = process.settings.processes.elastic
        assembly = ElasticAssembly(process.settings, process.expected) if elastic else None
        self.group = WatchedGroup(process.settings, run.identity, process.log, assembly=assembly)
        self.group.process = process
        process.watch_start()
        number = int(1000 * process.wall_s())
        if process.index == 0:
            island.begin(number, process)
        own = facts({"run": run.identity.hex()})
        self.renewing = self.group.renewal = Renewing(self.group, process.settings)
        if not elastic:
            await self.group.meet(own, number)
        elif not await coming.meet(self.group, own, number, run, process.transport, process.log):
            process.over = True
            return False
        self.place, size = self.group.place, self.group.size
        self.layouts = island.layouts(size)
        mesh = island.mesh.of(size, island.count)
        assert mesh is not None
        self.apart = rescue.keeps(process.settings, mesh, size)
        self.generation = island.generations[self.group.generation]
        self.generation.join(self)
        try:
            return await self._work(run)
        except IslandError as error:  # it ends with the others, as its watch would end it
            self.group.end(error)
            await self.never()

    async def never(self) -> NoReturn:
        """Do nothing any more: another thread ends this process."""
        await self.process.loop.create_future()
        raise AssertionError

    async def _work(self, run: KnownRun) -> bool:
        await self.group.agree("model", {"model": FRAGMENTS.digest.hex()})
        self.must_apply, self.must_pass = self.world.known(self.process), self.world.reference.ends()
        if self.place == LEADER:
            self.generation.must_pass = self.must_pass
        self._make_member(run)
        await self._join()
        finished = await self._train()
        if finished:
            self.process.finished = self
        await self._end(finished=finished)
        return finished

    def _make_member(self, run: KnownRun) -> None:
        process, layouts = self.process, self.layouts
        dealt = carriers([fragment.size for fragment in FRAGMENTS.fragments], self.group.size)
        transport, refused = process.transport, Counted(process.log)
        self.group.links.sign_of_life = lambda: Ping(transport.bytes_out, transport.bytes_in, refused.total)
        store = Log(transport, run.name, run.identity, FRAGMENTS, run.created)
        self.part = WatchedPart(
            transport,
            run,
            self.group,
            store=store,
            layouts=layouts,
            carriers=dealt,
            read=lambda i: self.values[i].copy(),
            refused=refused,
            log=process.log,
        )
        process.can_begin_from = partial(restoring._named, process.settings, part=self.part, check=self.check)
        if self.place == LEADER:
            self.side = self.leader = Leader(self.part, FRAGMENTS, process.settings, process.log, Unrecorded())
        else:
            self.side = self.follower = Follower(self.part, FRAGMENTS)
        self.rescue = WatchedRescue(self._model, self.side, process.settings, process.log)
        self.rescue.worker = self
        if self.apart:
            self.renewing.rescue, self.part.remembers = self.rescue, True

    async def _join(self) -> None:
        leader, process = self.leader, self.process
        if leader is not None:
            leader.wanted = self._wanted
        await self.side.join()
        # of the model that it came with nothing may come into the run, unless it has founded it
        self.values = [self._only_here(index, process.noise(values.size)) for index, values in enumerate(self.values)]
        fit = await restoring.begin_again(process.settings, self.part, leader, self.check, process.log)
        if fit is not None:
            for index, chunk in enumerate(self._chunks):
                values = np.empty_like(self.values[index])
                values[:] = fit.saved.read(chunk)
                self.values[index] = self._only_here(index, values)
            if leader is not None:
                counts = fit.saved.accounts["fragments"]
                self.generation.applied = {index: its["base_version"] for index, its in enumerate(counts)}
            self.applied = dict(self.generation.applied)
            self.world.stats["part restored"] += 1
        elif leader is not None:
            leader.member.count_steps()
            leader.note_optimizer(None)
        if leader is not None:
            self.island.note_restored(fit, leader)
            self.generation.began = leader.member.step
        elastic, part = process.settings.processes.elastic, self.part
        self.renewing.may = lambda: elastic and part.course.step > 0 and not process.stopping

    # ---- devices

    def _held(self, index: int) -> Any:
        return self.layouts[index].held[self.place]

    def _model(self) -> Content:
        """Return the model as it lies on the devices, in the thread that ends this process; reading takes a while."""
        copied = [values.copy() for values in self.values]

        def read() -> Iterator[Vector]:
            for values in copied:
                threads.sleep(SAVE_S * self.process.rng.random() / len(copied))
                self.island.take_disk(self.process)
                yield values

        return Content(self._chunks, read())

    def _only_here(self, index: int, values: Vector) -> Vector:
        kept = np.full_like(values, np.nan)
        self._held(index).put(self._held(index).take(values), kept)
        return kept

    def _write(self, index: int, version: int, applied: VersionWrite) -> None:
        rows = self._held(index)
        theta = rows.take(applied.theta)
        self.world.reference.check_rows(self.process.name, index, version, rows.take, theta)
        if applied.reference is not None:
            theta = theta + (rows.take(self.values[index]) - rows.take(applied.reference))
        values = np.full_like(self.values[index], np.nan)
        rows.put(theta, values)
        self.values[index] = values

    # ---- the trainer

    async def _train(self) -> bool:
        leader, process = self.leader, self.process
        outcome: StepDone | None = None
        flight: asyncio.Future[None] | None = None
        batch = await self._next_batch()
        self.trains = True
        if leader is not None:
            leader.look_ahead(None, batch)
        while True:
            if flight is not None and (self.apart or process.rng.random() > AHEAD):
                await flight
            if process.stopping and not self.leaving:
                self.leaving = True
                self.side.steered.leave(LEAVE_S)
            if leader is not None and leader.decisions.made is None:
                leader.look_ahead(None, batch)
            await self._await_decision()
            boundary, outcome = await self._change(outcome), None
            await self._keep()
            if boundary.finished or boundary.ended:
                return boundary.finished
            if boundary.stop or boundary.wait:
                if flight is not None:
                    await flight
                    flight = None
                if leader is not None:
                    await asyncio.sleep(IDLE_S * process.rng.random())
                    while not leader.decisions.is_followed and not self.part.is_decided:  # as its `wait` does
                        await asyncio.sleep(NEWS_S)
                continue
            landing, flight = flight, self._step(batch)
            trained, batch = batch, await self._next_batch()
            if landing is not None:
                await landing
            if leader is not None:
                await asyncio.sleep(process.step_s * process.rng.random())
                leader.look_ahead(StepDone(self.island.tokens, *trained, None, 0.0, 0.0), batch)
                outcome = StepDone(self.island.tokens, *trained, 1.0, process.step_s, 0.0)

    async def _change(self, outcome: StepDone | None) -> Boundary:
        """Go from one boundary to the next; of steps that are two programs, while another thread waits for the end of that."""
        changing, rng = self.rescue.changing, self.process.rng
        if changing._lock.locked():  # by the thread that ends this process
            await self.never()
        with changing:
            if self._begun is not None:
                self._add(self._begun)
                self._begun = None
                await asyncio.sleep(CHANGING_S * rng.random())
            boundary = self.side.steered.boundary(outcome)
            self._carry_out(boundary)
            return boundary

    async def _next_batch(self) -> tuple[int, int]:
        if self.leader is not None:
            return self.round_robin.next(self.member.leased())
        assert self.follower is not None
        await self._await_decision()
        return self.follower.next_batch()

    async def _await_decision(self) -> None:
        news: Any = self.part._news
        while not self.part.is_decided:
            await news.come()

    def _carry_out(self, boundary: Boundary) -> None:
        part, process = self.part, self.process
        decided, island = part.decided, self.island
        self.generation.check(process.name, decided, part.course.chain)
        here = [
            write for write in decided.writes if part.carriers[write.fragment] == self.place or self._held(write.fragment).size
        ]
        came = [index for index, _ in boundary.applies]
        what = f"{process.name}, boundary {decided.number}"
        demand(came == [write.fragment for write in here], f"{what}: writes {came}, decided was {here}")
        for write, (index, applied) in zip(here, boundary.applies, strict=True):
            self._write(index, write.version, applied)
        self.applied |= {write.fragment: write.version for write in decided.writes}
        for index in boundary.reads:
            snapshot = self.values[index].copy()
            self.side.steered.submit(index, lambda snapshot=snapshot: snapshot.copy())  # type: ignore[misc]
        if self.leader is not None:
            island.note_counted(self.leader.decisions.saves.whole, self.leader)

    def _step(self, batch: tuple[int, int]) -> asyncio.Future[None]:
        program = batch, self.side.steered.moment(), tuple(sorted(self.applied.items())), self.island.in_common(self.values)
        index, ended = self.generation.step(self.part.decided.step, self, program)
        if self.apart:
            self._begun = index
        else:
            self._add(index)
        return ended

    def _add(self, index: int) -> None:
        """Add a step to the values."""
        for values in self.values:
            values[index] += 1  # NaN elsewhere

    async def _regroups(self) -> bool:
        """Whether the generation alone has ended; then all processes have taken leave of one another."""
        if not await self.side.is_for_larger_generation():
            return False
        await self.group.farewell()
        return True

    async def _end(self, *, finished: bool) -> None:
        if self._job is not None:
            await self._job
        if not finished and await self._regroups():
            if self.process.stopping:
                return
            self.process.regroup()
            await self.never()
        if self.leader is not None:
            with contextlib.suppress(IslandError):  # another process has waited long enough for this one, and ended
                for index in range(len(self.values)):
                    whole = await self.part.gather(index)
                    demand(bool(np.isfinite(whole).all()), f"{self.process.name}: fragment {index} was gathered with holes")
        await self.group.farewell()
        await self.side.close()
        self.group.ending()
        await self.group.close()
        await self.process.transport.close()

    # ---- its disk

    @property
    def _chunks(self) -> list[Chunk]:
        """By fragment: this process's part of the model."""
        return [
            Chunk.whole(f"model/{index}/{self.island.shard(self.place, self.group.size)}", (fragment.size,), "float32")
            for index, fragment in enumerate(FRAGMENTS.fragments)
        ]

    def check(self, saved: State) -> None:
        for chunk in self._chunks:
            saved.check(chunk)

    def _wanted(self) -> Purpose | None:
        assert self.leader is not None
        lender = self.member.lender
        if lender.wanted:
            lender.give_none()
        return "own" if self.process.rng.random() < SAVED_BOUNDARIES else None

    async def _keep(self) -> None:
        saving = self.side.saving
        if saving is None:
            return
        if self._job is not None:
            await self._job
        if saving.save.purpose == "whole" and self.leader is not None:
            marker = self.leader.learner.markers.marker
            if marker is not None and marker.number == saving.save.marker:
                # carriers' versions of two fragments come in another order than the log's
                self.world.check_marked(self.island.name, self.leader.member, marker.versions, exact=False)
        if self.leader is not None:
            self.island.saved_steps[saving.save.name] = self.member.step
        copied = [values.copy() for values in self.values]
        self._job = self.process.loop.create_task(self._save(saving, copied))

    async def _save(self, saving: Saving, copied: list[Vector]) -> None:
        process, save = self.process, saving.save
        await asyncio.sleep(SAVE_S * process.rng.random())
        fate = self.world.fate(process, f"save {save.purpose} {save.name!r}")
        if fate == "crash_before":
            process.crash("before saving")
            await asyncio.sleep(0)
        settings, run = process.settings, self.part.run.identity
        place: tuple[Path, Path | None] | None
        if save.purpose == "own":
            place = restoring.own_place(settings, run, self.place, save, missed=self.group.missed)
        else:
            place = StateFolder(settings.state_dir, settings.name).snapshot(save.marker, self.place), None
        saved: Saved | None = None
        full = fate == "lost" or (not self.world.calm and process.rng.random() < self.world.disks_full)
        if place is not None and not full:
            path, previous = place
            content = Content(self._chunks, copied) + Content.of(saving.arrays)
            part = state.StateFilePart(self.place, self.group.size, save.name)
            saved = state.save(path, run, settings.name, saving.accounts, content, previous, part)
            self.world.stats["part saved"] += 1
        if fate == "crash_after":
            process.crash("after saving")
            await asyncio.sleep(0)
        self.side.part_saved(saving, saved, saved.state_hash if saved else b"")

    def bases(self) -> list[Vector]:
        """Return by fragment the version applied last: as its carrier has it, or as it was decided, where that one was lost."""
        bases = []
        for index, carrier in enumerate(self.part.carriers):
            worker = self.generation.workers[carrier]
            if worker.process.finished is worker:
                bases.append(worker.part.carrier._carried[index].values.base)
            else:  # while it stood still the others came to the end; rows were looked at as they were written
                bases.append(self.world.reference.logs[index].thetas[self.applied[index]])
        return bases
