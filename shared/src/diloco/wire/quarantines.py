"""Outliers that a syncer has seen: the value of the bucket's key ``quarantine.<syncer>``, which that syncer alone writes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from diloco.wire.fields import MAX_FRAGMENTS, Count, FragmentIndex, MemberName
from diloco.wire.plain import decoded

MAX_OUTLIERS = 4096  # pairs of learner and fragment: the newest are kept
MAX_STATEMENT_BYTES = 1 << 18
PREFIX = "quarantine."

Norm = Annotated[float, Meta(ge=0, le=1e300)]


class SeenOutlier(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """An outlier of a learner in a fragment that counts: the first of those that go on."""

    learner: MemberName
    incarnation: Count
    fragment: FragmentIndex
    version: Count  # that it was to be merged into
    norm: Norm
    threshold: Norm
    change: Count  # the changes of the run that the writer knew of
    is_over: bool  # the learner is quarantined, and its newest offer of the fragment is sound


class OutlierStatement(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """All outliers that a syncer knows of, oldest first."""

    syncer: MemberName
    incarnation: Count
    counting: Annotated[int, Meta(ge=0, le=MAX_FRAGMENTS)]  # fragments of the run whose outliers count
    fragments: Annotated[list[FragmentIndex], Meta(max_length=MAX_FRAGMENTS)]  # that it judges, in order
    outliers: Annotated[list[SeenOutlier], Meta(max_length=MAX_OUTLIERS)]

    def pack(self) -> bytes:
        """Return the stored form, without the oldest outliers if it were too long."""
        outliers = self.outliers[-MAX_OUTLIERS:]
        while True:
            packed = msgspec.msgpack.encode(msgspec.structs.replace(self, outliers=outliers))
            if len(packed) <= MAX_STATEMENT_BYTES:
                return packed
            outliers = outliers[len(outliers) // 8 + 1 :]


_DECODER = msgspec.msgpack.Decoder(OutlierStatement)


def outliers_key(syncer: str) -> str:
    """Return the bucket's key of a syncer's statement."""
    return PREFIX + syncer


def unpack_outliers(stored: bytes | None, syncer: str) -> OutlierStatement | None:
    """Return the value of a syncer's key; None if there is none that can be read."""
    if not stored or len(stored) > MAX_STATEMENT_BYTES:
        return None
    statement = decoded(stored, _DECODER)
    return statement if statement is not None and statement.syncer == syncer else None
