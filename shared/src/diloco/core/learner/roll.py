"""The processes of a learner that have come to meet: which one leads, which of them make its next generation, and when.

Any process may lead that others can find: it has one of ``processes.address``. A process goes to one other process at a time,
and where several may lead a generation needs more than half of all (``processes.least``). So of two parts of a cut network at
most one goes on: two generations have a process in common, which has left the earlier one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProcessStanding:
    """The standing of a process that listens for others, as it says."""

    leader: int  # the process that it has gone to, or it itself
    generation: int | None = None  # that it leads; None: it has not begun one


def goes_to(own: int, *, may_lead: bool, at: int | None, heard: Mapping[int, ProcessStanding]) -> int | None:
    """Return the process to which process ``own`` goes to meet the others; itself: it has them come; None: there is none.

    A generation that goes on comes first, since no other one can begin beside it; then the smallest index. Who has come to a
    process (``at``) stays there for as long as that one has others come, or two would count on it; one that has others come
    itself gives way.

    Args:
        own: index of this process.
        may_lead: it can be found by the others.
        at: where it is now.
        heard: by index, the other processes that are reached and listen.
    """
    themselves = {index: standing for index, standing in heard.items() if standing.leader == index}
    leading = [index for index, standing in themselves.items() if standing.generation is not None]
    if leading:
        return at if at in leading else min(leading)
    if at in themselves:
        return at
    return min([*themselves, own] if may_lead else themselves, default=None)


def members(present: Collection[int], sizes: Sequence[int]) -> list[int]:
    """Return the processes of a generation: as many as have come and ``sizes`` allow, largest first; empty: too few came.

    Of those that are too many, the ones of the largest indexes wait.
    """
    size = next((size for size in sizes if size <= len(present)), 0)
    return sorted(present)[:size]


@dataclass
class Roll:
    """The processes that are there, at one that has them come: it and all that have come and not gone. Times are of any clock.

    Args:
        sizes: numbers of processes that a generation may have, the largest first: all of them.
        regroup_s: a smaller one begins when no process has come for so long.
        last_s: when a process came last, or the wait began.
        own: index of the process that has the others come.
        expected: those that are known to come, as far as one has been: no other is waited for once they are there.
    """

    sizes: Sequence[int]
    regroup_s: float
    last_s: float
    own: int = 0
    expected: frozenset[int] = frozenset()
    present: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.present = {self.own}

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
        """Return in how many seconds a generation begins if no process comes or goes; None: it cannot."""
        size = len(self.members)
        if size == self.sizes[0]:
            return 0.0
        if not size:
            return None
        complete = bool(self.expected) and self.expected <= self.present
        return 0.0 if complete else max(0.0, self.last_s + self.regroup_s - now_s)
