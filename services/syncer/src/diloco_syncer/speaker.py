"""A syncer's summaries for learners: the thin part around :mod:`diloco.core.syncer.presence_teller`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diloco.control.gate import HeartbeatGate
from diloco.core.syncer.ownership import Ownership
from diloco.core.syncer.presence_teller import PresenceTeller, turn_s
from diloco.wire import framing
from diloco.wire.control import Heartbeat
from diloco_syncer.context import Context, clock_s


class PresenceSpeaker:
    """Tells learners which of them this syncer hears, while it speaks for its region and is not ``unable``."""

    def __init__(self, context: Context, ownership: Ownership, gate: HeartbeatGate, unable: Callable[[], bool]) -> None:
        self.context, self.ownership, self.gate, self.unable = context, ownership, gate, unable
        self._teller = PresenceTeller(ownership.name, ownership.incarnation)

    def hear(self, heartbeat: Heartbeat) -> None:
        """Take in a heartbeat that the gate has let in."""
        self._teller.hear(heartbeat.learner, self.context.run.in_force.liveness.dead_s, clock_s())

    async def work(self) -> None:
        """Send the summaries that are due, until cancelled."""
        while True:
            await asyncio.sleep(turn_s(self.context.run.in_force.liveness))
            if self.context.transport.connected:  # what would be sent later says nothing about now
                await self._send()

    async def _send(self) -> None:
        context, now_s = self.context, clock_s()
        summary = self._teller.due(
            context.run.in_force.liveness,
            now_s,
            hearing_s=self.ownership.hearing_s(now_s),
            waits=self.gate.waits,
            speaks=self.ownership.speaks(now_s) and not self.unable(),
        )
        if summary is not None:
            subject = context.store.subjects.presence(summary.syncer)
            await context.transport.publish(subject, framing.pack(summary, context.run.identity), optional=True)
