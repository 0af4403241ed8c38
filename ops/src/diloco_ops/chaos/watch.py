"""Watching a live run: heartbeats, entries, its coordinator and its processes, as a witness hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from diloco.control.gate import HeartbeatGate
from diloco.control.hearing import hear
from diloco.errors import RunError
from diloco.log.log import Log
from diloco.log.stream import pass_over
from diloco.nats.connection import ask
from diloco.transport import Heard
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco_ops.chaos.witness import Witness
from diloco_ops.reading.run_reader import RunReader

POLL_S = 0.1  # the resolution of recovery times
STATUS_TIMEOUT_S = 0.5  # a coordinator on this machine answers in milliseconds
GONE_S = 10.0  # without any process of the run: a launcher restarts each within seconds


@dataclass
class ChaosWatch:
    """Watches one run."""

    run: RunReader
    witness: Witness

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._gate = HeartbeatGate(self.run.run, self.run.map, None, self._hear_member, self._hear_member)

    @classmethod
    async def begin(cls, run: RunReader) -> ChaosWatch:
        """Begin with a witness that knows where each fragment's log ends now."""
        loaded = [await run.log.reader.load(f.index, run.genesis, run.genesis_check) for f in run.map.fragments]
        sizes = [fragment.size for fragment in run.map.fragments]
        return cls(run, Witness([each.replica.chain for each in loaded], sizes))

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """Return the work to be done side by side; :meth:`listen` begins the part that needs subscriptions."""
        return [*self.following(), self._ask(), self._see_services()]

    def following(self) -> list[Coroutine[Any, Any, None]]:
        """Return the part of the work that needs no process of the run on this machine."""
        logs = list(self.run.regions.values()) or [self.run.log]
        return [*map(self._follow, logs), self._gate.work()]

    async def listen(self) -> None:
        """Subscribe to the heartbeats of learners, evaluators and syncers."""
        subjects = self.run.log.subjects

        async def hear_shard(heartbeat: ShardHeartbeat, message: Heard) -> None:
            self.witness.shard(heartbeat)

        await self.run.transport.subscribe(subjects.heartbeat(), self._gate.hear)
        await hear(self.run.transport, subjects.shard(), ShardHeartbeat, self.run.run.identity, hear_shard, refused=None)

    async def _hear_member(self, heartbeat: Heartbeat) -> None:
        self.witness.heartbeat(heartbeat, self._clock())

    async def _follow(self, log: Log) -> None:
        # sequences are one stream's own: of several, all is read, and known entries are passed over
        regions = self.run.run.regions
        start = 1 if regions else 1 + min(chain.sequence for chain in self.witness.chains)
        async for head in log.entries.heads(pass_over, start):
            if regions or head.sequence > self.witness.chains[head.record.fragment].sequence:
                self.witness.entry(head.record, head.entry_hash, head.sequence, self._clock())

    async def _ask(self) -> None:
        """Ask the coordinator for its status while it is expected to come back; and see whether the server is there."""
        transport, subject = self.run.transport, self.run.log.subjects.status
        while True:
            asked_s = self._clock()
            if not transport.connected:
                self.witness.away(asked_s)
            if any(recovery.status for recovery in self.witness.open):
                answer = await ask(transport.control, transport.name, subject, b"", STATUS_TIMEOUT_S)
                if answer is not None:
                    self.witness.answered(asked_s, self._clock())
            await asyncio.sleep(POLL_S)

    async def _see_services(self) -> None:
        """Look for the run's processes, as long as it has not ended by itself.

        Raises:
            RunError: none is there any more: its launcher gave up.
        """
        path, seen_s = self.run.directory.path, self._clock()
        while self._clock() < seen_s + GONE_S:
            if self.witness.finished or any((path / "services").glob("*.pid")):
                seen_s = self._clock()
            await asyncio.sleep(POLL_S)
        raise RunError(f"{path}: the run has ended before its tokens were used up; its logs say why: diloco logs {path}")

    def stepping(self) -> set[str]:
        """Return the learners that step, by their last heartbeats."""
        return {heartbeat.learner for heartbeat in self.witness.learners() if heartbeat.state == "stepping"}

    def unaccounted(self) -> dict[str, dict[int, int]]:
        """Return unaccounted tokens by learner and fragment; a learner whose versions are not known yet counts, with none."""
        found = {heartbeat.learner: self.witness.unaccounted(heartbeat) for heartbeat in self.witness.learners()}
        return {name: {} if rest is None else rest for name, rest in found.items() if rest is None or rest}
