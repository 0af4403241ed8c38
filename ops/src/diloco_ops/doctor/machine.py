"""Measure the machine on which a service is to run, and look at its files."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from safetensors import SafetensorError, safe_open

from diloco.core.run import tape as tapes
from diloco.errors import DilocoError, FormatError
from diloco.process import tape
from diloco.settings.service import host_and_port
from diloco.states import statefolder

SYNCS = 16
BLOCK_BYTES = 4096
HEADER_BYTES = 4096  # of a tape: its header is in them


@dataclass(frozen=True)
class WritableFolder:
    """A folder that was written to."""

    free_bytes: int
    total_bytes: int
    sync_s: float  # median time until what was written is on the disk


def jax_version() -> str | None:
    """Return the version of the installed JAX, which is not imported; None: there is none."""
    try:
        return metadata.version("jax")
    except metadata.PackageNotFoundError:
        return None


def cores(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the processor cores that this process may use: by its affinity, and by its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (groups / "cpu.max").read_text().split()
        return min(float(allowed), round(int(quota) / int(period), 1))
    except (OSError, ValueError):  # no quota is "max"
        return float(allowed)


def open_files() -> int:
    """Return how many files the process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory that a process started here could take; None: unknown.

    It is the machine's, or the remainder of the process's control groups.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, LookupError):
        line = next(line for line in (proc / "meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(1024 * int(line.split()[1]))
    with contextlib.suppress(OSError, LookupError):
        # inside a container its own group is the root
        own = next(line for line in (proc / "self" / "cgroup").read_text().splitlines() if line.startswith("0::"))
        group = groups / own[3:].lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(groups):
                with contextlib.suppress(OSError, ValueError):  # "max", or a kernel without this controller
                    found.append(int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    return min(found, default=None)


def disk(path: Path) -> WritableFolder:
    """Write a little to a folder, and leave nothing.

    Raises:
        DilocoError: it cannot be written; it is named.
    """
    try:
        with _made(path), tempfile.TemporaryFile(dir=path) as file:
            times_s = []
            for _ in range(SYNCS):
                began_s = time.perf_counter()
                file.write(b"\0" * BLOCK_BYTES)
                file.flush()
                os.fsync(file.fileno())
                times_s.append(time.perf_counter() - began_s)
            usage = shutil.disk_usage(path)
    except OSError as error:
        raise DilocoError(f"{path}: cannot be written: {error.strerror}") from None
    return WritableFolder(usage.free, usage.total, statistics.median(times_s))


@contextmanager
def _made(path: Path) -> Iterator[None]:
    """Make a folder for as long as it is needed, if it was not there."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for folder in missing:
            folder.rmdir()


def foreign_files(path: Path, run: bytes) -> list[str]:
    """Return the tapes and checkpoints of other runs in a ``state_dir``, by name; unreadable files are left out."""
    found = [file for file in sorted((path / tape.FOLDER).glob(f"*{tapes.SUFFIX}")) if _tape_run(file) not in (None, run)]
    found += [
        file for file in sorted((path / statefolder.FOLDER).glob("*.safetensors")) if _state_run(file) not in (None, run.hex())
    ]
    return [str(file.relative_to(path)) for file in found]


def _tape_run(file: Path) -> bytes | None:
    try:
        with file.open("rb") as opened:
            return tapes.scan(opened.read(HEADER_BYTES)).header.run
    except (OSError, FormatError):
        return None


def _state_run(file: Path) -> str | None:
    try:
        with safe_open(file, "numpy") as opened:
            return (opened.metadata() or {}).get("run")
    except (OSError, SafetensorError, ValueError):
        return None


def refusal_to_listen(address: str) -> str:
    """Return the reason why an address cannot be listened at; empty: it can."""
    try:
        host, port = host_and_port(address)
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return error.strerror or str(error)
    return ""
