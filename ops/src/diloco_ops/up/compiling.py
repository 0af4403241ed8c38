"""The compilation of the kernels, which takes seconds, once an installation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from diloco_ops.up.progress_lines import progress_line

# it prints a line when it begins to compile; where all kernels are in the cache it prints none
_LOAD = """
from diloco.core.tensors.compiled import kernels
kernels.announce = lambda: print("compiling", flush=True)
kernels.load()
"""


@contextmanager
def kernels_compiled(*, quiet: bool = False) -> Iterator[None]:
    """Compile the kernels in a separate process, so that services find them and do not all compile them at once.

    ``quiet``: print no line while the caller waits for that process.
    """
    with subprocess.Popen([sys.executable, "-c", _LOAD], stdout=subprocess.PIPE) as process:
        try:
            yield
            assert process.stdout is not None
            if process.stdout.readline():
                with progress_line("compiling the kernels, once for this installation", quiet=quiet):
                    process.wait()
        finally:
            process.kill()
