"""Drop what a log holds beyond a cut: entries, keyframes, and in a run with regions claims and notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco.core.log.quorum import UncommittedEntries
from diloco.errors import MessageError, RunError
from diloco.log.stream import EntryHead, decode_head, decode_keyframe
from diloco.nats import streams
from diloco.nats.connection import NatsLink
from diloco.nats.pull import PulledMessage, Puller
from diloco.wire import framing, subjects
from diloco.wire.entries import Claim, CommitNotice, Keyframe
from diloco.wire.subjects import Subjects


@dataclass
class FragmentMessages:
    """The messages of one fragment in a log, by sequence. ``regions``: entries are committed by notices."""

    index: int
    regions: bool
    messages: list[int] = field(default_factory=list)  # of entries, parts and claims included
    notices: list[tuple[int, int]] = field(default_factory=list)  # sequence, and that of the entry which is committed
    versions: list[tuple[int, int]] = field(default_factory=list)  # sequence and version, where a committed entry made one
    rollbacks: list[tuple[int, int]] = field(default_factory=list)  # sequence of an entry, and change carried out with it
    keyframes: list[tuple[int, str, Keyframe]] = field(default_factory=list)  # sequence and attempt of its parts
    parts: list[tuple[int, str]] = field(default_factory=list)  # of keyframes: sequence and attempt
    entries: dict[int, CommitNotice] = field(default_factory=dict)  # committed ones, by sequence, with a notice of each
    _uncommitted: UncommittedEntries[EntryHead] = field(default_factory=lambda: UncommittedEntries(None))

    def note(self, message: PulledMessage, run: bytes) -> None:
        """Take in the next message of the log; one that cannot be read stays where it is, since all readers pass over it."""
        head, tokens = subjects.is_head(message.subject), message.subject.split(".")
        try:
            if self.regions and subjects.is_commit_notice(message.subject):
                self._note_notice(message, run)
            elif tokens[2] == "fragment":
                self.messages.append(message.sequence)
                if head and not (self.regions and framing.kind_of(message.data) == Claim.kind):
                    self._note_head(decode_head(message, run))
            elif head:
                keyframe, _ = decode_keyframe(message, run)
                self.keyframes.append((message.sequence, keyframe.body.attempt.hex(), keyframe))
                if keyframe.rolled_back is not None:
                    self.rollbacks.append((keyframe.entry_sequence, keyframe.rolled_back.change))
            elif len(tokens) > 5:
                self.parts.append((message.sequence, tokens[5]))
        except MessageError:
            return

    def _note_head(self, head: EntryHead) -> None:
        if self.regions:
            self._uncommitted.add(head)
        else:
            self._committed(head)

    def _note_notice(self, message: PulledMessage, run: bytes) -> None:
        notice = framing.unpack(message.data, CommitNotice, run)[0]
        self.notices.append((message.sequence, notice.sequence))
        for head in self._uncommitted.commit(notice.entry_hash):
            self._committed(head)

    def _committed(self, head: EntryHead) -> None:
        record = head.record
        notice = CommitNotice(self.index, record.version, record.epoch, head.entry_hash, head.sequence)
        self.entries[head.sequence] = notice
        if record.makes_version:
            self.versions.append((head.sequence, record.version))
        if record.rolled_back is not None:
            self.rollbacks.append((head.sequence, record.rolled_back.change))

    def end_of(self, version: int) -> int:
        """Return the sequence of the last entry to keep so that the fragment stands at a version.

        Raises:
            RunError: the log does not have it; the versions that it has are named.
        """
        ends = {made: sequence for sequence, made in self.versions}
        ends |= {keyframe.version: keyframe.entry_sequence for _, _, keyframe in self.keyframes if keyframe.version not in ends}
        if version not in ends:
            there = f"versions {min(ends)} to {max(ends)}" if ends else "no versions"
            raise RunError(
                f"the log has {there} of fragment {self.index}; how far back it goes is set by log.keep_keyframes and "
                "log.keep_bytes"
            )
        return ends[version]

    def beyond(self, end: int) -> list[int]:
        """Return the sequences to drop so that the entry with sequence ``end`` is the last one.

        Raises:
            RunError: no keyframe is as old as that.
        """
        if not any(keyframe.entry_sequence <= end for _, _, keyframe in self.keyframes):
            raise RunError(f"fragment {self.index}: its log begins only after the version to go on from")
        kept = {attempt for _, attempt, keyframe in self.keyframes if keyframe.entry_sequence <= end}
        doomed = [sequence for sequence in self.messages if sequence > end]
        doomed += [sequence for sequence, entry in self.notices if entry > end]
        doomed += [sequence for sequence, _, keyframe in self.keyframes if keyframe.entry_sequence > end]
        return doomed + [sequence for sequence, attempt in self.parts if attempt not in kept]

    def missing_notice(self, end: int) -> CommitNotice | None:
        """Return the notice of an entry that only a notice of a later one commits; None: it has one, or needs none."""
        has_one = not self.regions or any(entry == end for _, entry in self.notices)
        return None if has_one else self.entries.get(end)

    def carried_out(self, end: int) -> int:
        """Return the last change of the run by which the log went back, up to an entry; 0 for none."""
        return max((change for sequence, change in self.rollbacks if sequence <= end), default=0)


async def read(link: NatsLink, names: Subjects, run: bytes, fragments: int, *, regions: bool) -> list[FragmentMessages]:
    """Read what a log holds of each fragment; bodies are passed over."""
    held = [FragmentMessages(index, regions) for index in range(fragments)]
    async for message in Puller(link, names.log_stream, [names.fragment_trees], 1):
        index = subjects.fragment_of(message.subject)
        if index is not None and index < fragments:
            held[index].note(message, run)
        if not message.pending:
            break
    return held


async def shorten(link: NatsLink, names: Subjects, held: Sequence[FragmentMessages], ends: Sequence[int]) -> list[int]:
    """Drop the messages of a log beyond the sequences in ``ends``, one of each fragment.

    Return by fragment the change of the run by which the rest went back last; 0 for none.

    Raises:
        RunError: the log does not go back that far.
    """
    doomed = [sequence for messages, end in zip(held, ends, strict=True) for sequence in messages.beyond(end)]
    await streams.drop(link, names.log_stream, doomed)
    return [messages.carried_out(end) for messages, end in zip(held, ends, strict=True)]
