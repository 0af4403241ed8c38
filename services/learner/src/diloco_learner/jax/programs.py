"""Programs that the learners of one machine share in JAX's cache: one process compiles them, and the others load them.

A process that compiled leaves a mark beside the cache's files. Where it is, none waits: loading takes little, and processes
that took turns at it would begin one after another. The mark is a hint. Where the cache lacks the program, as one that JAX
does not keep, each process compiles it for itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import jax
from blake3 import blake3

from diloco.errors import SettingsError
from diloco.process import locks
from diloco.process.locks import LOOK_S
from diloco.settings import folders

PATIENCE_S = 300.0  # a process that compiles may be frozen; the others then compile, too


def keep(cache_dir: Path) -> None:
    """Make JAX store compiled programs in a folder, for all processes that compile the same ones.

    Raises:
        SettingsError: it cannot be written.
    """
    update: Callable[[str, Any], None] = jax.config.update
    update("jax_compilation_cache_dir", str(folders.made(cache_dir)))
    update("jax_persistent_cache_min_compile_time_secs", 0.02)
    update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_if_possible(cache_dir: Path) -> None:
    """Make JAX store compiled programs like :func:`keep`, if the folder is writable: a command works without it too."""
    with contextlib.suppress(SettingsError):
        keep(cache_dir)


def name_of(*about: str) -> str:
    """Return a name, the same for the same strings, version of JAX, flags of XLA, and devices."""
    device, count = jax.devices()[0], str(jax.device_count())
    known = (*about, jax.__version__, os.environ.get("XLA_FLAGS", ""), device.platform, device.device_kind, count)
    return blake3("\0".join(known).encode()).hexdigest(16)


@contextlib.contextmanager
def compiled_once(cache_dir: Path, name: str, stopping: Callable[[], bool]) -> Iterator[None]:
    """Wait while another process of this machine compiles the programs of this name for the first time.

    All that waited go on at once. If the process that compiles fails or dies, another one takes its place.

    Raises:
        KeyboardInterrupt: this process is asked to end meanwhile.
        SettingsError: the cache cannot be written, or its file system has no locks.
    """
    mark = _turn(folders.made(cache_dir) / f"{name}.compiled", stopping)
    if mark is None:
        yield
        return
    with mark:
        yield
        mark.write(b"\n")  # stored when the file is closed, which ends the lock, too


def _turn(path: Path, stopping: Callable[[], bool]) -> IO[bytes] | None:
    """Wait until this process has the lock, and is the one to compile; None: it need not wait any more."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and not _is_marked(path):
        if (mark := locks.take(path, folders.CACHE)) is not None:
            if not _is_marked(path):  # it may have been marked between look and lock
                return mark
            mark.close()
            break
        if stopping():
            raise KeyboardInterrupt
        time.sleep(LOOK_S)
    return None


def _is_marked(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
