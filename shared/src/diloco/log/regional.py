"""The log of a region: claims, commit notices, and bringing it to where another one is (:mod:`diloco.core.log.quorum`)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

import msgspec

from diloco.core.log.chain import NO_ENTRY, Chain
from diloco.core.log.quorum import MAX_COPIED, NOTICE_EVERY, LogHead, UncommittedEntries, counts
from diloco.errors import FenceError, MessageError, RewoundError, RunError
from diloco.log.reader import Reader
from diloco.log.stream import EntryHead, LogStream, Packed
from diloco.log.writer import Writer
from diloco.process import observe
from diloco.transport import Fence, Stored
from diloco.wire import framing
from diloco.wire.entries import Claim, CommitNotice, Genesis, Keyframe

FIRST_SPAN, SPAN_GROWTH = 1024, 4  # messages of the stream that are looked through for the newest notices of a fragment


@dataclass(frozen=True)
class LogEnd:
    """The end of a fragment's log in one region."""

    last: LogHead  # the last entry, committed or not
    epoch: int  # the highest of any head message
    sequence: int  # of the last head message, which a fence names; 0: there is none
    read: Sequence[EntryHead] = ()  # the entries that were read to find out, the oldest first


class RegionalLog:
    """A log as one of a quorum."""

    def __init__(self, stream: LogStream, reader: Reader, writer: Writer) -> None:
        self.stream, self.reader, self.writer = stream, reader, writer

    async def log_end(self, fragment: int, genesis_check: bytes, known_epoch: int) -> LogEnd:
        """Return the last entry, committed or not, the highest epoch of any head message, and the last one's sequence.

        A claim may be hidden by entries of earlier epochs, :data:`MAX_COPIED` of them. Messages that are damaged, or whose
        epoch is further beyond what is before it, or beyond ``known_epoch``, than any may be, are passed over.
        """
        newest = await self.stream.last(self.stream.subjects.record(fragment))
        log_head, epoch = LogHead(0, 0, False, genesis_check, 0), 0
        if newest is None:
            return LogEnd(log_head, epoch, 0)
        heads = await self._newest_heads(fragment, newest)
        for found in heads:
            message = found if isinstance(found, Claim) else found.record
            if not counts(message, max(epoch, known_epoch)):
                continue
            epoch = max(epoch, message.epoch)
            if isinstance(found, EntryHead):
                record = found.record
                last = LogHead(record.epoch, record.version, record.closing, found.entry_hash, found.sequence)
                if last.rank >= log_head.rank:  # else it follows nothing: it is an old entry, stored once more
                    log_head = last
        return LogEnd(log_head, epoch, newest.sequence, [found for found in heads if isinstance(found, EntryHead)])

    async def _newest_heads(self, fragment: int, last: Stored) -> list[EntryHead | Claim]:
        """Return entries and claims up to the ``last`` one, more than :data:`MAX_COPIED` entries or all, the oldest first.

        Entries may have their bodies with them, and the link to the server be thin. So notices, which are small, say where
        enough of them begin.
        """
        span = FIRST_SPAN
        while True:
            start = max(1, last.sequence - span)
            begin = await self._enough_from(fragment, start, last.sequence)
            found = await self._heads(fragment, begin, last) if begin else []
            if sum(isinstance(head, EntryHead) for head in found) > MAX_COPIED:
                return found
            if start == 1:  # there are so few, or notices are missing, or false
                return await self._heads(fragment, 1, last)
            span *= SPAN_GROWTH

    async def _enough_from(self, fragment: int, start: int, last_sequence: int) -> int:
        """Return from where on there are enough entries, as notices say that were stored from ``start`` on; 0: none says so.

        A notice may be false, so entries are counted when they are read.
        """
        notices = [each async for each in self._notices(fragment, start) if each.sequence <= last_sequence]
        return max((each.sequence for each in notices if each.version <= notices[-1].version - MAX_COPIED), default=0)

    async def _heads(self, fragment: int, start: int, last: Stored) -> list[EntryHead | Claim]:
        """Return entries and claims up to the ``last`` one; what is neither is named in the log and passed over."""
        subject, found = self.stream.subjects.record(fragment), list[EntryHead | Claim]()
        with contextlib.suppress(RewoundError):  # the last one was lost meanwhile
            async for stored in self.stream.pull([subject], start, last.sequence, last):
                try:
                    message = self.stream.decode(stored)
                except MessageError as error:
                    observe.log.warning("entry_refused", subject=subject, sequence=stored.sequence, reason=str(error))
                else:
                    assert not isinstance(message, CommitNotice)  # notices have a subject of their own
                    found.append(message)
        return found

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

    async def furthest_notice(self, fragment: int) -> CommitNotice | None:
        """Return the true notice of the furthest entry; None if there is none.

        It need not be stored last: a server may store a notice long after its sender gave up, behind notices of later
        entries. Any syncer may store messages that are no notices, or false ones.
        """
        newest = await self.stream.last(self.stream.subjects.commit_notice(fragment))
        if newest is None:
            return None
        last = self._notice(newest)
        if last is None or not await self._is_true(last):
            return await self._furthest_true([notice async for notice in self._notices(fragment)])
        notices = [last]
        # a later entry stands behind this one's, and its notices behind the entry: usually there is only this notice
        async for stored in self.stream.from_first(newest.subject, last.sequence + 1):
            if stored.sequence >= newest.sequence:
                break
            notice = self._notice(stored)
            if notice is not None:
                notices.append(notice)
        return last if len(notices) == 1 else await self._furthest_true(notices)

    async def before(self, fragment: int, version: int) -> int:
        """Return a stream sequence after which all entries of a committed version, and of later ones, are stored here."""
        earlier: list[CommitNotice] = []
        async for notice in self._notices(fragment):
            if notice.version < version:
                earlier.append(notice)
            elif await self._is_true(notice):
                break
        found = await self._furthest_true(earlier)
        return found.sequence if found is not None else 0

    async def _notices(self, fragment: int, start: int = 1) -> AsyncIterator[CommitNotice]:
        async for stored in self.stream.by_now(self.stream.subjects.commit_notice(fragment), start):
            notice = self._notice(stored)
            if notice is not None:
                yield notice

    async def _furthest_true(self, notices: list[CommitNotice]) -> CommitNotice | None:
        """Return the true one of the entry that is furthest in the chain; of equal ones, that which is stored last."""
        for notice in sorted(notices, key=lambda notice: (notice.epoch, notice.version, notice.sequence), reverse=True):
            if await self._is_true(notice):
                return notice
        return None

    async def _is_true(self, notice: CommitNotice) -> bool:
        """Whether the entry that a notice names is where it says, with this epoch and version; one that was purged is not."""
        stored = await self.stream.get(notice.sequence)
        with contextlib.suppress(MessageError):
            if stored is not None:
                head = self.stream.head(stored)
                record = head.record
                named = record.fragment, record.version, record.epoch, head.entry_hash
                return named == (notice.fragment, notice.version, notice.epoch, notice.entry_hash)
        return False

    def _notice(self, stored: Stored) -> CommitNotice | None:
        """Decode a notice of the fragment whose subject it is on; None if it is none."""
        with contextlib.suppress(MessageError):
            notice = self.stream.decode(stored)
            assert isinstance(notice, CommitNotice)  # by its subject
            return notice
        return None

    async def path(
        self, fragment: int, start: int, stop: int, after: bytes, last: bytes, read: Sequence[EntryHead] = ()
    ) -> list[Packed] | None:
        """Return the entries after the one named ``after`` up to the one named ``last``; None: not all of them are here.

        They stand behind ``start``, and none behind ``stop``. ``read``: the last of them, if they were read before.
        """
        held: UncommittedEntries[Packed] = UncommittedEntries(None)
        known = [Packed(head.record, head.entry_hash, head.sequence, head.inline, []) for head in read if head.sequence > start]
        if any(packed.record.body is not None and packed.record.body.parts for packed in known):
            known = []
        if not known or known[0].previous != after:
            async for packed in self.reader.entries.stored(fragment, start + 1, known[0].sequence if known else stop):
                held.add(packed)
        for packed in known:
            held.add(packed)
        path = held.path(last)
        names = [packed.previous for packed in path]
        return path[names.index(after) :] if after in names else None

    async def append_packed(self, packed: Packed, expected_sequence: int) -> int:
        """Append another region's entry here; as :meth:`diloco.log.writer.Writer.append_record`."""
        body = packed.record.body
        parts = [body.attempt + part for part in packed.parts] if body else []
        return await self.writer.append_record(packed.record, packed.inline, parts, expected_sequence)

    async def install_snapshot(self, fragment: int, to: RegionalLog, expected_sequence: int) -> tuple[Keyframe, int] | None:
        """Install the newest keyframe in another region, whose log is too far behind.

        Return it as it is there, and the sequence of its entry here; None: there is none. The head of its entry is stored
        before it, behind ``expected_sequence``, and a notice of that entry after it.

        Raises:
            FenceError: another process has appended there.
            StorageFullError: nothing was stored.
        """
        newest = await self.reader.whole_keyframe(fragment)
        entry = await self.stream.get(newest[0].entry_sequence) if newest else None
        if newest is None or entry is None:
            return None
        keyframe, inline, keyframe_sequence = newest
        what = f"fragment {fragment}, keyframe of version {keyframe.version}"
        head = self.stream.subjects.keyframe(fragment)
        pieces = await self.stream.parts(head, keyframe.body, what, keyframe_sequence)
        record = self.stream.subjects.record(fragment)
        sequence = await to.writer.append(record, entry.data, [], b"", Fence(record, expected_sequence))
        there, attempt = msgspec.structs.replace(keyframe, entry_sequence=sequence), keyframe.body.attempt
        frame = framing.pack(there, self.stream.run, inline)
        await to.writer.append(head, frame, [attempt + piece for piece in pieces], attempt, Fence(record, sequence))
        await to.notice(fragment, there.version, there.epoch, there.entry_hash, sequence)
        return there, entry.sequence

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
        end: LogEnd,
        noticed: Collection[bytes],
        genesis: Genesis,
        entry_hash: bytes,
    ) -> None:
        """Store what leads up to the ``end`` of another region's log, before this log has its genesis record.

        That is the newest keyframe there, or version 0 where there is none or all entries after it were read, unless this log
        goes on from one already; the entries after it; and notices up to the last entry of those named ``noticed``, which
        notices named before ``end`` was read. ``entry_hash``: of the genesis record. Nothing is read twice, for thin links.

        Raises:
            FenceError: another process brings it, too.
            MessageError, RunError: ``source`` does not have all of it.
        """
        here = await self.log_end(fragment, entry_hash, end.epoch)
        path, fence = await self._path_on(source, fragment, entry_hash, here, end), here.sequence
        if path is None and not here.last.sequence and (not end.read or end.read[0].previous == entry_hash):
            path = await self._path_from_first(source, fragment, genesis, entry_hash, end)
        if path is None:
            installed = await source.install_snapshot(fragment, self, fence)
            if installed is None:
                path = await self._path_from_first(source, fragment, genesis, entry_hash, end)
            else:
                keyframe, start = installed
                fence = keyframe.entry_sequence
                path = await self._path_from(source, fragment, keyframe.version, keyframe.entry_hash, end, start)
        if path is None:
            raise RunError(f"fragment {fragment}: a keyframe or entries after it are missing")
        known = max((number for number, packed in enumerate(path, 1) if packed.entry_hash in noticed), default=0)
        for number, packed in enumerate(path, 1):
            fence = await self.append_packed(packed, fence)
            if number <= known and (number % NOTICE_EVERY == 0 or number == known):
                await self.notice(fragment, packed.record.version, packed.record.epoch, packed.entry_hash, fence)

    async def _path_from(
        self, source: RegionalLog, fragment: int, version: int, after: bytes, end: LogEnd, start: int | None = None
    ) -> list[Packed] | None:
        """Return the entries after one, which stands at ``start`` in another region, up to the end there."""
        last = end.last
        if after == last.entry_hash:
            return []
        if start is not None and start < last.sequence:
            path = await source.path(fragment, start, last.sequence, after, last.entry_hash, end.read)
            if path is not None:  # else that entry was stored twice, and what follows it stands behind the first one
                return path
        return await source.path(
            fragment, await source.before(fragment, version), last.sequence, after, last.entry_hash, end.read
        )

    async def _path_on(
        self, source: RegionalLog, fragment: int, entry_hash: bytes, here: LogEnd, end: LogEnd
    ) -> list[Packed] | None:
        """Return the entries that this log lacks of those up to another one's end; None: it goes on from nothing there.

        Its last entry does not tell: a writer of before the loss may have stored it, out of place. Nor do entries or claims
        without a keyframe, since version 0 may be missing before them.
        """
        keyframe = await self.reader.newest_keyframe(fragment)
        if keyframe is not None:
            version, after = keyframe[0].version, keyframe[0].entry_hash
        elif here.sequence and await self._begins_with_first(fragment, entry_hash):
            version, after = 0, entry_hash
        else:
            return None
        path = await self._path_from(source, fragment, version, after, end)
        if path is not None and here.sequence:
            held = {packed.entry_hash async for packed in self.reader.entries.stored(fragment, 1, here.sequence)}
            path = list(dropwhile(lambda packed: packed.entry_hash in held, path))
        return path

    async def _begins_with_first(self, fragment: int, entry_hash: bytes) -> bool:
        """Whether version 0 is here, and the first entry after it if there are entries."""
        return await self.reader.oldest_keyframe(fragment) is not None and await self.reader.begins_with(fragment, entry_hash)

    async def _path_from_first(
        self, source: RegionalLog, fragment: int, genesis: Genesis, entry_hash: bytes, end: LogEnd
    ) -> list[Packed] | None:
        """Store version 0, unless a keyframe is here, and return all entries up to the end of another region's log."""
        if await self.reader.oldest_keyframe(fragment) is None:
            try:
                await self._store_first(source, fragment, genesis, entry_hash)
            except RunError:
                return None
        return await self._path_from(source, fragment, 0, entry_hash, end, 0)

    async def _begin_fragment_as(
        self, source: RegionalLog, fragment: int, genesis: Genesis, entry_hash: bytes, expected_sequence: int
    ) -> None:
        try:
            await self._store_first(source, fragment, genesis, entry_hash)
        except RunError:
            if source is self or await source.install_snapshot(fragment, self, expected_sequence) is None:
                raise

    async def _store_first(self, source: RegionalLog, fragment: int, genesis: Genesis, entry_hash: bytes) -> None:
        """Store version 0 as ``source`` has it; look only whether it is there, if that is this log."""
        replica = (await source.reader.load_first(fragment, genesis, entry_hash)).replica
        if source is not self:
            chain = Chain(fragment=fragment, version=0, epoch=0, head=NO_ENTRY, sequence=0, state_hash=replica.chain.state_hash)
            await self.writer.append_keyframe(replace(replica, chain=chain), None, Fence(self.stream.subjects.genesis, 0))
