"""One fragment's log as far as a reader has checked it: which entry may follow, and what the log says of each learner.

Entries are hash-chained (each names the check of the one before) and carry an epoch that a new owner raises with a
takeover entry. The invariants: versions follow one another without a gap; an epoch never falls; no offer is merged twice,
because a learner's (incarnation, number) only grows; token totals add up; nothing but a takeover follows a closing version.
A takeover may pass over epochs: those of owners who claimed the fragment (:mod:`diloco.core.quorum`) and never wrote.
A rollback makes a version, too, which has the state of an earlier one; what was made on a version before it is merged no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco.core import ranges
from diloco.errors import ChainError
from diloco.wire.messages import Cursor, Genesis, Keyframe, Record, RolledBack

NO_ENTRY = bytes(32)


@dataclass
class Chain:
    """The checked head of one fragment's log."""

    fragment: int
    version: int
    epoch: int
    head: bytes  # check of the last entry
    sequence: int  # of the last entry in the stream
    state_hash: bytes
    tokens_merged: int = 0
    tokens_lost: int = 0
    closed: bool = False
    cursors: dict[str, Cursor] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)  # by share of the data: the batch after the last one merged
    rolled_back: RolledBack | None = None  # the last time

    @classmethod
    def from_genesis(cls, fragment: int, genesis: Genesis, check: bytes) -> Chain:
        """The head that the first entry follows; sequence 0, since no entry of this fragment exists yet."""
        return cls(fragment, 0, 0, check, 0, genesis.fragments[fragment])

    @classmethod
    def from_keyframe(cls, keyframe: Keyframe) -> Chain:
        """The head that the entry after a keyframe (not one of version 0 before genesis) follows."""
        return cls(
            keyframe.fragment,
            keyframe.version,
            keyframe.epoch,
            keyframe.entry_hash,
            keyframe.entry_sequence,
            keyframe.state_hash,
            keyframe.tokens_merged,
            keyframe.tokens_lost,
            keyframe.closing,
            {cursor.learner: cursor for cursor in keyframe.cursors},
            dict(keyframe.ends),
            keyframe.rolled_back,
        )

    @property
    def floor(self) -> int:
        """The oldest version that an offer may be made on: the one that the last rollback made."""
        return self.rolled_back.version if self.rolled_back else 0

    @property
    def change(self) -> int:
        """Number of the run's last change that made this log go back."""
        return self.rolled_back.change if self.rolled_back else 0

    def must_go_back(self, change: int, version: int) -> bool:
        """Whether a change of the run that takes this fragment back to a version is still to be carried out here."""
        return change > self.change and self.version > version and not self.closed

    def cursor(self, learner: str) -> tuple[int, int]:
        """(incarnation, number) of the learner's last merged offer; (0, 0) if none was."""
        cursor = self.cursors.get(learner)
        return (cursor.incarnation, cursor.number) if cursor else (0, 0)

    def check(self, record: Record) -> None:
        """Refuse an entry that may not follow the head.

        Raises:
            ChainError: naming the fragment, the rule, what was expected and what came.
        """
        makes_version, merges = record.makes_version, record.entry == "version"
        version = self.version + makes_version
        takes, back = record.entry == "takeover", record.rolled_back
        names = [member.learner for member in record.members]
        merged = self.tokens_merged + sum(member.tokens for member in record.members)
        rules: list[tuple[str, object, object]] = [
            ("fragment", self.fragment, record.fragment),
            ("hash of the entry before", self.head.hex()[:16], record.previous.hex()[:16]),
            ("version", version, record.version),
            ("epoch", max(record.epoch, self.epoch + 1) if takes else self.epoch, record.epoch),
            ("members in order, each once", sorted(set(names)), names),
            ("merged tokens", merged, record.tokens_merged),
            ("lost tokens", self._lost_after(record), record.tokens_lost),
            ("a body where it makes a version", makes_version, record.body is not None),
            ("members where it merges", merges, bool(names)),
            ("nothing but takeovers after closing", False, self.closed and record.entry != "takeover"),
            ("closing", record.entry == "close" or (merges and record.closing), record.closing),
        ]
        if back is not None:
            rules += [
                ("version that a rollback makes", version, back.version),
                ("an earlier version to go back to", True, back.to_version < self.version),
                ("a change after those that were carried out", True, back.change > self.change),
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
                    f"fragment {self.fragment}, version {record.version}: offer {member.number} of {member.learner} is made on "
                    f"version {member.base_version}, from before the rollback that made version {self.floor}"
                )

    def advance(self, record: Record, check: bytes, sequence: int) -> None:
        """Make ``record``, which :meth:`check` has passed, the head."""
        self.version, self.epoch, self.head, self.sequence = record.version, record.epoch, check, sequence
        self.tokens_merged, self.tokens_lost, self.state_hash = record.tokens_merged, record.tokens_lost, record.state_hash
        self.closed, self.rolled_back = self.closed or record.closing, record.rolled_back or self.rolled_back
        self.ends = ranges.ends((held for member in record.members for held in member.data), self.ends)
        for member in record.members:
            old = self.cursors.get(member.learner)
            self.cursors[member.learner] = Cursor(
                member.learner,
                member.incarnation,
                member.number,
                (old.versions if old else 0) + 1,
                (old.tokens if old else 0) + member.tokens,
                member.lost_tokens,
            )

    def totals_with(self, members: Iterable[tuple[str, int, int]]) -> tuple[int, int]:
        """Merged and lost tokens after a version with ``members``: (learner, tokens, lost tokens so far) each."""
        members = list(members)
        lost = {name: cursor.lost_tokens for name, cursor in self.cursors.items()} | {name: lost for name, _, lost in members}
        return self.tokens_merged + sum(tokens for _, tokens, _ in members), sum(lost.values())

    def keyframe_cursors(self) -> list[Cursor]:
        """The cursors in the order in which a keyframe carries them."""
        return [self.cursors[name] for name in sorted(self.cursors)]

    def keyframe_ends(self) -> list[tuple[int, int]]:
        """How far the data was merged, in the order in which a keyframe carries it."""
        return sorted(self.ends.items())

    def _lost_after(self, record: Record) -> int:
        return self.totals_with((m.learner, m.tokens, m.lost_tokens) for m in record.members)[1]
