"""Clusters one of whose learners is an island of several processes: what goes wrong inside it, and what must hold there.

Every process is a process of the world, with a loop, a transport and a folder of its own; between them are the real links, over
a network in virtual time. Each is begun again by itself some time after it has ended, as by systemd.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.simulation.invariants import Violation, Writer, demand
from tests.simulation.learner import FRAGMENTS, Step
from tests.simulation.part import News, Worker
from tests.simulation.world import RUN, SMALL, VARIANTS, Chaos, Listener, Process, World

import diloco.member.meeting
import diloco.member.part
from diloco.core import changes
from diloco.core.changes import Changes, Set
from diloco.core.rows import RowLayout, Rows
from diloco.errors import IslandError
from diloco.member import restoring, state
from diloco.member.group import WATCH_S
from diloco.member.leader import Leader
from diloco.member.links import PING_S
from diloco.member.restoring import Fit
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings, ProcessesSettings
from diloco.wire.island import Candidate, Decided
from diloco_lab.virtual.sockets import Host, Network
from diloco_lab.virtual.transport import Message

SILENT_S, START_S = 1.0, 5.0
SLACK_S = 1.0  # messages on their way
ADDRESS_PORT = 7600
INSIDE = ("kill", "freeze", "stop", "host", "links")  # faults of an island's processes, besides the usual ones
LASTS_S = (5.0, 12.0)  # so long do things go wrong
WITHIN_S = 3.0  # of the first begin of an island something goes wrong inside it
# whatever else a generation ends by is a defect
EXPECTED = re.compile(
    r"is gone|has ended: its rows|did not come|cannot be reached|waits for other processes|no connection to process|"
    r"went away while all met"
)
CHANGES = (Set("round.steps", 2), Set("round.steps", 4), Set("round.quorum", 1), Set("liveness.lease_s", 1.0))


@cache
def _variant(number: int) -> RunSettings:
    return run_settings("decoupled", SMALL | VARIANTS[number] | {"learners": 2, "shards": 1, "tokens": 3 * 16 * 15})


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

    def join(self, process: IslandProcess) -> None:
        self.members.append((process, process.generation))

    def check(self, name: str, decided: Decided, chain: bytes) -> None:
        """A process has carried a decision out: all that do so carry out the same."""
        if decided.number not in self.decisions and (decided.ended or decided.finished):
            self.island.world.go_wrong_at_the_end(self.island)
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
        if len(step.waiting) == island.count:
            for other, future in step.waiting.values():
                seconds = other.process.step_s * (0.5 + other.process.rng.random())
                other.process.loop.call_later(seconds, future.set_result, None)
            world.stats["step of an island"] += 1
        return step.index, ended


class Island:
    """A learner of ``count`` processes; ``replicas``: each has all rows, and not only those that it hands over."""

    def __init__(self, world: IslandWorld, name: str, count: int, rng: random.Random) -> None:
        self.world, self.name, self.count = world, name, count
        self.folder = world.folder / name
        self.generations: dict[int, Generation] = {}
        self.begun = self.finished = False
        self.counted: str | None = None  # the newest checkpoint that counts; None: none, or a disk has lost it
        self.saved_steps: dict[str, int] = {}  # by checkpoint: of its state
        self.layouts = _layouts(count, rng)
        self.processes: list[IslandProcess] = []
        for index in range(count):
            self.processes.append(IslandProcess(self, index))

    @property
    def tokens(self) -> int:
        return self.processes[0].tokens

    def begin(self, number: int, leader: IslandProcess) -> None:
        self.generations[number] = Generation(self, leader.generation)

    def note_counted(self, name: str, leader: Leader) -> None:
        """The leader takes a checkpoint for one that counts: all must find their parts on their disks, with all in them."""
        if not name or self.counted == name:
            return
        self.counted = name
        self.world.stats["checkpoint counts"] += 1
        missing = [process.name for process in self.processes if not process.has(name)]
        demand(not missing, f"{self.name}: checkpoint {name!r} counts, and {missing} have no part of it")
        first = self.processes[0].settings
        accounts = state.load_set(first.state_dir, self.world.reference.run, self.name, name, 0).accounts
        named = Candidate("", name, leader.unmerged_of(accounts), [])
        for process in self.processes:
            try:
                process.can_begin_from(named)
            except restoring.UNFIT as error:
                raise Violation(f"{process.name} cannot begin from checkpoint {name!r}, which counts: {error!r}") from None

    def note_restored(self, fit: Fit | None, leader: Leader) -> None:
        """A generation begins from a checkpoint, or (None) from the log."""
        known, self.counted = self.counted, None
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

    def forget(self) -> None:
        """Some disk has lost its part: nothing can be said any more of the next begin."""
        self.counted = None


class PartListener(Listener):
    """Hears a process of an island."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        hear = super().__getattr__(level)

        def both(event: str, **values: Any) -> None:
            if event == "displacement_not_finite":
                self.failed(f"rows of a snapshot are missing: {values['reason']}")
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
            state_dir=island.folder / str(index),
            processes=ProcessesSettings(
                count=island.count,
                index=index,
                address=f"{island.name}:{ADDRESS_PORT}",
                start_s=START_S,
                silent_s=SILENT_S,
            ),
        )
        note = partial(self._note, world) if world.verbose else None
        self.log: Any = PartListener(note, world.failed, faulty=False)
        self.can_begin_from: Callable[[Candidate], object]  # its newest part's; one that has just begun again has none yet
        self.vanishes = False
        self.finished: Worker | None = None  # that came to the run's end, whatever became of its process then
        super().__init__(world, name, "", _serve)  # type: ignore[arg-type]  # it is given itself

    def _note(self, world: IslandWorld, who: str, what: str) -> None:
        world.note(self.name, what)

    def at_start(self) -> None:
        super().at_start()
        self.vanishes = False
        self.thawed_s = self.world.now_s
        self.host = self.loop.host = self.world.network.begin(self.name, self.loop)
        if self.generation > 1 and self.world.rng.random() < self.world.disks_lost:
            self.world.stats["disk lost"] += 1
            self.world.note(self.name, "comes back without its disk")
            shutil.rmtree(self.settings.state_dir, ignore_errors=True)
            self.island.forget()

    def forget(self) -> None:
        super().forget()
        self.loop.dead = True
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
        """End as its watch ends it, wherever it is."""
        self._check_reason(error)
        if self.alive:
            super(Process, self).crash("given up")
            self.restart_later()

    def _check_reason(self, error: IslandError) -> None:
        self.world.note(self.name, f"ends: {error}")
        self.world.stats["process ended with its island"] += 1
        if not EXPECTED.search(str(error)):
            self.world.failed(Violation(f"{self.name}: {error}"))

    def restart_later(self) -> None:
        if self.island.finished:  # what has begun it sees that the learner is done
            self.ended, self.worker = True, self.finished or self.worker
            self.world.look_for_end()
        else:
            super().restart_later()

    def crash(self, why: str) -> None:
        worker, alive = self.worker, self.alive
        super().crash(why)
        if alive and worker is not None and hasattr(worker, "generation"):
            self.world.later(SILENT_S + PING_S + WATCH_S + SLACK_S, self._check_gone, worker.generation)

    def _check_gone(self, generation: Generation) -> None:
        """All others of a generation have ended, so long after one did."""
        for process, number in generation.members:
            if not process.alive or process.generation != number or process.worker.group._ending.is_set():
                continue
            limit_s = SILENT_S + PING_S + WATCH_S + SLACK_S
            if process.loop.held is not None or self.world.now_s - process.thawed_s < limit_s:
                self.world.later(limit_s, self._check_gone, generation)
                return
            self.world.failed(Violation(f"{process.name} goes on without {self.name}, which is gone"))

    def watch_start(self) -> None:
        """Look later whether it has met the others, or given up."""
        self.world.later(2 * START_S + SLACK_S, self._check_met, self.generation)

    def _check_met(self, number: int) -> None:
        if not self.alive or self.generation != number or hasattr(self.worker, "generation"):
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

    def has(self, name: str) -> bool:
        """Whether its disk has its part of a checkpoint."""
        paths = state.generations(self.settings.state_dir, self.settings.name, self.index)
        run = self.world.reference.run
        return any(state.is_of(path, run, self.settings.name, name) for path in paths)


