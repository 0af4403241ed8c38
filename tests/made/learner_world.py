"""A learner's state machine in a world of its own: fragments' logs, stored offers, and schedules of what may happen to it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.made.log_entries import record_of
from tests.made.run_settings import WORLD

from diloco.core.learner.accounts import StepDone
from diloco.core.learner.boundary import Applied, Decision, apply, decide, pass_boundary
from diloco.core.learner.delta import PendingDelta
from diloco.core.learner.fragment_state import DueOffer, FragmentVersion
from diloco.core.learner.learner import Learner
from diloco.core.log.chain import Chain
from diloco.settings.run import RunSettings
from diloco.wire.control import Announcement
from diloco.wire.entries import Record, RolledBack
from diloco.wire.offers import MergeMember

FRAGMENTS: int = WORLD["fragments.count"]
TOKENS, SIZE = 10, 4
Vector = NDArray[np.float32]


class FragmentLog:
    """One fragment's log, as long as it is; another learner is merged in every version."""

    def __init__(self, index: int) -> None:
        self.chain = Chain(index, 0, 0, bytes(32), 0, bytes(32))

    def head(self, record: Record | None, *, arrays: bool) -> FragmentVersion:
        chain = replace(self.chain, cursors=dict(self.chain.cursors))
        return FragmentVersion(record, chain, np.full(SIZE, chain.version, np.float32) if arrays else None)

    def append(self, offer: PendingDelta | None, *, rolled_back: bool = False, closing: bool = False) -> Record:
        chain = self.chain
        version = chain.version + 1
        number = chain.cursor("zoe")[1] + 1
        members = [] if rolled_back else [MergeMember("zoe", 1, number, version, chain.version, 1, 5, 0, 1.0, [(9, number, 1)])]
        if offer is not None:
            members.insert(0, MergeMember.of(offer.stated, 1.0))
        merged, lost = chain.totals_with((m.learner, m.tokens, m.lost_tokens) for m in members)
        record = record_of(
            version,
            *members,
            fragment=chain.fragment,
            entry="rollback" if rolled_back else "version",
            previous=chain.head,
            bits=32,
            tokens_merged=merged,
            tokens_lost=lost,
            state_hash=version.to_bytes(32, "big"),
            closing=closing,
            rolled_back=RolledBack(version, 0, version) if rolled_back else None,
        )
        return self._take(record, version.to_bytes(32, "big"))

    def close(self) -> Record:
        """End the log without another version."""
        chain = self.chain
        record = record_of(
            chain.version,
            fragment=chain.fragment,
            entry="close",
            previous=chain.head,
            bits=32,
            learning_rate=0.0,
            tokens_merged=chain.tokens_merged,
            tokens_lost=chain.tokens_lost,
            state_hash=chain.state_hash,
            closing=True,
            body=None,
        )
        return self._take(record, bytes([255]) * 32)

    def _take(self, record: Record, head: bytes) -> Record:
        self.chain.check(record)
        self.chain.advance(record, head, self.chain.sequence + 1)
        return record


