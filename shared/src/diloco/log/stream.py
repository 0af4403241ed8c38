"""One run's log stream as one process reaches it, and how its messages are decoded; every other module here builds on it.

Nothing else in this project turns a message of the log into an entry. A message that cannot be one raises. A reader that
goes on tells it as a :class:`RefusedEntry`: all readers pass over the same messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from diloco.core.log import fold
from diloco.core.log.quorum import EPOCH_STEP
from diloco.core.tensors import codec, outer, quantise
from diloco.core.tensors.compiled import BLOCK
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import AppendUncertainError, FenceError, FormatError, HashError, MessageError, RewoundError
from diloco.process.prefetch import Prefetcher
from diloco.process.tasks import computed
from diloco.settings.run import NARROW_BITS, RunSettings
from diloco.transport import Stored, Transport
from diloco.wire import framing, subjects
from diloco.wire.body import ATTEMPT_BYTES, Body, body_pieces, check_body_size, is_part
from diloco.wire.entries import Claim, CommitNotice, Keyframe, Record
from diloco.wire.subjects import Subjects


@dataclass(frozen=True)
class RefusedEntry:
    """A message that is no entry of the log, and that all readers pass over."""

    sender: str  # the syncer that the entry names; "log" where no entry could be read
    subject: str
    sequence: int  # in the stream
    error: MessageError


MOST_BEHIND, MOST_BEHIND_BYTES = 10_000, 64 << 20  # of messages behind a fence: reading them takes less than a second
LOOK_S = 2.0  # before the first question whether a message that does not come is still there: longer than a usual reconnection

Of = TypeVar("Of", Record, Keyframe, CommitNotice, Claim)
Refuse: TypeAlias = Callable[[RefusedEntry], None]


def pass_over(refusal: RefusedEntry) -> None:
    """Refuse without a word, where another reader of the log tells it."""


@dataclass(frozen=True)
class EntryHead:
    """One entry's head, decoded; its body is left alone."""

    record: Record
    entry_hash: bytes
    sequence: int
    inline: bytes  # the body, or its beginning, where the head carries it

    @property
    def previous(self) -> bytes:
        return self.record.previous


@dataclass(frozen=True)
class Packed(EntryHead):
    """One entry as it is stored, its body not opened."""

    parts: Sequence[bytes]  # of the body, without their attempt; none where the head carries it

    @property
    def held_bytes(self) -> int:
        """Of the body as it is here."""
        return len(self.inline) + sum(map(len, self.parts))

    def bare(self) -> EntryHead:
        """Return its head, without any of the body."""
        return EntryHead(self.record, self.entry_hash, self.sequence, b"")

    @property
    def size_bytes(self) -> int:
        """Of head and parts as stored, nearly."""
        return self.record.body.size_bytes if self.record.body else 0


@dataclass(frozen=True)
class LogEntry:
    """One committed entry: checked by itself, not yet against its chain."""

    record: Record
    entry_hash: bytes
    sequence: int
    body: NDArray[np.uint8] | None
    size_bytes: int  # of the body as stored
    known_sequence: int  # of the message that commits it: the entry itself, or in a run with regions a notice


