"""The compilation of the kernels, which takes seconds, once an installation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kernels_compiled() -> Iterator[None]:
    """Have the kernels compiled in a process beside, so that services find them, and do not all compile them at once."""
    process = subprocess.Popen([sys.executable, "-c", "import diloco.core.kernels"])
    try:
        yield
        process.wait()
    finally:
        process.kill()
        process.wait()
