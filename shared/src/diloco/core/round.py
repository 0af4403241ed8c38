"""The syncer's decisions: when a fragment's round opens, whose offers are in it, and when it closes.

A state machine that is *given* the time, the learners' pulses and their offers, and returns what to do; the syncer's service
and the simulators connect it to a network. One :class:`Roster` serves all fragments of a syncer, one :class:`Round` each of
them.

    idle --(K live learners took H steps since the version)--> open --(quorum, then grace or everybody)--> merging --> idle

A round is *closing* once the run's tokens are used up: it waits for everything that live learners still hold.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from diloco.core.chain import Chain
from diloco.core.pace import Average, first_due_steps, grace_s
from diloco.settings import RunSettings
from diloco.wire.messages import MAX_MEMBERS, MAX_MEMBERS_BYTES, Answer, Combined, Offer, Pulse, members_bytes

DEFAULT_STEP_S = 1.0
STUCK_PULSES = 4  # so long all live learners must have been waiting
ACTIVE = ("stepping", "waiting", "closing", "leaving")


@dataclass
class Seen:
    """What was last heard of a learner."""

    pulse: Pulse
    at_s: float
    since: dict[int, tuple[int, int]] = field(default_factory=dict)  # fragment: (version applied, step when first seen so)


class Roster:
    """The learners as one syncer hears them, by its own clock.

    It has the settings that are in force for all fragments' rounds, and who is ``barred``: whoever changes them sets both.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.barred: frozenset[str] = frozenset()  # learners that are not listened to
        self.learners: dict[str, Seen] = {}
        self._live: tuple[float, list[Seen]] | None = None  # at one moment, about which every fragment asks several times

    def hear(self, pulse: Pulse, now_s: float) -> bool:
        """Take in a pulse; False if it is not a learner's, a barred one's, or is older than what is known."""
        known = self.learners.get(pulse.learner)
        if pulse.learner in self.barred or pulse.role != "learner" or (known and _age(pulse) < _age(known.pulse)):
            return False
        fresh = known is None or known.pulse.incarnation != pulse.incarnation
        seen = Seen(pulse, now_s) if known is None or fresh else known
        seen.pulse, seen.at_s, self._live = pulse, now_s, None
        for fragment, version in enumerate(pulse.versions):
            if seen.since.get(fragment, (-1, 0))[0] != version:
                seen.since[fragment] = (version, pulse.step)
        self.learners[pulse.learner] = seen
        return True

    def change(self, settings: RunSettings, barred: frozenset[str]) -> None:
        """Go by other settings, and without other learners, from now on. What a barred one did so far stays counted."""
        self.settings, self.barred, self._live = settings, barred, None

    def live(self, now_s: float) -> list[Seen]:
        """Learners heard lately that take part, by name."""
        if self._live is None or self._live[0] != now_s:
            dead_s, heard = self.settings.liveness.dead_s, sorted(self.learners.items())
            taking_part = [seen for name, seen in heard if name not in self.barred and seen.pulse.state in ACTIVE]
            self._live = now_s, [seen for seen in taking_part if now_s - seen.at_s < dead_s]
        return self._live[1]

    def step_s(self, now_s: float) -> float:
        """xi_step: the median of the live learners' step times."""
        times = [seen.pulse.step_s for seen in self.live(now_s) if seen.pulse.step_s > 0]
        return statistics.median(times) if times else DEFAULT_STEP_S

    def tokens_processed(self) -> int:
        """Tokens processed by all learners ever heard of."""
        return sum(seen.pulse.tokens for seen in self.learners.values())

    def used_up(self, now_s: float) -> bool:
        """Whether the token budget is used up, or every live learner has stopped because it was.

        What a learner did between its last offer and a crash is counted no more. That can bring the count below the budget
        when all have stopped for good, and nobody would take the steps that are missing.
        """
        live = self.live(now_s)
        stopped = bool(live) and all(seen.pulse.state == "closing" for seen in live)
        return stopped or self.tokens_processed() >= self.settings.tokens


