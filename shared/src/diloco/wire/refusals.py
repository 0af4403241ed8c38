"""Refused offers, as owners report them to their learner: the value of the bucket's key ``refused.<learner>``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from diloco.wire.fields import Count, FragmentIndex, MemberName
from diloco.wire.plain import decoded

MAX_REFUSALS = 1024  # pairs of fragment and reason: the newest are kept
MAX_TEXT_CHARACTERS = 400
MAX_REFUSALS_BYTES = 1 << 16  # more than so many of them and their texts need

RefusalReason = Literal["claim", "form", "identity", "grant", "not_finite", "too_far", "ejected"]
RefusalText = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]


class RefusedOffers(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The offers of one fragment that were refused for one reason.

    ``number`` is that of the newest one; 0: it could not be read.
    """

    fragment: FragmentIndex
    reason: RefusalReason
    offers: Count
    number: Count


class Refusals(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """All refused offers of a learner's process: ``entries``, oldest first, and what the newest refusal of each reason said."""

    learner: MemberName
    incarnation: Count
    entries: Annotated[list[RefusedOffers], Meta(max_length=MAX_REFUSALS)]
    texts: Annotated[list[tuple[RefusalReason, RefusalText]], Meta(max_length=16)]


_DECODER = msgspec.msgpack.Decoder(Refusals)


def refusals_key(learner: str) -> str:
    """Return the bucket's key of a learner's refused offers."""
    return f"refused.{learner}"


def unpack_refusals(stored: bytes | None, learner: str) -> Refusals | None:
    """Return the value of a learner's key; None if there is none that can be read."""
    if stored is None or len(stored) > MAX_REFUSALS_BYTES:
        return None
    refusals = decoded(stored, _DECODER)
    return refusals if refusals is not None and refusals.learner == learner else None
