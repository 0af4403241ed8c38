"""A region's merge of its own learners' offers, before they cross to the region of a fragment's owner (``regions.merge``).

For each fragment that is owned elsewhere, one syncer of the region stands in for the owner's collector: it holds the newest
offer of each of the region's learners, by the same rules, and when a round's answers are in, it merges all that is fit, late
answers of earlier rounds too, as an owner would. The combined offer is cumulative: a later one of the same region holds
whatever is not merged yet, so it replaces the one before, and one that is lost loses nothing.

It waits for all of the region's live learners, but after the first answer no longer than what is then left of the overlap
budget: a grace window without commit time, since to be late by a version costs less than to cross twice. With the quorum
``all`` the owner waits for everybody, and so does this. Who answers after that comes with the next round, unless the round
stays open for so long that its owner must be waiting for more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diloco.core import merging, quantise
from diloco.core.chain import Chain
from diloco.core.fragments import Fragment
from diloco.core.pace import Average, grace_s
from diloco.core.round import Held, Roster, fitting, identity, unfit
from diloco.settings import Bits, RunSettings
from diloco.wire.messages import Announcement, Offer, Record, answer_bytes

Vector = NDArray[np.float32]
OUTSTANDING = 4  # combined offers whose fate is unknown: what quantisation left over of older ones is forgotten


@dataclass(frozen=True, eq=False)
class Own(Held):
    """One learner's offer with its body."""

    offer: Offer


def bits_of(held: Sequence[Own]) -> Bits:
    """The bits of a combined offer: its members' fewest, which are what the owner has asked their region for."""
    return min(own.offer.bits for own in held)