async def _serve(process: IslandProcess) -> None:
    process.worker = Worker(process)
    if await process.worker.serve():
        process.island.finished = True


class IslandWorld(World):
    """A cluster with one island, or two."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.folder = Path(tempfile.mkdtemp(prefix="islands-", dir=_memory()))
        self.drawing = random.Random(f"islands {seed}")
        self.late_s = self.drawing.choice((0.002, 0.02, 0.2))
        self.network = Network(self._between_s, self.drawing.choice((1 << 16, 3000)))
        self.disks_lost = self.drawing.choice((0.0, 0.0, 0.0, 0.2))
        self.disks_full = self.drawing.choice((0.0, 0.0, 0.2))
        self.islands: list[Island] = []
        super().__init__(seed, verbose=verbose)
        if self.drawing.random() < 0.4:
            self.later(self.drawing.uniform(0.5, self.chaos.until_s), self._change)

    def go_wrong_inside(self, island: Island) -> None:
        """An island has begun for the first time: have things happen to its processes."""
        kinds = [kind for kind in INSIDE if self.drawing.random() < 0.5] or ["kill"]
        for _ in range(self.drawing.choice((0, 1, 2, 3, 4))):
            process, kind = self.drawing.choice(island.processes), self.drawing.choice(kinds)
            for_s = self.drawing.choice((0.3, 1.0, 3.0)) * self.drawing.random()
            self.later(WITHIN_S * self.drawing.random(), self._fault, kind, process, for_s)

    def go_wrong_at_the_end(self, island: Island) -> None:
        """The first process of an island has carried out its last decision: the others may be late for theirs."""
        if self.drawing.random() < 0.3:
            process = self.drawing.choice(island.processes)
            self.later(self.late_s * self.drawing.random(), self._fault, "freeze", process, 3.0 * self.drawing.random())

    def _between_s(self) -> float:
        """How long bytes take between two processes of an island."""
        return 0.001 if self.calm else self.late_s * self.drawing.random()

    def _draw_chaos(self, possible: Sequence[str]) -> Chaos:
        chaos = super()._draw_chaos(possible)
        return replace(chaos, until_s=self.drawing.uniform(*LASTS_S))

    def _variant(self, number: int, regions: bool, merged: bool) -> RunSettings:
        return _variant(number)

    def _make_learners(self, make: Callable[..., list[Process]]) -> list[Process]:
        islands = self.drawing.choice((1, 1, 2))
        learners: list[Process] = []
        for number in range(islands):
            island = Island(self, f"learner-{number}", self.drawing.choice((2, 2, 3, 4)), self.drawing)
            self.islands.append(island)
            learners.append(island.processes[0])
            self.parts += island.processes[1:]
        return learners + [Process(self, f"learner-{i}", "", self._learn) for i in range(islands, self.settings.learners)]

    def _more_constants(self) -> list[tuple[Any, str, Any]]:
        return [
            (diloco.member.part, "threading", SimpleNamespace(Condition=News)),
            (diloco.member.meeting, "free_port", lambda host: ADDRESS_PORT + 1),
            (socket, "has_dualstack_ipv6", lambda: False),
        ]

    def run(self) -> Any:
        try:
            return super().run()
        finally:
            self.network.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _change(self) -> None:
        """Somebody changes a setting."""
        if self._is_ending() or self.subjects.bucket not in self.control.buckets:
            return
        bucket, run = self.control.buckets[self.subjects.bucket], self.reference.run
        stored = bucket.get("changes")
        listed = Changes(run) if stored is None else changes.unpack(stored[0], run)
        change = self.drawing.choice(CHANGES)
        bucket.write("changes", listed.then(change, at_s=0.0, author="somebody").pack(), None, self.drawing.getrandbits(64))
        self.stats["setting changed"] += 1
        self.note("world", f"{change}")
        self.publish(Message(self.subjects.changed, b"", lambda answer: None), "")

    def _fault(self, kind: str, process: Process, for_s: float) -> None:
        if kind not in ("host", "links") or not isinstance(process, IslandProcess):
            super()._fault(kind, process, for_s)
            return
        if self.calm or process.ended:
            return
        self.stats[f"fault {kind}"] += 1
        self.note("world", f"{kind} {process.name} for {for_s:.2f} s")
        if kind == "host":
            process.vanishes = True
            process.crash("with its host")
        else:
            others = [other for other in process.island.processes if other is not process]
            pair = frozenset((process.name, self.rng.choice(others).name))
            self.network.cut.add(pair)
            self.later(for_s, self.network.cut.discard, pair)

    def _check_end(self) -> None:
        # a leader may be killed just before its last boundary, after another process has passed it
        told = [process for process in self.learners if not isinstance(process, IslandProcess) or process.finished]
        self.stats["leader lost at the end"] += len(self.learners) - len(told)
        self.learners = told
        super()._check_end()

    def _calm(self) -> None:
        super()._calm()
        self.network.cut.clear()
        for island in self.islands:
            for process in island.processes:
                process.thawed_s = self.now_s


def _layouts(count: int, rng: random.Random) -> list[RowLayout]:
    """Draw which rows the processes have: shards, all of them everywhere, or of some fragments none at some."""
    kind = rng.choice(("shards", "shards", "replicas", "uneven"))
    layouts = []
    for fragment in FRAGMENTS.fragments:
        owners = [index for index in range(count) if kind != "uneven" or rng.random() < 0.6] or [rng.randrange(count)]
        read = []
        for index in range(count):
            parts = []
            for piece in fragment.pieces:
                if index in owners:  # by columns, so that each process has some of a run's first values
                    columns = slice(owners.index(index), None, len(owners))
                    parts.append((piece, (slice(None), columns) if len(piece.shape) > 1 else (columns,)))
            read.append(Rows(tuple(parts)))
        whole = Rows(tuple((piece, (slice(None),)) for piece in fragment.pieces))
        layouts.append(RowLayout(read, [whole] * count if kind == "replicas" else read))
    return layouts


def _memory() -> str | None:
    """Return a folder that no disk slows."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
