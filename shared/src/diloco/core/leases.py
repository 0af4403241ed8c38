"""Who trains on which share of the data: leases, as a small table that changes by compare-and-set.

Shares 0 to ``learners - 1`` are the run's. A further share is another lap over the text of share ``id % learners``, in
another order, so that any number of learners can join and none waits. A share has one holder at most, and is held until its
holder lets it go or is found gone; where a share is taken up again, its position never goes back.

Everything here is pure: tables in, tables out. None instead of a table: it stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from diloco.errors import FormatError
from diloco.wire.messages import Count, MemberName, Pulse, ShareId

BLOCK_BATCHES = 8
MAX_HELD = 32  # shares of one learner: what it has done since it was last merged must fit into an offer's ranges
ASLEEP_S = 5.0  # a steward that did not look for so long was asleep
_LAP = 0x9E3779B1  # odd, so that 2**32 laps have as many seeds


class Lease(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A share, who holds it in which incarnation (None: nobody), and the batch it was to go on at when that was written."""

    share: ShareId
    holder: MemberName | None
    incarnation: Count
    next: Count


class Shares(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The table: a lease by share that was ever held or is the run's, in order."""

    leases: list[Lease]

    def __post_init__(self) -> None:
        if [lease.share for lease in self.leases] != list(range(len(self.leases))):
            raise ValueError("shares are not 0, 1, 2, ... each once")

    def held_by(self, learner: str) -> list[Lease]:
        """The leases of a learner."""
        return [lease for lease in self.leases if lease.holder == learner]

    def pack(self) -> bytes:
        """As it stands in the bucket."""
        return msgspec.msgpack.encode(self)

    def held(self) -> dict[str, list[int]]:
        """Shares by holder."""
        shares: dict[str, list[int]] = {}
        for lease in self.leases:
            if lease.holder is not None:
                shares.setdefault(lease.holder, []).append(lease.share)
        return shares

    def _with(self, *leases: Lease) -> Shares:
        changed = {lease.share: lease for lease in leases}
        return Shares([changed.pop(lease.share, lease) for lease in self.leases] + list(changed.values()))


def begin(learners: int) -> Shares:
    """The table of a run in which nobody holds a share yet."""
    return Shares([Lease(share, None, 0, 0) for share in range(learners)])


def unpack(data: bytes) -> Shares:
    """What :meth:`Shares.pack` gave.

    Raises:
        FormatError: it is no such table.
    """
    try:
        return msgspec.msgpack.decode(data, type=Shares)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"the table of data shares: {error}") from None


def data_of(share: int, learners: int, seed: int) -> tuple[int, int]:
    """Which of the text's ``learners`` parts a share is of, and the seed of its order."""
    lap, part = divmod(share, learners)
    return part, (seed + lap * _LAP) % 2**32


def join(table: Shares, learner: str, incarnation: int, preferred: int | None, ends: Mapping[int, int]) -> Shares | None:
    """Lease to a learner: what it holds already, else the share that it prefers, else any of the run's, else another lap.

    ``ends`` says by share how far the log has merged its batches.
    """
    mine = table.held_by(learner)
    if not mine:
        unheld = [lease for lease in table.leases if lease.holder is None]
        unheld.sort(key=lambda lease: (lease.share != preferred, lease.share))
        mine = unheld[:1] or [Lease(len(table.leases), None, 0, 0)]
    return _changed(table, [_leased(lease, learner, incarnation, ends) for lease in mine])


def free(table: Shares, shares: Collection[int], positions: Mapping[int, int]) -> Shares | None:
    """Free shares, to go on at ``positions``."""
    return _changed(table, [_freed(lease, positions) for lease in table.leases if lease.share in shares])


def claim(table: Shares, learner: str, incarnation: int, learners: int, ends: Mapping[int, int]) -> Shares | None:
    """Lease a free share of the run's to a learner that has further laps alone."""
    if any(lease.share < learners for lease in table.held_by(learner)):
        return None
    return _changed(table, [_leased(table.leases[share], learner, incarnation, ends) for share in _unheld(table, learners)[:1]])


def surplus(table: Shares, learner: str, learners: int) -> int | None:
    """A share that a learner is to let go: a lap beside one of the run's, or one of several that another has none of."""
    held = table.held()
    mine = held.get(learner, [])
    another_has_none = not _unheld(table, learners) and any(shares[0] >= learners for shares in held.values())
    has_lap = mine[-1:] >= [learners]
    return mine[-1] if len(mine) > 1 and (has_lap or another_has_none) else None


