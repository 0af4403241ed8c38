"""One fragment's log as far as a reader has checked it: the entries that may follow, and the accounts of each learner.

Entries are hash-chained (each names the hash of the one before) and carry an epoch that a new owner raises with a
takeover entry. The invariants: versions follow one another without a gap; an epoch never falls; no offer is merged twice,
because a learner's (incarnation, number) only grows; token totals add up; nothing but a takeover follows a closing version.
A takeover raises the epoch by one; in a run with regions it may pass over those of syncers that claimed the fragment
(:mod:`diloco.core.log.quorum`) and never wrote, but not over so many that an epoch is ever used up.
A rollback makes a version, too, with the state of an earlier one; offers made on versions before it are merged no more.
A repair is a rollback that may go back to the newest version, and takes the ends of shares back, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from diloco.core.tensors import ranges
from diloco.errors import ChainError
from diloco.wire.entries import Cursor, Genesis, Keyframe, Record, RolledBack
from diloco.wire.process_messages import ChainHead

NO_ENTRY = bytes(32)
MAX_WRONG = 1024  # entries of a fragment that are remembered: their writer is replaced after the first few


@dataclass
class Chain:
    """The checked head of one fragment's log."""

    fragment: int
    version: int
    epoch: int
    head: bytes  # hash of the last entry
    sequence: int  # of the last entry in the stream
    state_hash: bytes
    tokens_merged: int = 0
    tokens_lost: int = 0
    closed: bool = False
    cursors: dict[str, Cursor] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)  # by share of the data: the batch after the last one merged
    rolled_back: RolledBack | None = None  # the last time
    epoch_step: int = 1  # most by which a takeover raises the epoch

    @classmethod
    def from_genesis(cls, fragment: int, genesis: Genesis, entry_hash: bytes, epoch_step: int = 1) -> Chain:
        """Return the head that the first entry follows; sequence 0, since no entry of this fragment exists yet."""
        return cls(fragment, 0, 0, entry_hash, 0, genesis.fragments[fragment], epoch_step=epoch_step)

    @classmethod
    def from_keyframe(cls, keyframe: Keyframe, epoch_step: int = 1) -> Chain:
        """Return the head that the entry after a keyframe follows; the keyframe is not one of version 0."""
        return cls(
            fragment=keyframe.fragment,
            version=keyframe.version,
            epoch=keyframe.epoch,
            head=keyframe.entry_hash,
            sequence=keyframe.entry_sequence,
            state_hash=keyframe.state_hash,
            tokens_merged=keyframe.tokens_merged,
            tokens_lost=keyframe.tokens_lost,
            closed=keyframe.closing,
            cursors={cursor.learner: cursor for cursor in keyframe.cursors},
            ends=dict(keyframe.ends),
            rolled_back=keyframe.rolled_back,
            epoch_step=epoch_step,
        )

    @classmethod
    def from_head(cls, fragment: int, head: ChainHead) -> Chain:
        """Return the head of a log that came from another process of this learner."""
        cursors = {cursor.learner: cursor for cursor in head.cursors}
        return cls(fragment=fragment, **msgspec.structs.asdict(head) | {"cursors": cursors, "ends": dict(head.ends)})

    def to_head(self) -> ChainHead:
        """Return the head of this log as it travels to another process of this learner: all fields but the fragment's index."""
        values = {name: getattr(self, name) for name in ChainHead.__struct_fields__}
        return ChainHead(**values | {"cursors": list(self.cursors.values()), "ends": sorted(self.ends.items())})

    @property
    def floor(self) -> int:
        """Oldest version that an offer may be made on: that of the last rollback."""
        return self.rolled_back.version if self.rolled_back else 0

    @property
    def change(self) -> int:
        """Number of the run's last change that made this log go back, by a rollback or a repair."""
        return self.rolled_back.change if self.rolled_back else 0

    def must_go_back(self, change: int, version: int) -> bool:
        """Whether a change of the run that takes this fragment back to a version is still to be carried out here."""
        return change > self.change and self.version > version and not self.closed

    def must_repair(self, change: int, version: int) -> bool:
        """Whether a change of the run that repairs this fragment from a version is still to be carried out here."""
        return change > self.change and self.version >= version and not self.closed

    def cursor(self, learner: str) -> tuple[int, int]:
        """Return (incarnation, number) of the learner's last merged offer; (0, 0) if none was."""
        cursor = self.cursors.get(learner)
        return (cursor.incarnation, cursor.number) if cursor else (0, 0)

    def check(self, record: Record) -> None:
        """Refuse an entry that may not follow the head.

        Raises:
            ChainError: the fragment, the rule, the expected and the actual value are named.
        """
        makes_version, merges = record.makes_version, record.entry == "version"
        version = self.version + makes_version
        back = record.rolled_back
        names = [member.learner for member in record.members]
        merged = self.tokens_merged + sum(member.tokens for member in record.members)
        rules: list[tuple[str, object, object]] = [
            ("fragment", self.fragment, record.fragment),
            ("hash of the entry before", self.head.hex()[:16], record.previous.hex()[:16]),
            ("version", version, record.version),
            ("epoch", self._epoch_after(record), record.epoch),
            ("members in order, each once", sorted(set(names)), names),
            ("merged tokens", merged, record.tokens_merged),
            ("lost tokens", self._lost_after(record), record.tokens_lost),
            ("a body where it makes a version", makes_version, record.body is not None),
            ("members where it merges", merges, bool(names)),
            ("only takeovers after closing", False, self.closed and record.entry != "takeover"),
            ("closing", record.entry == "close" or (merges and record.closing), record.closing),
            ("the state before where it makes no version", makes_version or self.state_hash == record.state_hash, True),
        ]
        if back is not None:
            rules += [
                ("version that a rollback makes", version, back.version),
                ("an earlier version to go back to", True, back.to_version < self.version + (record.repaired is not None)),
                ("a change after those that were carried out", True, back.change > self.change),
            ]
        if record.repaired is not None:
            ends = record.repaired.ends
            rules += [
                ("shares in order, each once", sorted(dict(ends).items()), ends),
                ("ends of shares that are not beyond those before", [], [e for e in ends if e[1] > self.ends.get(e[0], 0)]),
            ]
        for rule, expected, came in rules:
            if expected != came:
                raise ChainError(
                    f"fragment {self.fragment}, entry after version {self.version}: {rule}: expected {expected}, got {came}"
                )
        for member in record.members:
            if (member.incarnation, member.number) <= self.cursor(member.learner):
                raise ChainError(
                    f"fragment {self.fragment}, version {record.version}: offer {member.number} of {member.learner} "
                    f"(incarnation {member.incarnation}) is not newer than the merged {self.cursor(member.learner)}"
                )
            if member.base_version < self.floor:
                raise ChainError(
                    f"fragment {self.fragment}, version {record.version}: offer {member.number} of {member.learner} has "
                    f"base version {member.base_version}, which precedes the rollback that made version {self.floor}"
                )

    def contradicted_by(self, record: Record) -> bool:
        """Whether an entry that does not follow says that a syncer has gone on from another head than the one known here."""
        return record.entry == "takeover" and record.epoch > self.epoch

    def is_left_by(self, record: Record) -> bool:
        """Whether an entry that another process has stored behind the head ends its owner's turn, in a log without regions.

        It follows, or it is the takeover of a syncer that knows another head. All readers pass over any other entry.
        """
        try:
            self.check(record)
        except ChainError:
            return self.contradicted_by(record)
        return True

    def advance(self, record: Record, entry_hash: bytes, sequence: int) -> None:
        """Make ``record``, which :meth:`check` has passed, the head."""
        self.version, self.epoch, self.head, self.sequence = record.version, record.epoch, entry_hash, sequence
        self.tokens_merged, self.tokens_lost, self.state_hash = record.tokens_merged, record.tokens_lost, record.state_hash
        self.closed, self.rolled_back = self.closed or record.closing, record.rolled_back or self.rolled_back
        self.ends = ranges.ends((held for member in record.members for held in member.data), self.ends)
        if record.repaired is not None:
            self.ends = dict(record.repaired.ends)
        for member in record.members:
            old = self.cursors.get(member.learner)
            self.cursors[member.learner] = Cursor(
                learner=member.learner,
                incarnation=member.incarnation,
                number=member.number,
                versions=(old.versions if old else 0) + 1,
                tokens=(old.tokens if old else 0) + member.tokens,
                lost_tokens=member.lost_tokens,
                steps=(old.steps if old else 0) + member.steps,
            )

    def totals_with(self, members: Iterable[tuple[str, int, int]]) -> tuple[int, int]:
        """Return merged and lost tokens after a version with ``members``: (learner, tokens, lost tokens so far) each."""
        members = list(members)
        lost = {name: cursor.lost_tokens for name, cursor in self.cursors.items()} | {name: lost for name, _, lost in members}
        return self.tokens_merged + sum(tokens for _, tokens, _ in members), sum(lost.values())

    def keyframe_cursors(self) -> list[Cursor]:
        """Return the cursors in the order in which a keyframe carries them."""
        return [self.cursors[name] for name in sorted(self.cursors)]

    def keyframe_ends(self) -> list[tuple[int, int]]:
        """Return (share, first batch not merged) in the order in which a keyframe carries them."""
        return sorted(self.ends.items())

    def _epoch_after(self, record: Record) -> int:
        """Return the epoch that an entry may have: its own, or the nearest one to that."""
        if record.entry != "takeover":
            return self.epoch
        return min(max(record.epoch, self.epoch + 1), self.epoch + self.epoch_step)

    def _lost_after(self, record: Record) -> int:
        return self.totals_with((m.learner, m.tokens, m.lost_tokens) for m in record.members)[1]


