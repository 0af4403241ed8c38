"""One run of a simulated cluster, from a seed: who is there, what goes wrong and when, and what came of it.

A *schedule* draws its run's settings, its faults and every delay from one seed. While it lasts, whatever the server stores is
shown to the reference at once. When its time of faults is over, everything is repaired, and the run must come to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pickle
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tests.simulation.invariants import Reference, Violation, Writer, demand
from tests.simulation.learner import FRAGMENTS, STATEFUL, STEPS, Learner, Step
from tests.simulation.regional import Regional

import diloco.log.writer
import diloco.member.offer_maker
import diloco_syncer.links
from diloco.control import creation
from diloco.core.run import changes
from diloco.core.run import grant_bounds as core_grants
from diloco.core.run.changes import Changes, Rollback
from diloco.core.syncer import bandwidth, merging
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import ClaimError, FormatError
from diloco.member.member import Member
from diloco.nats import grants
from diloco.nats.nkey import NatsKey
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.service import CoordinatorSettings, LearnerSettings, SyncerSettings
from diloco.testing import world as virtual
from diloco.testing.server import VirtualStream
from diloco.testing.virtual_transport import CONTROL, VirtualMessage, VirtualTransport
from diloco.wire import assemble, body, framing, subjects
from diloco.wire.body import PART_BYTES
from diloco.wire.control import Heartbeat, SnapshotMarker
from diloco.wire.grants import Grant, SignedGrant
from diloco.wire.subjects import Subjects
from diloco_coordinator.series import SeriesFile
from diloco_coordinator.service import Coordinator
from diloco_syncer.shard import Shard

RUN = "run"
PATIENCE_S = 60.0  # so long after the last fault a run may take to end
WHOLE_PART_BYTES = PART_BYTES
RESTART_S = (0.1, 3.0)
CLOCKS_S, SKEW_S = 1.0, 0.5  # servers' clocks may differ by so much, and do so from the true time
MIN_STEP_S = 0.04  # granted: the fastest learner's steps take a little longer on average
AUTHORITY = NatsKey.from_seed("SUAACAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAN7EY")  # of 32 bytes 1
MARKERS, MARKER_EVERY_S = 5, 0.2  # so often, and so far apart, is a marker said
SILENCE_S = 3.0  # of the server, and an append is tried again: sooner than in earnest, virtual time is not for nothing
UNPACKED = 256  # frames that are remembered, since all who hear one look at the same bytes

SMALL: dict[str, Any] = {
    "tokens": 3 * 16 * 10,
    "learners": 3,
    "shards": 2,
    "fragments.count": 2,
    "round.steps": 3,
    "merge.method": "average",
    "merge.weights": "tokens",
    "codec.offer_bits": 32,
    "codec.record_bits": 32,
    "log.keyframe_factor": 4.0,
    "liveness.heartbeat_s": 0.25,
    "liveness.dead_s": 2.0,
    "liveness.lease_s": 1.5,
    # batches of 8 tokens, so that learners, whose steps have 4 to 16, have other ones: none may be refused
    "task.name": "gpt",
    "task.batch": 1,
    "task.context": 8,
}
# what runs differ in; the first is drawn more often, since there every step can be followed
VARIANTS: list[dict[str, Any]] = [
    {},
    {},
    {"carry.overlap": False, "round.max_staleness_versions": 1},
    {"round.quorum": 2, "log.keyframe_factor": 0.02, "log.keep_bytes": 0, "log.archive": True},
    {"round.quorum": "all"},
    {"codec.offer_bits": 4, "codec.record_bits": 4, "merge.method": "rda", "merge.weights": "quality", "log.archive": True},
    {"codec.offer_bits": 4, "codec.record_bits": 4, "merge.against": "current", "log.keyframe_factor": 0.01},
    {"learners": 2, "shards": 1, "log.keyframe_factor": 0.01, "log.keep_bytes": 0},
    {"carry.overlap": False, "round.learners_wait": True},
]
DRAWN = len(VARIANTS)  # what comes after these is played when it is asked for, so that a seed still means what it did
LOCKSTEP = DRAWN
VARIANTS.append(
    {
        "round.steps": 1,
        "round.quorum": "all",
        "round.grace_factor": 0.0,
        "round.max_staleness_versions": 0,
        "round.learners_wait": True,
        "carry.overlap": False,
        "outer.optimizer": "adamw",
        "inner.optimizer": "adamw",
        "outer.learning_rate": 1.0,
        "outer.momentum": 0.0,
        "log.keyframe_factor": 1.0,
    }
)
# a run in regions one of which has slow links for a while
THIN = len(VARIANTS)
VARIANTS.append(
    {
        "tokens": 3 * 16 * 35,
        "codec.offer_bits": 16,
        "codec.record_bits": 32,
        "merge.method": "rda",
        "log.archive": True,
        "regions.adaptive": True,
        "regions.max_pace": 1.5,
    }
)
# versions are applied two steps after the answer, and waited for (Streaming DiLoCo)
OVERLAP = len(VARIANTS)
VARIANTS.append({"apply.at": "overlap", "round.quorum": "all", "round.grace_factor": 0.0, "carry.overlap": False})

REGIONS = ("ap", "eu", "us")
AWAY_S = 2.0
APART: dict[str, Any] = {"regions.names": list(REGIONS), "regions.away_s": AWAY_S, "regions.adaptive": False}
# several learners in a region, whose offers are merged there
MERGED: dict[str, Any] = {"regions.merge": True, "learners": 5, "merge.against": "base"}


@cache
def variant(number: int, apart: bool, merged: bool) -> RunSettings:
    return run_settings("decoupled", SMALL | (APART if apart else {}) | VARIANTS[number] | (MERGED if merged else {}))


@cache
def _learner(name: str, share: int, region: str) -> LearnerSettings:
    return LearnerSettings(name=name, run=RUN, share=share, region=region or None)


@cache
def _grant(name: str, tokens: int) -> SignedGrant:
    return grants.sign(Grant(RUN, name, AUTHORITY.public_key, tokens, MIN_STEP_S), AUTHORITY)


@cache
def _syncer(name: str, region: str) -> SyncerSettings:
    return SyncerSettings(name=name, run=RUN, region=region or None)


@contextlib.contextmanager
def _constants(
    part_bytes: int, logger: Logger, make_version: Callable[..., Any], more: Sequence[tuple[Any, str, Any]]
) -> Iterator[None]:
    """Give services other constants than in earnest, for as long as a schedule is played."""
    unpack, known = framing.unpack, dict[tuple[bytes, type], Any]()

    def unpack_once(data: bytes, cls: type, run: bytes) -> Any:
        unpacked = known.get((data, cls))
        if unpacked is None:
            if len(known) >= UNPACKED:
                known.clear()
            unpacked = known[data, cls] = unpack(data, cls, run)
        return unpacked

    changes: list[tuple[Any, str, Any]] = [
        (diloco.log.writer, "APPEND_TIMEOUT_S", SILENCE_S),
        (diloco.member.offer_maker, "OFFER_TIMEOUT_S", SILENCE_S),
        (diloco_syncer.links, "LOOK_S", 0.25),
        (core_grants, "CLOCKS_S", CLOCKS_S),
        (bandwidth, "MIN_WINDOW_S", 0.5),
        (bandwidth, "MIN_BYTES", 1),
        (body, "PART_BYTES", part_bytes),
        (assemble, "PART_BYTES", part_bytes),
        (framing, "unpack", unpack_once),
        (observe, "log", logger),
        (merging, "make_version", make_version),
        *more,
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


LEFT_OUT = ("merge_unreadable", "merge_too_far", "merge_not_finite", "offer_outlier")


class Listener:
    """A logger that hands everything to the trace, if there is one, and lets neither an invalid replica pass nor a refusal.

    A process that finds its replica to be another than the log says loads it again and goes on: nothing else tells of it. All
    learners here are honest, so no claim of theirs may be refused, and no offer left out of a merge.
    """

    def __init__(self, note: Callable[..., None] | None, failed: Callable[[str], None], *, faulty: bool) -> None:
        self.note, self.failed, self.faulty = note, failed, faulty

    def __getattr__(self, level: str) -> Callable[..., None]:
        def hear(event: str, **values: Any) -> None:
            if event == "log_reloaded" and "folding gives state" in values["reason"] and not self.faulty:
                self.failed(f"a replica was invalid: {values['reason']}")
            if event in LEFT_OUT or (event == "message_refused" and values["kind"] == ClaimError.__name__):
                self.failed(f"an honest learner is refused: {values['reason']}")
            if self.note is not None:
                self.note("log", f"{level} {event} {values}")

        return hear


@dataclass
class Chaos:
    """How likely things go wrong with one message or one action, until :attr:`until_s`; and what happens by itself."""

    until_s: float
    loss: float
    duplicates: float
    delay_s: float  # most that a message is late, where it is late
    late: float  # share of messages that are
    appends: dict[str, float]  # fate of a durable action: its probability
    faults: list[tuple[float, str, int, float]]  # time, kind, which process, how long

    @classmethod
    def draw(cls, rng: random.Random, possible: Sequence[str]) -> Chaos:
        """Every kind of fault is off in many schedules, so that others are seen alone (as swarm testing has it)."""
        until_s = rng.uniform(1.0, 7.0)

        def some(most: float) -> float:
            return most * rng.random() if rng.random() < 0.5 else 0.0

        appends = {
            "lost": some(0.1),
            "unanswered": some(0.1),
            "late": some(0.1),
            "crash_before": some(0.04),
            "crash_after": some(0.06),
        }
        kinds = [kind for kind in possible if rng.random() < 0.5] or ["kill"]
        if "rewind" in kinds and "clock" in kinds:  # a lost admission and a clock that jumps back make an incarnation twice
            kinds.remove("clock")
        faults = [
            (rng.uniform(0.0, until_s), rng.choice(kinds), rng.randrange(1 << 16), rng.choice((0.2, 1.0, 3.0)) * rng.random())
            for _ in range(rng.choice((0, 1, 1, 2, 3, 5)))
        ]
        return cls(until_s, some(0.2), some(0.2), rng.choice((0.02, 0.3, 1.0)), some(0.5), appends, sorted(faults))


REWIND_AGAIN_S = 0.5  # from one look whether there is something to lose to the next
FAULTS = ("kill", "freeze", "stop", "server", "cut", "full", "clock", "rewind")
# a region that loses what it has acknowledged is not provided for: a majority holds nothing then
FAULTS_APART = (*FAULTS[:-1], "region", "links")


class Process(virtual.VirtualProcess):
    """One service: its process, which comes and goes, and its disk, which stays."""

    def __init__(self, world: World, name: str, region: str, serve: Callable[[Process], Coroutine[Any, Any, None]]) -> None:
        super().__init__(world, name, region, serve)
        self.world: World = world
        self.saved: list[bytes] = []  # on its disk, newest first
        self.clock_s = 1.7e9 + world.rng.uniform(-100, 100)
        self.tokens = world.draw_tokens()
        self.cut = False
        self.start()

    def at_start(self) -> None:
        self.stopping = False
        self.step_s = self.world.draw_step_s(self.rng)
        self.worker: Any = None  # a Learner
        self.world.note(self.name, f"starts as {self.generation}")

    def at_end(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            self.world.failed(error)
        elif error is not None or self.stopping:
            self.world.note(self.name, f"ends: {error or 'asked to'}")
            self.restart_later()
        else:
            self.ended = True
            self.world.note(self.name, "ends")
            self.world.look_for_end()

    def reaches(self, server: str) -> bool:
        """Whether it and a server can talk: its region's, another one's, or the control store's, which most regions make up."""
        ways = self.world.apart if server == CONTROL else self.world.apart | self.world.parted
        near = server == self.region or not ways.intersection((server, self.region))
        return near and not self.cut and server not in self.world.away

    @property
    def hears(self) -> bool:
        return not self.cut and CONTROL not in self.world.away

    def crash(self, why: str) -> None:
        """Kill it at once; it is started again later."""
        if self.alive:
            self.world.note(self.name, f"killed {why}")
            super().crash(why)
            self.restart_later()

    def restart_later(self) -> None:
        self.world.later(self.world.rng.uniform(*RESTART_S), self.start)

    def thaw(self) -> None:
        self.loop.thaw()

    def stop(self) -> None:
        """Ask it to end."""
        self.stopping = True
        if self.worker is None:
            self.loop.call_soon(self.task.cancel)

    def as_writer(self) -> Writer:
        """Return the process that writes to the server now, and its knowledge."""
        if self.worker is None:
            return Writer(self.name, self.generation, {}, {})
        return Writer(self.name, self.generation, dict(self.worker.applied), self.worker.must_apply)

    def noise(self, size: int) -> NDArray[np.float32]:
        return np.full(size, 1 + self.rng.random(), np.float32)

    def save(self, state: Any) -> None:
        """Replace the newest state on the disk, which becomes the one before it; the process may die just before or after."""
        fate = self.world.fate(self, "save")
        if fate == "crash_before":
            self.crash("before saving")
            return
        self.saved = [pickle.dumps(state), *self.saved[:1]]
        self.world.stats["state saved"] += 1
        if fate == "crash_after":
            self.crash("after saving")

    def load(self) -> Any:
        """The newest state; sometimes it is damaged and the one before it serves, or the disk is another one."""
        good = self.saved[self.rng.choice((0, 0, 0, 1, 2)) :]
        self.world.stats["state restored"] += bool(good)
        return pickle.loads(good[0]) if good else None


