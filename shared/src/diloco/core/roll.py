"""The processes of a learner that have come to meet, and which of them make its next generation, and when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

LEADER = 0


def members(present: Collection[int], sizes: Sequence[int]) -> list[int]:
    """Return the processes of a generation: as many as have come and ``sizes`` allow, largest first; empty: too few came.

    Of those that are too many, the ones of the largest indexes wait.
    """
    size = next((size for size in sizes if size <= len(present)), 0)
    return sorted(present)[:size]


@dataclass
class Roll:
    """The processes that are there, at the leader: it and all that have come and not gone. Times are of any clock.

    Args:
        sizes: numbers of processes that a generation may have, the largest first: all of them.
        regroup_s: a smaller one begins when nobody has come for so long.
        last_s: when somebody came last, or the wait began.
        expected: those that are known to come, as far as one has been: nobody else is waited for once they are there.
    """

    sizes: Sequence[int]
    regroup_s: float
    last_s: float
    expected: frozenset[int] = frozenset()
    present: set[int] = field(default_factory=lambda: {LEADER})

    def come(self, index: int, now_s: float) -> None:
        """Note that a process has come."""
        self.present.add(index)
        self.last_s = now_s

    def go(self, index: int) -> None:
        """Note that a process has gone again."""
        self.present.discard(index)

    @property
    def members(self) -> list[int]:
        """The processes of the generation that could begin."""
        return members(self.present, self.sizes)

    def begins_s(self, now_s: float) -> float | None:
        """Return in how many seconds a generation begins if nobody comes or goes; None: it cannot."""
        size = len(self.members)
        if size == self.sizes[0]:
            return 0.0
        if not size:
            return None
        complete = bool(self.expected) and self.expected <= self.present
        return 0.0 if complete else max(0.0, self.last_s + self.regroup_s - now_s)
