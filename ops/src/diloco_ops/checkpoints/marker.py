"""The cut of a live run: a vector of versions goes to all learners (the marker), and each saves its state there."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from diloco.control.gate import HeartbeatGate
from diloco.control.hearing import decoding
from diloco.core.learner.markers import MarkerReply
from diloco.core.log.chain import NO_ENTRY
from diloco.process.tasks import end
from diloco.states import statefolder
from diloco.states.statefolder import StateFolder
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Heartbeat, MarkerAnswer, MarkerDeclined, SnapshotMarker
from diloco_ops.checkpoints.manifest import FragmentCut
from diloco_ops.reading.run_reader import RunReader

MAX_AHEAD = 1_000_000  # of the numbers of checkpoints whose folders were deleted
HEAR_S = 1.2  # beyond two heartbeats: the time in which each living learner is heard
MARKER_EVERY_S = 0.2  # a marker is not stored, and may be lost
MARKER_TIMEOUT_S = 60.0  # longer than a step, and than saving a large state
ATTEMPTS = 4

States: TypeAlias = dict[str, tuple[list[Path], MarkerAnswer | None]]
# by learner: the parts of its state, one of each of its processes; no answer: saved on leaving


async def heads(run: RunReader) -> list[FragmentCut]:
    """Return where the log of each fragment ends now: in a run with regions, the last entry that is known to be committed."""
    return list(await asyncio.gather(*(_head(run, fragment.index) for fragment in run.map.fragments)))


async def _head(run: RunReader, index: int) -> FragmentCut:
    if run.run.regions:
        notice = await run.log.region.furthest_notice(index)
        if notice is None:
            return FragmentCut(0, 0, NO_ENTRY.hex())
        return FragmentCut(notice.version, notice.sequence, notice.entry_hash.hex())
    head = await run.log.reader.newest(index)
    return (
        FragmentCut(0, 0, NO_ENTRY.hex())
        if head is None
        else FragmentCut(head.record.version, head.sequence, head.entry_hash.hex())
    )


@dataclass
class Marking:
    """Has the learners of a live run save their states at one cut."""

    run: RunReader
    number: int  # of the checkpoint; a later one if an attempt fails
    problems: list[str]  # gets what a reader of the checkpoint must know
    cuts: list[FragmentCut] = field(default_factory=list)
    _newest: int = 0  # of the markers that some learner has answered
    keeps_own: list[str] = field(default_factory=list)  # learners whose training loops keep checkpoints of their own
    _heartbeats: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    _answers: dict[str, MarkerAnswer] = field(default_factory=dict)
    _declined: dict[str, MarkerDeclined] = field(default_factory=dict)

    async def states(self) -> States:
        """Make the learners save their states at one cut. Return the files by learner."""
        run, transport, subjects = self.run.run, self.run.transport, self.run.log.subjects
        gate = HeartbeatGate(run, self.run.map, None, self._hear_heartbeat)
        await transport.subscribe(subjects.heartbeat(), gate.hear)
        await transport.subscribe(subjects.marker_answer(), self._hearing(run.identity))
        reading = asyncio.create_task(gate.work())
        try:
            return await self._snapshot()
        finally:
            await end(reading)

    def forget(self) -> None:
        """Drop what learners have saved: an attempt failed, or it is copied."""
        shutil.rmtree(self.run.directory.path / statefolder.FOLDER / str(self.number), ignore_errors=True)
        self._answers.clear()
        self._declined.clear()

    async def _snapshot(self) -> States:
        await asyncio.sleep(HEAR_S + 2 * self.run.run.in_force.liveness.heartbeat_s)
        unread = self._unread()
        for attempt in range(ATTEMPTS):
            self.cuts = await heads(self.run)
            versions = [cut.version for cut in self.cuts]
            last = attempt == ATTEMPTS - 1
            await self._until_answered(versions)
            beyond = [name for name, answer in self._answers.items() if answer.versions != versions]
            without_residual = await self._without_residual()
            lacking = without_residual and not unread  # a newer cut brings no log that is not read
            if (not beyond and not lacking and await self._kept()) or last:
                break
            self.forget()
            self.number += 1
        if beyond:
            self.problems.append(
                f"{', '.join(sorted(beyond))}: went beyond the cut before the marker came; what later versions hold is lost"
            )
        if without_residual:
            names = ", ".join(map(str, without_residual))
            reason = f": the logs of the regions {', '.join(unread)} were not read" if unread else ""
            self.problems.append(f"fragments {names}: the rounding residual of their last merge starts at zero{reason}")
        for name, declined in sorted(self._declined.items()):
            if declined.reason == "keeps_own":
                self.keeps_own.append(name)
            else:
                self.problems.append(f"{name}: could not save its state ({declined.detail}); it will begin from the log")
        return {name: (self._parts_of(answer), answer) for name, answer in sorted(self._answers.items())}

    def _parts_of(self, answer: MarkerAnswer) -> list[Path]:
        directory, parts = self.run.directory.path, 1 + len(answer.parts or ())
        return [StateFolder(directory, answer.learner).snapshot(self.number, part) for part in range(parts)]

    async def _until_answered(self, versions: list[int]) -> None:
        """Repeat the marker until every living learner has answered.

        Learners hear no marker older than one that they have answered, and answers outlive the folders that numbers come from.
        """
        began_s = time.monotonic()
        while missing := self._living() - self._answers.keys() - self._declined.keys():
            if time.monotonic() - began_s > MARKER_TIMEOUT_S:
                self.problems.append(
                    f"{', '.join(sorted(missing))}: no state within {MARKER_TIMEOUT_S:g} s; will begin from the log"
                )
                return
            if self._newest > self.number:
                self.number = self._newest + 1
                self._answers.clear()
                self._declined.clear()
            frame = framing.pack(SnapshotMarker(self.number, versions), self.run.run.identity)
            await self.run.transport.publish(self.run.log.subjects.marker, frame)
            await asyncio.sleep(MARKER_EVERY_S)

    def _living(self) -> set[str]:
        oldest_s = time.monotonic() - self.run.run.in_force.liveness.dead_s
        return {
            name
            for name, (heartbeat, heard_s) in self._heartbeats.items()
            if heartbeat.state not in ("finished", "leaving", "left") and heard_s >= oldest_s
        }

    async def _hear_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._heartbeats[heartbeat.learner] = (heartbeat, time.monotonic())

    def _hearing(self, run: bytes) -> Callable[[Heard], Awaitable[None]]:
        """Return a function that takes in either kind of answer: both have one subject."""
        answered = decoding(MarkerAnswer, run, self._hear_answer, None)
        declined = decoding(MarkerDeclined, run, self._hear_declined, None)

        async def heard(message: Heard) -> None:
            await (declined if framing.kind_of(message.data) == MarkerDeclined.kind else answered)(message)

        return heard

    async def _hear_answer(self, answer: MarkerAnswer, _: Heard) -> None:
        if self._counts(answer) and len(answer.versions) == len(self.run.map.fragments):
            self._answers[answer.learner] = answer

    async def _hear_declined(self, declined: MarkerDeclined, _: Heard) -> None:
        if self._counts(declined):
            self._declined[declined.learner] = declined

    def _counts(self, answer: MarkerReply) -> bool:
        """Return whether an answer is to the newest marker; note the newest number that was answered."""
        if answer.learner not in self._heartbeats or answer.number > self.number + MAX_AHEAD:
            return False  # of no learner, or of a checkpoint that was never taken: the numbers would come to their end
        self._newest = max(self._newest, answer.number)
        return answer.number == self.number

    async def _kept(self) -> bool:
        """Whether the log still goes back to the cut: keyframes are written, and entries below them dropped, all the time."""
        for index, cut in enumerate(self.cuts):
            oldest = await self.run.log.reader.oldest_keyframe(index)
            if oldest is None or oldest.entry_sequence > cut.sequence:
                return False
        return True

    def _unread(self) -> list[str]:
        """Return the regions whose logs are not read: no server of theirs was given, or none answers."""
        return [region for region in self.run.run.created.regions.names if region not in self.run.regions]

    async def _without_residual(self) -> list[int]:
        """Fragments whose owner did not keep the residual of the cut's version; it may have gone on to the next one."""
        missing = {index for index, cut in enumerate(self.cuts) if cut.version}
        for log in self.run.regions.values() or [self.run.log]:  # an owner keeps it in its own region
            newest = await asyncio.gather(*(log.reader.newest_keyframe(index) for index in missing))
            missing -= {f[0].fragment for f in newest if f is not None and f[0].version == self.cuts[f[0].fragment].version}
        return sorted(missing)
