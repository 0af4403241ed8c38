"""The cost of a learner's death: from its SIGKILL to its first step and its first merged work, and the others' losses.

    python bench/restart.py                     # 5 kills with its own checkpoint, 5 without; a run of the default model
    python bench/restart.py --kills 1 --json
    python bench/restart.py --set learners=2 --nice     # what others lose is not lost to the new process's imports

It begins a run with ``diloco up``, which starts a killed learner again. ``started_s`` is from the kill to the end of its
imports and compilation, ``first_step_s`` from there to the end of its first step; ``rounds`` are the versions that a fragment
made from then on up to the first with its work, of the fragment that merged it first. The others' ``blocked`` is the share of
time without a step in flight in all that time, and ``steps_lost`` the share by which they took fewer steps a second than in
the seconds before the kill. That is also what the new process's imports take from them where cores are short: with ``--nice``
it has the lowest priority, and takes only what is left over.

At the end it reads the whole log as a learner that comes back does, and compares the bytes with the newest keyframes'.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import script

from diloco.control import creation
from diloco.errors import MessageError
from diloco.log.log import Log
from diloco.member import state
from diloco.member.member import Member
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.service import LearnerSettings
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Heartbeat
from diloco.wire.entries import Keyframe, Record
from diloco.wire.subjects import Subjects

FIRST_STEP_TARGET_S, LOST_TARGET, KEYFRAMES_TARGET = 2.0, 0.01, 2.0
KILLED = "learner-1"
LOWEST_PRIORITY = 19
PAUSE_S = 12.0  # between two kills, so that there is a checkpoint
DEADLINE_S = 400.0  # only ends what hangs


class Watch:
    """Messages of a run: learners' heartbeats, and versions as they are appended."""

    def __init__(self, run: RunDirectory, link: NatsTransport) -> None:
        self.run, self.link, self.subjects = run, link, Subjects(run.name)
        self.identity = framing.run_id(run.name, run.settings.digest())
        self.heartbeats: dict[str, list[tuple[float, Heartbeat]]] = {}
        self.records: list[tuple[float, Record]] = []

    async def open(self) -> None:
        await self.link.subscribe(self.subjects.heartbeat(), self._hear_heartbeat)
        await self.link.subscribe(self.subjects.record("*"), self._hear_record)

    async def _hear_heartbeat(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            heartbeat = framing.unpack(message.data, Heartbeat, self.identity)[0]
            if heartbeat.role == "learner":
                self.heartbeats.setdefault(heartbeat.learner, []).append((time.time(), heartbeat))

    async def _hear_record(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            self.records.append((time.time(), framing.unpack(message.data, Record, self.identity)[0]))

    def all_step(self) -> bool:
        heard = [heartbeats[-1][1] for heartbeats in self.heartbeats.values()]
        return len(heard) == self.run.settings.learners and all(p.state == "stepping" and min(p.versions) > 0 for p in heard)

    def others_pace(self) -> float:
        """Return the steps a second of all learners but the killed one, since :meth:`forget`."""
        total = 0.0
        for name, heartbeats in self.heartbeats.items():
            steps: dict[int, float] = {}
            for at_s, heartbeat in heartbeats:
                steps.setdefault(heartbeat.step, at_s)
            if name != KILLED and len(steps) > 1:
                total += (max(steps) - min(steps)) / (steps[max(steps)] - steps[min(steps)])
        return total

    def forget(self) -> None:
        """Forget all messages so far."""
        self.heartbeats.clear()
        self.records.clear()

    def blocked(self, began_s: float) -> float:
        """Share of the others' time without a step in flight since then."""
        blocked_s = busy_s = 0.0
        for name, heartbeats in self.heartbeats.items():
            since = [heartbeat for at_s, heartbeat in heartbeats if at_s >= began_s]
            if name != KILLED and since:
                blocked_s += since[-1].blocked_s - since[0].blocked_s
                busy_s += since[-1].busy_s - since[0].busy_s
        return blocked_s / max(busy_s + blocked_s, 1e-9)


@contextlib.asynccontextmanager
async def training(folder: Path, sets: list[str]) -> AsyncIterator[Watch]:
    """Begin a run, and wait until all learners step.

    Raises:
        SystemExit: it ended before, and its last line is in the message; or they do not within :data:`DEADLINE_S`.
    """
    directory = folder / "run"
    command = ["up", "--run-dir", str(directory), "--tokens", str(10**9), "--plain", *(f"--set={item}" for item in sets)]
    with (folder / "up.txt").open("wb") as output:
        process = await asyncio.create_subprocess_exec(*script.DILOCO, *command, stdout=output, stderr=output)

    def said() -> str:
        return (folder / "up.txt").read_text().strip()

    def goes_on(reached: Callable[[], bool]) -> bool:
        if process.returncode is not None:
            raise SystemExit(f"`diloco up` ended with code {process.returncode}: {said().rpartition(chr(10))[2]}")
        return reached()

    def served() -> bool:
        return (directory / "run.json").exists() and bool(rundir.load(directory).nats_url)

    try:
        await script.until(lambda: goes_on(served), "the server is up", DEADLINE_S)
        run = rundir.load(directory)
        link = await NatsTransport.open(run.nats_url, run.nats_url, "bench", get_logger(), give_up_after_s=60)
        watch = Watch(run, link)
        await watch.open()
        await script.until(lambda: goes_on(watch.all_step), f"all learners step; `diloco up` said: {said()}", DEADLINE_S)
        yield watch
        await link.close()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()


def compiled_at_s(directory: Path, after_s: float) -> float | None:
    """When the learner's newest process had compiled, by its log."""
    lines = (directory / "logs" / f"{KILLED}.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if '"compiled"' in line]
    times = [datetime.fromisoformat(event["time"]).timestamp() for event in events]
    return times[-1] if times and times[-1] > after_s else None


async def kill(watch: Watch, *, checkpoint: bool, nice: bool) -> dict[str, Any]:
    directory = watch.run.path
    watch.forget()
    await asyncio.sleep(PAUSE_S)
    pace = watch.others_pace()
    if not checkpoint:
        for path in state.generations(directory, KILLED):
            path.unlink(missing_ok=True)
    pid_file = directory / "services" / f"{KILLED}.pid"
    killed = script.read_pid(pid_file)
    os.kill(killed, signal.SIGKILL)
    killed_s, before = time.time(), watch.heartbeats[KILLED][-1][1]
    watch.forget()
    if nice:
        await script.until(lambda: script.read_pid(pid_file) not in (0, killed), "it is started again", DEADLINE_S)
        os.setpriority(os.PRIO_PROCESS, script.read_pid(pid_file), LOWEST_PRIORITY)

    def mine() -> list[tuple[float, Heartbeat]]:
        return [(at_s, p) for at_s, p in watch.heartbeats.get(KILLED, ()) if p.incarnation > before.incarnation]

    await script.until(lambda: bool(mine()) and mine()[-1][1].step > mine()[0][1].step, "it steps again", DEADLINE_S)
    compiled_s = compiled_at_s(directory, killed_s)
    assert compiled_s is not None, "a step before its program was compiled"
    stepped_s = next(at_s for at_s, heartbeat in mine() if heartbeat.step > mine()[0][1].step)

    def rounds() -> int | None:
        made: dict[int, int] = {}
        for at_s, record in watch.records:
            if at_s < stepped_s or record.entry != "version":
                continue
            made[record.fragment] = made.get(record.fragment, 0) + 1
            if any(m.learner == KILLED and m.incarnation > before.incarnation for m in record.members):
                return made[record.fragment]
        return None

    await script.until(lambda: rounds() is not None, "its work is merged", DEADLINE_S)
    return {
        "checkpoint": checkpoint,
        "started_s": compiled_s - killed_s,
        "first_step_s": stepped_s - compiled_s,
        "merged_s": time.time() - stepped_s,
        "rounds": rounds(),
        "blocked": watch.blocked(killed_s),
        "steps_lost": 1 - watch.others_pace() / pace,
    }


async def catch_up(watch: Watch, versions: int) -> dict[str, Any]:
    """Load the log as a learner that comes back does, once every fragment has so many versions."""
    await script.until(
        lambda: min(min(heartbeats[-1][1].versions) for heartbeats in watch.heartbeats.values()) >= versions,
        "enough versions",
        DEADLINE_S,
    )
    run_directory = watch.run
    transport = await NatsTransport.open(run_directory.nats_url, run_directory.nats_url, "bench-reader", get_logger(), 60)
    run = await creation.find(transport, run_directory.name, get_logger())
    fragments = await creation.find_map(run)
    store = Log(transport, run.name, run.identity, fragments, run.created)
    keyframes = 0
    for fragment in fragments.fragments:
        stored = await transport.last(store.subjects.log_stream, store.subjects.keyframe(fragment.index))
        assert stored is not None
        keyframes += framing.unpack(stored.data, Keyframe, run.identity)[0].body.size_bytes
    settings = LearnerSettings(name="bench-reader", run=run.name, role="evaluator", nats_url=run_directory.nats_url)
    before, began_s = transport.bytes_in, time.monotonic()
    member = Member(transport, run, fragments, settings, get_logger())
    await member.join()
    wall_s, read = time.monotonic() - began_s, transport.bytes_in - before
    newest = member.versions()
    await member.close()
    await transport.close()
    return {
        "versions": [min(newest), max(newest)],
        "read_bytes": read,
        "keyframe_bytes": keyframes,
        "keyframes": read / keyframes,
        "wall_s": wall_s,
    }


async def measure(kills: int, versions: int, sets: list[str], *, nice: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        async with training(Path(folder), sets) as watch:
            results = [await kill(watch, checkpoint=known, nice=nice) for known in [True] * kills + [False] * kills]
            back = await catch_up(watch, versions)
    targets = {"first_step_s": FIRST_STEP_TARGET_S, "steps_lost": LOST_TARGET, "keyframes": KEYFRAMES_TARGET}
    return {"machine": script.machine(), "kills": results, "catch_up": back, "targets": targets}


def show(result: dict[str, Any]) -> None:
    for checkpoint in (True, False):
        kills = [kill for kill in result["kills"] if kill["checkpoint"] == checkpoint]
        print(f"killed with {'its checkpoint' if checkpoint else 'no checkpoint'}, {len(kills)} times: median, mean, max")
        for what in ("started_s", "first_step_s", "merged_s", "rounds", "blocked", "steps_lost") if kills else ():
            values = [kill[what] for kill in kills]
            print(f"  {what:14} {statistics.median(values):8.3f} {statistics.mean(values):8.3f} {max(values):8.3f}")
    back = result["catch_up"]
    print(
        f"a learner that comes back when the log has {back['versions'][0]} to {back['versions'][1]} versions reads "
        f"{back['read_bytes'] / 1e6:.2f} MB, {back['keyframes']:.2f} times the newest keyframes, in {back['wall_s']:.2f} s"
    )
    targets = result["targets"]
    print(
        f"targets: first step {targets['first_step_s']:g} s, steps lost {targets['steps_lost']:g}, "
        f"keyframes {targets['keyframes']:g}"
    )


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--kills", type=int, default=5, help="with a checkpoint, and as many without")
    parser.add_argument("--versions", type=int, default=100, help="that the log must have before it is read")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, a setting of the run; repeatable")
    parser.add_argument("--nice", action="store_true", help="start the killed learner again with the lowest priority")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.kills, arguments.versions, arguments.set, nice=arguments.nice))
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
