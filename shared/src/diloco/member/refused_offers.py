"""A learner's look at what the run's owners refuse of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from diloco.control.creation import KnownRun
from diloco.core.learner.refusals import RefusalAccount
from diloco.errors import BrokerError
from diloco.member.shared import SharedLearner
from diloco.process.observe import Logger
from diloco.wire.refusals import Refusals, refusals_key, unpack_refusals

LOOK_EVERY_S = 2.0  # owners report once a second; each look is one request of the server
UNMERGED_S = 300.0  # from the first stored offer: many rounds, also of learners with long steps


class RefusalWatch:
    """Reads the reports of refused offers, warns of each reason once, and ends the learner where nothing else helps."""

    def __init__(self, run: KnownRun, name: str, shared: SharedLearner, log: Logger) -> None:
        self._run, self._name, self._shared, self._log = run, name, shared, log
        self._learner = shared.learner
        self._account = RefusalAccount()
        self._read: Refusals | None = None
        self._warned = set[str]()
        self._stored_s: float | None = None  # when an offer was first seen to be stored

    @property
    def offers(self) -> dict[str, int]:
        """Offers of this process that were refused, by reason."""
        return dict(self._account.offers.items())

    async def work(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._has_offered():
                try:
                    await self.look()
                except BrokerError as error:
                    self._log.debug("refusals_unknown", reason=str(error))
                self._warn_of_unmerged()

    async def look(self) -> None:
        """Read the report and act on it.

        The open round that a refused offer answered is answered again, by a new offer: the owner waits for one.

        Raises:
            BrokerError: the server is away.
        """
        stored = await self._run.registry.get(refusals_key(self._name))
        read = unpack_refusals(None if stored is None else stored[0], self._name)
        if read is None or read == self._read or read.incarnation != self._learner.incarnation:
            return
        self._read = read
        with self._shared.lock:
            states = self._learner.fragments
            merged = {state.index: state.newest.chain.cursor(self._name) for state in states}
            more = self._account.take_in(read, merged)
            for fragment, number in more.items():
                if fragment < len(states):
                    states[fragment].answer_again(number)
            error = self._account.in_a_row(self._run.name, self._name)
            if error is not None and not all(state.newest.chain.closed for state in states):
                self._shared.fail(error)
            self._shared.tell()
        texts = dict(read.texts)
        for reason, remedy in self._account.remedies().items():
            if reason not in self._warned:
                self._warned.add(reason)
                offers = self._account.offers[reason]
                self._log.warning("offers_refused", kind=reason, offers=offers, reason=texts.get(reason, ""), remedy=remedy)

    async def check(self) -> None:
        """Refuse to end well where nothing of this process was merged and offers of it were refused.

        Raises:
            RefusedError: the reasons and their remedies are named.
        """
        if not self._has_offered():
            return
        with suppress(BrokerError):  # what was read before has to do
            await self.look()
        with self._shared.lock:
            merged = self._learner.rounds_merged
        error = self._account.in_vain(self._run.name, self._name)
        if error is not None and not merged:
            raise error

    def forgive(self) -> None:
        """End no learner for refusals of the offers so far: its admission was lost, and they were refused for that."""
        with self._shared.lock:
            self._account.forgive({state.index: state.delta.next_number - 1 for state in self._learner.fragments})

    def _has_offered(self) -> bool:
        with self._shared.lock:
            return any(state.delta.next_number > 1 for state in self._learner.fragments)

    def _warn_of_unmerged(self) -> None:
        """Warn once if offers are stored but none is in a record."""
        with self._shared.lock:
            stored = sum(state.sent > 0 for state in self._learner.fragments)
            merged = self._learner.rounds_merged
        if not stored or merged or self._account.offers:
            return
        now_s = self._shared.loop.time()
        self._stored_s = now_s if self._stored_s is None else self._stored_s
        if now_s - self._stored_s >= UNMERGED_S and "unmerged" not in self._warned:
            self._warned.add("unmerged")
            remedy = "read the syncers' logs, and check whether this learner's offers come late (diloco status DIR)"
            self._log.warning("offers_unmerged", fragments=stored, seconds=round(now_s - self._stored_s, 1), remedy=remedy)
