"""A learner's rounds: the state machine of :mod:`diloco.core.learner.learner` with a transport, threads and a tape.

Its arrays are behind :mod:`diloco.member.arrays`, in this process or in several. Two threads share a member. The *trainer* (any
framework, or a toy) calls :meth:`Member.boundary` between two inner steps, writes the versions it returns into its model and
hands over readers for the fragments it asks for; none of these calls waits for anything. The *loop* thread runs asyncio: it
follows the log and folds it, hears announcements, reads, quantises and sends. A lock guards the short passages in which both
touch the state; while a fragment's offer is being quantised, versions of that fragment are applied one boundary later instead.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from numpy.typing import NDArray

from diloco.control.changes import ChangesFollower
from diloco.control.creation import KnownRun
from diloco.control.genesis import await_genesis
from diloco.control.hearing import hear
from diloco.core.learner.accounts import MemberTraffic, StepDone
from diloco.core.learner.fragment_state import Reader
from diloco.core.learner.heartbeats import HeartbeatSchedule
from diloco.core.learner.learner import Dump, Learner
from diloco.core.learner.markers import MarkerReply
from diloco.core.learner.schedule import Moment
from diloco.core.run import tape as events
from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import EjectedError
from diloco.log.log import Log
from diloco.member.admission import AdmissionClient
from diloco.member.answering import Answering
from diloco.member.arrays import Arrays, Boundary, Initial
from diloco.member.audit import Audit
from diloco.member.catching_up import Catching, listen
from diloco.member.living import LivingLearners
from diloco.member.member_tracing import MemberTraces
from diloco.member.outbox import Outbox, sample_of
from diloco.member.own_arrays import OwnArrays
from diloco.member.peer import Borrower, Layout, Lendable, Lender, Loan, LoanWatch
from diloco.member.refused_offers import RefusalWatch
from diloco.member.shared import SharedLearner
from diloco.member.shares import LeaseClient, Leases, free_shares
from diloco.member.snapshots import MarkerHearing
from diloco.member.taping import LearnerTape
from diloco.process.observe import Counted, Logger, Progress
from diloco.process.retry import until_available
from diloco.process.tape import Recorder, Unrecorded
from diloco.process.telemetry import Telemetry
from diloco.settings.service import LearnerSettings
from diloco.transport import Heard, Transport
from diloco.wire import framing
from diloco.wire.control import MAX_SAID, Announcement, Heartbeat, SnapshotMarker
from diloco.wire.subjects import Subjects

M = TypeVar("M", bound=framing.Message)
LEAVE_TIMEOUT_S = 10.0  # quantising a fragment takes less; it ends without the offer otherwise


class Member:
    """One learner (or evaluator) in one run. Construct it in the loop thread, then ``await join()``."""

    def __init__(
        self,
        transport: Transport,
        run: KnownRun,
        fragment_map: FragmentMap,
        settings: LearnerSettings,
        log: Logger,
        tape: Recorder | None = None,
        telemetry: Telemetry | None = None,
        *,
        arrays: Arrays | None = None,
        refused: Counted | None = None,
    ) -> None:
        """Begin; ``arrays`` are those of several processes, which count what is ``refused`` with it. None: they are here."""
        self.transport, self.run, self.map, self.settings, self.log = transport, run, fragment_map, settings, log
        self.tape = tape or Unrecorded()
        self.store = Log(transport, run.name, run.identity, fragment_map, run.created)
        self.subjects, self.refused = Subjects(run.name), Counted(log) if refused is None else refused
        self.lender = Lender(
            transport=transport, run=run.identity, subjects=self.subjects, name=settings.name, healthy=self._may_lend, log=log
        )
        self.loans = LoanWatch(run.identity, lambda: run.in_force.round.steps, log)
        self.admission = AdmissionClient(transport, run, settings.name, fragment_map, log)
        self.shares: Leases = LeaseClient(
            run=run,
            settings=settings,
            incarnation=self.admission.incarnation,
            fragments=fragment_map,
            refused=self.refused,
            log=log,
        )
        self.learner = Learner(settings.name, settings.role, settings.region or "", self.admission.incarnation, run.created)
        self.shared, self.taped = SharedLearner(self.learner), LearnerTape(self.tape)
        self._outbox, self._heartbeats = Outbox(transport, run, settings.name, self.shared), HeartbeatSchedule()
        self.show, self.report_validation = self._outbox.show, self._outbox.report_validation
        self.traces = MemberTraces(telemetry, run.identity, settings.name, self.shared.loop.time, transport.wall_s)
        self.arrays: Arrays = OwnArrays(self) if arrays is None else arrays
        self.answering = Answering(self.shared, self.taped, self.arrays)
        self.refusals = RefusalWatch(run, settings.name, self.shared, log)
        self.living = LivingLearners(self)
        self._changes = ChangesFollower(transport, run, log, self._change)

    # ---- loop thread

    async def join(self, initial: Initial | None = None) -> None:
        """Be admitted, found the run (with ``initial``) if no other process does, load the log, and begin to follow it.

        A learner that was ejected is not, and waits until it is readmitted. In a run with regions a learner waits until its
        region's log has the versions that the run has. ``initial`` gives the parameters of a fragment, float32 [its size];
        None: this member founds no run, or gathers them.

        Raises:
            AdmissionError: this learner's model is not the run's.
        """
        learns, catching = self.settings.role == "learner", None
        await until_available(self._changes.look, self.log)
        self.shared.tasks.spawn(self._changes.follow())
        await self.admission.readmitted(self.store.reader.closed)
        if learns:
            await self.admission.take()
            self.learner.incarnation = self.shares.incarnation = self.admission.incarnation
            catching = await self._listen_early() if self.run.regions else None
        founder = self.settings.name if learns and self.transport.founds else None
        begin = partial(await_genesis, self.run, self.store, founder, partial(self.arrays.first_values, initial), self.log)
        genesis = await until_available(begin, self.log)
        if catching is not None:
            await catching.wait()
        self.learner.seat_all(await self.arrays.load(genesis), self.map.fragments)
        if learns:
            await self.living.listen()
            await until_available(lambda: self.shares.take(self.learner.ends()), self.log)
        while self.learner.is_over and not await until_available(self.arrays.holds, self.log):  # it lost its end since
            self.learner.seat_all(await self.arrays.load(genesis), self.map.fragments)
        if catching is None:
            await self._hear(self.subjects.round(), Announcement, self._hear_round)
        else:
            catching.loaded = True
        if learns:
            await self._serve()
        versions = self.versions()
        start = events.Start(int(self.transport.wall_s() * 1000), self.learner.incarnation, tuple(versions))
        self.taped.start(start, self.learner.error_bits, self.shared.loop.time())
        self.arrays.follow()
        self.shared.tasks.spawn(self._send_heartbeats_regularly())
        self._change()
        self.log.info("joined", fragments=len(versions), version_min=min(versions), version_max=max(versions))
        if self.learner.is_over:
            self.log.warning("run_is_over", remedy="start another run; diloco up --continue starts from its model")

    async def _listen_early(self) -> Catching:
        own = self.settings.region or ""
        return await listen(self.run, self.store, own, self.shared.tasks, self.refused, self.log, self._hear_round)

    async def _serve(self) -> None:
        """Hear what others want of a learner's state, and what they refuse of its work."""
        await self._hear(self.subjects.marker, SnapshotMarker, self._marker_hearing().hear)
        await self.lender.serve()
        self.shared.tasks.spawn(self.refusals.work())
        audit = Audit(
            shared=self.shared,
            admission=self.admission,
            leases=self.shares,
            refusals=self.refusals,
            living=self.living,
            log=self.log,
        )
        self.shared.tasks.spawn(audit.work())

    async def _hear(self, subject: str, kind: type[M], handle: Callable[[M, Heard], Awaitable[None]]) -> None:
        await hear(self.transport, subject, kind, self.run.identity, handle, self.refused)

    def _change(self) -> None:
        """Take in what was changed of the run: a learner that was ejected ends."""
        with self.shared.lock:
            self.learner.change(self.run.now)
            if len(self.learner.fragments) < len(self.map.fragments):
                return  # it ends when it has joined
            ejected = self.run.now.ejected.get(self.settings.name)
            if ejected is not None and not self.learner.is_over:
                message = (
                    f"run {self.run.name!r}: learner {self.settings.name} was ejected by {ejected.label}; it may come back "
                    f"after diloco readmit DIR {self.settings.name}"
                )
                self.shared.fail(EjectedError(message))
            self.shared.tell()

    async def borrow(self, layout: Layout, wanted: Sequence[Chunk], put: Callable[[Chunk, NDArray[Any]], None]) -> Loan | None:
        """Borrow the state of a peer's optimizer, for a learner that joined without a checkpoint; None: it begins afresh.

        The state is to be of ``layout``. The chunks that are ``wanted`` of it are handed to ``put``, any dtype [their lengths],
        in other threads, once at a time: of several peers if one fails half-way, and some of them if no peer lends in the end.
        No peer is asked in a run without versions, nor for an optimizer without a state.
        """
        peers = self.learner.peers()
        if peers is None or not layout.arrays:
            return None
        borrower = Borrower(
            self.transport,
            run=self.run.identity,
            subjects=self.subjects,
            name=self.settings.name,
            layout=layout,
            wanted=wanted,
            put=put,
            log=self.log,
        )
        loan = await self.loans.borrow(borrower, peers)
        _note_borrowed(self, loan, layout)
        return loan

    def _may_lend(self) -> bool:
        """Return whether this learner's optimizer state is worth something."""
        with self.shared.lock:
            return self.learner.activity in ("stepping", "waiting") and not self.learner.is_warming

    async def close(self) -> None:
        """Send a last heartbeat, if others have heard of this member, and stop everything that runs in the loop."""
        if len(self.learner.fragments) == len(self.map.fragments):
            if self.learner.activity != "finished":
                self.learner.activity = "left"
            await self._outbox.send(self.heartbeat())
            if self.settings.role == "learner" and self.learner.activity != "finished":
                await free_shares(self.shares, self.log)
        await self.shared.tasks.end()
        self.lender.close()
        self.tape.flush()
        await self.arrays.end()

    async def _hear_round(self, announced: Announcement, heard: Heard) -> None:
        with self.shared.lock:
            if self.learner.hear(announced, self.shared.loop.time()):
                self.shared.tell()
            self.answering.begin(announced.fragment)

    def _marker_hearing(self) -> MarkerHearing:
        return MarkerHearing(
            shared=self.shared,
            outbox=self._outbox,
            registry=self.run.registry,
            settings=self.settings,
            fragments=len(self.map.fragments),
            log=self.log,
        )

    async def _send_heartbeats_regularly(self) -> None:
        progress = Progress(self.log, self.shared.loop.time(), lambda: _progress(self.heartbeat()))
        while True:
            progress.look(self.shared.loop.time())
            left_s = self._heartbeats.left_s(self.learner, self.shared.loop.time())
            if left_s <= 0:
                await self._send_heartbeat()
            else:
                await asyncio.sleep(left_s)

    def _send_heartbeat_soon(self) -> None:
        self.tape.flush()
        self.shared.tasks.spawn(self._send_heartbeat())

    async def _send_heartbeat(self) -> None:
        heartbeat = self.heartbeat()
        self._heartbeats.note_sent(heartbeat, self.shared.loop.time())
        await self._outbox.send(heartbeat)

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat: what others are told of this member now."""
        traffic = self._traffic()
        with self.shared.lock:
            return self.learner.heartbeat(self.shares.trained(), self.shares.batch_tokens, traffic)

    def _traffic(self) -> MemberTraffic:
        own = MemberTraffic(self.transport.bytes_out, self.transport.bytes_in, self.refused.total)
        return MemberTraffic(*map(sum, zip(own, *self.arrays.others_traffic(), strict=True)))

    # ---- trainer thread

    def boundary(self, done: StepDone | None) -> Boundary:
        """Book the step that ended (None: there was none), and return the trainer's work before the next one.

        Raises:
            DilocoError: a task of the loop thread failed.
        """
        boundary = self.arrays.boundary(done)
        if self._heartbeats.ask(self.learner, self.shared.loop.time()):
            self.shared.loop.call_soon_threadsafe(self._send_heartbeat_soon)
        return boundary

    def submit(self, fragment: int, reader: Reader) -> None:
        """Hand over a way to read a fragment as it is at this boundary; called from another thread, at most once."""
        self.arrays.submit(fragment, reader)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something new since the last boundary, at most ``timeout_s``."""
        self.arrays.wait(timeout_s)

    def leased(self) -> dict[int, int]:
        """Return the shares of the data that this learner holds now, each with the batch at which it begins or goes on."""
        return self.shares.leased()

    def moment(self) -> Moment:
        """Return what the learning rate goes by: the tokens that the newest applied version states and own ones since."""
        return self.arrays.moment()

    @property
    def step(self) -> int:
        """Own steps taken in this run."""
        return self.learner.accounts.step

    def count_steps(self) -> None:
        """Begin with as many steps as the tokens of this learner that the log holds were, by the mean of its merged steps."""
        with self.shared.lock:
            self.learner.accounts.count_steps(self.learner.name, [state.newest.chain for state in self.learner.fragments])

    def versions(self) -> list[int]:
        """Return by fragment the version applied at the last boundary."""
        with self.shared.lock:
            return [state.delta.base_version for state in self.learner.fragments]

    def offers(self) -> int:
        """Return how many offers this process has made."""
        with self.shared.lock:
            return sum(state.delta.next_number - 1 for state in self.learner.fragments)

    def report_evaluation(self, loss: float | None, failure: str | None) -> None:
        """Set what the next heartbeats of an evaluator say: its loss, none if it is not finite, and why it has failed."""
        with self.shared.lock:
            self.learner.accounts.loss = loss if loss is not None and math.isfinite(loss) else None
            self.learner.accounts.evaluation_failure = failure and failure[:MAX_SAID]

    def report_sample(self, text: str) -> None:
        """Send text that was drawn from the model as of the last boundary (an evaluator's)."""
        self._outbox.send_soon(sample_of(self.settings.name, self.versions(), text))

    def leave(self, within_s: float) -> None:
        """Take no further step, and ask for rounds that merge what is unmerged.

        Boundaries go on until one says that nothing is, or ``within_s`` is over (``ended``).
        """
        with self.shared.lock:
            self.shared.leave(within_s)

    @property
    def left(self) -> bool:
        """Whether nothing of this learner is unmerged."""
        with self.shared.lock:
            return self.learner.left

    def dump(self) -> Dump | None:
        """Return the state as of the last boundary, for a checkpoint; None if that must wait for a later one.

        Its arrays are not written to any more: they may be saved while training goes on.
        """
        with self.shared.lock:
            return _copied(self) if self.learner.may_dump else None

    def checkpoint(self) -> Dump:
        """Return the state as of the last boundary, for the last checkpoint: no round is answered any more."""
        with self.shared.lock:
            self.learner.silent = True
        self.shared.wait_until(lambda: not self.learner.encoding, LEAVE_TIMEOUT_S)
        with self.shared.lock:
            return _copied(self)

    def restore(self, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], bare: Collection[int] = ()) -> None:
        """Take over a :meth:`checkpoint`, its ``arrays`` any dtype [...], after :meth:`join` and before the first boundary.

        ``bare`` fragments have none (:meth:`Learner.restore`).

        Raises:
            LookupError, TypeError, ValueError, OverflowError: the checkpoint is not of this model; nothing has changed.
        """
        with self.shared.lock:
            self.learner.restore(plain, arrays, bare)
            self.shares.restore(plain["positions"])
        for fragment in bare:
            self.tape.record(events.Bare(fragment))

    def lend(self, step: int, versions: list[int], state: Lendable) -> None:
        """Lend the optimizer's state, a copy as of a boundary after ``step`` steps. Callable from any thread."""
        self.tape.record(events.Lent(state.content_hash[: events.DIGEST_BYTES]))
        self.lender.give(step, versions, state)
        self.log.info("state_lent", step=step, bytes=state.layout.size_bytes)

    def note_state_before(self, learner: str, digest: bytes) -> None:
        """Note that the optimizer begins with the state that a learner of the run before has ended with."""
        self.tape.record(events.Borrowed(learner, digest))
        self.log.info("state_taken_up", learner=learner)

    def note_saved(self, digest: bytes) -> None:
        """Note that the state that was copied last is on the disk. Callable from any thread."""
        self.tape.record(events.Checkpoint(digest))
        self.tape.flush()  # a process that begins again with this state says so on the same tape

    def marker_due(self) -> SnapshotMarker | None:
        """Return the marker of a whole run's checkpoint that the state as of the last boundary answers."""
        with self.shared.lock:
            return self.learner.markers.reached(self.learner.fragments)

    def note_copied(self, marker: SnapshotMarker) -> None:
        """Let versions beyond a marker be applied: the state that it asks for has been copied."""
        with self.shared.lock:
            self.learner.markers.copied(marker)

    def answer_marker(self, answer: MarkerReply) -> None:
        """Say that the state asked for is saved, or that it never will be. Callable from any thread."""
        with self.shared.lock:
            self.learner.markers.answer(answer)
        self._outbox.send_soon(answer)


