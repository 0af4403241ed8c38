"""The machine, and what its processes take: memory, processor time, and the allocator that services run with."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil

from diloco.nats.connection import malloc_environment

GIB, MIB, MB = 1 << 30, 1 << 20, 10**6


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


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far; 0 where it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def held_bytes(pid: int) -> int:
    """Return the memory of a process that the system cannot take back: not pages of files; 0 where it is gone."""
    return _status_bytes(pid, "RssAnon") + _status_bytes(pid, "RssShmem")


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process now; 0 where it is gone."""
    return _status_bytes(pid, "VmRSS")


def peak_rss_bytes(pid: int) -> int:
    """Return the peak of a process's resident memory so far, as the kernel counts it; 0 where it is gone."""
    return _status_bytes(pid, "VmHWM")


def reset_peak(pid: int) -> None:
    """Begin to count the peak of a process's resident memory again."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_bytes(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
