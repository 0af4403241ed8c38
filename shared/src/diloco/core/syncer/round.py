"""The syncer's decisions: when a fragment's round opens, which offers are in it, and when it closes.

A state machine that is *given* the time, the learners' heartbeats and their offers, and returns a merge; the syncer's service
and the simulators connect it to a network. One :class:`~diloco.core.syncer.roster.Roster` serves all fragments of a syncer, one
:class:`Round` each of them.

    idle --(its slot in the cycle; K learners hold steps)--> open --(quorum, then grace or everybody)--> merging --> idle

A round is *closing* once the run's tokens are used up: it waits for all steps that live learners still hold. A learner that
is waited for in vain, while others are ready or have answered, is waited for no more until it delivers an offer; then for as
long as :mod:`diloco.core.syncer.patience` allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.slots import LongRounds, SeenHeartbeat, first_slot
from diloco.core.log.chain import Chain
from diloco.core.run.pace import MovingAverage, first_due_steps, grace_s
from diloco.core.syncer.offer_fit import MissedOffer, identity, unfit
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round_waits import RoundWaits, left_to_regions
from diloco.core.tensors import quantise
from diloco.settings.run import RunSettings
from diloco.wire.fields import MAX_MEMBERS
from diloco.wire.offers import MAX_MEMBERS_BYTES, Answer, Offer, RegionalOffer, members_bytes

STUCK_HEARTBEATS = 4  # heartbeats for which all live learners must have been waiting


@dataclass(frozen=True, eq=False)
class RoundOffer:
    """An offer, one learner's or a regional one, with its checked, uncompressed body."""

    offer: Offer | RegionalOffer
    body: NDArray[np.uint8]
    elapsed_s: float = math.inf  # from genesis until its server stored it; inf: not known
    _norms: dict[int, float] = field(default_factory=dict)

    def norm(self, size: int) -> float:
        """Return the norm of its outer gradient, of ``size`` values. The first time that is work for a thread."""
        if size not in self._norms:
            self._norms[size] = quantise.norm_of(self.body, size, self.offer.bits)
        return self._norms[size]


@dataclass(frozen=True)
class Merge:
    """Close the round: merge these offers, in this order, into the next version."""

    version: int
    held: tuple[RoundOffer, ...]
    closing: bool
    quorum_s: float
    round_s: float


H = TypeVar("H", bound=RoundOffer)


def fitting(offered: Iterable[H], size_bytes: Callable[[H], int]) -> tuple[H, ...]:
    """Return as many offers as a message has room for, sorted by learner.

    Those that have waited longest go first; the others wait for the next message.
    """
    held: list[H] = []
    left_bytes, left = MAX_MEMBERS_BYTES, MAX_MEMBERS
    for item in sorted(offered, key=lambda item: (min(m.round for m in item.offer.members), _first(item))):
        left_bytes, left = left_bytes - size_bytes(item), left - len(item.offer.members)
        if left_bytes < 0 or left < 0:
            break
        held.append(item)
    return tuple(sorted(held, key=_first))


def _first(held: RoundOffer) -> str:
    return held.offer.members[0].learner


@dataclass(frozen=True, kw_only=True)
class _Look:
    """The live learners as a fragment's round sees them at one moment."""

    live: list[SeenHeartbeat]
    log: tuple[bool, int, int]  # whether some log is closed; tokens merged and lost in this one
    used_up: bool  # whether the budget is
    halted: tuple[str, ...]  # states of learners that take no further step, and are merged before anything else
    present: list[SeenHeartbeat]  # the learners that a quorum is made of
    stopped_early: bool  # whether one has stopped by its own account of the budget, long before the others


