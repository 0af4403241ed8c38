"""Lines that tell a user what a command does while it takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

AFTER_S = 0.5  # shorter work is over before a user has read a line about it
AGAIN_S = 4.0  # no 5 s pass without a line


@contextmanager
def progress_line(text: str, *, quiet: bool = False, after_s: float = AFTER_S, file: TextIO | None = None) -> Iterator[None]:
    """Print a line if the block takes longer than ``after_s``, and its duration every ``AGAIN_S`` from then on.

    Args:
        text: the line.
        quiet: print nothing.
        after_s: seconds.
        file: receives the lines; None: stdout.
    """
    over = threading.Event()

    def print_lines() -> None:
        waited_s = after_s
        if over.wait(after_s):
            return
        print(text, file=file, flush=True)
        while not over.wait(AGAIN_S):
            waited_s += AGAIN_S
            print(f"{text}: {waited_s:.0f} s so far", file=file, flush=True)

    if quiet:
        yield
        return
    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # a line that is being printed comes before those of the caller
