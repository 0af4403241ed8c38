"""``diloco up`` of a bench: begun with settings, watched by its messages, logs and pid files, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from diloco.errors import MessageError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco.wire.entries import Record
from diloco.wire.subjects import Subjects

DILOCO = (sys.executable, "-c", "from diloco_ops.cli import main; main()")  # also where no script lies beside the interpreter
BENCH = Path(__file__).parents[1]
ENDLESS = 10**12  # tokens: a budget that no run here reaches
ASLEEP_TOKENS = 1024  # of a step of harness/asleep.py
LOOK_S = 0.02  # between two looks whether something has come about
PATIENCE_S = 600.0  # only ends what hangs


def asleep(step_s: float) -> dict[str, str]:
    """Return the variables with which services find the task of ``harness/asleep.py``, whose steps sleep so long."""
    path = os.pathsep.join(filter(None, [str(BENCH), os.environ.get("PYTHONPATH")]))
    return {"BENCH_STEP_S": str(step_s), "PYTHONPATH": path}


class Up:
    """A ``diloco up`` that is under way; ``patience_s``: nothing that is waited for takes longer."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes], patience_s: float) -> None:
        self.directory, self.process, self.patience_s = directory, process, patience_s
        self._status: dict[str, Any] = {}

    def pid(self, service: str) -> int:
        """Return the number of a service's process; 0 where there is none, or while its file is being written."""
        return read_pid(self.directory / "services" / f"{service}.pid")

    def signal(self, number: signal.Signals, *services: str) -> None:
        """Send a signal to processes of these services."""
        for service in services:
            os.kill(int((self.directory / "services" / f"{service}.pid").read_text()), number)

    def events(self, service: str, *names: str) -> list[dict[str, Any]]:
        """Return the events of a service, of these names if any are given; ``time`` is a :class:`datetime`."""
        return events(self.directory, service, *names)

    def status(self) -> dict[str, Any]:
        """Return the last status that is known; empty before there is one."""
        with contextlib.suppress(OSError, ValueError):  # it is being written
            self._status = json.loads((self.directory / "status.json").read_text())
        return self._status

    def until(self, reached: Callable[[], object], what: str) -> float:
        """Wait until something is so, and return the seconds that it took.

        Raises:
            SystemExit: the run ended before, or it took too long; the message says ``what`` was waited for.
        """
        began_s = time.monotonic()
        while not self._is(reached, what, began_s):
            time.sleep(LOOK_S)
        return time.monotonic() - began_s

    async def reach(self, reached: Callable[[], object], what: str) -> float:
        """Wait as :meth:`until` does, while other tasks go on."""
        began_s = time.monotonic()
        while not self._is(reached, what, began_s):
            await asyncio.sleep(LOOK_S)
        return time.monotonic() - began_s

    def _is(self, reached: Callable[[], object], what: str, began_s: float) -> bool:
        if reached():
            return True
        if self.process.poll() is not None:
            raise SystemExit(f"{self.directory}: `diloco up` ended with {self.process.returncode} before {what}: {self.said()}")
        if time.monotonic() - began_s > self.patience_s:
            raise SystemExit(f"{self.directory}: {what} did not come about within {self.patience_s:g} s: {self.said()}")
        return False

    def said(self) -> str:
        """Return the last line that it has printed."""
        return self.directory.with_suffix(".out").read_text().strip().rpartition("\n")[2]

    def finish(self, used: Callable[[], int], more: int) -> int:
        """Have the run's budget end by ``more`` tokens behind those ``used``, or later; wait for its end, and return its code.

        Raises:
            SystemExit: the run ended before.
        """
        code = 1
        while code:  # it begins later than so many steps take, where the machine is busy
            if self.process.poll() is not None:
                raise SystemExit(f"{self.directory}: the run ended before its budget could be set")
            more *= 2
            command = [*DILOCO, "set", str(self.directory), f"tokens={used() + more}"]
            code = subprocess.run(command, capture_output=True, check=False).returncode
        return self.process.wait()

    def add_learner(self, name: str, like: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Begin a learner of one process beside those of ``diloco up``, with the settings of one of them."""
        folder = self.directory / "services"
        own = tomllib.loads((folder / f"{like}.toml").read_text())
        config = folder / f"{name}.toml"
        config.write_text(tomli_w.dumps({key: own[key] for key in ("nats_url", "run", "state_dir")} | {"name": name}))
        command = [sys.executable, "-m", "diloco_learner", "--config", str(config)]
        process = subprocess.Popen(command, env=dict(environment), stderr=subprocess.DEVNULL)
        (folder / f"{name}.pid").write_text(str(process.pid))
        return process


def read_pid(file: Path) -> int:
    """Return the process id in a service's file; 0 where there is none, or while it is being written."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def events(directory: Path, service: str, *names: str) -> list[dict[str, Any]]:
    """Return the events that a service of a run's directory has logged, of these names if any are given."""
    file = directory / "logs" / f"{service}.jsonl"
    found: list[dict[str, Any]] = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        if not names or any(name.encode() in line for name in names):  # most lines are others: parsing them takes long
            event = json.loads(line)
            if not names or event["event"] in names:
                found.append(event | {"time": datetime.fromisoformat(event["time"])})
    return found


@contextmanager
def up(
    directory: Path,
    *options: str,
    tokens: int | None = ENDLESS,
    sets: Mapping[str, Any] | Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
    command: str = "up",
) -> Iterator[Up]:
    """Run ``diloco up`` with options, settings of the run, and variables besides this process's; end it at the end.

    ``command`` is ``serve`` for the services alone.

    What it prints is in a file beside the directory.
    """
    items = [f"{name}={value}" for name, value in sets.items()] if isinstance(sets, Mapping) else sets
    line = [*DILOCO, command, "--plain", "--run-dir", str(directory), *options]
    line += [] if tokens is None else ["--tokens", str(tokens)]
    line += [f"--set={item}" for item in items]
    with directory.with_suffix(".out").open("wb") as out:
        process = subprocess.Popen(line, env=os.environ | dict(environment or {}), stdout=out, stderr=out)
    try:
        yield Up(directory, process, patience_s)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait()


def asked(*command: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a command of ``diloco`` says as JSON.

    Raises:
        SystemExit: it says none.
    """
    done = subprocess.run(
        [*DILOCO, *command, "--json"], capture_output=True, text=True, env=os.environ | dict(environment or {}), check=False
    )
    try:
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip() or "nothing said").rpartition("\n")[2]
        raise SystemExit(f"diloco {command[0]}: code {done.returncode}: {last}") from None
    return said


class Watch:
    """Messages of a run: heartbeats of its learners and syncers, and versions as they are appended, each with its time."""

    def __init__(self, run: RunDirectory, link: NatsTransport) -> None:
        self.run, self.link, self.subjects = run, link, Subjects(run.name)
        self.identity = framing.run_id(run.name, run.settings.digest())
        self.heartbeats: dict[str, list[tuple[float, Heartbeat]]] = {}
        self.syncers: dict[str, list[tuple[float, ShardHeartbeat]]] = {}
        self.records: list[tuple[float, Record]] = []

    async def open(self) -> None:
        await self.link.subscribe(self.subjects.heartbeat(), self._hear_heartbeat)
        await self.link.subscribe(self.subjects.shard(), self._hear_shard)
        await self.link.serve(self.subjects.record("*"), self._hear_record)  # at the server that has the log

    async def _hear_heartbeat(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            heartbeat = framing.unpack(message.data, Heartbeat, self.identity)[0]
            if heartbeat.role == "learner":
                self.heartbeats.setdefault(heartbeat.learner, []).append((time.time(), heartbeat))

    async def _hear_shard(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            heartbeat = framing.unpack(message.data, ShardHeartbeat, self.identity)[0]
            self.syncers.setdefault(heartbeat.syncer, []).append((time.time(), heartbeat))

    async def _hear_record(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            self.records.append((time.time(), framing.unpack(message.data, Record, self.identity)[0]))

    def last(self, learner: str) -> Heartbeat:
        """Return a learner's newest heartbeat."""
        return self.heartbeats[learner][-1][1]

    def learners(self) -> list[Heartbeat]:
        """Return the newest heartbeat of each learner."""
        return [heard[-1][1] for heard in list(self.heartbeats.values())]

    def tokens(self) -> int:
        """Return the tokens that all learners have used."""
        return sum(heartbeat.tokens for heartbeat in self.learners())

    def step_ends_s(self, learner: str, since_s: float = 0.0) -> dict[int, float]:
        """Return when a learner's steps ended since then, by their number; Unix time."""
        ends: dict[int, float] = {}
        for at_s, heartbeat in self.heartbeats.get(learner, ()):
            if at_s >= since_s:
                ends.setdefault(heartbeat.step, at_s)
        return ends

    def pace(self, learner: str, since_s: float = 0.0) -> float:
        """Return the steps a second of a learner since then; 0 where no two of them have ended."""
        ends = self.step_ends_s(learner, since_s)
        return (max(ends) - min(ends)) / (ends[max(ends)] - ends[min(ends)]) if len(ends) > 1 else 0.0

    def all_step(self) -> bool:
        """Whether all learners step, and have applied a version of each fragment."""
        heard = self.learners()
        return len(heard) == self.run.settings.learners and all(p.state == "stepping" and min(p.versions) > 0 for p in heard)

    def forget(self) -> None:
        """Forget learners' heartbeats and versions so far."""
        self.heartbeats.clear()
        self.records.clear()


async def watching(running: Up) -> Watch:
    """Return a watch of a run's messages, once its servers are up."""

    def served() -> bool:
        if not (running.directory / "run.json").exists():
            return False
        run = rundir.load(running.directory)
        return bool(run.nats_bulk_url if run.settings.regions.names else run.nats_url)  # empty until the servers are up

    await running.reach(served, "its server is up")
    run = rundir.load(running.directory)
    bulk = run.nats_bulk_url or run.nats_url
    watch = Watch(run, await NatsTransport.open(run.nats_url, bulk, "bench", get_logger(), give_up_after_s=60))
    await watch.open()
    return watch


@contextmanager
def watched(running: Up) -> Iterator[Watch]:
    """Watch a run from a thread of its own."""
    from diloco_learner.run.process import LoopThread

    loop = LoopThread()
    try:
        yield loop.run(watching(running), lambda: False)
    finally:
        loop.close()
