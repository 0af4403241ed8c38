"""How many processes run tests at once: by cores and by free memory, whichever allows fewer."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

WORKER_BYTES = 1400 << 20  # a worker's, with JAX, its compiler and the services that a test starts
SHARED_BYTES = 500 << 20  # of the process that hands tests out, and of the type checker beside it
LIMITS = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
NO_LIMIT_BYTES = 1 << 60  # control groups of version 1 state a number near 2**63 where there is none


def workers(per_core: int, root: Path = Path("/")) -> int:
    """Return the number of workers, at least 1; ``root`` holds ``proc`` and ``sys``."""
    by_memory = (free_bytes(root) - SHARED_BYTES) / WORKER_BYTES
    return max(1, int(min(per_core * cores(root), by_memory)))


def cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, by its affinity and by the quotas of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(root, ""):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            allowed = min(allowed, math.ceil(int(quota) / int(period)))  # a quota of "max" is no number
    return max(1, allowed)


def free_bytes(root: Path = Path("/")) -> float:
    """Return the memory that can be taken: what the machine has available, and what each control group leaves.

    Infinity where neither is stated.
    """
    free = [math.inf]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        free.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))))
    for controller, limit, used in LIMITS:
        for group in _groups(root, controller):
            with contextlib.suppress(OSError, ValueError):
                limit_bytes = int((group / limit).read_text())  # "max" is no number
                if limit_bytes < NO_LIMIT_BYTES:
                    free.append(limit_bytes - int((group / used).read_text()) + _reclaimable_bytes(group))
    return min(free)


def _reclaimable_bytes(group: Path) -> int:
    """Return what a control group's file cache holds and can give back."""
    with contextlib.suppress(OSError, ValueError):
        stated = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(stated.get("inactive_file", 0)) + int(stated.get("active_file", 0))
    return 0


def _groups(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control group and its parents; without a controller, those of version 2."""
    mounted = root / "sys/fs/cgroup" / controller
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                own = Path(path.lstrip("/"))
                return [mounted / own, *(mounted / parent for parent in own.parents)]
    return []
