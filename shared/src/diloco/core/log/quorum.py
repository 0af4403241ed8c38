"""A fragment's log in several regions: which entries are committed, and how a new owner finds the log to go on with.

Each region's log stream stores messages behind a fence, and decides nothing; owners do. It is Raft (Ongaro and
Ousterhout, 2014) with a stream for an acceptor. A new owner first stores a *claim* of a higher epoch behind the last message
in a majority of regions: from then on the one before it cannot append to them, so nothing of its can be committed any more.
Of the claimed logs the new owner goes on with the one that has the best last entry, which has all that was ever committed. An
entry is committed once a majority of regions holds it, of the epoch in which it was made; its owner then stores a *notice* in
every region. Streams are never shortened: an entry stored and not committed stays where it is, a dead branch, and all readers
pass over it, since they take entries from notices alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from diloco.wire.entries import Claim, Record

EPOCH_STEP = 1 << 40  # most by which an entry raises the epoch: a syncer may claim, and never write
CLAIM_STEP = 1 << 20  # most by which a claim raises the epoch: one too high could not be outbid
MAX_COPIED = 16  # entries of earlier epochs that a syncer stores behind its claim, and hides it by, until it claims again
MAX_UNCOMMITTED = 64  # entries of a fragment that are held back; there are more only if a process stores no log
NOTICE_EVERY = 16  # older entries that a region is brought up to date by, until a notice names one: fewer than are held back


def majority(regions: int) -> int:
    """Return how many of so many regions must hold an entry."""
    return regions // 2 + 1


@dataclass(frozen=True)
class LogHead:
    """The last entry of a fragment's log in one region."""

    epoch: int
    version: int
    closing: bool
    entry_hash: bytes
    sequence: int  # in that region's stream; 0: genesis

    @property
    def rank(self) -> tuple[int, int, bool]:
        """Of two tips, the higher one's log has everything committed that the other's has (Raft, section 5.4.1)."""
        return self.epoch, self.version, self.closing


def best(log_heads: Mapping[str, LogHead], own: str) -> str:
    """Return the claimed region whose log a new owner goes on with; of equal ones its own, or the first."""
    highest = max(log_head.rank for log_head in log_heads.values())
    return min(
        (region for region in log_heads if log_heads[region].rank == highest), key=lambda region: (region != own, region)
    )


def counts(message: Claim | Record, epoch: int) -> bool:
    """Whether a claim or an entry counts behind others of at most this epoch: what is too far beyond them is passed over."""
    return message.epoch <= epoch + (CLAIM_STEP if isinstance(message, Claim) else EPOCH_STEP)


def outbids(message: Claim | Record, epoch: int) -> bool:
    """Whether a claim or an entry ends the turn of the owner that writes with this epoch."""
    return message.epoch > epoch and counts(message, epoch)


class Linked(Protocol):
    """An entry as far as its place in the chain goes."""

    @property
    def entry_hash(self) -> bytes: ...

    @property
    def previous(self) -> bytes: ...

    @property
    def sequence(self) -> int: ...


L = TypeVar("L", bound=Linked)


class UncommittedEntries(Generic[L]):
    """Entries of a fragment that a reader of one region's log holds back until a notice says that they are committed.

    ``limit``: at most so many entries, the newest; None: all of them.
    """

    def __init__(self, limit: int | None = MAX_UNCOMMITTED) -> None:
        self._entries: dict[bytes, L] = {}
        self._limit = limit

    def add(self, entry: L) -> None:
        """Hold an entry back; stored twice it is one entry."""
        self._entries.pop(entry.entry_hash, None)
        self._entries[entry.entry_hash] = entry
        if self._limit is not None and len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]

    def commit(self, entry_hash: bytes) -> list[L]:
        """Return the entries that a notice of one commits and that were not committed before, in the order of the chain.

        Return nothing if the entry was read before this reader began, or has been returned. An entry stored before it that is
        not committed with it never will be.
        """
        path = self.path(entry_hash)
        if path:
            last = path[-1].sequence
            self._entries = {name: entry for name, entry in self._entries.items() if entry.sequence > last}
        return path

    def path(self, entry_hash: bytes) -> list[L]:
        """Return the entries that lead up to one, as far back as they are held."""
        path: list[L] = []
        while (entry := self._entries.get(entry_hash)) is not None:
            path.append(entry)
            entry_hash = entry.previous
        return path[::-1]
