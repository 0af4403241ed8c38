"""Rounds for tests: learners' heartbeats and offers, and versions made by the log's own rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.made.heartbeats import learner_heartbeat
from tests.made.log_entries import BODY, hash_of, offer_of, record_of
from tests.made.run_settings import ROUNDS, settings_of

from diloco.core.log.chain import Chain
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Merge, Round, RoundOffer
from diloco.wire.control import Heartbeat
from diloco.wire.entries import Cursor
from diloco.wire.offers import Answer, MergeMember, Offer, RegionalOffer

RAW = np.zeros(0, np.uint8)
STEPS: int = ROUNDS["round.steps"]  # H of these tests


def offer(learner: str, number: int = 1, version: int = 1, **changes: Any) -> Offer:
    """An offer of version - 1 as its base, in answer to the round of ``version``."""
    base = changes.get("base_version", version - 1)
    values: dict[str, Any] = {
        "number": number,
        "round": version,
        "base_version": base,
        "base_hash": hash_of(base),
        "data": [(0, 4 * (version - 1), changes.get("steps", 4))],
    }
    return offer_of(learner, **(values | changes))


def round_of(*learners: str, **changes: Any) -> Round:
    """A round of version 1 over learners that were heard at ``now_s`` (0) when they had taken ``step`` (H) steps."""
    now_s, step = changes.pop("now_s", 0.0), changes.pop("step", STEPS)
    if "round.quorum" not in changes or changes["round.quorum"] == "all":
        changes = {"learners": max(1, len(learners))} | changes  # as many as the run has
    roster = Roster(settings_of(ROUNDS, **changes))
    for learner in learners:
        roster.hear(learner_heartbeat(learner, step), now_s)
    return Round(roster, Chain(0, 0, 0, bytes(32), 0, hash_of(0)), 1)


def hold(round_: Round, sent: Offer) -> str | None:
    """Offer to a round; return what it says where it passes the offer over."""
    missed = round_.hold(RoundOffer(sent, RAW))
    return None if missed is None else missed.text


def names(merge: Merge | None) -> list[tuple[str, int]] | None:
    return None if merge is None else [(member.learner, member.number) for member in members_of(merge)]


def members_of(merge: Merge) -> list[Offer | Answer]:
    return sorted((member for held in merge.held for member in held.offer.members), key=lambda member: member.learner)


def commit(round_: Round, merge: Merge, now_s: float) -> None:
    """Let the merge become a version, through the log's own rules."""
    chain = round_.chain
    offers = members_of(merge)
    members = [
        MergeMember(o.learner, o.incarnation, o.number, o.round, o.base_version, o.steps, o.tokens, o.lost_tokens, 1.0, o.data)
        for o in offers
    ]
    lost = {name: cursor.lost_tokens for name, cursor in chain.cursors.items()}
    lost |= {o.learner: o.lost_tokens for o in offers}
    record = record_of(
        merge.version if members else chain.version,
        *members,
        entry="version" if members else "close",
        previous=chain.head,
        tokens_merged=chain.tokens_merged + sum(o.tokens for o in offers),
        tokens_lost=sum(lost.values()),
        state_hash=hash_of(merge.version) if members else chain.state_hash,
        closing=merge.closing,
        committed_at_s=now_s,
        body=BODY if members else None,
    )
    chain.check(record)
    chain.advance(record, hash_of(10_000 + merge.version), merge.version)
    round_.committed(now_s)


def open_at(round_: Round, now_s: float) -> None:
    assert round_.due(now_s, STEPS)
    round_.open(now_s)


def log_of(tokens: int, *, lost: int = 0, **merged: tuple[int, int]) -> Chain:
    """Return a log that holds so many tokens; by learner: versions and tokens of its merged offers."""
    chain = Chain(0, 3, 0, bytes(32), 9, hash_of(3), tokens, lost)
    chain.cursors = {name: Cursor(name, 1, 1, versions, own, 0, own) for name, (versions, own) in merged.items()}
    return chain


def is_used_up(roster: Roster, chain: Chain, now_s: float) -> bool:
    return roster.used_up(chain, now_s, near=roster.in_reach(chain))


def combine(*offers: Offer, number: int = 1) -> RegionalOffer:
    return RegionalOffer(0, "syncer-1", 1, number, 4, [Answer.of(offer) for offer in offers], BODY)


def hold_combined(round_: Round, *offers: Offer) -> str | None:
    missed = round_.hold(RoundOffer(combine(*offers), RAW))
    return None if missed is None else missed.text


@dataclass
class Learner:
    """A learner as the protocol wants it, reduced to numbers: it may restart, and its messages may be late or doubled."""

    name: str
    incarnation: int = 1
    number: int = 1
    after: tuple[int, int] = (0, 0)
    version: int = 0
    step: int = 0
    steps: int = 0  # not merged yet
    tokens: int = 0
    done: int = 0  # tokens, in all
    merged: int = 0
    mailbox: list[Offer] = field(default_factory=list)

    def heartbeat(self) -> Heartbeat:
        values = {"incarnation": self.incarnation, "steps": [self.steps]}
        return learner_heartbeat(self.name, self.step, self.version, **values)

    def take_step(self) -> None:
        self.step += 1
        self.steps += 1
        self.tokens += 10
        self.done += 10

    def offer(self, version: int) -> None:
        changes = {"base_version": self.version, "base_hash": hash_of(self.version), "incarnation": self.incarnation}
        counters = {"steps": self.steps, "tokens": self.tokens, "after": self.after}
        self.mailbox.append(offer(self.name, self.number, version, **changes, **counters))
        self.number += 1

    def apply(self, merge: Merge) -> None:
        self.version = merge.version
        for merged in members_of(merge):
            if merged.learner == self.name:
                self.after = (merged.incarnation, merged.number)
                if merged.incarnation == self.incarnation:
                    self.steps -= merged.steps
                    self.tokens -= merged.tokens

    def restart(self, round_: Round) -> None:
        self.incarnation += 1
        self.number, self.steps, self.tokens = 1, 0, 0
        self.version, self.after = round_.chain.version, round_.chain.cursor(self.name)
