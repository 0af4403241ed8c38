"""The reference: what the log must say, written from ``docs/protocol.md`` with NumPy alone, asked after every durable action.

It sees what the server stores, in order, and believes no process's word for it: it follows each fragment's log, folds it, and
takes offers apart. It knows the run's steps (:mod:`tests.simulation.learner`), so it can say of each how often it was merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray
from tests.services.cluster import adamw, decays, decode, fold, state_hash
from tests.simulation import merged_state
from tests.simulation.learner import Step

from diloco.control.shares import PREFIX
from diloco.core.run import leases
from diloco.core.syncer.claims import OWN_TASK
from diloco.core.syncer.ownership import OwnersTable
from diloco.core.tensors.fragments import FragmentMap
from diloco.settings.run import RunSettings
from diloco.wire import framing
from diloco.wire.body import ATTEMPT_BYTES, Body
from diloco.wire.entries import Genesis, Keyframe, Record, RolledBack
from diloco.wire.offers import Answer, MergeMember, Offer, RegionalOffer
from diloco.wire.subjects import Subjects

Vector = NDArray[np.float32]


class Violation(AssertionError):
    """Something that must never be so."""


def demand(fact: bool, what: str) -> None:
    if not fact:
        raise Violation(what)


@dataclass(frozen=True)
class Writer:
    """The process that stores a message: the ``generation``-th of that name.

    Of a learner, ``applied`` are the versions by fragment that its model held when it sent the message, and ``must_apply``
    those that were the newest when it began.
    """

    name: str
    generation: int
    applied: dict[int, int]
    must_apply: dict[int, int]

    @property
    def process(self) -> tuple[str, int]:
        return self.name, self.generation


@dataclass
class FragmentLog:
    """One fragment, as its log's entries make it.

    ``past`` is what it was before each of its entries, with the entry's sequence, where the server may lose what it stored.
    """

    version: int
    epoch: int
    head: bytes
    theta: Vector
    momentum: Vector
    merged_tokens: int = 0
    closed: bool = False
    rolled_back: RolledBack | None = None
    owner: tuple[str, int] | None = None  # the process that appended the last takeover
    cursors: dict[str, tuple[int, int]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # merged, by learner
    lost: dict[str, int] = field(default_factory=dict)  # as stated last, by learner
    steps: Vector = field(default_factory=lambda: np.zeros(0, np.float32))  # how much of each step was merged
    batches: dict[tuple[int, int], frozenset[tuple[str, int]]] = field(default_factory=dict)  # share, batch: merged of whom
    ends: dict[int, int] = field(default_factory=dict)  # by share: the batch after the last one merged
    sequences: list[int] = field(default_factory=list)  # of its entries
    keyframes: list[tuple[int, int]] = field(default_factory=list)  # sequences of head and entry
    history: dict[bytes, list[int]] = field(default_factory=dict)  # versions by their parameters
    thetas: list[Vector] = field(default_factory=list)
    momenta: list[Vector] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    accounts: list[dict[str, int]] = field(default_factory=list)  # by version: merged tokens by learner
    past: list[tuple[int, FragmentLog]] = field(default_factory=list)

    def copied(self) -> FragmentLog:
        """As it is now; what is by version is cut when it is gone back to."""
        own = {name: getattr(self, name).copy() for name in ("cursors", "tokens", "lost", "steps", "batches", "ends")}
        return replace(self, **own)

    def has(self, version: int, state: bytes) -> bool:
        """Whether a version has that state hash."""
        return version < len(self.hashes) and self.hashes[version] == state

    def remember(self) -> None:
        self.history.setdefault(self.theta.tobytes(), []).append(self.version)
        self.thetas.append(self.theta)
        self.momenta.append(self.momentum)
        self.hashes.append(state_hash(self.theta, self.momentum))
        self.accounts.append(dict(self.tokens))


def replace_body(archived: Offer, made: Offer) -> Offer:
    """An archived offer, with its body described as it was when it was made: it may be cut otherwise."""
    return msgspec.structs.replace(archived, body=made.body)


class Reference:
    """``run`` is the identity that frames carry, ``map`` the model's; ``steps`` those taken so far, by index.

    ``forgetful``: the server may lose what it has stored. ``archived``: every merge must be of offers that are kept.
    """

    def __init__(
        self,
        name: str,
        run: bytes,
        settings: RunSettings,
        map: FragmentMap,
        steps: list[Step],
        *,
        forgetful: bool,
        archived: bool,
        faulty: bool = False,
    ) -> None:
        self.run, self.settings, self.map, self.steps = run, settings, map, steps
        self.subjects = Subjects(name)
        self.logs: list[FragmentLog] = []  # empty before genesis
        self.offers: dict[tuple[int, str, int, int], tuple[Offer, Vector]] = {}
        self.versions_made = self.takeovers = self.shares_taken_over = self.keyframes = self.members_combined = (
            self.late_combined
        ) = 0
        self.bits: Counter[int] = Counter()  # versions by those that their bodies have
        self.orders: list[tuple[int, int, list[int]]] = []  # changes that order fragments back: number, version, fragments
        self.rollbacks = self.steps_in_states = 0
        self.forgetful, self.archived, self.faulty = forgetful, archived, faulty
        # entries that state another state than they fold to, and those that follow them: by fragment, with the states stated
        self.wrong: set[tuple[int, bytes]] = set()
        self.wrong_entries = self.wrong_keyframes = 0
        self.wrong_heads: set[tuple[int, int]] = set()  # by fragment: keyframes that stand after one
        self.rewound = False
        self.lost: set[tuple[int, bytes]] = set()  # by fragment: entries and states of versions that were stored, and lost
        self.combined: dict[tuple[int, str, int, int], tuple[RegionalOffer, Vector]] = {}
        self.claims: dict[str, leases.ShareClaim] = {}  # to data shares, by learner
        self._archive: set[tuple[int, str, int, int]] = set()
        self._archived_regional_offer: set[tuple[int, str, int, int]] = set()
        self._trained: dict[tuple[str, int], set[tuple[int, int]]] = {}  # by process: shares and batches
        self._parts: dict[bytes, dict[int, bytes]] = {}
        self._genesis: dict[tuple[int, bytes], tuple[Vector, Vector]] = {}
        self.exact = settings.codec.offer_bits == 32 and not settings.adapts

    # ---- what the server stores

    def observe(self, subject: str, data: bytes, sequence: int, writer: Writer) -> str:
        """Look at a message as it is stored; what it is, in a few words."""
        if subject == self.subjects.genesis:
            return self._see_genesis(data)
        if not subject.endswith(".head"):
            number = int(subject.rsplit(".", 1)[-1])
            self._parts.setdefault(data[:ATTEMPT_BYTES], {})[number] = data[ATTEMPT_BYTES:]
            return f"part {number}"
        kind = subject.split(".")[2]
        if kind == "delta":
            return self._see_offer(data, writer)
        if kind == "archive":
            return self._see_archived(data)
        return self.see_record(data, sequence, writer) if kind == "fragment" else self._see_keyframe(data, sequence)

    def _body(self, body: Body, inline: bytes) -> NDArray[np.uint8]:
        parts = self._parts.get(body.attempt, {})
        packed = b"".join(parts[number] for number in range(body.parts)) if body.parts else inline
        raw = zstandard.ZstdDecompressor().decompress(packed)
        demand(blake3(raw).digest() == body.content_hash, "a body has not the hash that its head states")
        return np.frombuffer(raw, np.uint8)

    def _see_genesis(self, data: bytes) -> str:
        genesis, check, _ = framing.unpack(data, Genesis, self.run)
        demand(not self.logs, "the run began twice")
        for index, digest in enumerate(genesis.fragments):
            demand((index, digest) in self._genesis, "genesis names another keyframe")
            theta, momentum = self._genesis[index, digest]
            log = FragmentLog(0, 0, check, theta, momentum, steps=np.zeros(theta.size, np.float32))
            log.remember()
            self.logs.append(log)
        return f"genesis by {genesis.founder}"

    def _see_keyframe(self, data: bytes, sequence: int) -> str:
        keyframe, _, inline = framing.unpack(data, Keyframe, self.run)
        values = self._body(keyframe.body, inline).view("<f4")
        theta, *moments, _ = values.reshape(-1, self.map.fragments[keyframe.fragment].size)
        momentum = np.concatenate(moments)
        what = f"keyframe of fragment {keyframe.fragment}, version {keyframe.version}"
        demand(state_hash(theta, momentum) == keyframe.state_hash, f"{what}: another state than it states")
        if keyframe.entry_hash == bytes(32):
            demand(not self.logs, f"{what}: stored after genesis")
            self._genesis[keyframe.fragment, keyframe.state_hash] = theta.copy(), momentum.copy()
            return what
        log = self.logs[keyframe.fragment]
        if (keyframe.fragment, keyframe.entry_hash) in self.lost:
            return f"{what}, of what was lost"
        if (keyframe.fragment, keyframe.entry_hash) in self.wrong:
            self.wrong_keyframes += 1
            log.keyframes.append((sequence, keyframe.entry_sequence))
            self.wrong_heads.add((keyframe.fragment, sequence))
            return f"{what}, after a wrong entry"
        self.keyframes += 1
        log.keyframes.append((sequence, keyframe.entry_sequence))
        demand(
            (keyframe.version, keyframe.epoch, keyframe.entry_hash) == (log.version, log.epoch, log.head),
            f"{what}: not the head",
        )
        demand(keyframe.state_hash == log.hashes[-1], f"{what}: not what the log folds to")
        cursors = {cursor.learner: (cursor.incarnation, cursor.number) for cursor in keyframe.cursors}
        demand(cursors == log.cursors, f"{what}: cursors {cursors}, the log has {log.cursors}")
        tokens = {cursor.learner: cursor.tokens for cursor in keyframe.cursors}
        demand(tokens == log.tokens, f"{what}: tokens {tokens}, the log has {log.tokens}")
        demand(keyframe.rolled_back == log.rolled_back, f"{what}: {keyframe.rolled_back}, the log has {log.rolled_back}")
        return what

    def _see_offer(self, data: bytes, writer: Writer) -> str:
        offer, _, inline = framing.unpack(data, Offer, self.run)
        what = f"offer {offer.number} of {offer.learner}, fragment {offer.fragment}, round {offer.round}"
        identity = (offer.fragment, offer.learner, offer.incarnation, offer.number)
        log = self.logs[offer.fragment]
        values = self._values(offer, inline)
        known = self.offers.get(identity)
        if known is not None:
            demand(known[0] == offer and np.array_equal(known[1], values), f"{what}: made twice, and not alike")
            return f"{what} again"
        self.offers[identity] = (offer, values)
        for index, version in writer.must_apply.items():
            came = writer.applied.get(index, -1)
            demand(came >= version, f"{what}: its learner began when fragment {index} was at {version}, and applied {came}")
        self._demand_base(log, offer, what)
        if self._is_state(offer.fragment):
            self._see_state(log, offer, values, what)
        elif self.exact:
            self._see_steps(offer, values, what)
        return f"{what}, {offer.steps} steps"

    def _values(self, offer: Offer | RegionalOffer, inline: bytes) -> Vector:
        """Return the displacement that an offer states, or its values where it is of state."""
        values = decode(self._body(offer.body, inline), self.map.fragments[offer.fragment].size, offer.bits)
        return values if self._is_state(offer.fragment) else -values

    def _is_state(self, fragment: int) -> bool:
        return self.map.fragments[fragment].state

    def _is_mean(self, fragment: int) -> bool:
        """Whether a merge is the mean of the members' offers, and these can be read off exactly."""
        return self._is_state(fragment) or (self.settings.merge.method == "average" and self.exact)

    def _see_state(self, log: FragmentLog, offer: Offer, values: Vector, what: str) -> None:
        if log.has(offer.base_version, offer.base_hash):
            base = log.thetas[offer.base_version]
            wrong = merged_state.wrong_offer(offer, values, base, self.steps)
            demand(not wrong, f"{what}: {wrong}")
            self.steps_in_states += int(np.count_nonzero(values != base))

    def _demand_base(self, log: FragmentLog, offer: Offer, what: str) -> None:
        its = log.has(offer.base_version, offer.base_hash) or (offer.fragment, offer.base_hash) in self.lost | self.wrong
        demand(its, f"{what}: its base is not the log's {offer.base_version}")

    def see_combined(self, combined: RegionalOffer, inline: bytes) -> str:
        """Look at a regional offer: it is what its members' offers are merged to, as far as that can be said exactly."""
        what = f"regional offer {combined.number} of {combined.syncer}, fragment {combined.fragment}"
        values = self._values(combined, inline)
        expected, total = np.zeros_like(values), sum(member.tokens for member in combined.members)
        for member in combined.members:
            named = f"{what}: offer {member.number} of {member.learner}, incarnation {member.incarnation}"
            identity = (combined.fragment, member.learner, member.incarnation, member.number)
            demand(identity in self.offers, f"{named} was never stored")
            offer, its = self.offers[identity]
            demand(member == Answer.of(offer), f"{named}: states {member}, the offer {offer}")
            expected += np.float32(member.tokens / total) * its
        if self._is_mean(combined.fragment) and self.settings.merge.weights == "tokens":
            demand(bool(np.allclose(values, expected, atol=1e-5)), f"{what}: is not the mean of its members' offers")
        self.combined[combined.fragment, combined.syncer, combined.incarnation, combined.number] = combined, values
        return f"{what}: {', '.join(f'{m.learner}/{m.number} to {m.round}' for m in combined.members)}"

    def _see_archived(self, data: bytes) -> str:
        if framing.kind_of(data) == RegionalOffer.kind:
            combined, _, inline = framing.unpack(data, RegionalOffer, self.run)
            identity = (combined.fragment, combined.syncer, combined.incarnation, combined.number)
            what = f"archived regional offer {combined.number} of {combined.syncer}, fragment {combined.fragment}"
            demand(identity in self.combined, f"{what}: was never made")
            values = self._values(combined, inline)
            known, its = self.combined[identity]
            same = msgspec.structs.replace(combined, body=known.body) == known and np.array_equal(values, its)
            demand(same, f"{what}: another one than was made")
            self._archived_regional_offer.add(identity)
            return what
        offer, _, inline = framing.unpack(data, Offer, self.run)
        identity = (offer.fragment, offer.learner, offer.incarnation, offer.number)
        what = f"archived offer {offer.number} of {offer.learner}, fragment {offer.fragment}"
        demand(identity in self.offers, f"{what}: was never made")
        values = self._values(offer, inline)
        made, its = self.offers[identity]
        demand(replace_body(offer, made) == made and np.array_equal(values, its), f"{what}: another one than was made")
        self._archive.add(identity)
        return what

    def _see_steps(self, offer: Offer, values: Vector, what: str) -> None:
        """The steps that an offer holds: all of its learner's, none more than once, as many as it says."""
        held = np.flatnonzero(values)
        demand(held.size == 0 or held[-1] < len(self.steps), f"{what}: holds what was not done")
        for index in held:
            demand(self.steps[index].learner == offer.learner, f"{what}: holds work of {self.steps[index].learner}")
            demand(0 < values[index] <= 1, f"{what}: holds {values[index]} of a step")
        tokens = sum(self.steps[index].tokens for index in held)
        stated, counted = (offer.steps, offer.tokens), (held.size, tokens)
        demand(stated == counted, f"{what}: states {stated} steps and tokens, holds {counted}")
        batches = {(self.steps[index].share, self.steps[index].batch) for index in held}
        ranges = {(share, first + i) for share, first, count in offer.data for i in range(count)}
        demand(ranges == batches, f"{what}: states batches {sorted(ranges)}, holds {sorted(batches)}")

    def see_record(self, data: bytes, sequence: int, writer: Writer) -> str:
        record, check, inline = framing.unpack(data, Record, self.run)
        log = self.logs[record.fragment]
        what = (
            f"{record.entry} of fragment {record.fragment}, version {record.version}, epoch {record.epoch} by {record.syncer}"
        )
        makes, takes = record.entry == "version", record.entry == "takeover"
        if (record.fragment, record.previous) in self.lost:  # by one who does not know yet; it is not taken for an entry
            self.lost.add((record.fragment, check))
            return f"{what}, after what was lost"
        if (record.fragment, record.previous) in self.wrong:
            self.wrong |= {(record.fragment, check), (record.fragment, record.state_hash)}
            return f"{what}, after a wrong entry"
        before = log.copied() if self.faulty else log
        if self.forgetful:
            log.past.append((sequence, log.copied()))
        demand(record.previous == log.head, f"{what}: does not follow version {log.version}, epoch {log.epoch}")
        # where there are regions, owners may have claimed the fragment that never wrote
        epoch = max(record.epoch, log.epoch + 1) if takes and self.settings.regions.names else log.epoch + takes
        expected = (log.version + (makes or record.entry == "rollback"), epoch)
        demand((record.version, record.epoch) == expected, f"{what}: expected version and epoch {expected}")
        if takes:
            log.owner = writer.process
            self.takeovers += 1
        demand(log.owner == writer.process, f"{what}: its writer has never taken the fragment over, or lost it since")
        demand(takes or not log.closed, f"{what}: the log is closed")
        if makes:
            self._merge(record, log, self._body(record.body, inline) if record.body else np.zeros(0, np.uint8), what)
        if record.rolled_back is not None:
            self._go_back(record, log, self._body(record.body, inline) if record.body else np.zeros(0, np.uint8), what)
        if self.faulty and makes and record.state_hash != state_hash(log.theta, log.momentum):
            self.wrong |= {(record.fragment, check), (record.fragment, record.state_hash)}
            self.wrong_entries += 1
            self.logs[record.fragment] = before  # no process goes by it
            if self.forgetful:
                before.past.pop()
            return f"{what}: WRONG"
        log.epoch, log.head, log.version = record.epoch, check, record.version
        demand(record.state_hash == state_hash(log.theta, log.momentum), f"{what}: does not fold to its state hash")
        demand(record.tokens_merged == log.merged_tokens, f"{what}: {record.tokens_merged} tokens, members {log.merged_tokens}")
        demand(record.tokens_lost == sum(log.lost.values()), f"{what}: {record.tokens_lost} tokens lost")
        self.lost -= {
            (record.fragment, check),
            (record.fragment, record.state_hash),
        }  # it may be stored again, by who was not told that it was stored before
        log.closed = log.closed or record.closing
        log.sequences.append(sequence)
        if makes:
            self.versions_made += 1
            self.bits[record.bits] += 1
        if record.version == len(log.hashes):
            log.remember()
        return f"{what}: {', '.join(f'{m.learner}/{m.number}' for m in record.members)}{' closing' if record.closing else ''}"

    def _go_back(self, record: Record, log: FragmentLog, body: NDArray[np.uint8], what: str) -> None:
        made = record.rolled_back
        assert made is not None
        ordered = [fragments for number, to, fragments in self.orders if (number, to) == (made.change, made.to_version)]
        demand(any(record.fragment in fragments for fragments in ordered), f"{what}: {made} was not ordered")
        known = log.rolled_back
        demand(known is None or known.change < made.change, f"{what}: change {made.change} again, or after {known}")
        demand(made.to_version < log.version and made.version == record.version, f"{what}: {made} at version {log.version}")
        demand(not record.members and not record.closing, f"{what}: it merges {record.members}")
        theta, momentum = log.thetas[made.to_version], log.momenta[made.to_version]
        demand(body.tobytes() == theta.tobytes() + momentum.tobytes(), f"{what}: not the state of version {made.to_version}")
        log.theta, log.momentum, log.rolled_back = theta, momentum, made
        self.rollbacks += 1

    def _merge(self, record: Record, log: FragmentLog, body: NDArray[np.uint8], what: str) -> None:
        demand(bool(record.members), f"{what}: no members")
        delta = decode(body, log.theta.size, record.bits)
        total, expected = sum(member.weight for member in record.members), np.zeros_like(delta)
        together = self._see_combinations(record, what)
        for member in record.members:
            identity = (record.fragment, member.learner, member.incarnation, member.number)
            named = f"{what}: offer {member.number} of {member.learner}, incarnation {member.incarnation}"
            demand(identity in self.offers, f"{named} was never stored")
            offer, values = self.offers[identity]
            cursor = log.cursors.get(member.learner, (0, 0))
            demand((member.incarnation, member.number) > cursor, f"{named}: merged before, or older than one merged")
            demand(offer.after == cursor, f"{named}: made without knowing of {cursor}")
            stated = (member.round, member.base_version, member.steps, member.tokens, member.lost_tokens)
            offered = (offer.round, offer.base_version, offer.steps, offer.tokens, offer.lost_tokens)
            demand(member.data == offer.data, f"{named}: other batches in the record than in the offer")
            demand(stated == offered, f"{named}: {stated} in the record, {offered} in the offer")
            self._demand_base(log, offer, named)
            floor = log.rolled_back.version if log.rolled_back else 0
            demand(
                offer.base_version >= floor, f"{named}: made on version {offer.base_version}, before the rollback to {floor}"
            )
            kept = not self.archived or member.learner in together or identity in self._archive
            demand(kept, f"{named}: merged, and not in the archive")
            demand(not self.settings.round.lockstep or member.steps == 1, f"{named}: {member.steps} steps in lockstep")
            if self.exact and not self._is_state(record.fragment):
                held = (self.steps[index].applied.get(record.fragment, 0) for index in np.flatnonzero(values))
                demand(all(base >= floor for base in held), f"{named}: holds steps from before the rollback that made {floor}")
                log.steps += values
                most = int(np.argmax(log.steps))
                demand(log.steps[most] <= 1.001, f"{named}: step {most} of {self.steps[most].learner} is merged twice")
            for share, first, count in member.data:
                for batch in range(first, first + count):
                    merged = log.batches.get((share, batch), frozenset())
                    process = member.learner, member.incarnation
                    demand(process not in merged, f"{named}: batch {batch} of share {share} is merged twice")
                    log.batches[share, batch] = merged | {process}
                log.ends[share] = max(log.ends.get(share, 0), first + count)
            expected -= np.float32(member.weight / total) * values
            log.cursors[member.learner] = (member.incarnation, member.number)
            log.tokens[member.learner] = log.tokens.get(member.learner, 0) + member.tokens
            log.lost[member.learner] = member.lost_tokens
            log.merged_tokens += member.tokens
        if self._is_state(record.fragment):
            self._fold_state(record, log, delta, what)
            return
        if self._is_mean(record.fragment) and record.bits == 32:
            demand(bool(np.allclose(delta, expected, atol=1e-5)), f"{what}: its body is not the mean of its members' offers")
        if self.settings.outer.optimizer == "adamw":
            decay = decays(self.map.fragments[record.fragment], self.settings)
            log.theta, log.momentum = adamw(log.theta, log.momentum, delta, record, self.settings.inner.beta2, decay)
        else:
            log.theta, log.momentum = fold(log.theta, log.momentum, delta, record.learning_rate, record.momentum)

    def _fold_state(self, record: Record, log: FragmentLog, body: Vector, what: str) -> None:
        merged = [self.offers[record.fragment, m.learner, m.incarnation, m.number][1] for m in record.members]
        log.theta, log.momentum = fold(log.theta, log.momentum, body, record.learning_rate, record.momentum)
        wrong = merged_state.wrong_version(record, log.theta, merged)
        demand(not wrong, f"{what}: {wrong}")

    def _see_combinations(self, record: Record, what: str) -> set[str]:
        """The learners whose offers came as regional ones, each of which was stored and is whole in this version."""
        together: set[str] = set()
        for group in record.regional_offers:
            identity = (record.fragment, group.syncer, group.incarnation, group.number)
            named = f"{what}: regional offer {group.number} of {group.syncer}"
            demand(identity in self.combined, f"{named} was never stored")
            demand(not self.archived or identity in self._archived_regional_offer, f"{named}: merged, and not in the archive")
            members: list[MergeMember] = [record.members[place] for place in group.members]
            merged = [(member.learner, member.incarnation, member.number) for member in members]
            made = [(m.learner, m.incarnation, m.number) for m in self.combined[identity][0].members]
            demand(merged == made, f"{named}: merged as {merged}, made of {made}")
            together |= {member.learner for member in members}
            self.members_combined += len(members) * (len(members) > 1)
            self.late_combined += sum(member.round < record.version for member in members)
        return together

    def rewind(self, sequence: int) -> None:
        """The server has lost all of the log after ``sequence``: it was never committed."""
        self.rewound = True
        for index, log in enumerate(self.logs):
            kept = log
            while kept.past and kept.past[-1][0] > sequence:
                self.lost |= {(index, kept.head), (index, kept.hashes[kept.version])}
                kept = kept.past.pop()[1]
            del kept.hashes[kept.version + 1 :], kept.thetas[kept.version + 1 :], kept.accounts[kept.version + 1 :]
            del kept.momenta[kept.version + 1 :]
            kept.sequences = [own for own in kept.sequences if own <= sequence]
            kept.keyframes = [(head, entry) for head, entry in kept.keyframes if head <= sequence]
            self.logs[index] = kept

    def purged(self, fragment: int, heads: set[int]) -> None:
        """Some of a fragment's log was dropped; ``heads`` are the sequences of the entries and keyframes that are left."""
        log = self.logs[fragment]
        if not log.keyframes:
            return
        kept = [entry for head, entry in log.keyframes if head in heads][-self.settings.log.keep_keyframes :]
        right = [head for head, _ in log.keyframes if head in heads and (fragment, head) not in self.wrong_heads]
        demand(bool(right), f"fragment {fragment}: no keyframe is left that stands after an entry of the log")
        wanted = min(self.settings.log.keep_keyframes, len(log.keyframes))
        demand(len(kept) >= wanted, f"fragment {fragment}: {len(kept)} keyframes are left of {len(log.keyframes)}")
        missing = [sequence for sequence in log.sequences if sequence > min(kept) and sequence not in heads]
        demand(not missing, f"fragment {fragment}: entries {missing} after a keyframe were dropped")

    def observe_key(self, process: tuple[str, int], key: str, value: bytes, revision: int) -> None:
        """Look at a key of the bucket as it is set by a process."""
        if key.startswith(PREFIX) and not self.rewound:  # a revision that was lost is given again
            self._see_claim(process, key.removeprefix(PREFIX), value, revision)
        if key == "owners":
            table = msgspec.msgpack.decode(value, type=OwnersTable)
            shards = self.settings.shards
            demand(len(table.holders) <= shards, f"{table.holders} share the fragments, at most {shards} may")
            demand(set(table.owners) <= set(table.holders), f"{table.owners} own fragments, {table.holders} hold")

    def _see_claim(self, process: tuple[str, int], learner: str, value: bytes, revision: int) -> None:
        demand(learner == process[0], f"{process[0]} writes the claim of {learner}")
        claim, before = leases.unpack(value, learner, revision, self.settings, OWN_TASK), self.claims.get(learner)
        held = {entry.share for entry in before.entries if entry.held} if before else set()
        for entry in claim.entries:
            if entry.share in held and not entry.held:
                own = max((b + 1 for s, b in self._trained.get(process, ()) if s == entry.share), default=0)
                what = f"share {entry.share} is freed at batch {entry.next}"
                demand(entry.next >= own, f"{what}, {learner} has trained up to {own}")
        old, ends = leases.fold(self.claims, self.settings.learners), self.ends()
        self.claims[learner] = claim
        new = leases.fold(self.claims, self.settings.learners)
        for share, lease in old.leases.items():
            batch = max(new.leases[share].next if share in new.leases else 0, ends.get(share, 0))
            demand(batch >= lease.next, f"share {share} goes back from batch {lease.next} to {batch}")
            holder = new.leases[share].holder if share in new.leases else None
            self.shares_taken_over += lease.holder not in (None, holder) and holder == learner

    # ---- what processes hold

    def take(self, step: Step, must_pass: dict[int, int]) -> None:
        """A learner begins a step; ``must_pass`` are the ends of the data merged when it began."""
        process, data = (step.learner, step.generation), (step.share, step.batch)
        what = f"{step.learner} trains batch {step.batch} of share {step.share}"
        trained = self._trained.setdefault(process, set())
        demand(data not in trained, f"{what} twice")
        demand(
            self.rewound or step.batch >= must_pass.get(step.share, 0),
            f"{what}, merged up to {must_pass.get(step.share)} when it began",
        )
        trained.add(data)

    def ends(self) -> dict[int, int]:
        """How far the data was merged, by share: of the fragment that is furthest."""
        ends: dict[int, int] = {}
        for log in self.logs:
            for share, end in log.ends.items():
                ends[share] = max(end, ends.get(share, 0))
        return ends

    def check_marked(self, learner: str, marked: list[int], accounts: list[tuple[int, int, int, int]], *, exact: bool) -> None:
        """A learner's state for a checkpoint of the run: at the versions of the mark, if that came in time; accounts add up.

        ``accounts``: by fragment the version applied, and tokens in all, merged not yet, and lost.
        """
        for index, (version, processed, held, lost) in enumerate(accounts):
            what = f"{learner}'s state for the marker {marked}, fragment {index}"
            # a mark may name versions that a server has lost meanwhile: those are not waited for
            at_the_cut = version == marked[index] or self.rewound or not exact
            demand(version >= marked[index] and at_the_cut, f"{what}: is at version {version}")
            if not self.rewound:
                merged = self.logs[index].accounts[version].get(learner, 0)
                demand(processed == merged + held + lost, f"{what}: {processed} tokens, {merged} + {held} + {lost}")

    def versions(self) -> dict[int, int]:
        """The newest version by fragment."""
        return {index: log.version for index, log in enumerate(self.logs)}

    def applied(self, learner: str, fragment: int, theta: Vector, before: int, newest: int | None) -> int:
        """A learner takes over a version, at one of its boundaries the last of a fragment being ``newest``: which one it is."""
        versions = self.logs[fragment].history.get(theta.tobytes()) if self.logs else None
        if versions is None or (newest is not None and newest not in versions):
            raise Violation(f"{learner} applies parameters of fragment {fragment} that are no version of the log")
        # after a rollback two versions have the same
        version = min((v for v in versions if v >= before), default=versions[-1]) if newest is None else newest
        demand(version >= before or self.rewound, f"{learner} applies version {version} of fragment {fragment} after {before}")
        return version

    def check_rows(self, who: str, fragment: int, version: int, take: Callable[[Vector], Vector], rows: Vector) -> None:
        """A process of an island takes over its rows of a version: they must be that version's. ``take`` picks them."""
        log = self.logs[fragment]
        if version < len(log.thetas) and np.array_equal(take(log.thetas[version]), rows):
            return
        known = (np.frombuffer(theta, np.float32) for theta, versions in log.history.items() if version in versions)
        if not any(np.array_equal(take(theta), rows) for theta in known):
            raise Violation(f"{who} writes rows of fragment {fragment} that are not version {version}'s")

    def check_end(self, learners: dict[str, tuple[list[Vector], dict[str, list[int]]]]) -> None:
        """The run is over: every learner holds the last versions, and tokens add up.

        ``learners``: by name the parameters applied last, and of the last heartbeat tokens in all, merged not yet, and lost.
        """
        for index, log in enumerate(self.logs):
            demand(log.closed, f"the log of fragment {index} is not closed")
            for name, (applied, accounts) in learners.items():
                demand(np.array_equal(applied[index], log.theta), f"{name} ended with another fragment {index} than the log's")
                processed, held, lost = (accounts[key][index] for key in ("tokens", "held", "lost"))
                merged = log.tokens.get(name, 0)
                demand(
                    processed == merged + held + lost,
                    f"{name}, fragment {index}: {processed} tokens processed, {merged} merged, {held} held, {lost} lost",
                )
                demand(held == 0, f"{name}, fragment {index}: holds {held} tokens beside the last version, which none merges")
        demand(len(self.logs) == len(self.map.fragments), "the run never began")
