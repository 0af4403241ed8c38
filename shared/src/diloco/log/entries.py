"""The entries of a log in the order of its stream: those committed, with bodies or without, and all that are stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from functools import partial
from typing import TypeVar

from diloco.core.log.chain import Chain, WrongEntries
from diloco.core.log.fold import Replica
from diloco.core.log.quorum import MAX_UNCOMMITTED, UncommittedEntries
from diloco.errors import ChainError, FormatError, MessageError, StateError, WrongEntryError
from diloco.log.stream import EntryHead, LogEntry, LogStream, Packed, Refuse, RefusedEntry
from diloco.process import observe
from diloco.process.retry import until_available
from diloco.process.tasks import computed, unbroken
from diloco.transport import Stored
from diloco.wire import subjects
from diloco.wire.assemble import ChunkAssembler, part_index
from diloco.wire.body import ATTEMPT_BYTES, Body, check_body_size
from diloco.wire.entries import CommitNotice, Record

H = TypeVar("H", bound=EntryHead)


class Bodies:
    """Bodies of entries that are not committed yet, the newest ones: ``most_bytes`` in all, since any syncer may store more."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.kept_bytes = most_bytes, 0
        self._kept: dict[int, Packed] = {}  # by sequence

    def keep(self, packed: Packed) -> None:
        """Keep an entry's body until it is taken, or newer ones need the room."""
        self._kept[packed.sequence] = packed
        self.kept_bytes += packed.held_bytes
        while self.kept_bytes > self.most_bytes:
            self._pop(next(iter(self._kept)))

    def take(self, head: EntryHead) -> Packed | None:
        """Return an entry with its body, and forget it; None if it was not kept."""
        return self._pop(head.sequence) if head.sequence in self._kept else None

    def _pop(self, sequence: int) -> Packed:
        packed = self._kept.pop(sequence)
        self.kept_bytes -= packed.held_bytes
        return packed


