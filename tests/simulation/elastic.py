"""Islands that go on with fewer processes: what they keep where one is lost, and how soon they step again.

Of the steps that an island has taken at most one is lost where its leader is left and each process has a whole replica.
In schedules in which nothing else goes wrong a :class:`Drill` takes processes away, and demands stated times.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation.invariants import Violation, demand
from tests.simulation.island import NOTICED_S, SLACK_S, Generation, Island, IslandProcess, draw_layouts, shared_out
from tests.simulation.learner import SAVE_S
from tests.simulation.part import Vector, Worker

from diloco.core.tensors.rows import LEADER, RowLayout, carriers
from diloco.elastic.rescue import OTHERS_S
from diloco.errors import IslandError
from diloco.processes.leader import Leader
from diloco.processes.restoring import CheckpointFit
from diloco.settings.service import MeshSettings
from diloco.wire.process_messages import Kept

if TYPE_CHECKING:
    from tests.simulation.islands import IslandWorld

FAILS_S = 0.05  # in which a collective fails where it notices a loss by itself
EXEC_S = 0.5  # longest from one process to the next of the same number
GO_ON_S = 5.0  # in which those that are left step again, once a loss is noticed
BACK_S = 5.0  # in which a process that has begun again takes part in a step
DRILLS_S = 30.0  # so long are processes taken away: a run has to end within 60 s, and two islands in lockstep take turns
LOOK_S = 0.05
# where no state can be kept, and all go on from the newest checkpoint
NOT_KEPT = re.compile(r"not joined the log yet, or its value is not finite|No space left")


class ElasticIsland(Island):
    """``least`` of its processes go on. ``mesh.data`` replicas: one for each process, or one for two of them."""

    exec_s = EXEC_S

    def __init__(self, world: IslandWorld, name: str, rng: random.Random) -> None:
        count, data, self.least = rng.choice(((2, 2, 1), (2, 2, 1), (3, 3, 1), (3, 3, 2), (4, 4, 2), (4, 2, 2)))
        self.mesh, self.whole = MeshSettings(data=data), data == count
        self.shared = rng.random() < 0.85  # whether all processes see one folder
        self.disk_full = rng.choice((0.0, 0.0, 0.3))  # for a state that is kept
        self._by_size: dict[int, list[RowLayout]] = {}
        self._kept: dict[str, set[int]] = {}  # by state: places of the processes that have kept their part
        self._excused: set[tuple[str, int]] = set()  # processes that could keep nothing
        self._counted_by: list[int] = []  # the processes of the generation that saved it
        self._rng = rng
        super().__init__(world, name, count, rng)

    def layouts(self, size: int) -> list[RowLayout]:
        if size not in self._by_size:
            self._by_size[size] = draw_layouts(size, self._rng, "replicas") if self.whole else shared_out(size, 2)
        return self._by_size[size]

    def shard(self, place: int, size: int) -> int:
        return 0 if self.whole else place % 2

    def state_dir(self, index: int) -> Path:
        return self.folder if self.shared else super().state_dir(index)

    def in_common(self, values: Sequence[Vector]) -> Hashable:
        return tuple(vector.tobytes() for vector in values) if self.whole else None

    @property
    def parting_s(self) -> float:
        return 3 * OTHERS_S + SAVE_S

    # ---- losses

    def note_loss(self, process: IslandProcess) -> None:
        """Have a collective fail at once, now and then; what follows from a loss may go wrong, too."""
        if self._rng.random() < 0.5:
            for step in process.worker.generation.steps.values():
                for worker, ended in step.waiting.values():
                    worker.process.loop.call_later(FAILS_S * self._rng.random(), _fail, ended)
        self.world.go_wrong_soon(self)

    # ---- what is kept

    def take_disk(self, process: IslandProcess) -> None:
        if not self.world.calm and process.rng.random() < self.disk_full:
            raise OSError(28, "No space left on device")

    def note_kept(self, worker: Worker, kept: Kept, accounts: dict[str, Any]) -> None:
        self._kept.setdefault(kept.name, set()).add(worker.place)
        if worker.place != LEADER:
            return
        generation, step = worker.generation, int(accounts["step"])
        demand(generation.began is not None, f"{self.name}: a state is kept before the first step")
        taken = (generation.began or 0) + generation.ended
        demand(taken - 1 <= step <= taken, f"{self.name}: of {taken} steps taken, {step} are kept")
        self.world.stats["state kept"] += 1
        self.world.stats["step lost with a process"] += taken - step
        self.saved_steps[kept.name] = step
        if self.shared:  # of folders of their own only the leader finds the model
            self.counted, self._counted_by = kept.name, worker.part.links.members

    def note_not_kept(self, process: IslandProcess, reason: str) -> None:
        if NOT_KEPT.search(reason) is None:
            super().note_not_kept(process, reason)
        self.world.stats["state not kept"] += 1
        self._excused.add((process.name, process.generation))

    def note_begins_again(self, process: IslandProcess) -> None:
        worker, generation = process.worker, process.worker.generation
        keeps = self.whole and generation.size > 1
        demand(worker.apart == keeps, f"{process.name}: of {generation.size} processes, and keeps its state: {worker.apart}")
        self.world.go_wrong_soon(self)
        if process.regroups:
            if worker.place == LEADER:
                self._note_planned(worker.leader)
            return
        demand(worker.part.course.step > 0, f"{process.name} begins again by itself before it has taken a step")
        kept = any(LEADER in places and name.startswith(f"{worker.group.generation},") for name, places in self._kept.items())
        excused = (process.name, process.generation) in self._excused
        demand(not keeps or worker.place != LEADER or kept or excused, f"{process.name} begins again without a state")

    def _note_planned(self, leader: Leader) -> None:
        """A generation has ended so that a larger one begins: with its last state, if all disks have taken that."""
        saved = leader.decisions.saves.whole
        self.note_counted(saved, leader)
        self.world.stats["generation ended for a larger one"] += 1
        if self.world.drills:
            step, taken = self.saved_steps[saved], leader.member.step
            demand(step == taken, f"{self.name}: ends at step {taken} for a larger generation, saved is {step}")

    def check_parts(self, name: str, leader: Leader) -> None:
        if name.startswith(
            f"{leader.part.group.generation},"
        ):  # that of another number of processes they all have said to have
            super().check_parts(name, leader)

    def note_counted(self, name: str, leader: Leader) -> None:
        if name and self.counted != name:
            self._counted_by = leader.part.links.members
        super().note_counted(name, leader)

    def known(self, leader: Leader) -> str | None:
        alone = not self.shared and leader.part.links.members != self._counted_by
        return None if alone else self.counted  # a process finds no parts but its own

    def note_restored(self, fit: CheckpointFit | None, leader: Leader) -> None:
        super().note_restored(fit, leader)
        links = leader.part.links
        self.world.stats[f"generation of {'all' if len(links.members) == self.count else 'fewer'} processes"] += 1
        if fit is None or not self.shared:
            return
        dealt = carriers([fragment.size for fragment in leader.member.map.fragments], len(fit.saved.files) + fit.saved.missing)
        there = self._kept.get(fit.saved.set_name, set())
        wrong = [index for index in fit.bare if dealt[index] in there]
        demand(not wrong, f"{self.name}: arrays of fragments {wrong} are given up, and they were kept")

    # ---- the end of faults

    def look_later(self) -> None:
        """Demand, some time after the last fault, that all take part."""
        self.world.later(2 * NOTICED_S + 2 * GO_ON_S + 2 * BACK_S, self._look)

    def _look(self) -> None:
        newest = self.newest
        if newest is None or self.world.is_ending(self):
            return
        self.world.stats["all together again"] += 1
        demand(newest.size == self.count, f"{self.name}: {newest.size} of {self.count} step, long after the last fault")

    @property
    def newest(self) -> Generation | None:
        """The newest generation that has begun to step."""
        return next((each for each in reversed(self.generations.values()) if each.ended), None)


def _fail(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_exception(IslandError("a collective operation failed, perhaps because a process is gone"))
        ended.exception()  # it may not be asked for


class Drill:
    """Takes processes of an island away, again and again, where nothing else goes wrong."""

    def __init__(self, island: ElasticIsland, rng: random.Random) -> None:
        self.island, self.world, self.rng = island, island.world, rng
        self._next: Callable[[], bool] = self._whole
        self._limit_s: float | None = None
        self._what = ""
        self._before: Generation | None = None
        self._lost: list[IslandProcess] = []
        self._steps = rng.randint(1, 6)
        self.world.later(LOOK_S, self._look)

    def _look(self) -> None:
        if self.island.begun and self.world.is_ending(self.island):
            return
        if self._next():
            self._limit_s = None
        elif self._limit_s is not None and self.world.now_s > self._limit_s:
            self.world.failed(Violation(f"{self.island.name}: {self._what}"))
            return
        self.world.later(LOOK_S, self._look)

    def _whole(self) -> bool:
        """All are there: after some steps some of them are not, at any point of the next one."""
        newest = self.island.newest
        if newest is None or newest.size < self.island.count or newest.ended < self._steps or newest.draining:
            return False
        if self.world.now_s > DRILLS_S:
            return False
        self.world.later(0.2 * self.rng.random(), self._lose)
        self._next, self._before = self._waiting, newest
        return True

    def _waiting(self) -> bool:
        return False

    def _lose(self) -> None:
        island, rng = self.island, self.rng
        sizes = island.processes[0].settings.processes.sizes(island.mesh)
        size = rng.choice(sizes[1:])
        self._lost = rng.sample(island.processes[1:], island.count - size)
        if any(not process.alive for process in island.processes):
            self._next = self._whole
            return
        kind = rng.choice(("kill", "kill", "host", "freeze"))
        noticed_s = 0.0 if kind == "kill" else NOTICED_S
        self.world.note("world", f"drill: {kind} {', '.join(process.name for process in self._lost)}")
        for process in self._lost:
            if kind == "freeze":
                process.loop.freeze()
                self.world.later(NOTICED_S + rng.random(), process.thaw)
            else:
                process.vanishes = kind == "host"
                process.crash(f"in a drill ({kind})")
        self._next, self._limit_s = self._going_on, self.world.now_s + noticed_s + GO_ON_S
        self._what = f"{size} of {island.count} do not step again within {noticed_s + GO_ON_S:g} s"

    def _going_on(self) -> bool:
        newest, before = self.island.newest, self._before
        assert before is not None
        if newest is before or newest is None:
            return False
        assert before.began is not None
        assert newest.began is not None
        taken = before.began + before.ended
        if self.island.whole and self.island.shared:
            demand(newest.began >= taken - 1, f"{self.island.name}: begins at step {newest.began}, {taken} were taken")
        self.world.stats["drill: went on"] += 1
        self._next, self._limit_s = self._coming_back, None
        return True

    def _coming_back(self) -> bool:
        """Those that were lost have begun again, and take part."""
        newest = self.island.newest
        if newest is not None and newest.size == self.island.count:
            self.world.stats["drill: all again"] += 1
            self._next, self._steps = self._whole, self.rng.randint(1, 6)
            return True
        if self._limit_s is None and all(process.alive and process.loop.held is None for process in self._lost):
            self._limit_s = self.world.now_s + BACK_S + SLACK_S
            self._what = f"of {self.island.count} processes all are there, and they do not step together within {BACK_S:g} s"
        return False
