"""Learners' links in simulated time: messages are put on the link one after another, and none overtakes."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.core.tensors.quantise import body_bytes
from diloco.settings.run import Bits
from diloco_lab.simulator.cluster import LearnerLink, RoundTerms, micros

# measured in runs of some hours: numbers in messages take a few bytes less at the beginning, a few more later
OFFER_BYTES = 205  # of an offer's frame beside its body
RECORD_BYTES = 270  # of a version's, without members
MEMBER_BYTES = 50


class Direction:
    """One direction of a learner's link. ``cuts`` are stretches (from, until) in which nothing moves."""

    def __init__(self, link: LearnerLink, cuts: Sequence[tuple[int, int]]) -> None:
        self.link, self.cuts = link, cuts
        self.delay_us = micros(link.delay_s)
        self.bytes = 0
        self._free_us = 0

    def open_us(self, at_us: int) -> int:
        """Return when a message can move that is to move at a time."""
        for begin_us, end_us in self.cuts:
            if begin_us <= at_us < end_us:
                at_us = end_us
        return at_us

    def send(self, at_us: int, size_bytes: int) -> int:
        """Send a body; return when it arrives."""
        self.bytes += size_bytes
        begin_us = self.open_us(max(at_us, self._free_us))
        self._free_us = begin_us + self.link.sending_us(size_bytes)
        return self.open_us(self._free_us + self.delay_us)

    def tell(self, at_us: int) -> int | None:
        """Send a message that is not stored, and that goes before all bodies; return when it arrives, None if it is lost."""
        arrives_us = at_us + self.delay_us
        return arrives_us if self.open_us(at_us) == at_us and self.open_us(arrives_us) == arrives_us else None


class Sizes:
    """Bytes of offers and versions, by fragment."""

    def __init__(self, rounds: RoundTerms) -> None:
        self._rounds = rounds
        codec = rounds.settings.codec
        self.offers = [self._body(size, codec.offer_bits) + OFFER_BYTES for size in rounds.sizes]
        self._records = [self._body(size, codec.record_bits) + RECORD_BYTES for size in rounds.sizes]

    def _body(self, size: int, bits: Bits) -> int:
        return round(body_bytes(size, bits) * self._rounds.compression)

    def record(self, fragment: int, members: int) -> int:
        """Return the bytes of a version with so many members."""
        return self._records[fragment] + MEMBER_BYTES * members
