"""Fragments put together of the rows that the ranks of a process group hand over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import distributed

from diloco.core.tensors.fragments import Fragment
from diloco.core.tensors.rows import RowLayout

Vector = NDArray[np.float32]


def put_together(
    fragments: Sequence[Fragment], layouts: Sequence[RowLayout], place: int, read: Callable[[Fragment], Vector]
) -> list[Vector]:
    """Return each fragment, float32 [its size], as its carrier puts it together; ``read`` gives it as this rank has it."""
    found = []
    for fragment, layout in zip(fragments, layouts, strict=True):
        vectors: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(vectors, layout.read[place].take(read(fragment)))
        together = np.full(fragment.size, np.nan, np.float32)
        for rows, values in zip(layout.read, vectors, strict=True):
            rows.put(values, together)
        assert sum(rows.size for rows in layout.read) == fragment.size, "each value once"
        found.append(together)
    return found