class LogStream:
    """The stream of one run's log, seen through one transport; in a run with regions, one region's."""

    def __init__(
        self, transport: Transport, run_name: str, run: bytes, fragment_map: FragmentMap, settings: RunSettings
    ) -> None:
        self.transport, self.run, self.map, self.regions = transport, run, fragment_map, bool(settings.regions.names)
        self.subjects = Subjects(run_name)
        self._prefetcher = Prefetcher()
        self._refused_bits = {bits: each for bits, each in NARROW_BITS.items() if each not in settings.requires}
        self.epoch_step = EPOCH_STEP if self.regions else 1
        self.optimizers = [outer.optimizer(settings, fragment) for fragment in fragment_map.fragments]
        bits = settings.codec.record_bits
        versions = [quantise.body_bytes(fragment.size, fragment.bits(bits)) for fragment in fragment_map.fragments]
        # parts that a reader keeps: an entry of each fragment at once, or any one that is larger
        self.most_parts_bytes = max(sum(map(codec.packed_limit, versions)), *map(self.most_body_bytes, range(len(versions))))

    async def last(self, subject: str) -> Stored | None:
        """Return the last message on a subject."""
        return await self.transport.last(self.subjects.log_stream, subject)

    async def get(self, sequence: int) -> Stored | None:
        """Return the message with a stream sequence; None if it is gone."""
        return await self.transport.get(self.subjects.log_stream, sequence)

    async def pull(
        self,
        filters: list[str],
        start_sequence: int,
        stop_sequence: int | None,
        stop: Stored | None = None,
        *,
        headers_only: bool = False,
    ) -> AsyncIterator[Stored]:
        """Yield messages for ever, or up to and with the one to stop at, as long as that is there: lost, it never comes.

        ``stop``: the message to stop at, where it was read before; it may be large. ``headers_only``: without their data.

        Raises (while iterating):
            RewoundError: the stream lost messages that were read, or the message to stop at.
        """
        name = self.subjects.log_stream
        pulled = aiter(self.transport.pull(name, filters, start_sequence, headers_only=headers_only))
        if stop_sequence is None:
            async for message in pulled:
                yield message
            return
        expected = stop or await self.get(stop_sequence)
        while True:
            coming, pause_s = asyncio.ensure_future(anext(pulled)), LOOK_S
            try:
                while not (await asyncio.wait([coming], timeout=pause_s))[0]:
                    pause_s *= 2  # a process without time to read would otherwise spend it on the answers
                    with contextlib.suppress(AppendUncertainError):  # the server is away
                        if expected is None or await self.get(stop_sequence) != expected:
                            raise RewoundError(f"stream {name}: message {stop_sequence}, the last one to read, is gone")
                message = coming.result()
            finally:
                coming.cancel()
            yield message
            if message.sequence >= stop_sequence:
                return

    async def by_now(
        self, subject: str, start_sequence: int = 1, newest: Stored | None = None, *, headers_only: bool = False
    ) -> AsyncIterator[Stored]:
        """Yield the messages stored on a subject by now, from ``start_sequence`` on, the oldest first.

        Those that are lost meanwhile are left out. ``newest``: the last one, where it was read before. ``headers_only``:
        without their data.
        """
        newest = newest or await self.last(subject)
        if newest is not None and newest.sequence >= start_sequence:
            with contextlib.suppress(RewoundError):
                async for stored in self.pull([subject], start_sequence, newest.sequence, newest, headers_only=headers_only):
                    yield stored

    async def from_first(self, subject: str, start_sequence: int = 1) -> AsyncIterator[Stored]:
        """Yield messages as :meth:`by_now`, for a reader who rarely needs more than the first: it costs no more than itself."""
        first = await self.transport.first(self.subjects.log_stream, subject, start_sequence)
        if first is not None:
            yield first
            async for stored in self.by_now(subject, first.sequence + 1):
                yield stored

    async def behind(self, subject: str, sequence: int, newest: int) -> AsyncIterator[Stored]:
        """Yield the messages on a subject that stand behind ``sequence``, up to and with ``newest``, the oldest first.

        Raises (while iterating):
            FenceError: they are too many to look at (:data:`MOST_BEHIND`), or the stream has lost some of them.
            AppendUncertainError: the server is silent.
        """
        messages = size_bytes = 0
        if newest <= sequence:
            return
        try:
            async for stored in self.pull([subject], sequence + 1, newest):
                messages, size_bytes = messages + 1, size_bytes + len(stored.data)
                if messages > MOST_BEHIND or size_bytes > MOST_BEHIND_BYTES:
                    raise FenceError(f"{subject}: more than {messages - 1} messages or {size_bytes} bytes after {sequence}")
                yield stored
        except RewoundError as error:
            raise FenceError(f"{subject}: {error}") from None

    def decode(self, message: Stored) -> EntryHead | CommitNotice | Claim:
        """Decode a head, a notice or, in a run with regions, a claim among a fragment's entries.

        Raises:
            MessageError: it is none of them.
        """
        if subjects.is_commit_notice(message.subject):
            return _of_subject(message, framing.unpack(message.data, CommitNotice, self.run)[0])
        if self.regions and framing.kind_of(message.data) == Claim.kind:
            return _of_subject(message, framing.unpack(message.data, Claim, self.run)[0])
        return self.head(message)

    def head(self, message: Stored) -> EntryHead:
        """Decode the head of an entry of this run.

        Raises:
            MessageError: it is none.
        """
        head = decode_head(message, self.run)
        refused = self._refused_bits.get(head.record.bits)
        if refused is not None:
            # members without this feature skip this entry, so all members skip it
            raise FormatError(
                f"{message.subject}: an entry with bits = {head.record.bits}, in a run that does not require {refused!r}"
            )
        return head

    def most_body_bytes(self, fragment: int) -> int:
        """Return the most bytes that the zstd frame of an entry may have; a rollback's is the largest."""
        values = (1 + self.optimizers[fragment].moments) * self.map.fragments[fragment].size
        return codec.packed_limit(4 * values + BLOCK * 8)

    async def open(self, packed: Packed) -> NDArray[np.uint8] | None:
        """Return an entry's uncompressed body, checked: uint8 [quantised bytes]; None if it has none.

        Raises:
            FormatError, HashError, NonFiniteError: it does not have the size, hash or values that the entry states.
        """
        record = packed.record
        if record.body is None:
            return None
        what = f"fragment {record.fragment}, version {record.version}"
        size, moments = self.map.fragments[record.fragment].size, self.optimizers[record.fragment].moments
        values = fold.entry_values(record, size, moments)
        work = partial(open_quantised, record.body, packed.inline, packed.parts, values, record.bits, what)
        return await computed(values, work)

    async def parts(
        self,
        head: str,
        body: Body,
        what: str,
        head_sequence: int,
        stream: str | None = None,
        wanted: range | None = None,
    ) -> list[bytes]:
        """Read the parts of a body whose head was stored on subject ``head``, at ``head_sequence``: all, or those ``wanted``.

        A part is the last message before the head that can be it: nothing that anybody stores later changes what is read.

        Raises:
            FormatError: one is missing.
        """
        indexes = range(body.parts) if wanted is None else wanted

        async def piece(number: int) -> bytes:
            index = indexes[number]
            part = await self._part(head, body.attempt, index, head_sequence, stream or self.subjects.log_stream)
            if part is None:
                raise FormatError(f"{what}: part {index + 1} of {body.parts} is missing")
            return part.data[ATTEMPT_BYTES:]

        return await self._prefetcher.fetch(len(indexes), piece)

    async def _part(self, head: str, attempt: bytes, index: int, head_sequence: int, stream: str) -> Stored | None:
        def fits(stored: Stored | None) -> bool:
            return stored is not None and stored.sequence < head_sequence and is_part(stored.data, attempt)

        subject = subjects.log_part(head, attempt, index)
        newest = await self.transport.last(stream, subject)
        if newest is None or fits(newest):
            return newest
        found, stored = None, await self.transport.first(stream, subject, 1)
        while stored is not None and stored.sequence < head_sequence:
            found = stored if fits(stored) else found
            stored = await self.transport.first(stream, subject, stored.sequence + 1)
        return found


