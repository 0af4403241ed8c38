"""Messages of a log: records, keyframes, the genesis record, and in a run with regions claims and notices."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from diloco.wire.body import Body
from diloco.wire.fields import (
    MAX_FRAGMENTS,
    MAX_MEMBERS,
    MAX_SHARES,
    Bits,
    Count,
    FragmentIndex,
    Hash,
    MemberName,
    Number,
    Seconds,
    ShareId,
)
from diloco.wire.framing import Message
from diloco.wire.offers import MergeMember, RegionalMembers


class RolledBack(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Return of a fragment to the state of an earlier version."""

    change: Number  # number of the run's change that orders it
    to_version: Count
    version: Number  # made by it


class Repaired(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Repair of a fragment: the message for which an operator ordered it, and the ends of shares that it goes back to."""

    sequence: Count  # label: of the message that the operator named, in the stream of the operator's region; 0: none
    ends: Annotated[list[tuple[ShareId, Count]], Meta(max_length=MAX_SHARES)]  # as a keyframe's


class Record(Message, frozen=True):
    """One entry of a fragment's log.

    ``version``: a committed version. ``takeover``: a new owner's first entry, which raises the epoch and makes no version.
    ``close``: the budget is used up and nothing was left to merge; it makes no version. ``rollback``: a version that merges
    nothing, and has the state of an earlier one. ``repair``: a rollback that takes the ends of shares back, too, and may go
    back to the newest version.
    """

    kind = "record"

    fragment: FragmentIndex
    entry: Literal["version", "takeover", "close", "rollback", "repair"]
    version: Count
    epoch: Count
    syncer: MemberName
    previous: Hash  # hash of the fragment's entry before; of the genesis record for the first
    members: Annotated[list[MergeMember], Meta(max_length=MAX_MEMBERS)]  # in order, by name
    regional_offers: Annotated[list[RegionalMembers], Meta(max_length=MAX_MEMBERS)]
    bits: Bits
    learning_rate: Annotated[float, Meta(ge=0, le=1e6)]
    momentum: Annotated[float, Meta(ge=0, le=1)]
    tokens_merged: Count  # of this fragment, by all versions so far
    tokens_lost: Count  # of this fragment, as the learners stated so far
    state_hash: Hash  # of Theta and momentum after this entry
    closing: bool  # the run's budget is used up; only takeovers may follow
    committed_at_s: Seconds  # Unix time at the syncer
    quorum_s: Seconds  # from opening the round to its quorum
    round_s: Seconds  # from opening the round to the merge
    body: Body | None  # of a version: the merged outer gradient; of a rollback or repair, in 32 bits: Theta and momentum
    rolled_back: RolledBack | None = None  # of a rollback or repair; not on the wire in other entries
    repaired: Repaired | None = None  # of a repair; not on the wire in other entries

    @property
    def makes_version(self) -> bool:
        """Whether the entry makes a version."""
        return self.entry in ("version", "rollback", "repair")

    def __post_init__(self) -> None:
        super().__post_init__()
        goes_back = self.entry in ("rollback", "repair")
        if goes_back != (self.rolled_back is not None) or (goes_back and self.bits != 32):
            raise ValueError(f"rolled_back: {self.rolled_back} in an entry {self.entry!r} of {self.bits} bits")
        if (self.entry == "repair") != (self.repaired is not None):
            raise ValueError(f"repaired: {self.repaired} in an entry {self.entry!r}")
        places = [place for group in self.regional_offers for place in group.members]
        if len(set(places)) < len(places) or max(places, default=-1) >= len(self.members):
            raise ValueError(
                f"regional_offers: names places {places[:8]} of {len(self.members)} members, each may be named once"
            )


class Cursor(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A learner's part of a log: its last merged offer, and its tokens."""

    learner: MemberName
    incarnation: Count
    number: Count
    versions: Count  # of which it is a member
    tokens: Count
    lost_tokens: Count
    steps: Count  # merged


class Keyframe(Message, frozen=True):
    """Theta, momentum and residual of a fragment after an entry of its log. Older entries may be dropped."""

    kind = "keyframe"

    fragment: FragmentIndex
    version: Count
    epoch: Count
    entry_hash: Hash  # of the entry before it; zeros before genesis
    entry_sequence: Count  # of that entry in the stream; 0 before genesis
    tokens_merged: Count
    tokens_lost: Count
    cursors: Annotated[list[Cursor], Meta(max_length=MAX_MEMBERS)]
    ends: Annotated[list[tuple[ShareId, Count]], Meta(max_length=MAX_SHARES)]
    # by share of the data, in order: the batch after the last one merged
    state_hash: Hash
    closing: bool
    body: Body  # float32: Theta, momentum, residual
    rolled_back: RolledBack | None = None  # the last one; not on the wire without one


class Genesis(Message, frozen=True):
    """Beginning of the run: it names the keyframes of version 0. Stored once in each region's log, fenced."""

    kind = "genesis"

    founder: MemberName
    settings_digest: Hash
    map_digest: Hash
    fragments: Annotated[list[Hash], Meta(min_length=1, max_length=MAX_FRAGMENTS)]  # by fragment: state hash
    created_at_s: Seconds


class Claim(Message, frozen=True):
    """Claim of a new owner, in a run with regions: from here on it alone writes the fragment's log in this region.

    It stands among the heads of the fragment's entries, so that it moves their fence, and names the last entry.
    """

    kind = "claim"

    fragment: FragmentIndex
    epoch: Number
    syncer: MemberName
    entry_epoch: Count
    entry_version: Count
    entry_closing: bool
    entry_hash: Hash  # of the genesis record where there is no entry
    entry_sequence: Count  # in this stream; 0 where there is no entry


class CommitNotice(Message, frozen=True):
    """Commit notice, in a run with regions: a majority of them holds the entry, and all entries before it."""

    kind = "commit_notice"

    fragment: FragmentIndex
    version: Count
    epoch: Count
    entry_hash: Hash
    sequence: Count  # of the entry in this stream
