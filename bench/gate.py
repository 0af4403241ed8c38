"""The cost of the gate in front of a syncer: of each heartbeat that is heard, and of a flood of names that are not admitted.

One process, no server: frames are handed to the gate as a subscription hands them, and admissions come from memory. A look is
what a syncer does after each heartbeat: whether a round is due, of each fragment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
from harness.console import Bench, Result, Script
from harness.host import machine

from diloco.control.admission import Admission
from diloco.control.creation import KnownRun
from diloco.control.gate import HeartbeatGate
from diloco.core.log.chain import Chain
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Round
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.process import observe
from diloco.process.observe import Counted, get_logger
from diloco.settings.presets import run_settings
from diloco.transport import Bucket, Heard
from diloco.wire import framing
from diloco.wire.control import Heartbeat
from diloco.wire.entries import Cursor

GHOSTS = 20_000
STEPS_PER_S = 10.0  # of each learner, to relate the cost to a core


@dataclass
class Frame:
    """A message as it is heard."""

    subject: str
    data: bytes


class Admissions:
    """A bucket that holds the admissions of the run's learners alone."""

    def __init__(self, stored: dict[str, bytes]) -> None:
        self.stored, self.reads = stored, 0

    async def get(self, key: str) -> tuple[bytes, int] | None:
        self.reads += 1
        return (self.stored[key], 1) if key in self.stored else None


def heartbeat(learner: str, step: int, fragments: int) -> Heartbeat:
    counts = [1000 + index for index in range(fragments)]
    return Heartbeat(
        learner, "", 1_700_000_000_000, "learner", "stepping", False, step, 2048 * step, 0.1, 2.5, counts, counts, counts,
        counts, [(0, 0, 500), (1, 0, 500)], 2048, 10.0, 0.1, 10**9, 10**9, 0, "0.1.0",
    )  # fmt: skip


async def measure(
    *, learners: int = 16, fragments: int = 24, rounds: Annotated[int, "heartbeats of each learner"] = 200
) -> Result:
    settings = run_settings("decoupled", {"learners": learners, "fragments.count": fragments, "tokens": 10**12})
    parts = build_map([TensorSpec(f"w{index}", (8,)) for index in range(fragments)], fragments)
    names = [f"learner-{index}" for index in range(learners)]
    digest = settings.digest()
    stored = {
        f"member.{name}": msgspec.msgpack.encode(Admission(name, 1_700_000_000_000, digest, parts.digest, None))
        for name in names
    }
    bucket = Admissions(stored)
    run = KnownRun("bench", settings, cast(Bucket, bucket))
    roster = Roster(settings)
    heard = 0

    async def hear(heartbeat: Heartbeat) -> None:
        nonlocal heard
        heard += 1
        roster.hear(heartbeat, time.monotonic())

    observe.configure("bench", "bench", level="error")
    refused = Counted(get_logger())
    gate = HeartbeatGate(run, parts, refused, hear)
    working = asyncio.create_task(gate.work())
    beats = [[heartbeat(name, step, fragments) for name in names] for step in range(rounds)]
    frames = [
        Frame(f"diloco.bench.heartbeat.{beat.learner}", framing.pack(beat, run.identity)) for step in beats for beat in step
    ]
    for frame in frames[:learners]:
        await gate.hear(cast(Heard, frame))
    await asyncio.sleep(0.5)

    began = time.process_time()
    for frame in frames:
        framing.unpack(frame.data, Heartbeat, run.identity)
    decoding_s = time.process_time() - began
    roster_s = _timed(lambda: [roster.hear(beat, time.monotonic()) for step in beats for beat in step])
    roster.learners.clear()
    heard, began = 0, time.process_time()
    for frame in frames:
        await gate.hear(cast(Heard, frame))
    whole_s = time.process_time() - began
    assert heard == len(frames), (heard, len(frames))

    chains = [Chain(index, 1000 + index, 0, bytes(32), 1, bytes(32), 10**9) for index in range(fragments)]
    for chain in chains:
        chain.cursors = {name: Cursor(name, 1_700_000_000_000, 1, 1000, 10**8, 0, 10**5) for name in names}
    held = [Round(roster, chain, fragments) for chain in chains]
    looked = [beat for step in beats[:50] for beat in step]
    looks_s = _timed(lambda: _look(roster, held, looked))

    ghosts = [
        Frame(f"diloco.bench.heartbeat.ghost-{index}", framing.pack(heartbeat(f"ghost-{index}", 1, fragments), run.identity))
        for index in range(GHOSTS)
    ]
    bucket.reads, began, began_s = 0, time.process_time(), time.monotonic()
    for frame in ghosts:
        await gate.hear(cast(Heard, frame))
    flood_s, flood_took_s = time.process_time() - began, time.monotonic() - began_s
    await asyncio.sleep(max(0.0, 5.0 - flood_took_s))
    working.cancel()
    count, per_s = len(frames), learners * STEPS_PER_S
    gate_us = (whole_s - decoding_s - roster_s) / count * 1e6
    return machine() | {
        "learners": learners,
        "fragments": fragments,
        "decode_us": decoding_s / count * 1e6,
        "roster_us": roster_s / count * 1e6,
        "gate_us": gate_us,
        "look_us": looks_s / len(looked) * 1e6,
        "gate_of_core": gate_us * 1e-6 * per_s,
        "ghost_us": flood_s / GHOSTS * 1e6,
        "ghost_reads": bucket.reads,
        "ghosts_refused": len(refused.counts()),
    }


def _look(roster: Roster, held: list[Round], beats: list[Heartbeat]) -> None:
    for beat in beats:
        now_s = time.monotonic()
        roster.hear(beat, now_s)
        for round_ in held:
            round_.due(now_s, round_.settings.round.steps)


def _timed(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def show(result: Result) -> None:
    print(f"{result['cpu']}: {result['learners']} learners, {result['fragments']} fragments")
    print(
        f"a heartbeat: decoded {result['decode_us']:.1f} us, gate {result['gate_us']:.1f} us, "
        f"roster {result['roster_us']:.1f} us, look at all rounds {result['look_us']:.0f} us"
    )
    print(f"gate at {STEPS_PER_S:g} steps a second of each learner: {result['gate_of_core']:.3%} of a core")
    print(
        f"{GHOSTS:,} names that are not admitted: {result['ghost_us']:.1f} us each, {result['ghost_reads']} admissions read in "
        f"5 s, {result['ghosts_refused']} counted"
    )


SCRIPT = Script(__doc__, Bench(measure, show))

if __name__ == "__main__":
    SCRIPT.run()
