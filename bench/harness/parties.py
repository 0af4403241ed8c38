"""A run's processes as the benchmarks need them: a shard, and learners whose island is plain NumPy.

They are the product's own (:class:`diloco.member.member.Member`, :class:`diloco_syncer.shard.Shard`, ``nats-server``), each
a process; only the model is none: its "step" adds noise to the parameters. A parent process talks to each over a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.control import creation
from diloco.core.learner.accounts import StepDone
from diloco.core.run.leases import RoundRobin
from diloco.core.tensors.fragments import Fragment, FragmentMap, Piece, TensorSpec, cut_model
from diloco.member.arrays import Boundary
from diloco.member.member import Member
from diloco.nats.connection import malloc_environment
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings, SyncerSettings
from diloco_ops.broker.server import Server
from diloco_syncer.shard import Shard

Vector = NDArray[np.float32]
RUN = "bench"
STEP_TOKENS = 1024
TALK_S = 600.0
_spawn = multiprocessing.get_context("spawn")


def model(parameters: int) -> list[TensorSpec]:
    """Tensors of ``parameters`` values in all, of sizes as a transformer has them; one is embedding-like."""
    width = next(w for w in (2048, 1024, 512, 256, 128, 64, 16) if 64 * w * w <= parameters or w == 16)
    embedding = min(256, max(1, parameters // (8 * width)))
    tensors = [TensorSpec("embedding", (embedding, width), embedding=True)]
    left, number = parameters - embedding * width, 0
    while left >= width:
        rows = min((width, 4 * width)[number % 2], left // width)
        tensors.append(TensorSpec(f"blocks/{number:03}/weight", (rows, width)))
        left, number = left - rows * width, number + 1
    if left:
        tensors.append(TensorSpec("scale", (left,)))
    return tensors


@dataclass
class Island:
    """Parameters as a learner's framework would hold them."""

    map: FragmentMap
    tensors: dict[str, Vector]

    @classmethod
    def make(cls, fragment_map: FragmentMap) -> Island:
        """Random parameters, alike in every process."""
        rng = np.random.default_rng(0)
        tensors = fragment_map.empty()
        for tensor in tensors.values():
            rng.standard_normal(out=tensor, dtype=np.float32)
            tensor *= np.float32(0.02)
        return cls(fragment_map, tensors)

    def step(self, rng: np.random.Generator) -> None:
        """Move every parameter a little."""
        for tensor in self.tensors.values():
            # in slices: a whole tensor's noise is no part of a learner's memory
            for row in range(0, len(tensor), 256):
                rows = tensor[row : row + 256]
                rows += rng.standard_normal(rows.shape, np.float32) * np.float32(1e-3)

    def initial(self, fragment: Fragment) -> Vector:
        """Return a fragment, float32 [size], to found the run with."""
        return fragment.gather(self.tensors)

    def reader(self, fragment: Fragment) -> Callable[[], Vector]:
        """Return a function that reads the fragment; no step may come between."""
        return partial(fragment.gather, self.tensors)

    def write(self, boundary: Boundary) -> None:
        """Write a boundary's versions, and let go of them, as a trainer does."""
        while boundary.applies:
            index, applied = boundary.applies.pop(0)
            fragment = self.map.fragments[index]
            if applied.reference is None:
                scatter(fragment, applied.theta, self.tensors)
                continue
            for piece in fragment.pieces:
                start, stop = piece.offset, piece.offset + piece.size
                values = _rows(piece, self.tensors)
                values -= applied.reference[start:stop].reshape(piece.shape)
                values += applied.theta[start:stop].reshape(piece.shape)


