"""Loans of a learner's inner optimizer state to a peer that starts without a checkpoint; parameters come from the log.

The lender saves its state as of a boundary, as it does for a checkpoint, and serves slices of its arrays from there: no
learner waits, and an unused copy is dropped. A borrower asks for the slices that its own shards are made of, whatever mesh the
lender has, and hands each chunk on when it is complete: neither side holds an array whole. Both sides hash names, shapes and
types, so that a state of another model is never taken.

A state that took long to come is old: its lender trained on meanwhile. Decoupled DiLoCo (arXiv 2604.21428, E.3) bounds a
recovery by H steps. So a loan that is older than that when it is complete (:class:`LoanAge`) is asked for once more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.control.hearing import decoding, name_in
from diloco.core.tensors.chunks import Chunk
from diloco.errors import DilocoError, FormatError, HashError, MessageError, NonFiniteError
from diloco.process.observe import Counted, Logger
from diloco.process.prefetch import Prefetcher
from diloco.transport import Heard, Transport
from diloco.wire import framing
from diloco.wire.body import ATTEMPT_BYTES, PART_BYTES
from diloco.wire.control import Heartbeat, StateLoan, StatePart, StateRequest
from diloco.wire.subjects import Subjects

KEEP_S = 30.0  # of an unused copy: several learners that start together share one; it takes as much disk as the state
ANSWER_TIMEOUT_S = 2.0  # a part of 512 KiB takes less over any link on which a state is worth its time
READY_TIMEOUT_S = 5.0  # a copy is begun at the next boundary: a few steps; then another peer is asked
COPIED_BYTES_S = 20e6  # and is made at this rate at least, by a disk that others use too
LENT_BYTES_S = 1e6  # and comes at this rate at least, over all requests together: a slower link is better used for training
MAX_MAGNITUDE = 1e30  # of a value: one step with a larger one leaves the range of float32
# components of the names of second moments, by which optimizers of optax and PyTorch divide after a square root
NOT_NEGATIVE = frozenset({"nu", "exp_avg_sq", "max_exp_avg_sq", "sum_of_squares"})
MAX_AGE_S = 30.0  # of a loan that is complete: with short steps, H of them pass during any transfer
COPY_AGAIN_S = 10.0  # after a copy, a newer one may be made: a peer asks for it after MAX_AGE_S, by its own clock
MAX_COPIES = 2  # that are lent at once: a peer may still read the older one
REFUSES_S = 5.0  # a peer asks ten times a second: it hears within so long that there is to be no copy, also over a slow link
ASK_AGAIN_S = 0.1  # a step or less
TRIES = 3
MAX_PEERS = 4

Values = NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of the arrays of a state, by name."""

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Layout:
        """Return the layout of arrays of any kind that have ``shape`` and ``dtype``."""
        return cls(tuple((name, tuple(arrays[name].shape), str(np.dtype(arrays[name].dtype))) for name in sorted(arrays)))

    @property
    def digest(self) -> bytes:
        """BLAKE3: equal layouts, equal digest."""
        return blake3(msgspec.msgpack.encode(self.arrays)).digest()

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.wholes())

    def wholes(self) -> list[Chunk]:
        """Return each array as a chunk, in the order of their names."""
        return [Chunk.whole(*array) for array in self.arrays]

    def slice(self, array: int, start: Sequence[int], stop: Sequence[int]) -> Chunk | None:
        """Return a slice of the array at a place, as a peer asks for it; None if there is none, or it is too large."""
        if array >= len(self.arrays):
            return None
        name, shape, dtype = self.arrays[array]
        if not len(start) == len(stop) == len(shape):
            return None
        if any(first >= last or last > length for first, last, length in zip(start, stop, shape, strict=True)):
            return None
        chunk = Chunk(name, shape, dtype, tuple(start), tuple(stop))
        return chunk if chunk.size_bytes <= PART_BYTES else None


