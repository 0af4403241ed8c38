"""Making the merges of a run again from its archive, as the owners of its fragments made them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from diloco.core.log.fold import Replica
from diloco.core.syncer import merging
from diloco.core.syncer.round import RoundOffer
from diloco.errors import MessageError
from diloco.log.reader import LoadedState
from diloco.log.stream import LogEntry
from diloco.settings.presets import changed_settings
from diloco.wire.entries import Record
from diloco.wire.offers import Answer, MergeMember, Offer, RegionalOffer
from diloco_ops.reading.run_reader import RunReader

Vector = NDArray[np.float32]


class RemadeMerges:
    """One fragment's merges, made again from the archive as its owners made them.

    An owner's residual is known from the beginning on, after a keyframe, and after a takeover, which begins with the residual
    of a keyframe of that very version or with zeros. An owner cuts some outliers by the ``quarantine.factor`` that it knows to
    be in force, and one of an earlier version cuts none.
    """

    def __init__(self, seen: RunReader, index: int, factors: Collection[float]) -> None:
        """``factors``: the values that ``quarantine.factor`` has had in the run."""
        self.log, self.settings, self.fragment = seen.log, seen.run.created, seen.map.fragments[index]
        self._variants = [
            changed_settings(self.settings, {"quarantine.factor": factor}, "verify")
            for factor in dict.fromkeys((*factors, 0.0))
        ]
        self.redone = self.unknown = 0
        self.wrong: list[str] = []
        self._residuals = [np.zeros(self.fragment.size, np.float32)]  # that the owner may have
        self._keyframe: LoadedState | None = None
        self._bases: Mapping[int, Vector] = {}  # the fragment by version, since the last rollback

    async def redo(self, replica: Replica, entry: LogEntry) -> None:
        """Compare an entry that is about to be folded into ``replica`` with the merge that its owner must have made."""
        record, chain = entry.record, replica.chain
        if record.rolled_back is not None:  # no residual is left of the versions undone, and no offer on them is taken
            self._residuals, self._bases = [np.zeros(self.fragment.size, np.float32)], {}
        if record.entry == "takeover":
            zeros = np.zeros(self.fragment.size, np.float32)
            kept = self._keyframe is not None and self._keyframe.replica.chain.version == chain.version
            self._residuals = [self._keyframe.residual, zeros] if kept and self._keyframe else [zeros]
        if record.entry != "version" or record.previous != chain.head:
            return
        self._bases = merging.keep_bases(self.settings, self._bases, chain.version, replica.theta)
        held = await self._held(record)
        known = merging.bases_of(self.fragment, self.settings, held) <= self._bases.keys()
        if not held or not known or not self._residuals:
            self._residuals, self.unknown = [], self.unknown + 1
            return
        for settings in self._variants:
            merged = merging.merged(self.fragment, settings, held, self._bases, replica.theta)
            for residual in self._residuals:
                left = residual.copy()
                again = merging.encode(merged.copy(), left, self.settings, record.bits)
                if entry.body is not None and np.array_equal(again, entry.body):
                    self._residuals, self.redone = [left], self.redone + 1
                    return
        self._residuals = []
        self.wrong.append(f"version {record.version}: its offers give another merge than the log has")

    def begin(self, keyframe: LoadedState) -> None:
        """Begin with the residual of a keyframe: nothing is known of earlier ones."""
        self._residuals = [keyframe.residual]

    def follow(self, keyframe: LoadedState) -> None:
        """Go on with the residual that a keyframe has."""
        self._keyframe = keyframe
        if len(self._residuals) == 1 and not np.array_equal(self._residuals[0], keyframe.residual):
            self.wrong.append(
                f"version {keyframe.replica.chain.version}: its keyframe has another residual than the merges before it leave"
            )
        self._residuals = [keyframe.residual]

    async def _held(self, record: Record) -> list[RoundOffer]:
        """Return the offers that a version merges, in the order of merging; none if one is not in the archive."""
        held, left = [], dict(enumerate(record.members))
        try:
            for group in record.regional_offers:
                stored = await self.log.archive.regional_offer(record, group)
                if stored is None:
                    return []
                self._compare(record, [left.pop(place) for place in group.members], stored[0])
                held.append(RoundOffer(*stored))
            for member in left.values():
                found = await self.log.archive.offer(record, member)
                if found is None:
                    return []
                self._compare(record, [member], found[0])
                held.append(RoundOffer(*found))
        except MessageError as error:
            self.wrong.append(f"version {record.version}: {error}")
            return []
        return sorted(held, key=lambda item: item.offer.members[0].learner)

    def _compare(self, record: Record, members: Sequence[MergeMember], offer: Offer | RegionalOffer) -> None:
        """Compare the members of a version with their statements in the offer."""
        if [member.learner for member in members] != [stated.learner for stated in offer.members]:
            self.wrong.append(f"version {record.version}: a regional offer has other members than it states")
            return
        contributions: Sequence[Offer | Answer] = offer.members
        for member, contribution in zip(members, contributions, strict=True):
            stated = MergeMember.of(contribution, member.weight)
            for name in MergeMember.__struct_fields__:
                if getattr(stated, name) != getattr(member, name):
                    self.wrong.append(f"version {record.version}: {name} of {member.learner} differs from that of its offer")
