"""Room for arrays in files, for commands that lack memory: the system writes pages of files back when it needs their memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diloco.log.reader import Room, in_memory


def in_folder(folder: Path) -> Room:
    """Return room in files of a folder, which have no names: each is gone with its array. It raises OSError on a full disk."""

    def room(size_bytes: int) -> NDArray[np.uint8]:
        if not size_bytes:
            return in_memory(0)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)  # a write to a page without room would end the process
            return np.frombuffer(mmap.mmap(file.fileno(), size_bytes), np.uint8)

    return room
