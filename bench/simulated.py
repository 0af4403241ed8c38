"""A small real run and the simulator, through the same failures: what both come to, side by side.

    python bench/simulated.py                      # about 80 seconds
    python bench/simulated.py --tape tape.jsonl    # other failures

Begins a run with ``diloco up`` whose learners' steps take ``--step`` seconds and hardly any processor (bench/island.py), and
has ``diloco chaos`` play a failure tape on it. Before the tape begins, ``--lead-in`` seconds tell what the simulator cannot
know: how long a step, an answer and a commit take, and how well bodies compress. It then plays the same tape, and the table
says what both counted while it was played. What is seen of the run is seen from outside, by its heartbeats and its streams.

Exit code 1 if a quantity differs by more than 5 %, or if chaos found an invariant broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import island
import script

from diloco.errors import BrokerError, MessageError, RunError
from diloco.process.tasks import end
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Announcement, Heartbeat
from diloco.wire.entries import Record
from diloco.wire.offers import Offer
from diloco_lab.published import validation
from diloco_lab.published.validation import RunObservations, SeenOffer, SeenVersion
from diloco_ops import failures
from diloco_ops.failures import Failure, FailureTape
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import RunReader

LEARNERS = 3
MODEL = {"task.layers": 10, "task.width": 128, "fragments.count": 10, "round.steps": 16}
TAPE = FailureTape(
    40.0,
    [
        Failure(3.0, "freeze", "learner-0", 8.0),
        Failure(13.0, "slow", "learner-1", 8.0, {"factor": 3.0}),
        Failure(18.0, "freeze", "learner-2", 3.0),
        Failure(24.0, "freeze", "learner-[12]", 5.0),
        Failure(33.0, "cut", "learner-2", 1.5),
    ],
)
KINDS = ("freeze", "slow", "cut")  # a killed learner is back when it has been imported and compiled: not for a simulator to say
TARGET = 0.05
DEADLINE_S = 180.0
POLL_S = 0.1


async def watch(run: RunReader, seen: RunObservations) -> list[asyncio.Task[None]]:
    """Note what happens, for ever."""
    transport, subjects, identity = run.transport, run.log.subjects, run.run.identity

    async def hear_heartbeat(message: Heard) -> None:
        with contextlib.suppress(MessageError):
            heartbeat, _, _ = framing.unpack(message.data, Heartbeat, identity)
            steps = seen.steps.setdefault(heartbeat.learner, []) if heartbeat.role == "learner" else []
            if heartbeat.state == "stepping" and (not steps or heartbeat.step > steps[-1][1]):
                steps.append((time.monotonic(), heartbeat.step))

    async def hear_round(message: Heard) -> None:
        with contextlib.suppress(MessageError):
            round_, _, _ = framing.unpack(message.data, Announcement, identity)
            seen.announced.setdefault((round_.fragment, round_.version), time.monotonic())

    async def read_offers() -> None:
        async for stored in transport.pull(subjects.offer_stream, [subjects.offer("*")], 1):
            offer, _, _ = framing.unpack(stored.data, Offer, identity)
            seen.offers.append(SeenOffer(time.monotonic(), offer.fragment, len(stored.data), offer.body.size_bytes))

    async def read_log() -> None:
        async for stored in transport.pull(subjects.log_stream, [subjects.record("*")], 1):
            record, _, _ = framing.unpack(stored.data, Record, identity)
            if record.entry == "version":
                tokens, size_bytes = [member.tokens for member in record.members], len(stored.data)
                seen.versions.append(
                    SeenVersion(time.monotonic(), record.fragment, record.version, tokens, size_bytes, record.round_s)
                )

    await transport.subscribe(subjects.heartbeat(), hear_heartbeat)
    await transport.subscribe(subjects.round(), hear_round)
    return [asyncio.create_task(reading) for reading in (read_offers(), read_log())]


@contextlib.asynccontextmanager
async def training(folder: Path, step_s: float) -> AsyncIterator[Path]:
    """Begin a run; yield its directory."""
    directory = folder / "run"
    command = ["up", "--plain", "--run-dir", str(directory), "--tokens", str(10**12), "--learners", str(LEARNERS)]
    command += ["--shards", "1", "--set=task.name=island:make", *(f"--set={name}={value}" for name, value in MODEL.items())]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"BENCH_STEP_S": str(step_s), "PYTHONPATH": path}
    with (folder / "up.txt").open("wb") as output:
        up = await asyncio.create_subprocess_exec(*script.DILOCO, *command, stdout=output, stderr=output, env=environment)
    try:
        yield directory
    finally:
        with contextlib.suppress(ProcessLookupError):
            up.send_signal(signal.SIGINT)
        await up.wait()


@contextlib.asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[RunReader]:
    """Open the run's reader, once the run has begun."""
    ends_s = time.monotonic() + DEADLINE_S
    async with contextlib.AsyncExitStack() as stack:
        while True:
            try:
                run = await stack.enter_async_context(run_reader.opened(directory))
                break
            except (RunError, BrokerError):
                if time.monotonic() > ends_s:
                    raise
            await asyncio.sleep(POLL_S)
        yield run