def _age(pulse: Pulse) -> tuple[int, int, int]:
    return pulse.incarnation, pulse.step, pulse.tokens


@dataclass(frozen=True, eq=False)
class Held:
    """An offer, one learner's or a combined one, with its checked, uncompressed body."""

    offer: Offer | Combined
    body: NDArray[np.uint8]


@dataclass(frozen=True)
class Merge:
    """Close the round: merge these offers, in this order, into the next version."""

    version: int
    held: tuple[Held, ...]
    closing: bool
    quorum_s: float
    round_s: float


H = TypeVar("H", bound=Held)


def fitting(offered: Iterable[H], size_bytes: Callable[[H], int]) -> tuple[H, ...]:
    """As many offers as a message has room for, by name; those that have waited longest first, the rest waits for the next."""
    held: list[H] = []
    left_bytes, left = MAX_MEMBERS_BYTES, MAX_MEMBERS
    for item in sorted(offered, key=lambda item: (min(m.round for m in item.offer.members), _first(item))):
        left_bytes, left = left_bytes - size_bytes(item), left - len(item.offer.members)
        if left_bytes < 0 or left < 0:
            break
        held.append(item)
    return tuple(sorted(held, key=_first))


def _first(held: Held) -> str:
    return held.offer.members[0].learner


def identity(offer: Offer | Answer) -> tuple[int, int]:
    """What only grows from one of a learner's offers of a fragment to the next."""
    return offer.incarnation, offer.number


def unfit(offer: Offer | Answer, chain: Chain, hashes: Mapping[int, bytes], max_staleness_versions: int) -> str | None:
    """Why an offer may not be in the version after ``chain``, or None. ``hashes``: its state hashes, as far back as known."""
    merged = chain.cursor(offer.learner)
    if chain.closed:
        return "the run is closed"
    if identity(offer) <= merged:
        return f"merged already, as {merged} or before"
    if offer.after != merged:
        return f"made without knowing that {merged} was merged (it states {offer.after})"
    if offer.base_version > chain.version or offer.round > chain.version + 1:
        return f"from the future: base {offer.base_version}, round {offer.round}, log at {chain.version}"
    if offer.base_version < chain.floor:
        return f"its base {offer.base_version} is of before the rollback that made version {chain.floor}"
    if chain.version - offer.base_version > max_staleness_versions:
        return f"its base {offer.base_version} is too old, log at {chain.version}"
    if hashes.get(offer.base_version, offer.base_hash) != offer.base_hash:
        return f"its base {offer.base_version} has another state hash than the log's"
    return None


