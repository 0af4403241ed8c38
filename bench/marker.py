"""The cost of a checkpoint of the whole run: learners' steps in the 60 s that begin with the marker, and in 60 s without.

    python bench/marker.py                       # five pairs of a minute each, `diloco up` with two learners; about 12 minutes
    python bench/marker.py --pairs 1 --seconds 20
    python bench/marker.py --out s3://bench/marker    # all of it is sent to a bucket

Learners keep their states, as in a run on several machines: the command runs in a directory of its own (`diloco attach`).
With ``--out`` it runs in the run's directory, and sends all states to the place.
*steps*: the mean ratio of both, with its interval of 95 %; target at least 0.98.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from harness.console import Bench, Result, Script, folder
from harness.intervals import T95, ratio
from harness.live_run import DILOCO, Up, Watch, up, watching

from diloco.transport import Heard
from diloco_ops.reading.attach import attached

WARM_UP_S = 30.0
TARGET = 0.98


def steps(watch: Watch) -> int:
    """Return the steps of all learners so far."""
    return sum(heartbeat.step for heartbeat in watch.learners())


async def counted(watch: Watch, seconds: float) -> int:
    before = steps(watch)
    await asyncio.sleep(seconds)
    return steps(watch) - before


async def with_marker(watch: Watch, command: Sequence[str], heard: asyncio.Event, seconds: float) -> int:
    """Return the steps in the time that begins with the marker of a checkpoint, and wait for the command's end."""
    heard.clear()
    taking = await asyncio.create_subprocess_exec(*DILOCO, "checkpoint", *command, stdout=subprocess.DEVNULL)
    await heard.wait()
    found = await counted(watch, seconds)
    if await taking.wait() not in (0, 1):  # 1: states are on other machines
        raise SystemExit("diloco checkpoint failed")
    return found


async def pairs_of(running: Up, folder: Path, pairs: int, seconds: float, out: str | None) -> Result:
    """Return the steps of each pair, and their mean ratio."""
    watch = await watching(running)
    await running.reach(watch.all_step, "all learners step")
    heard = asyncio.Event()

    async def hear(_: Heard) -> None:
        heard.set()

    await watch.link.subscribe(watch.subjects.marker, hear)
    seen = folder / "seen"
    await attached(seen, watch.run.name, watch.run.nats_url)
    command = [str(seen)] if out is None else [str(running.directory), "--out", out]
    await asyncio.sleep(WARM_UP_S)
    marked, plain = [], []
    for pair in range(pairs):
        for kind in ("marked", "plain") if pair % 2 else ("plain", "marked"):
            if kind == "plain":
                plain.append(await counted(watch, seconds))
            else:
                marked.append(await with_marker(watch, command, heard, seconds))
    await watch.link.close()
    return {"marked": marked, "plain": plain} | ratio(marked, plain)


def measure(
    *, pairs: Annotated[int, (1, *T95)] = 5, seconds: float = 60.0, learners: int = 2, out: str | None = None
) -> Result:
    """Begin a run, and measure it."""
    with folder() as place, up(place / "run", "--learners", str(learners), tokens=10**10) as running:
        return asyncio.run(pairs_of(running, place, pairs, seconds, out))


def show(result: Result) -> None:
    for marked, plain in zip(result["marked"], result["plain"], strict=True):
        print(f"steps with a marker {marked:6}, without {plain:6}: {marked / plain:.3f}")
    interval = f" [{result['low']:.3f}, {result['high']:.3f}]" if "low" in result else ""
    print(f"steps: {result['ratio']:.3f}{interval}; target at least {TARGET}")


SCRIPT = Script(__doc__, Bench(measure, show))

if __name__ == "__main__":
    SCRIPT.run()
