"""The process that leads a learner of several: to the run it is the learner, and its own part in it is one like any other's.

A :class:`Leader` is a :class:`~diloco.member.member.Member` whose state has no arrays: those are the carriers'. It hears
rounds, sends heartbeats, holds admission and leases, and makes the decisions that all processes carry out.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.control.creation import KnownRun
from diloco.core import decisions
from diloco.core import tape as events
from diloco.core.accounts import MemberTraffic, StepDone
from diloco.core.decisions import Decisions
from diloco.core.fragment_state import DueOffer, FragmentVersion, Phase, Reader
from diloco.core.fragments import Fragment, FragmentMap
from diloco.core.markers import MarkerReply
from diloco.core.rows import RowLayout
from diloco.core.saving import Ended, set_name
from diloco.core.schedule import Moment
from diloco.errors import IslandError
from diloco.member.carrier import chain_of
from diloco.member.lending import Owners, SharedState
from diloco.member.member import LEAVE_TIMEOUT_S, Boundary, Member
from diloco.member.part import Part, Saving
from diloco.member.peer import Layout, Loan
from diloco.member.state import Saved
from diloco.process.observe import Logger
from diloco.process.tape import Recorder
from diloco.settings.service import LearnerSettings
from diloco.transport import Transport
from diloco.wire import island
from diloco.wire.control import MarkerAnswer, MarkerDeclined
from diloco.wire.entries import Genesis
from diloco.wire.framing import Message
from diloco.wire.island import Kept, Pending, Purpose

Vector = NDArray[np.float32]


class Leader(Member):
    """Construct it in the loop's thread, join it like any member, and have the trainer call :meth:`look_ahead` at each step."""

    def __init__(
        self,
        transport: Transport,
        run: KnownRun,
        fragment_map: FragmentMap,
        settings: LearnerSettings,
        log: Logger,
        tape: Recorder,
        make_part: Callable[[Leader], Part],
        layouts: Sequence[RowLayout],
    ) -> None:
        """``make_part`` makes this process's own part."""
        super().__init__(transport, run, fragment_map, settings, log, tape)
        self.part = make_part(self)
        self.part.lead = self._hear_process
        group, carriers = self.part.group, self.part.carriers
        needed = [
            frozenset({carriers[index], *(p for p in range(group.size) if layout.held[p].size)})
            for index, layout in enumerate(layouts)
        ]
        self.decisions = Decisions(self.learner, run.identity, group.generation, group.size, needed)
        self._answering = self._offers = _Offers(self)
        self._moment = Moment(0, 1)
        self._batch = 0, 0
        self.regroups = False  # whether the generation ends by the decision that was made last, so that a larger one begins
        # what is to be saved, if that can be done now; the trainer's thread asks at each decision
        self.wanted: Callable[[], Purpose | None] = lambda: None
        self._accounts: dict[str, Any] = {}  # as of the last boundary at which a state was saved
        self._booked: tuple[StepDone, float] | None = None  # the step since the last boundary, and when it was booked
        self._over = False  # what comes now is of no account any more
        self._saved_at: tuple[int, list[int]] = 0, []  # steps then, and by fragment the version applied
        self._optimizer: tuple[Layout, Owners]
        self._loaded: dict[int, FragmentVersion] = {}
        self._all_loaded = asyncio.Event()

    @property
    def untaped(self) -> int:
        """Steps that are booked and not on the tape: the one in flight gets there at the boundary after it."""
        return int(self._booked is not None)

    @property
    def lock(self) -> threading.Condition:
        """Guards the learner's state."""
        return self._shared.lock

    # ---- loop thread

    async def _initial(self, initial: Callable[[Fragment], Vector] | None, index: int) -> Vector:
        return await self.part.gather(index)

    async def _load(self, genesis: tuple[Genesis, bytes]) -> list[FragmentVersion]:
        """Return what the carriers have loaded of each fragment, in order."""
        await self.part.carrier.load(genesis)
        await self._all_loaded.wait()
        return [self._loaded[index] for index in range(len(self.map.fragments))]

    async def _holds(self) -> bool:
        return True  # each carrier looks for itself

    def _begin_to_follow(self) -> None:
        async def lost() -> None:
            pass

        self._begin_audit(lost)

    def _hear_process(self, source: int, message: Message) -> None:
        """Take in what a process says to its leader."""
        with self._shared.lock:
            if self._over:
                return
            match message:
                case island.Folded():
                    self._fold(source, message)
                case island.Staged():
                    self.decisions.staged(source, message.fragment, message.number)
                case island.Encoded():
                    self._check_carrier(source, message.fragment)
                    self._offers.encoded(message)
                case island.OfferStored():
                    self._check_carrier(source, message.fragment)
                    self._offers.stored(message)
                case island.Passed():
                    self.decisions.passed(source, message)
                case island.PartSaved():
                    self._note_part(source, message)
                case island.Leaving():
                    if self._leave_by_s is None:
                        self.log.info("process_asked_to_end", process=self.part.links.members[source])
                        self._leave_by_s = self._shared.loop.time() + self.settings.leave_s
                        self.learner.leaving = True
                case _:
                    raise IslandError(f"process {source} sends {message.kind!r} to its leader")
            self._stage()
            self._shared.tell()

    def _fold(self, source: int, folded: island.Folded) -> None:
        index = folded.fragment
        self._check_carrier(source, index)
        chain = chain_of(index, folded.head)
        version = FragmentVersion(folded.record, chain)
        if len(self.learner.fragments) < len(self.map.fragments):
            self._loaded[index] = FragmentVersion(None, chain)  # what came since is in it
            if len(self._loaded) == len(self.map.fragments):
                self._all_loaded.set()
        elif folded.rewound:
            self.decisions.rewind(index, version)
        else:
            self.decisions.queue(index, version)

    def _note_part(self, source: int, part: island.PartSaved) -> None:
        ended = self.decisions.saves.saved(source, part)
        if ended is None:
            return
        size_bytes = sum(each.size_bytes for each in ended.parts.values())
        self.log.debug("all_parts_saved", set=ended.save.name, parts=len(ended.parts), bytes=size_bytes)
        if ended.save.purpose == "loan":
            self._lend_parts(ended)
        elif ended.save.purpose == "whole":
            answer = self._marker_reply(ended)
            self.learner.markers.answer(answer)
            self._shared.tasks.spawn(self._outbox.send(answer))

    def _marker_reply(self, ended: Ended) -> MarkerReply:
        name, number = self.settings.name, ended.save.marker
        if not ended.parts:
            return MarkerDeclined(name, number, "not_saved", "one of its processes says checkpoint_not_saved in its log")
        step, versions = self._saved_at
        files = [(each.size_bytes, each.content or b"") for _, each in sorted(ended.parts.items())]
        return MarkerAnswer(name, number, step, versions, *files[0], files[1:])

    def _lend_parts(self, ended: Ended) -> None:
        lent = self.part.lent
        if ended.parts:
            self.lend(*self._saved_at, SharedState(lent, ended.number, *self._optimizer, ended.parts))
        else:
            self.lender.give_none()
            lent.drop_everywhere(ended.number)

    def _check_carrier(self, source: int, index: int) -> None:
        if index >= len(self.part.carriers) or self.part.carriers[index] != source:
            raise IslandError(f"process {source} speaks for fragment {index}, which it does not carry")

    def _stage(self) -> None:
        """Have versions brought to all processes; the lock is held."""
        if len(self.learner.fragments) < len(self.map.fragments):
            return
        for stage in self.decisions.to_stage():
            self._shared.loop.call_soon_threadsafe(self.part.links.write_all, stage)

    async def close(self) -> None:
        """Send a last heartbeat, and stop all that runs in the loop."""
        await super().close()
        await self.part.close()

    def _traffic(self) -> MemberTraffic:
        """Return that of all processes together."""
        beats = self.part.group.beats.values()
        others = (MemberTraffic(beat.bytes_up, beat.bytes_down, beat.refused) for beat in beats)
        return MemberTraffic(*map(sum, zip(super()._traffic(), *others, strict=True)))

    def note_optimizer(self, loan: Loan | None) -> None:
        """Note with which optimizer state all processes begin: one that each has borrowed its part of, or a fresh one."""
        if loan is not None:
            self.tape.record(events.Borrowed(loan.peer, loan.content_hash[: events.DIGEST_BYTES]))
            self.log.info("state_from_peer", learner=loan.peer, step=loan.step, version_min=min(loan.versions))
        elif self.learner.peers() is not None:
            self.learner.accounts.warming = 0
            self.tape.record(events.Fresh())
            self.log.info("state_fresh", warmup_steps=self.run.created.inner.restart_warmup_steps)

    # ---- trainer thread

    def look_ahead(self, done: StepDone | None, batch: tuple[int, int]) -> None:
        """Make the next decision while a step is in flight, and tell all processes.

        ``done`` counts that step (None: none is in flight), ``batch`` is share and index of the one after it.
        """
        self._batch = batch
        now_s = self._shared.loop.time()
        with self._shared.lock:
            if done is not None:
                self.decisions.book(done)
                self.shares.book(done.share, done.batch, done.tokens)
                self._booked = done, now_s
            self._decide(now_s)

    def _decide(self, now_s: float) -> None:
        self._stage()
        self.regroups = self._may_regroup()
        ended = self.regroups or self._may_leave(now_s)
        decided = self.decisions.make(now_s, self._batch, ended=ended, wanted=self.wanted())
        self._shared.loop.call_soon_threadsafe(self.part.links.write_all, decided)

    def _may_regroup(self) -> bool:
        """Return whether the generation ends now for one with the processes that wait: once its state can be saved."""
        ready = self.learner.activity in ("stepping", "waiting") and self.decisions.may_save and self._leave_by_s is None
        if not (ready and self.part.group.grows):
            return False
        self.learner.silent = True  # what it offered from here on would not be in that state
        return True

    def _may_leave(self, now_s: float) -> bool:
        """Return whether the learner leaves now: with nothing unmerged, or late, once its state can be saved."""
        if self._leave_by_s is None or (not self.learner.left and now_s < self._leave_by_s):
            return False
        self.learner.silent = True
        return self.learner.may_dump or now_s >= self._leave_by_s + LEAVE_TIMEOUT_S

    def boundary(self, done: StepDone | None) -> Boundary:
        """Carry the next decision out, which is made now if it was not made ahead; ``done`` has loss and times of its step.

        Raises:
            DilocoError: a task of the loop thread failed.
        """
        now_s = self._shared.loop.time()
        with self._shared.lock:
            self._shared.begin_boundary()
            if done is not None:
                self.learner.accounts.note_outcome(done)
            if self.decisions.made is None:
                self._decide(now_s)
        decided, writes = self.part.boundary()
        with self._shared.lock:
            decision = self.decisions.carry_out()
            if self._booked is not None:
                self._taped.step(*self._booked)
                self._booked = None
            self._taped.decision(decision)
            if decided.save is not None:
                self.tape.record(events.Copied())
                self._accounts, _ = self.learner.dump(self.shares.positions())
                self._saved_at = self.step, [state.delta.base_version for state in self.learner.fragments]
            for fragment in decided.reads:
                self.decisions.submit(fragment)
            self._moment = decisions.moment(decided)
            self._stage()
        self._shared.loop.call_soon_threadsafe(self._heartbeat_soon)
        return Boundary(writes, list(decided.reads), decided.stop, decided.wait, decided.finished, decided.ended)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something new, at most ``timeout_s``, and until no process is behind.

        Steps are taken together, but nothing else keeps a leader that waits from deciding on and on while another process
        stands still: it is missed only once it has been silent for too long.
        """
        super().wait(timeout_s)
        self._shared.wait_until(lambda: self.decisions.is_followed or self._shared.failure is not None, None)

    def submit(self, fragment: int, reader: Reader) -> None:
        """Hand over a way to read this process's rows of a fragment as they are at this boundary."""
        self.part.submit(fragment, reader)
        self._offers.begin_soon(fragment)

    def moment(self) -> Moment:
        """Return what the learning rate goes by, as it was decided."""
        return self._moment

    @property
    def saving(self) -> Saving | None:
        """The state that is to be saved as of the boundary that was carried out last, with the accounts of all."""
        saving = self.part.saving
        return None if saving is None else replace(saving, accounts=self._accounts)

    @property
    def is_saving(self) -> bool:
        """Whether a state is being saved, in any process."""
        with self._shared.lock:
            return self.decisions.saves.under_way is not None

    def part_saved(self, saving: Saving, saved: Saved | None, content_hash: bytes) -> None:
        """Note how this process has ended with its part of a state, by which tapes call it. Callable from any thread."""
        if saved is not None and saving.save.purpose != "loan":
            self.note_saved(saved.digest)
        self.part.part_saved(saving, saved, content_hash)

    def keep(self) -> tuple[Kept, dict[str, Any]]:
        """Let nothing change any more, and return the word for the state as of the last boundary, and its accounts.

        The step since then has not ended. Call it in the loop's thread: what was said before is in the state.

        Raises:
            IslandError: there is no state to go on from.
        """
        with self._shared.lock:
            self._over = self.learner.silent = True
            if any(state.phase in (Phase.JOINING, Phase.INVALID) for state in self.learner.fragments):
                raise IslandError("a fragment is not the log's yet, or its value is not finite")
            self.tape.record(events.Copied())
            step = None if self._booked is None else self._booked[0]
            accounts, _ = self.learner.dump(self.shares.positions(), step)
            number, generation = self.decisions.course.number - 1, self.decisions.course.generation
        return Kept(set_name(generation, number, kept=True), number), accounts

    # ---- before the first step

    def describe_optimizer(self, layout: Layout, owners: Owners) -> None:
        """Say what an optimizer's state consists of, and which process has which chunk of it: what can be lent."""
        self._optimizer = layout, owners

    def note_restored(self, name: str) -> None:
        """Note that all processes begin from a checkpoint: it is kept until all have a newer one."""
        with self._shared.lock:
            self.decisions.saves.whole = name

    def unmerged_of(self, plain: Mapping[str, Any], bare: Collection[int] = ()) -> list[list[Pending]]:
        """Return by fragment the offers of unknown fate in a checkpoint's accounts; ``bare`` fragments have no arrays in it.

        Raises:
            LookupError, TypeError, ValueError, OverflowError: the accounts are not of this model.
        """
        unmerged = self.learner.unmerged(plain, bare)
        return [[Pending(offer.identity, offer.bits, offer.dropped) for offer in offers] for offers in unmerged]

    def restore(self, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], bare: Collection[int] = ()) -> None:
        """Take over a checkpoint as any member does, its ``arrays`` any dtype [...]; ``bare`` fragments have none, anywhere."""
        super().restore(plain, arrays, bare)
        for fragment in bare:
            self.tape.record(events.Bare(fragment))


