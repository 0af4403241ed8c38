"""The reference of a run with regions: what the regions' logs, each of which may hold what the others do not, say together.

An entry counts from the first notice of it on, or the first keyframe made of it. Both must be true: a majority of regions
holds the entry, and it and what leads up to it follow what was committed before. So no log ever forks, whatever a region has
stored for itself meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.simulation.invariants import Reference, Writer, demand

from diloco.wire import framing
from diloco.wire.entries import Claim, CommitNotice, Keyframe, Record
from diloco.wire.offers import RegionalOffer


@dataclass
class _Kept:
    """A fragment's log in one region."""

    epoch: int = 0  # the highest that wrote or claimed
    version: int = 0  # the newest that a notice named
    entries: dict[bytes, int] = field(default_factory=dict)  # name and sequence, as stored last
    keyframes: list[tuple[int, int]] = field(default_factory=list)  # sequences of head and entry
    lost: dict[bytes, int] = field(default_factory=dict)  # entries that it held before its disk was lost
    noticed: int = 0  # the newest version that a notice has named since then
    noticed_elsewhere: int = 0  # the newest that a notice in another region had named by then


class Regional:
    """Fed with what each region's server stores."""

    def __init__(self, reference: Reference, regions: Sequence[str]) -> None:
        self.reference, self.regions = reference, regions
        self.claims = 0
        self._entries: dict[bytes, tuple[Record, bytes, Writer]] = {}  # stored anywhere: the frame, and who stored it first
        self._committed: dict[bytes, tuple[int, bytes]] = {}  # by name: version and state hash
        self._kept: dict[tuple[str, int], _Kept] = defaultdict(_Kept)
        self._genesis = b""
        self._homes: dict[str, str] = {}  # of learners that have stored an offer

    def versions(self, region: str) -> dict[int, int]:
        """The newest version of each fragment that is known in a region."""
        return {index: self._kept[region, index].version for index in range(len(self.reference.logs))}

    def lose(self, region: str) -> None:
        """A region has lost its disk: it counts for what it held, and for nothing new until its genesis record is back."""
        for (name, index), kept in self._kept.items():
            if name == region:
                kept.lost |= kept.entries
                kept.entries, kept.keyframes, kept.epoch, kept.noticed = {}, [], 0, 0
                others = (other for (where, fragment), other in self._kept.items() if where != region and fragment == index)
                kept.noticed_elsewhere = max((other.version for other in others), default=0)

    def _see_genesis(self, region: str) -> None:
        """A region counts from now on: it must have all that may have been committed with its voice, and others' notices."""
        for (name, index), kept in self._kept.items():
            if name == region and kept.lost:
                oldest = min((self._entries[entry][0].version for entry in kept.entries), default=0) if kept.keyframes else -1
                missing = kept.lost.keys() & self._committed.keys() - kept.entries.keys()
                late = [self._committed[entry][0] for entry in missing if self._committed[entry][0] > oldest]
                demand(not late, f"region {region} counts again without versions {late} of fragment {index}")
                demand(
                    kept.noticed >= kept.noticed_elsewhere,
                    f"region {region} counts again, and its notices of fragment {index} end at version {kept.noticed}, those "
                    f"of others had come to {kept.noticed_elsewhere}",
                )
                kept.lost = {}

    def observe(self, region: str, subject: str, data: bytes, sequence: int, writer: Writer) -> str:
        """Look at a message as it is stored; what it is, in a few words."""
        reference, token = self.reference, subject.rsplit(".", 1)[-1]
        if subject == reference.subjects.genesis:
            if self._genesis:
                demand(data == self._genesis, f"region {region} begins otherwise than the others")
                self._see_genesis(region)
                return "genesis again"
            self._genesis = data
        elif subject.split(".")[2] == "fragment" and token == "head":
            if framing.kind_of(data) == Claim.kind:
                return self._see_claim(region, data)
            return self._see_entry(region, data, sequence, writer)
        elif token == "commit_notice":
            return self._see_notice(region, data)
        elif subject.split(".")[2] == "delta" and token == "head":
            self._homes[subject.split(".")[4]] = region
        elif subject.split(".")[2] == "regional" and token == "head":
            return self._see_combined(region, data)
        elif subject.split(".")[2] == "keyframe" and token == "head" and reference.logs:
            return self._see_keyframe(region, data, sequence)
        return reference.observe(subject, data, sequence, writer)

    def _see_combined(self, region: str, data: bytes) -> str:
        combined, _, inline = framing.unpack(data, RegionalOffer, self.reference.run)
        for member in combined.members:
            home = self._homes.get(member.learner)
            demand(home == region, f"{combined.syncer} in {region} combines an offer of {member.learner}, who is in {home}")
        return self.reference.see_combined(combined, inline)

    def _see_claim(self, region: str, data: bytes) -> str:
        claim, _, _ = framing.unpack(data, Claim, self.reference.run)
        kept, what = self._kept[region, claim.fragment], f"claim of fragment {claim.fragment} by {claim.syncer}"
        demand(claim.epoch > kept.epoch, f"{what}: epoch {claim.epoch}, {region} is at {kept.epoch}")
        kept.epoch = claim.epoch
        self.claims += 1
        return f"{what}, epoch {claim.epoch}"

    def _see_entry(self, region: str, data: bytes, sequence: int, writer: Writer) -> str:
        record, entry_hash, _ = framing.unpack(data, Record, self.reference.run)
        kept = self._kept[region, record.fragment]
        kept.epoch = max(kept.epoch, record.epoch)
        kept.entries[entry_hash] = sequence
        self._entries.setdefault(entry_hash, (record, data, writer))
        return f"{record.entry} of fragment {record.fragment}, version {record.version}, epoch {record.epoch}"

    def _see_notice(self, region: str, data: bytes) -> str:
        notice, _, _ = framing.unpack(data, CommitNotice, self.reference.run)
        index, what = notice.fragment, f"notice of fragment {notice.fragment}, version {notice.version}, epoch {notice.epoch}"
        kept = self._kept[region, index]
        if notice.entry_hash in kept.lost and notice.entry_hash not in kept.entries:
            return f"{what}, of what was lost with the disk"  # it was under way, and readers pass over it
        demand(kept.entries.get(notice.entry_hash) is not None, f"{what}: {region} does not hold the entry")
        self._commit(index, notice.entry_hash, what)
        if (index, notice.entry_hash) not in self.reference.wrong:
            kept.version, kept.noticed = max(kept.version, notice.version), max(kept.noticed, notice.version)
        return what

    def _commit(self, index: int, entry_hash: bytes, what: str) -> None:
        """A process goes by an entry: a majority must have it, and all that leads up to it."""
        kept = {name: self._kept[name, index] for name in self.regions}
        holders = [name for name in self.regions if entry_hash in kept[name].entries or entry_hash in kept[name].lost]
        demand(len(holders) > len(self.regions) // 2, f"{what}: only {holders} hold the entry")
        path, log = [], self.reference.logs[index]
        while entry_hash not in self._committed and entry_hash != log.head:
            demand(entry_hash in self._entries, f"{what}: does not follow what was committed")
            path.append(entry_hash)
            entry_hash = self._entries[entry_hash][0].previous
        if path:
            demand(entry_hash == log.head, f"{what}: a fork: it follows what others have followed")
        for name in reversed(path):
            record, frame, writer = self._entries[name]
            self.reference.see_record(frame, 0, writer)
            self._committed[name] = record.version, record.state_hash

    def _see_keyframe(self, region: str, data: bytes, sequence: int) -> str:
        keyframe, _, _ = framing.unpack(data, Keyframe, self.reference.run)
        what = f"keyframe of fragment {keyframe.fragment}, version {keyframe.version} in {region}"
        if keyframe.entry_hash == bytes(32):
            return f"{what}, brought"
        if keyframe.entry_hash in self._entries:  # of a version that its owner knows to be committed before it has told anybody
            self._commit(keyframe.fragment, keyframe.entry_hash, what)
        version, state_hash = self._committed.get(keyframe.entry_hash, (-1, b""))
        demand((keyframe.version, keyframe.state_hash) == (version, state_hash), f"{what}: is not of what was committed")
        kept = self._kept[region, keyframe.fragment]
        demand(kept.entries.get(keyframe.entry_hash) == keyframe.entry_sequence, f"{what}: its entry does not stand there")
        kept.keyframes.append((sequence, keyframe.entry_sequence))
        self.reference.keyframes += 1
        return what

    def purged(self, region: str, fragment: int, heads: set[int]) -> None:
        """Some of a fragment's log was dropped; ``heads`` are the sequences of the heads that are left."""
        kept, wanted = self._kept[region, fragment], self.reference.settings.log.keep_keyframes
        left = [entry for head, entry in kept.keyframes if head in heads][-wanted:]
        demand(len(left) >= min(wanted, len(kept.keyframes)), f"fragment {fragment}, {region}: keyframes left: {left}")
        if left:
            committed = [sequence for entry_hash, sequence in kept.entries.items() if entry_hash in self._committed]
            missing = [sequence for sequence in committed if sequence > min(left) and sequence not in heads]
            demand(not missing, f"fragment {fragment}, {region}: entries {missing} after a keyframe were dropped")
