"""How long fragments are without an owner: from a syncer's SIGKILL or SIGSTOP to the first record of the one that takes over.

    python bench/takeover.py                        # 10 kills and 10 freezes of a run of the default model
    python bench/takeover.py --kills 3 --freezes 0 --json

It begins a run with ``diloco up`` (its defaults: four learners, two shards; and two standbys), waits until every fragment has
versions, and then kills or freezes the owner of most fragments, time and again. Measured are the first and the last takeover
record of its fragments, as they pass on their way into the log, and the first version that a new owner makes. `up` starts
killed syncers again; frozen ones go on after ``FROZEN_S``, and find that they own nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import script

from diloco.errors import MessageError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.service import rundir
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import ShardHeartbeat
from diloco.wire.entries import Record
from diloco.wire.subjects import Subjects

TARGET_S = 3.0
FROZEN_S = 5.0
PAUSE_S = 5.0  # between two failures, so that a syncer that was started again is there
DEADLINE_S = 120.0


class Watch:
    """Messages of a run: records as they are appended, and syncers' heartbeats."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records: list[tuple[float, Record]] = []
        self.owned: dict[str, tuple[float, list[int]]] = {}

    async def open(self) -> NatsTransport:
        await script.until(self._begun, "the run's server is up", DEADLINE_S)
        run = rundir.load(self.directory)
        self.identity = framing.run_id(run.name, run.settings.digest())
        link = await NatsTransport.open(run.nats_url, run.nats_url, "bench", get_logger(), give_up_after_s=60)
        await link.subscribe(Subjects(run.name).record("*"), self._hear_record)
        await link.subscribe(Subjects(run.name).shard(), self._hear_heartbeat)
        self.fragments = run.settings.fragments.count
        return link

    def _begun(self) -> bool:
        return (self.directory / "run.json").exists() and bool(rundir.load(self.directory).nats_url)

    async def _hear_record(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            self.records.append((time.monotonic(), framing.unpack(message.data, Record, self.identity)[0]))

    async def _hear_heartbeat(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            heartbeat = framing.unpack(message.data, ShardHeartbeat, self.identity)[0]
            self.owned[heartbeat.syncer] = (time.monotonic(), heartbeat.fragments)

    def alive(self) -> dict[str, list[int]]:
        """Fragments by syncer, of those heard in the last second."""
        now_s = time.monotonic()
        return {name: fragments for name, (at_s, fragments) in self.owned.items() if now_s - at_s < 1.0}

    def settled(self) -> bool:
        """Whether every fragment has one owner, and there is a standby."""
        owned = self.alive()
        everything = sorted(fragment for fragments in owned.values() for fragment in fragments)
        return everything == list(range(self.fragments)) and not all(owned.values())


@contextlib.asynccontextmanager
async def training(folder: Path, standbys: int) -> AsyncIterator[Watch]:
    """Begin a run, and wait until it has versions of every fragment."""
    directory = folder / "run"
    command = ["up", "--run-dir", str(directory), "--standbys", str(standbys), "--tokens", str(10**9), "--plain"]
    with (folder / "up.txt").open("wb") as output:
        process = await asyncio.create_subprocess_exec(*script.DILOCO, *command, stdout=output, stderr=output)
    link = None
    try:
        watch = Watch(directory)
        link = await watch.open()
        versions: set[int] = set()

        def begun() -> bool:
            versions.update(record.fragment for _, record in watch.records if record.entry == "version")
            return len(versions) == watch.fragments and watch.settled()

        await script.until(
            begun, f"every fragment has a version; `diloco up` said: {(folder / 'up.txt').read_text()}", DEADLINE_S
        )
        yield watch
    finally:
        if link is not None:
            await link.close()
        process.send_signal(signal.SIGINT)
        await process.wait()


async def fail(watch: Watch, how: signal.Signals) -> dict[str, Any]:
    """Kill or freeze the owner of most fragments; seconds until others have them."""
    await script.until(watch.settled, "every fragment has an owner, and one stands by", DEADLINE_S)
    name, lost = max(watch.alive().items(), key=lambda item: len(item[1]))
    pid = int((watch.directory / "services" / f"{name}.pid").read_text())
    watch.records.clear()
    os.kill(pid, how)
    began_s = time.monotonic()

    def seen(entry: str) -> dict[int, float]:
        found: dict[int, float] = {}
        for at_s, record in watch.records:
            if record.entry == entry and record.syncer != name and record.fragment in lost:
                found.setdefault(record.fragment, at_s - began_s)
        return found

    await script.until(
        lambda: len(seen("takeover")) == len(lost) and bool(seen("version")), f"others take {name}'s fragments over", DEADLINE_S
    )
    if how == signal.SIGSTOP:
        await asyncio.sleep(max(0.0, began_s + FROZEN_S - time.monotonic()))
        os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(PAUSE_S)
    taken = seen("takeover").values()
    return {
        "how": how.name,
        "syncer": name,
        "fragments": len(lost),
        "first_record_s": min(taken),
        "last_record_s": max(taken),
        "first_version_s": min(seen("version").values()),
    }


async def measure(kills: int, freezes: int, standbys: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        async with training(Path(folder), standbys) as watch:
            failures = [await fail(watch, signal.SIGKILL) for _ in range(kills)]
            failures += [await fail(watch, signal.SIGSTOP) for _ in range(freezes)]
    return {"machine": script.machine(), "failures": failures, "target_s": TARGET_S}


def show(result: dict[str, Any]) -> None:
    print("seconds from the failure of an owner to the records of who takes its fragments over")
    for how in ("SIGKILL", "SIGSTOP"):
        failures = [failure for failure in result["failures"] if failure["how"] == how]
        for what in ("first_record_s", "last_record_s", "first_version_s") if failures else ():
            values = [failure[what] for failure in failures]
            print(
                f"  {how} {what:16} min {min(values):5.2f}   median {statistics.median(values):5.2f}   max {max(values):5.2f}"
                f"   ({len(values)} times)"
            )
    print(f"  target: first record within {result['target_s']:g} s")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--freezes", type=int, default=10)
    parser.add_argument("--standbys", type=int, default=2)
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.kills, arguments.freezes, arguments.standbys))
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