class _Offers:
    """Answers rounds: the leader counts, the carriers quantise and store."""

    def __init__(self, leader: Leader) -> None:
        self.leader, self.learner = leader, leader.learner
        self._answers: dict[int, tuple[DueOffer, float]] = {}  # by fragment: being quantised or stored, since when

    def begin(self, index: int) -> None:
        """Answer the fragment's open round if that can be done now; the lock is held."""
        leader = self.leader
        answer = self.learner.try_answer(index) if leader.decisions.may_answer else None
        if answer is None:
            return
        self._answers[index] = answer, leader.part.loop.time()
        number = leader.decisions.course.number - 1  # the snapshot is of the boundary that was carried out last
        message = island.Encode(index, number, answer.bits, answer.version)
        leader.part.loop.call_soon_threadsafe(leader.part.links.write_all, message)

    def begin_soon(self, index: int) -> None:
        """Answer the fragment's open round, likewise; the lock is not held. Callable from any thread."""
        self.leader.part.loop.call_soon_threadsafe(self._begin_locked, index)

    def _begin_locked(self, index: int) -> None:
        with self.leader.lock:
            self.begin(index)

    def encoded(self, message: island.Encoded) -> None:
        """Count an offer that was quantised, and have it stored; the lock is held."""
        index, leader = message.fragment, self.leader
        answer, _ = self._answers[index]
        if message.content is None:
            del self._answers[index]
            self.learner.not_finite(index)
            return
        pending = self.learner.encoded(answer)
        taped = self.learner.accounts.step - leader.untaped
        ago, digest = taped - answer.snapshot.step, message.content[: events.DIGEST_BYTES]
        leader.tape.record(events.TapeOffer(ago, index, pending.stated.number, answer.version, answer.bits, digest))
        leader.tape.flush()  # before it is sent: all that is merged of this learner is on its tape
        store = island.Store(index, answer.bits, pending.stated)
        leader.part.loop.call_soon(leader.part.links.write, leader.part.carriers[index], store)

    def stored(self, message: island.OfferStored) -> None:
        """Note that an offer is stored; the lock is held."""
        _, began_s = self._answers.pop(message.fragment)
        self.learner.sent(message.fragment, message.sequence)
        self.leader.tape.record(events.Sent(message.fragment, int(1000 * (self.leader.part.loop.time() - began_s))))
