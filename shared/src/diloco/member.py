"""A learner's protocol side: joins a run, follows the log, answers rounds, keeps the books. Needs no accelerator library.

Two threads share it. The *trainer* (any framework, or a toy) calls :meth:`Member.boundary` between two inner steps, writes
the versions it returns into its model and hands over readers for the fragments it asks for; none of these calls waits for
anything. The *loop* thread runs asyncio: it follows the log and folds it, hears announcements, reads, quantises and sends.
A lock guards the short passages in which both touch the same books; while a fragment's offer is being quantised, versions
of that fragment are applied one boundary later instead.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diloco import __version__, membership, shares
from diloco.core import bandwidth, codec, ranges
from diloco.core import tape as events
from diloco.core.books import Apply, Books, Outstanding
from diloco.core.chain import Chain
from diloco.core.fold import Replica
from diloco.core.fragments import FragmentMap
from diloco.core.lockstep import Lockstep
from diloco.core.pace import Average, first_due_steps
from diloco.core.schedule import Moment
from diloco.errors import (
    AppendUncertainError,
    BrokerError,
    ChainError,
    EjectedError,
    HashError,
    MessageError,
    NonFiniteError,
    RewoundError,
    RunError,
    StorageFullError,
)
from diloco.following import Follower
from diloco.log import Entry, Log
from diloco.membership import Run
from diloco.observe import Counted, Logger, Progress
from diloco.patience import patiently
from diloco.peer import Borrower, Layout, Lender, Loan
from diloco.settings import Bits, LearnerSettings
from diloco.shares import Leaseholder
from diloco.tape import Recorder, Unrecorded
from diloco.tasks import end
from diloco.transport import Heard, Transport
from diloco.wire import messages, subjects
from diloco.wire.messages import Announcement, Cursor, Genesis, Mark, Marked, Offer, Pulse, Range, Record
from diloco.wire.subjects import Subjects

Vector = NDArray[np.float32]
Reader = Callable[[], Vector]
Dump = tuple[dict[str, Any], dict[str, NDArray[Any]]]  # plain values, and arrays by name
State = Literal["starting", "stepping", "waiting", "recovering", "closing", "leaving", "left", "finished"]

OFFER_TIMEOUT_S = 15.0
STORAGE_RETRY_S = 1.0
LEAVE_TIMEOUT_S = 10.0
FREE_TIMEOUT_S = 2.0
READMITTED_S = 0.5
# of a step: how early a fragment is kept readable for a round that is expected, so that it can be answered in mid-step
PREDICTION_STEPS = 1.25


@dataclass(frozen=True)
class StepDone:
    """An inner step whose work the model holds by the time that it gets to what the boundary asks for.

    ``loss`` is the newest known (None: none yet); a step was in flight for ``busy_s`` and none for ``blocked_s`` since the
    last call, as far as is known by now.
    """

    tokens: int
    share: int  # of the data
    batch: int  # its index in the share
    loss: float | None
    busy_s: float
    blocked_s: float


@dataclass
class Done:
    """What a process has done, whatever its learner did before."""

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    blocked_s: float = 0.0


@dataclass(frozen=True)
class Boundary:
    """What the trainer has to do between two steps, in this order."""

    applies: list[tuple[int, Apply]]
    reads: list[int]  # fragments to hand over a reader for, with :meth:`Member.submit`
    stop: bool  # the token budget is used up: take no further step
    wait: bool  # take no step yet: a version is on its way (``round.learners_wait``)
    finished: bool  # every fragment's log is closed and applied


@dataclass(frozen=True)
class _Pending:
    """A version that has been folded and waits for the next boundary; without record, the log was loaded anew."""

    record: Record | None
    chain: Chain  # as of this version; the replica's goes on
    theta: Vector
    spoilt: bool = False  # the learner's own value is worth nothing

    @classmethod
    def of(cls, replica: Replica) -> _Pending:
        """What ``replica`` is now; nobody may be folding it."""
        return cls(None, replace(replica.chain, cursors=dict(replica.chain.cursors)), replica.theta)


@dataclass(frozen=True)
class _Snapshot:
    """A way to read a fragment as of the last boundary, and what it holds."""

    reader: Reader
    steps: int
    tokens: int
    data: list[Range]
    step: int  # of the learner's own, after which it was taken


@dataclass
class _Fragment:
    """What the member knows of one fragment."""

    index: int
    books: Books
    replica: Replica
    newest: _Pending  # what the replica was after its last entry: a worker may be folding the next one
    pending: deque[_Pending] = field(default_factory=deque)
    snapshot: _Snapshot | None = None
    open_version: int = 0  # of the newest round announced
    epoch: int = 0  # of the owner that announced it
    closing: bool = False  # that round is the closing one
    steps_between: int = 0  # two rounds, as its owner said last
    bits: Bits = 32  # of an answer to that round
    answered: int = 0  # version of the newest round answered
    sent: int = 0  # stream sequence of the newest offer's head
    encoding: bool = False
    sending: bool = False
    spoilt: bool = False  # the learner's value is not finite: begin again from the global one
    applied: bool = False  # since this process joined
    version_step: int = 0  # local step at which the base was applied
    opened_at_s: float | None = None
    period: Average = field(default_factory=Average)

    @property
    def wants_answer(self) -> bool:
        """A round is open that this learner could answer, had it a snapshot."""
        return (
            self.open_version == self.books.base_version + 1
            and self.answered < self.open_version
            and not self.pending
            and not self.sending
        )


class Member:
    """One learner (or evaluator) in one run. Construct it in the loop thread, then ``await join()``."""

    def __init__(
        self,
        transport: Transport,
        run: Run,
        fragment_map: FragmentMap,
        settings: LearnerSettings,
        log: Logger,
        tape: Recorder | None = None,
    ) -> None:
        self.transport, self.run, self.map, self.settings, self.log = transport, run, fragment_map, settings, log
        self.tape = tape or Unrecorded()
        self.incarnation = int(transport.wall_s() * 1000)
        self.store = Log(transport, run.name, run.identity, fragment_map, run.settings)
        self.subjects = Subjects(run.name)
        self.lender = Lender(transport, run.identity, self.subjects, settings.name, self._may_lend, log)
        self.refused = Counted(log)
        self.follower = Follower(transport, run, log, self._change)
        self.shares = Leaseholder(run, settings, self.incarnation, log)
        self.state: State = "recovering"
        self.step = self.tokens = 0
        self.loss: float | None = None
        self.step_average = Average()
        self.busy_s = self.blocked_s = 0.0
        self.done = Done()
        self.rounds_merged = self.rounds_missed = 0
        self.failure: BaseException | None = None
        self._earlier_tokens = 0  # processed before this process
        self._taped_data: tuple[int, int] | None = None  # share and batch that the next step takes by what is on the tape
        self._budget = run.settings.tokens  # of the run, as of the last boundary
        self._changes = 0  # that were in force then
        self._schedule = (0, 0)  # tokens of all learners as the newest applied version states, own tokens then
        self._announced = (0, 0)  # tokens of all learners as last announced, own tokens then
        self._draining = self._stopped = self._leaving = self._silent = False
        in_lockstep = run.settings.round.lockstep and settings.role == "learner"
        nothing: list[Mapping[int, int]] = [{} for _ in fragment_map.fragments]
        self._lockstep = Lockstep(nothing, run.settings.liveness.dead_s) if in_lockstep else None
        self._warming: int | None = None  # steps taken with an optimizer state that began fresh in a run under way
        self._mark: Mark | None = None  # not answered yet
        self._marked: Marked | None = None  # the newest mark's answer
        self._loads = 1  # how often fragments were loaded
        self._held_back: list[int] | None = None  # by fragment: no later version is applied until the mark's state is copied
        self._fragments: list[_Fragment] = []
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._unseen = False  # something happened since the last boundary
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None]

    # ---- loop thread

    async def join(self, initial: Callable[[], Sequence[Vector]]) -> None:
        """Be admitted, found the run if nobody else does (with ``initial``), load the log, and begin to follow it.

        A learner that was ejected is not, and waits until it is readmitted.

        Raises:
            AdmissionError: this learner's model is not the run's.
        """
        await patiently(self.follower.look, self.log)
        self._spawn(self.follower.follow())
        await self._readmitted()
        if self.settings.role == "learner":
            if not self.transport.founds and await patiently(partial(self.run.registry.get, "map"), self.log) is None:
                self.log.info("waiting_for_founder")
            self.incarnation = self.shares.incarnation = await patiently(self._be_admitted, self.log)
        founder = self.settings.name if self.settings.role == "learner" and self.transport.founds else None
        begin = partial(membership.genesis, self.run, self.store, founder, initial, self.log)
        genesis, check = await patiently(begin, self.log)
        sequences = []
        for fragment in self.map.fragments:
            state = self._seat(fragment.index, await self._newest_replica(fragment.index, genesis, check))
            self._fragments.append(state)
            sequences.append(state.replica.chain.sequence)
        self._take_up_accounts()
        if self.settings.role == "learner":
            await patiently(lambda: self.shares.take(self._ends()), self.log)
        await self.transport.subscribe(self.subjects.round(), self._hear_round)
        if self.settings.role == "learner":
            await self.transport.subscribe(self.subjects.mark, self._hear_mark)
            await self.lender.serve()
        loaded = tuple(state.books.base_version for state in self._fragments)
        self.tape.record(events.Start(int(self.transport.wall_s() * 1000), self.incarnation, loaded))
        self._following = self._spawn(self._follow(min(sequences) + 1, genesis, check))
        self._spawn(self._look_at_server(genesis, check))
        self._spawn(self._pulse_regularly())
        versions = [state.books.base_version for state in self._fragments]
        self._change()
        self.log.info("joined", fragments=len(versions), version_min=min(versions), version_max=max(versions))

    async def _readmitted(self) -> None:
        """Wait while this learner is ejected, but not beyond the run's end."""
        complained = False
        while (ejected := self.run.now.ejected.get(self.settings.name)) is not None:
            if not complained:
                self.log.warning("waiting_for_readmission", reason=ejected.label)
            complained = True
            if await self.store.closed():
                return
            await asyncio.sleep(READMITTED_S)

    def _change(self) -> None:
        """Something was changed: a learner that was ejected ends."""
        if len(self._fragments) < len(self.map.fragments):
            return  # it is told when it has joined
        with self._lock:
            ejected = self.run.now.ejected.get(self.settings.name)
            over = all(state.newest.chain.closed for state in self._fragments)
            if ejected is not None and not over:
                self.failure = self.failure or EjectedError(
                    f"run {self.run.name!r}: learner {self.settings.name} was ejected by {ejected.label}; it may come back "
                    f"after diloco readmit DIR {self.settings.name}"
                )
            self._tell()

    async def borrow(self, layout: Layout) -> Loan | None:
        """The state of a peer's optimizer, for a learner that joined without a checkpoint; None: it begins with a fresh one.

        Peers are asked in the order of what the log has merged of them, most first. In a run without versions nobody is asked,
        nor by an optimizer without a state.
        """
        if not layout.arrays:
            return None
        merged: Counter[str] = Counter()
        for state in self._fragments:
            merged.update({name: cursor.tokens for name, cursor in state.newest.chain.cursors.items()})
        if not merged:
            return None
        del merged[self.settings.name]
        borrower = Borrower(self.transport, self.run.identity, self.subjects, self.settings.name, layout, self.log)
        loan = await borrower.borrow([name for name, _ in merged.most_common()])
        if loan is None:
            self._warming = 0
            self.tape.record(events.Fresh())
            self.log.info("state_fresh", warmup_steps=self.run.settings.inner.restart_warmup_steps)
        else:
            self.tape.record(events.Borrowed(loan.peer, loan.content_hash[: events.DIGEST_BYTES]))
            self.log.info(
                "state_from_peer", learner=loan.peer, step=loan.step, version_min=min(loan.versions), bytes=layout.size_bytes
            )
        return loan

    def _take_changes(self) -> None:
        """Go by what is in force now, from this boundary on; the lock is held."""
        now = self.run.now
        if now.number != self._changes:
            self._changes, self._budget = now.number, now.settings.tokens
            self.tape.record(events.Changed(now.number))

    def _may_lend(self) -> bool:
        """Whether this learner's optimizer state is worth something."""
        with self._lock:
            return self.state in ("stepping", "waiting") and not self._is_warming()

    def _is_warming(self) -> bool:
        return self._warming is not None and self._warming < self.run.settings.inner.restart_warmup_steps

    def _take_up_accounts(self) -> None:
        """Count on from what the log says of this learner; what it did beyond that before a crash is not known here."""
        cursors = [state.replica.chain.cursors.get(self.settings.name) for state in self._fragments]
        self.tokens = self._earlier_tokens = max(cursor.tokens + cursor.lost_tokens if cursor else 0 for cursor in cursors)
        for state, cursor in zip(self._fragments, cursors, strict=True):
            state.books.lost_tokens = self.tokens - (cursor.tokens if cursor else 0)

    def _ends(self) -> dict[int, int]:
        """How far the log has merged the data, by share: of the fragment that is furthest."""
        ends: dict[int, int] = {}
        for state in self._fragments:
            for share, until in state.newest.chain.ends.items():
                ends[share] = max(until, ends.get(share, 0))
        return ends

    async def _look_at_server(self, genesis: Genesis, check: bytes) -> None:
        """Look regularly at what this learner has stored, which others may change, and a server's crash undo."""
        answered: dict[int, int] = {}  # by fragment: version of the round that was open and answered at the last look
        looked_at = 0
        while True:
            await asyncio.sleep(self.run.now.settings.liveness.lease_s / shares.LOOKS_A_LEASE)
            try:
                if self.settings.role == "learner":
                    await self.shares.look(self._ends())
                    await self._look_at_admission()
                    answered = await self._look_at_offers(answered)
                loads = self._loads
                if await self._look_at_log(everywhere=loads != looked_at):
                    looked_at = loads
                else:
                    await self._begin_again(genesis, check)
            except BrokerError as error:  # the server is away: what is held is held on
                self.log.debug("server_unknown", reason=str(error))

    async def _look_at_log(self, *, everywhere: bool) -> bool:
        """Whether the log still has the newest entry that was read, or (``everywhere``) that of each fragment.

        Fragments are loaded one after another, and a server may go back meanwhile; all further entries come to one reader.
        """
        chains = sorted((state.newest.chain for state in self._fragments), key=lambda chain: -chain.sequence)
        for chain in chains if everywhere else chains[:1]:
            if not await self.store.holds(chain):
                return False
        return True

    async def _be_admitted(self) -> int:
        """As :func:`diloco.membership.join`."""
        digest, founds = self.run.settings.digest(), self.transport.founds
        return await membership.join(self.run, self.settings.name, self.incarnation, self.map, digest, founds=founds)

    async def _look_at_admission(self) -> None:
        admitted = await membership.admitted(self.run, self.settings.name, self.map.digest)
        if admitted is not None and admitted > self.incarnation:
            raise RunError(
                f"run {self.run.name!r}: a younger process goes by the name {self.settings.name!r}; this one ends: give every "
                "learner a name, and an identity, of its own"
            )
        if admitted is None or admitted < self.incarnation:
            self.log.warning("admission_lost", incarnation=self.incarnation)
            await self._be_admitted()
            with self._lock:
                for state in self._fragments:
                    state.answered = 0  # what was sent meanwhile was refused

    async def _look_at_offers(self, before: dict[int, int]) -> dict[int, int]:
        """Answer rounds again whose answers are gone, and that are open for long because of it; the rounds answered by now."""
        with self._lock:
            open_ = [state for state in self._fragments if state.open_version and not state.sending]
            answered = {state.index: state.answered for state in open_ if state.answered == state.open_version}
        for index, version in answered.items():
            state = self._fragments[index]
            if before.get(index) != version or not state.sent:
                continue
            if await self.transport.last_sequence(self.subjects.offer(index, self.settings.name)) != state.sent:
                with self._lock:
                    if state.answered == version and not state.sending:
                        self.log.warning("offer_lost", fragment=index, version=version)
                        state.answered = 0
        return answered

    async def _begin_again(self, genesis: Genesis, check: bytes) -> None:
        """The log has lost what was read last, and whoever reads it has not met that."""
        self.log.error("log_rewound", reason="the newest entry that was read is gone")
        await end(self._following)
        self._following = self._spawn(self._follow(await self._rewind(genesis, check), genesis, check))

    async def close(self) -> None:
        """Send a last pulse, if others have heard of this member, and stop everything that runs in the loop."""
        if len(self._fragments) == len(self.map.fragments):
            if self.state != "finished":
                self.state = "left"
            await self._send_pulse()
            await self._free_shares()
        await end(*self._tasks)
        self.tape.flush()

    async def _free_shares(self) -> None:
        if self.settings.role == "learner" and self.state != "finished":
            try:
                await asyncio.wait_for(self.shares.leave(), FREE_TIMEOUT_S)
            except (BrokerError, TimeoutError) as error:  # the coordinator frees them once this learner is silent for long
                self.log.warning("shares_not_freed", reason=str(error))

    def _seat(self, index: int, replica: Replica) -> _Fragment:
        """What a member that begins with ``replica`` knows of its fragment."""
        chain, settings = replica.chain, self.run.settings
        books = Books(
            learner=self.settings.name,
            incarnation=self.incarnation,
            carry=settings.carry,
            error_feedback=settings.codec.error_feedback,
            base=replica.theta,
            base_version=chain.version,
            base_hash=chain.state_hash,
            after=chain.cursor(self.settings.name),
        )
        newest = _Pending.of(replica)
        return _Fragment(index, books, replica, newest, deque([newest]))

    async def _follow(self, start: int, genesis: Genesis, check: bytes) -> None:
        fragments = range(len(self.map.fragments))
        while True:
            try:
                async for entry in self.store.follow(fragments, start, self._refuse_entry):
                    await self._fold(entry, genesis, check)
            except RewoundError as error:
                self.log.error("log_rewound", reason=str(error))
                start = await self._rewind(genesis, check)

    async def _rewind(self, genesis: Genesis, check: bytes) -> int:
        """Go back to what the log has; the sequence to read on from."""
        for state in self._fragments:
            replica = await self._newest_replica(state.index, genesis, check)
            with self._lock:
                state.pending.clear()
                state.replica = replica
                self._queue(state, None)
                # rounds of versions that are gone, and a mark of them
                self._mark = self._held_back = None
                state.open_version = state.answered = state.epoch = 0
                state.closing, state.opened_at_s = False, None
                self._tell()
        self._loads += 1
        return min(state.replica.chain.sequence for state in self._fragments) + 1

    def _refuse_entry(self, sequence: int, error: MessageError) -> None:
        self._refuse("log", error, sequence=sequence)

    async def _fold(self, entry: Entry, genesis: Genesis, check: bytes) -> None:
        """Fold an entry and queue its version; where that cannot be, load the fragment's log anew up to it."""
        state, record = self._fragments[entry.record.fragment], entry.record
        if entry.sequence <= state.replica.chain.sequence:
            return
        try:
            await self._fold_into(state.replica, entry)
        except (ChainError, HashError) as error:
            if isinstance(error, ChainError) and record.version <= state.replica.chain.version + 1:
                self._refuse(record.syncer, error, sequence=entry.sequence)
                return
            # entries are missing (purged below a keyframe), or the replica is spoilt
            self.log.warning("log_reloaded", fragment=record.fragment, version=record.version, reason=str(error))
            replica = await patiently(partial(self._replica, record.fragment, genesis, check, entry.known_sequence), self.log)
            with self._lock:
                state.replica = replica
                self._queue(state, None)
                self._tell()
            return
        with self._lock:
            self._queue(state, record)
            self._tell()

    def _queue(self, state: _Fragment, record: Record | None) -> None:
        """Let the next boundary apply what the replica is after ``record`` (None: it was loaded anew); the lock is held."""
        state.newest = _Pending.of(state.replica)
        if record is None or record.makes_version:
            state.pending.append(replace(state.newest, record=record))

    async def _newest_replica(self, index: int, genesis: Genesis, check: bytes) -> Replica:
        """The fragment to its log's end, wherever that is by then: what it says of this learner is where it counts on from."""
        while True:
            try:
                return await patiently(partial(self._replica, index, genesis, check), self.log)
            except RewoundError as error:
                self.log.error("log_rewound", reason=str(error))

    async def _replica(self, index: int, genesis: Genesis, check: bytes, stop_sequence: int | None = None) -> Replica:
        """The fragment from its newest keyframe and the entries after it, to the one at ``stop_sequence`` or (None) the end."""
        replica = (await self.store.load(index, genesis, check)).replica
        if stop_sequence is None:
            stop_sequence = await self.store.end_sequence(index)
        if replica.chain.sequence < stop_sequence:
            start = replica.chain.sequence + 1
            async for missed in self.store.follow([index], start, self._refuse_entry, stop_sequence):
                try:
                    await self._fold_into(replica, missed)
                except ChainError as error:
                    self._refuse(missed.record.syncer, error, sequence=missed.sequence)
        return replica

    async def _fold_into(self, replica: Replica, entry: Entry) -> None:
        fold = partial(replica.fold, in_place=False)
        await asyncio.to_thread(fold, entry.record, entry.check, entry.sequence, entry.body)

    async def _hear_round(self, message: Heard) -> None:
        try:
            round_, _, _ = messages.unpack(message.data, Announcement, self.run.identity)
            if round_.fragment >= len(self._fragments):
                raise MessageError(f"round of fragment {round_.fragment}, the run has {len(self._fragments)}")
            bits = self._checked_bits(round_)
        except MessageError as error:
            self._refuse(message.subject, error)
            return
        now_s = self._loop.time()
        with self._lock:
            state = self._fragments[round_.fragment]
            # by the log alone: one that announced a greater epoch may have lost its takeover entry with a server's last writes
            if round_.epoch < state.newest.chain.epoch:
                return  # from an owner that has been replaced, and does not know it yet
            if round_.epoch > state.epoch:
                # a new owner, or the same again after a fence, may have nothing of what its predecessor was sent
                state.epoch, state.answered = round_.epoch, 0
            next_version = state.newest.chain.version + 1  # its round is open whatever was announced: a log may go back
            if round_.version > state.open_version or round_.version == next_version != state.open_version:
                if state.opened_at_s is not None and 0 < state.open_version < round_.version:
                    state.period.add((now_s - state.opened_at_s) / (round_.version - state.open_version))
                state.opened_at_s, state.open_version, state.closing = now_s, round_.version, False
            # announcements may overtake one another: an earlier one does not make it a round like any other again
            if round_.closing and round_.version == state.open_version and not state.closing:
                state.closing, state.answered = True, 0  # whatever was answered before is not all there is
            if round_.version == state.open_version:
                state.bits, state.steps_between = bits, round_.steps
            if round_.tokens_processed > self._announced[0]:
                self._announced = (round_.tokens_processed, self.tokens)
            if round_.closing and not self._draining:
                self._draining = True
                self._tell()
            self._try_answer(state)

    def _checked_bits(self, round_: Announcement) -> Bits:
        """The bits that an answer from here is to have.

        Raises:
            MessageError: the announcement asks for what the run's settings do not allow.
        """
        settings, best = self.run.now.settings, self.run.settings.codec.offer_bits
        most = bandwidth.steps_between(settings, bandwidth.slowest(settings))
        if not settings.round.steps <= round_.steps <= most:
            raise MessageError(f"round every {round_.steps} steps, the run has one every {settings.round.steps} to {most}")
        allowed, asked = bandwidth.possible(best, settings), dict(round_.offer_bits)
        if not set(asked.values()) <= set(allowed):
            raise MessageError(f"round asks for offers of {asked} bits, the run has {allowed}")
        return asked.get(self.settings.region or "", best)

    async def _hear_mark(self, message: Heard) -> None:
        try:
            mark, _, _ = messages.unpack(message.data, Mark, self.run.identity)
            if len(mark.versions) != len(self._fragments):
                raise MessageError(f"mark {mark.number} of {len(mark.versions)} fragments, the run has {len(self._fragments)}")
        except MessageError as error:
            self._refuse(message.subject, error)
            return
        with self._lock:
            answered, newest = self._marked, self._mark or self._marked
            if newest is None or mark.number > newest.number:
                self._mark, self._held_back = mark, mark.versions
        if answered is not None and mark.number <= answered.number:  # a smaller one: who sent it learns that it must count on
            await self._send_marked(answered)

    async def _send_marked(self, answer: Marked) -> None:
        await self.transport.publish(self.subjects.marked(self.settings.name), messages.pack(answer, self.run.identity))

    def _try_answer(self, state: _Fragment) -> None:
        """Answer the fragment's open round if it can be; the lock is held, and this is the loop thread."""
        snapshot = state.snapshot
        if not state.wants_answer or snapshot is None or self._silent or (state.closing and not self._stopped):
            return
        if not all(other.applied for other in self._fragments):
            return  # whoever has just come has nothing to say before it has the whole of the global model
        state.answered = state.open_version
        if snapshot.steps:
            state.snapshot, state.encoding, state.sending = None, True, True
            self._spawn(self._answer(state, snapshot, state.open_version, state.bits))

    async def _answer(self, state: _Fragment, snapshot: _Snapshot, version: int, bits: Bits) -> None:
        level = self.run.settings.codec.zstd_level

        def encode() -> tuple[Outstanding, bytes, bytes]:
            offer = state.books.offer(snapshot.reader(), snapshot.steps, snapshot.tokens, snapshot.data, version, bits)
            return offer, codec.pack(offer.body, level), codec.content_hash(offer.body)

        try:
            offer, packed, content_hash = await asyncio.to_thread(encode)
        except NonFiniteError as error:
            self.log.warning("displacement_not_finite", fragment=state.index, version=version, reason=str(error))
            with self._lock:
                state.encoding = state.sending = False
                state.spoilt = True
                self._tell()
            return
        with self._lock:
            digest, ago = content_hash[: events.DIGEST_BYTES], self.step - snapshot.step
            self.tape.record(events.Offer(ago, state.index, offer.number, offer.round, bits, digest))
            state.encoding = False
            self._tell()
        self.tape.flush()  # before it is sent: whatever is merged of this learner is on its tape
        body, inline, parts = messages.describe_body(packed, content_hash, self.transport.random_bytes(messages.ATTEMPT_BYTES))
        message = Offer(
            fragment=state.index,
            learner=self.settings.name,
            incarnation=offer.incarnation,
            number=offer.number,
            after=offer.after,
            round=offer.round,
            base_version=offer.base_version,
            base_hash=offer.base_hash,
            bits=offer.bits,
            steps=offer.steps,
            tokens=offer.tokens,
            lost_tokens=offer.lost_tokens,
            data=offer.data,
            body=body,
        )
        await self._send(message, inline, parts)
        with self._lock:
            state.sending = False
            self._tell()

    async def _send(self, offer: Offer, inline: bytes, parts: Sequence[bytes]) -> None:
        head = self.subjects.offer(offer.fragment, self.settings.name)
        frame = messages.pack(offer, self.run.identity, inline)
        complained = False
        while True:
            try:
                self._fragments[offer.fragment].sent = await self.transport.append(
                    head,
                    frame,
                    parts=parts,
                    part_subject=lambda index: subjects.offer_part(head, index),
                    message_id=f"{offer.learner}/{offer.incarnation}/{offer.fragment}/{offer.number}",
                    fence=None,
                    timeout_s=OFFER_TIMEOUT_S,
                )
                return
            except AppendUncertainError as error:
                self.log.warning("offer_retried", fragment=offer.fragment, number=offer.number, reason=str(error))
            except StorageFullError as error:
                # to give up would leave the round without this answer, and with all answers given up it would never close
                if not complained:
                    self.log.warning("offer_not_stored", fragment=offer.fragment, number=offer.number, reason=str(error))
                complained = True
                await asyncio.sleep(STORAGE_RETRY_S)

    async def _pulse_regularly(self) -> None:
        progress = Progress(self.log, self._loop.time(), self._progress)
        while True:
            await self._send_pulse()
            progress.look(self._loop.time())
            await asyncio.sleep(self.run.now.settings.liveness.pulse_s)

    def _progress(self) -> tuple[dict[str, int], dict[str, Any]]:
        pulse = self.pulse()
        counts = {"steps": pulse.step, "tokens": pulse.tokens, "bytes_up": pulse.bytes_up, "bytes_down": pulse.bytes_down}
        loss = None if pulse.loss is None else round(pulse.loss, 4)
        values = {"state": pulse.state, "loss": loss, "step_s": round(pulse.step_s, 4), "refused": pulse.refused}
        return counts, values | {"version_min": min(pulse.versions), "version_max": max(pulse.versions)}

    async def _send_pulse(self) -> None:
        frame = messages.pack(self.pulse(), self.run.identity)
        await self.transport.publish(self.subjects.pulse(self.settings.name), frame)

    def pulse(self) -> Pulse:
        """What the others are told of this member now."""
        with self._lock:
            states = self._fragments
            return Pulse(
                learner=self.settings.name,
                region=self.settings.region or "",
                incarnation=self.incarnation,
                role=self.settings.role,
                state=self.state,
                sending=any(state.sending for state in states),
                step=self.step,
                tokens=self.tokens,
                step_s=self.step_average.get(),
                loss=self.loss,
                versions=[state.books.base_version for state in states],
                steps=[state.books.steps for state in states],
                fragment_tokens=[state.books.tokens for state in states],
                lost_tokens=[max(0, state.books.lost_tokens) for state in states],
                trained=self.shares.trained(),
                batch_tokens=self.shares.batch_tokens,
                busy_s=self.busy_s,
                blocked_s=self.blocked_s,
                bytes_up=self.transport.bytes_out,
                bytes_down=self.transport.bytes_in,
                refused=self.refused.total,
                software=__version__,
            )

    def _refuse(self, sender: str, error: MessageError, **values: Any) -> None:
        self.refused.note(sender, type(error).__name__, reason=str(error), **values)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            with self._lock:
                self.failure = self.failure or task.exception()
                self._tell()

    def _tell(self) -> None:
        """Wake who waits for news; the lock is held."""
        self._unseen = True
        self._news.notify_all()

    # ---- trainer thread

    def boundary(self, done: StepDone | None) -> Boundary:
        """Between two inner steps: book the step that ended (None: there was none), and say what to do before the next.

        Raises:
            DilocoError: a task of the loop thread failed.
        """
        now_s = self._loop.time()
        applies: list[tuple[int, Apply]] = []
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._unseen = False
            if done is not None:
                self._book(done)
            self._take_changes()
            for state in self._fragments:
                if not state.encoding:
                    applies += [(state.index, self._apply(state, pending)) for pending in self._take_pending(state)]
                state.snapshot = None
            stop = self._draining or self._leaving or self._used_up()
            behind = not stop and self._behind(now_s, moved=bool(applies))
            wait = not stop and (behind or self._must_wait())
            self._stopped = stop
            finished = all(state.newest.chain.closed and not state.pending for state in self._fragments)
            self.state = self._state(finished, stop, wait, behind)
            reads = [state.index for state in self._fragments if self._keep_readable(state, now_s)]
        self._loop.call_soon_threadsafe(self._pulse_soon)
        return Boundary(applies, reads, stop, wait, finished)

    def submit(self, fragment: int, reader: Reader) -> None:
        """Hand over a way to read a fragment as it is at this boundary; called from another thread, at most once."""
        with self._lock:
            state = self._fragments[fragment]
            state.snapshot = _Snapshot(reader, state.books.steps, state.books.tokens, state.books.data, self.step)
            asked = state.wants_answer
        if asked:  # otherwise the announcement finds the snapshot
            self._loop.call_soon_threadsafe(self._answer_soon, state)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something new since the last boundary, at most ``timeout_s``."""
        with self._news:
            self._news.wait_for(lambda: self._unseen, timeout_s)

    def leased(self) -> dict[int, int]:
        """The shares of the data that this learner holds now, and the batch at which each begins or goes on."""
        return self.shares.leased()

    def moment(self) -> Moment:
        """What the learning rate goes by: the tokens that the newest applied version states and own ones since."""
        with self._lock:
            stated, own = self._schedule
            return Moment(stated + self.tokens - own, self._budget, self._warming)

    def versions(self) -> list[int]:
        """By fragment: the version applied at the last boundary."""
        with self._lock:
            return [state.books.base_version for state in self._fragments]

    def offers(self) -> int:
        """Offers that this process has made."""
        with self._lock:
            return sum(state.books.next_number - 1 for state in self._fragments)

    def report_loss(self, loss: float) -> None:
        """Set the loss that the next pulses carry (an evaluator's): none if it is not finite."""
        with self._lock:
            self.loss = loss if math.isfinite(loss) else None

    def leave(self) -> None:
        """Take no further step, and ask for rounds that merge what is unmerged; boundaries go on until :attr:`left`."""
        with self._lock:
            self._leaving = True

    @property
    def left(self) -> bool:
        """Whether nothing of this learner is unmerged."""
        with self._lock:
            return not any(state.books.steps or state.sending or state.pending for state in self._fragments)

    def dump(self) -> Dump | None:
        """The books as of the last boundary, for a checkpoint; None if that must wait for a later one.

        Nobody writes to its arrays any more: they may be saved while training goes on.
        """
        with self._lock:
            # an offer that these books do not hold could be merged all the same
            return None if any(state.encoding or state.spoilt for state in self._fragments) else self._dump()

    def checkpoint(self) -> Dump:
        """The books as of the last boundary, for the last checkpoint: no round is answered any more."""
        with self._news:
            self._silent = True
            self._news.wait_for(lambda: not any(state.encoding for state in self._fragments), LEAVE_TIMEOUT_S)
            return self._dump()

    def _dump(self) -> Dump:
        arrays: dict[str, NDArray[Any]] = {}
        fragments = []
        for state in self._fragments:
            plain, named = state.books.dump()
            fragments.append(plain)
            arrays |= {f"books/{state.index}/{name}": array for name, array in named.items()}
        plain_books = {
            "step": self.step,
            "tokens": self.tokens,
            "busy_s": self.busy_s,
            "blocked_s": self.blocked_s,
            "schedule": self._schedule,
            "positions": self.shares.positions(),
            "warming": self._warming,
            "version_steps": [state.version_step for state in self._fragments],
            "fragments": fragments,
        }
        return plain_books, arrays

    def lend(self, step: int, versions: list[int], layout: Layout, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Lend the optimizer's state as of a boundary after ``step`` steps. Takes time; callable from any thread."""
        content_hash = self.lender.give(step, versions, layout, layout.join(arrays))
        self.tape.record(events.Lent(content_hash[: events.DIGEST_BYTES]))
        self.log.info("state_lent", step=step, bytes=layout.size_bytes)

    def note_saved(self, digest: bytes) -> None:
        """The state that was copied last is on the disk. Callable from any thread."""
        self.tape.record(events.Checkpoint(digest))
        self.tape.flush()  # a process that begins again with this state says so on the same tape

    def mark_due(self) -> Mark | None:
        """The mark of a whole run's checkpoint that the state as of the last boundary answers."""
        with self._lock:
            mark = self._mark
            reached = mark is not None and all(
                state.books.base_version >= version for state, version in zip(self._fragments, mark.versions, strict=True)
            )
            return mark if reached else None

    def note_copied(self, mark: Mark) -> None:
        """The state that a mark asks for has been copied: versions beyond it may be applied."""
        with self._lock:
            if self._mark is mark:
                self._held_back = None

    def answer_mark(self, answer: Marked) -> None:
        """Say that the state asked for is saved. Callable from any thread."""
        with self._lock:
            self._marked = answer
            if self._mark is not None and self._mark.number == answer.number:
                self._mark = self._held_back = None
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._send_marked(answer)))

    def restore(self, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what :meth:`checkpoint` gave, after :meth:`join` and before the first boundary.

        Displacement is kept where the log holds of this learner what it held then; it is lost otherwise (design.md
        section 4).

        Raises:
            LookupError, TypeError, ValueError, OverflowError: the checkpoint is not of this model; nothing has changed.
        """
        if len(plain["fragments"]) != len(self._fragments):
            raise ValueError(f"it has {len(plain['fragments'])} fragments, the run {len(self._fragments)}")
        with self._lock:
            loaded = [replace(state.books) for state in self._fragments]
            for index, (books, values) in enumerate(zip(loaded, plain["fragments"], strict=True)):
                prefix = f"books/{index}/"
                named = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
                books.load(values, named)
            version_steps = [int(step) for step in plain["version_steps"]]
            for state, books, version_step in zip(self._fragments, loaded, version_steps, strict=True):
                state.books = books
                self._skip_load(state, version_step)
            self.step, self.tokens = int(plain["step"]), int(plain["tokens"])
            self._earlier_tokens = self.tokens
            self.busy_s, self.blocked_s = float(plain["busy_s"]), float(plain["blocked_s"])
            self.shares.restore(plain["positions"])
            self._warming = None if plain["warming"] is None else int(plain["warming"])
            stated, own = plain["schedule"]
            self._schedule = (int(stated), int(own))

    def _skip_load(self, state: _Fragment, version_step: int) -> None:
        """Where the log stands as these restored books do, the learner's value is right as it is, to the last bit."""
        chain, books = state.pending[0].chain, state.books
        stands = (chain.version, chain.state_hash, chain.cursor(self.settings.name))
        if state.pending[0].record is None and stands == (books.base_version, books.base_hash, books.after):
            state.pending.popleft()
            state.version_step, state.applied = version_step, True
            self._note_data(state, chain.ends)

    def _pulse_soon(self) -> None:
        self.tape.flush()
        self._spawn(self._send_pulse())

    def _answer_soon(self, state: _Fragment) -> None:
        with self._lock:
            self._try_answer(state)

    def _state(self, finished: bool, stop: bool, wait: bool, behind: bool) -> State:
        if finished:
            return "finished"
        if self._leaving:
            return "leaving"
        if behind:
            return "recovering"
        return "closing" if stop else "waiting" if wait else "stepping"

    def _book(self, done: StepDone) -> None:
        self.step += 1
        self.tokens += done.tokens
        if self._warming is not None:
            self._warming += 1
        self.shares.book(done.share, done.batch, done.tokens)
        if (done.share, done.batch) != self._taped_data:
            self.tape.record(events.Data(done.share, done.batch))
        self.tape.record(events.Step())
        self._taped_data = (done.share, done.batch + 1)
        if done.loss is not None and math.isfinite(done.loss):
            self.loss = done.loss
        self.busy_s += done.busy_s
        self.blocked_s += done.blocked_s
        self.done.steps += 1
        self.done.tokens += done.tokens
        self.done.busy_s += done.busy_s
        self.done.blocked_s += done.blocked_s
        if done.busy_s:
            self.step_average.add(done.busy_s + done.blocked_s)
        for state in self._fragments:
            state.books.step(done.tokens, done.share, done.batch)

    def _take_pending(self, state: _Fragment) -> list[_Pending]:
        pending = []
        while state.pending and self._may_apply(state.index, state.pending[0]):
            pending.append(state.pending.popleft())
        if state.spoilt:
            state.spoilt = False
            state.pending.clear()
            pending = [replace(state.newest, spoilt=True)]
        return pending

    def _may_apply(self, index: int, pending: _Pending) -> bool:
        """Versions beyond a mark wait until the state that it asks for has been copied, which the next boundaries do.

        Entries are read in the log's order: when one beyond the mark comes, the whole of the mark has come. If it has not, the
        mark names versions that a server has lost, which may never come again: nothing waits for them.
        """
        mark = self._held_back
        if mark is None or pending.record is None or pending.chain.version <= mark[index]:
            return True
        return any(state.newest.chain.version < version for state, version in zip(self._fragments, mark, strict=True))

    def _apply(self, state: _Fragment, pending: _Pending) -> Apply:
        record, chain = pending.record, pending.chain
        state.version_step, state.applied = self.step, True
        if record is None:
            self.tape.record(events.Reload(state.index, chain.version, pending.spoilt))
        else:
            self.tape.record(events.Apply(state.index, record.version))
        if record is None:
            applied = state.books.reload(chain, pending.theta, spoilt=pending.spoilt)
            stated = chain.tokens_merged + chain.tokens_lost
        else:
            applied = state.books.apply(record, pending.theta)
            merged = any(member.learner == self.settings.name for member in record.members)
            self.rounds_merged += merged
            self.rounds_missed += not merged and record.rolled_back is None
            stated = record.tokens_merged + record.tokens_lost
        if applied.forgotten:
            # none: the log was rewound to before this learner's first merged offer
            none = Cursor(self.settings.name, 0, 0, 0, 0, 0)
            self._count_on(state, chain.cursors.get(self.settings.name, none))
        if stated > self._schedule[0]:
            self._schedule = (stated, self.tokens)
        self._note_data(state, chain.ends if record is None else ranges.ends(held for m in record.members for held in m.data))
        return applied

    def _note_data(self, state: _Fragment, ends: Mapping[int, int]) -> None:
        """What data the newest version of a fragment that the learner holds was trained on."""
        if self._lockstep is not None:
            self._lockstep.newest[state.index] = ends

    def _count_on(self, state: _Fragment, cursor: Cursor) -> None:
        """Square the accounts after a merge of an offer made before a restart, which these books know nothing of."""
        unknown = max(0, cursor.tokens + cursor.lost_tokens - self._earlier_tokens)
        self._earlier_tokens += unknown
        self.tokens += unknown
        for other in self._fragments:
            other.books.lost_tokens += unknown
        state.books.lost_tokens = self.tokens - cursor.tokens - state.books.tokens

    def _used_up(self) -> bool:
        if self.settings.role == "evaluator":
            return False
        if any(state.newest.chain.closed for state in self._fragments):
            return True  # whatever the budget is by now
        announced, own = self._announced
        return announced + self.tokens - own >= self._budget

    def _steps_due(self, state: _Fragment) -> int:
        settings = self.run.now.settings.round
        if state.books.base_version:
            return max(settings.steps, state.steps_between)
        return first_due_steps(settings, state.index, len(self._fragments))

    def _must_wait(self) -> bool:
        if not self.run.settings.round.learners_wait or self.settings.role == "evaluator":
            return False
        if self._lockstep is not None and any(state.books.steps for state in self._fragments):
            return True  # a version that a log was loaded with is no answer to a step that is held on to
        return any(self.step - state.version_step >= self._steps_due(state) for state in self._fragments)

    def _behind(self, now_s: float, *, moved: bool) -> bool:
        holds = any(state.books.steps for state in self._fragments)
        return self._lockstep is not None and self._lockstep.behind(now_s, holds=holds, moved=moved)

    def _keep_readable(self, state: _Fragment, now_s: float) -> bool:
        if self.settings.role == "evaluator" or not state.books.steps or state.sending or state.pending:
            return False
        if state.wants_answer:
            return True
        if state.open_version > state.books.base_version:  # answered: the next round comes after the next version
            return False
        if self.step - state.version_step >= self._steps_due(state) - 1:
            return True
        if state.opened_at_s is None or state.period.value is None:
            return False
        expected_s = state.opened_at_s + state.period.value
        return now_s + PREDICTION_STEPS * self.step_average.get() >= expected_s
