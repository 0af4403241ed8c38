"""How long a learner of several processes takes to go on without one that is lost, and to take it back.

    python bench/elastic.py --processes 2 3

Its last process is killed and held back, the others go on, and it is let go again. The seconds are by the leader's log: from
the kill, or from when the lost process knocks, to each event of the new generation, of which `checkpoint_restored` is the last
before its first step. Programs come from a cache of their own: the same was done once before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EVENTS = (
    "process_arrived", "island_ended", "state_kept", "island_regroups", "processes_met", "island_ready", "compiled", "joined",
)  # fmt: skip
LAST = "checkpoint_restored"
TOKENS = 16 * 12  # of a step
LOOK_S = 0.05
PATIENCE_S = 300.0


class Run:
    """``diloco up`` with one learner of so many processes."""

    def __init__(self, directory: Path, count: int, cache: Path) -> None:
        self.directory, self.last = directory, f"learner-0-p{count - 1}"
        sets = {
            "task.layers": 1, "task.width": 64, "task.heads": 2, "task.context": 16, "task.batch": 12, "fragments.count": 4,
            "round.steps": 8, "inner.optimizer": "adamw", "liveness.heartbeat_s": 0.2,
        }  # fmt: skip
        command = [str(Path(sys.executable).parent / "diloco"), "up", "--json", "--learners", "1", "--shards", "1"]
        command += ["--processes-per-learner", str(count), "--least-processes", str(count - 1)]
        command += ["--devices-per-learner", str(count), "--tokens", str(10**6 * TOKENS), "--run-dir", str(directory)]
        command += [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
        own = {"DILOCO_CACHE_DIR": str(cache), "DILOCO_CHECKPOINT_S": "2"}
        self.process = subprocess.Popen(command, env=os.environ | own, stdout=subprocess.DEVNULL)

    def events(self, since: datetime) -> list[tuple[datetime, dict[str, Any]]]:
        """Return the leader's events from a time on."""
        file = self.directory / "logs" / "learner-0.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        timed = [(datetime.fromisoformat(line["time"]), line) for line in lines]
        return [(at, line) for at, line in timed if at >= since]

    def until(self, reached: Callable[[], object]) -> None:
        """Wait until something is so."""
        over_s = time.monotonic() + PATIENCE_S
        while not reached():
            if self.process.poll() is not None or time.monotonic() > over_s:
                raise SystemExit(f"{self.directory}: the run ended, or nothing happened for {PATIENCE_S:g} s")
            time.sleep(LOOK_S)

    def trained(self) -> None:
        """Wait until a checkpoint is some steps old."""
        saved = self.directory / "checkpoints" / "learner-0.safetensors"
        self.until(saved.exists)
        began_s = time.time()
        self.until(lambda: saved.stat().st_mtime > began_s)

    def pid(self) -> int:
        """Return the number of the learner's last process."""
        return int((self.directory / "services" / f"{self.last}.pid").read_text())

    def restored(self, since: datetime) -> bool:
        """Whether a generation has begun from a checkpoint since."""
        return any(line["event"] == LAST for _, line in self.events(since))

    def lose(self) -> datetime:
        """Kill the last process, and hold the one that is begun in its place; return when."""
        killed, at = self.pid(), datetime.now(UTC)
        os.kill(killed, signal.SIGKILL)
        self.until(lambda: self.pid() != killed)
        os.kill(self.pid(), signal.SIGSTOP)
        return at

    def tell(self, what: str, since: datetime) -> None:
        """Print the leader's events, in seconds from the first."""
        said = []
        for at, line in self.events(since):
            if line["event"] in (*EVENTS, LAST):
                said.append(f"{line['event']} {(at - since).total_seconds():.1f}")
        print(f"{what}: {', '.join(said)}", flush=True)


def measure(directory: Path, count: int, cache: Path, *, say: bool) -> None:
    """Lose a process and take it back; ``say`` how long that took."""
    run = Run(directory, count, cache)
    try:
        run.trained()
        lost = run.lose()
        run.until(lambda: run.restored(lost))
        run.trained()
        if say:
            run.tell(f"{count} to {count - 1}, from the kill", lost)
        let_go = datetime.now(UTC)
        os.kill(run.pid(), signal.SIGCONT)
        run.until(lambda: run.restored(let_go))
        if say:
            run.tell(f"{count - 1} to {count}, from when it knocks", run.events(let_go)[0][0])
    finally:
        run.process.send_signal(signal.SIGINT)
        run.process.wait()


def main() -> None:
    """Print a line for each change, of the second time that it is made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    for count in parser.parse_args().processes:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("first", "second"):
                measure(Path(folder) / name, count, Path(folder) / "cache", say=name == "second")


if __name__ == "__main__":
    main()
