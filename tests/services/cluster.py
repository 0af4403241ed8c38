"""A run's services as processes, over a real server, configured as users would; and what a test wants to know of the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import nats.js.errors
import numpy as np
from blake3 import blake3
from nats.js import JetStreamContext
from numpy.typing import NDArray
from tests.made.fragment_vectors import scatter
from tests.pace import DEADLINE_S, scaled_s
from tests.services.forking import Forked, Nursery
from tests.services.toy import HURRIED_STEP_S, SAMPLES, SLOW_STEP_S, STEP_S, Toy, allow_steps

from diloco.control import creation
from diloco.control.changes import append_changes
from diloco.control.creation import KnownRun
from diloco.control.hearing import check_subject
from diloco.core.run.changes import Tokens
from diloco.core.tensors.fragments import Fragment, FragmentMap
from diloco.errors import MessageError
from diloco.log.log import Log
from diloco.log.stream import LogEntry, RefusedEntry
from diloco.nats import identity
from diloco.nats.connection import ask
from diloco.nats.transport import NatsTransport
from diloco.process import logs
from diloco.process.observe import Logger, get_logger
from diloco.process.retry import until_available
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.transport import Stored
from diloco.wire import framing
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco.wire.entries import Genesis, Record
from diloco.wire.subjects import Subjects
from diloco_ops.chaos import refused_messages as refusals

Vector = NDArray[np.float32]
ANSWER_S = 10.0  # then a service is asked again
NEVER_S = 3600.0  # the most that `liveness` takes: no member is taken for dead, however slow it is
STANDING_S = 1.0  # then learners at the gate take more steps: no round is due by those that were taken
READY = ("stepping", "waiting", "closing")  # to step; one that goes on from a checkpoint may have no step to take

# A run of some two seconds: three learners of about 60 steps of 16 tokens, a round every 6. All that a test relies on is here.
SMALL: dict[str, Any] = {
    "seed": 3,
    "tokens": 3 * 60 * 16,
    "learners": 3,
    "shards": 2,
    "fragments.count": 4,
    "fragments.strategy": "balanced",
    "round.steps": 6,
    "log.keyframe_factor": 1000.0,  # none but genesis's, so that the whole log is there to be read
    "quarantine.factor": 0.0,  # toys soon come to where noise alone is left, whose norms differ by more than the default
    "liveness.heartbeat_s": 0.1,
    "liveness.dead_s": 10.0,
    "task.name": "tests:toy",
    "task.width": 8,
    "task.heads": 4,
    "task.context": 8,
}


def small(preset: str = "decoupled", **overrides: Any) -> RunSettings:
    """Settings of a small run; in a keyword ``__`` stands for the dot of a setting's name."""
    own = {key.replace("__", "."): value for key, value in overrides.items()}
    fixed = {"diloco": {"shards", "fragments.count"}, "data-parallel": {"round.steps"}}.get(preset, set())
    base = {key: value for key, value in SMALL.items() if key not in fixed}
    patient = run_settings(preset, base | own)
    return run_settings(preset, base | {"liveness.lease_s": max(patient.liveness.lease_s, patient.liveness.dead_s)} | own)


class Events:
    """A logger that keeps what it is told, for learners in threads."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, dict[str, Any]]] = []

    def _note(self, level: str) -> Callable[..., None]:
        return lambda event, **values: self.entries.append((level, event, values))

    def __getattr__(self, level: str) -> Callable[..., None]:
        return self._note(level)


@dataclass
class Service:
    """A process of the run."""

    name: str
    process: Forked
    output: Path
    killed: bool = False

    @property
    def said(self) -> str:
        """What its user sees."""
        return self.output.read_text()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.killed = True
        self.process.kill()
        self.process.wait()


@dataclass
class Folded:
    """One fragment's log, folded by the reference below: ``entries`` are those that follow one another."""

    index: int
    entries: list[Record]
    theta: Vector
    momentum: Vector
    passed_over: int
    tokens_merged: int = 0  # by all versions, also those before the keyframe it begins at
    before: dict[str, int] = field(default_factory=dict)  # by learner: tokens merged before it
    thetas: dict[int, Vector] = field(default_factory=dict)  # by version

    @property
    def versions(self) -> list[Record]:
        return [record for record in self.entries if record.entry == "version"]

    @property
    def state_hash(self) -> bytes:
        return state_hash(self.theta, self.momentum)


