"""Leases of the data's shares to learners, as a table that everybody folds alike from the learners' claims.

Shares 0 to ``learners - 1`` are the run's. A further share is another lap over the text of share ``id % learners``, in
another order, so that any number of learners can join and none waits. A share has one holder at most, until the holder lets it
go or is gone. When a share is leased again, its position never goes back.

Each learner writes one *claim*, under a key of its own: what it holds, and what it let go. Claims to one share are ordered by
revisions, which the server gives: the first one has the share. A learner that takes a share from a holder who is gone, or
that was let go, voids all claims of up to a revision that it names. Numbers that rise with each holder would do too, but a
learner could choose one that cannot be outbid; it cannot name a revision beyond its own.

Who is gone is judged by each learner for itself (:class:`LeaseWatch`), and changes nothing until it claims the share. So the
table follows from the claims alone, and no other service has a part in it.

Everything here is pure: claims and tables in, claims and tables out. None instead of a claim: no change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from diloco.core.syncer.claims import StepBounds, furthest_batch
from diloco.errors import ClaimError, FormatError
from diloco.settings.run import RunSettings
from diloco.wire.fields import MAX_MEMBERS, Count, MemberName, ShareId

BLOCK_BATCHES = 8
MAX_HELD = 32  # shares of one learner: its work since its last merge must fit into an offer's ranges
MAX_ENTRIES = 64  # of a claim: shares held, and shares let go that are not taken yet
MAX_CLAIM_BYTES = 4096  # more than any claim of so many entries needs
LOOKS_A_LEASE = 10  # looks of each learner within `liveness.lease_s`
_LAP = 0x9E3779B1  # odd, so that 2**32 laps have as many seeds

FirstBatch = Callable[[int], int]  # by share: the batch with which it begins in this run


class ClaimedShare(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Claim of a learner to one share.

    ``next``: the batch at which it began, or at which the next holder begins if it is not held. ``since``: the revision of
    the first claim in which the learner held it; 0 is this claim's. ``over``: claims to the share since this revision or an
    earlier one are void, but for this one.
    """

    share: ShareId
    held: bool
    next: Count
    since: Count
    over: Count


