"""Batches of sources, by Grain: random access, so that the k-th batch of a share depends only on seed, share and k.

A source's tokens are cut into windows of ``context + 1``, ``context`` apart, so that each token is predicted once an epoch.
Share i of M has the windows i, i + M, ... of each source, in an order of its own in each epoch, and sources take turns by their
weights. So shares have no window in common, and together they have all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grain
import numpy as np
from numpy.typing import NDArray

from diloco_learner.mix.stored import TokenArray

AHEAD = 8  # batches made beforehand: a disk that is asleep or far away for as many steps delays no step


class WindowSource(Protocol):
    """A source of windows by their number: int32 arrays, all of one shape."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> NDArray[np.int32]: ...


@dataclass(frozen=True)
class TokenWindows:
    """The windows of a source's tokens, by their number: a random-access source of Grain."""

    tokens: TokenArray
    context: int

    def __len__(self) -> int:
        return max(0, (self.tokens.size - 1) // self.context)

    def __getitem__(self, index: Any) -> NDArray[np.int32]:
        """Return a window, int32 [context + 1]."""
        at = int(index) * self.context
        return self.tokens[at : at + self.context + 1].astype(np.int32)


@dataclass(frozen=True)
class _Batches:
    """Batches of a mix, by their number; of each the ``rows`` alone."""

    mixed: grain.MapDataset[Any]
    batch: int
    rows: range

    def __len__(self) -> int:
        return sys.maxsize // self.batch

    def __getitem__(self, index: Any) -> NDArray[np.int32]:
        first = int(index) * self.batch
        return np.stack([self.mixed[first + row] for row in self.rows])


def batches(
    sources: Sequence[WindowSource],
    weights: Sequence[int],
    batch: int,
    *,
    share: int,
    shares: int,
    seed: int,
    start: int,
    rows: range,
) -> Iterator[NDArray[np.int32]]:
    """Yield the batches of a share from the ``start``-th on, without end: int32 [rows, *shape of a window].

    They are made beforehand, in a thread.
    """
    made = grain.MapDataset.source(_Batches(mixed(sources, weights, share, shares, seed), batch, rows))
    return iter(made[start:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD)))


def mixed(sources: Sequence[WindowSource], weights: Sequence[int], share: int, shares: int, seed: int) -> grain.MapDataset[Any]:
    """Return the windows of a share in the order in which it trains on them, without end."""
    parts = []
    for number, source in enumerate(sources):
        (order,) = np.random.SeedSequence((seed, share, number)).generate_state(1)
        parts.append(grain.MapDataset.source(source)[share::shares].shuffle(seed=int(order)).repeat())
    return grain.MapDataset.mix(parts, weights)
