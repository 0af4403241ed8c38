"""The process that leads a learner of several: to the run it is the learner, and its own part in it is one like any other's.

It has the learner's rounds, a :class:`~diloco.member.member.Member`, and is their :class:`~diloco.member.arrays.Arrays`: those
lie at all processes. So what a member asks of its arrays goes to them by messages, and each boundary is a decision that all
processes carry out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.core.learner import decisions
from diloco.core.learner.accounts import MemberTraffic, StepDone
from diloco.core.learner.decisions import Decisions
from diloco.core.learner.delta import PendingDelta
from diloco.core.learner.fragment_state import DueOffer, FragmentVersion, Phase, Reader
from diloco.core.learner.markers import MarkerReply
from diloco.core.learner.saving import Ended, set_name
from diloco.core.learner.schedule import Moment
from diloco.core.log.chain import Chain
from diloco.core.run import tape as events
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import IslandError
from diloco.member.arrays import Boundary, Initial
from diloco.member.member import LEAVE_TIMEOUT_S, Member
from diloco.member.peer import Layout, Loan
from diloco.process.observe import Logger
from diloco.process.tape import Recorder, Unrecorded
from diloco.processes.lending import Owners, SharedState
from diloco.processes.part import Part, Saving
from diloco.settings.service import LearnerSettings
from diloco.states.state import Saved
from diloco.wire import process_messages as island
from diloco.wire.control import MarkerAnswer, MarkerDeclined
from diloco.wire.entries import Genesis
from diloco.wire.framing import Message
from diloco.wire.process_messages import Kept, LoanPeers, Pending, Purpose

Vector = NDArray[np.float32]


class Leader:
    """Construct it in the loop's thread, join its member, and have the trainer call :meth:`look_ahead` at each step."""

    leads = True

    def __init__(
        self, part: Part, fragment_map: FragmentMap, settings: LearnerSettings, log: Logger, tape: Recorder | None
    ) -> None:
        """Begin; ``part`` is this process's own. Without a ``tape`` its processes save no states either, as those of a loop."""
        self.part, self.settings, self.log, self.tape = part, settings, log, tape or Unrecorded()
        self.member = Member(
            part.transport, part.run, fragment_map, settings, log, tape=self.tape, arrays=self, refused=part.refused
        )
        self.learner, self.shared = self.member.learner, self.member.shared
        part.lead = self._hear_process
        group = part.group
        saves = tape is not None
        self.decisions = Decisions(self.learner, part.run.identity, group.generation, group.size, part.needed, saves=saves)
        self._moment = Moment(0, 1)
        self._batch = 0, 0
        self.regroups = False  # whether the generation ends by the decision that was made last, so that a larger one begins
        # what is to be saved, if that can be done now; the trainer's thread asks at each decision
        self.wanted: Callable[[], Purpose | None] = lambda: None
        self._accounts: dict[str, Any] = {}  # as of the last boundary at which a state was saved
        self._over = False  # what comes now is of no account any more
        self._saved_at: tuple[int, list[int]] = 0, []  # steps then, and by fragment the version applied
        self._optimizer: tuple[Layout, Owners]
        self._loaded: dict[int, FragmentVersion] = {}
        self._all_loaded = asyncio.Event()

    # ---- loop thread

    async def first_values(self, initial: Initial | None, index: int) -> Vector:
        """Return a fragment as all processes have it together, float32 [its size]."""
        return await self.part.gather(index)

    async def load(self, genesis: tuple[Genesis, bytes]) -> list[FragmentVersion]:
        """Return what the carriers have loaded of each fragment, in order."""
        await self.part.carrier.load(genesis)
        await self._all_loaded.wait()
        return [self._loaded[index] for index in range(len(self.part.carriers))]

    async def holds(self) -> bool:
        """Leave that to the carriers: they follow what they have loaded, and tell what the log has lost since."""
        return True

    def follow(self) -> None:
        """Leave that to the carriers, which follow what they have loaded."""

    @property
    def may_encode(self) -> bool:
        """Whether an offer may begin now; the lock is held."""
        return self.decisions.may_answer

    def encode(self, answer: DueOffer) -> None:
        """Have the fragment's carrier quantise an offer; the lock is held."""
        number = self.decisions.course.number - 1  # the snapshot is of the boundary that was carried out last
        message = island.Encode(answer.fragment, number, answer.bits, answer.version)
        self.part.loop.call_soon_threadsafe(self.part.links.write_all, message)

    def store(self, fragment: int, offer: PendingDelta) -> None:
        """Have the fragment's carrier store the offer that it quantised."""
        self.part.links.write(self.part.carriers[fragment], island.Store(fragment, offer.bits, offer.stated))

    def _hear_process(self, source: int, message: Message) -> None:
        """Take in what a process says to its leader."""
        with self.shared.lock:
            if self._over:
                return
            match message:
                case island.Folded():
                    self._fold(source, message)
                case island.Staged():
                    self.decisions.staged(source, message.fragment, message.number)
                case island.Encoded():
                    self._check_carrier(source, message.fragment)
                    if message.content is None:
                        self.member.answering.not_finite(message.fragment)
                    else:
                        self.member.answering.encoded(message.fragment, message.content)
                case island.OfferStored():
                    self._check_carrier(source, message.fragment)
                    self.member.answering.stored(message.fragment, message.sequence)
                case island.Passed():
                    self.decisions.passed(source, message)
                case island.PartSaved():
                    self._note_part(source, message)
                case island.Leaving():
                    if self.shared.leave_by_s is None:
                        self.log.info("process_asked_to_end", process=self.part.links.members[source])
                        self.shared.leave(self.settings.leave_s)
                case _:
                    raise IslandError(f"process {source} sends {message.kind!r} to its leader")
            self._stage()
            self.shared.tell()

    def _fold(self, source: int, folded: island.Folded) -> None:
        index = folded.fragment
        self._check_carrier(source, index)
        chain = Chain.from_head(index, folded.head)
        version = FragmentVersion(folded.record, chain)
        if len(self.learner.fragments) < len(self.part.carriers):
            self._loaded[index] = FragmentVersion(None, chain)  # what came since is in it
            if len(self._loaded) == len(self.part.carriers):
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
            self.shared.loop.call_soon(self.member.answer_marker, self._marker_reply(ended))

    def _marker_reply(self, ended: Ended) -> MarkerReply:
        name, number = self.settings.name, ended.save.marker
        if not ended.parts:
            return MarkerDeclined(name, number, "not_saved", "see checkpoint_not_saved in the logs of its processes")
        step, versions = self._saved_at
        (size_bytes, digest), *others = [(each.size_bytes, each.content or b"") for _, each in sorted(ended.parts.items())]
        return MarkerAnswer(
            learner=name, number=number, step=step, versions=versions, size_bytes=size_bytes, file_hash=digest, parts=others
        )

    def _lend_parts(self, ended: Ended) -> None:
        lent = self.part.lent
        if ended.parts:
            self.member.lend(*self._saved_at, SharedState(lent, ended.number, *self._optimizer, ended.parts))
        else:
            self.member.lender.give_none()
            lent.drop_everywhere(ended.number)

    def _check_carrier(self, source: int, index: int) -> None:
        if index >= len(self.part.carriers) or self.part.carriers[index] != source:
            raise IslandError(f"process {source} sent values of fragment {index}, which it does not carry")

    def _stage(self) -> None:
        """Have versions brought to all processes; the lock is held."""
        if len(self.learner.fragments) < len(self.part.carriers):
            return
        for stage in self.decisions.to_stage():
            self.shared.loop.call_soon_threadsafe(self.part.links.write_all, stage)

    def others_traffic(self) -> list[MemberTraffic]:
        """Return what the other processes have moved, as they said last."""
        return [MemberTraffic(beat.bytes_up, beat.bytes_down, beat.refused) for beat in self.part.group.beats.values()]

    async def join(self) -> None:
        """Join the run as a member does; the model is gathered from all processes if this learner founds the run."""
        await self.member.join()

    @property
    def steered(self) -> Member:
        """The member, or process, that steers the trainer of this process."""
        return self.member

    async def close(self) -> None:
        """Send a last heartbeat, and stop all that runs in the loop."""
        await self.member.close()

    async def end(self) -> None:
        """End this process's part."""
        await self.part.close()

    def note_saved(self, digest: bytes) -> None:
        """Note that the state that was copied last is on the disk. Callable from any thread."""
        self.member.note_saved(digest)

    def note_state_before(self, learner: str, digest: bytes) -> None:
        """Note that all processes begin with the optimizer state that a learner of the run before has ended with."""
        self.member.note_state_before(learner, digest)

    def note_optimizer(self, loan: Loan | None) -> None:
        """Note with which optimizer state all processes begin: one that each has borrowed its part of, or a fresh one."""
        if loan is not None:
            self.tape.record(events.Borrowed(loan.peer, loan.content_hash[: events.DIGEST_BYTES]))
            self.log.info("state_from_peer", learner=loan.peer, step=loan.step, version_min=min(loan.versions))
        elif self.learner.peers() is not None:
            self.learner.accounts.warming = 0
            self.tape.record(events.Fresh())
            self.log.info("state_fresh", warmup_steps=self.part.run.created.inner.restart_warmup_steps)

    # ---- trainer thread

    def look_ahead(self, flight: StepDone | None, batch: tuple[int, int]) -> None:
        """Make the next decision while a step is in flight, and tell all processes.

        ``flight`` counts that step (None: none is in flight), ``batch`` is share and index of the one after it.
        """
        self._batch = batch
        with self.shared.lock:
            self.decisions.flight = flight
            self._decide(self.shared.loop.time())

    def _decide(self, now_s: float) -> None:
        self._stage()
        self.regroups = self._may_regroup()
        with decisions.presuming(self.learner, self.decisions.flight):
            ended = self.regroups or self._may_leave(now_s)
        decided = self.decisions.make(now_s, self._batch, ended=ended, wanted=self.wanted())
        self.shared.loop.call_soon_threadsafe(self.part.links.write_all, decided)

    def _may_regroup(self) -> bool:
        """Return whether the generation ends now for one with the processes that wait: once its state can be saved."""
        ready = self.learner.activity in ("stepping", "waiting") and self.decisions.may_save and self.shared.leave_by_s is None
        if not (ready and self.part.group.grows):
            return False
        self.learner.silent = True  # what it offered from here on would not be in that state
        return True

    def _may_leave(self, now_s: float) -> bool:
        """Return whether the learner leaves now: with nothing unmerged, or late, once its state can be saved."""
        by_s = self.shared.leave_by_s
        if by_s is None or (not self.learner.left and now_s < by_s):
            return False
        self.learner.silent = True
        return self.learner.may_dump or now_s >= by_s + LEAVE_TIMEOUT_S

    def boundary(self, done: StepDone | None) -> Boundary:
        """Book the step that ended, and carry the next decision out, which is made now if it was not made ahead.

        Raises:
            DilocoError: a task of the loop thread failed.
        """
        now_s = self.shared.loop.time()
        with self.shared.lock:
            self.shared.begin_boundary()
            if done is not None:
                self.learner.book(done)
                self.member.shares.book(done.share, done.batch, done.most_tokens)
                self.member.taped.step(done, now_s)
            if self.decisions.made is None:
                self._decide(now_s)
        decided, writes = self.part.boundary()
        with self.shared.lock:
            decision = self.decisions.carry_out()
            self.member.taped.decision(decision)
            if decided.save is not None:
                self.tape.record(events.Copied())
                self._accounts, _ = self.learner.dump(self.member.shares.positions())
                self._saved_at = self.member.step, [state.delta.base_version for state in self.learner.fragments]
            for fragment in decided.reads:
                self.decisions.submit(fragment)
            self._moment = decisions.moment(decided)
            self._stage()
        return Boundary(
            writes, [*decided.reads], stop=decided.stop, wait=decided.wait, finished=decided.finished, ended=decided.ended
        )

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something new, at most ``timeout_s``, and until no process is behind.

        Else a leader that waits would decide on and on while another process stands still, until that has been silent too long.
        """
        self.shared.wait_for_news(timeout_s)
        self.shared.wait_until(lambda: self.decisions.is_followed or self.shared.failure is not None, None)

    def submit(self, fragment: int, reader: Reader) -> None:
        """Hand over a way to read this process's rows of a fragment as they are at this boundary."""
        self.part.submit(fragment, reader)
        self.member.answering.begin_soon(fragment)

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
        with self.shared.lock:
            return self.decisions.saves.under_way is not None

    def part_saved(self, saving: Saving, saved: Saved | None, content_hash: bytes) -> None:
        """Note how this process has ended with its part of a state, by which tapes call it. Callable from any thread."""
        if saved is not None and saving.save.purpose != "loan":
            self.note_saved(saved.digest)
        self.part.part_saved(saving, saved, content_hash)

    def keep(self) -> tuple[Kept, dict[str, Any]]:
        """Let nothing change any more, and return the word for the state as of the last boundary, and its accounts.

        Call it in the loop's thread: what was said before is in the state.

        Raises:
            IslandError: there is no state to go on from.
        """
        with self.shared.lock:
            self._over = self.learner.silent = True
            if any(state.phase in (Phase.JOINING, Phase.INVALID) for state in self.learner.fragments):
                raise IslandError("a fragment has not joined the log yet, or its value is not finite")
            self.tape.record(events.Copied())
            accounts, _ = self.learner.dump(self.member.shares.positions())
            number, generation = self.decisions.course.number - 1, self.decisions.course.generation
        return Kept(set_name(generation, number, kept=True), number), accounts

    # ---- what it alone knows, and tells the other processes

    async def is_for_larger_generation(self) -> bool:
        """Whether the generation alone has ended, and not the learner."""
        return await self.part.group.hear_answer("end", self.regroups)

    async def takes_up_state_before(self) -> bool:
        """Whether the run has merged nothing yet: its learners begin with the states of the run that it continues."""
        return await self.part.group.hear_answer("begins", not self.learner.peers())

    async def loan_peers(self) -> list[str]:
        """Return the learners that an optimizer state can be borrowed from, the best one first."""
        peers = list(self.member.loans.watch(self.learner.peers()))
        return (await self.part.group.hear_leader(LoanPeers, "peers", LoanPeers("peers", peers))).learners

    async def must_ask_again(self, loan: Loan) -> bool:
        """Whether a loan is so old that all processes ask for a newer one."""
        return await self.part.group.hear_answer("loan, again", self.member.loans.must_ask_again(loan))

    def note_newer_loan(self, loan: Loan | None) -> None:
        """Note how a loan has ended that was asked for again."""
        self.member.loans.note_age(loan)

    # ---- before the first step

    def describe_optimizer(self, layout: Layout, owners: Owners) -> None:
        """Say what an optimizer's state consists of, and which process has which chunk of it: what can be lent."""
        self._optimizer = layout, owners

    def note_restored(self, name: str) -> None:
        """Note that all processes begin from a checkpoint: it is kept until all have a newer one."""
        with self.shared.lock:
            self.decisions.saves.whole = name

    def unmerged_of(self, plain: Mapping[str, Any], bare: Collection[int] = ()) -> list[list[Pending]]:
        """Return by fragment the offers of unknown fate in a checkpoint's accounts; ``bare`` fragments have no arrays in it.

        Raises:
            LookupError, TypeError, ValueError, OverflowError: the accounts are not of this model.
        """
        unmerged = self.learner.unmerged(plain, bare)
        return [[Pending(offer.identity, offer.bits, offer.dropped) for offer in offers] for offers in unmerged]