def scatter(fragment: Fragment, vector: NDArray[np.float32], tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Copy a fragment's values, float32 [size], into ``tensors``, in place: the inverse of :meth:`Fragment.gather`."""
    for piece in fragment.pieces:
        _rows(piece, tensors)[...] = vector[piece.offset : piece.offset + piece.size].reshape(piece.shape)


def _rows(piece: Piece, tensors: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return a piece's values where they lie."""
    return tensors[piece.path][piece.row_start : piece.row_stop] if piece.shape else tensors[piece.path][...]


@dataclass(frozen=True)
class Event:
    """A call of a traced function; wall and CPU time are without the traced functions that it called."""

    stage: str
    began_s: float
    ended_s: float
    wall_s: float
    cpu_s: float


@dataclass
class Tracer:
    """Times functions of this process by wrapping attributes of modules and classes."""

    events: list[Event] = field(default_factory=list)
    _local: threading.local = field(default_factory=threading.local)

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Time every call of ``owner.name`` as ``stage``."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            stack: list[list[float]] = self._local.__dict__.setdefault("stack", [])
            below = [0.0, 0.0]  # wall and CPU time of traced functions called from here
            stack.append(below)
            began_s, began_cpu_s = time.monotonic(), time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                ended_s, spent_s = time.monotonic(), time.thread_time() - began_cpu_s
                stack.pop()
                if stack:
                    stack[-1][0] += ended_s - began_s
                    stack[-1][1] += spent_s
                self.events.append(Event(stage, began_s, ended_s, ended_s - began_s - below[0], spent_s - below[1]))

        setattr(owner, name, timed)

    def wrap_async(self, owner: Any, name: str, stage: str) -> None:
        """Time every call of a coroutine function; what it waits for counts, and it has no CPU time of its own."""
        inner = getattr(owner, name)

        async def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.monotonic()
            try:
                return await inner(*args, **kwargs)
            finally:
                ended_s = time.monotonic()
                self.events.append(Event(stage, began_s, ended_s, ended_s - began_s, 0.0))

        setattr(owner, name, timed)


@dataclass(frozen=True)
class Party:
    """A process of the run, and the pipe to it."""

    process: Any
    pipe: Connection

    def ask(self, *words: Any) -> Any:
        """Send words, and wait for the answer."""
        self.pipe.send(words)
        return self.hear()

    def hear(self) -> Any:
        """Wait for what it says next."""
        if not self.pipe.poll(TALK_S):
            raise TimeoutError(f"{self.process.name} has said nothing for {TALK_S:.0f} s")
        return self.pipe.recv()

    @property
    def pid(self) -> int:
        """The process's number."""
        return int(self.process.pid)


@dataclass(frozen=True)
class Parties:
    """Everybody in a run."""

    server: Server
    syncer: Party
    learners: list[Party]
    run_settings: RunSettings
    parameters: int


@contextlib.contextmanager
def running(run_settings: RunSettings, parameters: int, trace: bool = False) -> Iterator[Parties]:
    """Start a server, one shard and the learners of a run; they are up when each has said so, see :meth:`Party.hear`."""
    os.environ.update(malloc_environment())
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        server = Server(Path(folder))
        server.start()
        started: list[Party] = []

        def start(target: Callable[..., None], name: str, *args: Any) -> Party:
            started.append(spawn(target, name, server.url, run_settings.model_dump(), parameters, trace, *args))
            return started[-1]

        try:
            asyncio.run(create(server.url, run_settings))
            learners = [start(learner_main, f"learner-{k}", k) for k in range(run_settings.learners)]
            syncer = start(syncer_main, "syncer-0")
            yield Parties(server, syncer, learners, run_settings, parameters)
        finally:
            for party in started:
                party.process.terminate()
            for party in started:
                party.process.join(10)
            server.kill()


def spawn(target: Callable[..., None], name: str, *args: Any) -> Party:
    """Start a process of its own, whose function is given its end of a pipe and these arguments."""
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=target, name=name, args=(theirs, *args), daemon=True)
    process.start()
    return Party(process, ours)


async def create(url: str, run_settings: RunSettings) -> None:
    link = await NatsTransport.open(url, url, "bench", observe.get_logger(), give_up_after_s=10)
    try:
        await creation.create(link, RUN, run_settings)
    finally:
        await link.close()


@contextlib.asynccontextmanager
async def joined(url: str, name: str) -> AsyncIterator[tuple[NatsTransport, creation.KnownRun, observe.Logger]]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    observe.configure(name, RUN, level="warning", fmt="console", file=None)
    log = observe.get_logger()
    link = await NatsTransport.open(url, url, name, log, give_up_after_s=10)
    try:
        yield link, await creation.find(link, RUN, log), log
    finally:
        await link.close()


def syncer_main(pipe: Connection, url: str, settings: Mapping[str, Any], parameters: int, trace: bool) -> None:
    """Run a shard in a process of its own.

    Answers ("events",) with the tracer's events and the bytes so far, ("fragments",) with how many it serves.
    """
    tracer = Tracer()
    if trace:
        _trace_syncer(tracer)

    async def main() -> None:
        async with joined(url, "syncer-0") as (link, run, log):
            shard = Shard(link, run, await creation.find_map(run), SyncerSettings(name="syncer-0", run=RUN), log)
            serving = asyncio.create_task(shard.serve())
            loop = asyncio.get_running_loop()
            while not serving.done():
                word, *_ = await loop.run_in_executor(None, pipe.recv)
                if word == "fragments":
                    pipe.send(len(shard.owned))
                else:
                    pipe.send((tracer.events, link.bytes_out, link.bytes_in))
            serving.result()

    asyncio.run(main())


def follow(island: Island, member: Member, fragment_map: FragmentMap, done: StepDone | None) -> None:
    """Apply until every fragment has had one more version."""
    left = set(range(len(fragment_map.fragments)))
    while left:
        boundary = member.boundary(done)
        done = None
        left -= {index for index, _ in boundary.applies}
        island.write(boundary)
        for index in boundary.reads:
            member.submit(index, island.reader(fragment_map.fragments[index]))
        if left:
            member.wait(0.05)


def learner_main(pipe: Connection, url: str, settings: Mapping[str, Any], parameters: int, trace: bool, share: int) -> None:
    """Run a learner in a process of its own.

    Says "island" when it has its parameters, waits for a word, joins, and says how long that took when it has applied
    version 0. ("round",) takes one step and goes on until every fragment's next version is applied, and answers with when
    the step had ended, when all was applied, and the step's CPU time. ("step",) takes one step, and answers with how many
    versions the boundary after it applied. ("events",) is as in a syncer.
    """
    tracer = Tracer()
    if trace:
        _trace_learner(tracer)
    rng = np.random.default_rng(share + 1)
    # the mapping goes by one set of settings, in every process
    run_settings = RunSettings.model_validate(dict(settings))
    fragment_map = cut_model(model(parameters), run_settings.fragments)

    async def main() -> None:
        island = Island.make(fragment_map)
        island.step(rng)  # what a step needs is there before anything is measured
        pipe.send("island")
        await asyncio.to_thread(pipe.recv)
        async with joined(url, f"learner-{share}") as (link, run, log):
            began_s = time.monotonic()
            name = f"learner-{share}"
            member = Member(link, run, fragment_map, LearnerSettings(name=name, run=RUN, share=share), log)
            await member.join(island.initial)
            thread = threading.Thread(target=serve, args=(island, member, link, began_s), name="trainer", daemon=True)
            thread.start()
            while thread.is_alive():
                await asyncio.sleep(0.2)

    def serve(island: Island, member: Member, link: NatsTransport, began_s: float) -> None:
        round_robin = RoundRobin()
        follow(island, member, fragment_map, None)
        pipe.send(time.monotonic() - began_s)
        while True:
            word, *_ = pipe.recv()
            if word == "round":
                before_s = time.process_time()
                island.step(rng)
                stepped_s, began_s = time.process_time() - before_s, time.monotonic()
                follow(island, member, fragment_map, StepDone(STEP_TOKENS, *round_robin.next(member.leased()), 1.0, 0.1, 0.0))
                pipe.send((began_s, time.monotonic(), stepped_s))
            elif word == "step":
                island.step(rng)
                boundary = member.boundary(StepDone(STEP_TOKENS, *round_robin.next(member.leased()), 1.0, 0.1, 0.0))
                applied = len(boundary.applies)
                island.write(boundary)
                for index in boundary.reads:
                    # the next step changes the parameters, so what may be asked for is copied now
                    snapshot = fragment_map.fragments[index].gather(island.tensors)
                    member.submit(index, snapshot.view)
                pipe.send(applied)
            else:
                pipe.send((tracer.events, link.bytes_out, link.bytes_in))

    asyncio.run(main())


def _trace_learner(tracer: Tracer) -> None:
    from diloco.core.learner import delta
    from diloco.core.tensors import codec, outer, quantise
    from diloco.log import stream
    from diloco.member import offer_maker

    tracer.wrap(delta.DeltaValues, "encode", "displacement")
    tracer.wrap(Island, "write", "apply: island")
    tracer.wrap(Fragment, "gather", "snapshot")
    tracer.wrap(quantise, "quantise", "encode")
    tracer.wrap(codec, "pack", "zstd")
    tracer.wrap(codec, "content_hash", "hash")
    tracer.wrap(sys.modules[__name__], "scatter", "apply: write")
    tracer.wrap(Member, "boundary", "apply: accounts")
    tracer.wrap(stream, "open_body", "open record")
    tracer.wrap(quantise, "validate", "validate record")
    tracer.wrap(outer, "fold", "fold")
    tracer.wrap_async(offer_maker, "append_offer", "publish, store")


def _trace_syncer(tracer: Tracer) -> None:
    from diloco.core.syncer import merging
    from diloco.core.tensors import codec, merge, outer, quantise
    from diloco.core.tensors.compiled import kernels
    from diloco.log import writer
    from diloco_syncer.offers import collector

    tracer.wrap(collector, "open_body", "open offer")
    tracer.wrap(quantise, "validate", "validate offer")
    tracer.wrap(merging, "accumulate", "merge")
    tracer.wrap(merge.Accumulator, "result", "merge")  # int4 offers are added up here
    tracer.wrap(merging, "make_version", "make version")
    tracer.wrap(quantise, "quantise", "encode")
    tracer.wrap(outer, "fold", "fold")
    tracer.wrap(kernels, "absmax", "check finite")
    tracer.wrap(codec, "pack", "zstd")
    tracer.wrap(codec, "content_hash", "hash")
    tracer.wrap_async(writer.Writer, "append", "append")
