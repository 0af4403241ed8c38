"""Bytes and processor time of each process of a learner of one and of several processes, of rounds alone.

    python bench/processes.py --processes 1 2 --steps 120

The task is that of ``bench/island.py``, whose step takes a set time. Its arithmetic and its collectives still take processor
time, so each learner trains twice: with rounds, and with an interval that is longer than the run, so that there is none.
Printed is the difference, without bytes and time of founding and joining. Processor time is counted from the moment at which
a process has joined to its end, bytes from its beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import script
from up import events, up

TICK = os.sysconf("SC_CLK_TCK")
LOOK_S = 0.1
TOKENS = 1024  # of a step of bench/island.py
NEVER = 100_000  # steps of a round that does not come


def main() -> None:
    """Print a line for each process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--interval", type=int, default=16, help="steps of a round")
    parser.add_argument("--turns", type=int, default=1, help="pairs of runs; their medians are shown")
    asked = parser.parse_args()
    print(
        f"{asked.tensors * asked.width**2 / 1e6:.2f}M parameters, a round each {asked.interval} steps; a step, of rounds alone:"
    )
    print("processes  process  NATS up    NATS down  others up  others down  CPU")
    for count in asked.processes:
        pairs: list[list[list[float]]] = []
        for _ in range(asked.turns):
            with_rounds, without = (measure(count, asked, steps) for steps in (asked.interval, NEVER))
            pairs.append([[a - b for a, b in zip(*its, strict=True)] for its in zip(with_rounds, without, strict=True)])
        for index, turns in enumerate(zip(*pairs, strict=True)):
            *moved, cpu_ms = map(statistics.median, zip(*turns, strict=True))
            columns = "  ".join(f"{size_bytes / 1e3:6.1f} kB" for size_bytes in moved)
            print(f"{count:9}  {index:7}  {columns}  {cpu_ms:8.1f} ms", flush=True)


def measure(count: int, asked: argparse.Namespace, interval: int) -> list[list[float]]:
    """Run once, and return for each process bytes up and down, to and from others, and processor time in ms, a step."""
    sets = {
        "task.name": "island:make", "task.layers": asked.tensors, "task.width": asked.width, "round.steps": interval,
        "fragments.count": 8, "inner.optimizer": "adamw",
    }  # fmt: skip
    options = ["--learners", "1", "--shards", "1", "--tokens", str(asked.steps * TOKENS)]
    options += ["--processes-per-learner", str(count), "--devices-per-learner", str(max(2, count))]
    own = {"PYTHONPATH": str(Path(__file__).parent), "BENCH_STEP_S": str(asked.step_s)}
    names = ["learner-0", *(f"learner-0-p{index}" for index in range(1, count))]
    joined_s, cpu_s = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        with up(directory, options, sets, own) as running:
            while running.process.poll() is None:
                for name in names:
                    used_s = cpu_of(script.read_pid(directory / "services" / f"{name}.pid"))
                    if used_s is not None:
                        cpu_s[name] = used_s
                        if name not in joined_s and running.events(name, "joined"):
                            joined_s[name] = used_s
                time.sleep(LOOK_S)
        report = json.loads((directory / "report.json").read_text())["learners"]["learner-0"]
        lines: list[list[float]] = []
        for name in names:
            its = next(iter(events(directory, name, "island_left")), report)
            moved = [its.get(key, 0) for key in ("bytes_up", "bytes_down", "processes_bytes_up", "processes_bytes_down")]
            lines.append([value / report["steps"] for value in (*moved, 1000 * (cpu_s[name] - joined_s[name]))])
        return lines


def cpu_of(pid: int) -> float | None:
    """Return the processor seconds of a process so far; None if it is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICK


if __name__ == "__main__":
    main()
