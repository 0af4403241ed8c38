"""The gate to a run: learners' heartbeats, let in by the admissions in the bucket (:mod:`diloco.core.run.gate`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from diloco.control.admission import admitted
from diloco.control.creation import KnownRun
from diloco.control.hearing import decoding, name_in
from diloco.core.run.gate import Gate, HeartbeatVerdict
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import BrokerError, FormatError, MessageError
from diloco.process.observe import Counted
from diloco.process.retry import RETRY_S
from diloco.transport import Heard
from diloco.wire.control import Heartbeat

READ_EVERY_S = 0.1  # admissions that wait for the gate's rate
YIELD_EVERY = 100  # heartbeats dropped


class HeartbeatGate:
    """Lets a run's heartbeats in: :meth:`hear` is for a subscription, and :meth:`work` reads the admissions meanwhile."""

    def __init__(
        self,
        run: KnownRun,
        fragments: FragmentMap,
        refused: Counted | None,
        learner: Callable[[Heartbeat], Awaitable[None]],
        evaluator: Callable[[Heartbeat], Awaitable[None]] | None = None,
    ) -> None:
        """Call ``learner`` with each heartbeat of an admitted learner, and ``evaluator`` with those that say they are one's.

        ``refused`` counts the others, each name once; None, for commands, leaves that to the members of the run.
        """
        self.run, self.map, self.refused = run, fragments, refused
        self._learner, self._evaluator = learner, evaluator
        self._gate, self._held, self._dropped = Gate(), asyncio.Event(), 0
        self._clock = asyncio.get_running_loop().time
        self._decoded = decoding(Heartbeat, run.identity, self._judge, refused)

    async def work(self) -> None:
        """Read the admissions that are wanted, until cancelled."""
        while True:
            await self._held.wait()
            names = self._gate.wanted(self._clock())
            try:
                await asyncio.gather(*map(self._read, names))
            except BrokerError:  # the server is away: the heartbeats are held
                await asyncio.sleep(RETRY_S)
            if self._gate.waits:
                await asyncio.sleep(READ_EVERY_S)
            else:
                self._held.clear()

    @property
    def waits(self) -> bool:
        """Whether heartbeats are held back whose learners' admissions are to be read."""
        return self._gate.waits

    async def hear(self, heard: Heard) -> None:
        """Take in a message on the heartbeats' subjects; it is decoded unless its name alone says that it is not heard."""
        verdict = self._gate.glance(name_in(heard.subject), self._clock())
        if verdict is None:
            await self._decoded(heard)
            return
        if verdict is HeartbeatVerdict.CROWDED:
            self._note(
                "*", FormatError("heartbeats from too many names are waiting for the admissions to be read; some are dropped")
            )
        self._dropped += 1
        if self._dropped % YIELD_EVERY == 0:
            await asyncio.sleep(0)  # a flood of them must not keep this process from all else

    async def _judge(self, heartbeat: Heartbeat, heard: Heard) -> None:
        if heartbeat.role == "evaluator":
            if self._gate.admits(heartbeat.learner):
                raise FormatError(f"heartbeat of {heartbeat.learner}: role evaluator, but it is admitted as a learner")
            if self._evaluator is not None:
                await self._evaluator(heartbeat)
            return
        check_fragments(heartbeat, len(self.map.fragments))
        await self._pass(heartbeat)

    @property
    def _budget(self) -> int:
        """The largest budget that learners may go by: some may not know yet that it was changed."""
        return max(self.run.created.tokens, self.run.in_force.tokens)

    async def _read(self, name: str) -> None:
        standing = await admitted(self.run, name, self.map.digest)
        known = self._gate.is_stranger(name)
        heartbeat = self._gate.admit(name, standing.incarnation, self._clock())
        if standing.incarnation is None and not known:
            what = f"{name} is not admitted to run {self.run.name!r}; its heartbeats are ignored"
            self._note(name, FormatError(f"{what}: {standing.reason}"))
        if heartbeat is not None:
            try:
                await self._pass(heartbeat)
            except MessageError as error:
                self._note(name, error)

    async def _pass(self, heartbeat: Heartbeat) -> None:
        """Hand a learner's heartbeat on if it is let in."""
        verdict = self._gate.hear(heartbeat, self._budget, self._clock())
        if verdict is HeartbeatVerdict.HEARD:
            await self._learner(heartbeat)
        elif verdict is HeartbeatVerdict.HELD:
            self._held.set()

    def _note(self, name: str, error: MessageError) -> None:
        if self.refused is not None:
            self.refused.note(name, type(error).__name__, reason=str(error))


def check_fragments(heartbeat: Heartbeat, fragments: int) -> None:
    """Refuse a heartbeat of another number of fragments than the run has.

    Raises:
        FormatError: the numbers are named.
    """
    lists = (heartbeat.versions, heartbeat.steps, heartbeat.fragment_tokens, heartbeat.lost_tokens)
    if any(len(values) != fragments for values in lists):
        lengths = ", ".join(str(len(values)) for values in lists)
        raise FormatError(f"heartbeat of {heartbeat.learner} has {lengths} values, the run has {fragments} fragments")
