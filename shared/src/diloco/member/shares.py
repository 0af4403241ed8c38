"""A learner's leases of the data's shares, and its position in each.

The trainer's thread books batches and reads the leases; the loop's thread looks at all learners' claims now and then, and
writes the own one. A share is trained on once the claims that were read after the own one was written say that it is held.
Letting a share go takes two steps: the trainer gets no more batches of it, and it is freed once all batches dealt before are
booked. So its next holder continues exactly there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import msgspec

from diloco.control.creation import KnownRun
from diloco.control.shares import Claims
from diloco.core.run import leases
from diloco.core.run.leases import LeaseWatch, ShareClaim, Shares
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import BrokerError, FenceError
from diloco.process.observe import Counted, Logger
from diloco.settings.service import LearnerSettings
from diloco.wire.fields import Range

HEARTBEAT_RANGES = 16  # the newest ones; older ones were in heartbeats before
# steps after which every batch dealt before is booked: one is in flight, one was made while it ran
DEALT_STEPS = 3
FREE_TIMEOUT_S = 2.0  # a few round trips; others take over what is left


class LeaseClient:
    """One learner's leases. ``take`` and ``look`` change its claim."""

    def __init__(
        self, run: KnownRun, settings: LearnerSettings, incarnation: int, fragments: FragmentMap, refused: Counted, log: Logger
    ) -> None:
        """``fragments``: the map that learners are admitted with; ``refused`` counts claims passed over."""
        self.run, self.settings, self.incarnation, self.log = run, settings, incarnation, log
        self.name, self.learners, self.refused = settings.name, run.created.learners, refused
        self._claims = Claims(run, settings.name, fragments, refused)
        self._watch = LeaseWatch(settings.name, run.created.liveness.lease_s)
        self._held: dict[int, int] = {}  # by share: the batch that the lease begins at
        self._positions: dict[int, int] = {}  # by share: the batch after the last one trained
        self._newest: dict[int, tuple[int, int]] = {}  # by share, newest last: first and number of the batches trained last
        self._steps = 0
        self.batch_tokens = 0  # of a step, at most
        self._letting_go: tuple[int, int] | None = None  # a share, and the steps booked when it was dealt last
        self._lock = threading.Lock()

    def leased(self) -> dict[int, int]:
        """Return, by share held, the batch at which it begins or continues."""
        with self._lock:
            letting_go = self._letting_go[0] if self._letting_go else None
            return {
                share: max(first, self._positions.get(share, 0)) for share, first in self._held.items() if share != letting_go
            }

    def book(self, share: int | None, batch: int, most_tokens: int) -> None:
        """Note that a batch was trained; a step has ``most_tokens`` at most."""
        assert share is not None
        with self._lock:
            self.batch_tokens = most_tokens
            first, count = self._newest.pop(share, (batch, 0))
            self._newest[share] = (first, count + 1) if first + count == batch else (batch, 1)
            self._positions[share] = max(batch + 1, self._positions.get(share, 0))
            self._steps += 1

    def trained(self) -> list[Range]:
        """Return the newest of the ranges that this incarnation has trained, each whole."""
        with self._lock:
            newest = list(self._newest.items())[-HEARTBEAT_RANGES:]
        return sorted((share, first, count) for share, (first, count) in newest)

    def positions(self) -> list[tuple[int, int]]:
        """Return, by share, the batch after the last one trained, for a checkpoint."""
        with self._lock:
            return sorted(self._positions.items())

    def restore(self, positions: Iterable[tuple[int, int]]) -> None:
        """Take over the result of :meth:`positions`, where it is further than the known positions."""
        with self._lock:
            for share, batch in positions:
                self._positions[int(share)] = max(int(batch), self._positions.get(int(share), 0))

    def hear(self, learner: str, heard_s: float) -> None:
        """Take in when a learner was last heard, whatever its heartbeat said: the name is its subject's."""
        if learner not in self.run.now.ejected:  # others get its data
            self._watch.hear(learner, heard_s)

    async def take(self, ends: Mapping[int, int]) -> None:
        """Lease at least one share; ``ends``: by share, the batch after the last one that the log has merged."""
        while True:
            table, claim = await self._read()
            mine = {lease.share for lease in table.held_by(self.name)}
            if mine and claim.incarnation == self.incarnation:
                self._hold(table, ends)
                return
            take = [] if mine else [leases.wanted(table, self.settings.share)]
            claim = msgspec.structs.replace(claim, incarnation=self.incarnation)
            await self._set(leases.revised(table, claim, take=take, positions=ends) or claim)

    async def look(self, ends: Mapping[int, int], now_s: float) -> None:
        """Read the claims; take shares whose holders are gone, or another one if all are lost; let one go if it is too many."""
        table, claim = await self._read()
        if claim.incarnation > self.incarnation:
            return  # a younger process of this name: this one ends soon
        self._watch.lease_s = self.run.in_force.liveness.lease_s
        due = self._watch.due(table, now_s)
        if not table.held_by(self.name):
            self.log.warning("shares_lost", shares=sorted(self._held))
            await self.take(ends)
            return
        take = due or leases.spare(table, self.name)
        free = [] if take else self._let_go(table)
        with self._lock:
            positions = dict(self._positions) if free else ends
        changed = leases.revised(table, claim, take=take, free=free, positions=positions)
        if changed is not None and await self._set(changed):
            table, _ = await self._read()
        self._hold(table, ends)

    async def leave(self) -> None:
        """Free all shares, which continue where this learner stopped."""
        while True:
            table, claim = await self._read()
            mine = [lease.share for lease in table.held_by(self.name)]
            changed = leases.revised(table, claim, free=mine, positions=dict(self.positions()))
            if claim.incarnation > self.incarnation or changed is None or await self._set(changed):
                return

    async def _read(self) -> tuple[Shares, ShareClaim]:
        """Return the table of leases and the own claim."""
        claims = await self._claims.read()
        table = leases.fold(claims, self.learners, self.run.created.first_batch)
        return table, claims.get(self.name) or ShareClaim(self.name, self.incarnation, [])

    def _let_go(self, table: Shares) -> Collection[int]:
        share = leases.surplus(table, self.name, self._watch.gone)
        with self._lock:
            if share is None or self._letting_go is None or self._letting_go[0] != share:
                self._letting_go = None if share is None else (share, self._steps)
                return []
            return [] if self._steps < self._letting_go[1] + DEALT_STEPS else [share]

    def _hold(self, table: Shares, ends: Mapping[int, int]) -> None:
        mine = {lease.share: lease.entry.next for lease in table.held_by(self.name) if lease.entry is not None}
        with self._lock:
            # a share that stays continues as it was dealt, however far the log has come: that is this learner's own work
            held = {share: max(first, self._held.get(share, ends.get(share, 0))) for share, first in mine.items()}
            changed, self._held = held.keys() != self._held.keys(), held
            if self._letting_go is not None and self._letting_go[0] not in held:
                self._letting_go = None
        if changed:
            self.log.info("shares", held=sorted(held))

    async def _set(self, claim: ShareClaim) -> bool:
        try:
            await self._claims.write(claim)
        except FenceError:
            return False
        return True


