"""Batches of a torch task: arrays in dictionaries, lists, tuples and dataclasses, and the rows of them that a process takes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch


def rows_of(task: object, batch: Any) -> int:
    """Return the rows of a whole batch: the task's number, or the first axis of its largest array; 0: there are none."""
    said: int | None = getattr(task, "rows_per_batch", None)
    if said is not None:
        return said
    shapes = [tuple(array.shape) for array in _arrays(batch)]
    largest = max(shapes, key=math.prod, default=())
    return int(largest[0]) if largest else 0


def cut(batch: Any, count: int, rows: range) -> Any:
    """Return some rows of a batch of so many: arrays of another first axis, and all that is no array, are whole."""

    def own(array: Any) -> Any:
        return array[rows.start : rows.stop] if array.ndim and array.shape[0] == count else array

    return _changed(batch, own)


def as_bytes(batch: Any) -> bytes:
    """Return the bytes of all arrays in a batch."""
    if isinstance(batch, Mapping):
        return b"".join(as_bytes(batch[key]) for key in sorted(batch))
    if isinstance(batch, list | tuple):
        return b"".join(map(as_bytes, batch))
    return np.asarray(batch.cpu() if isinstance(batch, torch.Tensor) else batch).tobytes()


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _arrays(batch: Any) -> Iterator[Any]:
    if _is_array(batch):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _arrays(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _arrays(value)
    elif _is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield from _arrays(getattr(batch, field.name))


def _changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch of the same structure, with other arrays."""
    if _is_array(batch):
        return change(batch)
    if isinstance(batch, MutableMapping):
        other = copy.copy(batch)  # of its own type: those of libraries have more than a dictionary
        for key, value in batch.items():
            other[key] = _changed(value, change)
        return other
    if isinstance(batch, list | tuple):
        values = [_changed(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if _is_dataclass(batch):
        fields = {field.name: _changed(getattr(batch, field.name), change) for field in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **fields)
    return batch
