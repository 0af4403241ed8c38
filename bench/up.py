"""``diloco up`` of a bench: begun with settings, watched by the logs and pid files of its services, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from restart import Watch
from script import DILOCO

from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.service import rundir

LOOK_S = 0.05  # between two looks whether something has come about
PATIENCE_S = 600.0  # only ends what hangs


class Up:
    """A ``diloco up`` that is under way; ``patience_s``: nothing that is waited for takes longer."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes], patience_s: float) -> None:
        self.directory, self.process, self.patience_s = directory, process, patience_s

    def pid(self, service: str) -> int:
        """Return the number of a service's process."""
        return int((self.directory / "services" / f"{service}.pid").read_text())

    def events(self, service: str, *names: str) -> list[dict[str, Any]]:
        """Return the events of a service, of these names if any are given; ``time`` is a :class:`datetime`."""
        return events(self.directory, service, *names)

    def until(self, reached: Callable[[], object], what: str) -> float:
        """Wait until something is so, and return the seconds that it took.

        Raises:
            SystemExit: the run ended before, or it took too long; the message says ``what`` was waited for.
        """
        began_s = time.monotonic()
        while not reached():
            if self.process.poll() is not None:
                raise SystemExit(f"{self.directory}: the run ended before {what}")
            if time.monotonic() - began_s > self.patience_s:
                raise SystemExit(f"{self.directory}: {what} did not come about within {self.patience_s:g} s")
            time.sleep(LOOK_S)
        return time.monotonic() - began_s

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
    options: Sequence[str],
    sets: Mapping[str, Any],
    environment: Mapping[str, str],
    patience_s: float = PATIENCE_S,
) -> Iterator[Up]:
    """Run ``diloco up`` with options, settings of the run, and variables besides this process's; end it at the end."""
    command = [*DILOCO, "up", "--json", "--run-dir", str(directory), *options]
    command += [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    process = subprocess.Popen(command, env=os.environ | dict(environment), stdout=subprocess.DEVNULL)
    try:
        yield Up(directory, process, patience_s)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait()


async def watching(running: Up) -> Watch:
    """Return a watch of a run's heartbeats and versions, once its server is up."""
    file = running.directory / "run.json"

    def served() -> bool:
        return file.exists() and bool(rundir.load(running.directory).nats_url)  # empty until the server is up

    await asyncio.to_thread(running.until, served, "its server is up")
    run = rundir.load(running.directory)
    watch = Watch(run, await NatsTransport.open(run.nats_url, run.nats_url, "bench", get_logger(), give_up_after_s=60))
    await watch.open()
    return watch