async def copy_own_state(member: Member) -> Dump:
    """Return the state as of the last boundary, in the midst of training: no boundary comes meanwhile.

    Call it in the loop's thread. Arrays of other processes are not in it.

    Raises:
        DilocoError: a task of the loop's thread failed.
    """
    async with member.answering.paused():
        with member.shared.lock:
            if member.shared.failure is not None:
                raise member.shared.failure
            return _copied(member)


def _copied(member: Member) -> Dump:
    """Return the state; the lock is held, so that an offer is on the tape before the copy if the state knows it, else after."""
    member.tape.record(events.Copied())
    return member.learner.dump(member.shares.positions())


def _note_borrowed(member: Member, loan: Loan | None, layout: Layout) -> None:
    if loan is None:
        member.learner.accounts.warming = 0
        member.tape.record(events.Fresh())
        member.log.info("state_fresh", warmup_steps=member.run.created.inner.restart_warmup_steps)
    else:
        member.tape.record(events.Borrowed(loan.peer, loan.content_hash[: events.DIGEST_BYTES]))
        member.log.info(
            "state_from_peer", learner=loan.peer, step=loan.step, version_min=min(loan.versions), bytes=layout.size_bytes
        )


def _progress(heartbeat: Heartbeat) -> tuple[dict[str, int], dict[str, Any]]:
    """Return counts, and values as they are, for the event ``progress``."""
    counts = {
        "steps": heartbeat.step,
        "tokens": heartbeat.tokens,
        "bytes_up": heartbeat.bytes_up,
        "bytes_down": heartbeat.bytes_down,
    }
    loss = None if heartbeat.loss is None else round(heartbeat.loss, 4)
    values = {"state": heartbeat.state, "loss": loss, "step_s": round(heartbeat.step_s, 4), "refused": heartbeat.refused}
    return counts, values | {"version_min": min(heartbeat.versions), "version_max": max(heartbeat.versions)}