class Lendable(Protocol):
    """A state that can be lent: a copy as of a boundary. ``read`` and ``drop`` may be called in any thread."""

    @property
    def layout(self) -> Layout:
        """Names, shapes and types."""

    @property
    def content_hash(self) -> bytes:
        """32 bytes that tell it from other states."""

    def read(self, wanted: Chunk) -> Values:
        """Return a chunk of it, any dtype [its lengths].

        Raises:
            DilocoError: it cannot be read any more.
        """

    def drop(self) -> None:
        """Free what it takes: nothing is read any more."""


class InMemory:
    """A state whose arrays, any dtype [...] by name, are in memory: a toy's, or one of a simulation."""

    def __init__(self, arrays: Mapping[str, Values]) -> None:
        self._values = dict(arrays)
        self.layout = Layout.of(arrays)
        hasher = blake3(self.layout.digest)
        for name in sorted(arrays):
            hasher.update(np.ascontiguousarray(arrays[name]).tobytes())
        self.content_hash = hasher.digest()

    def read(self, wanted: Chunk) -> Values:
        """Return a chunk, any dtype [its lengths]."""
        return self._values[wanted.name][wanted.where]

    def drop(self) -> None:
        """Nothing to free: memory goes with this object."""


@dataclass(frozen=True)
class Loan:
    """A peer's state as of a boundary, after ``step`` steps and with ``versions`` applied, by fragment."""

    peer: str
    step: int
    versions: list[int]
    content_hash: bytes
    named_s: float  # when the peer named the copy to the borrower, by the loop's clock


@dataclass(frozen=True)
class LoanAge:
    """How old a loan is, and the age above which it is asked for once more, both in seconds."""

    age_s: float
    limit_s: float

    @classmethod
    def of(cls, loan: Loan, now_s: float, steps: int, lender: Heartbeat | None) -> LoanAge:
        """Return the age of a loan now, in a run with ``steps`` inner steps between two rounds.

        The lender's newest heartbeat says how many steps it has taken since the copy, which several peers may share, and how
        long they take. Without a heartbeat (None) the age counts from the moment at which the copy was named.
        """
        step_s, taken = (0.0, 0) if lender is None else (lender.step_s, lender.step - loan.step)
        return cls(max(now_s - loan.named_s, taken * step_s), max(steps * step_s, MAX_AGE_S))

    @property
    def is_old(self) -> bool:
        """Whether the loan is older than its limit."""
        return self.age_s > self.limit_s


@dataclass
class _Copy:
    """A copy that is lent; times by the loop's clock."""

    loan: StateLoan
    state: Lendable
    made_s: float
    used_s: float


