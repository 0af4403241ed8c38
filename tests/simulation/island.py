"""A learner of several processes in a simulated cluster: its processes, its generations as these find them, and its disks.

Every process is a process of the world, with a loop, a transport and a folder of its own; between them are the real links, over
a network in virtual time. Each is begun again by itself some time after it has ended, as by systemd.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests.simulation.invariants import Violation, Writer, demand
from tests.simulation.learner import FRAGMENTS, Step
from tests.simulation.part import Vector, Worker
from tests.simulation.world import RUN, Listener, Process

from diloco.core.tensors.fragments import Fragment, Piece
from diloco.core.tensors.rows import FragmentRows, RowLayout, Where
from diloco.errors import IslandError
from diloco.processes.group import WATCH_S
from diloco.processes.leader import Leader
from diloco.processes.links import PING_S
from diloco.processes.restoring import CheckpointFit
from diloco.settings.service import LearnerSettings, MeshSettings, ProcessesSettings
from diloco.states import state
from diloco.states.statefolder import StateFolder
from diloco.testing import threads
from diloco.testing.sockets import Host
from diloco.wire.process_messages import Candidate, Decided, Kept

if TYPE_CHECKING:
    from tests.simulation.islands import IslandWorld

SILENT_S, START_S = 1.0, 5.0
SLACK_S = 1.0  # messages on their way
NOTICED_S = SILENT_S + PING_S + WATCH_S + SLACK_S  # until others know that a process is gone
REGROUP_S = 1.0
ADDRESS_PORT = 7600
# whatever else a generation ends by is a defect
EXPECTED = re.compile(
    r"is gone|was suspended|has ended: its rows|did not connect|cannot be reached|has waited for other processes|"
    r"no connection to process|was lost while all were connecting|a collective operation failed"
)


@dataclass
class _Step:
    """A step that processes take together: it ends once all have dispatched it."""

    index: int
    program: Any
    began_by: str
    waiting: dict[int, tuple[Worker, Any]] = field(default_factory=dict)


@dataclass
class Generation:
    """One generation, as its processes find it."""

    island: Island
    leader: int  # of its leader: which process of that name it is
    must_pass: dict[int, int] = field(default_factory=dict)
    members: list[tuple[IslandProcess, int]] = field(default_factory=list)
    decisions: dict[int, tuple[str, Decided, bytes]] = field(default_factory=dict)  # by number: who was first
    steps: dict[int, _Step] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)  # by place
    size: int = 0  # processes
    applied: dict[int, int] = field(default_factory=dict)  # by fragment: the version of the checkpoint that it began from
    began: int | None = None  # steps of its learner then, once it has begun
    ended: int = 0  # steps since that have ended, at any process
    draining: bool = False  # whether its leader has decided that no step is taken any more

    def join(self, worker: Worker) -> None:
        self.members.append((worker.process, worker.process.generation))
        self.workers[worker.place] = worker
        self.size = worker.group.size

    def check(self, name: str, decided: Decided, chain: bytes) -> None:
        """A process has carried a decision out: all that do so carry out the same."""
        if decided.number not in self.decisions and (decided.ended or decided.finished):
            self.island.world.go_wrong_at_the_end(self.island)
        self.draining = self.draining or decided.stop or decided.finished
        first, its, its_chain = self.decisions.setdefault(decided.number, (name, decided, chain))
        demand(its == decided, f"{name}, boundary {decided.number}: {decided}, but {first} has {its}")
        demand(its_chain == chain, f"{name}, boundary {decided.number}: another chain of decisions than {first}")

    def step(self, number: int, worker: Worker, program: Any) -> tuple[int, asyncio.Future[None]]:
        """A process dispatches a step: return the value that it adds to, and a future of its end."""
        island, world, process = self.island, self.island.world, worker.process
        step = self.steps.get(number)
        if step is None:
            share, batch = program[0]
            taken = Step(island.name, self.leader, island.tokens, share, batch, dict(worker.applied))
            step = self.steps[number] = _Step(world.take_step(taken, self.must_pass), program, process.name)
        demand(step.program == program, f"{process.name}, step {number}: takes {program}, {step.began_by} takes {step.program}")
        demand(process.index not in step.waiting, f"{process.name}: takes step {number} twice")
        ended: asyncio.Future[None] = process.loop.create_future()
        step.waiting[process.index] = worker, ended
        if len(step.waiting) == self.size:
            for other, future in step.waiting.values():
                seconds = other.process.step_s * (0.5 + other.process.rng.random())
                other.process.loop.call_later(seconds, self._end, number, future)
            world.stats["step of an island"] += 1
        return step.index, ended

    def _end(self, number: int, ended: asyncio.Future[None]) -> None:
        if not ended.done():  # by a collective that failed
            self.ended = max(self.ended, number + 1)
            ended.set_result(None)


class Island:
    """A learner of ``count`` processes, none of which goes on without the others."""

    least: int | None = None
    mesh = MeshSettings()
    shared = False  # whether all processes see one folder
    exec_s = 0.0  # longest that a process takes which begins again by itself
    whole = False  # whether each process has a whole replica, so that a generation keeps its state where one is lost

    def __init__(self, world: IslandWorld, name: str, count: int, rng: random.Random) -> None:
        self.world, self.name, self.count = world, name, count
        self.folder = world.folder / name
        self.generations: dict[int, Generation] = {}
        self.begun = self.finished = False
        self.counted: str | None = None  # the newest checkpoint that counts; None: none, or a disk has lost it
        self.saved_steps: dict[str, int] = {}  # by checkpoint: of its state
        self._layouts = draw_layouts(count, rng)
        self.processes: list[IslandProcess] = []
        for index in range(count):
            self.processes.append(IslandProcess(self, index))

    @property
    def tokens(self) -> int:
        return self.processes[0].tokens

    def layouts(self, size: int) -> list[RowLayout]:
        """Return by fragment which rows the processes of a generation have."""
        return self._layouts

    def shard(self, place: int, size: int) -> int:
        """Return the shard of the model that a process has: of one and the same it has the same rows."""
        return place

    def state_dir(self, index: int) -> Path:
        return self.folder / str(index)

    def begin(self, number: int, leader: IslandProcess) -> None:
        self.generations[number] = Generation(self, leader.generation)

    def note_counted(self, name: str, leader: Leader) -> None:
        """The leader takes a checkpoint for one that counts: all must find their parts on their disks, with all in them."""
        if not name or self.counted == name:
            return
        members = self.generations[leader.part.group.generation].members
        if any(process.disk_lost > number for process, number in members):
            return  # one has begun again since, without its disk
        self.counted = name
        self.world.stats["checkpoint counts"] += 1
        self.check_parts(name, leader)

    def check_parts(self, name: str, leader: Leader) -> None:
        """Look whether each process of the leader's generation has its part of a checkpoint, and could begin from it."""
        processes = [self.processes[index] for index in leader.part.links.members]
        missing = [process.name for place, process in enumerate(processes) if not process.has(name, place)]
        demand(not missing, f"{self.name}: checkpoint {name!r} counts, and {missing} have no part of it")
        first = processes[0].settings
        accounts = state.load_set(first.state_dir, self.world.reference.run, self.name, name, 0).accounts
        named = Candidate("", name, leader.unmerged_of(accounts), [])
        for process in processes:
            try:
                process.can_begin_from(named)
            except state.UNFIT as error:
                raise Violation(f"{process.name} cannot begin from checkpoint {name!r}, which counts: {error!r}") from None

    def note_restored(self, fit: CheckpointFit | None, leader: Leader) -> None:
        """A generation begins from a checkpoint, or (None) from the log."""
        known, self.counted = self.known(leader), None
        if not self.begun:
            self.begun = True
            self.world.go_wrong_inside(self)
        what = "the log" if fit is None else repr(fit.saved.set_name)
        demand(known is None or fit is not None, f"{self.name}: begins from the log, and {known!r} counted")
        if fit is not None:
            begun = self.saved_steps[fit.saved.set_name]
            counted = 0 if known is None else self.saved_steps[known]
            demand(begun >= counted, f"{self.name}: begins from {what} of step {begun}, and {known!r} of {counted} counted")
            self.note_counted(fit.saved.set_name, leader)
            self.world.stats["generation from a checkpoint"] += 1
        else:
            self.world.stats["generation from the log"] += 1
        self.world.note(self.name, f"begins from {what}")

    def known(self, leader: Leader) -> str | None:
        """Return the newest checkpoint that a generation has to begin from, or from a newer one."""
        return self.counted

    def forget(self) -> None:
        """Some disk has lost its part: nothing can be said any more of the next begin."""
        self.counted = None

    def note_loss(self, process: IslandProcess) -> None:
        """A process that others wait for is no more."""

    def note_not_kept(self, process: IslandProcess, reason: str) -> None:
        """A process has not kept its part of the state where another one was lost."""
        self.world.failed(Violation(f"{process.name} does not keep its state: {reason}"))

    def note_kept(self, worker: Worker, kept: Kept, accounts: dict[str, Any]) -> None:
        """A process has kept its part of the state; a leader's has the accounts."""

    def take_disk(self, process: IslandProcess) -> None:
        """Write a little of what is kept.

        Raises:
            OSError: the disk is full.
        """

    def in_common(self, values: Sequence[Vector]) -> Hashable:
        """Return the model as far as it is the same in all processes when they step."""
        return None

    def note_begins_again(self, process: IslandProcess) -> None:
        """A process begins again by itself."""
        self.world.failed(Violation(f"{process.name} begins again by itself"))

    @property
    def parting_s(self) -> float:
        """Longest that a process goes on which knows that another one is gone."""
        return 0.0


