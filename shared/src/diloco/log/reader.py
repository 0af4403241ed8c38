"""Single things of a log: its genesis, a fragment's keyframes, its state at a version, where it ends.

All that is returned has been checked: frames, hashes, bounds, bodies. Whether an entry *follows* is checked when it is folded
(:mod:`diloco.core.log.chain`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Container
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from diloco.core.log import fold
from diloco.core.log.chain import NO_ENTRY, Chain, WrongEntries
from diloco.core.log.fold import Replica
from diloco.core.tensors import codec
from diloco.errors import BrokerError, FenceError, FormatError, HashError, MessageError, RunError
from diloco.log.entries import Entries
from diloco.log.stream import EntryHead, LogStream, Refuse, RefusedEntry, decode_keyframe, open_body, pass_over
from diloco.process import observe
from diloco.transport import Stored
from diloco.wire import framing
from diloco.wire.body import Body, check_body_size
from diloco.wire.entries import Claim, CommitNotice, Genesis, Keyframe, Record

PARTS_AT_ONCE = 64  # of a keyframe, in memory while they are decompressed: 32 MiB, twice what is on its way


@dataclass(frozen=True)
class LoadedState:
    """A fragment as the newest whole keyframe has it."""

    replica: Replica
    residual: NDArray[np.float32]  # float32 [size]; [0] if it was not asked for
    keyframe_sequence: int
    refused: tuple[int, ...] = ()  # sequences of newer keyframes, which are not whole


Room = Callable[[int], NDArray[np.uint8]]  # an array of so many bytes


def in_memory(size_bytes: int) -> NDArray[np.uint8]:
    """Return an array, uint8 [size_bytes]."""
    return np.empty(size_bytes, np.uint8)


class Reader:
    """Reads single things of one log stream."""

    def __init__(self, stream: LogStream, entries: Entries) -> None:
        self.stream, self.entries = stream, entries
        self.room_for_moments: Room = in_memory  # a command that lacks memory has a state's moments elsewhere
        self._named: set[int] = set()  # sequences of keyframes whose damage was logged

    async def genesis(self) -> tuple[Genesis, bytes] | None:
        """Return the genesis record, which is the first one stored, and its hash; None before there is one.

        Whatever stands beside it is passed over: who may found a run may store more on its subject later.

        Raises:
            MessageError: there is something else, and no genesis record.
            RunError: it belongs to another fragment map.
        """
        fault: MessageError | None = None
        async for stored in self.stream.by_now(self.stream.subjects.genesis):
            try:
                genesis, entry_hash, _ = framing.unpack(stored.data, Genesis, self.stream.run)
            except MessageError as error:
                fault = fault or error
                continue
            if genesis.map_digest != self.stream.map.digest or len(genesis.fragments) != len(self.stream.map.fragments):
                raise RunError(f"run {self.stream.subjects.run!r}: its genesis record belongs to another fragment map")
            return genesis, entry_hash
        if fault is not None:
            raise fault
        return None

    async def load(
        self,
        fragment: int,
        genesis: Genesis,
        genesis_check: bytes,
        before: int | None = None,
        wrong: Container[bytes] = (),
        *,
        residual: bool = True,
    ) -> LoadedState:
        """Load a fragment from its newest whole keyframe after genesis, or from version 0.

        A keyframe that is damaged, or misses a part, or stands after one of the ``wrong`` entries, is named in the log, and
        the one before it serves, provided that the entries after that one are all there. ``before``: the keyframe is to stand
        after an entry before this sequence, if one that does is still there. Without ``residual``, parts that hold nothing
        else are not read; the state hash is of all that is returned then.

        Raises:
            RunError: none serves; the fault of each is named.
        """
        while True:
            newest = await self.stream.last(self.stream.subjects.keyframe(fragment))
            loaded, faults = await self._load_newest(fragment, newest, genesis, genesis_check, before, wrong, residual=residual)
            if loaded is None and before is not None:
                before = None
                continue
            if not faults:
                assert loaded is not None
                return loaded
            again = await self.stream.last(self.stream.subjects.keyframe(fragment))
            if newest is None or again is None or again.sequence == newest.sequence:
                break
            # they may have been purged while they were read
        for sequence, reason in faults.items():
            if sequence not in self._named:
                observe.log.warning("keyframe_refused", fragment=fragment, sequence=sequence, reason=reason)
            self._named.add(sequence)
        if loaded is None:
            raise RunError(
                f"run {self.stream.subjects.run!r}: fragment {fragment} has no keyframe that can be loaded: "
                f"{'; '.join(faults.values())}; continue from a checkpoint (diloco up --resume)"
            )
        return replace(loaded, refused=tuple(faults))

    async def _load_newest(
        self,
        fragment: int,
        newest: Stored | None,
        genesis: Genesis,
        genesis_check: bytes,
        before: int | None,
        wrong: Container[bytes],
        *,
        residual: bool,
    ) -> tuple[LoadedState | None, dict[int, str]]:
        """Return the newest keyframe that serves, and the faults of those after it, by stream sequence."""
        faults: dict[int, str] = {}
        async for stored in self._from_newest(fragment, newest):
            try:
                keyframe, inline = decode_keyframe(stored, self.stream.run)
                if keyframe.entry_hash == NO_ENTRY:
                    continue
                chain = Chain.from_keyframe(keyframe, self.stream.epoch_step)
                if keyframe.entry_hash in wrong:
                    raise FormatError(
                        f"fragment {fragment}, keyframe of version {keyframe.version}: its entry states another state "
                        "than it folds to, or follows an entry with that fault"
                    )
                if before is not None and keyframe.entry_sequence >= before:
                    continue
                if not await self.holds(chain):  # purged; or lost, and its writer stored the keyframe before it learned that
                    raise FormatError(
                        f"fragment {fragment}, keyframe of version {keyframe.version}: the entries after it were purged or lost"
                    )
                return await self._load(keyframe, chain, inline, stored.sequence, residual=residual), faults
            except MessageError as error:
                faults[stored.sequence] = str(error)
        try:
            first = await self.load_first(fragment, genesis, genesis_check, residual=residual)
            if (faults or before is not None) and not await self.begins_with(fragment, genesis_check):
                raise FormatError(f"fragment {fragment}, keyframe of version 0: the entries after it were purged")
            return first, faults
        except (MessageError, RunError) as error:
            return None, faults | {0: str(error)}

    async def load_first(self, fragment: int, genesis: Genesis, genesis_check: bytes, *, residual: bool = True) -> LoadedState:
        """Load version 0 of a fragment, with its ``residual`` or without as :meth:`load` does.

        Raises:
            MessageError: its keyframe is damaged.
            RunError: its keyframe is gone.
        """
        chain, fault = Chain.from_genesis(fragment, genesis, genesis_check, self.stream.epoch_step), None
        async for stored in self.stream.from_first(self.stream.subjects.keyframe(fragment)):
            try:
                keyframe, inline = decode_keyframe(stored, self.stream.run)
            except MessageError as error:
                fault = fault or error
                continue
            if keyframe.entry_hash != NO_ENTRY:
                break  # a founder stores nothing after genesis, and so after an entry
            if keyframe.state_hash == chain.state_hash:
                return await self._load(keyframe, chain, inline, stored.sequence, residual=residual)
        raise fault or RunError(f"run {self.stream.subjects.run!r}: fragment {fragment} has no keyframe; the log is damaged")

    async def state_at(self, fragment: int, version: int, genesis: Genesis, genesis_check: bytes) -> Replica:
        """Return a fragment as it was at a version: its newest whole keyframe up to that, and the entries that follow, folded.

        Raises:
            RunError: the log does not have it, or not any more; the versions that it does have are named.
        """
        loaded, oldest = None, 0
        newest = await self.stream.last(self.stream.subjects.keyframe(fragment))
        async for stored in self._from_newest(fragment, newest):
            with contextlib.suppress(MessageError):  # load says so
                keyframe, inline = decode_keyframe(stored, self.stream.run)
                chain = Chain.from_keyframe(keyframe, self.stream.epoch_step)
                if keyframe.entry_hash == NO_ENTRY or not await self.holds(chain):
                    continue
                oldest = keyframe.version
                if oldest <= version:
                    loaded = await self._load(keyframe, chain, inline, stored.sequence, residual=False)
                    break
        with contextlib.suppress(MessageError):
            if loaded is None and await self.begins_with(fragment, genesis_check):
                loaded, oldest = await self.load_first(fragment, genesis, genesis_check, residual=False), 0
        end = await self.end_sequence(fragment)
        replica, wrong = loaded.replica if loaded else None, WrongEntries()
        if replica is not None and replica.chain.version < version:
            try:
                async for _ in self.entries.fold_missed(replica, end, pass_over, wrong, judge=True):
                    if replica.chain.version == version:
                        break
            except (FormatError, HashError) as error:
                raise RunError(f"run {self.stream.subjects.run!r}: {error}") from None
        if replica is None or replica.chain.version != version:
            about = f"run {self.stream.subjects.run!r}, fragment {fragment}: version {version}"
            unread = None if replica is None else wrong.unread_after(replica.chain)
            if unread is not None:
                raise RunError(f"{about} cannot be read: {unread}")
            has = f"which has those from {oldest} to the newest; how far back it goes is set by log.keep_keyframes and "
            has = f"{has}log.keep_bytes" if replica is None else f"whose newest version is {replica.chain.version}"
            raise RunError(f"{about} is not in the log, {has}")
        return replica

    async def keyframes(self, fragment: int, refuse: Refuse) -> AsyncIterator[LoadedState]:
        """Yield the keyframes after genesis that are stored by now, the oldest first; ``refuse`` hears of what is none."""
        async for stored in self.stream.by_now(self.stream.subjects.keyframe(fragment)):
            try:
                keyframe, inline = decode_keyframe(stored, self.stream.run)
                if keyframe.entry_hash != NO_ENTRY:
                    chain = Chain.from_keyframe(keyframe, self.stream.epoch_step)
                    yield await self._load(keyframe, chain, inline, stored.sequence)
            except MessageError as error:
                if await self.stream.get(stored.sequence) is not None:  # else the log was shortened while it was read
                    refuse(RefusedEntry("log", stored.subject, stored.sequence, error))

    async def newest_keyframe(self, fragment: int) -> tuple[Keyframe, int] | None:
        """Return the newest keyframe after an entry of the log, its head whole, without its body, and that head's sequence."""
        found = await self.whole_keyframe(fragment)
        return None if found is None else (found[0], found[2])

    async def whole_keyframe(self, fragment: int) -> tuple[Keyframe, bytes, int] | None:
        """Return the newest keyframe as :meth:`newest_keyframe` does, between them what its head has of its body."""
        newest = await self.stream.last(self.stream.subjects.keyframe(fragment))
        async for stored in self._from_newest(fragment, newest):
            with contextlib.suppress(MessageError):  # load says so
                keyframe, inline = decode_keyframe(stored, self.stream.run)
                chain = Chain.from_keyframe(keyframe, self.stream.epoch_step)
                if keyframe.entry_hash != NO_ENTRY and await self.holds(chain):
                    return keyframe, inline, stored.sequence
        return None

    async def oldest_keyframe(self, fragment: int) -> Keyframe | None:
        """Return the oldest keyframe that is stored, version 0's included, without its body; None if there is none.

        Raises:
            MessageError: it is damaged.
        """
        async for stored in self.stream.from_first(self.stream.subjects.keyframe(fragment)):
            return decode_keyframe(stored, self.stream.run)[0]
        return None

    async def _from_newest(self, fragment: int, newest: Stored | None) -> AsyncIterator[Stored]:
        """Yield the newest head of a fragment's keyframes, then those before it, which are looked for only then.

        One of version 0 may be any of them: a founder, or a syncer, may store another one later.
        """
        if newest is None:
            return
        yield newest
        if not await self.head_sequence(fragment):
            return  # none stands after an entry
        for sequence in reversed(await self.keyframe_sequences(fragment, newest)):
            older = await self.stream.get(sequence) if sequence < newest.sequence else None
            if older is not None:
                yield older

    async def begins_with(self, fragment: int, genesis_check: bytes) -> bool:
        """Whether the log still has the fragment's first entry, or never had any; what is no entry does not count."""
        nothing = True
        async for stored in self.stream.from_first(self.stream.subjects.record(fragment)):
            with contextlib.suppress(MessageError):
                if self.stream.head(stored).previous == genesis_check:
                    return True
                nothing = False
        return nothing

    async def holds(self, chain: Chain) -> bool:
        """Whether the log still has the chain's head, and with this state after it.

        It may be purged, or lost with a server's last unsynced writes; or a keyframe lies about it.
        """
        if not chain.sequence:
            return True
        stored = await self.stream.get(chain.sequence)
        if stored is None:
            return False
        try:
            head = self.stream.head(stored)
        except MessageError:
            return False
        return (head.entry_hash, head.record.state_hash) == (chain.head, chain.state_hash)

    async def keyframe_sequences(self, fragment: int, newest: Stored | None = None) -> list[int]:
        """Return the stream sequences of the fragment's keyframes, the oldest first. ``newest``: the last one, if known."""
        subject = self.stream.subjects.keyframe(fragment)
        return [stored.sequence async for stored in self.stream.by_now(subject, newest=newest, headers_only=True)]

    async def newest(self, fragment: int) -> EntryHead | None:
        """Return the head of the fragment's last entry; None before there is one.

        Raises:
            MessageError: there stands something else; in a run with regions it may be a claim.
        """
        stored = await self.stream.last(self.stream.subjects.record(fragment))
        return self.stream.head(stored) if stored else None

    async def closed(self) -> bool:
        """Whether every fragment's newest entry closes its log, as far as can be told."""
        for fragment in self.stream.map.fragments:
            try:
                head = await self.newest(fragment.index)
            except (MessageError, BrokerError):
                return False
            if head is None or not head.record.closing:
                return False
        return True

    async def head_sequence(self, fragment: int) -> int:
        """Return the stream sequence of the last message on the fragment's head subject, which a fence names; 0 without one."""
        stored = await self.stream.last(self.stream.subjects.record(fragment))
        return stored.sequence if stored else 0

    async def passed_over(self, fragment: int, fence: int, ends_turn: Callable[[Claim | Record], bool]) -> int | None:
        """Return the sequence of the last message on the fragment's head subject, if all behind ``fence`` are passed over.

        None: one of them ends the turn of the owner whose fence this is; or the log is shorter, or has too much to look at.

        Raises:
            AppendUncertainError: the server is silent.
        """
        newest = await self.head_sequence(fragment)
        if newest < fence:
            return None
        try:
            async for stored in self.stream.behind(self.stream.subjects.record(fragment), fence, newest):
                with contextlib.suppress(MessageError):
                    message = self.stream.decode(stored)
                    assert not isinstance(message, CommitNotice)  # notices have a subject of their own
                    if ends_turn(message.record if isinstance(message, EntryHead) else message):
                        return None
        except FenceError:
            return None
        return newest

    async def end_sequence(self, fragment: int) -> int:
        """Return the stream sequence up to which the fragment's entries are to be read; 0 if there is nothing."""
        subject = self.stream.subjects.commit_notice(fragment) if self.stream.regions else self.stream.subjects.record(fragment)
        stored = await self.stream.last(subject)
        return stored.sequence if stored else 0

    async def _load(
        self, keyframe: Keyframe, chain: Chain, inline: bytes, sequence: int, *, residual: bool = True
    ) -> LoadedState:
        fragment, body = keyframe.fragment, keyframe.body
        optimizer, size = self.stream.optimizers[fragment], self.stream.map.fragments[fragment].size
        raw_bytes = fold.keyframe_bytes(size, optimizer.moments)
        what = f"fragment {fragment}, keyframe of version {keyframe.version}"
        check_body_size(body, codec.packed_limit(raw_bytes), what)
        head = self.stream.subjects.keyframe(fragment)
        if not residual and body.parts:
            arrays = [in_memory(4 * size), self.room_for_moments(4 * optimizer.moments * size)]
            beginning = codec.ContentStart(raw_bytes, arrays)
            await self._read_beginning(beginning, head, body, what, sequence)
            theta, momentum = (array.view("<f4").astype(np.float32, copy=False) for array in beginning.arrays)
            replica = await asyncio.to_thread(fold.load_state, keyframe, chain, theta, momentum, optimizer)
            return LoadedState(replica, np.empty(0, np.float32), sequence)
        pieces = await self.stream.parts(head, body, what, sequence)
        raw = await asyncio.to_thread(open_body, body, inline, pieces, raw_bytes, what)
        replica, rest = await asyncio.to_thread(fold.load_keyframe, keyframe, chain, raw, optimizer)
        return LoadedState(replica, rest, sequence)

    async def _read_beginning(self, beginning: codec.ContentStart, head: str, body: Body, what: str, sequence: int) -> None:
        """Read the parts of a body that hold its beginning, few at a time.

        Raises:
            FormatError: one is missing or damaged, or they hold less.
        """
        # so many hold it, if all of the content compresses alike; where they do not, others are read too
        share = sum(array.size for array in beginning.arrays) / beginning.expected_bytes
        first, enough = 0, min(body.parts, 1 + int(body.parts * share))
        while first < body.parts and not beginning.complete:
            stop = min(first + PARTS_AT_ONCE, enough if first < enough else body.parts)
            pieces = await self.stream.parts(head, body, what, sequence, wanted=range(first, stop))
            await asyncio.to_thread(beginning.feed, pieces)
            first = stop
        if not beginning.complete:
            raise FormatError(f"{what}: its body ends before its state does")