class Lender:
    """Lends this learner's state. ``serve`` and its handlers run in the loop's thread, the rest in any."""

    def __init__(
        self, transport: Transport, run: bytes, subjects: Subjects, name: str, healthy: Callable[[], bool], log: Logger
    ) -> None:
        self.transport, self.run, self.subjects, self.name, self.healthy = transport, run, subjects, name, healthy
        self.refused = Counted(log)
        self._loop = asyncio.get_running_loop()
        self._wanted = False
        self._copies: list[_Copy] = []  # the newest last
        self._refuses_until_s = -math.inf

    async def serve(self) -> None:
        """Begin to answer."""
        await self.transport.serve(self.subjects.state(self.name), decoding(StateRequest, self.run, self._hear, self.refused))

    @property
    def wanted(self) -> bool:
        """Whether a peer asks and there is no copy, or none that is new enough."""
        return self._wanted

    def give(self, step: int, versions: list[int], state: Lendable) -> None:
        """Lend ``state``, a copy as of a boundary, until no peer has asked for it for a while."""
        copy, layout = self.transport.random_bytes(ATTEMPT_BYTES), state.layout
        loan = StateLoan(
            peer=self.name,
            copy=copy,
            step=step,
            versions=versions,
            layout=layout.digest,
            size_bytes=layout.size_bytes,
            content_hash=state.content_hash,
        )
        self._loop.call_soon_threadsafe(self._keep, loan, state)

    def give_none(self) -> None:
        """Say that no copy is to be made, or could be."""
        self._refuses_until_s = self._loop.time() + REFUSES_S
        self._wanted = False

    def close(self) -> None:
        """Drop what is lent; called in the loop's thread."""
        for copy in self._copies:
            copy.state.drop()
        self._copies.clear()

    def _keep(self, loan: StateLoan, state: Lendable) -> None:
        now_s = self._loop.time()
        copy = _Copy(loan, state, now_s, now_s)
        self._copies.append(copy)
        self._wanted = False
        self._loop.call_later(KEEP_S, self._drop, copy)

    def _drop(self, copy: _Copy) -> None:
        left_s = copy.used_s + KEEP_S - self._loop.time()
        if left_s > 0:
            self._loop.call_later(left_s, self._drop, copy)
        elif copy in self._copies:
            self._copies.remove(copy)
            copy.state.drop()

    async def _hear(self, request: StateRequest, message: Heard) -> None:
        await message.respond(await self._part(request) if request.copy else self._loan(request.array))

    def _loan(self, least_step: int) -> bytes:
        """Return the newest loan. If a newer copy is due, return one without a copy; if none can be made, return nothing."""
        now_s, newest = self._loop.time(), self._copies[-1] if self._copies else None
        if newest is None:
            due = True
        else:
            due = newest.loan.step < least_step and now_s - newest.made_s >= COPY_AGAIN_S and len(self._copies) < MAX_COPIES
        if due and self.healthy() and now_s >= self._refuses_until_s:
            self._wanted = True
            none = StateLoan(
                peer=self.name, copy=b"", step=0, versions=[], layout=bytes(32), size_bytes=0, content_hash=bytes(32)
            )
            return framing.pack(none, self.run)
        if newest is None:
            return b""
        newest.used_s = now_s
        return framing.pack(newest.loan, self.run)

    async def _part(self, request: StateRequest) -> bytes:
        """Return a slice of a loan, or nothing if there is none."""
        copy = next((copy for copy in self._copies if copy.loan.copy == request.copy), None)
        if copy is None:
            return b""
        chunk = copy.state.layout.slice(request.array, request.start, request.stop)
        if chunk is None:
            return b""
        copy.used_s = self._loop.time()
        try:
            values = await asyncio.to_thread(copy.state.read, chunk)
        except DilocoError:  # it was dropped meanwhile
            return b""
        part = np.ascontiguousarray(values).tobytes()
        return framing.pack(StatePart(copy.loan.copy, request.array, request.start, blake3(part).digest()), self.run, part)


def _check_values(what: str, name: str, values: Values) -> None:
    """Refuse values with which no optimizer can take a step.

    Raises:
        NonFiniteError: some are not finite.
        FormatError: some are too large, or negative where a square root is taken of them.
    """
    if values.dtype.kind in "biu" or not values.size:
        return
    wide = values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32)  # of bfloat16 NumPy knows no order
    least, most = float(wide.min()), float(wide.max())
    if not (math.isfinite(least) and math.isfinite(most)):  # NaN is passed on by both
        raise NonFiniteError(f"{what} holds NaN or infinity: the learner's own optimizer state is broken")
    if max(-least, most) > MAX_MAGNITUDE:
        raise FormatError(f"{what} holds {max(-least, most, key=abs):.3g}, expected at most {MAX_MAGNITUDE:g}")
    if least < 0 and NOT_NEGATIVE.intersection(name.split("/")):
        raise FormatError(f"{what} holds {least:.3g}, expected no negative value of a second moment")


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Do work in a thread to its end, also if this is cancelled: another peer's values must not come beside it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


class _Unavailable(Exception):
    """A peer that has nothing to lend, or does not answer."""


