"""The learners that are alive, as one learner hears of them: by a syncer's summaries, or by the heartbeats of all learners.

Heartbeats from all learners to all cost the square of their number. A learner hears them only at first, and while no summaries
come: the syncers may be of an older version, or identities older than the summaries' subject.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.control.hearing import decoding, name_in
from diloco.core.run.summaries_heard import SummariesHeard
from diloco.transport import Heard, Subscribed
from diloco.wire.control import PresenceSummary

if TYPE_CHECKING:
    from diloco.member.member import Member


class LivingLearners:
    """The ears of a learner, ``member``, for signs of life, which it hands on to its leases and its watch of loans."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._summaries = SummariesHeard(member.settings.name)
        self._heartbeats: Subscribed | None = None

    async def listen(self) -> None:
        """Begin to hear summaries, for good, and heartbeats."""
        member = self._member
        heard = decoding(PresenceSummary, member.run.identity, self._hear_summary, member.refused)
        await member.transport.subscribe(member.subjects.presence(), heard, optional=True)
        await self._hear_heartbeats()

    @property
    def hears_heartbeats(self) -> bool:
        """Whether the heartbeats of all learners come to this one."""
        return self._heartbeats is not None

    async def look(self) -> None:
        """Begin to hear heartbeats, or end it; called as often as leases are looked at.

        A learner that has not begun hears them: the age of an optimizer state that it borrows is judged by them.
        """
        member = self._member
        if not member.transport.connected:
            return  # nothing comes, and the server could not be told
        suffice = self._summaries.suffice(member.run.in_force.liveness, member.shared.loop.time())
        if not suffice:
            await self._hear_heartbeats()
        elif self._heartbeats is not None and member.learner.activity != "starting":
            heartbeats, self._heartbeats = self._heartbeats, None
            await heartbeats.end()
            member.log.debug("hears_by_summaries")

    async def _hear_heartbeats(self) -> None:
        if self._heartbeats is None:
            member = self._member
            self._heartbeats = await member.transport.subscribe(member.subjects.heartbeat(), self._hear_heartbeat)
            member.log.debug("hears_heartbeats")

    async def _hear_heartbeat(self, heard: Heard) -> None:
        self._member.shares.hear(name_in(heard.subject), self._member.shared.loop.time())
        self._member.loans.hear(heard)

    async def _hear_summary(self, summary: PresenceSummary, heard: Heard) -> None:
        member, now_s = self._member, self._member.shared.loop.time()
        for learner, heard_s in self._summaries.hear(summary, member.run.in_force.liveness, now_s):
            member.shares.hear(learner, heard_s)
