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
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diloco import membership
from diloco.core import codec
from diloco.core.books import Apply, Books, Outstanding
from diloco.core.chain import Chain
from diloco.core.fold import Replica
from diloco.core.fragments import FragmentMap
from diloco.core.pace import Average, first_due_steps
from diloco.errors import AppendUncertainError, ChainError, HashError, MessageError, NonFiniteError, StorageFullError
from diloco.log import Entry, Log
from diloco.membership import Run
from diloco.nats.append import append
from diloco.nats.connection import Link
from diloco.observe import Counted, Logger
from diloco.settings import LearnerSettings
from diloco.wire import messages, subjects
from diloco.wire.messages import Announcement, Cursor, Genesis, Offer, Pulse, Record
from diloco.wire.subjects import Subjects

Vector = NDArray[np.float32]
Reader = Callable[[], Vector]
State = Literal["starting", "stepping", "waiting", "recovering", "closing", "finished"]

OFFER_TIMEOUT_S = 15.0
STORAGE_RETRY_S = 1.0
LEAVE_TIMEOUT_S = 10.0
# of a step: how early a fragment is kept readable for a round that is expected, so that it can be answered in mid-step
PREDICTION_STEPS = 1.25


@dataclass(frozen=True)
class StepDone:
    """An inner step whose work the model holds by the time that it gets to what the boundary asks for.

    ``loss`` is the newest known (None: none yet); a step was in flight for ``busy_s`` and none for ``blocked_s`` since the
    last call, as far as is known by now.
    """

    tokens: int
    loss: float | None
    busy_s: float
    blocked_s: float


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
    answered: int = 0  # version of the newest round answered
    encoding: bool = False
    sending: bool = False
    spoilt: bool = False  # the learner's value is not finite: begin again from the global one
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
        link: Link,
        run: Run,
        fragment_map: FragmentMap,
        settings: LearnerSettings,
        log: Logger,
    ) -> None:
        self.link, self.run, self.map, self.settings, self.log = link, run, fragment_map, settings, log
        self.incarnation = time.time_ns() // 1_000_000
        self.store = Log(link, run.name, run.identity, fragment_map)
        self.subjects = Subjects(run.name)
        self.refused = Counted(log)
        self.state: State = "recovering"
        self.step = self.tokens = 0
        self.loss: float | None = None
        self.step_average = Average()
        self.busy_s = self.blocked_s = 0.0
        self.rounds_merged = self.rounds_missed = 0
        self.failure: BaseException | None = None
        self._earlier_tokens = 0  # processed before this process
        self._schedule = (0, 0)  # tokens of all learners as the newest applied version states, own tokens then
        self._announced = (0, 0)  # tokens of all learners as last announced, own tokens then
        self._draining = self._stopped = self._leaving = False
        self._fragments: list[_Fragment] = []
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._unseen = False  # something happened since the last boundary
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- loop thread

    async def join(self, initial: Callable[[], Sequence[Vector]]) -> None:
        """Be admitted, found the run if nobody else does (with ``initial``), load the log, and begin to follow it.

        Raises:
            AdmissionError: this learner's model is not the run's.
        """
        digest = self.run.settings.digest()
        if self.settings.role == "learner":
            await membership.join(self.run, self.settings.name, self.incarnation, self.map, digest)
        founder = self.settings.name if self.settings.role == "learner" else None
        genesis, check = await membership.genesis(self.run, self.store, founder, initial, self.log)
        sequences = []
        for fragment in self.map.fragments:
            state = await self._load(fragment.index, genesis, check)
            self._fragments.append(state)
            sequences.append(state.replica.chain.sequence)
        self._take_up_accounts()
        control = self.link.control
        await control.subscribe(self.subjects.round(), cb=self._hear_round)
        self._spawn(self._follow(min(sequences) + 1, genesis, check))
        self._spawn(self._pulse_regularly())
        versions = [state.books.base_version for state in self._fragments]
        self.log.info("joined", fragments=len(versions), version_min=min(versions), version_max=max(versions))

    def _take_up_accounts(self) -> None:
        """Count on from what the log says of this learner; what it did beyond that before a crash is not known here."""
        cursors = [state.replica.chain.cursors.get(self.settings.name) for state in self._fragments]
        self.tokens = self._earlier_tokens = max(cursor.tokens + cursor.lost_tokens if cursor else 0 for cursor in cursors)
        for state, cursor in zip(self._fragments, cursors, strict=True):
            state.books.lost_tokens = self.tokens - (cursor.tokens if cursor else 0)

    async def close(self) -> None:
        """Send a last pulse, if others have heard of this member, and stop everything that runs in the loop."""
        if len(self._fragments) == len(self.map.fragments):
            await self._send_pulse()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _load(self, index: int, genesis: Genesis, check: bytes) -> _Fragment:
        # to the log's end: what it says of this learner is where this learner counts on from
        replica = await self._replica(index, genesis, check, await self.store.head_sequence(index))
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
        async for entry in self.store.follow(fragments, start, self._refuse_entry):
            await self._fold(entry, genesis, check)

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
            replica = await self._replica(record.fragment, genesis, check, entry.sequence)
            with self._lock:
                state.replica, state.newest = replica, _Pending.of(replica)
                state.pending.append(state.newest)
                self._tell()
            return
        with self._lock:
            state.newest = _Pending.of(state.replica)
            if record.entry == "version":
                state.pending.append(replace(state.newest, record=record))
            self._tell()

    async def _replica(self, index: int, genesis: Genesis, check: bytes, stop_sequence: int) -> Replica:
        """The fragment from its newest keyframe and the entries after it, up to the one at ``stop_sequence``."""
        replica = (await self.store.load(index, genesis, check)).replica
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

    async def _hear_round(self, message: Any) -> None:
        try:
            round_, _, _ = messages.unpack(message.data, Announcement, self.run.identity)
            if round_.fragment >= len(self._fragments):
                raise MessageError(f"round of fragment {round_.fragment}, the run has {len(self._fragments)}")
        except MessageError as error:
            self._refuse(message.subject, error)
            return
        now_s = self._loop.time()
        with self._lock:
            state = self._fragments[round_.fragment]
            if round_.version > state.open_version:
                if state.opened_at_s is not None and state.open_version:
                    state.period.add((now_s - state.opened_at_s) / (round_.version - state.open_version))
                state.opened_at_s, state.open_version = now_s, round_.version
            if round_.epoch > state.epoch:
                # a new owner, or the same again after a fence, may have nothing of what its predecessor was sent
                state.epoch, state.answered = round_.epoch, 0
            state.closing = round_.closing and round_.version == state.open_version
            if round_.tokens_processed > self._announced[0]:
                self._announced = (round_.tokens_processed, self.tokens)
            if round_.closing and not self._draining:
                self._draining = True
                self._tell()
            self._try_answer(state)

    def _try_answer(self, state: _Fragment) -> None:
        """Answer the fragment's open round if it can be; the lock is held, and this is the loop thread."""
        snapshot = state.snapshot
        if not state.wants_answer or snapshot is None or self._leaving or (state.closing and not self._stopped):
            return
        state.answered = state.open_version
        if snapshot.steps:
            state.snapshot, state.encoding, state.sending = None, True, True
            self._spawn(self._answer(state, snapshot, state.open_version))

    async def _answer(self, state: _Fragment, snapshot: _Snapshot, version: int) -> None:
        bits, level = self.run.settings.codec.offer_bits, self.run.settings.codec.zstd_level

        def encode() -> tuple[Outstanding, bytes, bytes]:
            offer = state.books.offer(snapshot.reader(), snapshot.steps, snapshot.tokens, version, bits)
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
            state.encoding = False
            self._tell()
        body, inline, parts = messages.describe_body(packed, content_hash, os.urandom(messages.ATTEMPT_BYTES))
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
                await append(
                    self.link,
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
        while True:
            await self._send_pulse()
            await asyncio.sleep(self.run.settings.liveness.pulse_s)

    async def _send_pulse(self) -> None:
        frame = messages.pack(self._pulse(), self.run.identity)
        await self.link.control.publish(self.subjects.pulse(self.settings.name), frame)

    def _pulse(self) -> Pulse:
        with self._lock:
            states = self._fragments
            return Pulse(
                learner=self.settings.name,
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
                busy_s=self.busy_s,
                blocked_s=self.blocked_s,
                bytes_up=self.link.bytes_out,
                bytes_down=self.link.bytes_in,
                refused=self.refused.total,
            )

    def _refuse(self, sender: str, error: MessageError, **values: Any) -> None:
        self.refused.note(sender, type(error).__name__, reason=str(error), **values)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

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
            for state in self._fragments:
                if not state.encoding:
                    applies += [(state.index, self._apply(state, pending)) for pending in self._take_pending(state)]
                state.snapshot = None
            stop = self._draining or self._used_up()
            wait = not stop and self._must_wait()
            self._stopped = stop
            finished = all(state.newest.chain.closed and not state.pending for state in self._fragments)
            self.state = "finished" if finished else "closing" if stop else "waiting" if wait else "stepping"
            reads = [state.index for state in self._fragments if self._keep_readable(state, now_s)]
        self._loop.call_soon_threadsafe(self._pulse_soon)
        return Boundary(applies, reads, stop, wait, finished)

    def submit(self, fragment: int, reader: Reader) -> None:
        """Hand over a way to read a fragment as it is at this boundary; called from another thread, at most once."""
        with self._lock:
            state = self._fragments[fragment]
            state.snapshot = _Snapshot(reader, state.books.steps, state.books.tokens)
            asked = state.wants_answer
        if asked:  # otherwise the announcement finds the snapshot
            self._loop.call_soon_threadsafe(self._answer_soon, state)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something new since the last boundary, at most ``timeout_s``."""
        with self._news:
            self._news.wait_for(lambda: self._unseen, timeout_s)

    def schedule_tokens(self) -> int:
        """Tokens that the learning rate goes by: those the newest applied version states, and own ones since."""
        with self._lock:
            stated, own = self._schedule
            return stated + self.tokens - own

    def report_loss(self, loss: float) -> None:
        """Set the loss that the next pulses carry (an evaluator's): none if it is not finite."""
        with self._lock:
            self.loss = loss if math.isfinite(loss) else None

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Books as plain values and as arrays by name, for a checkpoint at a boundary; no round is answered any more."""
        with self._news:
            self._leaving = True
            # an offer that these books do not hold could be merged all the same
            self._news.wait_for(lambda: not any(state.encoding for state in self._fragments), LEAVE_TIMEOUT_S)
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
                "fragments": fragments,
            }
            return plain_books, arrays

    def restore(self, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what :meth:`checkpoint` gave, after :meth:`join` and before the first boundary.

        Displacement is kept where the log holds of this learner what it held then; it is lost otherwise (design.md
        section 4).

        Raises:
            KeyError, ValueError: the checkpoint is not of this model.
        """
        if len(plain["fragments"]) != len(self._fragments):
            raise ValueError(f"it has {len(plain['fragments'])} fragments, the run {len(self._fragments)}")
        with self._lock:
            for state, values in zip(self._fragments, plain["fragments"], strict=True):
                prefix = f"books/{state.index}/"
                named = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
                state.books.load(values, named)
            self.step, self.tokens = int(plain["step"]), int(plain["tokens"])
            self._earlier_tokens = self.tokens
            self.busy_s, self.blocked_s = float(plain["busy_s"]), float(plain["blocked_s"])
            stated, own = plain["schedule"]
            self._schedule = (int(stated), int(own))

    def _pulse_soon(self) -> None:
        self._spawn(self._send_pulse())

    def _answer_soon(self, state: _Fragment) -> None:
        with self._lock:
            self._try_answer(state)

    def _book(self, done: StepDone) -> None:
        self.step += 1
        self.tokens += done.tokens
        if done.loss is not None and math.isfinite(done.loss):
            self.loss = done.loss
        self.busy_s += done.busy_s
        self.blocked_s += done.blocked_s
        if done.busy_s:
            self.step_average.add(done.busy_s + done.blocked_s)
        for state in self._fragments:
            state.books.step(done.tokens)

    def _take_pending(self, state: _Fragment) -> list[_Pending]:
        pending = list(state.pending)
        state.pending.clear()
        if state.spoilt:
            state.spoilt = False
            pending = [replace(state.newest, spoilt=True)]
        return pending

    def _apply(self, state: _Fragment, pending: _Pending) -> Apply:
        record, chain = pending.record, pending.chain
        state.version_step = self.step
        merged_before = state.books.after
        newly_merged = chain.cursor(self.settings.name)
        known = any((offer.incarnation, offer.number) == newly_merged for offer in state.books.outstanding)
        if record is None:
            applied = state.books.reload(chain, pending.theta, spoilt=pending.spoilt)
            stated = chain.tokens_merged + chain.tokens_lost
        else:
            applied = state.books.apply(record, pending.theta)
            merged = any(member.learner == self.settings.name for member in record.members)
            self.rounds_merged += merged
            self.rounds_missed += not merged
            stated = record.tokens_merged + record.tokens_lost
        if newly_merged != merged_before and not known:
            self._count_on(state, chain.cursors[self.settings.name])
        if stated > self._schedule[0]:
            self._schedule = (stated, self.tokens)
        return applied

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
        announced, own = self._announced
        return announced + self.tokens - own >= self.run.settings.tokens

    def _steps_due(self, state: _Fragment) -> int:
        settings = self.run.settings.round
        if state.books.base_version:
            return settings.steps
        return first_due_steps(settings, state.index, len(self._fragments))

    def _must_wait(self) -> bool:
        if not self.run.settings.round.learners_wait or self.settings.role == "evaluator":
            return False
        return any(self.step - state.version_step >= self._steps_due(state) for state in self._fragments)

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
