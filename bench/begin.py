"""How soon the learners of a run begin, and how far apart: from ``diloco up`` to the end of each one's first step.

    python bench/begin.py                       # compiled programs are in the cache: a run before has compiled them
    python bench/begin.py --cold                # an empty cache
    python bench/begin.py --runs 3              # so many at once
    python bench/begin.py --loops 8             # beside so many busy loops
    python bench/begin.py --cold --template gpt # diloco init and python train.py of its project, from an empty folder

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
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import script

from diloco.process.tape import load_all
from diloco_ops.reading.run_reader import opened


def train(home: Path, directories: list[Path], tokens: int, loops: int) -> None:
    """Do runs at once with the cache of this home, beside busy loops."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    environment = os.environ | {"HOME": str(home)}
    commands = [
        [*script.DILOCO, "up", "--run-dir", str(directory), "--tokens", str(tokens), "--plain"] for directory in directories
    ]
    try:
        ups = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for command in commands]
        codes = [up.wait() for up in ups]
        if any(codes):
            raise SystemExit("bench/begin.py: diloco up failed")
    finally:
        for process in busy:
            process.kill()
            process.wait()


def train_template(home: Path, template: str) -> Path:
    """Make a project with the caches of this home, that of the kernels too, and train it; return its run's directory."""
    environment = os.environ | {"HOME": str(home), "NUMBA_CACHE_DIR": str(home / "kernels")}
    folder = home / f"project-{time.monotonic_ns()}"
    init = [*script.DILOCO, "init", str(folder), "--template", template]
    for command, place in ((init, home), ([sys.executable, "train.py"], folder)):
        subprocess.run(command, cwd=place, env=environment, stdout=subprocess.DEVNULL, check=True)
    [directory] = (folder / "runs").iterdir()
    return directory


async def first_steps_s(directory: Path) -> dict[str, float]:
    """Return by learner when its first step had ended, by the wall clock in seconds."""
    async with opened(directory) as reader:
        tapes, _ = load_all(directory, reader.run.identity)
    first = {tape.name: tape.lives()[0] for tape in tapes if tape.lives()}
    return {name: (life.start.at_ms + life.step_ms[0]) / 1000 for name, life in sorted(first.items()) if life.step_ms}


def compiled(directory: Path, name: str) -> tuple[float, float]:
    """Return when a learner had its programs, by the wall clock, and its process's CPU time by then; seconds.

    A learner of PyTorch compiles none, and says when it has its model, and no CPU time.
    """
    lines = (directory / "logs" / f"{name}.jsonl").read_text().splitlines()
    event = [json.loads(line) for line in lines if '"compiled"' in line or '"island_ready"' in line][-1]
    return datetime.fromisoformat(event["time"]).timestamp(), event.get("process_cpu_s", float("nan"))


def learners(directory: Path, began_s: float) -> dict[str, dict[str, float]]:
    """Return a run's learners by name: seconds since then, CPU seconds, and the share of the versions."""
    report = json.loads((directory / "report.json").read_text())
    found = {}
    for name, first_s in asyncio.run(first_steps_s(directory)).items():
        compiled_s, cpu_s = compiled(directory, name)
        found[name] = {
            "compiled_s": compiled_s - began_s,
            "cpu_s": cpu_s,
            "first_step_s": first_s - began_s,
            "versions": report["learners"][name]["rounds_merged"] / report["versions"],
        }
    return found


def measure(tokens: int, runs: int, loops: int, template: str | None, *, cold: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        home = Path(folder)
        if template is not None:
            if not cold:
                train_template(home, template)
            return measured(lambda: [train_template(home, template)])
        directories = [home / f"run-{number}" for number in range(runs)]
        if not cold:
            train(home, [home / "before"], 1, 0)

        def trained() -> list[Path]:
            train(home, directories, tokens, loops)
            return directories

        return measured(trained)


def measured(work: Callable[[], list[Path]]) -> dict[str, Any]:
    """Return how the runs began that ``work`` does, and the loads before and after."""
    load, began_s = os.getloadavg()[0], time.time()
    directories = work()
    return {
        "machine": script.machine(),
        "load": [load, os.getloadavg()[0]],
        "wall_s": time.time() - began_s,
        "runs": [learners(directory, began_s) for directory in directories],
    }


def show(result: dict[str, Any]) -> None:
    print(f"load {result['load'][0]:.0f} before and {result['load'][1]:.0f} after; all took {result['wall_s']:.1f} s")
    for run in result["runs"]:
        for name, learner in run.items():
            print(
                f"  {name}: compiled {learner['compiled_s']:6.1f} s (CPU {learner['cpu_s']:.1f} s), first step "
                f"{learner['first_step_s']:6.1f} s, versions {100 * learner['versions']:.1f} %"
            )
        firsts = [learner["first_step_s"] for learner in run.values()]
        print(f"first steps of {len(firsts)} learners end {max(firsts) - min(firsts):.2f} s apart")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=150_000)
    parser.add_argument("--runs", type=int, default=1, help="at once")
    parser.add_argument("--loops", type=int, default=0, help="busy processes besides")
    parser.add_argument("--template", help="of a project, which is made and trained instead")
    parser.add_argument("--cold", action="store_true", help="begin with an empty cache")
    arguments = parser.parse_args()
    result = measure(arguments.tokens, arguments.runs, arguments.loops, arguments.template, cold=arguments.cold)
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
