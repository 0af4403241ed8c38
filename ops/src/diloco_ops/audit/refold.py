"""Folding a run's log again, for ``diloco verify`` to compare and for ``diloco replay`` to train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from diloco.core.log.chain import Chain, WrongEntries
from diloco.core.log.fold import Replica
from diloco.errors import ChainError, HashError, MessageError, RunError, WrongEntryError
from diloco.log.entries import judged
from diloco.log.reader import LoadedState
from diloco.log.stream import LogEntry, RefusedEntry
from diloco.wire.entries import Record
from diloco.wire.offers import MergeMember
from diloco_ops.audit.remake import RemadeMerges
from diloco_ops.reading.run_reader import RunReader


@dataclass
class FragmentLog:
    """One fragment's log, as far as it was read and folded."""

    index: int
    first_version: int = 0  # that the fold began with
    chain: Chain | None = None
    versions: int = 0
    keyframes: int = 0
    repairs: list[Record] = field(default_factory=list)
    members: list[tuple[int, MergeMember]] = field(default_factory=list)  # version, member
    passed_over: list[str] = field(default_factory=list)  # no entries of this log, for every reader alike
    wrong: list[str] = field(default_factory=list)
    wrong_keyframes: list[str] = field(default_factory=list)


async def refold(
    seen: RunReader,
    index: int,
    folded: Callable[[LogEntry], None] = lambda entry: None,
    merges: RemadeMerges | None = None,
) -> FragmentLog:
    """Fold a fragment's log from the oldest state there is; ``folded`` is called with every entry, ``merges`` before it."""
    found = FragmentLog(index)
    folding = _Refold(seen, found, folded, merges)
    try:
        await folding.run()
    except (HashError, MessageError, RunError) as error:
        found.wrong.append(str(error))
    else:
        folding.note_unread()
        folding.note_unreached()
    found.chain = folding.replica.chain if folding.replica else None
    return found


class _Refold:
    """One fragment's log, folded again beside its keyframes."""

    def __init__(
        self, seen: RunReader, found: FragmentLog, folded: Callable[[LogEntry], None], merges: RemadeMerges | None
    ) -> None:
        self.seen, self.found, self.folded, self.merges = seen, found, folded, merges
        self.replica: Replica | None = None
        self._wrong = WrongEntries()
        self._keyframe: LoadedState | None = None  # the next one to compare with
        self._keyframes = seen.log.reader.keyframes(found.index, self._refuse_keyframe)

    async def run(self) -> None:
        """Fold the entries that the log holds by now.

        Raises:
            HashError, MessageError, RunError: the log cannot be folded on.
        """
        index = self.found.index
        stop = await self.seen.log.reader.end_sequence(index)
        await self._next_keyframe()
        if stop:
            async for entry in self.seen.log.entries.follow([index], 1, self._refuse, stop):
                replica = self.replica = self.replica or await self._beginning(entry)
                if entry.sequence > replica.chain.sequence:
                    if self.merges is not None:
                        await self.merges.redo(replica, entry)
                    self._fold(replica, entry)
                await self._compare_keyframes(replica)
        if self.replica is None:
            self.replica = (await self.seen.load_first(index)).replica

    def note_unread(self) -> None:
        """Note the versions by which the log ends, if they fold to other states than they state."""
        unread = None if self.replica is None else self._wrong.unread_after(self.replica.chain)
        if unread is not None:
            self.found.wrong.append(unread)

    def note_unreached(self) -> None:
        """Note a keyframe that stands after the log's end."""
        if self._keyframe is not None:
            self._note_stray(self._keyframe.replica.chain.version)

    async def _next_keyframe(self) -> None:
        self._keyframe = await anext(self._keyframes, None)

    async def _beginning(self, first: LogEntry) -> Replica:
        """Return the state before the first entry that is stored, or the oldest one after it."""
        while self._keyframe is not None and not _reaches(self._keyframe, first):
            await self._next_keyframe()
        if first.record.previous == self.seen.genesis_check:
            return (await self.seen.load_first(self.found.index)).replica
        if self._keyframe is None:
            version = first.record.version
            raise RunError(f"the log begins with version {version}, and no intact keyframe states what precedes it")
        replica = self._keyframe.replica.copy()  # the keyframe's own is to be compared with
        self.found.first_version = replica.chain.version
        if self.merges is not None and self.found.first_version:
            self.merges.begin(self._keyframe)
        return replica

    def _fold(self, replica: Replica, entry: LogEntry) -> None:
        follows_wrong = self._wrong.note(entry.record, entry.entry_hash)
        try:
            judged(replica, entry)
        except ChainError as error:
            if isinstance(error, WrongEntryError):
                self._wrong.add(entry.record, entry.entry_hash)
            elif not follows_wrong and entry.record.version > replica.chain.version + 1:
                raise HashError(f"{error}: entries are missing") from None
            self.found.passed_over.append(str(error))
            return
        self.folded(entry)
        self.found.versions += entry.record.makes_version
        if entry.record.repaired is not None:
            self.found.repairs.append(entry.record)
        self.found.members += [(entry.record.version, member) for member in entry.record.members]

    async def _compare_keyframes(self, replica: Replica) -> None:
        """Compare the keyframes that the fold has reached with it; states are known by their hashes."""
        while self._keyframe is not None and self._keyframe.replica.chain.sequence <= replica.chain.sequence:
            stated, folded = self._keyframe.replica.chain, replica.chain
            if stated.sequence == folded.sequence:
                self.found.keyframes += 1
                for name in (f.name for f in fields(Chain)):
                    if getattr(stated, name) != getattr(folded, name):
                        self.found.wrong_keyframes.append(f"version {stated.version}: {name} differs from the log's")
                if self.merges is not None:
                    self.merges.follow(self._keyframe)
            elif stated.version >= self.found.first_version:
                self._note_stray(stated.version)
            await self._next_keyframe()

    def _note_stray(self, version: int) -> None:
        self.found.wrong_keyframes.append(f"a keyframe of version {version} follows no entry of the log")

    def _refuse(self, refusal: RefusedEntry) -> None:
        self.found.passed_over.append(str(refusal.error))

    def _refuse_keyframe(self, refusal: RefusedEntry) -> None:
        self.found.wrong_keyframes.append(f"message {refusal.sequence}: {refusal.error}")


def _reaches(keyframe: LoadedState, first: LogEntry) -> bool:
    """Whether the entries that are stored go on where a keyframe stands."""
    chain = keyframe.replica.chain
    return chain.sequence >= first.sequence or chain.head == first.record.previous
