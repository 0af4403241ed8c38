"""Garbage collection while a service starts.

Modules make hundreds of thousands of objects that live as long as the process. The collector would visit them again and again
while they are imported, and whenever it makes a full collection later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in this block, and let the collector pass over the objects that exist at its end.

    For a process of this project's own. In a user's process objects that are garbage at that time would stay for ever.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
