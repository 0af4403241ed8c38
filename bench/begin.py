"""How soon the learners of a run begin, and how far apart: from ``diloco up`` to the end of each one's first step.

    python bench/begin.py                       # compiled programs are in the cache: a run before has compiled them
    python bench/begin.py --cold                # an empty cache
    python bench/begin.py --loops 8             # beside so many busy loops

``compiled`` is when a learner has its programs, and ``CPU`` the processor time of its process by then, imports included;
``first step`` is when its first step had ended, by its tape. ``versions`` is the share of the run's versions that it is in.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import script

from diloco.process.tape import load_all
from diloco_ops.run_reader import opened

UP = [sys.executable, "-c", "from diloco_ops.cli import main; main()", "up"]


def train(home: Path, directory: Path, tokens: int, loops: int) -> float:
    """Do a run with the cache of this home, beside busy loops; return its wall time in seconds."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    began_s = time.monotonic()
    try:
        command = [*UP, "--run-dir", str(directory), "--tokens", str(tokens), "--plain"]
        subprocess.run(command, check=True, env=os.environ | {"HOME": str(home)}, stdout=subprocess.DEVNULL)
        return time.monotonic() - began_s
    finally:
        for process in busy:
            process.kill()
            process.wait()


async def first_steps_s(directory: Path) -> dict[str, float]:
    """Return by learner when its first step had ended, by the wall clock in seconds."""
    async with opened(directory) as reader:
        tapes, _ = load_all(directory, reader.run.identity)
    first = {tape.name: tape.lives()[0] for tape in tapes if tape.lives()}
    return {name: (life.start.at_ms + life.step_ms[0]) / 1000 for name, life in sorted(first.items()) if life.step_ms}


def compiled(directory: Path, name: str) -> tuple[float, float]:
    """Return when a learner had its programs, by the wall clock, and its process's CPU time by then; seconds."""
    lines = (directory / "logs" / f"{name}.jsonl").read_text().splitlines()
    event = next(json.loads(line) for line in lines if '"compiled"' in line)
    return datetime.fromisoformat(event["time"]).timestamp(), event["process_cpu_s"]


def measure(tokens: int, loops: int, *, cold: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        home, directory = Path(folder), Path(folder, "run")
        if not cold:
            train(home, home / "before", 1, 0)
        load, began_s = os.getloadavg()[0], time.time()
        wall_s = train(home, directory, tokens, loops)
        report = json.loads((directory / "report.json").read_text())
        learners = {}
        for name, first_s in asyncio.run(first_steps_s(directory)).items():
            compiled_s, cpu_s = compiled(directory, name)
            learners[name] = {
                "compiled_s": compiled_s - began_s,
                "cpu_s": cpu_s,
                "first_step_s": first_s - began_s,
                "versions": report["learners"][name]["rounds_merged"] / report["versions"],
            }
        return {"machine": script.machine(), "load": [load, os.getloadavg()[0]], "wall_s": wall_s, "learners": learners}


def show(result: dict[str, Any]) -> None:
    print(f"load {result['load'][0]:.0f} before and {result['load'][1]:.0f} after; the run took {result['wall_s']:.1f} s")
    for name, learner in result["learners"].items():
        print(
            f"  {name}: compiled {learner['compiled_s']:6.1f} s (CPU {learner['cpu_s']:.1f} s), first step "
            f"{learner['first_step_s']:6.1f} s, versions {100 * learner['versions']:.1f} %"
        )
    firsts = [learner["first_step_s"] for learner in result["learners"].values()]
    print(f"first steps end {max(firsts) - min(firsts):.2f} s apart")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=150_000)
    parser.add_argument("--loops", type=int, default=0, help="busy processes besides")
    parser.add_argument("--cold", action="store_true", help="begin with an empty cache")
    arguments = parser.parse_args()
    result = measure(arguments.tokens, arguments.loops, cold=arguments.cold)
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