class Gate:
    """Lets learners step: on and on, not at all, or until each has taken so many steps.

    It is closed at first for learners in threads; ``held`` are those of them that have come to it. Learners in processes step
    from their start on, until it is opened or closed for the first time: they read what it allows in a file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._allowed: float = 0
        self._changed = threading.Condition()
        self.held: set[str] = set()

    def __call__(self, toy: Toy) -> None:
        assert toy.member is not None
        with self._changed:
            self.held.add(toy.name)
            while toy.member.step >= self._allowed and not toy.stopping:
                self._changed.wait(0.1)
            self.held.discard(toy.name)

    def allows(self, toy: Toy) -> bool:
        """Whether a learner may take one more step; as its ``may_step``, held learners go on with all else."""
        assert toy.member is not None
        return toy.member.step < self._allowed

    def open(self, until_step: float = math.inf) -> None:
        """Let each learner take steps until it has taken ``until_step``."""
        allow_steps(self._directory, until_step)
        with self._changed:
            self._allowed = until_step
            self._changed.notify_all()

    def close(self) -> None:
        self.open(0)


class Cluster:
    """The services of one run on one server. A test starts them, waits for what it wants to see, and reads the log."""

    def __init__(self, nursery: Nursery, directory: Path, url: str, run: str, settings: RunSettings) -> None:
        self.nursery, self.directory, self.url, self.name, self.settings = nursery, directory, url, run, settings
        self.subjects = Subjects(run)
        self.services: list[Service] = []
        self.toys: list[Toy] = []
        self.heartbeats: dict[str, list[Heartbeat]] = {}
        self.shard_heartbeats: dict[str, ShardHeartbeat] = {}
        self.gate = Gate(directory)
        self.liars: set[str] = set()  # whose messages may be refused, unlike those of others
        self.forged = False  # whether anybody's may be, but for a reason that no forger and no damage can bring about
        self.identity: str | None = None  # as the setting: where each process's is, and the test's own
        self._link: NatsTransport | None = None
        self._identity: tuple[RunSettings, bytes] | None = None  # of the settings at that time
        self._read: dict[Path, int] = {}  # of each log file, as far as it was read
        self._logged: list[tuple[str, str, Mapping[str, Any]]] = []  # service, event and values of what was read
        directory.mkdir(parents=True, exist_ok=True)

    # ---- processes

    def start(self, name: str, module: str, **values: Any) -> Service:
        """Start ``python -m module``: what all services share comes from the environment, the rest from a TOML file."""
        config, output = self.directory / f"{name}.toml", self.directory / f"{name}.out"
        shared = {"state_dir": str(self.directory), "log_level": "debug", "run": "the-environment-wins"}
        if self.identity is not None:
            shared["identity"] = self.identity
        config.write_text(to_toml({"name": name} | shared | values))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
        environment |= {"DILOCO_RUN": self.name, "OPENBLAS_NUM_THREADS": "1"}
        if "nats_url" not in values:  # the environment wins
            environment["DILOCO_NATS_URL"] = self.url
        output.touch()
        service = Service(name, self._fork(name, module, config, output, environment), output)
        self.services.append(service)
        return service

    def _fork(self, name: str, module: str, config: Path, output: Path, environment: Mapping[str, str]) -> Forked:
        return self.nursery.start(module, config, output, environment)

    def place(self, number: int) -> dict[str, Any]:
        """Settings of a service by its place, in a run that has several."""
        return {}

    def coordinator(self) -> Service:
        return self.start("coordinator", "diloco_coordinator", settings=self.settings.model_dump())

    def syncer(self, index: int) -> Service:
        return self.start(f"syncer-{index}", "diloco_syncer")

    def syncers(self) -> list[Service]:
        return [self.syncer(index) for index in range(self.settings.shards)]

    def toy_process(self, share: int, **values: Any) -> Service:
        # one that is ended with its cluster waits in vain for syncers that have ended too
        return self.start(f"toy-{share}", "tests.services.toy", share=share, **{"leave_s": 2.0, "checkpoint_s": 0.0} | values)

    def toy(
        self,
        share: int,
        *,
        name: str | None = None,
        state_dir: Path | None = None,
        checkpoint_s: float = 0.0,
        leave_s: float = 10.0,
        **behaviour: Any,
    ) -> Toy:
        """Start a learner in a thread; the cluster's gate holds it before its first step unless it behaves otherwise."""
        settings = LearnerSettings(
            name=name or f"toy-{share}",
            run=self.name,
            identity=self.identity,
            state_dir=state_dir or self.directory,
            share=share,
            checkpoint_s=checkpoint_s,
            leave_s=leave_s,
            **{"nats_url": self.url} | self.place(share),
        )
        behaviour = {"before_step": self.gate} | behaviour
        toy = Toy(settings, cast(Logger, Events()), **behaviour)
        self.toys.append(toy)
        toy.start()
        return toy

    def learners(self, **behaviour: Any) -> list[Toy]:
        return [self.toy(share, **behaviour) for share in range(self.settings.learners)]

    @property
    def answers_held(self) -> dict[str, Any]:
        """The behaviour of learners in threads that go on to apply versions, answer and save while the gate holds them."""
        return {"before_step": lambda toy: None, "may_step": self.gate.allows}

    async def create(self) -> None:
        """Make the run, as a coordinator does."""
        link = await self.link()
        await until_available(lambda: creation.create(link, self.name, self.settings), get_logger())

    async def begin(self, *, coordinator: bool = True, until_step: float = math.inf) -> None:
        """Syncers and learners, and a coordinator, which is not on the data's path, all there before the first step.

        Learners take steps until each has taken ``until_step``.
        """
        if coordinator:
            self.coordinator()
        else:
            await self.create()
        self.syncers()
        if not self.toys:
            self.learners()
        await self.link()
        await self.all_ready()
        self.gate.open(until_step)

    async def all_ready(self) -> None:
        """Every syncer serves or stands by, and every learner has been heard since."""
        syncers = [service.name for service in self.services if service.name.startswith("syncer") and not service.killed]
        await self.until(
            lambda: all(self.events("serving", name) or self.events("standing_by", name) for name in syncers), "syncers serve"
        )
        self.heartbeats.clear()
        names = {toy.name for toy in self.toys}
        await self.until(
            lambda: all(any(p.state in READY for p in self.heartbeats.get(n, ())) for n in names), "learners are ready"
        )

    async def step_until(self, step: int) -> None:
        """Have every learner take its steps up to this number, and wait until all have been heard to; none goes on."""
        self.gate.open(step)
        await self.until(lambda: self._have_taken(step), f"every learner has taken {step} steps")

    async def step_to_version(self, version: int) -> None:
        """Have learners in threads step until each has applied this version of every fragment; then hold them.

        They go on to answer while they are held (:attr:`answers_held`).
        """

        def applied() -> int:
            return min(min(self.heartbeats[toy.name][-1].versions) for toy in self.toys)

        while (reached := applied()) < version:
            until_step = 2 * self.settings.round.steps + max(toy.member.step for toy in self.toys if toy.member is not None)

            def has_come(reached: int = reached) -> bool:
                return applied() > reached

            await self.step_on(until_step, has_come, f"version {reached + 1} of every fragment")
        self.gate.close()

    async def step_on(self, until_step: int, predicate: Callable[[], bool], what: str) -> int:
        """Have every learner take its steps up to this number, and more until something is so; the step they were let go to.

        They take two sync intervals of steps at a time, so that few are taken however late versions come. They take two more
        where nothing came of these: a fragment was busy in its slot, and the next slot comes with steps alone.
        """
        self.gate.open(until_step)
        stood_s = 0.0

        def is_so() -> bool:
            nonlocal until_step, stood_s
            if predicate():
                return True
            if not self._have_taken(until_step):
                stood_s = 0.0
            elif not stood_s:
                stood_s = time.monotonic()
            elif time.monotonic() - stood_s >= scaled_s(STANDING_S):
                until_step, stood_s = until_step + 2 * self.settings.round.steps, 0.0
                self.gate.open(until_step)
            return False

        await self.until(is_so, what)
        return until_step

    def _have_taken(self, step: int) -> bool:
        """Whether every learner that was not killed has been heard at this step or a later one."""
        names = {toy.name for toy in self.toys} | {each.name for each in self.services if each.name.startswith("toy")}
        gone = {each.name for each in self.services if each.killed}
        return all(self.heartbeats.get(name) and self.heartbeats[name][-1].step >= step for name in names - gone)

    def hurry(self) -> None:
        """Let the learners in threads use up the budget soon: what the test was to see has happened."""
        for toy in self.toys:
            toy.step_s = HURRIED_STEP_S

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Have the learners in threads take few steps: where a command takes long, the run is not to end before it."""
        for toy in self.toys:
            toy.step_s = scaled_s(SLOW_STEP_S)
        try:
            yield
        finally:
            for toy in self.toys:
                toy.step_s = STEP_S

    # ---- watching

    async def link(self) -> NatsTransport:
        """The test's own connection, which also hears the heartbeats."""
        if self._link is None:
            own = identity.load(identity.identity_file(self.identity, "test")) if self.identity is not None else None
            self._link = await NatsTransport.open(self.url, self.url, "test", get_logger(), DEADLINE_S, identity=own)
            await self._listen(self._link)
        return self._link

    async def _listen(self, link: NatsTransport) -> None:
        await link.control.subscribe(self.subjects.heartbeat(), cb=self._hear)
        await link.control.subscribe(self.subjects.shard(), cb=self._hear)

    @property
    def run_id(self) -> bytes:
        """Of the settings, worked out once: every heartbeat asks, and a busy machine would fall behind hearing them."""
        if self._identity is None or self._identity[0] is not self.settings:
            self._identity = self.settings, framing.run_id(self.name, self.settings.digest())
        return self._identity[1]

    async def _hear(self, message: Any) -> None:
        run = self.run_id
        try:
            if ".heartbeat." in message.subject:
                heartbeat, _, _ = framing.unpack(message.data, Heartbeat, run)
                check_subject(heartbeat, message.subject)
                self.heartbeats.setdefault(heartbeat.learner, []).append(heartbeat)
            else:
                shard, _, _ = framing.unpack(message.data, ShardHeartbeat, run)
                self.shard_heartbeats[shard.syncer] = shard
        except MessageError:
            return  # a test publishes what it likes

    async def status(self) -> dict[str, Any]:
        """What the coordinator answers; it is asked again where no answer comes."""
        link = await self.link()
        async with asyncio.timeout(DEADLINE_S):
            while (answer := await ask(link.control, link.name, self.subjects.status, b"", ANSWER_S)) is None:
                self.check_alive()
                await asyncio.sleep(0.1)
        status: dict[str, Any] = json.loads(answer)
        return status

    def tokens(self) -> int:
        """Processed by all learners, as last heard."""
        return sum(heartbeats[-1].tokens for heartbeats in self.heartbeats.values())

    def steps(self) -> int:
        """Taken by all learners, as last heard."""
        return sum(heartbeats[-1].step for heartbeats in self.heartbeats.values())

    def events(self, event: str, service: str = "*") -> list[Mapping[str, Any]]:
        """Values of a process's or a toy's events of this name."""
        found: list[Mapping[str, Any]] = [
            values
            for toy in self.toys
            if service in ("*", toy.name)
            for _, name, values in list(cast(Events, toy.log).entries)
            if name == event
        ]
        self._read_logs()
        return found + [values for who, name, values in self._logged if name == event and service in ("*", who)]

    def _read_logs(self) -> None:
        """Go on reading the processes' logs: a test that waits for an event looks many times a second."""
        for path in sorted((self.directory / "logs").glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                while (line := file.readline()).endswith(b"\n"):
                    self._read[path] = file.tell()
                    with contextlib.suppress(ValueError):  # torn by a kill
                        values = json.loads(line)
                        own = {key: value for key, value in values.items() if key not in logs.FIXED_KEYS}
                        self._logged.append((path.stem, values["event"], own))

    async def until(self, predicate: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until something is so; fails at once if a process or learner ends with an error meanwhile."""
        ends_s = time.monotonic() + deadline_s
        while not predicate():
            self.check_alive()
            assert time.monotonic() < ends_s, f"not within {deadline_s} s: {what}; {self._situation()}"
            await asyncio.sleep(0.03)

    def check_alive(self) -> None:
        for service in self.services:
            if not service.killed and service.process.poll():
                raise AssertionError(f"{service.name} ended with {service.process.returncode}: {service.said}")
        for toy in self.toys:
            if toy.failure is not None:
                raise AssertionError(f"{toy.name} failed") from toy.failure

    async def ended(self) -> None:
        """Wait until every process that was not killed has ended by itself, and every learner has finished."""
        await self.until(
            lambda: (
                all(service.killed or service.process.poll() == 0 for service in self.services)
                and not any(toy.running for toy in self.toys)
            ),
            "the run ends by itself",
        )
        self.check_alive()
        assert all(toy.finished for toy in self.toys)

    async def refused(self, *services: Service) -> list[tuple[int, str]]:
        """Wait for the ends of processes that are to end with an error: their codes, and the one line that each says."""
        for service in services:
            service.killed = True  # its code is the test's to look at
        await self.until(lambda: all(service.process.poll() is not None for service in services), "they end")
        assert [service.said.count("\n") for service in services] == [1] * len(services), [s.said for s in services]
        return [(service.process.wait(), service.said) for service in services]

    async def use_up(self, link: NatsTransport | None = None, *, hurry: bool = True) -> None:
        """Give a run whose budget never ends one that is soon used up, and wait for its end: the test has seen all else.

        ``link`` is that of one who may change the run; the test's own may, unless there are identities.
        """
        link = link or await self.link()
        budget = self.tokens() + len(self.heartbeats) * 2 * self.settings.round.steps * SAMPLES

        async def change() -> None:
            run = KnownRun(self.name, self.settings, await link.bucket(self.subjects.bucket, create=False))
            await append_changes(link, run, lambda now: [Tokens(budget)] * (now.settings.tokens != budget), author="test")

        await until_available(change, get_logger())
        self.gate.open()
        if hurry:
            self.hurry()
        await self.ended()

    async def finished_heartbeats(self) -> dict[str, Heartbeat]:
        """Every learner's last word."""
        names = {toy.name for toy in self.toys}
        names |= {service.name for service in self.services if service.name.startswith("toy") and not service.killed}

        def all_are_heard() -> bool:
            for last in self._last_words():
                self.heartbeats.setdefault(last.learner, []).append(last)
            return names <= self.heartbeats.keys() and all(
                heartbeats[-1].state == "finished" for heartbeats in self.heartbeats.values()
            )

        await self.until(all_are_heard, "last heartbeats arrive")
        return {name: heartbeats[-1] for name, heartbeats in self.heartbeats.items()}

    def _last_words(self) -> Iterator[Heartbeat]:
        """Of learners that have finished, by what they leave behind: a heartbeat is lost where a connection is made again."""
        for toy in self.toys:
            if toy.finished and not toy.running and toy.member is not None:
                yield toy.member.heartbeat()
        for name, newest in {service.name: service for service in self.services}.items():
            result = self.directory / f"{name}.json"
            if name.startswith("toy") and newest.process.poll() == 0 and result.exists():
                yield msgspec.convert(json.loads(result.read_text())["heartbeat"], Heartbeat)

    async def store(self) -> tuple[Log, FragmentMap]:
        """The run's log, as anybody can open it."""
        link = await self.link()

        async def open_log() -> tuple[Log, FragmentMap]:
            run = KnownRun(self.name, self.settings, await link.bucket(self.subjects.bucket, create=False))
            fragments = await creation.find_map(run)
            return Log(link, self.name, run.identity, fragments, run.created), fragments

        return await until_available(open_log, get_logger())

    async def folded(self) -> list[Folded]:
        """The log from its keyframes on, folded by the reference."""
        store, _ = await self.store()
        return await until_available(lambda: fold_fragments(store, self.settings), get_logger())

    async def tensors(self, folded: Sequence[Folded]) -> dict[str, Vector]:
        """The global model."""
        _, fragments = await self.store()
        tensors = fragments.empty()
        for fragment, log in zip(fragments.fragments, folded, strict=True):
            scatter(fragment, log.theta, tensors)
        return tensors

    def _situation(self) -> str:
        toys = {toy.name: toy.member.learner.activity if toy.member else "not a member" for toy in self.toys}
        processes = {service.name: service.process.poll() for service in self.services}
        heard = {name: (p[-1].state, p[-1].step, p[-1].versions, p[-1].steps) for name, p in self.heartbeats.items()}
        return f"learners {toys}, processes {processes}, heard {heard}, shards {self.shard_heartbeats}"

    async def close(self) -> None:
        """End all that still runs; nothing that a user could see may be a traceback."""
        self.gate.open()
        for service in self.services:
            if service.process.poll() is None:
                service.process.send_signal(signal.SIGTERM)
        for toy in self.toys:
            await asyncio.to_thread(toy.stop)
        for service in self.services:
            try:
                await asyncio.to_thread(service.process.wait, 10)
            except subprocess.TimeoutExpired:
                service.kill()
        if self._link is not None:
            await self._link.close()
        for service in self.services:
            assert "Traceback" not in service.said, service.said
        if (self.directory / "logs").is_dir():
            said = list(logs.merge(self.directory))
            # a process that ends with an error is the test's to expect
            bad = [e.raw for e in said if "traceback" in e.values or (e.level == "critical" and e.event != "process_ended")]
            assert not bad, "\n".join(bad)
        wronged = self.wronged()
        assert not wronged, "\n".join(wronged)

    def settle_pace(self) -> None:
        """Expect announcements to be refused: members hear of another ``round.steps`` one after the other.

        Who is ahead, or behind, refuses an announcement, and hears it again when both go by the same (protocol.md, section 14).
        """
        self.liars |= {self.subjects.round(index) for index in range(self.settings.fragments.count)}

    def wronged(self) -> list[str]:
        """Messages of honest members that were refused: the first of each sender and kind."""
        said = [(event, values) for event in refusals.EVENTS for values in self.events(event)]
        if self.forged:
            said = [(event, values) for event, values in said if values.get("kind") in ("ClaimError", "UnmergeableError")]
        return [f"{event}: {values}" for event, values in said if not self.liars & senders(values)]


def senders(values: Mapping[str, Any]) -> set[str]:
    """Return the ways to name the sender of a refused message: its name, its subject, or how that ends."""
    given = str(values.get("sender") or values.get("learner") or values.get("subject"))
    return {given, given.rpartition(".")[2]}


# ---- the reference: written from docs/protocol.md, sections 4, 7 and 9, with NumPy alone


def decode(body: NDArray[np.uint8], n: int, bits: int) -> Vector:
    """Values of a record's body (section 4)."""
    if bits == 32:
        return body.view("<f4").astype(np.float32)
    if bits == 16:
        return (body.view("<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = -(-n // 64)
    if bits == 8:
        wide = body[4 * blocks :].view(np.int8).reshape(blocks, 64).astype(np.float32)
        values: Vector = wide * body[: 4 * blocks].view("<f4")[:, None]
        return values.reshape(-1)[:n]
    assert bits == 4
    scales = (body[: 2 * blocks].view("<u2").astype(np.uint32) << 16).view(np.float32)
    packed = body[2 * blocks :].reshape(blocks, 32)
    codes = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32) - np.float32(8)
    return (codes * scales[:, None]).reshape(-1)[:n]


def fold(theta: Vector, momentum: Vector, delta: Vector, eta: float, mu: float) -> tuple[Vector, Vector]:
    """One version (section 7): every product, sum and difference is one float32 operation."""
    eta32, mu32 = np.array(eta, np.float32), np.array(mu, np.float32)
    buffer = mu32 * momentum + delta
    return theta - eta32 * (delta + mu32 * buffer), buffer


def adamw(
    theta: Vector, momentum: Vector, gradient: Vector, record: Record, beta2: float, decay: Vector
) -> tuple[Vector, Vector]:
    """One version of ``outer.optimizer`` adamw, likewise; ``decay`` is by element."""
    moments: list[Vector] = []
    unbiased: list[Vector] = []
    for old, beta, values in zip(np.split(momentum, 2), (record.momentum, beta2), (gradient, gradient * gradient), strict=True):
        product, square = 1.0, beta
        for bit in reversed(f"{record.version:b}"):
            product, square = product * (square if bit == "1" else 1.0), square * square
        moments.append(np.float32(beta) * old + np.float32(1 - beta) * values)
        unbiased.append(moments[-1] / np.float32(1 - product))
    update: Vector = unbiased[0] / (np.sqrt(unbiased[1]) + np.float32(1e-8)) + decay * theta
    return theta - np.float32(record.learning_rate) * update, np.concatenate(moments)


def decays(fragment: Fragment, settings: RunSettings) -> Vector:
    """Weight decay by element: of tensors of two or more axes."""
    decay = np.zeros(fragment.size, np.float32)
    for piece in fragment.pieces:
        if len(piece.shape) > 1:
            decay[piece.offset : piece.offset + piece.size] = settings.inner.weight_decay
    return decay


def state_hash(theta: Vector, momentum: Vector) -> bytes:
    """Of the parameters, and of each vector of the momentum (section 7)."""
    vectors = [theta, *np.split(momentum, momentum.size // theta.size)]
    return blake3(b"".join(blake3(vector.tobytes()).digest() for vector in vectors)).digest()


async def fold_log(
    store: Log,
    fragment: Fragment,
    genesis: tuple[Genesis, bytes],
    settings: RunSettings,
    *,
    closed_by_now: bool = True,
) -> Folded:
    """Fold a fragment; every rule of section 9 that makes an entry follow is asserted of those whose ``previous`` fits."""
    index, size = fragment.index, fragment.size
    start = (await store.reader.load(index, *genesis)).replica
    chain, folded = start.chain, Folded(index, [], start.theta, start.momentum, 0)
    head, version, epoch, merged, closed = chain.head, chain.version, chain.epoch, chain.tokens_merged, chain.closed
    cursors = {name: (cursor.incarnation, cursor.number) for name, cursor in chain.cursors.items()}
    states, floor = {version: (folded.theta, folded.momentum)}, 0
    folded.before = {name: cursor.tokens for name, cursor in chain.cursors.items()}
    folded.thetas[version] = folded.theta
    async for entry in _entries(store, index, chain.sequence, folded):
        record = entry.record
        if record.previous != head:
            folded.passed_over += 1
            continue
        if record.entry == "version":
            assert entry.body is not None
            assert not closed
            delta = decode(entry.body, size, record.bits)
            if settings.outer.optimizer == "adamw":
                constants = record, settings.inner.beta2, decays(fragment, settings)
                folded.theta, folded.momentum = adamw(folded.theta, folded.momentum, delta, *constants)
            else:
                rates = record.learning_rate, record.momentum
                folded.theta, folded.momentum = fold(folded.theta, folded.momentum, delta, *rates)
            version += 1
        if record.entry in ("rollback", "repair"):
            assert entry.body is not None
            assert record.rolled_back is not None
            assert not closed
            version += 1
            folded.theta, folded.momentum = states[record.rolled_back.to_version]
            assert entry.body.tobytes() == folded.theta.tobytes() + folded.momentum.tobytes()
            floor = version
        if record.entry == "takeover":  # in a run with regions owners may have claimed the fragment that never wrote
            epoch = max(epoch + 1, record.epoch) if store.stream.regions else epoch + 1
        merged += sum(member.tokens for member in record.members)
        assert (record.version, record.epoch, record.tokens_merged) == (version, epoch, merged)
        assert record.state_hash == folded.state_hash
        assert [m.learner for m in record.members] == sorted({m.learner for m in record.members})
        for member in record.members:
            assert (member.incarnation, member.number) > cursors.get(member.learner, (0, 0)), "merged twice"
            assert member.base_version >= floor, "made before a rollback"
            cursors[member.learner] = (member.incarnation, member.number)
        head, closed = entry.entry_hash, closed or record.closing
        states[version], folded.thetas[version] = (folded.theta, folded.momentum), folded.theta
        folded.entries.append(record)
    assert closed or not closed_by_now, f"the log of fragment {index} is not closed"
    folded.tokens_merged = merged
    return folded


async def fold_fragments(store: Log, settings: RunSettings, *, closed_by_now: bool = True) -> list[Folded]:
    """Fold every fragment of a log that has been founded."""
    genesis = await store.reader.genesis()
    assert genesis is not None
    return [await fold_log(store, f, genesis, settings, closed_by_now=closed_by_now) for f in store.map.fragments]


async def _entries(store: Log, index: int, after: int, folded: Folded) -> AsyncIterator[LogEntry]:
    def refused(refusal: RefusedEntry) -> None:
        folded.passed_over += 1

    stop = await store.reader.end_sequence(index)
    if stop > after:
        async for entry in store.entries.follow([index], after + 1, refused, stop):
            yield entry


def check_accounts(heartbeats: Mapping[str, Heartbeat], folded: Iterable[Folded]) -> None:
    """Of every learner and fragment: processed = merged by the log + lost + outstanding."""
    for log in folded:
        for name, heartbeat in heartbeats.items():
            merged = log.before.get(name, 0)
            merged += sum(m.tokens for record in log.entries for m in record.members if m.learner == name)
            lost, outstanding = heartbeat.lost_tokens[log.index], heartbeat.fragment_tokens[log.index]
            accounts = f"{heartbeat.tokens} processed, {merged} merged, {lost} lost, {outstanding} outstanding"
            assert heartbeat.tokens == merged + lost + outstanding, f"{name}, fragment {log.index}: {accounts}"


def check_all_merged(heartbeats: Mapping[str, Heartbeat], log: Folded) -> None:
    """The log of a run that ended holds all that was processed, once, but for what learners have dropped as late."""
    kept = sum(heartbeat.tokens - heartbeat.lost_tokens[log.index] for heartbeat in heartbeats.values())
    assert log.tokens_merged == kept, f"fragment {log.index}: {log.tokens_merged} merged, {kept} processed and not lost"


async def some_versions(cluster: Cluster, more: int = 2, of: Sequence[str] = ()) -> None:
    """Wait until every fragment has got so many more versions, as learners (all, or ``of``) apply them."""

    def versions() -> list[int]:
        heard = [heartbeats[-1].versions for name, heartbeats in cluster.heartbeats.items() if not of or name in of]
        return np.min(heard, axis=0).tolist() if heard else [0]

    before = versions()
    await cluster.until(lambda: min(np.subtract(versions(), before)) >= more, f"{more} more versions of every fragment")


async def newest_entries(cluster: Cluster) -> list[Stored | None]:
    """What the server has acknowledged last, of every fragment's log."""
    store, fragments = await cluster.store()
    stream = cluster.subjects.log_stream
    subjects = [cluster.subjects.record(fragment.index) for fragment in fragments.fragments]

    async def read() -> list[Stored | None]:
        return [await store.transport.last(stream, subject) for subject in subjects]

    return await until_available(read, get_logger())


async def check_kept(cluster: Cluster, before: Iterable[Stored | None]) -> None:
    """Of a run that ended: what was acknowledged before is there, and of all work each token is merged or lost, once."""
    store, _ = await cluster.store()
    heartbeats, folded = await cluster.finished_heartbeats(), await cluster.folded()
    check_accounts(heartbeats, folded)
    for entry, log in zip(before, folded, strict=True):
        assert entry is not None
        getting = partial(store.transport.get, cluster.subjects.log_stream, entry.sequence)
        kept = await until_available(getting, get_logger())
        assert kept is not None
        assert kept.data == entry.data  # what was acknowledged before is where it was
        assert log.passed_over == 0
        check_all_merged(heartbeats, log)
        for toy in cluster.toys:
            np.testing.assert_array_equal(toy.thetas[log.index], log.theta, strict=True)


async def fill(api: JetStreamContext, room_bytes: int) -> None:
    """Store messages of another program, until a server with so much room in all has none for the smallest."""
    await api.add_stream(name="foreign", subjects=["foreign"])
    for size in (1 << 19, 1 << 14, 1 << 8):
        with contextlib.suppress(nats.js.errors.APIError):
            for _ in range(room_bytes // size):
                await api.publish("foreign", bytes(size))


def to_toml(values: Mapping[str, Any], prefix: str = "") -> str:
    """Nested plain values as TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{key}]", to_toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)
