"""One connection between two processes of a learner: messages in order, some with content behind them.

A message is eight bytes, the lengths of its frame and of its content, most significant first; then a frame of
:mod:`diloco.wire.framing`, whose body is empty; then the content. So content is never copied into a frame: the sender hands it
to the socket where it lies, and the receiver reads it into the buffer in which it is handed on.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from diloco.errors import FormatError
from diloco.wire import framing
from diloco.wire.framing import Message
from diloco.wire.process_messages import PIECE_BYTES

M = TypeVar("M", bound=Message)
Connected = Callable[["Stream"], None]

LENGTHS = struct.Struct(">II")  # of frame and content
FRAME_BYTES = framing.MAX_FRAME_BYTES
HELLO_BYTES = 4096  # of a frame before the other end has proved anything
SPARE_BYTES = 64 * 1024  # of a buffer, for messages behind the one that is read
EMPTY = memoryview(b"")


class Stream(asyncio.BufferedProtocol):
    """One connection's messages. ``connected`` is called with it once the other end has connected.

    All that comes is read into one buffer, which is no larger than the messages that have come. While it is full the system
    holds back what follows.
    """

    _transport: asyncio.Transport

    def __init__(self, run: bytes, connected: Connected | None = None) -> None:
        self.run, self._connected = run, connected
        self._trusted = False
        self._buffer = bytearray(LENGTHS.size + HELLO_BYTES)
        self._first = self._last = 0  # of the bytes in it that have not been taken
        self._taken = 0  # of them, by the message that was returned last
        self._wanted = 0  # so many are waited for
        self._came: asyncio.Future[None] | None = None
        self._end: OSError | EOFError | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.bytes_up = self.bytes_down = 0

    @classmethod
    async def connect(cls, host: str, port: int, run: bytes) -> Stream:
        """Connect to an address.

        Raises:
            OSError: no process listens there.
        """
        _, stream = await asyncio.get_running_loop().create_connection(lambda: cls(run), host, port)
        return stream

    @property
    def peer(self) -> str:
        """Where the other end is."""
        return str((self._transport.get_extra_info("peername") or "?")[0])

    @property
    def here(self) -> str:
        """The address of this end."""
        return str(self._transport.get_extra_info("sockname")[0])

    def trust(self) -> None:
        """Take large frames, and content: the other end has proved that it is a process of the learner."""
        self._trusted = True

    # ---- sending

    def write(self, message: Message, content: memoryview = EMPTY) -> None:
        """Send a message without waiting. ``content``, bytes, must not change any more."""
        frame = framing.pack(message, self.run)
        self.bytes_up += LENGTHS.size + len(frame) + len(content)
        self._transport.write(LENGTHS.pack(len(frame), len(content)) + frame)
        if content:
            self._transport.write(content)

    async def send(self, message: Message, content: memoryview = EMPTY) -> None:
        """Send a message, and wait while too much is on its way.

        Raises:
            OSError: the connection is gone.
        """
        self.write(message, content)
        await self._writable.wait()
        if self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # ---- receiving

    async def receive_any(self, kinds: Mapping[str, type[Message]]) -> Message:
        """Return the next message, which is one of ``kinds``; content is not expected.

        Raises:
            FormatError, HashError: it is something else.
            EOFError, OSError: the connection has ended.
        """
        message, _ = await self.receive(kinds)
        return message

    async def receive_one(self, kind: type[M]) -> M:
        """Return the next message, which is of this kind, and raise as :meth:`receive_any` does."""
        message = await self.receive_any({kind.kind: kind})
        assert isinstance(message, kind)
        return message

    async def receive(self, kinds: Mapping[str, type[Message]]) -> tuple[Message, memoryview]:
        """Return the next message and its content, bytes that last until the next call; raise as :meth:`receive_any` does."""
        self._take(self._taken)
        await self._fill(LENGTHS.size)
        frame_bytes, content_bytes = LENGTHS.unpack_from(self._buffer, self._first)
        most_bytes, most_content_bytes = (FRAME_BYTES, PIECE_BYTES) if self._trusted else (HELLO_BYTES, 0)
        if not 0 < frame_bytes <= most_bytes:
            raise FormatError(f"a frame of {frame_bytes} bytes, expected 1 to {most_bytes}")
        if content_bytes > most_content_bytes:
            raise FormatError(f"content of {content_bytes} bytes, expected at most {most_content_bytes}")
        size_bytes = LENGTHS.size + frame_bytes + content_bytes
        await self._fill(size_bytes)
        whole = memoryview(self._buffer)[self._first + LENGTHS.size : self._first + size_bytes]
        frame, content = bytes(whole[:frame_bytes]), whole[frame_bytes:]
        kind = framing.kind_of(frame)
        if kind is None or kind not in kinds:
            raise FormatError(f"a message {kind!r}, expected one of {', '.join(sorted(kinds))}")
        message, _, inline = framing.unpack(frame, kinds[kind], self.run)
        if inline:
            raise FormatError(f"{kind}: {len(inline)} bytes of content in its frame, expected after it")
        self._taken = size_bytes
        self.bytes_down += size_bytes
        return message, content

    async def heard(self) -> bool:
        """Wait until the other end says anything, which is dropped; False: it has closed."""
        try:
            self._take(self._taken)
            await self._fill(1)
        except EOFError:
            return False
        self._take(self._last - self._first)
        return True

    async def until_closed(self) -> None:
        """Wait until the other end closes; whatever it says is dropped."""
        while await self.heard():
            pass

    async def _fill(self, size: int) -> None:
        """Wait until so many bytes are there that have not been taken."""
        while self._last - self._first < size:
            if self._end is not None:
                raise self._end
            self._make_room(size)
            self._wanted, self._came = size, asyncio.get_running_loop().create_future()
            try:
                await self._came
            finally:
                self._came = None

    def _make_room(self, size: int) -> None:
        """Have room for so many bytes that are not taken, of which some are there; bytes handed out stay as they are."""
        if self._first + size <= len(self._buffer):
            return
        there = self._buffer[self._first : self._last]
        if size > len(self._buffer):
            self._buffer = bytearray(size + SPARE_BYTES)
        self._buffer[: len(there)] = there
        self._first, self._last = 0, len(there)
        self._transport.resume_reading()

    def _take(self, size: int) -> None:
        self._first, self._taken = self._first + size, 0
        if self._first == self._last and self._first:
            self._first = self._last = 0
            self._transport.resume_reading()

    # ---- what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        if self._connected is not None:
            self._connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where bytes go that come."""
        return memoryview(self._buffer)[self._last :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take in that bytes have come."""
        self._last += nbytes
        if self._last == len(self._buffer):
            self._transport.pause_reading()
        if self._last - self._first >= self._wanted:
            self._wake()

    def eof_received(self) -> None:
        """Take in that nothing more comes."""
        self._finish(EOFError("the other end has closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Take in that the connection has ended."""
        self._finish(exc if isinstance(exc, OSError) else EOFError("the connection is closed"))
        self._writable.set()

    def pause_writing(self) -> None:
        """Have senders wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._writable.set()

    def _finish(self, error: OSError | EOFError) -> None:
        self._end = self._end or error
        self._wake()

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)
