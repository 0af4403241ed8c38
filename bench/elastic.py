"""How long a learner of several processes takes to go on without one that is lost, and to take it back.

    python bench/elastic.py --processes 2 3

Its last process is killed and held back, the others go on, and it is let go again. The seconds are by the leader's log: from
the kill, or from when the lost process knocks, to each event of the new generation, of which `checkpoint_restored` is the last
before its first step. Programs come from a cache of their own: the same was done once before.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from up import Up, up

LAST = "checkpoint_restored"
EVENTS = (
    "process_arrived", "island_ended", "state_kept", "island_regroups", "processes_met", "island_ready", "compiled", "joined",
    LAST,
)  # fmt: skip
TOKENS = 16 * 12  # of a step
SETS = {
    "task.layers": 1, "task.width": 64, "task.heads": 2, "task.context": 16, "task.batch": 12, "fragments.count": 4,
    "round.steps": 8, "inner.optimizer": "adamw", "liveness.heartbeat_s": 0.2,
}  # fmt: skip
PATIENCE_S = 300.0


class Lost:
    """A learner of so many processes whose last one is killed, and held back for a while."""

    def __init__(self, running: Up, count: int) -> None:
        self.running, self.last = running, f"learner-0-p{count - 1}"

    def trained(self) -> None:
        """Wait until a checkpoint is some steps old."""
        saved = self.running.directory / "checkpoints" / "learner-0.safetensors"
        self.running.until(saved.exists, "the first checkpoint")
        began_s = time.time()
        self.running.until(lambda: saved.stat().st_mtime > began_s, "the next checkpoint")

    def events(self, since: datetime) -> list[dict[str, Any]]:
        """Return the leader's events from a time on."""
        return [event for event in self.running.events("learner-0", *EVENTS) if event["time"] >= since]

    def restored(self, since: datetime) -> None:
        """Wait until a generation has begun from a checkpoint since."""
        self.running.until(lambda: any(event["event"] == LAST for event in self.events(since)), "a new generation")

    def lose(self) -> datetime:
        """Kill the last process, and hold the one that is begun in its place; return when."""
        killed, at = self.running.pid(self.last), datetime.now(UTC)
        os.kill(killed, signal.SIGKILL)
        self.running.until(lambda: self.running.pid(self.last) != killed, "a process in the killed one's place")
        os.kill(self.running.pid(self.last), signal.SIGSTOP)
        return at

    def let_go(self) -> datetime:
        """Let the process go that was held; return when it knocks."""
        at = datetime.now(UTC)
        os.kill(self.running.pid(self.last), signal.SIGCONT)
        self.restored(at)
        knocked: datetime = self.events(at)[0]["time"]
        return knocked

    def tell(self, what: str, since: datetime) -> None:
        """Print the leader's events, in seconds from the first."""
        said = [f"{event['event']} {(event['time'] - since).total_seconds():.1f}" for event in self.events(since)]
        print(f"{what}: {', '.join(said)}", flush=True)


def measure(directory: Path, count: int, cache: Path, *, say: bool) -> None:
    """Lose a process and take it back; ``say`` how long that took."""
    options = ["--learners", "1", "--shards", "1", "--tokens", str(10**6 * TOKENS), "--devices-per-learner", str(count)]
    options += ["--processes-per-learner", str(count), "--least-processes", str(count - 1)]
    with up(directory, options, SETS, {"DILOCO_CACHE_DIR": str(cache), "DILOCO_CHECKPOINT_S": "2"}, PATIENCE_S) as running:
        learner = Lost(running, count)
        learner.trained()
        lost = learner.lose()
        learner.restored(lost)
        learner.trained()
        if say:
            learner.tell(f"{count} to {count - 1}, from the kill", lost)
        knocked = learner.let_go()
        if say:
            learner.tell(f"{count - 1} to {count}, from when it knocks", knocked)


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
