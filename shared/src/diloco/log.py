"""The durable log: appending records, keyframes and genesis; loading a fragment; following entries.

The only place that knows how log messages lie in the stream. Everything that comes out of it has been checked: frames,
hashes, bounds, bodies. Whether an entry *follows* is the chain's to say (:mod:`diloco.core.chain`), by whoever folds it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco import observe
from diloco.core import codec, fold, outer, quantise
from diloco.core.chain import NO_ENTRY, Chain
from diloco.core.fold import Replica
from diloco.core.fragments import FragmentMap
from diloco.core.quorum import Tip, Undecided
from diloco.errors import (
    AppendUncertainError,
    BrokerError,
    ChainError,
    FenceError,
    FormatError,
    HashError,
    MessageError,
    RewoundError,
    RunError,
)
from diloco.settings import RunSettings
from diloco.transport import Fence, Stored, Transport
from diloco.wire import messages, subjects
from diloco.wire.assemble import Parts, part_index
from diloco.wire.messages import Body, Claim, Combined, Genesis, Keyframe, Notice, Offer, Record
from diloco.wire.subjects import Subjects

if TYPE_CHECKING:
    from diloco.membership import Run

APPEND_TIMEOUT_S = 10.0
LOOK_S = 2.0  # that a message which does not come is still there

Archived = TypeVar("Archived", Offer, Combined)


@dataclass(frozen=True)
class Packed:
    """One log entry as it travels, its body not looked into."""

    record: Record
    check: bytes
    sequence: int
    inline: bytes
    parts: Sequence[bytes]  # of the body, without their attempt; None of them where it is in the head

    @property
    def previous(self) -> bytes:
        return self.record.previous

    @property
    def size_bytes(self) -> int:
        """Of head and parts as stored, nearly."""
        return self.record.body.size_bytes if self.record.body else 0


@dataclass(frozen=True)
class Entry:
    """One log entry that is committed: checked by itself, not yet against its chain."""

    record: Record
    check: bytes
    sequence: int
    body: NDArray[np.uint8] | None
    size_bytes: int  # of the body as stored
    known_sequence: int  # of the message that says that it is committed: the entry itself, or in a run with regions a notice


@dataclass(frozen=True)
class Loaded:
    """A fragment as a keyframe has it: the newest that is whole."""

    replica: Replica
    residual: NDArray[np.float32]
    keyframe_sequence: int
    refused: tuple[int, ...] = ()  # sequences of newer keyframes, which are not whole


class Log:
    """One run's log stream, seen through one service's transport.

    In a run with regions it is one of several, each in a region of its own (:mod:`diloco.core.quorum`).
    """

    def __init__(
        self, transport: Transport, run_name: str, run: bytes, fragment_map: FragmentMap, settings: RunSettings
    ) -> None:
        self.transport, self.run, self.map, self.regions = transport, run, fragment_map, bool(settings.regions.names)
        self._optimizers = [outer.optimizer(settings, fragment) for fragment in fragment_map.fragments]
        self.subjects = Subjects(run_name)
        self._named: set[int] = set()  # sequences of keyframes whose damage was logged

    async def genesis(self) -> tuple[Genesis, bytes] | None:
        """The genesis record and its check, or None before it."""
        stored = await self.transport.last(self.subjects.log_stream, self.subjects.genesis)
        if stored is None:
            return None
        genesis, check, _ = messages.unpack(stored.data, Genesis, self.run)
        if genesis.map_digest != self.map.digest or len(genesis.fragments) != len(self.map.fragments):
            raise RunError(f"run {self.subjects.run!r}: its genesis record belongs to another fragment map")
        return genesis, check

    async def found(
        self,
        founder: str,
        settings_digest: bytes,
        thetas: Sequence[NDArray[np.float32]],
        decide: Callable[[bytes], Awaitable[bool]] | None = None,
    ) -> None:
        """Publish version 0 of every fragment and then genesis; somebody else having done so is success too.

        Version 0 is fenced by genesis too: a founder that comes late would put it behind the keyframes of a run under way, and
        hide them. ``decide`` is asked whether the genesis record that it is given is the run's, where there are several logs.
        """
        hashes: list[bytes] = []
        fence = Fence(self.subjects.genesis, 0)
        try:
            for fragment, theta in zip(self.map.fragments, thetas, strict=True):
                optimizer = self._optimizers[fragment.index]
                momentum = np.zeros(optimizer.moments * theta.size, np.float32)
                chain = Chain(fragment.index, 0, 0, NO_ENTRY, 0, outer.state_hash(theta, momentum))
                await self.append_keyframe(Replica(chain, theta, momentum, optimizer), None, fence)
                hashes.append(chain.state_hash)
            genesis = Genesis(founder, settings_digest, self.map.digest, hashes, self.transport.wall_s())
            frame = messages.pack(genesis, self.run)
            if decide is None or await decide(frame):
                await self.append_genesis(frame)
        except FenceError:
            return

    async def append_genesis(self, frame: bytes) -> None:
        """Store the genesis record, all keyframes of version 0 being there.

        Raises:
            FenceError: there is another one.
        """
        await self._append(self.subjects.genesis, frame, [], b"", Fence(self.subjects.genesis, 0))

    async def load(self, fragment: int, genesis: Genesis, genesis_check: bytes) -> Loaded:
        """The fragment from its newest whole keyframe after genesis, or from version 0.

        A keyframe that is damaged, or misses a part, is named in the log, and the one before it serves: as long as the entries
        after that one are all there.

        Raises:
            RunError: there is none that serves; what is wrong with each is named.
        """
        while True:
            newest = await self.transport.last(self.subjects.log_stream, self.subjects.keyframe(fragment))
            loaded, faults = await self._load_newest(fragment, newest, genesis, genesis_check)
            if not faults:
                assert loaded is not None
                return loaded
            again = await self.transport.last(self.subjects.log_stream, self.subjects.keyframe(fragment))
            if newest is None or again is None or again.sequence == newest.sequence:
                break
            # they may have been purged while they were read
        for sequence, reason in faults.items():
            if sequence not in self._named:
                observe.log.warning("keyframe_refused", fragment=fragment, sequence=sequence, reason=reason)
            self._named.add(sequence)
        if loaded is None:
            raise RunError(
                f"run {self.subjects.run!r}: fragment {fragment} has no keyframe that can be loaded: "
                f"{'; '.join(faults.values())}; go on from a checkpoint (diloco up --resume)"
            )
        return replace(loaded, refused=tuple(faults))

    async def _load_newest(
        self, fragment: int, newest: Stored | None, genesis: Genesis, genesis_check: bytes
    ) -> tuple[Loaded | None, dict[int, str]]:
        """The newest keyframe that serves, and what is wrong with those after it, by stream sequence."""
        faults: dict[int, str] = {}
        async for stored in self._from_newest(fragment, newest):
            try:
                keyframe, _, inline = messages.unpack(stored.data, Keyframe, self.run)
                if keyframe.entry_hash == NO_ENTRY:
                    break
                chain = Chain.from_keyframe(keyframe)
                if not await self.holds(chain):  # purged, or lost before one who did not know it yet stored the keyframe
                    raise FormatError(
                        f"fragment {fragment}, keyframe of version {keyframe.version}: what follows it was purged, or lost"
                    )
                return await self._load(keyframe, chain, inline, stored.sequence), faults
            except MessageError as error:
                faults[stored.sequence] = str(error)
        try:
            first = await self.load_first(fragment, genesis, genesis_check)
            if faults and not await self._begins_with(fragment, genesis_check):
                raise FormatError(f"fragment {fragment}, keyframe of version 0: what follows it was purged")
            return first, faults
        except (MessageError, RunError) as error:
            return None, faults | {0: str(error)}

    async def load_first(self, fragment: int, genesis: Genesis, genesis_check: bytes) -> Loaded:
        """Version 0 of the fragment.

        Raises:
            MessageError: its keyframe is damaged.
            RunError: its keyframe is gone.
        """
        chain, fault = Chain.from_genesis(fragment, genesis, genesis_check), None
        for sequence in await self.keyframe_sequences(fragment):
            stored = await self.transport.get(self.subjects.log_stream, sequence)
            if stored is None:
                continue
            try:
                keyframe, _, inline = messages.unpack(stored.data, Keyframe, self.run)
            except MessageError as error:
                fault = fault or error
                continue
            if keyframe.entry_hash != NO_ENTRY:
                break  # whoever founds stores nothing after genesis, and so after an entry
            if keyframe.state_hash == chain.state_hash:
                return await self._load(keyframe, chain, inline, stored.sequence)
        raise fault or RunError(f"run {self.subjects.run!r}: fragment {fragment} has no keyframe; the log is damaged")

    async def state_at(self, fragment: int, version: int, genesis: Genesis, genesis_check: bytes) -> Replica:
        """The fragment as it was at a version: from the newest whole keyframe at or below it, and the entries that follow.

        Raises:
            RunError: the log does not have it, or not any more; the versions that it does have are named.
        """
        loaded, oldest = None, 0
        newest = await self.transport.last(self.subjects.log_stream, self.subjects.keyframe(fragment))
        async for stored in self._from_newest(fragment, newest):
            with contextlib.suppress(MessageError):  # whoever loads the log says so
                keyframe, _, inline = messages.unpack(stored.data, Keyframe, self.run)
                chain = Chain.from_keyframe(keyframe)
                if keyframe.entry_hash == NO_ENTRY or not await self.holds(chain):
                    continue
                oldest = keyframe.version
                if oldest <= version:
                    loaded = await self._load(keyframe, chain, inline, stored.sequence)
                    break
        with contextlib.suppress(MessageError):
            if loaded is None and await self._begins_with(fragment, genesis_check):
                loaded, oldest = await self.load_first(fragment, genesis, genesis_check), 0
        end = await self.end_sequence(fragment)
        replica = loaded.replica if loaded else None
        if replica is not None and replica.chain.version < version and replica.chain.sequence < end:
            async for entry in self.follow([fragment], replica.chain.sequence + 1, lambda _, __: None, end):
                try:
                    await asyncio.to_thread(replica.fold, entry.record, entry.check, entry.sequence, entry.body)
                except ChainError:
                    continue  # passed over by everybody
                except HashError as error:
                    raise RunError(f"run {self.subjects.run!r}: {error}") from None
                if replica.chain.version == version:
                    break
        if replica is None or replica.chain.version != version:
            last = replica.chain.version if replica else "the newest"
            raise RunError(
                f"run {self.subjects.run!r}, fragment {fragment}: version {version} is not in the log, which has those from "
                f"{oldest} to {last}; how far back it goes is set by log.keep_keyframes and log.keep_bytes"
            )
        return replica

    async def keyframes(self, fragment: int, refused: Callable[[int, MessageError], None]) -> AsyncIterator[Loaded]:
        """All of the fragment's keyframes after genesis that are stored by now, the oldest first.

        What cannot be one is told to ``refused`` (with its stream sequence) and passed over.
        """
        head = self.subjects.keyframe(fragment)
        newest = await self.transport.last(self.subjects.log_stream, head)
        if newest is None:
            return
        async for stored in self.transport.pull(self.subjects.log_stream, [head], 1):
            try:
                keyframe, _, inline = messages.unpack(stored.data, Keyframe, self.run)
                if keyframe.entry_hash != NO_ENTRY:
                    yield await self._load(keyframe, Chain.from_keyframe(keyframe), inline, stored.sequence)
            except MessageError as error:
                refused(stored.sequence, error)
            if stored.sequence >= newest.sequence:
                return

    async def newest_keyframe(self, fragment: int) -> tuple[Keyframe, int] | None:
        """The newest keyframe after genesis whose head is whole, without its body, and its head's stream sequence; or None."""
        newest = await self.transport.last(self.subjects.log_stream, self.subjects.keyframe(fragment))
        async for stored in self._from_newest(fragment, newest):
            with contextlib.suppress(MessageError):  # whoever loads it says so
                keyframe, _, _ = messages.unpack(stored.data, Keyframe, self.run)
                return None if keyframe.entry_hash == NO_ENTRY else (keyframe, stored.sequence)
        return None

    async def _from_newest(self, fragment: int, newest: Stored | None) -> AsyncIterator[Stored]:
        """The newest head of a fragment's keyframes, and those before it, which are looked for only when asked for."""
        if newest is None:
            return
        yield newest
        for sequence in reversed(await self.keyframe_sequences(fragment)):
            older = await self.transport.get(self.subjects.log_stream, sequence) if sequence < newest.sequence else None
            if older is not None:
                yield older

    async def _begins_with(self, fragment: int, genesis_check: bytes) -> bool:
        """Whether the log still has the fragment's first entry, or never had any."""
        newest = await self.head_sequence(fragment)
        if not newest:
            return True
        async for stored in self.transport.pull(self.subjects.log_stream, [self.subjects.record(fragment)], 1):
            with contextlib.suppress(MessageError):  # in a run with regions claims stand before it
                return messages.unpack(stored.data, Record, self.run)[0].previous == genesis_check
            if stored.sequence >= newest:
                break
        return False

    async def holds(self, chain: Chain) -> bool:
        """Whether the log still has the chain's head, and with this state after it.

        It may be purged, or lost with a server's last unsynced writes; or a keyframe lies about it.
        """
        if not chain.sequence:
            return True
        stored = await self.transport.get(self.subjects.log_stream, chain.sequence)
        if stored is None:
            return False
        try:
            record, check, _ = messages.unpack(stored.data, Record, self.run)
        except MessageError:
            return False
        return (check, record.state_hash) == (chain.head, chain.state_hash)

    async def follow(
        self,
        fragments: Sequence[int],
        start_sequence: int,
        refused: Callable[[int, MessageError], None],
        stop_sequence: int | None = None,
    ) -> AsyncIterator[Entry]:
        """Committed entries of ``fragments`` from ``start_sequence`` on, in order: for ever, or up to and with a message.

        What cannot be an entry is told to ``refused`` (with its stream sequence) and passed over.

        Raises (while iterating):
            RewoundError: the stream lost what was read, or the message to stop at.
        """
        undecided: dict[int, Undecided[Packed]] = {fragment: Undecided() for fragment in fragments}
        async for sequence, message in self._read(fragments, start_sequence, refused, stop_sequence):
            if isinstance(message, Packed) and self.regions:
                undecided[message.record.fragment].add(message)
                continue
            known = undecided[message.fragment].commit(message.check) if isinstance(message, Notice) else [message]
            for packed in known:
                try:
                    body = await self.open_record(packed)
                except MessageError as error:
                    refused(packed.sequence, error)
                else:
                    yield Entry(packed.record, packed.check, packed.sequence, body, packed.size_bytes, sequence)

    async def stored(self, fragment: int, start_sequence: int, stop_sequence: int) -> AsyncIterator[Packed]:
        """A fragment's entries as they are stored, committed or not, between two messages of the stream.

        Raises (while iterating):
            MessageError: one of them is damaged.
            RewoundError: the stream lost the message to stop at.
        """

        def refused(sequence: int, error: MessageError) -> None:
            raise error

        async for _, message in self._read([fragment], start_sequence, refused, stop_sequence):
            if isinstance(message, Packed):
                yield message

    async def _read(
        self,
        fragments: Sequence[int],
        start_sequence: int,
        refused: Callable[[int, MessageError], None],
        stop_sequence: int | None,
    ) -> AsyncIterator[tuple[int, Packed | Notice]]:
        """Entries with all their parts, and notices, with their own stream sequences."""
        wanted = set(fragments)
        everything = len(wanted) == len(self.map.fragments)
        filters = [self.subjects.record_tree("*")] if everything else [self.subjects.record_tree(f) for f in sorted(wanted)]
        parts = Parts()
        pulled = self.transport.pull(self.subjects.log_stream, filters, start_sequence)
        async for message in pulled if stop_sequence is None else self._until(pulled, stop_sequence):
            fragment = subjects.fragment_of(message.subject)
            if fragment is None or fragment not in wanted:
                continue
            if subjects.is_head(message.subject) or (self.regions and subjects.is_notice(message.subject)):
                try:
                    read = self._take(fragment, message, parts)
                except MessageError as error:
                    refused(message.sequence, error)
                else:
                    if read is not None:
                        yield message.sequence, read
            else:
                index = part_index(message.subject)
                if index is not None:
                    parts.add(fragment, index, message.data, self._limit(fragment))
            if stop_sequence is not None and message.sequence >= stop_sequence:
                return

    def _take(self, fragment: int, message: Stored, parts: Parts) -> Packed | Notice | None:
        """What a message beside the parts says; None of a claim, which says nothing to readers."""
        if subjects.is_notice(message.subject):
            notice, _, _ = messages.unpack(message.data, Notice, self.run)
            self._check_fragment(fragment, notice)
            return notice
        if self.regions and messages.kind_of(message.data) == Claim.kind:
            return None
        record, check, inline = messages.unpack(message.data, Record, self.run)
        self._check_fragment(fragment, record)
        pieces: list[bytes] | None = []
        if record.body is not None:
            pieces = parts.take(fragment, record.body)
        if pieces is None:
            raise FormatError(f"fragment {fragment}, version {record.version}: parts of the body are missing")
        return Packed(record, check, message.sequence, inline, pieces)

    @staticmethod
    def _check_fragment(fragment: int, message: Record | Notice | Claim) -> None:
        if message.fragment != fragment:
            raise FormatError(f"{message.kind} of fragment {message.fragment} came as one of fragment {fragment}")

    async def open_record(self, packed: Packed) -> NDArray[np.uint8] | None:
        """An entry's uncompressed body, checked; None if it has none.

        Raises:
            FormatError, HashError, NonFiniteError: it is not what the entry says.
        """
        record = packed.record
        if record.body is None:
            return None
        what = f"fragment {record.fragment}, version {record.version}"
        size, moments = self.map.fragments[record.fragment].size, self._optimizers[record.fragment].moments
        values = fold.entry_values(record, size, moments)
        raw_bytes = quantise.body_bytes(values, record.bits)
        body = await asyncio.to_thread(open_body, record.body, packed.inline, packed.parts, raw_bytes, what)
        await asyncio.to_thread(quantise.validate, body, values, record.bits)
        return body

    async def _until(self, pulled: AsyncIterator[Stored], stop_sequence: int) -> AsyncIterator[Stored]:
        """What is pulled, as long as the message to stop at is there: if it is lost meanwhile, it never comes."""
        stream, messages_ = self.subjects.log_stream, aiter(pulled)
        expected = await self.transport.get(stream, stop_sequence)
        while True:
            coming = asyncio.ensure_future(anext(messages_))
            try:
                while not (await asyncio.wait([coming], timeout=LOOK_S))[0]:
                    with contextlib.suppress(AppendUncertainError):  # the server is away
                        if expected is None or await self.transport.get(stream, stop_sequence) != expected:
                            raise RewoundError(f"stream {stream}: message {stop_sequence} is gone, up to which it is read")
                yield coming.result()
            finally:
                coming.cancel()

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
        body, inline, parts = messages.describe_body(
            packed, codec.content_hash(raw), self.transport.random_bytes(messages.ATTEMPT_BYTES)
        )
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
        head = self.subjects.keyframe(chain.fragment)
        return await self._append(head, messages.pack(keyframe, self.run, inline), parts, body.attempt, fence)

    async def purge_below(self, fragment: int, keyframe_sequence: int) -> None:
        """Drop all of the fragment's log that stands before the keyframe whose head has this stream sequence.

        A keyframe's parts stand before its head and after the entry that it was made of, which therefore bounds the purge.
        Below one that is damaged nothing is dropped.
        """
        stream = self.subjects.log_stream
        stored = await self.transport.get(stream, keyframe_sequence)
        if stored is None:
            return
        try:
            keyframe, _, _ = messages.unpack(stored.data, Keyframe, self.run)
        except MessageError:
            return
        if keyframe.entry_sequence:
            tree = self.subjects.keyframe(fragment).removesuffix("head") + ">"
            await self.transport.purge(stream, self.subjects.record_tree(fragment), keyframe.entry_sequence)
            await self.transport.purge(stream, tree, keyframe.entry_sequence)

    async def keyframe_sequences(self, fragment: int) -> list[int]:
        """Stream sequences of the fragment's keyframes, the oldest first."""
        head = self.subjects.keyframe(fragment)
        newest = await self.transport.last(self.subjects.log_stream, head)
        sequences: list[int] = []
        if newest is not None:
            async for stored in self.transport.pull(self.subjects.log_stream, [head], 1):
                sequences.append(stored.sequence)
                if stored.sequence >= newest.sequence:
                    break
        return sequences

    async def archive(self, offer: Offer | Combined, raw: NDArray[np.uint8]) -> None:
        """Keep an offer that is about to be merged; one that is kept already is as good.

        Raises:
            StorageFullError: the archive is full.
        """
        head = self._archived(offer)
        packed = await asyncio.to_thread(codec.pack, raw, -1)
        attempt = self.transport.random_bytes(messages.ATTEMPT_BYTES)
        body, inline, parts = messages.describe_body(packed, offer.body.content_hash, attempt)
        frame = messages.pack(msgspec.structs.replace(offer, body=body), self.run, inline)
        try:
            await self._append(head, frame, parts, attempt, Fence(head, 0), self.subjects.archive_stream)
        except FenceError:
            return  # the merge was begun before, by this owner or the one before it

    def _archived(self, offer: Offer | Combined) -> str:
        """Where an offer is kept."""
        if isinstance(offer, Combined):
            return self.subjects.archived_combined(offer.fragment, offer.syncer, offer.incarnation, offer.number)
        return self.subjects.archived(offer.fragment, offer.learner, offer.incarnation, offer.number)

    async def archived(
        self, fragment: int, learner: str, incarnation: int, number: int
    ) -> tuple[Offer, NDArray[np.uint8]] | None:
        """A merged offer and its uncompressed body, or None if it was not kept.

        Raises:
            MessageError: it is damaged.
            BrokerError: the run has no archive.
        """
        head = self.subjects.archived(fragment, learner, incarnation, number)
        return await self._read_archived(Offer, fragment, head, f"fragment {fragment}, archived offer {number} of {learner}")

    async def archived_combined(
        self, fragment: int, syncer: str, incarnation: int, number: int
    ) -> tuple[Combined, NDArray[np.uint8]] | None:
        """A merged combined offer, as :meth:`archived` reads one of a learner."""
        head = self.subjects.archived_combined(fragment, syncer, incarnation, number)
        what = f"fragment {fragment}, archived combined offer {number} of {syncer}"
        return await self._read_archived(Combined, fragment, head, what)

    async def _read_archived(
        self, cls: type[Archived], fragment: int, head: str, what: str
    ) -> tuple[Archived, NDArray[np.uint8]] | None:
        stream = self.subjects.archive_stream
        stored = await self.transport.last(stream, head)
        if stored is None:
            return None
        offer, _, inline = messages.unpack(stored.data, cls, self.run)
        if self._archived(offer) != head:
            raise FormatError(f"{what}: another one stands there, which would be at {self._archived(offer)}")
        size = self.map.fragments[fragment].size
        raw_bytes = quantise.body_bytes(size, offer.bits)
        messages.check_body_size(offer.body, codec.packed_limit(raw_bytes), what)
        pieces = await self._parts(stream, head, offer.body, what)
        raw = await asyncio.to_thread(open_body, offer.body, inline, pieces, raw_bytes, what)
        await asyncio.to_thread(quantise.validate, raw, size, offer.bits)
        return offer, raw

    async def closed(self) -> bool:
        """Whether every fragment's newest entry closes its log, as far as can be told."""
        for fragment in self.map.fragments:
            try:
                stored = await self.transport.last(self.subjects.log_stream, self.subjects.record(fragment.index))
                if stored is None or not messages.unpack(stored.data, Record, self.run)[0].closing:
                    return False
            except (MessageError, BrokerError):
                return False
        return True

    async def head_sequence(self, fragment: int) -> int:
        """Stream sequence of the last message on the fragment's head subject, which a fence names; 0 if there is none."""
        stored = await self.transport.last(self.subjects.log_stream, self.subjects.record(fragment))
        return stored.sequence if stored else 0

    async def end_sequence(self, fragment: int) -> int:
        """Stream sequence up to which the fragment's entries are to be read; 0 if there is nothing."""
        subject = self.subjects.notice(fragment) if self.regions else self.subjects.record(fragment)
        stored = await self.transport.last(self.subjects.log_stream, subject)
        return stored.sequence if stored else 0

    # ---- one of several regions' logs

    async def tip(self, fragment: int, genesis_check: bytes) -> tuple[Tip, int, int]:
        """The last entry, committed or not; the highest epoch that wrote or claimed; sequence of the last head message."""
        stored = await self.transport.last(self.subjects.log_stream, self.subjects.record(fragment))
        if stored is None:
            return Tip(0, 0, False, genesis_check, 0), 0, 0
        try:
            return *self._tip(fragment, stored), stored.sequence
        except MessageError as error:
            observe.log.warning("entry_refused", fragment=fragment, sequence=stored.sequence, reason=str(error))
        tip, epoch = Tip(0, 0, False, genesis_check, 0), 0
        async for older in self.transport.pull(self.subjects.log_stream, [self.subjects.record(fragment)], 1):
            with contextlib.suppress(MessageError):
                tip, epoch = self._tip(fragment, older)
            if older.sequence >= stored.sequence:
                break
        return tip, epoch, stored.sequence

    def _tip(self, fragment: int, stored: Stored) -> tuple[Tip, int]:
        if messages.kind_of(stored.data) == Claim.kind:
            claim, _, _ = messages.unpack(stored.data, Claim, self.run)
            self._check_fragment(fragment, claim)
            entry = claim.entry_epoch, claim.entry_version, claim.entry_closing, claim.entry_check, claim.entry_sequence
            return Tip(*entry), claim.epoch
        record, check, _ = messages.unpack(stored.data, Record, self.run)
        self._check_fragment(fragment, record)
        return Tip(record.epoch, record.version, record.closing, check, stored.sequence), record.epoch

    async def claim(self, fragment: int, epoch: int, syncer: str, tip: Tip, head_sequence: int) -> int:
        """Claim the fragment in this region, behind ``head_sequence``; the claim's own sequence, the fence from now on.

        Raises:
            FenceError: somebody else has appended.
            StorageFullError: nothing was stored.
        """
        head = self.subjects.record(fragment)
        claim = Claim(fragment, epoch, syncer, tip.epoch, tip.version, tip.closing, tip.check, tip.sequence)
        return await self._append(head, messages.pack(claim, self.run), [], b"", Fence(head, head_sequence))

    async def notice(self, fragment: int, version: int, epoch: int, check: bytes, sequence: int) -> None:
        """Say that an entry, stored here with that sequence, is committed. Said twice it is said once.

        Raises:
            StorageFullError: nothing was stored.
        """
        frame = messages.pack(Notice(fragment, version, epoch, check, sequence), self.run)
        await self._append(self.subjects.notice(fragment), frame, [], b"", None)

    async def last_notice(self, fragment: int) -> Notice | None:
        """The newest notice, if there is any."""
        stored = await self.transport.last(self.subjects.log_stream, self.subjects.notice(fragment))
        return messages.unpack(stored.data, Notice, self.run)[0] if stored else None

    async def before(self, fragment: int, version: int) -> int:
        """A stream sequence after which all entries of a committed version, and of later ones, are stored here.

        Raises:
            MessageError: a notice is damaged.
        """
        subject, sequence = self.subjects.notice(fragment), 0
        newest = await self.transport.last(self.subjects.log_stream, subject)
        if newest is None:
            return 0
        async for stored in self.transport.pull(self.subjects.log_stream, [subject], 1):
            notice, _, _ = messages.unpack(stored.data, Notice, self.run)
            if notice.version >= version:
                break
            sequence = notice.sequence
            if stored.sequence >= newest.sequence:
                break
        return sequence

    async def append_packed(self, packed: Packed, expected_sequence: int) -> int:
        """Append another region's entry here; as :meth:`append_record`."""
        body = packed.record.body
        parts = [body.attempt + part for part in packed.parts] if body else []
        return await self.append_record(packed.record, packed.inline, parts, expected_sequence)

    async def jump(self, fragment: int, to: Log, expected_sequence: int) -> Keyframe | None:
        """Give another region, whose log is too far behind to be gone on with, the newest keyframe; None if there is none.

        Before it stands the head of its entry, behind ``expected_sequence``; and a notice of that. Returns it as it is there.

        Raises:
            FenceError: somebody else has appended there.
            StorageFullError: nothing was stored.
        """
        newest = await self.newest_keyframe(fragment)
        entry = await self.transport.get(self.subjects.log_stream, newest[0].entry_sequence) if newest else None
        stored = await self.transport.get(self.subjects.log_stream, newest[1]) if newest else None
        if entry is None or stored is None:
            return None
        keyframe, _, inline = messages.unpack(stored.data, Keyframe, self.run)
        what = f"fragment {fragment}, keyframe of version {keyframe.version}"
        head = self.subjects.keyframe(fragment)
        pieces = await self._parts(self.subjects.log_stream, head, keyframe.body, what)
        record = self.subjects.record(fragment)
        sequence = await to._append(record, entry.data, [], b"", Fence(record, expected_sequence))
        there, attempt = msgspec.structs.replace(keyframe, entry_sequence=sequence), keyframe.body.attempt
        frame = messages.pack(there, self.run, inline)
        await to._append(head, frame, [attempt + piece for piece in pieces], attempt, Fence(record, sequence))
        await to.notice(fragment, there.version, there.epoch, there.entry_hash, sequence)
        return there

    async def begin_as(self, source: Log, genesis_frame: bytes) -> None:
        """Store the keyframes of version 0 that ``source`` has, unless they are here, and the genesis record that names them.

        In the place of one that ``source`` has dropped by now comes its newest one: a region may join a run that is old.
        Somebody else having done so is success too.

        Raises:
            MessageError, RunError: ``source`` does not have them all.
        """
        genesis, check, _ = messages.unpack(genesis_frame, Genesis, self.run)
        try:
            for fragment in self.map.fragments:
                if await self.newest_keyframe(fragment.index) is None:
                    await self._begin_fragment_as(source, fragment.index, genesis, check)
            await self.append_genesis(genesis_frame)
        except FenceError:
            return

    async def _begin_fragment_as(self, source: Log, fragment: int, genesis: Genesis, check: bytes) -> None:
        try:
            replica = (await source.load_first(fragment, genesis, check)).replica
        except RunError:
            if source is self or await source.jump(fragment, self, await self.head_sequence(fragment)) is None:
                raise
            return
        if source is not self:
            chain = Chain(fragment, 0, 0, NO_ENTRY, 0, replica.chain.state_hash)
            await self.append_keyframe(replace(replica, chain=chain), None, Fence(self.subjects.genesis, 0))

    async def _load(self, keyframe: Keyframe, chain: Chain, inline: bytes, sequence: int) -> Loaded:
        fragment, body = keyframe.fragment, keyframe.body
        optimizer = self._optimizers[fragment]
        raw_bytes = fold.keyframe_bytes(self.map.fragments[fragment].size, optimizer.moments)
        what = f"fragment {fragment}, keyframe of version {keyframe.version}"
        messages.check_body_size(body, codec.packed_limit(raw_bytes), what)
        head = self.subjects.keyframe(fragment)
        pieces = await self._parts(self.subjects.log_stream, head, body, what)
        raw = await asyncio.to_thread(open_body, body, inline, pieces, raw_bytes, what)
        replica, residual = await asyncio.to_thread(fold.load_keyframe, keyframe, chain, raw, optimizer)
        return Loaded(replica, residual, sequence)

    async def _parts(self, stream: str, head: str, body: Body, what: str) -> list[bytes]:
        names = [subjects.log_part(head, body.attempt, index) for index in range(body.parts)]
        stored = [await self.transport.last(stream, name) for name in names]
        pieces = [part.data[messages.ATTEMPT_BYTES :] for part in stored if part is not None]
        if len(pieces) != body.parts:
            raise FormatError(f"{what}: {body.parts - len(pieces)} of {body.parts} parts are missing")
        return pieces

    def _limit(self, fragment: int) -> int:
        """Most bytes that the zstd frame of an entry may have."""
        values = (1 + self._optimizers[fragment].moments) * self.map.fragments[fragment].size  # of a rollback, the largest
        return codec.packed_limit(4 * values + quantise.BLOCK * 8)

    async def _append(
        self, head: str, frame: bytes, parts: Sequence[bytes], attempt: bytes, fence: Fence | None, stream: str | None = None
    ) -> int:
        """Append until it is known whether it was stored; an uncertain outcome is settled by reading the head back."""
        identifier = self.transport.random_bytes(8).hex()
        while True:
            try:
                return await self.transport.append(
                    head,
                    frame,
                    parts=parts,
                    part_subject=lambda index: subjects.log_part(head, attempt, index),
                    message_id=identifier,
                    fence=fence,
                    timeout_s=APPEND_TIMEOUT_S,
                )
            except (AppendUncertainError, FenceError) as error:
                stored = await self._read_back(stream or self.subjects.log_stream, head)
                if stored is not None and stored.data == frame:
                    return stored.sequence
                if isinstance(error, FenceError):
                    raise
                # a server whose disk is full answers nothing at all: say that there is something to look at
                observe.log.warning("append_retried", subject=head, reason=str(error))

    async def _read_back(self, stream: str, head: str) -> Stored | None:
        while True:
            try:
                return await self.transport.last(stream, head)
            except AppendUncertainError:
                await asyncio.sleep(0.2)