def decode_head(message: Stored, run: bytes) -> EntryHead:
    """Decode the head of an entry, of a run with any features.

    Raises:
        MessageError: it is none.
    """
    record, entry_hash, inline = framing.unpack(message.data, Record, run)
    return EntryHead(_of_subject(message, record), entry_hash, message.sequence, inline)


def decode_keyframe(message: Stored, run: bytes) -> tuple[Keyframe, bytes]:
    """Decode the head of a keyframe: the keyframe, and its body, or the beginning of it, where the head carries it.

    Raises:
        MessageError: it is none.
    """
    keyframe, _, inline = framing.unpack(message.data, Keyframe, run)
    return _of_subject(message, keyframe), inline


def _of_subject(message: Stored, found: Of) -> Of:
    fragment = subjects.fragment_of(message.subject)
    if found.fragment != fragment:
        raise FormatError(f"{found.kind} of fragment {found.fragment} came as one of fragment {fragment}")
    return found


def open_quantised(body: Body, inline: bytes, pieces: Sequence[bytes], values: int, bits: int, what: str) -> NDArray[np.uint8]:
    """Return a body of ``values`` quantised values, uint8 [quantised bytes], sizes, hash and values checked.

    Raises:
        FormatError, HashError: as :func:`open_body`.
        NonFiniteError: a value would not be finite.
    """
    raw = open_body(body, inline, pieces, quantise.body_bytes(values, bits), what)
    quantise.validate(raw, values, bits)
    return raw


def open_body(body: Body, inline: bytes, pieces: Sequence[bytes], raw_bytes: int, what: str) -> NDArray[np.uint8]:
    """Return the uncompressed bytes of a body, uint8 [raw_bytes], sizes and hash checked.

    Raises:
        FormatError: sizes do not fit, or the zstd frame is damaged.
        HashError: the content does not have its hash.
    """
    check_body_size(body, codec.packed_limit(raw_bytes), what)
    raw = codec.unpack(body_pieces(body, inline, pieces, what), raw_bytes)
    if codec.content_hash(raw) != body.content_hash:
        raise HashError(f"{what}: the body's content does not have the hash that its head states")
    return raw