def _leased(lease: Lease, learner: str, incarnation: int, ends: Mapping[int, int]) -> Lease:
    return Lease(lease.share, learner, incarnation, max(lease.next, ends.get(lease.share, 0)))


def _freed(lease: Lease, positions: Mapping[int, int]) -> Lease:
    return replace(lease, holder=None, next=max(lease.next, positions.get(lease.share, 0)))


def _changed(table: Shares, leases: list[Lease]) -> Shares | None:
    changed = table._with(*leases)
    return None if changed == table else changed


@dataclass
class Steward:
    """Sees to it that each of the run's shares has a holder that lives. Given what is heard, and the time of one's own clock.

    A learner that was silent for ``lease_s`` holds nothing any more. What nobody holds goes to the living learner with the
    fewest shares: at once if its holder was found gone, else when nobody has taken it for ``lease_s``, since a run's learners
    do not all join at once. It goes on behind the last batch that a version merged: what was trained beyond that died with its
    learner, and is trained again.
    """

    learners: int
    lease_s: float
    _heard: dict[str, tuple[float, int]] = field(default_factory=dict)  # by learner: when last, and its incarnation
    _free: dict[int, float] = field(default_factory=dict)  # by share that nobody holds: since when
    _looked_s: float | None = None

    def hear(self, pulse: Pulse, now_s: float) -> None:
        """Take in a learner's pulse."""
        if pulse.role == "learner":
            self._heard[pulse.learner] = now_s, pulse.incarnation

    def look(self, table: Shares, ends: Mapping[int, int], now_s: float) -> Shares | None:
        """What is to become of the table; to be asked every second or so. ``ends`` as in :func:`join`."""
        if self._looked_s is None or now_s - self._looked_s > ASLEEP_S:  # what was not heard meanwhile says nothing
            self._heard = {learner: (now_s, incarnation) for learner, (_, incarnation) in self._heard.items()}
        self._looked_s = now_s
        for lease in table.leases:
            if lease.holder is not None:
                self._heard.setdefault(lease.holder, (now_s, lease.incarnation))
        gone = {lease.share for lease in table.leases if lease.holder and self._silent_s(lease.holder, now_s) >= self.lease_s}
        cleared = free(table, gone, ends) or table
        since = {share: self._free.get(share, now_s) for share in _unheld(cleared, self.learners)}
        self._free = {share: now_s - self.lease_s if share in gone else at_s for share, at_s in since.items()}
        due = [share for share, at_s in self._free.items() if now_s - at_s >= self.lease_s]
        held = {name: shares for name, shares in cleared.held().items() if self._silent_s(name, now_s) < self.lease_s / 2}
        granted = []
        for share in due:
            takers = [name for name, shares in held.items() if len(shares) < MAX_HELD]
            if takers:
                taker = min(takers, key=lambda name: (sum(s < self.learners for s in held[name]), len(held[name]), name))
                held[taker].append(share)
                granted.append(_leased(cleared.leases[share], taker, self._heard[taker][1], ends))
        changed = cleared._with(*granted)
        return None if changed == table else changed

    def _silent_s(self, learner: str, now_s: float) -> float:
        return now_s - self._heard[learner][0]


def _unheld(table: Shares, learners: int) -> list[int]:
    return [lease.share for lease in table.leases[:learners] if lease.holder is None]


@dataclass
class Rota:
    """Whose turn it is among the shares that a learner holds: a block of batches of each.

    The sequence of batches follows from the sequence of leases alone.
    """

    share: int = -1
    _next: dict[int, int] = field(default_factory=dict)  # by share held
    _left: int = 0  # of the block

    def next(self, leased: Mapping[int, int]) -> tuple[int, int]:
        """Share and index of the next batch. ``leased`` gives the shares held now, and the batch that each is to begin at.

        While none is held, as when a learner finds after a long sleep that its share was given away, it stays with the last
        one: a learner never waits.
        """
        leased = leased or {self.share: 0}
        self._next = {share: max(first, self._next.get(share, 0)) for share, first in leased.items()}
        if not self._left or self.share not in leased:
            self.share = min(leased, key=lambda share: (share <= self.share, share))
            self._left = BLOCK_BATCHES
        self._left -= 1
        index = self._next[self.share]
        self._next[self.share] += 1
        return self.share, index
