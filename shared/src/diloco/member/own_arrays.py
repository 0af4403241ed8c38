"""The arrays of a learner that is one process: what they do for its rounds is a function call."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.accounts import MemberTraffic, StepDone
from diloco.core.learner.boundary import pass_boundary
from diloco.core.learner.delta import PendingDelta
from diloco.core.learner.fragment_state import DueOffer, FragmentVersion, Reader
from diloco.core.learner.schedule import Moment
from diloco.log.follower import LogCopy
from diloco.member.arrays import Boundary, Initial, Rounds
from diloco.member.following import Following
from diloco.member.offer_maker import OfferMaker, QuantisedOffer
from diloco.wire.entries import Genesis, Record

Vector = NDArray[np.float32]


class OwnArrays:
    """Folds the logs of all fragments and makes their offers; :class:`~diloco.core.learner.learner.Learner` has the values."""

    may_encode = True

    def __init__(self, rounds: Rounds) -> None:
        self._rounds, self.shared, self.learner = rounds, rounds.shared, rounds.shared.learner
        self._maker = OfferMaker(rounds.transport, rounds.run, rounds.log)
        self._quantised: dict[int, QuantisedOffer] = {}  # by fragment: not stored yet
        self._following: Following

    # ---- loop thread

    async def first_values(self, initial: Initial | None, index: int) -> Vector:
        """Return a fragment as ``initial`` gives it, float32 [its size]."""
        assert initial is not None, "only a learner founds a run, and it has parameters"
        return initial(self._rounds.map.fragments[index])

    async def load(self, genesis: tuple[Genesis, bytes]) -> list[FragmentVersion]:
        """Return what the log has of each fragment, in order."""
        rounds, settings = self._rounds, self._rounds.settings
        others = rounds.run.created.learners - (settings.role == "learner")
        self._following = Following(
            store=rounds.store,
            run=rounds.run,
            name=settings.name,
            fragments=range(len(rounds.map.fragments)),
            refused=rounds.refused,
            log=rounds.log,
            others=others,
            spawn=self.shared.tasks.spawn,
            tell=self._take_in,
        )
        self._following.folded = rounds.traces.folded
        return [FragmentVersion.of(copy.replica) for copy in await self._following.load(genesis)]

    async def holds(self) -> bool:
        """Whether the log still has what was read last."""
        return await self._following.holds()

    def follow(self) -> None:
        """Follow the log that was loaded."""
        self._following.begin()

    def _take_in(self, copy: LogCopy, record: Record | None, rewound: bool) -> None:
        version = FragmentVersion.of(copy.replica, record)
        with self.shared.lock:
            take_in = self.learner.rewind if rewound else self.learner.queue
            take_in(copy.replica.chain.fragment, version)
            self.shared.tell()

    def encode(self, answer: DueOffer) -> None:
        """Begin to read and quantise an offer; the lock is held."""
        self.shared.tasks.spawn(self._encode(answer))

    async def _encode(self, answer: DueOffer) -> None:
        index, answering = answer.fragment, self._rounds.answering
        trace = self._rounds.traces.offer(index, answer.version)
        size = self._rounds.map.fragments[index].size if answer.snapshot.is_on_host else None
        if trace is not None:
            answer = trace.take(answer)
        quantised = await self._maker.quantise(index, answer.version, partial(self.learner.encode, answer), trace, size)
        with self.shared.lock:
            if quantised is None:
                answering.not_finite(index)
            else:
                self._quantised[index] = quantised
                answering.encoded(index, quantised.content_hash, quantised.encoded)

    def store(self, fragment: int, offer: PendingDelta) -> None:
        """Begin to store the offer that was quantised last."""
        self.shared.tasks.spawn(self._store(fragment, offer))

    async def _store(self, fragment: int, offer: PendingDelta) -> None:
        sequence = await self._maker.storing(fragment, offer, self._quantised.pop(fragment))
        with self.shared.lock:
            self._rounds.answering.stored(fragment, sequence)

    def others_traffic(self) -> list[MemberTraffic]:
        """Return nothing: there is no other process."""
        return []

    async def end(self) -> None:
        """End nothing: all that runs here is a task of the rounds."""

    # ---- trainer thread

    def boundary(self, done: StepDone | None) -> Boundary:
        """Book the step that ended, decide what comes before the next one, and carry it out at once.

        Raises:
            DilocoError: a task of the loop thread failed.
        """
        shared, learner, taped = self.shared, self.learner, self._rounds.taped
        now_s = shared.loop.time()
        with shared.lock:
            shared.begin_boundary()
            if done is not None:
                learner.book(done)
                self._rounds.shares.book(done.share, done.batch, done.most_tokens)
                taped.step(done, now_s)
            decision, applied = pass_boundary(learner, now_s)
            taped.decision(decision)
            by_s = shared.leave_by_s
            ended = by_s is not None and (learner.left or now_s >= by_s)
        self._rounds.traces.applied(((each.application.fragment, each.application.version) for each in applied), decision.step)
        writes = [(each.application.fragment, each.write) for each in applied if each.write is not None]
        return Boundary(
            applies=writes,
            reads=list(decision.reads),
            stop=decision.stop,
            wait=decision.wait,
            finished=decision.finished,
            ended=ended,
        )

    def submit(self, fragment: int, reader: Reader) -> None:
        """Hand over a way to read a fragment as it is at this boundary; called from another thread, at most once."""
        with self.shared.lock:
            self.learner.submit(fragment, reader)
            asked = self.learner.fragments[fragment].wants_answer
        if asked:  # otherwise the announcement finds the snapshot
            self._rounds.answering.begin_soon(fragment)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something new since the last boundary, at most ``timeout_s``."""
        self.shared.wait_for_news(timeout_s)

    def moment(self) -> Moment:
        """Return what the learning rate goes by now."""
        with self.shared.lock:
            return self.learner.accounts.moment(self.learner.budget)
