"""One of several regions' logs: claims, commit notices, and bringing it to where another one is (:mod:`diloco.core.quorum`)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec

from diloco.core.chain import NO_ENTRY, Chain
from diloco.core.quorum import MAX_COPIED, NOTICE_EVERY, LogHead, UncommittedEntries, counts
from diloco.errors import FenceError, MessageError, RunError
from diloco.log.reader import Reader
from diloco.log.stream import Head, LogStream, Packed, decode_keyframe
from diloco.log.writer import Writer
from diloco.process import observe
from diloco.transport import Fence, Stored
from diloco.wire import framing
from diloco.wire.entries import Claim, CommitNotice, Genesis, Keyframe

FIRST_SPAN, SPAN_GROWTH = 256, 16  # messages of the stream that are looked through for the newest heads of a fragment


class RegionalLog:
    """A log as one of a quorum."""

    def __init__(self, stream: LogStream, reader: Reader, writer: Writer) -> None:
        self.stream, self.reader, self.writer = stream, reader, writer

    async def log_head(self, fragment: int, genesis_check: bytes, known_epoch: int) -> tuple[LogHead, int, int]:
        """Return the last entry, committed or not, the highest epoch of any head message, and the last one's sequence.

        A claim may be hidden by entries of earlier epochs, :data:`MAX_COPIED` of them. Messages that are damaged, or whose
        epoch is further beyond what is before it, or beyond ``known_epoch``, than any may be, are passed over.
        """
        subject = self.stream.subjects.record(fragment)
        newest = await self.stream.last(subject)
        log_head, epoch = LogHead(0, 0, False, genesis_check, 0), 0
        if newest is None:
            return log_head, epoch, 0
        for found in await self._newest_heads(subject, newest.sequence):
            message = found if isinstance(found, Claim) else found.record
            if not counts(message, max(epoch, known_epoch)):
                continue
            epoch = max(epoch, message.epoch)
            if isinstance(found, Head):
                record = found.record
                last = LogHead(record.epoch, record.version, record.closing, found.entry_hash, found.sequence)
                if last.rank >= log_head.rank:  # else it follows nothing: it is an old entry, stored once more
                    log_head = last
        return log_head, epoch, newest.sequence

    async def _newest_heads(self, subject: str, last_sequence: int) -> list[Head | Claim]:
        """Return entries and claims up to a message, more than :data:`MAX_COPIED` entries or all, the oldest first."""
        span = FIRST_SPAN
        while True:
            start, found, entries = max(1, last_sequence - span), list[Head | Claim](), 0
            async for stored in self.stream.by_now(subject, start):
                try:
                    message = self.stream.decode(stored)
                except MessageError as error:
                    observe.log.warning("entry_refused", subject=subject, sequence=stored.sequence, reason=str(error))
                else:
                    assert not isinstance(message, CommitNotice)  # notices have a subject of their own
                    found.append(message)
                    entries += isinstance(message, Head)
                if stored.sequence >= last_sequence:
                    break
            if entries > MAX_COPIED or start == 1:
                return found
            span *= SPAN_GROWTH

    async def claim(self, fragment: int, epoch: int, syncer: str, log_head: LogHead, head_sequence: int) -> int:
        """Claim the fragment in this region, behind ``head_sequence``; return the claim's sequence, the fence from now on.

        Raises:
            FenceError: another process has appended.
            StorageFullError: nothing was stored.
        """
        head = self.stream.subjects.record(fragment)
        claim = Claim(
            fragment=fragment,
            epoch=epoch,
            syncer=syncer,
            entry_epoch=log_head.epoch,
            entry_version=log_head.version,
            entry_closing=log_head.closing,
            entry_hash=log_head.entry_hash,
            entry_sequence=log_head.sequence,
        )
        return await self.writer.append(head, framing.pack(claim, self.stream.run), [], b"", Fence(head, head_sequence))

    async def notice(self, fragment: int, version: int, epoch: int, entry_hash: bytes, sequence: int) -> None:
        """Say that an entry, stored here at ``sequence``, is committed; saying it twice says it once.

        Raises:
            StorageFullError: nothing was stored.
        """
        frame = framing.pack(CommitNotice(fragment, version, epoch, entry_hash, sequence), self.stream.run)
        await self.writer.append(self.stream.subjects.commit_notice(fragment), frame, [], b"", None)

    async def last_notice(self, fragment: int) -> CommitNotice | None:
        """Return the newest true notice; None if there is none. Any syncer may store what is no notice, or a false one."""
        stored = await self.stream.last(self.stream.subjects.commit_notice(fragment))
        if stored is None:
            return None
        newest = self._notice(stored)
        if newest is not None and await self._is_true(newest):
            return newest
        return await self._newest_true([older async for older in self._notices(fragment)])

    async def before(self, fragment: int, version: int) -> int:
        """Return a stream sequence after which all entries of a committed version, and of later ones, are stored here."""
        earlier: list[CommitNotice] = []
        async for notice in self._notices(fragment):
            if notice.version < version:
                earlier.append(notice)
            elif await self._is_true(notice):
                break
        found = await self._newest_true(earlier)
        return found.sequence if found is not None else 0

    async def _notices(self, fragment: int) -> AsyncIterator[CommitNotice]:
        async for stored in self.stream.by_now(self.stream.subjects.commit_notice(fragment)):
            notice = self._notice(stored)
            if notice is not None:
                yield notice

    async def _newest_true(self, notices: list[CommitNotice]) -> CommitNotice | None:
        for notice in reversed(notices):
            if await self._is_true(notice):
                return notice
        return None

    async def _is_true(self, notice: CommitNotice) -> bool:
        """Whether the entry that a notice names is where it says; one that was purged is not."""
        stored = await self.stream.get(notice.sequence)
        with contextlib.suppress(MessageError):
            if stored is not None:
                head = self.stream.head(stored)
                named = head.record.fragment, head.record.version, head.entry_hash
                return named == (notice.fragment, notice.version, notice.entry_hash)
        return False

    def _notice(self, stored: Stored) -> CommitNotice | None:
        """Decode a notice of the fragment whose subject it is on; None if it is none."""
        with contextlib.suppress(MessageError):
            notice = self.stream.decode(stored)
            assert isinstance(notice, CommitNotice)  # by its subject
            return notice
        return None

    async def path(self, fragment: int, start: int, stop: int, after: bytes, last: bytes) -> list[Packed] | None:
        """Return the entries after the one named ``after`` up to the one named ``last``; None: not all of them are here.

        They stand behind ``start``, and none behind ``stop``.
        """
        held: UncommittedEntries[Packed] = UncommittedEntries(None)
        async for packed in self.reader.entries.stored(fragment, start + 1, stop):
            held.add(packed)
        path = held.path(last)
        names = [packed.previous for packed in path]
        return path[names.index(after) :] if after in names else None

    async def append_packed(self, packed: Packed, expected_sequence: int) -> int:
        """Append another region's entry here; as :meth:`diloco.log.writer.Writer.append_record`."""
        body = packed.record.body
        parts = [body.attempt + part for part in packed.parts] if body else []
        return await self.writer.append_record(packed.record, packed.inline, parts, expected_sequence)

    async def install_snapshot(self, fragment: int, to: RegionalLog, expected_sequence: int) -> Keyframe | None:
        """Install the newest keyframe in another region, whose log is too far behind; return it as it is there, if any.

        The head of its entry is stored before it, behind ``expected_sequence``, and a notice of that entry after it.

        Raises:
            FenceError: another process has appended there.
            StorageFullError: nothing was stored.
        """
        newest = await self.reader.newest_keyframe(fragment)
        entry = await self.stream.get(newest[0].entry_sequence) if newest else None
        stored = await self.stream.get(newest[1]) if newest else None
        if entry is None or stored is None:
            return None
        keyframe, inline = decode_keyframe(stored, self.stream.run)
        what = f"fragment {fragment}, keyframe of version {keyframe.version}"
        head = self.stream.subjects.keyframe(fragment)
        pieces = await self.stream.parts(head, keyframe.body, what, stored.sequence)
        record = self.stream.subjects.record(fragment)
        sequence = await to.writer.append(record, entry.data, [], b"", Fence(record, expected_sequence))
        there, attempt = msgspec.structs.replace(keyframe, entry_sequence=sequence), keyframe.body.attempt
        frame = framing.pack(there, self.stream.run, inline)
        await to.writer.append(head, frame, [attempt + piece for piece in pieces], attempt, Fence(record, sequence))
        await to.notice(fragment, there.version, there.epoch, there.entry_hash, sequence)
        return there

    async def begin_from(self, source: RegionalLog, genesis_frame: bytes) -> None:
        """Store the keyframes of version 0 that ``source`` has, unless they are here, and the genesis record that names them.

        If ``source`` has dropped one by now, its newest keyframe serves: a region may join a run that is old. Succeed too if
        another process has done this.

        Raises:
            MessageError, RunError: ``source`` does not have them all.
        """
        genesis, entry_hash, _ = framing.unpack(genesis_frame, Genesis, self.stream.run)
        try:
            for fragment in self.stream.map.fragments:
                # read before the look for a keyframe: an owner may give this region one meanwhile, and entries behind it
                last = await self.reader.head_sequence(fragment.index)
                if await self.reader.newest_keyframe(fragment.index) is None:
                    await self._begin_fragment_as(source, fragment.index, genesis, entry_hash, last)
            await self.writer.append_genesis(genesis_frame)
        except FenceError:
            return

    async def bring_from(
        self,
        source: RegionalLog,
        fragment: int,
        last: LogHead,
        noticed: bytes | None,
        genesis: Genesis,
        entry_hash: bytes,
    ) -> None:
        """Store what leads up to the last entry of another region, ``last``, before this log has its genesis record.

        That is the newest keyframe there, or version 0, unless this log goes on from one already; the entries after it; and
        notices up to the entry named ``noticed``, which the last notice there named when ``last`` was read.
        ``entry_hash``: of the genesis record.

        Raises:
            FenceError: another process brings it, too.
            MessageError, RunError: ``source`` does not have all of it.
        """
        log_head, _, fence = await self.log_head(fragment, entry_hash, last.epoch)
        path: list[Packed] | None = None
        if await self.reader.newest_keyframe(fragment) is not None or (
            fence and await self.reader.begins_with(fragment, entry_hash)
        ):
            path = await self._path_from(source, fragment, log_head.version, log_head.entry_hash, last)
        if path is None:
            keyframe = await source.install_snapshot(fragment, self, fence)
            if keyframe is None:
                if await self.reader.oldest_keyframe(fragment) is None:
                    await self._begin_fragment_as(source, fragment, genesis, entry_hash, fence)
                version, after = 0, entry_hash
            else:
                version, after, fence = keyframe.version, keyframe.entry_hash, keyframe.entry_sequence
            path = await self._path_from(source, fragment, version, after, last)
            if path is None:
                raise RunError(f"fragment {fragment}: the entries after version {version} are not all there")
        names = [packed.entry_hash for packed in path]
        known = names.index(noticed) + 1 if noticed in names else 0
        for number, packed in enumerate(path, 1):
            fence = await self.append_packed(packed, fence)
            if number <= known and (number % NOTICE_EVERY == 0 or number == known):
                await self.notice(fragment, packed.record.version, packed.record.epoch, packed.entry_hash, fence)

    async def _path_from(
        self, source: RegionalLog, fragment: int, version: int, after: bytes, last: LogHead
    ) -> list[Packed] | None:
        if after == last.entry_hash:
            return []
        return await source.path(fragment, await source.before(fragment, version), last.sequence, after, last.entry_hash)

    async def _begin_fragment_as(
        self, source: RegionalLog, fragment: int, genesis: Genesis, entry_hash: bytes, expected_sequence: int
    ) -> None:
        try:
            replica = (await source.reader.load_first(fragment, genesis, entry_hash)).replica
        except RunError:
            if source is self or await source.install_snapshot(fragment, self, expected_sequence) is None:
                raise
            return
        if source is not self:
            chain = Chain(fragment, 0, 0, NO_ENTRY, 0, replica.chain.state_hash)
            await self.writer.append_keyframe(replace(replica, chain=chain), None, Fence(self.stream.subjects.genesis, 0))
