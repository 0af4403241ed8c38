"""A region's merge of its own learners' offers, before they cross to the region of a fragment's owner (``regions.merge``).

For each fragment that is owned elsewhere, one syncer of the region, its *regional aggregator*, stands in for the owner's
collector: it holds the newest offer of each of the region's learners, by the same rules, and when a round's answers are in, it
merges all fit offers, late answers of earlier rounds too, as an owner would. The regional offer is cumulative: a later one of
the same region holds all that is not merged yet, so it replaces the one before, and one that is lost loses nothing.

It waits for all of the region's live learners, but after the first answer no longer than the rest of the overlap budget: a
grace window without commit time, since to be late by a version costs less than to cross twice. With the quorum ``all`` the
owner waits for everybody, and so does this. A learner that answers after that comes with the next round, unless the round
stays open for so long that its owner must be waiting for more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.slots import SeenHeartbeat
from diloco.core.log.chain import Chain
from diloco.core.run.pace import MovingAverage, grace_s
from diloco.core.syncer import merging
from diloco.core.syncer.offer_fit import MissedOffer, identity, unfit
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import RoundOffer, fitting
from diloco.core.syncer.round_waits import RoundWaits
from diloco.core.tensors import quantise
from diloco.core.tensors.float_mode import exact
from diloco.core.tensors.fragments import Fragment
from diloco.settings.run import Bits, RunSettings
from diloco.wire.control import Announcement
from diloco.wire.entries import Record
from diloco.wire.offers import Offer, answer_bytes

Vector = NDArray[np.float32]
ELSEWHERE = ""  # stands for the learners of other regions
AHEAD = 8  # versions that a region's log may be behind by while announcements of them are remembered: they are repeated anyway
PENDING = 4  # regional offers whose fate is unknown: the residuals of older ones are forgotten


@dataclass(frozen=True, eq=False)
class HeldOffer(RoundOffer):
    """One learner's own offer with its checked, uncompressed body."""

    offer: Offer


def bits_of(held: Sequence[HeldOffer]) -> Bits:
    """Return the bits of a regional offer: the fewest of its members, which are those that the owner asked their region for."""
    return min(own.offer.bits for own in held)