@dataclass
class Round:
    """One fragment's rounds. ``chain`` is the fragment's log as the owner has folded it."""

    roster: Roster
    chain: Chain
    fragments: int
    hashes: dict[int, bytes] = field(default_factory=dict)  # state hash by version, as far back as offers may go
    held: dict[str, Held] = field(default_factory=dict)  # by learner: the newest acceptable offer that its work is in
    opened_at_s: float | None = None
    closing: bool = False
    quorum_at_s: float | None = None
    stuck_at_s: float | None = None  # since when nobody takes a step, and too few are ready
    merge_at_s: float | None = None  # since when its merge is being made and committed
    quorum_average: Average = field(default_factory=Average)
    sync_average: Average = field(default_factory=Average)

    def __post_init__(self) -> None:
        self.hashes[self.chain.version] = self.chain.state_hash

    @property
    def settings(self) -> RunSettings:
        """Those that are in force."""
        return self.roster.settings

    @property
    def version(self) -> int:
        """The version that the open, or next, round makes."""
        return self.chain.version + 1

    def refuse(self, offer: Offer | Combined) -> str | None:
        """Why an offer is not held for the next merge, or None if it is fit for it.

        A combined one is as fit as the least of its members. It takes the place of all that is held of any of them: it must
        have something newer of them, or something of more learners, and nothing older.
        """
        known = {o.learner: identity(o) for held in self._over(offer) for o in held.offer.members}
        own = {o.learner: identity(o) for o in offer.members}
        newer = any(own[name] > known[name] for name in own.keys() & known.keys())
        older = any(own[name] < known[name] for name in own.keys() & known.keys())
        if older or not (newer or own.keys() > known.keys()):
            return "superseded by a newer offer, or a duplicate"
        return next((reason for o in offer.members if (reason := self._unfit(o)) is not None), None)

    def hold(self, held: Held) -> str | None:
        """Keep an offer for the next merge; the reason if it is refused."""
        reason = self.refuse(held.offer)
        if reason is None:
            gone = self._over(held.offer)
            self.held = {name: other for name, other in self.held.items() if other not in gone}
            self.held |= {member.learner: held for member in held.offer.members}
        return reason

    def answers(self) -> list[Offer | Answer]:
        """What answers the open round itself: of each learner at most one."""
        return [o for held in self._held() for o in held.offer.members if o.round == self.version]

    def quorum(self, now_s: float) -> int:
        """Learners that must answer the open round.

        Once the budget is used up, not more than there are with something to answer; if one leaves, not more than there are.
        """
        present = self._present(now_s)
        needed = self.settings.quorum(len(present))
        if self.roster.used_up(now_s):
            fragment, answered = self.chain.fragment, {answer.learner for answer in self.answers()}
            present = [seen for seen in present if seen.pulse.steps[fragment] or seen.pulse.learner in answered]
        elif not self._leavers(now_s):
            return needed
        return min(needed, len(present))

    def due(self, now_s: float, steps: int) -> bool:
        """Whether a round should open now, where ``steps`` inner steps are to lie between two of them."""
        if self.opened_at_s is not None or self.chain.closed:
            return False
        if self.roster.used_up(now_s) or self._leavers(now_s):
            return True
        if self.settings.round.lockstep:  # no step is taken without it: whoever ends one is to find the round open
            return bool(self._present(now_s))
        fragment = self.chain.fragment
        needed = steps if self.chain.version else first_due_steps(self.settings.round, fragment, self.fragments)
        ready, present = 0, self._present(now_s)
        for seen in present:
            version, first_step = seen.since.get(fragment, (-1, 0))
            taken = seen.pulse.step - (first_step if self.chain.version else 0)
            if seen.pulse.state == "waiting":  # it takes no step until a version comes, whatever was heard of those before
                taken = max(taken, seen.pulse.steps[fragment])
            ready += version == self.chain.version and taken >= needed
        if ready >= max(1, self.quorum(now_s)):
            return True
        # after a rollback learners count from different steps: some may wait for this fragment, and the others for another one
        if not ready or any(seen.pulse.state != "waiting" for seen in present):
            self.stuck_at_s = None
            return False
        self.stuck_at_s = now_s if self.stuck_at_s is None else self.stuck_at_s
        return now_s - self.stuck_at_s >= STUCK_PULSES * self.settings.liveness.pulse_s

    def open(self, now_s: float) -> None:
        """Open the round; it is a closing one if the budget is used up."""
        self.opened_at_s, self.quorum_at_s, self.closing = now_s, None, self.roster.used_up(now_s)
        self.stuck_at_s = None

    def remaining_s(self, now_s: float) -> float:
        """How long the round will presumably stay open."""
        if self.opened_at_s is None:
            return 0.0
        quorum_at_s = self.opened_at_s + self.quorum_average.get() if self.quorum_at_s is None else self.quorum_at_s
        return max(0.0, quorum_at_s + self._grace_s(now_s) - now_s)

    def poll(self, now_s: float) -> Merge | None:
        """Look whether the open round may close; if so, it is merging until :meth:`committed` or :meth:`abandoned`."""
        if self.opened_at_s is None or self.merge_at_s is not None:
            return None
        answers = {answer.learner: answer.steps for answer in self.answers()}
        if self.quorum_at_s is None and len(answers) >= self.quorum(now_s) and any(answers.values()):
            self.quorum_at_s = now_s
            self.quorum_average.add(now_s - self.opened_at_s)
        if not answers and self.roster.used_up(now_s) and self._all_in(now_s):
            self.closing = True  # opened before the end, and nobody is left who could answer
        if self.closing:
            ready = self._all_in(now_s)
        else:
            ready = self.quorum_at_s is not None and (
                not self._waiting_for(answers, now_s) or now_s >= self.quorum_at_s + self._grace_s(now_s)
            )
        if not ready:
            return None
        self.merge_at_s = now_s
        quorum_at_s = now_s if self.quorum_at_s is None else self.quorum_at_s
        offered = [held for held in self._held() if any(o.steps for o in held.offer.members)]
        held = fitting(offered, lambda item: members_bytes(item.offer))
        closing = self.closing and len(held) == len(offered)
        return Merge(self.version, held, closing, quorum_at_s - self.opened_at_s, now_s - self.opened_at_s)

    def committed(self, now_s: float) -> None:
        """The merge became a version (the chain has advanced): forget what is in it, and wait for the next round."""
        if self.merge_at_s is not None:
            self.sync_average.add(now_s - self.merge_at_s)
        self.hashes[self.chain.version] = self.chain.state_hash
        oldest = self.chain.version - self.settings.round.max_staleness_versions
        self.hashes = {version: value for version, value in self.hashes.items() if version >= oldest}
        self._keep_fit()
        self.opened_at_s = self.merge_at_s = None

    def changed(self) -> None:
        """The settings, or who is barred, are others: what is held may be unfit by now."""
        self._keep_fit()

    def without(self, learners: Collection[str]) -> None:
        """The merge is abandoned: it held offers of ``learners``, which are to be in none. The rest needs a quorum again."""
        self.held = {
            name: held for name, held in self.held.items() if not any(o.learner in learners for o in held.offer.members)
        }
        self.merge_at_s = self.quorum_at_s = None

    def abandoned(self) -> None:
        """The merge did not become a version: the round is open again."""
        self.merge_at_s = None

    def _keep_fit(self) -> None:
        self.held = {name: held for name, held in self.held.items() if all(self._unfit(o) is None for o in held.offer.members)}

    def _held(self) -> list[Held]:
        """Each offer once."""
        return list(dict.fromkeys(self.held.values()))

    def _over(self, offer: Offer | Combined) -> set[Held]:
        """What is held of an offer's members."""
        return {self.held[member.learner] for member in offer.members if member.learner in self.held}

    def _unfit(self, offer: Offer | Answer) -> str | None:
        if offer.learner in self.roster.barred:
            return f"{offer.learner} is ejected or quarantined"
        return unfit(offer, self.chain, self.hashes, self.settings.round.max_staleness_versions)

    def _grace_s(self, now_s: float) -> float:
        return grace_s(self.settings.round, self.roster.step_s(now_s), self.quorum_average.get(), self.sync_average.get())

    def _waiting_for(self, answers: Collection[str], now_s: float) -> list[Seen]:
        return [seen for seen in self._present(now_s) if seen.pulse.learner not in answers]

    def _present(self, now_s: float) -> list[Seen]:
        """Live learners, but for those that leave and hold nothing of this fragment any more."""
        fragment = self.chain.fragment
        return [seen for seen in self.roster.live(now_s) if seen.pulse.state != "leaving" or seen.pulse.steps[fragment]]

    def _leavers(self, now_s: float) -> list[Seen]:
        """Learners whose last work is to be merged before they go: they know the newest version, and hold steps beyond it."""
        fragment, version = self.chain.fragment, self.chain.version
        return [
            seen for seen in self._present(now_s) if seen.pulse.state == "leaving" and seen.pulse.versions[fragment] == version
        ]

    def _all_in(self, now_s: float) -> bool:
        """Whether nothing that live learners hold is missing from a closing round.

        An answer is not enough: it may be one that its learner gave an owner before this one, and have stepped on since.
        """
        fragment, answers = self.chain.fragment, {answer.learner: answer.steps for answer in self.answers()}
        return all(
            seen.pulse.state in ("closing", "leaving")
            and seen.pulse.versions[fragment] == self.chain.version
            and seen.pulse.steps[fragment] <= answers.get(seen.pulse.learner, 0)
            for seen in self.roster.live(now_s)
        )
