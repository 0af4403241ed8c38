"""Loans of a learner's inner optimizer state to a peer that starts without a checkpoint; parameters come from the log.

The lender makes one copy of its state at a boundary, as it does for a checkpoint, and borrowers pull it part by part: nobody
waits, and an unused copy is dropped. The arrays' bytes travel one after another in the order of their names. Both sides hash
names, shapes and types, so that a state of another model is never taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.control.hearing import decoding
from diloco.errors import FormatError, HashError, MessageError
from diloco.process.observe import Counted, Logger
from diloco.process.prefetch import Prefetcher
from diloco.transport import Heard, Transport
from diloco.wire import framing
from diloco.wire.body import ATTEMPT_BYTES, PART_BYTES
from diloco.wire.control import StateLoan, StatePart, StateRequest
from diloco.wire.subjects import Subjects

KEEP_S = 30.0  # of an unused copy: several learners that start together share one; it takes as much memory as the state
ANSWER_TIMEOUT_S = 2.0  # a part of 512 KiB takes less over any link on which a state is worth its time
READY_TIMEOUT_S = 5.0  # a copy is made at the next boundary: a few steps; then another peer is asked
ASK_AGAIN_S = 0.1  # a step or less
TRIES = 3
MAX_PEERS = 4

Bytes = NDArray[np.uint8]


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
        return sum(_size_bytes(shape, dtype) for _, shape, dtype in self.arrays)

    def join(self, arrays: Mapping[str, NDArray[Any]]) -> Bytes:
        """Return the bytes of all arrays, of any dtype and shape, one after another: uint8 [size_bytes]."""
        parts = [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) for name, _, _ in self.arrays]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def split(self, data: Bytes) -> dict[str, NDArray[Any]]:
        """Return the arrays that :meth:`join` joined to uint8 [size_bytes], as views into it."""
        arrays, at = {}, 0
        for name, shape, dtype in self.arrays:
            stop = at + _size_bytes(shape, dtype)
            arrays[name] = data[at:stop].view(dtype).reshape(shape)
            at = stop
        return arrays


@dataclass(frozen=True)
class Loan:
    """A peer's state as of a boundary, after ``step`` steps and with ``versions`` applied, by fragment."""

    peer: str
    step: int
    versions: list[int]
    content_hash: bytes
    arrays: dict[str, NDArray[Any]]


class Lender:
    """Lends this learner's state. ``serve`` and its handlers run in the loop's thread, the rest in any."""

    def __init__(
        self, transport: Transport, run: bytes, subjects: Subjects, name: str, healthy: Callable[[], bool], log: Logger
    ) -> None:
        self.transport, self.run, self.subjects, self.name, self.healthy = transport, run, subjects, name, healthy
        self.refused = Counted(log)
        self._loop = asyncio.get_running_loop()
        self._wanted = False
        self._lent: tuple[StateLoan, Bytes] | None = None
        self._used_s = 0.0

    async def serve(self) -> None:
        """Begin to answer."""
        await self.transport.serve(self.subjects.state(self.name), decoding(StateRequest, self.run, self._hear, self.refused))

    @property
    def wanted(self) -> bool:
        """Whether a peer asks and there is no copy."""
        return self._wanted

    def give(self, step: int, versions: list[int], layout: Layout, data: Bytes) -> bytes:
        """Lend ``data``, uint8 [size_bytes], a copy as of a boundary; return its hash, after the time of hashing."""
        content_hash = blake3(data.data).digest()
        copy = self.transport.random_bytes(ATTEMPT_BYTES)
        loan = StateLoan(self.name, copy, step, versions, layout.digest, data.size, content_hash)
        self._loop.call_soon_threadsafe(self._keep, loan, data)
        return content_hash

    def _keep(self, loan: StateLoan, data: Bytes) -> None:
        self._lent, self._wanted, self._used_s = (loan, data), False, self._loop.time()
        self._loop.call_later(KEEP_S, self._drop)

    def _drop(self) -> None:
        left_s = self._used_s + KEEP_S - self._loop.time()
        if left_s > 0:
            self._loop.call_later(left_s, self._drop)
        else:
            self._lent = None

    async def _hear(self, request: StateRequest, message: Heard) -> None:
        await message.respond(self._answer(request))

    def _answer(self, request: StateRequest) -> bytes:
        """Return a loan, a part of one, or nothing if there is none."""
        if self._lent is None:
            if request.copy or not self.healthy():
                return b""
            self._wanted = True
            return framing.pack(StateLoan(self.name, b"", 0, [], bytes(32), 0, bytes(32)), self.run)
        self._used_s = self._loop.time()
        loan, data = self._lent
        if not request.copy:
            return framing.pack(loan, self.run)
        if request.copy != loan.copy or request.offset >= data.size:
            return b""
        part = data[request.offset : request.offset + PART_BYTES].tobytes()
        return framing.pack(StatePart(loan.copy, request.offset), self.run, part)


class _Unavailable(Exception):
    """A peer that has nothing to lend, or does not answer."""


class Borrower:
    """Asks for the state of a peer's optimizer, which must be of ``layout``."""

    def __init__(self, transport: Transport, run: bytes, subjects: Subjects, name: str, layout: Layout, log: Logger) -> None:
        self.transport, self.run, self.subjects, self.name, self.layout, self.log = transport, run, subjects, name, layout, log

    async def borrow(self, peers: Sequence[str]) -> Loan | None:
        """Return the state of the first of ``peers`` that lends it, or None."""
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
        data = np.empty(self.layout.size_bytes, np.uint8)
        offsets = range(0, data.size, PART_BYTES)

        async def take(index: int) -> None:
            part = await self._part(peer, loan, offsets[index])
            data[offsets[index] : offsets[index] + len(part)] = np.frombuffer(part, np.uint8)

        await Prefetcher().fetch(len(offsets), take)
        if await asyncio.to_thread(lambda: blake3(data.data).digest()) != loan.content_hash:
            raise HashError(f"state of {peer}: its bytes do not have the hash that it stated")
        return Loan(peer, loan.step, loan.versions, loan.content_hash, self.layout.split(data))

    async def _ready(self, peer: str) -> StateLoan:
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + READY_TIMEOUT_S
        while clock() < deadline_s:
            answer = await self._ask(peer, StateRequest(self.name, b"", 0))
            loan, _, _ = framing.unpack(answer, StateLoan, self.run)
            if loan.copy:
                return loan
            await asyncio.sleep(ASK_AGAIN_S)
        raise _Unavailable(f"no copy was made within {READY_TIMEOUT_S:g} s")

    async def _part(self, peer: str, loan: StateLoan, offset: int) -> bytes:
        answer = await self._ask(peer, StateRequest(self.name, loan.copy, offset))
        part, _, data = framing.unpack(answer, StatePart, self.run)
        expected = min(PART_BYTES, loan.size_bytes - offset)
        if part.copy != loan.copy or part.offset != offset or len(data) != expected:
            raise FormatError(f"state of {peer}: {len(data)} bytes at {part.offset}, expected {expected} at {offset}")
        return data

    async def _ask(self, peer: str, request: StateRequest) -> bytes:
        frame = framing.pack(request, self.run)
        for _ in range(TRIES):
            answer = await self.transport.request(self.subjects.state(peer), frame, ANSWER_TIMEOUT_S)
            if answer:
                return answer
            if answer is not None or not request.copy:
                break  # it has none; or it is not there, and the next peer is as good
        raise _Unavailable("it does not answer" if answer is None else "it has none to lend")


def _size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    count = 1
    for length in shape:
        count *= length
    return count * np.dtype(dtype).itemsize
