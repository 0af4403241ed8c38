"""Bytes and processor time of each process of a learner of one and of several processes, in the same run.

    python bench/processes.py --processes 1 2 --steps 120

The task is that of ``bench/island.py``, whose step takes a set time and hardly any processor: what is left is the system's
own work. Processor time is counted from the moment at which a process has joined to its end, bytes from its beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
LOOK_S = 0.1
TOKENS = 1024  # of a step of bench/island.py


def main() -> None:
    """Print a line for each process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    asked = parser.parse_args()
    print("processes  process  NATS up    NATS down  others up  others down  CPU ms a step")
    for count in asked.processes:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder) / "run", count, asked)


def measure(directory: Path, count: int, asked: argparse.Namespace) -> None:
    """Run once, and print what each process moved and used."""
    sets = {
        "task.name": "island:make", "task.layers": asked.tensors, "task.width": asked.width, "round.steps": 16,
        "fragments.count": 8, "inner.optimizer": "adamw",
    }  # fmt: skip
    command = [str(Path(sys.executable).parent / "diloco"), "up", "--json", "--learners", "1", "--shards", "1"]
    command += ["--processes-per-learner", str(count), "--devices-per-learner", str(max(2, count))]
    command += ["--tokens", str(asked.steps * TOKENS), "--run-dir", str(directory)]
    command += [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "BENCH_STEP_S": str(asked.step_s)}
    names = ["learner-0", *(f"learner-0-p{index}" for index in range(1, count))]
    joined_s, cpu_s = dict[str, float](), dict[str, float]()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as up:
        while up.poll() is None:
            for name in names:
                used_s = cpu_of(directory, name)
                if used_s is not None:
                    cpu_s[name] = used_s
                    if name not in joined_s and events(directory, name, "joined"):
                        joined_s[name] = used_s
            time.sleep(LOOK_S)
    report = json.loads((directory / "report.json").read_text())["learners"]["learner-0"]
    for index, name in enumerate(names):
        moved = next(iter(events(directory, name, "island_left")), report)
        per_step_ms = 1000 * (cpu_s[name] - joined_s[name]) / report["steps"]
        columns = (moved.get(key, 0) for key in ("processes_bytes_up", "processes_bytes_down"))
        between = "  ".join(f"{value / 1e6:6.2f} MB" for value in columns)
        nats = f"{moved['bytes_up'] / 1e6:6.2f} MB  {moved['bytes_down'] / 1e6:6.2f} MB"
        print(f"{count:9}  {index:7}  {nats}  {between}  {per_step_ms:8.1f}", flush=True)


def cpu_of(directory: Path, name: str) -> float | None:
    """Return the processor seconds of a service so far; None if it is not there."""
    try:
        pid = (directory / "services" / f"{name}.pid").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICK


def events(directory: Path, name: str, event: str) -> list[dict[str, Any]]:
    """Return a service's events of one name."""
    file = directory / "logs" / f"{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [found for found in map(json.loads, lines) if found["event"] == event]


if __name__ == "__main__":
    main()