class PartListener(Listener):
    """Hears a process of an island."""

    def __init__(self, process: IslandProcess, note: Callable[..., None] | None) -> None:
        super().__init__(note, process.island.world.failed, faulty=False)
        self.process = process

    def __getattr__(self, level: str) -> Callable[..., None]:
        hear = super().__getattr__(level)

        def both(event: str, **values: Any) -> None:
            if event == "displacement_not_finite":
                self.failed(f"rows of a snapshot are missing: {values['reason']}")
            if event == "state_not_kept":
                self.process.island.note_not_kept(self.process, values["reason"])
            if event == "waiting_for_generation":
                self.process.waits = True
            hear(event, **values)

        return both


class IslandProcess(Process):
    """One process of an island: process 0 has the learner's name."""

    world: IslandWorld
    host: Host

    def __init__(self, island: Island, index: int) -> None:
        self.island, self.index = island, index
        world = island.world
        name = island.name if index == 0 else f"{island.name}.{index}"
        self.settings = LearnerSettings(
            name=island.name,
            run=RUN,
            share=0,
            state_dir=island.state_dir(index),
            mesh=island.mesh,
            processes=ProcessesSettings(
                count=island.count,
                index=index,
                address=f"{island.name}:{ADDRESS_PORT}",
                start_s=START_S,
                silent_s=SILENT_S,
                least=island.least,
                regroup_s=REGROUP_S,
            ),
        )
        note = partial(self._note, world) if world.verbose else None
        self.log: Any = PartListener(self, note)
        self.can_begin_from: Callable[[Candidate], object]  # its newest part's; one that has just begun again has none yet
        self.disk_lost = 0  # the newest process of this number that has come back without its disk
        self.vanishes = False
        self.finished: Worker | None = None  # that came to the run's end, whatever became of its process then
        self.over = False  # it came when the run was over
        self.ends_by: IslandError | None = None
        self._left: frozenset[int] = frozenset()  # the processes that it has told itself to expect
        super().__init__(world, name, "", _serve)  # type: ignore[arg-type]  # it is given itself

    def _note(self, world: IslandWorld, who: str, what: str) -> None:
        world.note(self.name, what)

    def at_start(self) -> None:
        super().at_start()
        self.vanishes = self.waits = self.regroups = False
        self.expected, self._left = self._left, frozenset()
        self.thawed_s = self.world.now_s
        self.host = self.loop.host = self.world.network.begin(self.name, self.loop)
        if self.generation > 1 and self.world.rng.random() < self.world.disks_lost and not self.island.shared:
            self.world.stats["disk lost"] += 1
            self.world.note(self.name, "comes back without its disk")
            shutil.rmtree(self.settings.state_dir, ignore_errors=True)
            self.disk_lost = self.generation
            self.island.forget()

    def forget(self) -> None:
        super().forget()
        self.loop.dead = True
        self.loop.end_threads()
        self.world.network.end(self.host, silently=self.vanishes)

    def at_end(self, error: BaseException | None) -> None:
        if isinstance(error, IslandError):
            self._check_reason(error)
            self.restart_later()
        elif isinstance(error, Exception):
            self.world.failed(error)
        else:
            self.world.note(self.name, f"ends: {error or 'finished' if self.island.finished else 'left'}")
            self.restart_later()

    def give_up(self, error: IslandError) -> None:
        """End as its watch ends it, wherever it is, or have it begin again."""
        self.ends_by = error
        self._check_reason(error)
        EndThread(self, partial(self.worker.group.end_as_it_is, error))

    def exit(self) -> None:
        """End; something begins it again."""
        super(Process, self).crash("given up")
        self.restart_later()

    def regroup(self) -> None:
        """Begin again with those that wait, after all have taken leave."""
        self.regroups = True
        EndThread(self, self.worker.renewing.renew)

    def begin_again(self, expected: frozenset[int]) -> None:
        """Go on as a fresh process of the same command."""
        self.world.note(self.name, f"begins again, with {sorted(expected)}")
        self.world.stats["process begun again by itself"] += 1
        self.island.note_begins_again(self)
        super(Process, self).crash("begins again")
        self._left = expected
        self.world.later(self.island.exec_s * self.world.rng.random(), self.start)

    def _check_reason(self, error: IslandError) -> None:
        self.world.note(self.name, f"ends: {error}")
        self.world.stats["process ended with its island"] += 1
        if not EXPECTED.search(str(error)):
            self.world.failed(Violation(f"{self.name}: {error}"))

    def restart_later(self) -> None:
        if self.island.finished or self.over:  # what has begun it sees that the learner is done
            self.ended, self.worker = True, self.finished or self.worker
            self.world.look_for_end()
        else:
            super().restart_later()

    def crash(self, why: str) -> None:
        worker, alive = self.worker, self.alive
        super().crash(why)
        if alive and worker is not None and hasattr(worker, "generation"):
            self.island.note_loss(self)
            self.world.later(NOTICED_S + self.island.parting_s, self._check_gone, worker.generation)

    def _check_gone(self, generation: Generation) -> None:
        """All others of a generation have ended, so long after one did."""
        for process, number in generation.members:
            if not process.alive or process.generation != number or process.worker.group._ending.is_set():
                continue
            limit_s = NOTICED_S + self.island.parting_s
            if process.loop.held is not None or self.world.now_s - process.thawed_s < limit_s:
                self.world.later(limit_s, self._check_gone, generation)
                return
            self.world.failed(Violation(f"{process.name} goes on without {self.name}, which is gone"))

    def watch_start(self) -> None:
        """Look later whether it has met the others, or given up."""
        self.world.later(2 * START_S + SLACK_S, self._check_met, self.generation)

    def _check_met(self, number: int) -> None:
        if not self.alive or self.generation != number or hasattr(self.worker, "generation") or self.waits:
            return
        limit_s = 2 * START_S + SLACK_S
        if self.loop.held is not None or self.world.now_s - self.thawed_s < limit_s:
            self.world.later(limit_s, self._check_met, number)
        else:
            self.world.failed(Violation(f"{self.name} waits for the others for more than {limit_s:g} s"))

    def stop(self) -> None:
        self.stopping = True
        if self.worker is None or not self.worker.trains:
            self.crash("asked to end, as it begins")

    def thaw(self) -> None:
        self.thawed_s = self.world.now_s
        super().thaw()

    def as_writer(self) -> Writer:
        return Writer(self.name, self.generation, dict(self.worker.applied), self.worker.must_apply)

    def has(self, name: str, place: int) -> bool:
        """Whether its disk has the part of a checkpoint that is that place's."""
        paths = StateFolder(self.settings.state_dir, self.settings.name).generations(place)
        run = self.world.reference.run
        return any(state.is_of(path, run, self.settings.name, name) for path in paths)


