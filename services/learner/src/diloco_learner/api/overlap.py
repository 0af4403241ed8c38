"""Find tensors that share memory: a version that is written into one would change the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.errors import SettingsError

MOST_WORK = 100_000  # of NumPy to find out whether two interleaved tensors have a value in common


@dataclass(frozen=True)
class MemorySpan:
    """A tensor's memory: where it begins on its device, and how it lies there."""

    device: str
    address: int
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes

    @cached_property
    def reach(self) -> tuple[int, int]:
        """The first byte, and the one behind the last."""
        steps = [stride * (length - 1) for stride, length in zip(self.strides, self.shape, strict=True)]
        below, above = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
        return self.address + below, self.address + above + self.item_bytes

    @property
    def folds(self) -> bool:
        """Whether two of its values may lie in one place, as those of an expanded tensor do."""
        needed = self.item_bytes
        for stride, length in sorted((abs(stride), length) for stride, length in zip(self.strides, self.shape, strict=True)):
            if length > 1:
                if stride < needed:
                    return True
                needed = stride * (length - 1) + needed
        return False

    def array(self) -> NDArray[Any]:
        """Return an array, raw bytes [shape], that claims this memory; its values must not be read."""
        return np.asarray(_Claim(self))


class _Claim:
    def __init__(self, span: MemorySpan) -> None:
        kind = f"|V{span.item_bytes}"
        self.__array_interface__ = {
            "shape": span.shape, "typestr": kind, "data": (span.address, True), "strides": span.strides, "version": 3,
        }  # fmt: skip


def check_apart(spans: Mapping[str, MemorySpan], beside: Mapping[str, MemorySpan] = MappingProxyType({})) -> None:
    """Check that no two values of tensors, by path, lie in one place; those ``beside`` may share memory with each other.

    Raises:
        SettingsError: some do; the tensors are named.
    """
    filled = {path: span for path, span in [*beside.items(), *spans.items()] if all(span.shape)}
    for path, span in filled.items():
        if span.folds and path in spans:
            raise SettingsError(
                f"parameter {path!r} has several elements in one place of memory, as after expand(): pass a copy with "
                "a place for each (clone)"
            )
    behind: list[tuple[str, MemorySpan]] = []  # those that reach beyond the beginning of the next one
    for path, span in sorted(filled.items(), key=lambda item: (item[1].device, item[1].reach)):
        begin = span.reach[0]
        behind = [(other, its) for other, its in behind if its.device == span.device and its.reach[1] > begin]
        for other, its in behind:
            if (path in spans or other in spans) and _share(its, span):
                first, second = sorted((other, path))
                raise SettingsError(
                    f"parameters {first!r} and {second!r} share memory, so that a version of one would overwrite the "
                    "other: hand over each value once, under one name"
                )
        behind.append((path, span))


def _share(one: MemorySpan, other: MemorySpan) -> bool:
    try:
        return bool(np.shares_memory(one.array(), other.array(), max_work=MOST_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