class LearnerWorld:
    """A learner, its fragments' logs, and the offers that are stored there."""

    def __init__(self, run: RunSettings, *, arrays: bool = True, tokens: int = TOKENS) -> None:
        self.run, self.arrays, self.tokens = run, arrays, tokens
        self.logs = [FragmentLog(index) for index in range(FRAGMENTS)]
        self.learner = self.joined(1)
        self.values = [np.zeros(SIZE, np.float32) for _ in range(FRAGMENTS)]
        self.stored: list[list[PendingDelta]] = [[] for _ in range(FRAGMENTS)]
        self.answers: list[DueOffer] = []  # being quantised
        self.sending: list[PendingDelta | None] = [None] * FRAGMENTS
        self.taken = self.now_s = 0

    def joined(self, incarnation: int) -> Learner:
        learner = Learner("ann", "learner", "", incarnation, self.run)
        for log in self.logs:
            learner.seat(log.head(None, arrays=self.arrays))
        learner.take_up_accounts()
        return learner

    def step(self, steps: int = 1) -> None:
        self.learner.book(StepDone(self.tokens, 3, self.taken, 1.0, 0.5 * steps, 0.0, steps))
        self.taken += steps
        for values in self.values:
            values += 0.25 * steps

    def write(self, applied: list[Applied]) -> None:
        for each in applied:
            if each.write is not None:
                old, write = self.values[each.application.fragment], each.write
                kept = 0.0 if write.reference is None else old - write.reference[:]
                self.values[each.application.fragment] = write.theta + kept

    def boundary(self) -> Decision:
        self.now_s += 1
        twin = copy.deepcopy(self.learner)
        expected = decide(self.learner, self.now_s)
        expected_writes = apply(twin, expected)
        decision, applied = pass_boundary(self.learner, self.now_s)
        assert decision == expected  # what is passed over only saves time
        assert [each.application for each in applied] == [each.application for each in expected_writes]
        assert learner_state(self.learner) == learner_state(twin)
        self.write(applied)
        for index in decision.reads:
            self.learner.submit(index, self.values[index].copy if self.arrays else None)
            self.answer(index)
        return decision

    def announce(self, index: int, *, closing: bool = False) -> None:
        version = self.logs[index].chain.version + 1
        heard = Announcement(index, version, 0, "syncer-0", 1.0, closing, 0, self.run.round.steps, [])
        self.learner.hear(heard, self.now_s)
        self.answer(index)

    def answer(self, index: int) -> None:
        answer = self.learner.try_answer(index)
        if answer is not None:
            self.answers.append(answer)

    def encode(self) -> None:
        if self.answers:
            answer = self.answers.pop(0)
            encoded = self.learner.encode(answer) if self.arrays else None
            self.sending[answer.fragment] = self.learner.encoded(answer, encoded)

    def store(self) -> None:
        for index, offer in enumerate(self.sending):
            if offer is not None:
                self.stored[index].append(offer)
                self.sending[index] = None
                self.learner.sent(index, len(self.stored[index]))

    def merge(self, index: int, *, own: bool, rolled_back: bool = False) -> None:
        log = self.logs[index]
        rolled_back = rolled_back and log.chain.version > 0
        after, floor = log.chain.cursor("ann"), log.chain.floor
        fit = [offer for offer in self.stored[index] if offer.stated.after == after and offer.stated.base_version >= floor]
        record = log.append(fit[-1] if own and fit and not rolled_back else None, rolled_back=rolled_back)
        self.queue(index, log.head(record, arrays=self.arrays))

    def close(self, index: int) -> None:
        log = self.logs[index]
        self.queue(index, log.head(log.close(), arrays=self.arrays))

    def queue(self, index: int, version: FragmentVersion) -> None:
        self.learner.queue(index, version)

    def kill(self) -> None:
        """The process is gone, and another one begins with the values of the log."""
        self.learner = self.joined(self.learner.incarnation + 1)
        self.values = [np.full(SIZE, log.chain.version, np.float32) for log in self.logs]
        self.answers, self.sending = [], [None] * FRAGMENTS

    def check_accounts(self) -> None:
        self.learner.settle()
        for state, stored in zip(self.learner.fragments, self.stored, strict=True):
            held = state.delta
            assert held.tokens >= 0
            assert held.steps >= 0
            assert bool(held.data) == bool(held.tokens)
            merged = merged_of(state.delta.after, stored)
            assert self.learner.accounts.tokens == merged + held.lost_tokens + held.tokens


def learner_state(learner: Learner) -> list[Any]:
    """Return all of a learner but its arrays, to be compared."""
    fragments = [
        {name: value for name, value in vars(state).items() if name not in ("values", "newest", "last", "pending", "quiet")}
        | {"newest": state.newest.chain, "ends": state.ends, "pending": [version.chain for version in state.pending]}
        for state in learner.fragments
    ]
    others = {name: value for name, value in vars(learner).items() if name not in ("fragments", "quiet")}
    return [fragments, {name: getattr(value, "__dict__", value) for name, value in others.items()}]


def merged_of(after: tuple[int, int], stored: list[PendingDelta]) -> int:
    """Tokens of the offers that a learner knows merged: the chain of offers that end with the one ``after``."""
    offers, tokens = {offer.identity: offer for offer in stored}, 0
    while after != (0, 0):
        tokens += offers[after].stated.tokens
        after = offers[after].stated.after
    return tokens


ACTS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("boundary")),
    st.tuples(st.just("announce"), st.integers(0, FRAGMENTS - 1)),
    st.tuples(st.just("encode")),
    st.tuples(st.just("store")),
    st.tuples(st.just("merge"), st.integers(0, FRAGMENTS - 1), st.booleans()),
    st.tuples(st.just("rollback"), st.integers(0, FRAGMENTS - 1)),
    st.tuples(st.just("kill")),
)
SCHEDULES = st.lists(ACTS, max_size=60)


def act(world: LearnerWorld, name: str, *values: Any) -> None:
    if name == "merge":
        world.merge(values[0], own=values[1])
    elif name == "rollback":
        world.merge(values[0], own=False, rolled_back=True)
    else:
        getattr(world, name)(*values)