class OwnData:
    """Stands for the leases of a learner that trains on data of its own: it holds no share, and others are dealt all of them.

    Its offers state no batches, and the run's ledger says so.
    """

    def __init__(self, incarnation: int, batch_tokens: int) -> None:
        """Begin; a step has ``batch_tokens`` at most."""
        self.incarnation, self.batch_tokens = incarnation, batch_tokens

    def leased(self) -> dict[int, int]:
        return {}

    def book(self, share: int | None, batch: int, most_tokens: int) -> None:
        pass

    def trained(self) -> list[Range]:
        return []

    def positions(self) -> list[tuple[int, int]]:
        return []

    def restore(self, positions: Iterable[tuple[int, int]]) -> None:
        pass

    def hear(self, learner: str, heard_s: float) -> None:
        pass

    async def take(self, ends: Mapping[int, int]) -> None:
        pass

    async def look(self, ends: Mapping[int, int], now_s: float) -> None:
        pass

    async def leave(self) -> None:
        pass


Leases: TypeAlias = LeaseClient | OwnData


async def free_shares(leases: Leases, log: Logger) -> None:
    """Free all shares of a learner that leaves, if that can be done soon."""
    try:
        await asyncio.wait_for(leases.leave(), FREE_TIMEOUT_S)
    except (BrokerError, TimeoutError) as error:  # others take them over once this learner is silent for long
        log.warning("shares_not_freed", reason=str(error))
