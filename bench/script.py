"""Shared parts of the benches: their parser and its ``--json``, their folder, the machine, and the services' allocator."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.nats.connection import malloc_environment
from diloco.process import observe

DILOCO = (sys.executable, "-c", "from diloco_ops.cli import main; main()")  # also where no script lies beside the interpreter
T95 = {  # Student's t of an interval of 95 %, by the number of pairs
    2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 12: 2.201, 16: 2.131, 24: 2.069, 32: 2.040, 48: 2.012,
    64: 1.998,
}  # fmt: skip


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's text as it is, with ``--json``, which :func:`print_result` obeys.

    Events go to stderr from now on: stdout has the result alone, also where a connection of the bench's own is lost.
    """
    observe.configure("bench", "", level="warning", fmt="console")
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true")
    return made


def print_result(result: dict[str, Any], arguments: argparse.Namespace, show: Callable[[dict[str, Any]], None]) -> None:
    """Print a result as JSON if that was asked for, as text by ``show`` otherwise."""
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)


def ratio(ones: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the mean ``ratio`` of pairs of times, and its interval of 95 % from ``low`` to ``high``, by their logarithms.

    There are as many pairs as :data:`T95` knows, or one, whose interval is unknown: it is not returned.
    """
    logs = [math.log(one / other) for one, other in zip(ones, others, strict=True)]
    mean = statistics.mean(logs)
    if len(logs) == 1:
        return {"ratio": math.exp(mean)}
    error = T95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return {name: math.exp(value) for name, value in (("ratio", mean), ("low", mean - error), ("high", mean + error))}


async def until(predicate: Callable[[], bool], what: str, within_s: float) -> None:
    """Wait until something is so; end the bench, with ``what`` that is, if it is not within ``within_s``."""
    ends_s = time.monotonic() + within_s
    while not predicate():
        if time.monotonic() > ends_s:
            raise SystemExit(f"bench/{Path(sys.argv[0]).name}: not within {within_s:g} s: {what}")
        await asyncio.sleep(0.01)


@contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    """Give a folder for what a bench writes: the one that was given, which stays, or one that is removed at the end."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        yield Path(name)


def read_pid(file: Path) -> int:
    """Return the process id in a service's file; 0 where there is none, or while it is being written."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def held_bytes(pid: int) -> int:
    """Return the memory of a process that the system cannot take back: not pages of files; 0 where it is gone."""
    return _status_bytes(pid, "RssAnon") + _status_bytes(pid, "RssShmem")


def peak_rss_bytes(pid: int) -> int:
    """Return the peak of a process's resident memory so far, as the kernel counts it; 0 where it is gone."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def machine() -> dict[str, Any]:
    """Return the processor, its cores and the version of Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def with_allocator() -> None:
    """Begin again with the allocator settings that services run with, unless they hold: glibc reads them at the start."""
    allocator = malloc_environment()
    if not allocator.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | allocator)
