"""A fragment's log in several regions: which entries are committed, and how a new owner finds the log to go on with.

Each region's log stream stores what it is given, behind a fence, and decides nothing; owners do. It is Raft (Ongaro and
Ousterhout, 2014) with a stream for an acceptor. A new owner first stores a *claim* of a higher epoch behind the last message
in a majority of regions: from then on the one before it cannot append to them, so nothing of its can be committed any more.
Of the claimed logs the new owner goes on with the one that has the best last entry, which has all that was ever committed. An
entry is committed once a majority of regions holds it, of the epoch in which it was made; its owner then stores a *notice* in
every region. Streams are never shortened: what was stored and not committed stays where it is, a dead branch, and is passed
over by all who read, since they take entries from notices alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MAX_UNDECIDED = 64  # entries of a fragment that are held back; more there are only if somebody stores what is no log


def majority(regions: int) -> int:
    """How many of so many regions must hold an entry."""
    return regions // 2 + 1


@dataclass(frozen=True)
class Tip:
    """The last entry of a fragment's log in one region."""

    epoch: int
    version: int
    closing: bool
    check: bytes
    sequence: int  # in that region's stream; 0: genesis

    @property
    def rank(self) -> tuple[int, int, bool]:
        """Of two tips, the higher one's log has everything committed that the other's has (Raft, section 5.4.1)."""
        return self.epoch, self.version, self.closing


def best(tips: Mapping[str, Tip], own: str) -> str:
    """The region whose log a new owner goes on with, of those that it has claimed; of equal ones its own, or the first."""
    highest = max(tip.rank for tip in tips.values())
    return min((region for region in tips if tips[region].rank == highest), key=lambda region: (region != own, region))


class Linked(Protocol):
    """An entry as far as its place in the chain goes."""

    @property
    def check(self) -> bytes: ...

    @property
    def previous(self) -> bytes: ...

    @property
    def sequence(self) -> int: ...


L = TypeVar("L", bound=Linked)


class Undecided(Generic[L]):
    """What a reader of one region's log holds back of a fragment until a notice says that it is committed.

    ``limit``: at most so many entries, the newest; None: all of them.
    """

    def __init__(self, limit: int | None = MAX_UNDECIDED) -> None:
        self._entries: dict[bytes, L] = {}
        self._limit = limit

    def add(self, entry: L) -> None:
        """An entry was read; stored twice it is one entry."""
        self._entries.pop(entry.check, None)
        self._entries[entry.check] = entry
        if self._limit is not None and len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]

    def commit(self, check: bytes) -> list[L]:
        """A notice names an entry: what is committed with it and was not before, in the order of the chain.

        Nothing, where the entry was read before this reader began, or has been given out. What was stored before the entry
        and is not committed with it never will be.
        """
        path = self.path(check)
        if path:
            last = path[-1].sequence
            self._entries = {name: entry for name, entry in self._entries.items() if entry.sequence > last}
        return path

    def path(self, check: bytes) -> list[L]:
        """The entries that lead up to one, as far back as they are held."""
        path: list[L] = []
        while (entry := self._entries.get(check)) is not None:
            path.append(entry)
            check = entry.previous
        return path[::-1]
