"""A learner's hold on its shares of the data: leases in the run's bucket, and how far it has trained each.

The trainer's thread books batches and asks what is held; the loop's thread looks at the table now and then. A share that is
let go is first no longer dealt to the trainer, and freed once the batches that were dealt before have been booked, so that
whoever takes it up goes on exactly there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from diloco import membership
from diloco.core import leases
from diloco.core.leases import Shares
from diloco.errors import FenceError
from diloco.membership import Run
from diloco.observe import Logger
from diloco.settings import LearnerSettings
from diloco.wire.messages import Range

LOOKS_A_LEASE = 10  # how often a learner looks at the table while a silent one would still hold what it has
PULSED_RANGES = 16
# steps after which whatever was dealt before has been booked: one is in flight, one was made while it ran
DEALT_STEPS = 3


class Leaseholder:
    """One learner's leases. ``take`` and ``look`` change the table by compare-and-set."""

    def __init__(self, run: Run, settings: LearnerSettings, incarnation: int, log: Logger) -> None:
        self.run, self.settings, self.incarnation, self.log = run, settings, incarnation, log
        self._held: dict[int, int] = {}  # by share: the batch that the lease begins at
        self._positions: dict[int, int] = {}  # by share: the batch after the last one trained
        self._newest: dict[int, tuple[int, int]] = {}  # by share, newest last: first and number of the batches trained last
        self._steps = 0
        self.batch_tokens = 0
        self._letting_go: tuple[int, int] | None = None  # a share, and the steps booked when it was dealt last
        self._lock = threading.Lock()

    def leased(self) -> dict[int, int]:
        """By share held: the batch at which it begins or goes on."""
        with self._lock:
            letting_go = self._letting_go[0] if self._letting_go else None
            return {
                share: max(first, self._positions.get(share, 0)) for share, first in self._held.items() if share != letting_go
            }

    def book(self, share: int, batch: int, tokens: int) -> None:
        """A batch was trained."""
        with self._lock:
            self.batch_tokens = tokens
            first, count = self._newest.pop(share, (batch, 0))
            self._newest[share] = (first, count + 1) if first + count == batch else (batch, 1)
            self._positions[share] = max(batch + 1, self._positions.get(share, 0))
            self._steps += 1

    def trained(self) -> list[Range]:
        """The newest of the ranges that this incarnation has trained, each whole."""
        with self._lock:
            newest = list(self._newest.items())[-PULSED_RANGES:]
        return sorted((share, first, count) for share, (first, count) in newest)

    def positions(self) -> list[tuple[int, int]]:
        """By share: the batch after the last one trained, for a checkpoint."""
        with self._lock:
            return sorted(self._positions.items())

    def restore(self, positions: Iterable[tuple[int, int]]) -> None:
        """Take over what :meth:`positions` gave, where it is further than what is known."""
        with self._lock:
            for share, batch in positions:
                self._positions[int(share)] = max(int(batch), self._positions.get(int(share), 0))

    async def take(self, ends: Mapping[int, int]) -> None:
        """Hold at least one share; ``ends`` says by share how far the log has merged its batches."""
        while True:
            table, revision = await membership.shares(self.run)
            changed = leases.join(table, self.settings.name, self.incarnation, self.settings.share, ends)
            if changed is None or await self._set(changed, revision):
                self._hold(changed or table, ends)
                return

    async def look(self, ends: Mapping[int, int]) -> None:
        """See what others have changed; take another share if one's own was given away, let go of one too many."""
        table, revision = await membership.shares(self.run)
        if not table.held_by(self.settings.name):
            self.log.warning("shares_given_away", shares=sorted(self._held))
            await self.take(ends)
            return
        changed = leases.claim(table, self.settings.name, self.incarnation, self.run.settings.learners, ends)
        changed = changed or self._let_go(table)
        if changed is None or await self._set(changed, revision):
            self._hold(changed or table, ends)

    async def leave(self) -> None:
        """Free all that is held, to go on where this learner stopped."""
        while True:
            table, revision = await membership.shares(self.run)
            changed = leases.free(table, self._mine(table), dict(self.positions()))
            if changed is None or await self._set(changed, revision):
                return

    def _let_go(self, table: Shares) -> Shares | None:
        share = leases.surplus(table, self.settings.name, self.run.settings.learners)
        with self._lock:
            if share is None or self._letting_go is None or self._letting_go[0] != share:
                self._letting_go = None if share is None else (share, self._steps)
                return None
            if self._steps < self._letting_go[1] + DEALT_STEPS:
                return None
            return leases.free(table, [share], self._positions)

    def _hold(self, table: Shares, ends: Mapping[int, int]) -> None:
        mine = {lease.share: lease.next for lease in table.held_by(self.settings.name)}
        with self._lock:
            # what is held on goes on as it was dealt, however far the log has come: that is this learner's own work
            held = {share: max(first, self._held.get(share, ends.get(share, 0))) for share, first in mine.items()}
            changed, self._held = held.keys() != self._held.keys(), held
            if self._letting_go is not None and self._letting_go[0] not in held:
                self._letting_go = None
        if changed:
            self.log.info("shares", held=sorted(held))

    def _mine(self, table: Shares) -> list[int]:
        return [lease.share for lease in table.held_by(self.settings.name)]

    async def _set(self, table: Shares, revision: int) -> bool:
        try:
            await membership.set_shares(self.run, table, revision)
        except FenceError:
            return False
        return True