class Borrower:
    """Asks for the state of a peer's optimizer, which must be of ``layout``: for the chunks that are ``wanted`` of it.

    ``put`` takes the values of one of them, any dtype [its lengths]; it is called in other threads, once at a time. Where a
    peer fails half-way, another one's chunks follow, or none.
    """

    def __init__(
        self,
        transport: Transport,
        run: bytes,
        subjects: Subjects,
        name: str,
        layout: Layout,
        wanted: Sequence[Chunk],
        put: Callable[[Chunk, Values], None],
        log: Logger,
    ) -> None:
        self.transport, self.run, self.subjects, self.name, self.log = transport, run, subjects, name, log
        self.layout, self.wanted, self.put = layout, wanted, put
        self._places = {array[0]: place for place, array in enumerate(layout.arrays)}
        self._taken = 0  # chunks that were handed to ``put``

    async def borrow(self, peers: Sequence[str]) -> Loan | None:
        """Borrow of the first of ``peers`` that lends; None if no peer does."""
        for peer in peers[:MAX_PEERS]:
            loan = await self._try(peer)
            if loan is not None:
                return loan
        return None

    async def borrow_newer(self, loan: Loan, peers: Sequence[str]) -> Loan | None:
        """Borrow a newer copy of the same lender; return ``loan`` where there is none, and nothing of another was taken.

        Where it fails half-way, chunks of two copies are mixed: then borrow from the beginning, as :meth:`borrow` does.
        """
        taken = self._taken
        newer = await self._try(loan.peer, loan.step + 1)
        if newer is None and self._taken != taken:
            return await self.borrow(peers)
        return newer or loan

    async def _try(self, peer: str, least_step: int = 0) -> Loan | None:
        """Borrow as :meth:`_borrow_from` does; log why if that fails, and return None."""
        try:
            return await self._borrow_from(peer, least_step)
        except _Unavailable as error:
            self.log.info("state_not_lent", learner=peer, reason=str(error))
        except MessageError as error:
            self.log.warning("state_refused", learner=peer, reason=str(error))
        return None

    async def _borrow_from(self, peer: str, least_step: int = 0) -> Loan:
        """Borrow a peer's state as of ``least_step`` of its steps, or later.

        Raises:
            _Unavailable: it has none, or none of that step.
            MessageError: what it sends does not fit.
        """
        loan, named_s = await self._ready(peer, least_step), asyncio.get_running_loop().time()
        if loan.layout != self.layout.digest or loan.size_bytes != self.layout.size_bytes:
            raise FormatError(
                f"state of {peer}: {loan.size_bytes} bytes that do not fit this learner's optimizer, whose state has "
                f"{self.layout.size_bytes}"
            )
        parts = [(chunk, part) for chunk in self.wanted if chunk.size_bytes for part in chunk.cut(PART_BYTES)]
        filling: dict[Chunk, tuple[Values, int]] = {}  # values of a chunk, and how many bytes of it are still to come
        putting = asyncio.Lock()

        async def take(index: int) -> None:
            chunk, part = parts[index]
            if chunk not in filling:
                filling[chunk] = np.empty(chunk.lengths, chunk.dtype), chunk.size_bytes
            part_values = await self._part(peer, loan, part)
            values, left_bytes = filling[chunk]
            values[part.within(chunk)] = part_values
            filling[chunk] = values, left_bytes - part.size_bytes
            if left_bytes == part.size_bytes:
                del filling[chunk]
                async with putting:
                    self._taken += 1
                    await _whole(asyncio.to_thread(self.put, chunk, values))

        within_s = READY_TIMEOUT_S + sum(part.size_bytes for _, part in parts) / LENT_BYTES_S
        try:
            async with asyncio.timeout(within_s):
                await Prefetcher().fetch(len(parts), take)
        except TimeoutError:
            raise _Unavailable(f"its state did not come within {within_s:.3g} s") from None
        return Loan(peer, loan.step, loan.versions, loan.content_hash, named_s)

    async def _ready(self, peer: str, least_step: int) -> StateLoan:
        clock = asyncio.get_running_loop().time
        within_s = READY_TIMEOUT_S + self.layout.size_bytes / COPIED_BYTES_S
        deadline_s = clock() + within_s
        while clock() < deadline_s:
            answer = await self._ask(peer, StateRequest(self.name, b"", least_step, [], []))
            loan, _, _ = framing.unpack(answer, StateLoan, self.run)
            if loan.copy and loan.step < least_step:
                raise _Unavailable(f"its newest copy is of step {loan.step}")
            if loan.copy:
                return loan
            await asyncio.sleep(ASK_AGAIN_S)
        raise _Unavailable(f"no copy was made within {within_s:.3g} s")

    async def _part(self, peer: str, loan: StateLoan, wanted: Chunk) -> Values:
        place, start = self._places[wanted.name], list(wanted.start)
        answer = await self._ask(peer, StateRequest(self.name, loan.copy, place, start, list(wanted.stop)))
        part, _, data = framing.unpack(answer, StatePart, self.run)
        if (part.copy, part.array, part.start) != (loan.copy, place, start) or len(data) != wanted.size_bytes:
            raise FormatError(
                f"state of {peer}: {len(data)} bytes of array {part.array} from {part.start} on, expected "
                f"{wanted.size_bytes} of {place} from {start} on"
            )
        if blake3(data).digest() != part.content_hash:
            raise HashError(f"state of {peer}: a slice of {wanted.name} does not have the hash that it states")
        values: Values = np.frombuffer(data, wanted.dtype).reshape(wanted.lengths)
        _check_values(f"state of {peer}: {wanted.name}", wanted.name, values)
        return values

    async def _ask(self, peer: str, request: StateRequest) -> bytes:
        frame = framing.pack(request, self.run)
        for _ in range(TRIES):
            answer = await self.transport.request(self.subjects.state(peer), frame, ANSWER_TIMEOUT_S)
            if answer:
                return answer
            if answer is not None or not request.copy:
                break  # it has none; or it is not there, and the next peer is as good
        raise _Unavailable("it does not answer" if answer is None else "it has no state to lend")