@dataclass
class Round:
    """The rounds of one fragment. ``chain`` is the fragment's log as the owner has folded it."""

    roster: Roster
    chain: Chain
    fragments: int
    hashes: dict[int, bytes] = field(default_factory=dict)  # state hash by version, as far back as offers may go
    held: dict[str, RoundOffer] = field(default_factory=dict)  # by learner: the newest acceptable offer that holds its steps
    on_trial: dict[str, RoundOffer] = field(default_factory=dict)  # by quarantined learner: its newest offer, to be judged
    opened_at_s: float | None = None
    closing: bool = False
    quorum_at_s: float | None = None
    stuck_at_s: float | None = None  # since when no learner takes a step, and too few are ready
    merge_at_s: float | None = None  # since when its merge is being made and committed
    put_off_s: float = -math.inf  # until then it merges nothing
    left_out: set[str] = field(default_factory=set)  # learners whose answers no merge can have: the round waits for no other
    waits: RoundWaits = field(default_factory=RoundWaits)
    quorum_average: MovingAverage = field(default_factory=MovingAverage)
    sync_average: MovingAverage = field(default_factory=MovingAverage)  # from a round's end until its version is stored
    answer_average: MovingAverage = field(default_factory=MovingAverage)  # from a round's announcement to its first answer
    long_rounds: LongRounds = field(default_factory=LongRounds)  # those that were in slots
    _steps: int = 0  # inner steps between two rounds, as they were when it was last asked whether one is due
    _answered: bool = False  # whether the open round has an answer
    _opened_at_step: float | None = None  # by the reference's clock: when its last round was opened here
    _seen: _Look | None = None  # asked for several times at one moment
    _near: tuple[tuple[int, int, int], bool] | None = None  # by budget, merged and lost tokens: whether the log is near its end

    def __post_init__(self) -> None:
        self.hashes[self.chain.version] = self.chain.state_hash
        self._steps = self.settings.round.steps

    @property
    def settings(self) -> RunSettings:
        """The settings in force."""
        return self.roster.settings

    @property
    def version(self) -> int:
        """The version that the open, or next, round makes."""
        return self.chain.version + 1

    def refuse(self, offer: Offer | RegionalOffer, elapsed_s: float = math.inf) -> MissedOffer | None:
        """Return the reason why an offer is not held for the next merge; None: it is fit.

        ``elapsed_s``: from genesis until its server stored it; inf: not known.

        A regional offer is as fit as the least fit of its members. It replaces every offer held of any of them: it must have
        something newer of them, or something of more learners, and nothing older.

        Raises:
            ClaimError: a member states what cannot be.
        """
        known = {o.learner: identity(o) for held in self._over(offer) for o in held.offer.members}
        if known:
            own = {o.learner: identity(o) for o in offer.members}
            newer = any(own[name] > known[name] for name in own.keys() & known.keys())
            older = any(own[name] < known[name] for name in own.keys() & known.keys())
            if older or not (newer or own.keys() > known.keys()):
                return MissedOffer("repeated", "superseded by a newer offer, or a duplicate")
        tried = self.roster.tries(offer)
        missed = next((missed for o in offer.members if (missed := self._unfit(o, tried=tried)) is not None), None)
        if missed is None:
            self.roster.judge(offer.members, self.chain, elapsed_s)
        return missed

    def hold(self, held: RoundOffer) -> MissedOffer | None:
        """Keep an offer for the next merge. Return the reason if it is missed, else None; raise as :meth:`refuse` does.

        One of a quarantined learner is missed, and kept in ``on_trial`` to be judged.
        """
        missed = self.refuse(held.offer, held.elapsed_s)
        if missed is None and self.roster.tries(held.offer):
            self.on_trial[_first(held)] = held
            return MissedOffer("ejected", f"{_first(held)} is quarantined: its offer is judged, and not merged")
        if missed is None:
            self.waits.deliver(member.learner for member in held.offer.members)
            self._seen = None
            if gone := self._over(held.offer):
                self.held = {name: other for name, other in self.held.items() if other not in gone}
            self.held |= {member.learner: held for member in held.offer.members}
            self.left_out -= self.held.keys()
        return missed

    def answers(self) -> list[Offer | Answer]:
        """Return the offers, of each learner at most one, that answer the open round itself."""
        return [o for held in self._held() for o in held.offer.members if o.round == self.version]

    def quorum(self, now_s: float) -> int:
        """Return how many learners must answer the open round; "all" are also those that may be about to take part.

        Once the budget is used up, not more than have steps to answer with. If one leaves, or has stopped for good before the
        others, not more than there are.
        """
        present = self._present(now_s)
        needed = self.settings.quorum(len(present) + self.roster.expected(self.chain, now_s))
        if self._used_up(now_s):
            fragment, answered = self.chain.fragment, {answer.learner for answer in self.answers()}
            present = [seen for seen in present if seen.heartbeat.steps[fragment] or seen.heartbeat.learner in answered]
        elif not self._leavers(now_s) and not self._look(now_s).stopped_early:
            return needed
        return min(needed, len(present))

    def due(self, now_s: float, steps: int) -> bool:
        """Whether a round should open now, where ``steps`` inner steps are to lie between two of them."""
        self._steps = steps
        if self.opened_at_s is not None or self.chain.closed:
            return False
        if self._used_up(now_s) or self._leavers(now_s):
            return True
        if self.settings.round.lockstep:  # no step is taken without it: a learner that ends one is to find the round open
            return bool(self._present(now_s))
        if not self.settings.round.learners_wait:
            return self._in_slot(now_s, steps) and self._are_enough(self._ready(now_s, 1), now_s)
        # learners stop where they expect a round: so many steps after its last version, and not in a slot
        needed = steps if self.chain.version else first_due_steps(self.settings.round, self.chain.fragment, self.fragments)
        ready = self._ready(now_s, needed)
        if self._are_enough(ready, now_s):
            return True
        # after a rollback learners count from different steps: some may wait for this fragment, and the others for another one
        expected = self.roster.expected(self.chain, now_s)
        if not ready or expected or any(seen.heartbeat.state != "waiting" for seen in self._present(now_s)):
            self.stuck_at_s = None
            return False
        self.stuck_at_s = now_s if self.stuck_at_s is None else self.stuck_at_s
        return now_s - self.stuck_at_s >= STUCK_HEARTBEATS * self.settings.liveness.heartbeat_s

    def _in_slot(self, now_s: float, steps: int) -> bool:
        """Whether the fragment's slot in a cycle of ``steps`` steps has just begun, and its last round is half a cycle ago."""
        clock, fragment = self.roster.clock(now_s), self.chain.fragment
        if clock.reference is None or not clock.in_slot(steps, fragment, self.fragments):
            return False
        if self._opened_at_step is not None:
            return clock.elapsed - self._opened_at_step >= steps / 2
        if not self.chain.version:
            return clock.position >= first_slot(steps, fragment, self.fragments)
        return clock.reference.heartbeat.steps[fragment] >= steps / 2  # another owner opened the last one

    def _ready(self, now_s: float, needed: int) -> int:
        """Return how many learners have taken ``needed`` steps since they applied the newest version; blame the others."""
        present = self._present(now_s)
        missing = [seen for seen in present if not self._is_ready(seen, needed)]
        ready = len(present) - len(missing)
        if ready:
            self._blame(missing, now_s, needed=self.quorum(now_s) >= len(present))
        else:
            self.waits.since_s = None
        if len(present) < max(1, self.quorum(now_s)):  # those given up count once they are ready, or no round would open
            ready += sum(self._is_ready(seen, needed) for seen in self._given_up(now_s))
        return ready

    def _are_enough(self, ready: int, now_s: float) -> bool:
        return ready >= max(1, self.quorum(now_s))

    def _is_ready(self, seen: SeenHeartbeat, needed: int) -> bool:
        """Whether a learner knows the newest version and has ``needed`` steps for the next one."""
        fragment = self.chain.fragment
        version, first_step = seen.since.get(fragment, (-1, 0))
        taken = seen.heartbeat.step - (first_step if self.chain.version else 0)
        # it takes no step until a version comes, whatever earlier heartbeats said; or some are left of those before the version
        if seen.heartbeat.state == "waiting" or not self.settings.round.learners_wait:
            taken = max(taken, seen.heartbeat.steps[fragment])
        return version == self.chain.version and taken >= needed

    def open(self, now_s: float) -> None:
        """Open the round; it is a closing one if the budget is used up."""
        self.opened_at_s, self.quorum_at_s, self.closing = now_s, None, self._used_up(now_s)
        self._answered = False
        self.stuck_at_s = self.waits.since_s = None
        self._opened_at_step = self.roster.clock(now_s).elapsed

    def next_look_s(self, now_s: float, steps: int) -> float:
        """Return the seconds after which a round may be due though nothing is heard meanwhile: until the next slot."""
        if self.settings.round.learners_wait:
            return math.inf
        return self.roster.clock(now_s).next_slot_s(steps, self.chain.fragment, self.fragments)

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds that the round will presumably stay open."""
        if self.opened_at_s is None:
            return 0.0
        quorum_at_s = self.opened_at_s + self.quorum_average.get() if self.quorum_at_s is None else self.quorum_at_s
        return max(0.0, quorum_at_s + self._grace_s(now_s) - now_s)

    def poll(self, now_s: float) -> Merge | None:
        """Close the open round if it may close: it is merging until :meth:`committed`, :meth:`without` or :meth:`put_off`."""
        if self.opened_at_s is None or self.merge_at_s is not None or now_s < self.put_off_s:
            return None
        answers = {answer.learner: answer.steps for answer in self.answers()}
        self.waits.answer(self.roster, answers, now_s)
        if answers or self.closing:
            needed = self.quorum_at_s is None and self.quorum(now_s) >= len(self._present(now_s))
            self._blame(self._not_in(now_s) if self.closing else self._waiting_for(answers, now_s), now_s, needed=needed)
        if answers and not self._answered:
            self._answered = True
            self.answer_average.add(now_s - self.opened_at_s)
        if not any(answers.values()):
            self.quorum_at_s = None  # those who made it were excluded since: a merge of nothing would close the log
        elif self.quorum_at_s is None and len(answers) >= self.quorum(now_s):
            self.quorum_at_s = now_s
            self.quorum_average.add(now_s - self.opened_at_s)
        if not answers and self._used_up(now_s) and not self._not_in(now_s):
            self.closing = True  # opened before the end, and no learner is left that could answer
        return self._close(self.opened_at_s, now_s) if self._may_close(answers, now_s) else None

    def _may_close(self, answers: Collection[str], now_s: float) -> bool:
        if self.closing:
            return not self._not_in(now_s)
        if self.quorum_at_s is None:
            return False
        return not self._waiting_for(answers, now_s) or now_s >= self.quorum_at_s + self._grace_s(now_s)

    def _close(self, opened_at_s: float, now_s: float) -> Merge:
        self.merge_at_s = now_s
        quorum_at_s = now_s if self.quorum_at_s is None else self.quorum_at_s
        offered = [held for held in self._held() if any(o.steps for o in held.offer.members)]
        held = fitting(offered, lambda item: members_bytes(item.offer))
        closing = self.closing and len(held) == len(offered)
        return Merge(self.version, held, closing, quorum_at_s - opened_at_s, now_s - opened_at_s)

    def committed(self, now_s: float) -> None:
        """Wait for the next round: the merge became a version, the chain has advanced. Drop the offers that are in it."""
        if self.merge_at_s is not None:
            self.sync_average.add(now_s - self.merge_at_s)
        if self.opened_at_s is not None and not self.settings.round.learners_wait and not self.closing:
            # the version has its way to the learners before it, and their word that they have it: as long as to an answer
            round_s = now_s - self.opened_at_s + self.answer_average.get()
            self.long_rounds.add(round_s, self.roster.clock(now_s).cycle_s(self._steps))
        self.hashes[self.chain.version] = self.chain.state_hash
        oldest = self.chain.version - self.settings.round.max_staleness_versions
        self.hashes = {version: value for version, value in self.hashes.items() if version >= oldest}
        self.drop_unfit()
        self.left_out.clear()
        self._seen = None
        self.waits.end_round(self.roster.learners)
        self.opened_at_s = self.merge_at_s = None

    def without(self, learners: Collection[str]) -> None:
        """Abandon the merge: offers of ``learners`` are to be in none. The others need a quorum again.

        The round does not wait for these learners, until it holds another offer of theirs: they have answered.
        """
        self.held = {
            name: held for name, held in self.held.items() if not any(o.learner in learners for o in held.offer.members)
        }
        self.merge_at_s = self.quorum_at_s = self.waits.since_s = None
        self.left_out.update(learners)
        self._seen = None

    def put_off(self, until_s: float) -> None:
        """Abandon the merge, and make none before ``until_s``: then one of the offers that are held by that time."""
        self.merge_at_s, self.put_off_s = None, until_s

    def drop_unfit(self) -> None:
        """Drop the held offers that are unfit by now: the log, the settings or the excluded learners are others."""
        self.held = {name: held for name, held in self.held.items() if all(self._unfit(o) is None for o in held.offer.members)}
        self.on_trial = {
            name: held
            for name, held in self.on_trial.items()
            if self.roster.tries(held.offer) and self._unfit(held.offer.members[0], tried=True) is None
        }

    def _held(self) -> list[RoundOffer]:
        """Return each held offer once."""
        return list(dict.fromkeys(self.held.values()))

    def _over(self, offer: Offer | RegionalOffer) -> set[RoundOffer]:
        """Return the offers held of an offer's members."""
        return {self.held[member.learner] for member in offer.members if member.learner in self.held}

    def _unfit(self, offer: Offer | Answer, *, tried: bool = False) -> MissedOffer | None:
        if offer.learner in self.roster.excluded and not tried:
            return MissedOffer("ejected", f"{offer.learner} is ejected or quarantined")
        return unfit(offer, self.chain, self.hashes, self.settings.round.max_staleness_versions)

    def _grace_s(self, now_s: float) -> float:
        # an announcement and a version take half of the time of the quickest answer on their way
        sync_s = self.sync_average.get() + self.answer_average.get() / 2
        return grace_s(self.settings.round, self.roster.long_step_s(now_s), self.quorum_average.get(), sync_s)

    def _waiting_for(self, answers: Collection[str], now_s: float) -> list[SeenHeartbeat]:
        return [seen for seen in self._present(now_s) if seen.heartbeat.learner not in answers]

    def _look(self, now_s: float) -> _Look:
        """Return the learners as they are now."""
        live, roster, chain = self.roster.live(now_s), self.roster, self.chain
        log = roster.ending, chain.tokens_merged, chain.tokens_lost
        if self._seen is None or self._seen.live is not live or self._seen.log != log:
            known = roster.settings.tokens, chain.tokens_merged, chain.tokens_lost
            if self._near is None or self._near[0] != known:
                self._near = known, roster.in_reach(chain)
            used_up, stopped = roster.used_up(chain, now_s, near=self._near[1]), roster.stopped(now_s)
            halted = ("leaving", "closing") if stopped else ("leaving",)
            early = [seen for seen in live if seen.heartbeat.state == "closing" and roster.stands_still(seen, now_s)]
            early = [] if used_up or stopped else early
            without = self.waits.in_vain | self.left_out
            if self.settings.round.quorum == "all":
                regional = [held.offer for held in self._held() if isinstance(held.offer, RegionalOffer)]
                without |= left_to_regions(roster, live, regional, self.version) if regional else set()
            present = [
                seen
                for seen in live
                if seen.heartbeat.learner not in without
                and (seen.heartbeat.state not in halted or seen.heartbeat.steps[chain.fragment])
                and seen not in early
            ]
            self._seen = _Look(live=live, log=log, used_up=used_up, halted=halted, present=present, stopped_early=bool(early))
        return self._seen

    def _used_up(self, now_s: float) -> bool:
        """Whether the budget is used up, for good or as the learners are now."""
        return self._look(now_s).used_up

    def _blame(self, missing: Iterable[SeenHeartbeat], now_s: float, *, needed: bool) -> None:
        """Note that others wait for ``missing``, and wait no more for those that have had their time."""
        if self.waits.blame(self.roster, missing, now_s, needed=needed, closing=self.closing):
            self._seen = None

    def _present(self, now_s: float) -> list[SeenHeartbeat]:
        """Return the learners that a quorum is made of.

        Not of those that take no further step and hold none of this fragment, nor of those that stopped long before the end.
        """
        return self._look(now_s).present

    def _given_up(self, now_s: float) -> list[SeenHeartbeat]:
        """Return the live learners that were waited for in vain: they deliver nothing before a round opens."""
        return [seen for seen in self.roster.live(now_s) if seen.heartbeat.learner in self.waits.in_vain]

    def _leavers(self, now_s: float) -> list[SeenHeartbeat]:
        """Return the learners that take no further step, know the newest version and hold steps beyond it."""
        fragment, version, look = self.chain.fragment, self.chain.version, self._look(now_s)
        halted = [seen for seen in look.present if seen.heartbeat.state in look.halted]
        return [seen for seen in halted if seen.heartbeat.versions[fragment] == version]

    def _not_in(self, now_s: float) -> list[SeenHeartbeat]:
        """Return the live learners that a closing round waits for.

        An answer is not enough: its learner may have given it to an owner before this one, and have stepped on since.
        """
        fragment, answers = self.chain.fragment, {answer.learner: answer.steps for answer in self.answers()}
        return [
            seen
            for seen in self.roster.live(now_s)
            if seen.heartbeat.learner not in self.waits.in_vain | self.left_out
            and (
                seen.heartbeat.state not in ("closing", "leaving")
                or seen.heartbeat.versions[fragment] != self.chain.version
                or seen.heartbeat.steps[fragment] > answers.get(seen.heartbeat.learner, 0)
            )
        ]
