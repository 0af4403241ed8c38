"""Batches as pytrees of arrays with a common first axis, their rows: some rows of one, or those of several as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from diloco.errors import SettingsError
from diloco_learner.jax.leaves import path_of
from diloco_learner.task import Task, rows_of


class RowShare:
    """Turns shares of a batch into whole rows. What is left over counts for the next batch; a batch has a row at least."""

    def __init__(self) -> None:
        self._owed = 0.0

    def rows(self, whole: int, share: float) -> int:
        """Return how many of ``whole`` rows the next batch has."""
        self._owed += share * whole
        taken = min(whole, max(1, math.floor(self._owed + 1e-9)))  # a sum of shares errs by rounding
        self._owed = max(0.0, self._owed - taken)
        return taken


def take_rows(batch: Any, whole: int, rows: Sequence[int]) -> Any:
    """Return these of a batch's ``whole`` rows. Arrays of another first axis stay whole."""
    chosen = np.asarray(rows)
    return jax.tree.map(lambda leaf: leaf[chosen] if np.shape(leaf)[:1] == (whole,) else leaf, batch)


def join(task: Task, batches: Sequence[Any], name: str) -> Any:
    """Return the rows of several batches as one batch.

    Raises:
        SettingsError: of task ``name``, whose batches have arrays without rows.
    """
    if len(batches) == 1:
        return batches[0]
    rows = rows_of(task, batches[0])
    for keys, leaf in jax.tree_util.tree_flatten_with_path(batches[0])[0]:
        if np.shape(leaf)[:1] != (rows,):
            raise SettingsError(
                f"task.name = {name!r}: the array {path_of(keys) or 'of a batch'} has shape {list(np.shape(leaf))}, and a "
                f"batch {rows} rows: data-parallel arms need batches whose arrays all have their rows along the first axis"
            )
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
