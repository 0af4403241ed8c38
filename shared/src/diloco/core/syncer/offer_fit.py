"""Which offers a fragment's next version can have: the others are *missed*, because they are late or of another log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diloco.core.log.chain import Chain
from diloco.wire.offers import Answer, Offer

IN_FLIGHT = 1  # versions by which an honest offer may be ahead of its owner: of one that is stored, and not acknowledged yet

MissedReason = Literal["repeated", "outdated", "early", "ahead", "other_base", "too_old", "rolled_back", "closed", "ejected"]
# of a log that this one is not: its learner has lied, or entries that it had read were lost with a server
OF_ANOTHER_LOG: frozenset[MissedReason] = frozenset({"ahead", "other_base"})


@dataclass(frozen=True)
class MissedOffer:
    """Why an offer is passed over, and the numbers, for people."""

    reason: MissedReason
    text: str


def identity(offer: Offer | Answer) -> tuple[int, int]:
    """Return (incarnation, number): it only grows from one of a learner's offers of a fragment to the next."""
    return offer.incarnation, offer.number


def unfit(offer: Offer | Answer, chain: Chain, hashes: Mapping[int, bytes], max_staleness_versions: int) -> MissedOffer | None:
    """Return the reason why an offer may not be in the version after ``chain``; None: it may.

    ``hashes`` are the state hashes of its versions, as far back as they are known.
    """
    merged, base = chain.cursor(offer.learner), offer.base_version
    if chain.closed:
        return MissedOffer("closed", "the run is closed")
    if identity(offer) <= merged:
        return MissedOffer("repeated", f"merged already, as {merged} or before")
    if offer.after != merged:
        return MissedOffer("outdated", f"made without knowing that {merged} was merged (it states {offer.after})")
    ahead = max(base - chain.version, offer.round - chain.version - 1)
    if ahead > 0:
        text = f"from the future: base {base}, round {offer.round}, log at {chain.version}"
        return MissedOffer("ahead" if ahead > IN_FLIGHT else "early", text)
    if base < chain.floor:
        return MissedOffer("rolled_back", f"its base {base} precedes the rollback that made version {chain.floor}")
    if chain.version - base > max_staleness_versions:
        return MissedOffer("too_old", f"its base {base} is too old, log at {chain.version}")
    if hashes.get(base, offer.base_hash) != offer.base_hash:
        return MissedOffer("other_base", f"its base {base} has another state hash than the log's")
    return None