@dataclass
class Outcome:
    """The end of a schedule."""

    seed: int
    error: BaseException | None
    virtual_s: float
    stats: Counter[str]
    cpu_s: float = 0.0
    trace: list[tuple[float, str, str]] = field(repr=False, default_factory=list)

    @property
    def trace_hash(self) -> str:
        """Of all that happened: another one for the least difference."""
        return hashlib.blake2b(repr(self.trace).encode(), digest_size=8).hexdigest()


class World(virtual.World):
    """One schedule, of the variant with that number or (None) of the one that the seed draws; ``merged`` is for ``regions``.

    ``rollbacks``: the run is ordered back now and then. ``faulty``: the memory of a syncer is bad for a moment.
    ``hostile``: a syncer that is none of these stores what is no entry among the heads of fragments. ``state``: the second
    fragment is of state that is merged. ``empties``: the disk of a region's server is lost.
    """

    def __init__(
        self,
        seed: int,
        *,
        number: int | None = None,
        verbose: bool = False,
        regions: bool = False,
        merged: bool = False,
        rollbacks: bool = False,
        faulty: bool = False,
        hostile: bool = False,
        state: bool = False,
        empties: bool = False,
    ) -> None:
        super().__init__(seed, REGIONS if regions else ())
        self.seed, self.map = seed, self._make_map(state=state)
        self.run_name = RUN
        self.trace: list[tuple[float, str, str]] = []
        self.logger = cast(Logger, Listener(self.note if verbose else None, self.failed, faulty=faulty))
        drawn = self.rng.randrange(DRAWN)
        number = drawn if number is None else number
        self.settings = self._variant(number, regions, merged)
        self.chaos = self._draw_chaos(FAULTS_APART if regions else FAULTS)
        # small parts, so that bodies come in several
        self.part_bytes = self.rng.choice((WHOLE_PART_BYTES, WHOLE_PART_BYTES, 700))
        self.steps: list[Step] = []
        identity = framing.run_id(RUN, self.settings.digest())
        kinds = {kind for _, kind, _, _ in self.chaos.faults}
        archived = self.settings.log.archive and not kinds & {"full", "rewind"}
        forgetful = "rewind" in kinds
        self.reference = Reference(
            RUN, identity, self.settings, self.map, self.steps, forgetful=forgetful, archived=archived, faulty=faulty
        )
        homes = REGIONS if regions else (CONTROL,)
        self.regional = Regional(self.reference, REGIONS) if regions else None
        self.haste = 0.5 if number == THIN else 1.0  # of learners: links are looked at now and then
        self.away: set[str] = set()  # servers
        self.apart: set[str] = set()  # regions that are cut off from the others
        self.parted: set[str] = set()  # those whose servers are, though all hear each other
        self.markers = 0
        self.leaders: dict[tuple[int, int], str] = {}  # by rewinds and revision of the key
        self.lent: dict[tuple[str, int], NDArray[np.float32]] = {}
        self.subjects = Subjects(RUN)
        self.note("world", f"variant {number} {VARIANTS[number]}, {self.chaos}, parts of {self.part_bytes}")

        def processes(kind: str, count: int, serve: Callable[[Process], Coroutine[Any, Any, None]]) -> list[Process]:
            return [Process(self, f"{kind}-{i}", homes[i % len(homes)], serve) for i in range(count)]

        self.parts: list[Process] = []  # further processes of learners
        self.learners = self._make_learners(processes)
        standbys = self.rng.randrange(2)
        syncers = processes("syncer", (len(homes) if regions else self.settings.shards) + standbys, self._sync)
        coordinators = processes("coordinator", self.rng.randint(1, 2), self._coordinate)
        self.processes = [*self.learners, *self.parts, *syncers, *coordinators]
        for at_s, kind, which, for_s in self.chaos.faults:
            self.later(at_s, self._fault, kind, self.processes[which % len(self.processes)], for_s)
        for _ in range(self.rng.randrange(3)):
            self.later(self.rng.uniform(0.5, self.chaos.until_s + 1), self._mark)
        if number == THIN:
            self._thin(random.Random(seed))
        drawing = random.Random(seed)  # its own, so that the rest of a schedule is as it is without
        for _ in range(drawing.randint(1, 3) if rollbacks else 0):
            self.later(drawing.uniform(0.5, self.chaos.until_s + 1), self._order_back, drawing)
        granting = random.Random(f"grants {seed}")  # likewise
        for server in self.servers.values():
            server.wall_s = partial(self._server_s, 1.7e9 + granting.uniform(-SKEW_S, SKEW_S))
        if granting.random() < 0.5:  # with identities: each learner is granted what it does, and no more
            self.authority = AUTHORITY.public_key
            self.grants = {learner.name: _grant(learner.name, learner.tokens) for learner in self.learners}
        self.goes_wrong = False  # the next version that is made
        for _ in range(drawing.randint(1, 2) if faulty else 0):
            self.later(drawing.uniform(0.5, self.chaos.until_s + 1), self._go_wrong)
        if hostile:
            strange = random.Random(f"heads {seed}")  # likewise
            self.later(strange.uniform(0.5, 2.0), self._store_nonsense, strange, strange.choice((0.02, 0.1, 0.5)))
        if empties:
            losing = random.Random(f"empties {seed}")  # likewise
            self.chaos.until_s += 2.0
            self.later(losing.uniform(0.5, self.chaos.until_s - 1.0), self._empty, losing)
        self.later(self.chaos.until_s, self._calm)

    def _draw_chaos(self, possible: Sequence[str]) -> Chaos:
        return Chaos.draw(self.rng, possible)

    def _variant(self, number: int, regions: bool, merged: bool) -> RunSettings:
        return variant(number, regions, merged)

    def _make_map(self, *, state: bool) -> FragmentMap:
        return STATEFUL if state else FRAGMENTS

    def draw_tokens(self) -> int:
        """Draw the tokens of each of a learner's steps."""
        return 4 * self.rng.randint(1, 4)

    def draw_step_s(self, rng: random.Random) -> float:
        """Draw how long a learner's steps take on average, for a process that begins."""
        return rng.choice((0.05, 0.1, 0.2)) / self.haste

    def _make_learners(self, make: Callable[..., list[Process]]) -> list[Process]:
        return make("learner", self.settings.learners, self._learn)

    def _more_constants(self) -> list[tuple[Any, str, Any]]:
        return []

    def _server_s(self, began_s: float) -> float:
        return began_s + self.now_s

    def _store_nonsense(self, rng: random.Random, every_s: float) -> None:
        """Store what is no entry where entries or keyframes stand, or an old one again; then wait for the next time."""
        server = self.servers[rng.choice(REGIONS) if self.regional else CONTROL]
        log, fragment = server.streams.get(self.subjects.log_stream), rng.randrange(self.settings.fragments.count)
        subject = rng.choice((*3 * (self.subjects.record(fragment),), self.subjects.keyframe(fragment)))
        stored = log.by_subject.get(subject) if log is not None and self.reference.logs and not self._is_ending() else None
        if log is not None and stored:
            old = log.get(rng.choice(stored))
            assert old is not None
            whole = self.regional is None and subject == self.subjects.record(fragment)  # elsewhere it would be one again
            log.store(subject, rng.choice((b"", rng.randbytes(9), old.data[:-1], *(old.data,) * whole)), self.now_s)
            self.stats["nonsense stored"] += 1
            self.wake_all()
        if not self.calm or rng.random() < 0.9:  # some time longer than all else that goes wrong
            self.later(rng.expovariate(1 / every_s), self._store_nonsense, rng, every_s)

    def _go_wrong(self) -> None:
        self.goes_wrong = not self._is_ending()

    def _spoil(self, make: Callable[..., Any], replica: Any, *others: Any, **named: Any) -> Any:
        """Make a version as a syncer does whose memory has lost a bit, once."""
        if self.goes_wrong:
            self.goes_wrong = False
            replica.theta[-1] += np.float32(0.25)
            self.stats["memory went bad"] += 1
            self.note("world", f"memory of the owner of fragment {replica.chain.fragment} at {replica.chain.version} goes bad")
        return make(replica, *others, **named)

    def run(self) -> Outcome:
        """Play it to its end."""
        make_version = partial(self._spoil, merging.make_version)
        with _constants(self.part_bytes, self.logger, make_version, self._more_constants()):
            try:
                self.scheduler.run(self._last_fault_s() + PATIENCE_S)
                if self.error is None:
                    self._check_end()
            except Violation as violation:
                self.error = violation
            self.dispose()
        return Outcome(self.seed, self.error, self.now_s, self.stats, trace=self.trace)

    def _last_fault_s(self) -> float:
        """Return the time after which nothing goes wrong any more."""
        return self.chaos.until_s

    # ---- services

    async def _learn(self, process: Process) -> None:
        process.worker = Learner(process)
        await process.worker.serve()

    async def _sync(self, process: Process) -> None:
        transport, log = process.transport, self.logger
        run = await creation.find(transport, RUN, log)
        connect = {name: partial(_way, process, name) for name in run.created.regions.names if name != process.region}
        settings = _syncer(process.name, process.region)
        shard = Shard(transport, run, await creation.find_map(run), settings, log, connect=connect)
        serving = asyncio.ensure_future(shard.serve())
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            await shard.leave()
            await asyncio.wait([serving], timeout=5)
            raise
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await transport.close()

    async def _coordinate(self, process: Process) -> None:
        region = process.region if self.settings.regions.names else None
        folder = Path("/nonexistent")
        settings = CoordinatorSettings(name=process.name, run=RUN, region=region, settings=self.settings, state_dir=folder)
        run = await until_available(partial(creation.create, process.transport, RUN, settings.settings), self.logger)
        connect = {name: partial(_way, process, name) for name in run.created.regions.names if name != process.region}
        coordinator = _Coordinator(process.transport, run, settings, self.logger, connect=connect)
        coordinator.series = _Unsaved(settings.state_dir, self.logger)
        await coordinator.serve()
        await process.transport.close()

    def learner_settings(self, process: Process) -> LearnerSettings:
        return _learner(process.name, int(process.name[-1]), process.region)

    # ---- time and chance

    @property
    def calm(self) -> bool:
        return self.now_s >= self.chaos.until_s

    def delay_s(self) -> float:
        """How long a message takes to or from the server."""
        if not self.calm and self.rng.random() < self.chaos.late:
            return self.rng.random() * self.chaos.delay_s
        return 0.001

    def deliveries_s(self) -> list[float]:
        """When a message comes to a subscriber without an acknowledgement: perhaps never, or twice."""
        if self.calm:
            return [0.002]
        if self.rng.random() < self.chaos.loss:
            self.stats["message lost"] += 1
            return []
        delays = [self.delay_s() + self.delay_s()]
        if self.rng.random() < self.chaos.duplicates:
            self.stats["message doubled"] += 1
            delays.append(self.delay_s() + self.rng.random())
        return delays

    def fate(self, process: Process, what: str) -> str:
        """Draw the fate of a durable action."""
        if self.calm:
            return "plain"
        drawn = self.rng.random()
        for fate, share in self.chaos.appends.items():
            if drawn < share:
                self.note(process.name, f"{fate}: {what}")
                self.stats[f"action {fate}"] += 1
                return fate
            drawn -= share
        return "plain"

    def breaks_batch(self) -> float | None:
        """The share of a batch that is stored before it breaks off, if it does."""
        return self.rng.random() if not self.calm and self.rng.random() < self.chaos.appends["lost"] else None

    def parts_ways(self, one: str, other: str) -> bool:
        return bool(self.apart.intersection((one, other)))

    # ---- the server

    def stored(self, region: str, stream: str, subject: str, data: bytes, sequence: int) -> None:
        assert self.writer is not None
        try:
            if self.regional is None:
                seen = self.reference.observe(subject, data, sequence, self.writer)
            else:
                seen = f"{region}: {self.regional.observe(region, subject, data, sequence, self.writer)}"
        except (Violation, FormatError) as error:
            violation = error if isinstance(error, Violation) else Violation(f"what is stored cannot be read: {error}")
            self.failed(violation)
            seen = f"VIOLATION: {violation}"
        self.note(self.writer.name, f"{sequence}: {seen}")

    def purged(self, stream: VirtualStream, pattern: str) -> None:
        """Some of the log was dropped."""
        fragment = subjects.fragment_of(pattern)
        assert fragment is not None
        names = self.subjects.record(fragment), self.subjects.keyframe(fragment)
        heads = {sequence for name in names for sequence in stream.by_subject.get(name, ())}
        if self.regional is None:
            self.reference.purged(fragment, heads)
        else:
            self.regional.purged(stream.region, fragment, heads)
        self.stats["purge"] += 1

    def check_marked(self, learner: str, member: Member, marked: list[int], exact: bool) -> None:
        """A learner has copied its state for a checkpoint of the run."""
        heartbeat = member.heartbeat()
        accounts = list(
            zip(
                heartbeat.versions,
                [heartbeat.tokens] * len(heartbeat.versions),
                heartbeat.fragment_tokens,
                [state.delta.lost_tokens for state in member.learner.fragments],
                strict=True,
            )
        )
        self.reference.check_marked(learner, marked, accounts, exact=exact)
        self.stats["state marked" if exact else "state marked, too late"] += 1

    def check_loan(self, peer: str, step: int, arrays: dict[str, NDArray[Any]]) -> None:
        """A learner has borrowed a peer's optimizer state: it must be what the peer had after that step."""
        demand(np.array_equal(arrays["optimizer"], self.lent[peer, step]), f"what {peer} lent after step {step} came otherwise")
        self.stats["state borrowed"] += 1

    def check_stateless(self, learner: str, member: Member) -> None:
        """A learner whose optimizer has no state has begun."""
        demand(member.moment().warming_steps is None, f"{learner} warms up for a state that its optimizer has not")

    def key_written(
        self, process: Process, generation: int, key: str, before: bytes | None, value: bytes, revision: int
    ) -> None:
        try:
            self.reference.observe_key((process.name, generation), key, value, revision)
        except Violation as violation:
            self.failed(violation)
        self.note(process.name, f"key {key} = {value[:60]!r} at {revision}")

    # ---- faults

    def _fault(self, kind: str, process: Process, for_s: float) -> None:
        if self.calm or (process.ended and kind not in ("server", "full")):
            return
        if kind == "rewind" and not self.reference.logs:  # the run has not begun: the server loses something later
            self.later(REWIND_AGAIN_S, self._fault, kind, process, for_s)
            return
        if kind == "rewind" and self._is_ending():
            return
        self.stats[f"fault {kind}"] += 1
        self.note("world", f"{kind} {process.name} for {for_s:.2f} s")
        if kind == "kill":
            process.crash("from outside")
        elif kind == "freeze":
            process.loop.freeze()
            self.later(for_s, process.thaw)
        elif kind == "stop":
            if process.alive and process.loop.held is None and not process.stopping:
                process.loop.call_soon(process.stop)
        elif kind == "server":
            server = CONTROL if self.regional is None else self.rng.choice((CONTROL, *REGIONS))
            self.away.add(server)
            self.later(for_s, self._back, server)
        elif kind == "region":
            self._part(self.apart, 2 * for_s)
        elif kind == "links":
            self._part(self.parted, AWAY_S + 2 * for_s)
        elif kind == "cut":
            process.cut = True
            self.later(for_s, self._uncut, process)
        elif kind == "full":
            self._fill(True)
            self.later(for_s, self._fill, False)
        elif kind == "rewind":
            self._rewind()
            self.away.add(CONTROL)
            self.later(for_s, self._back, CONTROL)
        else:
            process.clock_s += self.rng.choice((-1, 1)) * self.rng.choice((1.0, 5000.0))

    def _thin(self, rng: random.Random) -> None:
        """Once versions are made, a region's links are slow for some seconds."""
        if self.reference.versions_made < 3:
            self.later(0.2, self._thin, rng)
            return
        region, rate = rng.choice(REGIONS), rng.choice((200.0, 1000.0))
        self.note("world", f"links of {region}: {rate:g} bytes a second")
        self.wires.rates[region] = rate
        self.later(rng.uniform(0.5, 1.5), self.wires.rates.clear)

    def _empty(self, rng: random.Random) -> None:
        """The disk of a region's server is lost; another region may have been cut off before, so that it lags behind."""
        if self._is_ending():
            return
        logs = [self.servers[region].streams.get(self.subjects.log_stream) for region in REGIONS]
        begun = all(log is not None and log.last(self.subjects.genesis) for log in logs)
        if not begun or self.reference.versions_made < 3:  # of a majority that is not there nothing comes back
            self.later(0.2, self._empty, rng)
            return
        region, lagging = rng.sample(REGIONS, 2)
        if rng.random() < 0.5 and not self.calm and not self.apart | self.parted:
            self.note("world", f"{lagging} lags behind")
            self.stats["region lags behind one that is lost"] += 1
            self.apart.add(lagging)
            self.later(rng.uniform(0.5, 2.0), self._lose_disk, rng, region)
            self.later(rng.uniform(2.0, 6.0), self._together, self.apart)
        else:
            self._lose_disk(rng, region)

    def _lose_disk(self, rng: random.Random, region: str) -> None:
        """A region's server loses its disk, and all processes there die; perhaps an owner elsewhere stands still meanwhile."""
        if self._is_ending():
            return
        assert self.regional is not None
        self.note("world", f"{region} loses its disk")
        self.stats["region lost its disk"] += 1
        others = [process for process in self.processes if process.name.startswith("syncer") and process.region != region]
        if rng.random() < 0.5:
            frozen = rng.choice(others)
            self.note("world", f"{frozen.name} stands still")
            self.stats["syncer stands still as a region is lost"] += frozen.alive
            frozen.loop.freeze()
            self.later(rng.uniform(1.0, 4.0), frozen.thaw)
        self.away.add(region)
        self.servers[region].lose()
        self.regional.lose(region)
        for process in self.processes:
            if process.region == region:
                process.crash("with its region")
        self.later(rng.uniform(1.0, 2.0), self._back, region)

    def _mark(self) -> None:
        """A checkpoint of the whole run is taken."""
        if self._is_ending():
            return
        self.markers += 1
        marker = SnapshotMarker(self.markers, list(self.reference.versions().values()))
        region = self.rng.choice(REGIONS) if self.regional else CONTROL
        self.note("world", f"marker {marker.versions}")
        data = framing.pack(marker, self.reference.run)
        for repeat in range(MARKERS):
            self.later(
                MARKER_EVERY_S * repeat, self.publish, VirtualMessage(self.subjects.marker, data, lambda answer: None), region
            )

    def _order_back(self, rng: random.Random) -> None:
        """Order the run back to an earlier version."""
        versions = self.reference.versions()
        version = max(0, max(versions.values(), default=0) - rng.randint(1, 4))
        beyond = [index for index, newest in versions.items() if newest > version and not self.reference.logs[index].closed]
        if self._is_ending() or not beyond:
            return
        bucket, run = self.control.buckets[self.subjects.bucket], self.reference.run
        stored = bucket.get("changes")
        listed = Changes(run) if stored is None else changes.unpack(stored[0], run)
        listed = listed.then(Rollback(version, beyond), at_s=0.0, author="somebody")
        bucket.write("changes", listed.pack(), None, rng.getrandbits(64))
        self.reference.orders.append((len(listed.records), version, beyond))
        self.stats["rollback ordered"] += len(beyond)
        self.note("world", f"fragments {beyond} are ordered back to {version}")
        self.publish(
            VirtualMessage(self.subjects.changed, b"", lambda answer: None),
            self.rng.choice(REGIONS) if self.regional else CONTROL,
        )

    def _is_ending(self) -> bool:
        """Whether the run has not begun, or a process may already have left for good, since all logs are closed."""
        return all(log.closed for log in self.reference.logs) or any(process.ended for process in self.processes)

    def _rewind(self) -> None:
        """The server's machine crashes, and the last of what it stored was not on its disk: in no stream the same number."""
        self.rewinds += 1
        for stream in self.control.streams.values():
            first = stream.synced
            if stream.name == self.subjects.log_stream:
                genesis = stream.last(self.subjects.genesis)
                assert genesis is not None
                first = max(first, genesis.sequence)
            lost = int(self.rng.choice((0, 3, 10, 30)) * self.rng.random())
            stream.rewind(max(len(stream.messages) - lost, min(first, len(stream.messages))))
            self.note("world", f"{stream.name} ends at {len(stream.messages)}")
        self.reference.rewind(len(self.control.streams[self.subjects.log_stream].messages))
        for bucket in self.control.buckets.values():
            bucket.rewind(self.rng.choice((0, 1, 4)))
        for process in self.processes:
            if process.worker is not None:
                must_apply, versions = process.worker.must_apply, self.reference.versions()
                must_apply |= {index: min(version, versions[index]) for index, version in must_apply.items()}

    def _back(self, server: str) -> None:
        self.away.discard(server)
        self.wake_all()

    def _part(self, ways: set[str], for_s: float) -> None:
        region = self.rng.choice(REGIONS)
        if not self.apart | self.parted:  # of two that are apart from each other neither would have a majority
            ways.add(region)
            self.later(for_s, self._together, ways)

    def _together(self, ways: set[str]) -> None:
        ways.clear()
        self.wake_all()

    def known(self, process: Process) -> dict[int, int]:
        """The newest version by fragment, as far as it is known where a process is."""
        return self.reference.versions() if self.regional is None else self.regional.versions(process.region)

    def _uncut(self, process: Process) -> None:
        process.cut = False
        self.wake_all()

    def _fill(self, full: bool) -> None:
        for server in self.servers.values():
            for stream in server.streams.values():
                stream.full = full

    def _calm(self) -> None:
        self.note("world", "calm")
        self._fill(False)
        self.away.clear()
        self.apart.clear()
        self.parted.clear()
        for process in self.processes:
            process.cut = False
            process.loop.thaw()
        self.wake_all()

    # ---- what comes out

    def note(self, who: str, what: str) -> None:
        self.trace.append((round(self.now_s, 4), who, what))

    def take_step(self, step: Step, must_pass: dict[int, int]) -> int:
        self.reference.take(step, must_pass)
        self.steps.append(step)
        if len(self.steps) > STEPS:
            raise Violation(f"more than {STEPS} steps were taken for {self.settings.tokens} tokens")
        return len(self.steps) - 1

    def failed(self, error: BaseException | str) -> None:
        """Something is wrong: the schedule ends."""
        super().failed(Violation(str(error)) if isinstance(error, str) or type(error) is AssertionError else error)

    def _check_end(self) -> None:
        late = [process.name for process in self.processes if not process.ended]
        if late:
            versions = [(log.version, log.closed) for log in self.reference.logs]
            raise Violation(f"{PATIENCE_S:g} s after the last fault the run is not over: {late}, fragments at {versions}")
        last: dict[str, tuple[list[NDArray[np.float32]], dict[str, list[int]]]] = {}
        for process in self.learners:
            heartbeat: Heartbeat = process.worker.member.heartbeat()
            fragments = len(heartbeat.versions)
            accounts = {
                "tokens": [heartbeat.tokens] * fragments,
                "held": heartbeat.fragment_tokens,
                "lost": heartbeat.lost_tokens,
            }
            last[process.name] = (process.worker.bases(), accounts)
        self.reference.check_end(last)
        self.stats["version"] += self.reference.versions_made
        self.stats.update({f"version of {bits} bits": count for bits, count in self.reference.bits.items()})
        self.stats["takeover"] += self.reference.takeovers
        self.stats["share taken over"] += self.reference.shares_taken_over
        self.stats["rolled back"] += self.reference.rollbacks
        self.stats["keyframe"] += self.reference.keyframes
        self.stats["step in a state"] += self.reference.steps_in_states
        self.stats["wrong entry"] += self.reference.wrong_entries
        self.stats["keyframe after a wrong entry"] += self.reference.wrong_keyframes
        if self.settings.regions.merge:
            self.stats["merged in its region"] += self.reference.members_combined
            self.stats["merged as a late answer"] += self.reference.late_combined


class _Unsaved(SeriesFile):
    """Series without a file: a disk would outlive its schedule."""

    def save(self, series: str) -> None:
        return


class _Coordinator(Coordinator):
    """The coordinator without its files."""

    def save(self) -> None:
        return

    async def write_page(self) -> None:
        return


async def _way(process: Process, region: str) -> VirtualTransport:
    return VirtualTransport(process, region)
