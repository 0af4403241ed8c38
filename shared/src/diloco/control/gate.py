"""The gate to a run: learners' heartbeats, let in by the admissions in the bucket (:mod:`diloco.core.run.gate`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from diloco.control.admission import admitted
from diloco.control.creation import KnownRun
from diloco.control.hearing import decoding, name_in
from diloco.core.run.gate import Gate, HeartbeatVerdict, check_trained
from diloco.core.run.sender_pace import SenderPace
from diloco.core.syncer.claims import step_bounds
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import BrokerError, FormatError, MessageError
from diloco.process.observe import Counted
from diloco.process.retry import RETRY_S
from diloco.process.sender_counts import SenderCounts
from diloco.settings.run import RunSettings
from diloco.transport import Heard
from diloco.wire.control import Heartbeat, ShardHeartbeat

READ_EVERY_S = 0.1  # admissions that wait for the gate's rate
YIELD_EVERY = 100  # heartbeats dropped
HEARTBEATS_PER_S, HEARTBEATS_AT_ONCE = 200.0, 200  # of each sender, that are decoded: a toy with steps of 5 ms sends as many


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
        self._bounds = step_bounds(run.created, fragments)
        self._gate, self._held, self._dropped = Gate(), asyncio.Event(), 0
        self._clock = asyncio.get_running_loop().time
        self.dropped = SenderCounts()  # heartbeats beyond what is decoded of each sender: newer ones took their place
        self._pace = SenderPace[Heard](HEARTBEATS_PER_S, HEARTBEATS_AT_ONCE)
        self._late = asyncio.Event()  # set while a heartbeat waits for its sender's pace
        self._decoded = decoding(Heartbeat, run.identity, self._judge, refused, len(fragments.fragments))

    async def work(self) -> None:
        """Read the admissions that are wanted, and decode heartbeats that were too early, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_admissions())
            group.create_task(self._decode_late())

    async def _decode_late(self) -> None:
        while True:
            await self._late.wait()
            left_s = self._pace.next_s(self._clock())
            if left_s is None:
                self._late.clear()
                continue
            await asyncio.sleep(left_s)
            for heard in self._pace.due(self._clock()):
                await self._decoded(heard)

    async def _read_admissions(self) -> None:
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
        """Take in a message on the heartbeats' subjects; it is decoded unless its name alone says that it is not heard.

        Of a sender with more than :data:`HEARTBEATS_PER_S` only the newest ones are decoded.
        """
        name, now_s = name_in(heard.subject), self._clock()
        verdict = self._gate.glance(name, now_s)
        if verdict is None:
            passed, dropped = self._pace.take(name, heard, now_s)
            if passed is not None:
                await self._decoded(passed)
            else:
                self._late.set()
            if not dropped:
                return
            self.dropped.add(name, "too_many")
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
        check_trained(heartbeat, self._settings, self._bounds)
        await self._pass(heartbeat)

    @property
    def _settings(self) -> RunSettings:
        """The settings with the largest budget that learners may go by: some may not know yet that it was changed."""
        return max(self.run.created, self.run.in_force, key=lambda settings: settings.tokens)

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
        verdict = self._gate.hear(heartbeat, self._settings.tokens, self._clock())
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


def check_owned(heartbeat: ShardHeartbeat, fragments: int) -> None:
    """Refuse a syncer's heartbeat that names fragments which the run does not have.

    Raises:
        FormatError: the syncer is named.
    """
    named = (*heartbeat.fragments, *heartbeat.closed, *(fragment for fragment, *_ in heartbeat.open))
    if max(named, default=0) >= fragments:
        raise FormatError(f"heartbeat of {heartbeat.syncer} names fragment {max(named)}, the run has {fragments}")