@dataclass
class RegionalRound:
    """The answers to one fragment's rounds in a region. ``roster`` has the region's learners alone."""

    roster: Roster
    fragment: Fragment
    chain: Chain | None = None  # the fragment's log as it is known in the region; never changed in place
    hashes: dict[int, bytes] = field(default_factory=dict)  # its state hash by version, as far back as offers may go
    held: dict[str, HeldOffer] = field(
        default_factory=dict
    )  # the newest offer of each learner, also of a version not known yet
    round: int = 0  # version that the round last announced will make
    epoch: int = 0  # of its owner
    closing: bool = False
    ahead: dict[int, tuple[Announcement, float]] = field(
        default_factory=dict
    )  # by version, of rounds that the log is not at yet
    answered: frozenset[tuple[str, tuple[int, int]]] = frozenset()  # answers to it that a regional offer holds
    heard_s: tuple[float, float] = (0.0, 0.0)  # when the round was first heard of, and last
    since_s: float | None = None  # when there was first an answer that no regional offer holds
    combined_s: float = -math.inf  # when answers to it were last combined
    quorum_average: MovingAverage = field(default_factory=MovingAverage)
    on_trial: dict[str, HeldOffer] = field(default_factory=dict)  # by quarantined learner: its newest offer, to be judged
    usual: float = 0.0  # norm of a merge of the fragment (:func:`diloco.core.syncer.excess.usual`); 0: not known
    left_out: set[str] = field(default_factory=set)  # learners whose answers no merge can have: none of theirs is waited for
    waits: RoundWaits = field(default_factory=RoundWaits)
    residual: Vector | None = None  # of quantisation: of the last regional offer that was merged; None: none
    _sent: dict[int, Vector | None] = field(default_factory=dict)  # the residuals of those that may be merged yet, by number

    @property
    def settings(self) -> RunSettings:
        """The settings in force."""
        return self.roster.settings

    def changed(self) -> None:
        """Drop the offers that are unfit by other settings or excluded learners, and combine the others again."""
        self._drop_unfit()
        self.since_s, self.answered, self.combined_s = None, frozenset(), -math.inf

    def hear(self, announced: Announcement, now_s: float) -> None:
        """Take in that a round is open; one that the log is not at yet opens when it is.

        Any syncer can announce: no other round than the log's takes the place of the one that is open.
        """
        chain = self.chain
        if chain is None or announced.epoch < chain.epoch or announced.version <= chain.version:
            return  # from an owner that has been replaced, or late
        if announced.version > chain.version + 1:
            if announced.version <= chain.version + AHEAD:
                self.ahead[announced.version] = announced, now_s
            return
        if announced.version != self.round:
            self.round, self.heard_s, self.closing = announced.version, (now_s, now_s), False
            self.since_s, self.answered, self.combined_s = None, frozenset(), -math.inf
            self.left_out.clear()
            self.waits.end_round(self.roster.learners)
        elif announced.epoch > self.epoch or (announced.closing and not self.closing):
            self.combined_s = -math.inf  # all learners answer again
        self.epoch, self.closing = announced.epoch, self.closing or announced.closing
        self.heard_s = self.heard_s[0], now_s

    def follow(self, chain: Chain, record: Record | None, mine: tuple[str, int]) -> None:
        """Take in the log's head, after ``record`` or (None) after it was loaded.

        ``mine``: name and incarnation of the syncer that makes the regional offers here.
        """
        self.chain = chain
        self.ahead = {
            version: heard for version, heard in self.ahead.items() if chain.version < version <= chain.version + AHEAD
        }
        if chain.version + 1 in self.ahead:
            self.hear(*self.ahead.pop(chain.version + 1))
        self.hashes[chain.version] = chain.state_hash
        oldest = chain.version - self.settings.round.max_staleness_versions
        self.hashes = {version: value for version, value in self.hashes.items() if oldest <= version <= chain.version}
        self._drop_unfit()
        if record is None or record.rolled_back is not None:  # it is unknown which of them was merged, or they are void
            self.residual, self._sent = None, {}
            return
        for group in record.regional_offers:
            if (group.syncer, group.incarnation) == mine:
                self.residual, self._sent = self._sent.get(group.number), {}

    def refuse(self, offer: Offer, elapsed_s: float = math.inf) -> MissedOffer | None:
        """Return the reason why an offer is of no use; None: it is kept.

        ``elapsed_s``: from genesis until its server stored it; inf: not known.

        Raises:
            ClaimError: it states what cannot be.
        """
        newest = self.held.get(offer.learner)
        if newest is not None and identity(offer) <= identity(newest.offer):
            return MissedOffer("repeated", "superseded by a newer offer, or a duplicate")
        missed = self._unfit(offer, tried=self.roster.tries(offer))
        if missed is None:
            self.roster.judge([offer], self.chain, elapsed_s)
        return missed

    def hold(self, held: HeldOffer) -> MissedOffer | None:
        """Keep an offer. Return the reason if it is missed, else None; raise as :meth:`refuse` does.

        One of a quarantined learner is missed, and kept in ``on_trial`` to be judged.
        """
        missed = self.refuse(held.offer, held.elapsed_s)
        if missed is None and self.roster.tries(held.offer):
            self.on_trial[held.offer.learner] = held
            return MissedOffer("ejected", f"{held.offer.learner} is quarantined: its offer is judged, and not merged")
        if missed is None:
            self.held[held.offer.learner] = held
            self.left_out.discard(held.offer.learner)
            self.waits.deliver([held.offer.learner])
        return missed

    def poll(self, now_s: float) -> tuple[HeldOffer, ...]:
        """Return the offers to combine, sorted by learner; empty if none is due."""
        fit = self._fit()
        answers = {own.offer.learner: own.offer for own in fit if own.offer.round == self.round}
        answered = frozenset((name, identity(offer)) for name, offer in answers.items())
        if answered <= self.answered:
            self.since_s = None
            return ()
        if self.heard_s[1] < self.combined_s + self.settings.round.overlap_steps * self.roster.step_s(now_s):
            return ()  # a late answer to a round that may be over
        if self.since_s is None:
            self.since_s = self.waits.since_s = now_s
            if not self.answered:
                self.quorum_average.add(now_s - self.heard_s[0])
        if self._waits(answers, now_s) and (self.settings.round.quorum == "all" or now_s < self.since_s + self._grace_s(now_s)):
            return ()
        self.since_s, self.answered, self.combined_s = None, answered, now_s
        return fitting(fit, lambda own: answer_bytes(own.offer))

    def remaining_s(self, now_s: float) -> float | None:
        """Return the seconds until offers are combined at the latest; None: time alone does not decide."""
        if self.since_s is None or self.settings.round.quorum == "all":
            return None
        return max(0.0, self.since_s + self._grace_s(now_s) - now_s)

    @exact
    def combine(self, held: Sequence[HeldOffer], residual: Vector | None) -> tuple[NDArray[np.uint8], Vector | None]:
        """Return the content of a regional offer, uint8 [bytes], and its residual, float32 [size]; None without error feedback.

        ``residual``, float32 [size] or None, is added before quantising. May run in a thread.

        Raises:
            UnmergeableError: some offers cannot be merged; they are to be left out.
        """

        def together(held: Sequence[RoundOffer]) -> Vector:
            nothing = np.empty(0, np.float32)
            return merging.accumulate(self.fragment, self.settings, held, {}, nothing).result()

        what = f"fragment {self.fragment.index}, regional offer for version {self.round}"
        # learners of other regions are always there: no offer is all that there is
        merged = merging.within(together, held, self.fragment.size, self.usual, {ELSEWHERE}, self.settings, what)
        bits = bits_of(held)
        if not self.settings.codec.error_feedback:
            return quantise.quantise(merged, bits), None
        if residual is not None:
            merged += residual
        return quantise.quantise(merged, bits, error=merged), merged

    def send(self, number: int, rest: Vector | None) -> None:
        """Remember ``rest``, float32 [size] or None: the residual of the regional offer ``number``, which is to be stored."""
        kept = sorted(self._sent)[-(PENDING - 1) :]
        self._sent = {known: self._sent[known] for known in kept} | {number: rest}

    def without(self, learners: Collection[str]) -> None:
        """Combine the others again: offers of ``learners`` are to be in no merge, and none of theirs is waited for."""
        self.held = {name: own for name, own in self.held.items() if name not in learners}
        self.left_out.update(learners)
        self.since_s, self.answered, self.combined_s = None, frozenset(), -math.inf

    def _fit(self) -> list[HeldOffer]:
        """Return the offers that the open round's version could have; none if the round is not that of the log known here."""
        chain = self.chain
        if chain is None or chain.closed or self.round != chain.version + 1:
            return []
        return [own for own in self.held.values() if own.offer.base_version <= chain.version and own.offer.steps]

    def _waits(self, answers: dict[str, Offer], now_s: float) -> bool:
        """Whether a live learner of the region is to answer yet."""
        self.waits.answer(self.roster, answers, now_s)
        missing = [seen for seen in self.roster.live(now_s) if self._is_missing(seen, answers)]
        self.waits.blame(self.roster, missing, now_s, needed=self.settings.round.quorum == "all", closing=self.closing)
        return any(seen.heartbeat.learner not in self.waits.in_vain for seen in missing)

    def _is_missing(self, seen: SeenHeartbeat, answers: dict[str, Offer]) -> bool:
        heartbeat, answer = seen.heartbeat, answers.get(seen.heartbeat.learner)
        if heartbeat.learner in self.left_out or heartbeat.learner in self.waits.in_vain:
            return False
        steps = heartbeat.steps[self.fragment.index]
        if answer is None:
            return bool(steps) or heartbeat.state not in ("closing", "leaving")
        # it answered before the round was the closing one, and answers again
        return self.closing and steps > answer.steps

    def _drop_unfit(self) -> None:
        self.held = {name: own for name, own in self.held.items() if self._unfit(own.offer) is None}
        self.on_trial = {
            name: own
            for name, own in self.on_trial.items()
            if self.roster.tries(own.offer) and self._unfit(own.offer, tried=True) is None
        }

    def _unfit(self, offer: Offer, *, tried: bool = False) -> MissedOffer | None:
        """Return the reason why an offer can be in no version to come; None too for one ahead of the log as known here."""
        if offer.learner in self.roster.excluded and not tried:
            return MissedOffer("ejected", f"{offer.learner} is ejected or quarantined")
        if self.chain is None or offer.base_version > self.chain.version:
            return None
        return unfit(offer, self.chain, self.hashes, self.settings.round.max_staleness_versions)

    def _grace_s(self, now_s: float) -> float:
        return grace_s(self.settings.round, self.roster.long_step_s(now_s), self.quorum_average.get(), 0.0)
