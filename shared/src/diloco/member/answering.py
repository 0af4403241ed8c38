"""Answers rounds: counts the offers that the arrays make, has them on the tape, and has them stored.

What reads, quantises and stores is behind :class:`Encodes`: in this process, or at the processes that carry the fragments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from diloco.core.learner.delta import EncodedOffer, PendingDelta
from diloco.core.learner.fragment_state import DueOffer
from diloco.core.run import tape as events
from diloco.member.shared import SharedLearner
from diloco.member.taping import LearnerTape

SETTLE_S = 10.0  # to quantise a fragment takes less


class Encodes(Protocol):
    """The arrays, as far as offers go. It tells :class:`Answering` what it has done."""

    @property
    def may_encode(self) -> bool:
        """Whether an offer may begin now; the lock is held."""

    def encode(self, answer: DueOffer) -> None:
        """Begin to read and quantise an offer; the lock is held."""

    def store(self, fragment: int, offer: PendingDelta) -> None:
        """Begin to store the offer that was quantised last, in the loop's thread."""


class Answering:
    """The offers of one learner, as its rounds count them."""

    def __init__(self, shared: SharedLearner, taped: LearnerTape, arrays: Encodes) -> None:
        self.shared, self.taped, self.arrays = shared, taped, arrays
        self._quantised: dict[int, DueOffer] = {}  # by fragment: being quantised
        self._began_s: dict[int, float] = {}  # by fragment: since when it is quantised or stored
        self._half_made = set[int]()  # fragments whose offer is being quantised, or counted and not handed on yet
        self._handed_on = asyncio.Event()

    def begin(self, index: int) -> None:
        """Answer the fragment's open round if that can be done now; the lock is held."""
        answer = self.shared.learner.try_answer(index) if self.arrays.may_encode else None
        if answer is not None:
            self._quantised[index], self._began_s[index] = answer, self.shared.loop.time()
            self._half_made.add(index)
            self.arrays.encode(answer)

    def begin_soon(self, index: int) -> None:
        """Answer the fragment's open round, likewise; the lock is not held. Callable from any thread."""
        self.shared.loop.call_soon_threadsafe(self._begin_locked, index)

    def _begin_locked(self, index: int) -> None:
        with self.shared.lock:
            self.begin(index)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Begin no offer within, once none is half made: all that the counts have of offers, the arrays have too.

        Call it in the loop's thread.
        """
        learner, silent = self.shared.learner, self.shared.learner.silent
        with self.shared.lock:
            learner.silent = True
        try:
            with suppress(TimeoutError):  # as at the end: an offer that takes longer is left out
                async with asyncio.timeout(SETTLE_S):
                    while self._half_made:
                        self._handed_on.clear()
                        await self._handed_on.wait()
            yield
        finally:
            with self.shared.lock:
                learner.silent = silent
                for state in learner.fragments:
                    self.begin(state.index)

    def encoded(self, index: int, content_hash: bytes, encoded: EncodedOffer | None = None) -> None:
        """Count an offer that was quantised (``encoded``: its arrays, if they are here), and store it; the lock is held."""
        answer = self._quantised.pop(index)  # and with it its snapshot: to send may take long
        learner, tape = self.shared.learner, self.taped.tape
        pending = learner.encoded(answer, encoded)
        ago = learner.accounts.step - answer.snapshot.step
        digest = content_hash[: events.DIGEST_BYTES]
        tape.record(
            events.TapeOffer(
                ago=ago, fragment=index, number=pending.stated.number, round=answer.version, bits=answer.bits, digest=digest
            )
        )
        self.shared.tasks.spawn(self._store(index, pending))
        self.shared.tell()

    async def _store(self, index: int, offer: PendingDelta) -> None:
        self.taped.tape.flush()  # before it is sent: all that is merged of this learner is on its tape
        self.arrays.store(index, offer)
        self._note_made(index)

    def _note_made(self, index: int) -> None:
        self._half_made.discard(index)
        self._handed_on.set()

    def not_finite(self, index: int) -> None:
        """Give up an offer whose values are not finite; the lock is held."""
        del self._quantised[index]
        self._note_made(index)
        self.shared.learner.not_finite(index)
        self.shared.tell()

    def stored(self, index: int, sequence: int) -> None:
        """Note that an offer is stored, with its head at ``sequence`` of its stream; the lock is held."""
        self.shared.learner.sent(index, sequence)
        took_s = self.shared.loop.time() - self._began_s[index]
        self.taped.tape.record(events.Sent(index, int(1000 * took_s)))
        self.shared.tell()