class EndThread(threads.Thread):
    """The thread that ends a process."""

    def __init__(self, process: IslandProcess, work: Callable[[], object]) -> None:
        self.process = process
        super().__init__(process.loop, work)


def exit_process(code: int) -> NoReturn:
    """``os._exit`` of the thread that ends a process."""
    thread = threads.current()
    assert isinstance(thread, EndThread)
    if not thread.loop.dead:
        thread.process.exit()
    raise threads.Killed


def renew(expected: Iterable[int] = ()) -> NoReturn:
    """:func:`diloco.process.renewal.renew`, likewise."""
    thread = threads.current()
    assert isinstance(thread, EndThread)
    thread.process.begin_again(frozenset(expected))
    raise threads.Killed


async def _serve(process: IslandProcess) -> None:
    process.worker = Worker(process)
    if await process.worker.serve():
        process.island.finished = True


def draw_layouts(count: int, rng: random.Random, kind: str | None = None) -> list[RowLayout]:
    """Draw which rows the processes have: shards, all of them everywhere, or of some fragments none at some."""
    kind = kind or rng.choice(("shards", "shards", "replicas", "uneven"))
    layouts = []
    for fragment in FRAGMENTS.fragments:
        owners = [index for index in range(count) if kind != "uneven" or rng.random() < 0.6] or [rng.randrange(count)]
        read = [FragmentRows(_columns(fragment, owners.index(i), len(owners)) if i in owners else ()) for i in range(count)]
        whole = FragmentRows(tuple((piece, (slice(None),)) for piece in fragment.pieces))
        layouts.append(RowLayout(read, [whole] * count if kind == "replicas" else read))
    return layouts


def shared_out(count: int, shards: int) -> list[RowLayout]:
    """Return the rows of processes of which so many have a replica together; the first one hands its rows over."""
    layouts = []
    for fragment in FRAGMENTS.fragments:
        held = [FragmentRows(_columns(fragment, place % shards, shards)) for place in range(count)]
        layouts.append(RowLayout([rows if place < shards else FragmentRows(()) for place, rows in enumerate(held)], held))
    return layouts


def _columns(fragment: Fragment, first: int, step: int) -> tuple[tuple[Piece, Where], ...]:
    """Return some of a fragment's columns, so that each process has some of a run's first values."""
    columns = slice(first, None, step)
    return tuple((piece, (slice(None), columns) if len(piece.shape) > 1 else (columns,)) for piece in fragment.pieces)
