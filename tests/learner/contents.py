"""Puts the chunks of a state together, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.member.state import Content


def whole(content: Content) -> dict[str, NDArray[Any]]:
    """Return the arrays of a content, each value of them given once."""
    arrays: dict[str, NDArray[Any]] = {}
    given: dict[str, NDArray[np.int8]] = {}
    for chunk, values in zip(content.chunks, content.values, strict=True):
        arrays.setdefault(chunk.name, np.empty(chunk.shape, chunk.dtype))[chunk.where] = values
        given.setdefault(chunk.name, np.zeros(chunk.shape, np.int8))[chunk.where] += 1
    assert all((counts == 1).all() for counts in given.values())
    return arrays
