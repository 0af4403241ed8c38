"""Appending to a log: entries, keyframes, the genesis record; and dropping the part before an entry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from diloco.core.log import fold
from diloco.core.log.chain import NO_ENTRY, Chain
from diloco.core.log.fold import Replica
from diloco.core.tensors import codec, outer
from diloco.errors import AppendUncertainError, FenceError
from diloco.log.stream import LogStream
from diloco.process import observe
from diloco.transport import Fence
from diloco.wire import framing, subjects
from diloco.wire.body import ATTEMPT_BYTES, describe_body
from diloco.wire.entries import Genesis, Keyframe, Record

APPEND_TIMEOUT_S = 10.0  # the parts of a large keyframe cross a thin link in less
READ_BACK_RETRY_S = 0.2  # each attempt has waited for the server by itself


class Writer:
    """Appends to one log stream, each time until it is known whether it was stored."""

    def __init__(self, stream: LogStream) -> None:
        self.stream = stream

    async def found(
        self,
        founder: str,
        settings_digest: bytes,
        thetas: AsyncIterable[NDArray[np.float32]],
        decide: Callable[[bytes], Awaitable[bool]] | None = None,
    ) -> None:
        """Store version 0 of every fragment, float32 [size] each, and then genesis; succeed too if another process has.

        ``thetas`` gives one after another, and none is kept. Version 0 is fenced by genesis: a founder that comes late would
        store it behind the keyframes of a run under way, and hide them. ``decide`` says whether a genesis record is the run's.
        """
        try:
            hashes: list[bytes] = []
            async for theta in thetas:
                hashes.append(await self.append_first(len(hashes), theta))
            await self.conclude(founder, settings_digest, hashes, decide)
        except FenceError:
            return

    async def append_first(
        self, fragment: int, theta: NDArray[np.float32], momentum: NDArray[np.float32] | None = None
    ) -> bytes:
        """Store version 0 of a fragment before genesis, float32 [size]; return its state hash.

        ``momentum``: float32 [moments * size]; None for zeros.

        Raises:
            FenceError: there is a genesis record.
        """
        optimizer = self.stream.optimizers[fragment]
        if momentum is None:
            momentum = np.zeros(optimizer.moments * theta.size, np.float32)
        chain = Chain(
            fragment=fragment, version=0, epoch=0, head=NO_ENTRY, sequence=0, state_hash=outer.state_hash(theta, momentum)
        )
        await self.append_keyframe(Replica(chain, theta, momentum, optimizer), None, Fence(self.stream.subjects.genesis, 0))
        return chain.state_hash

    async def conclude(
        self,
        founder: str,
        settings_digest: bytes,
        hashes: Sequence[bytes],
        decide: Callable[[bytes], Awaitable[bool]] | None = None,
    ) -> None:
        """Store the genesis record of versions 0 that are all stored, by their state ``hashes``, unless ``decide`` says no.

        Raises:
            FenceError: another one is stored.
        """
        genesis = Genesis(founder, settings_digest, self.stream.map.digest, list(hashes), self.stream.transport.wall_s())
        frame = framing.pack(genesis, self.stream.run)
        if decide is None or await decide(frame):
            await self.append_genesis(frame)

    async def append_genesis(self, frame: bytes) -> None:
        """Store the genesis record; all keyframes of version 0 must be there.

        Raises:
            FenceError: another one is stored.
        """
        await self.append(self.stream.subjects.genesis, frame, [], b"", Fence(self.stream.subjects.genesis, 0))

    async def append_record(self, record: Record, inline: bytes, parts: Sequence[bytes], expected_sequence: int) -> int:
        """Append an entry behind the head at ``expected_sequence``; return its stream sequence.

        Raises:
            FenceError: the head is another one.
            StorageFullError: nothing was stored.
        """
        head = self.stream.subjects.record(record.fragment)
        frame = framing.pack(record, self.stream.run, inline)
        attempt = record.body.attempt if record.body else b""
        return await self.append(head, frame, parts, attempt, Fence(head, expected_sequence))

    async def append_keyframe(self, replica: Replica, residual: NDArray[np.float32] | None, fence: Fence | None) -> int:
        """Append a keyframe of a replica, with its residual, float32 [size] or None; return its head's stream sequence.

        Raises:
            FenceError: the fragment's log went on.
            StorageFullError: nothing was stored.
            FormatError: its readers could not decode it; nothing was stored.
        """
        chain = replica.chain
        raw = await asyncio.to_thread(fold.keyframe_body, replica, residual)
        packed = await asyncio.to_thread(codec.pack, raw, -1)
        body, inline, parts = describe_body(packed, codec.content_hash(raw), self.stream.transport.random_bytes(ATTEMPT_BYTES))
        keyframe = Keyframe(
            fragment=chain.fragment,
            version=chain.version,
            epoch=chain.epoch,
            entry_hash=chain.head,
            entry_sequence=chain.sequence,
            tokens_merged=chain.tokens_merged,
            tokens_lost=chain.tokens_lost,
            cursors=chain.keyframe_cursors(),
            ends=chain.keyframe_ends(),
            state_hash=chain.state_hash,
            closing=chain.closed,
            body=body,
            rolled_back=chain.rolled_back,
        )
        head, frame = self.stream.subjects.keyframe(chain.fragment), framing.pack(keyframe, self.stream.run, inline)
        framing.unpack(frame, Keyframe, self.stream.run)
        return await self.append(head, frame, parts, body.attempt, fence)

    async def purge_below(self, fragment: int, entry_sequence: int) -> None:
        """Drop the part of a fragment's log that stands before one of its entries.

        The parts of a keyframe stand before its head and after the entry that it was made of: with that entry they stay.
        """
        names = self.stream.subjects
        for tree in (names.record_tree(fragment), names.keyframe_tree(fragment)):
            await self.stream.transport.purge(names.log_stream, tree, entry_sequence)

    async def append(
        self, head: str, frame: bytes, parts: Sequence[bytes], attempt: bytes, fence: Fence | None, stream: str | None = None
    ) -> int:
        """Append until it is known whether it was stored: look for it after an uncertain outcome.

        Others may have stored anything behind it, so that all is looked at that stands behind the fence in the log.
        """
        identifier = self.stream.transport.random_bytes(8).hex()
        behind = None  # the message behind which it may have been stored, with others behind it
        while True:
            try:
                sequence = await self.stream.transport.append(
                    head,
                    frame,
                    parts=parts,
                    part_subject=lambda index: subjects.log_part(head, attempt, index),
                    message_id=identifier,
                    fence=fence,
                    timeout_s=APPEND_TIMEOUT_S,
                )
                return sequence or await self._found(head, frame, behind, stream) or 0
            except (AppendUncertainError, FenceError) as error:
                if fence is not None and stream is None and isinstance(error, AppendUncertainError):
                    behind = fence.expected_sequence
                found = await self._found(head, frame, behind, stream)
                if found is not None:
                    return found
                if isinstance(error, FenceError):
                    raise
                # a server whose disk is full answers nothing at all: say that there is something to look at
                observe.log.warning("append_retried", subject=head, reason=str(error))

    async def _found(self, head: str, frame: bytes, behind: int | None, stream: str | None) -> int | None:
        """Return the sequence of a frame on ``head``: the last message there, or if that is another one, one after ``behind``.

        None: it is not there, or too much stands behind it.
        """
        while True:
            try:
                newest = await self.stream.transport.last(stream or self.stream.subjects.log_stream, head)
                if newest is None or newest.data == frame:
                    return None if newest is None else newest.sequence
                if behind is None:
                    return None
                with contextlib.suppress(FenceError):
                    async for stored in self.stream.behind(head, behind, newest.sequence):
                        if stored.data == frame:
                            return stored.sequence
                return None
            except AppendUncertainError:
                await asyncio.sleep(READ_BACK_RETRY_S)
