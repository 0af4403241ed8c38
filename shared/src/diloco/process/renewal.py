"""A process that begins again by itself: in place, with its number, its command and its standard streams."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from diloco.process import observe

EXPECTED = "EXPECTED_BY_DILOCO"  # in the environment; a name with DILOCO_ in front would be a setting


def renew(expected: Iterable[int] = ()) -> NoReturn:
    """Replace this process by a fresh one of the same command. All its threads end, whatever they wait for; files are closed.

    What a supervisor knows of it stays: its number, its parent, its cores. Signals have no handlers until the command sets
    them. It finds the processes that it may expect to meet by :func:`expected`.
    """
    os.environ[EXPECTED] = " ".join(map(str, sorted(expected)))
    observe.write_counts()
    sys.stdout.flush()
    sys.stderr.flush()
    for name in os.listdir("/proc/self/fd" if Path("/proc/self/fd").exists() else "/dev/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of the list itself
                os.set_inheritable(int(name), False)  # libraries leave some of their sockets open to what comes after
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def expected() -> frozenset[int]:
    """Return the processes that are known to come, as this one has left it to itself; what it begins is not told."""
    return frozenset(map(int, os.environ.pop(EXPECTED, "").split()))
