"""A learner that comes without a checkpoint asks a peer for its inner optimizer's state; parameters come from the log.

The peer makes one copy of its state at a boundary, as it does for a checkpoint, and whoever asks pulls it part by part: nobody
waits for anybody, and a copy that is asked for no more is dropped. What travels is the arrays' bytes one after another in the
order of their names; both sides hash names, shapes and types, so that nothing of another model is ever taken.
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

from diloco.errors import FormatError, HashError, MessageError
from diloco.observe import Counted, Logger
from diloco.transport import Heard, Transport
from diloco.wire import messages
from diloco.wire.messages import ATTEMPT_BYTES, PART_BYTES, StateLoan, StatePart, StateRequest
from diloco.wire.subjects import Subjects

KEEP_S = 30.0
ANSWER_TIMEOUT_S = 2.0
READY_TIMEOUT_S = 5.0
ASK_AGAIN_S = 0.1
TRIES = 3
AT_ONCE = 4  # parts asked for before the first of them has come
MAX_PEERS = 4

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of the arrays of a state, by name."""

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Layout:
        """The layout of arrays of any kind that have ``shape`` and ``dtype``."""
        return cls(tuple((name, tuple(arrays[name].shape), str(np.dtype(arrays[name].dtype))) for name in sorted(arrays)))

    @property
    def digest(self) -> bytes:
        """BLAKE3: equal layouts, equal digest."""
        return blake3(msgspec.msgpack.encode(self.arrays)).digest()

    @property
    def size_bytes(self) -> int:
        return sum(_size_bytes(shape, dtype) for _, shape, dtype in self.arrays)

    def join(self, arrays: Mapping[str, NDArray[Any]]) -> Bytes:
        """The bytes of all arrays, one after another."""
        parts = [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) for name, _, _ in self.arrays]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def split(self, data: Bytes) -> dict[str, NDArray[Any]]:
        """What :meth:`join` joined."""
        arrays, at = {}, 0
        for name, shape, dtype in self.arrays:
            stop = at + _size_bytes(shape, dtype)
            arrays[name] = data[at:stop].view(dtype).reshape(shape)
            at = stop
        return arrays


@dataclass(frozen=True)
class Loan:
    """A peer's state as of one of its boundaries, after ``step`` steps and with ``versions`` applied, by fragment."""

    peer: str
    step: int
    versions: list[int]
    content_hash: bytes
    arrays: dict[str, NDArray[Any]]


class Lender:
    """Lends this learner's state. ``serve`` and what follows from it run in the loop's thread, the rest in any."""

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
        await self.transport.serve(self.subjects.state(self.name), self._hear)

    @property
    def wanted(self) -> bool:
        """Whether somebody asks, and there is no copy."""
        return self._wanted

    def give(self, step: int, versions: list[int], layout: Layout, data: Bytes) -> bytes:
        """Lend ``data``, a copy as of a boundary; its hash. Takes as long as hashing does."""
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

    async def _hear(self, message: Heard) -> None:
        try:
            request, _, _ = messages.unpack(message.data, StateRequest, self.run)
        except MessageError as error:
            self.refused.note(message.subject, type(error).__name__, reason=str(error))
            return
        await message.respond(self._answer(request))

    def _answer(self, request: StateRequest) -> bytes:
        """A loan, a part of it, or nothing: there is none to be had here."""
        if self._lent is None:
            if request.copy or not self.healthy():
                return b""
            self._wanted = True
            return messages.pack(StateLoan(self.name, b"", 0, [], bytes(32), 0, bytes(32)), self.run)
        self._used_s = self._loop.time()
        loan, data = self._lent
        if not request.copy:
            return messages.pack(loan, self.run)
        if request.copy != loan.copy or request.offset >= data.size:
            return b""
        part = data[request.offset : request.offset + PART_BYTES].tobytes()
        return messages.pack(StatePart(loan.copy, request.offset), self.run, part)


class _Unavailable(Exception):
    """A peer that has nothing to lend, or does not answer."""


class Borrower:
    """Asks for the state of a peer's optimizer, which is to be of ``layout``."""

    def __init__(self, transport: Transport, run: bytes, subjects: Subjects, name: str, layout: Layout, log: Logger) -> None:
        self.transport, self.run, self.subjects, self.name, self.layout, self.log = transport, run, subjects, name, layout, log

    async def borrow(self, peers: Sequence[str]) -> Loan | None:
        """The state of the first of ``peers`` who lends it, or None."""
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
        for at in range(0, len(offsets), AT_ONCE):
            wanted = offsets[at : at + AT_ONCE]
            parts = await asyncio.gather(*(self._part(peer, loan, offset) for offset in wanted))
            for offset, part in zip(wanted, parts, strict=True):
                data[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
        if await asyncio.to_thread(lambda: blake3(data.data).digest()) != loan.content_hash:
            raise HashError(f"state of {peer}: its bytes do not have the hash that it stated")
        return Loan(peer, loan.step, loan.versions, loan.content_hash, self.layout.split(data))

    async def _ready(self, peer: str) -> StateLoan:
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + READY_TIMEOUT_S
        while clock() < deadline_s:
            answer = await self._ask(peer, StateRequest(self.name, b"", 0))
            loan, _, _ = messages.unpack(answer, StateLoan, self.run)
            if loan.copy:
                return loan
            await asyncio.sleep(ASK_AGAIN_S)
        raise _Unavailable(f"no copy was made within {READY_TIMEOUT_S:g} s")

    async def _part(self, peer: str, loan: StateLoan, offset: int) -> bytes:
        answer = await self._ask(peer, StateRequest(self.name, loan.copy, offset))
        part, _, data = messages.unpack(answer, StatePart, self.run)
        expected = min(PART_BYTES, loan.size_bytes - offset)
        if part.copy != loan.copy or part.offset != offset or len(data) != expected:
            raise FormatError(f"state of {peer}: {len(data)} bytes at {part.offset}, expected {expected} at {offset}")
        return data

    async def _ask(self, peer: str, request: StateRequest) -> bytes:
        frame = messages.pack(request, self.run)
        for _ in range(TRIES):
            answer = await self.transport.request(self.subjects.state(peer), frame, ANSWER_TIMEOUT_S)
            if answer:
                return answer
            if answer is not None or not request.copy:
                break  # it says no; or is not there, and the next peer is as good
        raise _Unavailable("it does not answer" if answer is None else "it has none to lend")


def _size_bytes(shape: tuple[int, ...], dtype: str) -> int:
    count = 1
    for length in shape:
        count *= length
    return count * np.dtype(dtype).itemsize