class Entries:
    """Reads the entries of one log stream."""

    def __init__(self, stream: LogStream) -> None:
        self.stream = stream

    async def follow(
        self, fragments: Collection[int], start_sequence: int, refuse: Refuse, stop_sequence: int | None = None
    ) -> AsyncIterator[LogEntry]:
        """Yield committed entries from ``start_sequence`` on, in order: for ever, or up to and with ``stop_sequence``.

        A message that cannot be an entry is told to ``refuse`` and passed over. With ``stop_sequence`` every entry is held
        back until a notice leads to it, however many stand between two notices. Without it the newest ones are held back
        (:data:`diloco.core.log.quorum.MAX_UNCOMMITTED`), since any syncer may store more.

        Raises (while iterating):
            RewoundError: the stream lost messages that were read, or the message to stop at.
        """
        uncommitted = _held_back(fragments, stop_sequence)
        bodies = Bodies(self.stream.most_parts_bytes)
        async for stored, message in self._read(fragments, start_sequence, refuse, stop_sequence):
            if isinstance(message, Packed):
                bodies.keep(message)
            bare = message.bare() if isinstance(message, Packed) else message
            for head in _commit(uncommitted, bare, regions=self.stream.regions):
                try:
                    packed = bodies.take(head) or await self._again(head)
                    body = await self.stream.open(packed)
                except MessageError as error:
                    refuse(RefusedEntry("log", stored.subject, packed.sequence, error))
                else:
                    yield LogEntry(
                        record=packed.record,
                        entry_hash=packed.entry_hash,
                        sequence=packed.sequence,
                        body=body,
                        size_bytes=packed.size_bytes,
                        known_sequence=stored.sequence,
                    )

    async def heads(
        self, refuse: Refuse, start_sequence: int = 1, stop_sequence: int | None = None, *, fragment: int | None = None
    ) -> AsyncIterator[EntryHead]:
        """Yield the heads of committed entries as :meth:`follow` does, of all fragments or one; no body is read."""
        names, count = self.stream.subjects, len(self.stream.map.fragments)
        of = "*" if fragment is None else fragment
        wanted = names.heads_and_notices(of) if self.stream.regions else names.record(of)
        uncommitted = _held_back(range(count), stop_sequence)
        async for stored in self.stream.pull([wanted], start_sequence, stop_sequence):
            index = subjects.fragment_of(stored.subject)
            if (
                index is None
                or index >= count
                or not (subjects.is_head(stored.subject) or subjects.is_commit_notice(stored.subject))
            ):
                continue
            try:
                message = self.stream.decode(stored)
            except MessageError as error:
                refuse(RefusedEntry("log", stored.subject, stored.sequence, error))
                continue
            if isinstance(message, EntryHead | CommitNotice):
                for head in _commit(uncommitted, message, regions=self.stream.regions):
                    yield head

    async def stored(self, fragment: int, start_sequence: int, stop_sequence: int) -> AsyncIterator[Packed]:
        """Yield a fragment's entries as they are stored, committed or not, between two messages of the stream.

        A message that cannot be one is named in the log and passed over.

        Raises (while iterating):
            RewoundError: the stream lost the message to stop at.
        """

        def refuse(refusal: RefusedEntry) -> None:
            observe.log.warning("entry_refused", subject=refusal.subject, sequence=refusal.sequence, reason=str(refusal.error))

        async for _, message in self._read([fragment], start_sequence, refuse, stop_sequence):
            if isinstance(message, Packed):
                yield message

    async def fold_missed(
        self,
        replica: Replica,
        stop_sequence: int,
        refuse: Refuse,
        wrong: WrongEntries,
        *,
        judge: bool = False,
        doubtful: int | None = None,
    ) -> AsyncIterator[LogEntry]:
        """Fold the entries after a replica's into its arrays, up to a message of the stream; yield each that was folded.

        ``judge``: tell wrong entries, which takes the time of a second fold of each; they are refused like others that do
        not follow. ``wrong`` receives them, and those that follow them. ``doubtful``: the replica is of a keyframe after the
        entry with this sequence, which may be a wrong one; a takeover that does not follow the replica says so.

        Raises (while iterating):
            FormatError: entries are missing between those that are judged.
            StateError: folding gives another state than an entry states, or the keyframe is in doubt; the replica is worth
                nothing, and a keyframe before the error's sequence serves.
            RewoundError: the stream lost the message to stop at.
        """
        chain = replica.chain
        if stop_sequence <= chain.sequence:
            return
        async for entry in self.follow([chain.fragment], chain.sequence + 1, refuse, stop_sequence):
            if self.is_repeated(chain, entry):
                continue
            follows_wrong = wrong.note(entry.record, entry.entry_hash)
            try:
                fold_one = judged if judge else fold
                await unbroken(computed(replica.theta.size, partial(fold_one, replica, entry)))
            except ChainError as error:
                if isinstance(error, WrongEntryError):
                    wrong.add(entry.record, entry.entry_hash)
                elif doubtful is not None and chain.contradicted_by(entry.record):
                    raise StateError(str(error), doubtful) from None
                elif judge and not follows_wrong and entry.record.version > chain.version + 1:
                    raise FormatError(f"{error}: entries are missing") from None
                refuse(RefusedEntry(entry.record.syncer, self.stream.subjects.record(chain.fragment), entry.sequence, error))
            else:
                yield entry

    def is_repeated(self, chain: Chain, entry: LogEntry) -> bool:
        """Return whether an entry is the chain's newest once more, and note where.

        Two may give a region the same snapshot at once, each with the entry that it stands after.
        """
        repeated = self.stream.regions and entry.entry_hash == chain.head
        if repeated:
            chain.sequence = entry.sequence
        return repeated

    async def _read(
        self, fragments: Collection[int], start_sequence: int, refuse: Refuse, stop_sequence: int | None
    ) -> AsyncIterator[tuple[Stored, Packed | CommitNotice]]:
        """Yield entries with all their parts, and notices, each with the message that brought it."""
        wanted, names, regions = set(fragments), self.stream.subjects, self.stream.regions
        if len(wanted) == len(self.stream.map.fragments):
            filters = [names.record_tree("*")]
        elif len(wanted) == 1 or self.stream.transport.filters_many:
            filters = [names.record_tree(index) for index in sorted(wanted)]
        else:  # all heads, small beside parts, which are read for the wanted ones alone
            filters = [names.heads_and_notices("*")]
        parts = ChunkAssembler(self.stream.most_parts_bytes)
        async for stored in self.stream.pull(filters, start_sequence, stop_sequence):
            fragment = subjects.fragment_of(stored.subject)
            if fragment is None or fragment not in wanted:
                continue
            if subjects.is_head(stored.subject) or (regions and subjects.is_commit_notice(stored.subject)):
                try:
                    message = await self._assembled(stored, fragment, parts)
                except MessageError as error:
                    refuse(RefusedEntry("log", stored.subject, stored.sequence, error))
                else:
                    if message is not None:
                        yield stored, message
            else:
                index, attempt = part_index(stored.subject), stored.data[:ATTEMPT_BYTES]
                if index is not None and stored.subject == subjects.log_part(names.record(fragment), attempt, index):
                    parts.add(fragment, index, stored.data, self.stream.most_body_bytes(fragment))

    async def _assembled(self, stored: Stored, fragment: int, parts: ChunkAssembler) -> Packed | CommitNotice | None:
        """Return an entry with its parts, or a notice; None for a claim, which says nothing to readers.

        Any syncer may store parts. Those of an entry that others replaced in memory are read once more, by their subjects.

        Raises:
            MessageError: it is no entry, or has not all its parts.
        """
        message = self.stream.decode(stored)
        if not isinstance(message, EntryHead):
            return message if isinstance(message, CommitNotice) else None
        record, pieces = message.record, []
        if record.body is not None:
            taken = parts.take(fragment, record.body)
            pieces = await self._parts(stored, record, record.body) if taken is None else taken
        return Packed(record, message.entry_hash, message.sequence, message.inline, pieces)

    async def _again(self, head: EntryHead) -> Packed:
        """Read an entry once more, whose body was not kept until it was committed.

        Raises:
            MessageError: it, or a part of it, is gone.
        """
        stored = await until_available(lambda: self.stream.get(head.sequence), observe.log)
        if stored is None:
            raise FormatError(f"fragment {head.record.fragment}, version {head.record.version}: the entry is gone")
        body, inline = head.record.body, self.stream.head(stored).inline
        pieces = await self._parts(stored, head.record, body) if body is not None else []
        return Packed(head.record, head.entry_hash, head.sequence, inline, pieces)

    async def _parts(self, stored: Stored, record: Record, body: Body) -> list[bytes]:
        what = f"fragment {record.fragment}, version {record.version}"
        check_body_size(body, self.stream.most_body_bytes(record.fragment), what)
        return await until_available(lambda: self.stream.parts(stored.subject, body, what, stored.sequence), observe.log)


