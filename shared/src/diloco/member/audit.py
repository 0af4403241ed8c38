"""A learner's regular look at what it has stored: other processes may change that, and a server's crash may undo it.

Whether the log has lost what was read is looked at where it is read (:class:`diloco.member.following.Following`).
"""

from __future__ import annotations

import asyncio

from diloco.core.run.leases import LOOKS_A_LEASE
from diloco.errors import BrokerError
from diloco.member.admission import AdmissionClient
from diloco.member.living import LivingLearners
from diloco.member.refused_offers import RefusalWatch
from diloco.member.shared import SharedLearner
from diloco.member.shares import Leases
from diloco.process.observe import Logger
from diloco.wire.subjects import Subjects


class Audit:
    """Looks at shares, admission and offers, several times within a lease."""

    def __init__(
        self,
        shared: SharedLearner,
        admission: AdmissionClient,
        leases: Leases,
        refusals: RefusalWatch,
        living: LivingLearners,
        log: Logger,
    ) -> None:
        self.learner, self.lock = shared.learner, shared.lock
        self.admission, self.leases, self.log = admission, leases, log
        self.refusals, self.living = refusals, living
        self.run, self.transport = admission.run, admission.transport
        self.subjects = Subjects(self.run.name)
        self._answered: dict[int, int] = {}  # by fragment: version of the round that was open and answered at the last look

    async def work(self) -> None:
        """Look until cancelled.

        Raises:
            RunError: a younger process goes by this learner's name.
        """
        while True:
            await asyncio.sleep(self.run.in_force.liveness.lease_s / LOOKS_A_LEASE)
            try:
                await self.living.look()
                await self.leases.look(self.learner.ends(), asyncio.get_running_loop().time())
                if await self.admission.is_lost():
                    self.refusals.forgive()  # before the new admission, too: its answer may be long in coming
                    await self.admission.renew()
                    self.refusals.forgive()
                    self._reopen_all()
                await self._look_at_offers()
            except BrokerError as error:  # the server is away: leases are held on
                self.log.debug("server_unknown", reason=str(error))

    def _reopen_all(self) -> None:
        """Answer all open rounds again: offers were refused as long as the admission was lost."""
        with self.lock:
            for state in self.learner.fragments:
                state.reopen()

    async def _look_at_offers(self) -> None:
        """Answer rounds again whose answers are gone, and that are open for long because of it."""
        with self.lock:
            open_ = [state for state in self.learner.fragments if state.open_version and not state.sending]
            answered = {state.index: state.answered for state in open_ if state.answered == state.open_version}
        for index, version in answered.items():
            state = self.learner.fragments[index]
            if self._answered.get(index) != version or not state.sent:
                continue
            head = self.subjects.offer(index, self.learner.name)
            if await self.transport.last_sequence(head) != state.sent:
                with self.lock:
                    if state.answered == version and not state.sending:
                        self.log.warning("offer_lost", fragment=index, version=version)
                        state.reopen()
        self._answered = answered
