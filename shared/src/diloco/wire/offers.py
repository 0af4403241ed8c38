"""Offers: a learner's contribution, alone, among others of its region, and as a member of a merge.

A contribution's fields stand in three messages, each with its own order on the wire: :class:`Offer` is what the learner sends,
:class:`Answer` and :class:`MergeMember` repeat it by name. A field that is added to a contribution is added to these classes,
and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from diloco.wire.body import PART_BYTES, Body
from diloco.wire.fields import MAX_MEMBERS, Bits, Count, FragmentIndex, Hash, MemberName, Number, Range, Ranges
from diloco.wire.framing import MAX_FRAME_BYTES, Message

MAX_MEMBERS_BYTES = MAX_FRAME_BYTES - PART_BYTES - 1024  # of a record, beside a body in its head and its other fields


class Offer(Message, frozen=True):
    """A learner's answer to a round: the outer gradient of its displacement from its base, quantised."""

    kind = "offer"

    fragment: FragmentIndex
    learner: MemberName
    incarnation: Count
    number: Number  # of this learner's offers of this fragment, in this incarnation
    after: tuple[Count, Count]  # incarnation and number of its last offer that it knows merged; (0, 0) for none
    round: Number  # version of the answered round
    base_version: Count
    base_hash: Hash  # state hash of the base
    bits: Bits
    steps: Count  # in the displacement
    tokens: Count  # in the displacement
    lost_tokens: Count  # in this run so far, of this fragment
    data: Ranges  # in the displacement
    body: Body

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_order(self.data)

    @property
    def members(self) -> tuple[Offer]:
        """The contributions in it: its own alone."""
        return (self,)


class Answer(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A learner's offer in a regional one: all its fields but ``fragment``, ``bits`` and ``body``."""

    learner: MemberName
    incarnation: Count
    number: Number
    after: tuple[Count, Count]
    round: Number
    base_version: Count
    base_hash: Hash
    steps: Count
    tokens: Count
    lost_tokens: Count
    data: Ranges

    def __post_init__(self) -> None:
        _check_order(self.data)

    @classmethod
    def of(cls, offer: Offer) -> Answer:
        """Return the contribution that an offer states."""
        return cls(*(getattr(offer, name) for name in cls.__struct_fields__))


class RegionalOffer(Message, frozen=True):
    """Offers of one fragment by learners of one region, merged and quantised there (``regions.merge``)."""

    kind = "regional_offer"

    fragment: FragmentIndex
    syncer: MemberName  # that merged them
    incarnation: Count  # of the syncer
    number: Number  # of this syncer's regional offers of this fragment, in this incarnation
    bits: Bits
    members: Annotated[list[Answer], Meta(min_length=1, max_length=MAX_MEMBERS)]  # in order of merging, by name
    body: Body

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [member.learner for member in self.members]
        if names != sorted(set(names)):
            raise ValueError(f"members: expected in order, each once, got {names[:8]}")


class MergeMember(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One learner's part in a merge."""

    learner: MemberName
    incarnation: Count
    number: Count
    round: Count
    base_version: Count
    steps: Count
    tokens: Count
    lost_tokens: Count
    weight: Annotated[float, Meta(ge=0, le=1e300)]
    data: Ranges

    def __post_init__(self) -> None:
        _check_order(self.data)

    @classmethod
    def of(cls, contribution: Offer | Answer, weight: float) -> MergeMember:
        """Return the member that a merge makes of a contribution."""
        return cls(weight=weight, **dict(zip(_STATED, _stated(contribution), strict=True)))


_STATED = tuple(name for name in MergeMember.__struct_fields__ if name != "weight")  # by the contribution
_stated = attrgetter(*_STATED)


class RegionalMembers(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The members of a merge whose offers came as one regional offer, and the name of that offer."""

    syncer: MemberName
    incarnation: Count
    number: Count
    members: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]], Meta(min_length=1, max_length=MAX_MEMBERS)]
    # places in the record's members


def members_bytes(offer: Offer | RegionalOffer) -> int:
    """Return the bytes that members merged from ``offer`` take of a record."""
    size = sum(len(msgspec.msgpack.encode((*_stated(contribution), 0.0))) for contribution in offer.members)
    if isinstance(offer, RegionalOffer):
        places = [MAX_MEMBERS - 1] * len(offer.members)
        size += len(msgspec.msgpack.encode(RegionalMembers(offer.syncer, offer.incarnation, offer.number, places)))
    return size


def answer_bytes(offer: Offer) -> int:
    """Return the bytes that ``offer`` takes of a regional offer, which are more than it takes of a record."""
    return len(msgspec.msgpack.encode(Answer.of(offer)))


def _check_order(ranges: Sequence[Range]) -> None:
    for (share, first, count), (next_share, next_first, _) in pairwise(ranges):
        if (share, first + count) >= (next_share, next_first):
            raise ValueError(f"data: range {next_first} of share {next_share} touches or precedes the one before")
