"""The cost of a checkpoint of the whole run: learners' steps in the 60 s that begin with the marker, and in 60 s without.

    python bench/marker.py                       # five pairs of a minute each, `diloco up` with two learners; about 12 minutes
    python bench/marker.py --pairs 1 --seconds 20

Learners keep their states, as in a run on several machines: the command runs in a directory of its own (`diloco attach`).
*steps*: the mean ratio of both, with its interval of 95 %; target at least 0.98.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from restart import Watch
from script import DILOCO, T95, parser, print_result, ratio
from up import Up, up, watching

from diloco.transport import Heard
from diloco_ops.reading.attach import attached

WARM_UP_S = 30.0
TARGET = 0.98


def steps(watch: Watch) -> int:
    """Return the steps of all learners so far."""
    return sum(heartbeats[-1][1].step for heartbeats in watch.heartbeats.values())


async def counted(watch: Watch, seconds: float) -> int:
    before = steps(watch)
    await asyncio.sleep(seconds)
    return steps(watch) - before


async def with_marker(watch: Watch, seen: Path, heard: asyncio.Event, seconds: float) -> int:
    """Return the steps in the time that begins with the marker of a checkpoint, and wait for the command's end."""
    heard.clear()
    taking = await asyncio.create_subprocess_exec(*DILOCO, "checkpoint", str(seen), stdout=subprocess.DEVNULL)
    await heard.wait()
    found = await counted(watch, seconds)
    if await taking.wait() not in (0, 1):  # 1: states are on other machines
        raise SystemExit("bench/marker.py: diloco checkpoint failed")
    return found


async def measure(running: Up, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the steps of each pair, and their mean ratio."""
    watch = await watching(running)
    await asyncio.to_thread(running.until, watch.all_step, "all learners step")
    heard = asyncio.Event()

    async def hear(_: Heard) -> None:
        heard.set()

    await watch.link.subscribe(watch.subjects.marker, hear)
    seen = folder / "seen"
    await attached(seen, watch.run.name, watch.run.nats_url)
    await asyncio.sleep(WARM_UP_S)
    marked, plain = [], []
    for pair in range(arguments.pairs):
        for kind in ("marked", "plain") if pair % 2 else ("plain", "marked"):
            if kind == "plain":
                plain.append(await counted(watch, arguments.seconds))
            else:
                marked.append(await with_marker(watch, seen, heard, arguments.seconds))
    await watch.link.close()
    return {"marked": marked, "plain": plain} | ratio(marked, plain)


def show(result: dict[str, Any]) -> None:
    for marked, plain in zip(result["marked"], result["plain"], strict=True):
        print(f"steps with a marker {marked:6}, without {plain:6}: {marked / plain:.3f}")
    interval = f" [{result['low']:.3f}, {result['high']:.3f}]" if "low" in result else ""
    print(f"steps: {result['ratio']:.3f}{interval}; target at least {TARGET}")


def main() -> None:
    """Print the pairs."""
    made = parser(__doc__)
    made.add_argument("--pairs", type=int, default=5, choices=(1, *T95))
    made.add_argument("--seconds", type=float, default=60.0)
    made.add_argument("--learners", type=int, default=2)
    arguments = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name)
        options = ("--learners", str(arguments.learners))
        with up(folder / "run", options, {"tokens": 10**10}, {}) as running:
            print_result(asyncio.run(measure(running, folder, arguments)), arguments, show)


if __name__ == "__main__":
    main()
