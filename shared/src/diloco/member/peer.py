"""Loans of a learner's inner optimizer state to a peer that starts without a checkpoint; parameters come from the log.

The lender saves its state as of a boundary, as it does for a checkpoint, and serves slices of its arrays from there: nobody
waits, and an unused copy is dropped. A borrower asks for the slices that its own shards are made of, whatever mesh the lender
has, and hands each chunk on when it is complete: neither side holds an array whole. Both sides hash names, shapes and types,
so that a state of another model is never taken.
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

from diloco.control.hearing import decoding
from diloco.core.chunks import Chunk
from diloco.errors import DilocoError, FormatError, HashError, MessageError, NonFiniteError
from diloco.process.observe import Counted, Logger
from diloco.process.prefetch import Prefetcher
from diloco.transport import Heard, Transport
from diloco.wire import framing
from diloco.wire.body import ATTEMPT_BYTES, PART_BYTES
from diloco.wire.control import StateLoan, StatePart, StateRequest
from diloco.wire.subjects import Subjects

KEEP_S = 30.0  # of an unused copy: several learners that start together share one; it takes as much disk as the state
ANSWER_TIMEOUT_S = 2.0  # a part of 512 KiB takes less over any link on which a state is worth its time
READY_TIMEOUT_S = 5.0  # a copy is begun at the next boundary: a few steps; then another peer is asked
COPIED_BYTES_S = 20e6  # and is made at this rate at least, by a disk that others use too
LENT_BYTES_S = 1e6  # and comes at this rate at least, over all requests together: a slower link is better used for training
MAX_MAGNITUDE = 1e30  # of a value: one step with a larger one leaves the range of float32
# components of the names of second moments, by which optimizers of optax and PyTorch divide after a square root
NOT_NEGATIVE = frozenset({"nu", "exp_avg_sq", "max_exp_avg_sq", "sum_of_squares"})
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


class Lender:
    """Lends this learner's state. ``serve`` and its handlers run in the loop's thread, the rest in any."""

    def __init__(
        self, transport: Transport, run: bytes, subjects: Subjects, name: str, healthy: Callable[[], bool], log: Logger
    ) -> None:
        self.transport, self.run, self.subjects, self.name, self.healthy = transport, run, subjects, name, healthy
        self.refused = Counted(log)
        self._loop = asyncio.get_running_loop()
        self._wanted = False
        self._lent: tuple[StateLoan, Lendable] | None = None
        self._used_s = 0.0
        self._refuses_until_s = -math.inf

    async def serve(self) -> None:
        """Begin to answer."""
        await self.transport.serve(self.subjects.state(self.name), decoding(StateRequest, self.run, self._hear, self.refused))

    @property
    def wanted(self) -> bool:
        """Whether a peer asks and there is no copy."""
        return self._wanted

    def give(self, step: int, versions: list[int], state: Lendable) -> None:
        """Lend ``state``, a copy as of a boundary, until nobody asks for it any more."""
        copy, layout = self.transport.random_bytes(ATTEMPT_BYTES), state.layout
        loan = StateLoan(self.name, copy, step, versions, layout.digest, layout.size_bytes, state.content_hash)
        self._loop.call_soon_threadsafe(self._keep, loan, state)

    def give_none(self) -> None:
        """Say that no copy is to be made, or could be."""
        self._refuses_until_s = self._loop.time() + REFUSES_S
        self._wanted = False

    def close(self) -> None:
        """Drop what is lent; called in the loop's thread."""
        if self._lent is not None:
            self._lent[1].drop()
        self._lent = None

    def _keep(self, loan: StateLoan, state: Lendable) -> None:
        self.close()
        self._lent, self._wanted, self._used_s = (loan, state), False, self._loop.time()
        self._loop.call_later(KEEP_S, self._drop, state)

    def _drop(self, state: Lendable) -> None:
        if self._lent is None or self._lent[1] is not state:
            return
        left_s = self._used_s + KEEP_S - self._loop.time()
        if left_s > 0:
            self._loop.call_later(left_s, self._drop, state)
        else:
            self.close()

    async def _hear(self, request: StateRequest, message: Heard) -> None:
        await message.respond(await self._part(request) if request.copy else self._loan())

    def _loan(self) -> bytes:
        """Return a loan, or nothing if there is to be none."""
        if self._lent is None:
            if not self.healthy() or self._loop.time() < self._refuses_until_s:
                return b""
            self._wanted = True
            return framing.pack(StateLoan(self.name, b"", 0, [], bytes(32), 0, bytes(32)), self.run)
        self._used_s = self._loop.time()
        return framing.pack(self._lent[0], self.run)

    async def _part(self, request: StateRequest) -> bytes:
        """Return a slice of a loan, or nothing if there is none."""
        if self._lent is None or request.copy != self._lent[0].copy:
            return b""
        loan, state = self._lent
        chunk = state.layout.slice(request.array, request.start, request.stop)
        if chunk is None:
            return b""
        self._used_s = self._loop.time()
        try:
            values = await asyncio.to_thread(state.read, chunk)
        except DilocoError:  # it was dropped meanwhile
            return b""
        part = np.ascontiguousarray(values).tobytes()
        return framing.pack(StatePart(loan.copy, request.array, request.start, blake3(part).digest()), self.run, part)


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

    async def borrow(self, peers: Sequence[str]) -> Loan | None:
        """Borrow of the first of ``peers`` that lends; None if nobody does."""
        for peer in peers[:MAX_PEERS]:
            try:
                return await self._borrow_from(peer)
            except _Unavailable as error:
                self.log.info("state_not_lent", learner=peer, reason=str(error))
            except MessageError as error:
                self.log.warning("state_refused", learner=peer, reason=str(error))
        return None

    async def _borrow_from(self, peer: str) -> Loan:
        loan = await self._ready(peer)
        if loan.layout != self.layout.digest or loan.size_bytes != self.layout.size_bytes:
            raise FormatError(
                f"state of {peer}: {loan.size_bytes} bytes of arrays that are not this optimizer's, whose state has "
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
                    await _whole(asyncio.to_thread(self.put, chunk, values))

        within_s = READY_TIMEOUT_S + sum(part.size_bytes for _, part in parts) / LENT_BYTES_S
        try:
            async with asyncio.timeout(within_s):
                await Prefetcher().fetch(len(parts), take)
        except TimeoutError:
            raise _Unavailable(f"its state did not come within {within_s:.3g} s") from None
        return Loan(peer, loan.step, loan.versions, loan.content_hash)

    async def _ready(self, peer: str) -> StateLoan:
        clock = asyncio.get_running_loop().time
        within_s = READY_TIMEOUT_S + self.layout.size_bytes / COPIED_BYTES_S
        deadline_s = clock() + within_s
        while clock() < deadline_s:
            answer = await self._ask(peer, StateRequest(self.name, b"", 0, [], []))
            loan, _, _ = framing.unpack(answer, StateLoan, self.run)
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
        raise _Unavailable("it does not answer" if answer is None else "it has none to lend")