class LoanWatch:
    """Judges the age of loans, by the newest heartbeats of the peers that are asked. Other heartbeats are not decoded."""

    def __init__(self, run: bytes, steps: Callable[[], int], log: Logger) -> None:
        """Judge by ``steps()``, the inner steps between two rounds as in force."""
        self.run, self.steps, self.log = run, steps, log
        self._frames: dict[str, bytes | None] = {}  # by peer; None: not heard yet

    def watch(self, peers: Sequence[str] | None) -> Sequence[str]:
        """Return the first ``MAX_PEERS`` of ``peers``. From now on, only their heartbeats are kept."""
        asked = (peers or [])[:MAX_PEERS]
        self._frames = {peer: self._frames.get(peer) for peer in asked}
        return asked

    def hear(self, heard: Heard) -> None:
        """Take in a heartbeat of a learner."""
        name = name_in(heard.subject)
        if name in self._frames:
            self._frames[name] = heard.data

    async def borrow(self, borrower: Borrower, peers: Sequence[str]) -> Loan | None:
        """Borrow of the first of ``peers`` that lends; None if no peer does.

        A loan that is old when it is complete is asked for once more. If the second one is old too, the newer one is used.
        """
        asked = self.watch(peers)
        loan = await borrower.borrow(asked)
        if loan is not None and self.must_ask_again(loan):
            loan = await borrower.borrow_newer(loan, asked)
            self.note_age(loan)
        return loan

    def must_ask_again(self, loan: Loan) -> bool:
        """Return whether a loan that is complete is so old that it is asked for once more, and say so."""
        age = self.age_of(loan)
        if age.is_old:
            self.log.info("state_asked_again", **_described(loan, age))
        return age.is_old

    def note_age(self, loan: Loan | None) -> None:
        """Say that a loan is used though it is old: that which was asked for again, or the one before it."""
        if loan is not None and (age := self.age_of(loan)).is_old:
            self.log.warning("state_old", **_described(loan, age))

    def age_of(self, loan: Loan) -> LoanAge:
        """Return how old a loan is now."""
        return LoanAge.of(loan, asyncio.get_running_loop().time(), self.steps(), self._newest(loan.peer))

    def _newest(self, peer: str) -> Heartbeat | None:
        frame = self._frames.get(peer)
        if frame is None:
            return None
        try:
            return framing.unpack(frame, Heartbeat, self.run)[0]
        except MessageError:
            return None


def _described(loan: Loan, age: LoanAge) -> dict[str, Any]:
    return {"learner": loan.peer, "step": loan.step, "age_s": round(age.age_s, 1), "limit_s": round(age.limit_s, 1)}