class WrongEntries:
    """The wrong entries of a fragment that a reader has met, and the entries that follow them; by hash, the newest ones.

    Their writer goes on from a state that no other process has. All readers pass over them, and over keyframes after one.
    """

    def __init__(self) -> None:
        self.newest: Record | None = None  # the newest that follows the log, and is wrong by itself
        self.last_version = 0  # of the newest entry that follows that one
        self.vouchers: set[str] = set()  # learners that have folded it to the state which it states, as later entries say
        self._hashes: dict[bytes, None] = {}

    def __contains__(self, entry_hash: object) -> bool:
        return entry_hash in self._hashes

    def add(self, record: Record, entry_hash: bytes) -> None:
        """Note that an entry is wrong."""
        self.newest, self.last_version = record, record.version
        self.vouchers.clear()
        self._remember(entry_hash)

    def note(self, record: Record, entry_hash: bytes) -> bool:
        """Return whether an entry is one of these, or follows one; it is one of them then."""
        if record.previous in self:
            self._remember(entry_hash)
            self.last_version = record.version
            if self.newest is not None:  # owners check that an offer states the hash of its base
                self.vouchers |= {m.learner for m in record.members if m.base_version >= self.newest.version}
        return entry_hash in self

    def stand_after(self, chain: Chain) -> Record | None:
        """Return the wrong entry by which a log ends, until another owner has taken the fragment over."""
        return self.newest if self.newest is not None and self.newest.epoch >= chain.epoch else None

    def unread_after(self, chain: Chain) -> str | None:
        """Describe what a reader lacks whose log ends by a wrong entry; None: it has all."""
        wrong = self.stand_after(chain)
        if wrong is None:
            return None
        text = (
            f"version {wrong.version} gives another state on this machine than its log entry states, so reading stops at "
            f"version {chain.version}; the log's newest version is {self.last_version}"
        )
        if self.vouchers:
            return (
                f"{text}; {', '.join(sorted(self.vouchers))} accepted the entry: test this machine's memory, and compare "
                "its libraries with theirs"
            )
        return (
            f"{text}; reading continues once another syncer takes the fragment over from {wrong.syncer} at version "
            f"{chain.version}"
        )

    def _remember(self, entry_hash: bytes) -> None:
        self._hashes[entry_hash] = None
        if len(self._hashes) > MAX_WRONG:
            del self._hashes[next(iter(self._hashes))]
