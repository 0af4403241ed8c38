"""The durable log: appending records, keyframes and genesis; loading a fragment; following entries.

The only place that knows how log messages lie in the stream. Everything that comes out of it has been checked: frames,
hashes, bounds, bodies. Whether an entry *follows* is the chain's to say (:mod:`diloco.core.chain`), by whoever folds it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco import observe
from diloco.core import codec, fold, outer, quantise
from diloco.core.chain import NO_ENTRY, Chain
from diloco.core.fold import Replica
from diloco.core.fragments import FragmentMap
from diloco.errors import AppendUncertainError, FenceError, FormatError, HashError, MessageError, RunError
from diloco.nats import streams
from diloco.nats.append import Fence, append
from diloco.nats.connection import Link
from diloco.nats.pull import Puller
from diloco.wire import messages, subjects
from diloco.wire.assemble import Parts, part_index
from diloco.wire.messages import Body, Genesis, Keyframe, Record
from diloco.wire.subjects import Subjects

APPEND_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Entry:
    """One log entry as stored: checked by itself, not yet against its chain."""

    record: Record
    check: bytes
    sequence: int
    body: NDArray[np.uint8] | None
    size_bytes: int  # of head and parts as stored


@dataclass(frozen=True)
class Loaded:
    """A fragment as its newest keyframe has it."""

    replica: Replica
    residual: NDArray[np.float32]
    keyframe_sequence: int


class Log:
    """One run's log stream, seen through one service's connection."""

    def __init__(self, link: Link, run_name: str, run: bytes, fragment_map: FragmentMap) -> None:
        self.link, self.run, self.map = link, run, fragment_map
        self.subjects = Subjects(run_name)

    async def genesis(self) -> tuple[Genesis, bytes] | None:
        """The genesis record and its check, or None before it."""
        stored = await streams.last(self.link, self.subjects.log_stream, self.subjects.genesis)
        if stored is None:
            return None
        genesis, check, _ = messages.unpack(stored.data, Genesis, self.run)
        if genesis.map_digest != self.map.digest or len(genesis.fragments) != len(self.map.fragments):
            raise RunError(f"run {self.subjects.run!r}: its genesis record belongs to another fragment map")
        return genesis, check

    async def found(self, founder: str, settings_digest: bytes, thetas: Sequence[NDArray[np.float32]]) -> None:
        """Publish version 0 of every fragment and then genesis; somebody else having done so is success too."""
        heads: list[tuple[int, bytes]] = []
        for fragment, theta in zip(self.map.fragments, thetas, strict=True):
            momentum = np.zeros_like(theta)
            chain = Chain(fragment.index, 0, 0, NO_ENTRY, 0, outer.state_hash(theta, momentum))
            sequence = await self.append_keyframe(Replica(chain, theta, momentum), None, fence=None)
            heads.append((sequence, chain.state_hash))
        genesis = Genesis(founder, settings_digest, self.map.digest, heads, time.time())
        frame = messages.pack(genesis, self.run)
        try:
            await self._append(self.subjects.genesis, frame, [], b"", Fence(self.subjects.genesis, 0))
        except FenceError:
            return

    async def load(self, fragment: int, genesis: Genesis, genesis_check: bytes) -> Loaded:
        """The fragment from its newest keyframe after genesis, or from version 0.

        Raises:
            MessageError: the keyframe is damaged.
            RunError: a keyframe that genesis names is gone.
        """
        stored = await streams.last(self.link, self.subjects.log_stream, self.subjects.keyframe(fragment))
        if stored is not None:
            keyframe, _, inline = messages.unpack(stored.data, Keyframe, self.run)
            if keyframe.entry_hash != NO_ENTRY:
                return await self._load(keyframe, Chain.from_keyframe(keyframe), inline, stored.sequence)
        stored = await streams.get(self.link, self.subjects.log_stream, genesis.fragments[fragment][0])
        if stored is None:
            raise RunError(f"run {self.subjects.run!r}: fragment {fragment} has no keyframe; the log is damaged")
        keyframe, _, inline = messages.unpack(stored.data, Keyframe, self.run)
        chain = Chain.from_genesis(fragment, genesis, genesis_check)
        return await self._load(keyframe, chain, inline, stored.sequence)

    async def follow(
        self,
        fragments: Sequence[int],
        start_sequence: int,
        refused: Callable[[int, MessageError], None],
        stop_sequence: int | None = None,
    ) -> AsyncIterator[Entry]:
        """Entries of ``fragments`` from ``start_sequence`` on, in stream order: for ever, or up to and with a message.

        What cannot be an entry is told to ``refused`` (with its stream sequence) and passed over.
        """
        wanted = set(fragments)
        everything = len(wanted) == len(self.map.fragments)
        filters = [self.subjects.record_tree("*")] if everything else [self.subjects.record_tree(f) for f in sorted(wanted)]
        parts = Parts()
        stored_bytes: dict[int, int] = {}
        async for message in Puller(self.link, self.subjects.log_stream, filters, start_sequence):
            fragment = subjects.fragment_of(message.subject)
            if fragment is None or fragment not in wanted:
                continue
            stored_bytes[fragment] = stored_bytes.get(fragment, 0) + len(message.data)
            if not subjects.is_head(message.subject):
                index = part_index(message.subject)
                if index is not None:
                    parts.add(fragment, index, message.data, self._limit(fragment, 32))
                continue
            size_bytes = stored_bytes.pop(fragment)
            try:
                record, check, inline = messages.unpack(message.data, Record, self.run)
                body = await self._record_body(record, fragment, inline, parts)
            except MessageError as error:
                refused(message.sequence, error)
            else:
                yield Entry(record, check, message.sequence, body, size_bytes)
            if stop_sequence is not None and message.sequence >= stop_sequence:
                return

    async def _record_body(self, record: Record, fragment: int, inline: bytes, parts: Parts) -> NDArray[np.uint8] | None:
        if record.fragment != fragment:
            raise FormatError(f"record of fragment {record.fragment} came as one of fragment {fragment}")
        if record.body is None:
            return None
        what = f"fragment {fragment}, version {record.version}"
        pieces = parts.take(fragment, record.body)
        if pieces is None:
            raise FormatError(f"{what}: parts of the body are missing")
        size = self.map.fragments[fragment].size
        raw_bytes = quantise.body_bytes(size, record.bits)
        body = await asyncio.to_thread(open_body, record.body, inline, pieces, raw_bytes, what)
        await asyncio.to_thread(quantise.validate, body, size, record.bits)
        return body

    async def append_record(self, record: Record, inline: bytes, parts: Sequence[bytes], expected_sequence: int) -> int:
        """Append an entry behind the head whose stream sequence is ``expected_sequence``; returns the new head's.

        Raises:
            FenceError: the head is another one.
            StorageFullError: nothing was stored.
        """
        head = self.subjects.record(record.fragment)
        frame = messages.pack(record, self.run, inline)
        attempt = record.body.attempt if record.body else b""
        return await self._append(head, frame, parts, attempt, Fence(head, expected_sequence))

    async def append_keyframe(self, replica: Replica, residual: NDArray[np.float32] | None, fence: Fence | None) -> int:
        """Append a keyframe of the replica as it is; returns its head's stream sequence.

        Raises:
            FenceError: the fragment's log went on.
            StorageFullError: nothing was stored.
        """
        chain = replica.chain
        raw = await asyncio.to_thread(fold.keyframe_body, replica, residual)
        packed = await asyncio.to_thread(codec.pack, raw, -1)
        body, inline, parts = messages.describe_body(packed, codec.content_hash(raw), os.urandom(messages.ATTEMPT_BYTES))
        keyframe = Keyframe(
            fragment=chain.fragment,
            version=chain.version,
            epoch=chain.epoch,
            entry_hash=chain.head,
            entry_sequence=chain.sequence,
            tokens_merged=chain.tokens_merged,
            tokens_lost=chain.tokens_lost,
            cursors=chain.keyframe_cursors(),
            state_hash=chain.state_hash,
            closing=chain.closed,
            body=body,
        )
        head = self.subjects.keyframe(chain.fragment)
        return await self._append(head, messages.pack(keyframe, self.run, inline), parts, body.attempt, fence)

    async def purge_below(self, fragment: int, keyframe_sequence: int) -> None:
        """Drop all of the fragment's log that stands before the keyframe whose head has this stream sequence.

        A keyframe's parts stand before its head and after the entry that it was made of, which therefore bounds the purge.
        """
        stream = self.subjects.log_stream
        stored = await streams.get(self.link, stream, keyframe_sequence)
        if stored is None:
            return
        keyframe, _, _ = messages.unpack(stored.data, Keyframe, self.run)
        if keyframe.entry_sequence:
            tree = self.subjects.keyframe(fragment).removesuffix("head") + ">"
            await streams.purge(self.link, stream, self.subjects.record_tree(fragment), keyframe.entry_sequence)
            await streams.purge(self.link, stream, tree, keyframe.entry_sequence)

    async def head_sequence(self, fragment: int) -> int:
        """Stream sequence of the last message on the fragment's head subject; 0 if there is none."""
        stored = await streams.last(self.link, self.subjects.log_stream, self.subjects.record(fragment))
        return stored.sequence if stored else 0

    async def _load(self, keyframe: Keyframe, chain: Chain, inline: bytes, sequence: int) -> Loaded:
        fragment, body = keyframe.fragment, keyframe.body
        what = f"fragment {fragment}, keyframe of version {keyframe.version}"
        messages.check_body_size(body, self._limit(fragment, 96), what)
        head = self.subjects.keyframe(fragment)
        names = [subjects.log_part(head, body.attempt, index) for index in range(body.parts)]
        stored = [await streams.last(self.link, self.subjects.log_stream, name) for name in names]
        pieces = [part.data[messages.ATTEMPT_BYTES :] for part in stored if part is not None]
        if len(pieces) != body.parts:
            raise FormatError(f"{what}: {body.parts - len(pieces)} of {body.parts} parts are missing")
        raw_bytes = fold.keyframe_bytes(self.map.fragments[fragment].size)
        raw = await asyncio.to_thread(open_body, body, inline, pieces, raw_bytes, what)
        replica, residual = await asyncio.to_thread(fold.load_keyframe, keyframe, chain, raw)
        return Loaded(replica, residual, sequence)

    def _limit(self, fragment: int, bits: int) -> int:
        """Most bytes that a zstd frame of so many bits a parameter may have."""
        return codec.packed_limit(self.map.fragments[fragment].size * bits // 8 + quantise.BLOCK * 8)

    async def _append(self, head: str, frame: bytes, parts: Sequence[bytes], attempt: bytes, fence: Fence | None) -> int:
        """Append until it is known whether it was stored; an uncertain outcome is settled by reading the head back."""
        identifier = os.urandom(8).hex()
        while True:
            try:
                return await append(
                    self.link,
                    head,
                    frame,
                    parts=parts,
                    part_subject=lambda index: subjects.log_part(head, attempt, index),
                    message_id=identifier,
                    fence=fence,
                    timeout_s=APPEND_TIMEOUT_S,
                )
            except (AppendUncertainError, FenceError) as error:
                stored = await self._read_back(head)
                if stored is not None and stored.data == frame:
                    return stored.sequence
                if isinstance(error, FenceError):
                    raise
                # a server whose disk is full answers nothing at all: say that there is something to look at
                observe.log.warning("append_retried", subject=head, reason=str(error))

    async def _read_back(self, head: str) -> streams.Stored | None:
        while True:
            try:
                return await streams.last(self.link, self.subjects.log_stream, head)
            except AppendUncertainError:
                await asyncio.sleep(0.2)


def open_body(body: Body, inline: bytes, pieces: Sequence[bytes], raw_bytes: int, what: str) -> NDArray[np.uint8]:
    """The uncompressed bytes of a body, sizes and hash checked.

    Raises:
        FormatError: sizes do not fit, or the zstd frame is damaged.
        HashError: the content is not what its hash says.
    """
    messages.check_body_size(body, codec.packed_limit(raw_bytes), what)
    raw = codec.unpack(messages.join_parts(body, inline, pieces, what), raw_bytes)
    if codec.content_hash(raw) != body.content_hash:
        raise HashError(f"{what}: the body's content does not have the hash that its head states")
    return raw