@dataclass
class Combining:
    """One fragment's answers in a region. ``roster`` has the region's learners alone."""

    roster: Roster
    fragment: Fragment
    chain: Chain | None = None  # the fragment's log as it is known in the region; never changed in place
    hashes: dict[int, bytes] = field(default_factory=dict)  # its state hash by version, as far back as offers may go
    held: dict[str, Own] = field(default_factory=dict)  # the newest offer of each learner, also of a version not known yet
    round: int = 0  # version that the round last announced will make
    epoch: int = 0  # of its owner
    closing: bool = False
    answered: frozenset[tuple[str, tuple[int, int]]] = frozenset()  # answers to it that a combined offer holds
    heard_s: tuple[float, float] = (0.0, 0.0)  # when the round was first heard of, and last
    since_s: float | None = None  # when there was first an answer that no combined offer holds
    combined_s: float = -math.inf  # when answers to it were last combined
    quorum_average: Average = field(default_factory=Average)
    residual: Vector | None = None  # what quantisation left over of the last combined offer that was merged; None: nothing
    _sent: dict[int, Vector | None] = field(default_factory=dict)  # the same of those that may be merged yet, by number

    @property
    def settings(self) -> RunSettings:
        """Those that are in force."""
        return self.roster.settings

    def changed(self) -> None:
        """The settings, or who is barred, are others: what is held may be unfit by now, and is combined again."""
        self._keep_fit()
        self.since_s, self.answered, self.combined_s = None, frozenset(), -math.inf

    def hear(self, announced: Announcement, now_s: float) -> None:
        """A round is open."""
        if self.chain is not None and (announced.epoch < self.chain.epoch or announced.version <= self.chain.version):
            return  # from an owner that has been replaced, or late
        if announced.version != self.round:
            self.round, self.heard_s, self.closing = announced.version, (now_s, now_s), False
            self.since_s, self.answered, self.combined_s = None, frozenset(), -math.inf
        elif announced.epoch > self.epoch or (announced.closing and not self.closing):
            self.combined_s = -math.inf  # everybody answers again
        self.epoch, self.closing = announced.epoch, self.closing or announced.closing
        self.heard_s = self.heard_s[0], now_s

    def follow(self, chain: Chain, record: Record | None, mine: tuple[str, int]) -> None:
        """Take in the log's head, after ``record`` or (None) after it was loaded.

        ``mine``: name and incarnation of the syncer whose combined offers this one's are.
        """
        self.chain = chain
        self.hashes[chain.version] = chain.state_hash
        oldest = chain.version - self.settings.round.max_staleness_versions
        self.hashes = {version: value for version, value in self.hashes.items() if oldest <= version <= chain.version}
        self._keep_fit()
        if record is None or record.rolled_back is not None:  # which of them was merged is not known, or they are void
            self.residual, self._sent = None, {}
            return
        for combination in record.combined:
            if (combination.syncer, combination.incarnation) == mine:
                self.residual, self._sent = self._sent.get(combination.number), {}

    def refuse(self, offer: Offer) -> str | None:
        """Why an offer is of no use, or None."""
        newest = self.held.get(offer.learner)
        if newest is not None and identity(offer) <= identity(newest.offer):
            return "superseded by a newer offer, or a duplicate"
        return self._unfit(offer)

    def hold(self, held: Own) -> str | None:
        """Keep an offer; the reason if it is refused."""
        reason = self.refuse(held.offer)
        if reason is None:
            self.held[held.offer.learner] = held
        return reason

    def poll(self, now_s: float) -> tuple[Own, ...]:
        """The offers to combine now, in order of merging; none: there is nothing new, or it is to be waited."""
        fit = self._fit()
        answers = {own.offer.learner: own.offer for own in fit if own.offer.round == self.round}
        answered = frozenset((name, identity(offer)) for name, offer in answers.items())
        if answered <= self.answered:
            self.since_s = None
            return ()
        if self.heard_s[1] < self.combined_s + self.settings.round.overlap_steps * self.roster.step_s(now_s):
            return ()  # a late answer to a round that may be over
        if self.since_s is None:
            self.since_s = now_s
            if not self.answered:
                self.quorum_average.add(now_s - self.heard_s[0])
        if self._waits(answers, now_s) and (self.settings.round.quorum == "all" or now_s < self.since_s + self._grace_s(now_s)):
            return ()
        self.since_s, self.answered, self.combined_s = None, answered, now_s
        return fitting(fit, lambda own: answer_bytes(own.offer))

    def remaining_s(self, now_s: float) -> float | None:
        """How long there is still to be waited at most, as far as time alone decides."""
        if self.since_s is None or self.settings.round.quorum == "all":
            return None
        return max(0.0, self.since_s + self._grace_s(now_s) - now_s)

    def combine(self, held: Sequence[Own], residual: Vector | None) -> tuple[NDArray[np.uint8], Vector | None]:
        """The content of a combined offer, and what quantising it left over. May run in a thread.

        Raises:
            NonFiniteError: what they add up to is not finite.
        """
        merged = merging.accumulate(self.fragment, self.settings, held, lambda version: None, np.empty(0, np.float32)).result()
        bits = bits_of(held)
        if not self.settings.codec.error_feedback:
            return quantise.quantise(merged, bits), None
        if residual is not None:
            merged += residual
        return quantise.quantise(merged, bits, error=merged), merged

    def send(self, number: int, rest: Vector | None) -> None:
        """The combined offer ``number`` is about to be stored."""
        kept = sorted(self._sent)[-(OUTSTANDING - 1) :]
        self._sent = {known: self._sent[known] for known in kept} | {number: rest}

    def drop(self, held: Sequence[Own]) -> None:
        """Begin again without these offers, which together are not finite."""
        gone = {own.offer.learner for own in held}
        self.held = {name: own for name, own in self.held.items() if name not in gone}
        self.residual = None

    def _fit(self) -> list[Own]:
        """What the open round's version could have; nothing if the log as known here is not where that round is."""
        chain = self.chain
        if chain is None or chain.closed or self.round != chain.version + 1:
            return []
        return [own for own in self.held.values() if own.offer.base_version <= chain.version and own.offer.steps]

    def _waits(self, answers: dict[str, Offer], now_s: float) -> bool:
        """Whether a live learner of the region is to answer yet."""
        for seen in self.roster.live(now_s):
            pulse, answer = seen.pulse, answers.get(seen.pulse.learner)
            steps = pulse.steps[self.fragment.index]
            if answer is None and (steps or pulse.state not in ("closing", "leaving")):
                return True
            if answer is not None and self.closing and steps > answer.steps:
                return True  # it answered before the round was the closing one, and answers again
        return False

    def _keep_fit(self) -> None:
        self.held = {name: own for name, own in self.held.items() if self._unfit(own.offer) is None}

    def _unfit(self, offer: Offer) -> str | None:
        """Why an offer can be in no version to come. Of one that is ahead of the log as known here, nothing can be said yet."""
        if offer.learner in self.roster.barred:
            return f"{offer.learner} is ejected or quarantined"
        if self.chain is None or offer.base_version > self.chain.version:
            return None
        return unfit(offer, self.chain, self.hashes, self.settings.round.max_staleness_versions)

    def _grace_s(self, now_s: float) -> float:
        return grace_s(self.settings.round, self.roster.step_s(now_s), self.quorum_average.get(), 0.0)