async def until(predicate: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not predicate():
        if time.monotonic() > ends_s:
            raise SystemExit(f"bench/simulated.py: not within {DEADLINE_S:g} s: {what}")
        await asyncio.sleep(POLL_S)


async def play(folder: Path, tape: Path, lead_in_s: float) -> tuple[float, float, bool]:
    """Play a tape on the run; when the lead-in and when the tape began, and whether all invariants hold at the end."""
    command = ["chaos", str(folder / "run"), "--tape", str(tape), "--lead-in", str(lead_in_s)]
    marks: dict[str, float] = {}
    with (folder / "chaos.txt").open("wb") as output:
        chaos = await asyncio.create_subprocess_exec(*script.DILOCO, *command, stdout=asyncio.subprocess.PIPE, stderr=output)
        assert chaos.stdout is not None
        async for line in chaos.stdout:
            output.write(line)
            marks.setdefault(line.decode().split()[0] if line.strip() else "", time.monotonic())
    code = await chaos.wait()
    if not {"watching", "chaos"} <= marks.keys():
        raise SystemExit(f"bench/simulated.py: the tape was not played: {(folder / 'chaos.txt').read_text()}")
    return marks["watching"], marks["chaos"], code == 0


def read_tape(path: Path) -> FailureTape:
    """Return a tape of failures that both can cause."""
    names = [f"learner-{index}" for index in range(LEARNERS)]

    def complaint(failure: Failure) -> str | None:
        met = failure.targets(names)
        return None if met else f"target {failure.target!r}: the comparison breaks learners alone, {', '.join(names)}"

    with path.open() as lines:
        return failures.decode(lines, str(path), known=KINDS, complaint=complaint)


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    tape = read_tape(arguments.tape) if arguments.tape else TAPE
    file = folder / "tape.jsonl"
    file.write_text(failures.encode(tape))
    async with training(folder, arguments.step) as directory, opened(directory) as run:
        seen = RunObservations(run.run.created, [fragment.size for fragment in run.map.fragments], island.TOKENS)
        watching = await watch(run, seen)

        def in_full_swing() -> bool:
            return len(seen.steps) == LEARNERS and all(len(steps) > 2 for steps in seen.steps.values())

        await until(in_full_swing, "every learner steps")
        lead_in_s, began_s, holds = await play(folder, file, arguments.lead_in)
        await end(*watching)
    calibration = validation.calibrate(seen, lead_in_s, began_s)
    ends_s = began_s + tape.duration_s
    rows = validation.compared(validation.live(seen, calibration, began_s, ends_s), validation.simulated(calibration, tape))
    return {
        "machine": script.machine(),
        "calibration": {
            "step_s": {learner.name: learner.step_s for learner in calibration.learners},
            "answer_s": calibration.rounds.answer_s,
            "commit_s": calibration.rounds.commit_s,
            "compression": calibration.rounds.compression,
        },
        "table": [
            {"quantity": row.quantity, "live": row.live, "simulated": row.simulated, "difference": row.difference}
            for row in rows
        ],
        "drift": validation.drift(seen, lead_in_s, began_s, ends_s),
        "holds": holds,
        "passed": holds and all(abs(row.difference) <= TARGET for row in rows),
    }


def show(result: dict[str, Any]) -> None:
    machine, calibration = result["machine"], result["calibration"]
    print(f"{machine['cpu']}, {machine['cores']} cores")
    steps = ", ".join(f"{1000 * step_s:.1f}" for step_s in calibration["step_s"].values())
    print(
        f"measured before the tape: steps of {steps} ms, an answer in {1000 * calibration['answer_s']:.0f} ms, "
        f"a commit in {1000 * calibration['commit_s']:.0f} ms, bodies of {100 * calibration['compression']:.1f} %\n"
    )
    print(f"{'quantity':30} {'live':>14} {'simulated':>14} {'difference':>11}")
    for row in result["table"]:
        places = 3 if row["live"] < 100 and row["live"] % 1 else 0
        shown = "".join(f" {row[name]:14,.{places}f}" for name in ("live", "simulated"))
        print(f"{row['quantity']:30}{shown} {100 * row['difference']:+10.1f} %")
    drift = max(map(abs, result["drift"].values()))
    print(f"undisturbed steps took {100 * drift:.1f} % more or less time than before the tape, at most")
    print(f"chaos: {'all invariants hold' if result['holds'] else 'an invariant is broken'}")
    print(f"at most {100 * TARGET:g} % apart: {'passed' if result['passed'] else 'FAILED'}")


def main() -> int:
    parser = script.parser(__doc__)
    parser.add_argument("--tape", type=Path, help="failure tape to play instead of the one in here")
    parser.add_argument("--step", type=float, default=0.25, help="what a step takes, in seconds")
    parser.add_argument("--lead-in", type=float, default=10.0, help="seconds without failures")
    parser.add_argument("--keep", type=Path, help="folder to keep the run in")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(measure(folder, arguments))
    script.print_result(result, arguments, show)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
