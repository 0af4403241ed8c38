"""Which shard owns which fragments."""

from __future__ import annotations

from collections.abc import Sequence


def assign(sizes: Sequence[int], shards: int) -> list[list[int]]:
    """Deal fragments of ``sizes`` parameters to ``shards`` so that parameters, and so bytes, are even.

    Largest first into the emptiest shard, ties by fragment and by shard: every service computes the same table.
    """
    owned: list[list[int]] = [[] for _ in range(shards)]
    filled = [0] * shards
    for fragment in sorted(range(len(sizes)), key=lambda f: (-sizes[f], f)):
        shard = min(range(shards), key=lambda s: (filled[s], s))
        owned[shard].append(fragment)
        filled[shard] += sizes[fragment]
    return [sorted(fragments) for fragments in owned]