async def heads(
    transport: Transport, run: Run, fragments: int, refused: Callable[[str, MessageError], None]
) -> AsyncIterator[Record]:
    """Committed entries of so many fragments, from the log's beginning on, for ever; their bodies are left alone.

    What cannot be an entry is told to ``refused`` with its subject.

    Raises (while iterating):
        RewoundError: the stream lost what was read.
    """
    names, undecided = Subjects(run.name), [Undecided[Packed]() for _ in range(fragments)]
    wanted = [names.record("*"), names.notice("*")] if run.regions else [names.record("*")]
    async for message in transport.pull(names.log_stream, wanted, 1):
        try:
            if subjects.is_notice(message.subject):
                notice, _, _ = messages.unpack(message.data, Notice, run.identity)
                known = undecided[notice.fragment].commit(notice.check) if notice.fragment < fragments else []
            elif run.regions and messages.kind_of(message.data) == Claim.kind:
                continue
            else:
                record, check, _ = messages.unpack(message.data, Record, run.identity)
                known = [Packed(record, check, message.sequence, b"", [])] if record.fragment < fragments else []
                if run.regions and known:
                    undecided[record.fragment].add(known.pop())
        except MessageError as error:
            refused(message.subject, error)
            continue
        for packed in known:
            yield packed.record


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