class ShareClaim(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Value of a learner's key: the shares that it holds or let go, in order, and the incarnation that wrote it."""

    learner: MemberName
    incarnation: Count
    entries: Annotated[list[ClaimedShare], Meta(max_length=MAX_ENTRIES)]

    def pack(self) -> bytes:
        """Return the stored form."""
        return msgspec.msgpack.encode(self)


_DECODER = msgspec.msgpack.Decoder(ShareClaim)


def unpack(data: bytes, learner: str, revision: int, settings: RunSettings, bounds: StepBounds) -> ShareClaim:
    """Return the claim under a learner's key at a revision; a ``since`` of 0 has become that revision.

    ``bounds``: of the run's steps.

    Raises:
        FormatError: the bytes are no claim, or another learner's.
        ClaimError: it states what cannot be.
    """
    what = f"the claim of {learner} to data shares"
    if len(data) > MAX_CLAIM_BYTES:
        raise FormatError(f"{what} has {len(data)} bytes, at most {MAX_CLAIM_BYTES} are allowed")
    try:
        claim = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{what}: {error}") from None
    if claim.learner != learner:
        raise FormatError(f"{what} names {claim.learner!r}")
    shares = [entry.share for entry in claim.entries]
    if shares != sorted(set(shares)):
        raise FormatError(f"{what}: its shares must be in ascending order, without duplicates")
    entries = [replace(entry, since=entry.since or revision) for entry in claim.entries]
    for entry in entries:
        if not entry.over + entry.held <= entry.since <= revision:
            raise FormatError(
                f"{what}: share {entry.share} since revision {entry.since}, over {entry.over}: expected over before since, and "
                f"both at most {revision}"
            )
    limits = [("shares held", sum(entry.held for entry in entries), MAX_HELD)]
    for entry in entries:
        limits.append(("a share", entry.share, settings.learners + MAX_MEMBERS - 1))
        furthest = furthest_batch(settings, bounds, entry.share)
        limits.append((f"the next batch of share {entry.share}", entry.next, furthest))
    for stated, value, most in limits:
        if value > most:
            raise ClaimError(f"{what} is impossible: {stated}: {value}, at most {most}")
    return replace(claim, entries=entries)


@dataclass(frozen=True)
class Lease:
    """Lease of a share: its holder (None: it is free) and that one's entry, and what the next holder's entry is to have.

    ``next``: its first batch, as far as claims say. ``newest``: the newest revision that any claim to the share names.
    """

    share: int
    holder: str | None = None
    entry: ClaimedShare | None = None
    next: int = 0
    newest: int = 0


@dataclass(frozen=True)
class Shares:
    """The table: by share, in order, a lease for each one of the run, and for each further one that is claimed."""

    leases: Mapping[int, Lease]
    learners: int
    first_batch: FirstBatch

    def lease(self, share: int) -> Lease:
        """Return the lease of a share; an unclaimed one is free."""
        return self.leases.get(share, Lease(share, next=self.first_batch(share)))

    def held(self) -> dict[str, list[int]]:
        """Return the shares by holder."""
        shares: dict[str, list[int]] = {}
        for lease in self.leases.values():
            if lease.holder is not None:
                shares.setdefault(lease.holder, []).append(lease.share)
        return shares

    def held_by(self, learner: str) -> list[Lease]:
        """Return the leases of a learner."""
        return [lease for lease in self.leases.values() if lease.holder == learner]

    def free(self) -> list[Lease]:
        """Return the free leases."""
        return [lease for lease in self.leases.values() if lease.holder is None]

    def unheld(self) -> list[int]:
        """Return the run's free shares."""
        return [lease.share for lease in self.free() if lease.share < self.learners]


def fold(claims: Mapping[str, ShareClaim], learners: int, first_batch: FirstBatch = lambda share: 0) -> Shares:
    """Return the table that claims, by learner, make of a run's shares; ``first_batch`` gives where a share begins."""
    stated: dict[int, list[tuple[str, ClaimedShare]]] = {share: [] for share in range(learners)}
    for learner in sorted(claims):
        for entry in claims[learner].entries:
            stated.setdefault(entry.share, []).append((learner, entry))
    leases = {share: _lease(share, stated[share], first_batch(share)) for share in sorted(stated)}
    return Shares(leases, learners, first_batch)


def _lease(share: int, stated: list[tuple[str, ClaimedShare]], first: int) -> Lease:
    over = max((entry.over for _, entry in stated), default=0)
    newest = max([over, *(entry.since for _, entry in stated if entry.held)])
    position = max([first, *(entry.next for _, entry in stated)])
    standing = [(learner, entry) for learner, entry in stated if entry.held and entry.since > over]
    if not standing:
        return Lease(share, None, None, position, newest)
    holder, claim = min(standing, key=lambda claimed: claimed[1].since)
    return Lease(share, holder, claim, position, newest)


def data_of(share: int, learners: int, seed: int) -> tuple[int, int]:
    """Return a share's part of the text, of ``learners`` parts, and the seed of its order."""
    lap, part = divmod(share, learners)
    return part, (seed + lap * _LAP) % 2**32


def wanted(table: Shares, preferred: int | None) -> int:
    """Return the share for a learner that has none: its preferred one, else any free one, else another lap."""
    free = [lease.share for lease in table.free()]
    laps = range(table.learners, table.learners + MAX_MEMBERS)
    lap = next((share for share in laps if share not in table.leases), laps[-1])
    return min(free, key=lambda share: (share != preferred, share), default=lap)


def spare(table: Shares, learner: str) -> list[int]:
    """Return a free share of the run for a learner that holds nothing but further laps; empty otherwise."""
    return [] if any(lease.share < table.learners for lease in table.held_by(learner)) else table.unheld()[:1]


def surplus(table: Shares, learner: str, gone: Collection[str] = ()) -> int | None:
    """Return a share that a learner shall let go: a lap beside a share of the run, or one of several while another has none.

    Learners that are gone (``gone``) need none.
    """
    held = table.held()
    mine = held.get(learner, [])
    without = (name for name, shares in held.items() if shares[0] >= table.learners and name not in gone)
    another_has_none = not table.unheld() and any(without)
    has_lap = mine[-1:] >= [table.learners]
    return mine[-1] if len(mine) > 1 and (has_lap or another_has_none) else None


def revised(
    table: Shares,
    claim: ShareClaim,
    *,
    take: Collection[int] = (),
    free: Collection[int] = (),
    positions: Mapping[int, int],
) -> ShareClaim | None:
    """Return the claim with which a learner takes some shares and lets go of others; ``claim`` is its present one.

    ``positions``: by share, the batch after the last one merged, of shares to take; and after the last one trained, of shares
    to free. The claim forgets what others have, and what it let go and others have taken since.
    """
    entries: dict[int, ClaimedShare] = {}
    for entry in claim.entries:
        lease = table.leases[entry.share]
        first = max(lease.next, positions.get(entry.share, 0))
        if lease.holder == claim.learner and entry.share in free:
            first = max(entry.next, positions.get(entry.share, 0))
            entries[entry.share] = ClaimedShare(entry.share, False, first, lease.newest, lease.newest)
        elif lease.holder == claim.learner or (not entry.held and not _taken_over(entry, lease)):
            entries[entry.share] = entry
    for share in take:
        lease = table.lease(share)
        entries[share] = ClaimedShare(share, True, max(lease.next, positions.get(share, 0)), 0, lease.newest)
    held = [entry for entry in entries.values() if entry.held][:MAX_HELD]
    freed = sorted((entry for entry in entries.values() if not entry.held), key=lambda entry: entry.next)
    kept = [*held, *freed[-(MAX_ENTRIES - MAX_HELD) :]]
    changed = replace(claim, entries=sorted(kept, key=lambda entry: entry.share))
    return None if changed == claim else changed


def _taken_over(freed: ClaimedShare, lease: Lease) -> bool:
    """Whether a share that was let go has a holder that knows of it."""
    return lease.entry is not None and lease.entry.over >= freed.over and lease.entry.next >= freed.next


@dataclass
class LeaseWatch:
    """Tells one learner which of the run's shares it is to take, by the times at which learners were last heard.

    The times are of its own clock: those of heartbeats, or those that a syncer's summary states.

    A learner that was silent for ``lease_s`` is gone. Its shares, and those that were free for ``lease_s`` (a run's learners
    do not all join at once), are for the living learner with the fewest, at once; and for the next one after each fifth of
    ``lease_s``, since each learner hears for itself, and not all do as they should. They continue behind the last batch that
    a version merged: later work died with its learner, and is done again.

    A learner that does not hear of its own heartbeats takes nothing: it is deaf, and not the others silent.
    """

    learner: str
    lease_s: float
    gone: frozenset[str] = frozenset()
    _heard: dict[str, float] = field(default_factory=dict)  # by holder of a share: time of its newest heartbeat
    _free: dict[int, float] = field(default_factory=dict)  # by free share of the run: since when
    _looked_s: float | None = None

    def hear(self, learner: str, heard_s: float) -> None:
        """Take in when a learner was last heard. Nothing is kept of learners that held no share at the last look."""
        if learner in self._heard:
            self._heard[learner] = max(self._heard[learner], heard_s)

    def due(self, table: Shares, now_s: float) -> list[int]:
        """Return the shares that this learner is to take now; called :data:`LOOKS_A_LEASE` times in ``lease_s``."""
        held = table.held()
        if (
            self._looked_s is None or now_s - self._looked_s > self.lease_s / 2
        ):  # frozen or cut off: silence meanwhile means nothing
            self._heard.clear()
        self._looked_s = now_s
        self._heard = {name: self._heard.get(name, now_s) for name in (*held, self.learner)}
        silent = {name: now_s - heard_s for name, heard_s in self._heard.items()}
        self.gone = frozenset(name for name in held if silent[name] >= self.lease_s and name != self.learner)
        self._free = {share: self._free.get(share, now_s) for share in table.unheld()}
        overdue = {share: now_s - since_s - self.lease_s for share, since_s in self._free.items()}
        for name in self.gone:
            overdue |= {share: silent[name] - self.lease_s for share in held[name] if share < table.learners}
        if silent[self.learner] >= self.lease_s / 2:
            return []
        living = {name: shares for name, shares in held.items() if silent[name] < self.lease_s / 2}
        return self._turns({share: late_s for share, late_s in sorted(overdue.items()) if late_s >= 0}, living, table)

    def _turns(self, overdue: Mapping[int, float], held: dict[str, list[int]], table: Shares) -> list[int]:
        mine, turn_s = list[int](), 2 * self.lease_s / LOOKS_A_LEASE
        for share, late_s in overdue.items():
            takers = [name for name, shares in held.items() if len(shares) < MAX_HELD]
            takers.sort(key=lambda name: (sum(s < table.learners for s in held[name]), len(held[name]), name))
            if self.learner in takers[: 1 + int(late_s / turn_s)]:
                mine.append(share)
            if takers:
                held[takers[0]].append(share)
        return mine


@dataclass
class RoundRobin:
    """Round robin over the shares that a learner holds: a block of batches of each.

    The sequence of batches follows from the sequence of leases alone.
    """

    share: int = -1
    _next: dict[int, int] = field(default_factory=dict)  # by share held: the next batch
    _left: int = 0  # of the block

    def next(self, leased: Mapping[int, int]) -> tuple[int, int]:
        """Return share and index of the next batch. ``leased``: the shares held now, and the batch at which each begins.

        Without a share, as when a learner was frozen and its share given away, it stays with the last one: a learner never
        waits.
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