def fold(replica: Replica, entry: LogEntry, *, in_place: bool = True) -> None:
    """Fold an entry into a replica, as :meth:`diloco.core.log.fold.Replica.fold` does and raises."""
    replica.fold(entry.record, entry.entry_hash, entry.sequence, entry.body, in_place=in_place)


def judged(replica: Replica, entry: LogEntry) -> None:
    """Fold an entry into a replica, unless it is wrong, as :meth:`diloco.core.log.fold.Replica.judge` does and raises."""
    replica.judge(entry.record, entry.entry_hash, entry.sequence, entry.body)


def _held_back(fragments: Iterable[int], stop_sequence: int | None) -> dict[int, UncommittedEntries[EntryHead]]:
    """Return what a reader holds entries back by, for each fragment: all of them where the stream is read to an end."""
    limit = MAX_UNCOMMITTED if stop_sequence is None else None
    return {fragment: UncommittedEntries(limit) for fragment in fragments}


def _commit(uncommitted: dict[int, UncommittedEntries[H]], message: H | CommitNotice, *, regions: bool) -> list[H]:
    """Return the entries that a message commits, in the order of the chain; without regions an entry commits itself."""
    if isinstance(message, CommitNotice):
        return uncommitted[message.fragment].commit(message.entry_hash)
    if not regions:
        return [message]
    uncommitted[message.record.fragment].add(message)
    return []
