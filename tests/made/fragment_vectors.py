"""Vectors of fragments: written into a model's tensors, given as a founder gives them, and made by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from diloco.core.tensors.fragments import Fragment


def scatter(fragment: Fragment, vector: NDArray[np.float32], tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Copy a fragment's values, float32 [size], into ``tensors``, in place: the inverse of :meth:`Fragment.gather`."""
    for piece in fragment.pieces:
        values = vector[piece.offset : piece.offset + piece.size].reshape(piece.shape)
        if piece.shape:
            tensors[piece.path][piece.row_start : piece.row_stop] = values
        else:
            tensors[piece.path][...] = values


async def each(vectors: Sequence[NDArray[np.float32]]) -> AsyncIterator[NDArray[np.float32]]:
    """Give vectors, float32 [size] each, one after another, as a run is founded with them."""
    for vector in vectors:
        yield vector


def vector(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)
