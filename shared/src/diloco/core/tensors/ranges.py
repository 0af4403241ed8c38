"""Sets of batches, as ranges of the data's shares: in order, none touching another.

A batch is (share, index): the ``index``-th batch of a share, which is always the same batch. The batches of a learner's
training, of its displacement and of a version are such sets. They have few ranges each, since a learner takes a share's
batches one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from diloco.wire.fields import Range


def normal(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of any ranges, as a set."""
    joined: list[Range] = []
    for share, first, count in sorted(ranges):
        if joined and joined[-1][0] == share and joined[-1][1] + joined[-1][2] >= first:
            start = joined[-1][1]
            joined[-1] = (share, start, max(joined[-1][2], first + count - start))
        else:
            joined.append((share, first, count))
    return joined


def add(ranges: list[Range], share: int, batch: int) -> list[Range]:
    """Return the set with one more batch."""
    for i, (its_share, first, count) in enumerate(ranges):
        following = ranges[i + 1][:2] if i + 1 < len(ranges) else None
        if (its_share, first + count) == (share, batch) and following != (share, batch + 1):
            return [*ranges[:i], (share, first, count + 1), *ranges[i + 1 :]]
    return normal([*ranges, (share, batch, 1)])


def subtract(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return the part of a set that is not in another."""
    return [piece for piece, inside in _cut(ranges, others) if not inside]


def common(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return the intersection of two sets."""
    return [piece for piece, inside in _cut(ranges, others) if inside]


def batches(ranges: Iterable[Range]) -> int:
    """Return the number of batches in a set."""
    return sum(count for _, _, count in ranges)


def ends(ranges: Iterable[Range], known: Mapping[int, int] | None = None) -> dict[int, int]:
    """Return, by share, the batch after the last one of a set, or of ``known`` where that is further."""
    found = dict(known or {})
    for share, first, count in ranges:
        found[share] = max(found.get(share, 0), first + count)
    return found


def _cut(ranges: Sequence[Range], others: Sequence[Range]) -> Iterator[tuple[Range, bool]]:
    """Yield the pieces of a set, in order, and whether another set holds each."""
    at = 0
    for share, first, count in ranges:
        start, stop = first, first + count
        while at < len(others) and (others[at][0], others[at][1] + others[at][2]) <= (share, start):
            at += 1
        i = at
        while start < stop:
            if i == len(others) or others[i][:2] >= (share, stop):
                yield (share, start, stop - start), False
                break
            other_first, other_stop = others[i][1], others[i][1] + others[i][2]
            if other_first > start:
                yield (share, start, other_first - start), False
                start = other_first
            inside = min(stop, other_stop)
            yield (share, start, inside - start), True
            start, i = inside, i + 1
