"""Answers rounds: reads and quantises a fragment in a thread of its own, and stores the offer, however long that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from diloco.control.creation import KnownRun
from diloco.core import codec
from diloco.core import tape as events
from diloco.core.delta import EncodedOffer
from diloco.core.fragment_state import DueOffer
from diloco.errors import BrokerError, NonFiniteError, StorageFullError
from diloco.log.offers import append_offer
from diloco.member.shared import SharedLearner
from diloco.member.tracing import MemberTraces
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.process.tape import Recorder
from diloco.transport import Transport
from diloco.wire.body import ATTEMPT_BYTES, describe_body
from diloco.wire.offers import Offer
from diloco.wire.subjects import Subjects

OFFER_TIMEOUT_S = 15.0  # an offer of 100 MB takes that long at 50 Mbit/s; it is then sent again, under the same id


class Answers(Protocol):
    """Answers rounds."""

    def begin(self, index: int) -> None:
        """Answer the fragment's open round if that can be done now; the lock is held."""

    def begin_soon(self, index: int) -> None:
        """Answer the fragment's open round, likewise; the lock is not held. Callable from any thread."""


class Answering:
    """Makes and sends the offers of one learner, in the loop thread."""

    def __init__(
        self,
        transport: Transport,
        run: KnownRun,
        shared: SharedLearner,
        tape: Recorder,
        log: Logger,
        traces: MemberTraces,
    ) -> None:
        self.transport, self.run, self.shared, self.tape, self.log, self.traces = transport, run, shared, tape, log, traces
        self.learner, self.subjects = shared.learner, Subjects(run.name)

    def begin(self, index: int) -> None:
        """Answer the fragment's open round if that can be done now; the lock is held."""
        answer = self.learner.try_answer(index)
        if answer is not None:
            self.shared.tasks.spawn(self._answer(answer))

    def begin_soon(self, index: int) -> None:
        """Answer the fragment's open round, likewise; the lock is not held. Callable from any thread."""
        self.shared.loop.call_soon_threadsafe(self._begin_locked, index)

    def _begin_locked(self, index: int) -> None:
        with self.shared.lock:
            self.begin(index)

    async def _answer(self, answer: DueOffer) -> None:
        index, began_s = answer.fragment, self.shared.loop.time()
        trace = self.traces.offer(index, answer.version)
        if trace is not None:
            answer = trace.take(answer)
        try:
            encoded, packed, content_hash = await asyncio.to_thread(self._encode, answer)
        except NonFiniteError as error:
            self.log.warning("displacement_not_finite", fragment=index, version=answer.version, reason=str(error))
            with self.shared.lock:
                self.learner.not_finite(index)
                self.shared.tell()
            return
        if trace is not None:
            trace.encoded()
        with self.shared.lock:
            pending = self.learner.encoded(answer, encoded)
            ago, digest = self.learner.accounts.step - answer.snapshot.step, content_hash[: events.DIGEST_BYTES]
            self.tape.record(events.TapeOffer(ago, index, pending.stated.number, answer.version, answer.bits, digest))
            self.shared.tell()
        self.tape.flush()  # before it is sent: all that is merged of this learner is on its tape
        body, inline, parts = describe_body(packed, content_hash, self.transport.random_bytes(ATTEMPT_BYTES))
        del answer, encoded, packed  # the snapshot, and copies of what is kept elsewhere: to send may take long
        offer = pending.message(index, body)
        sequence = await store_answer(self.transport, self.subjects, self.run.identity, offer, inline, parts, self.log)
        if trace is not None:
            trace.stored(offer)
        with self.shared.lock:
            self.learner.sent(index, sequence)
            self.tape.record(events.Sent(index, int(1000 * (self.shared.loop.time() - began_s))))
            self.shared.tell()

    def _encode(self, answer: DueOffer) -> tuple[EncodedOffer, bytes, bytes]:
        """Return an offer's arrays, the zstd frame of its body, and its content's hash; called in a thread of its own."""
        encoded = self.learner.encode(answer)
        return encoded, codec.pack(encoded.body, self.run.created.codec.zstd_level), codec.content_hash(encoded.body)


async def store_answer(
    transport: Transport, names: Subjects, run: bytes, offer: Offer, inline: bytes, parts: Sequence[bytes], log: Logger
) -> int:
    """Store an offer, however long that takes; return its head's stream sequence."""
    complaint = Complaint(log)

    def failed(error: BrokerError) -> None:
        values = {"fragment": offer.fragment, "number": offer.number, "reason": str(error)}
        if isinstance(error, StorageFullError):
            complaint.warn("offer_not_stored", **values)
        else:
            log.warning("offer_retried", **values)

    sequence = await append_offer(transport, names, run, offer, inline, parts, timeout_s=OFFER_TIMEOUT_S, failed=failed)
    assert sequence is not None  # it is wanted as long as it is not stored
    return sequence
