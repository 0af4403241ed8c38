"""A learner's totals: steps, tokens, times, and its place in the learning rate's schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from diloco.core.learner.schedule import Moment
from diloco.core.log.chain import Chain
from diloco.core.run.pace import MovingAverage
from diloco.wire.entries import Cursor

LEAST_TOKENS = 1  # of a step, as the protocol has it: a step that counts nothing is booked with so many, and has their weight
STUCK_STEPS = 10  # without a finite loss, one after the other: a bad batch or two are none of a person's business
STUCK = (
    f"the loss or gradients of its last {STUCK_STEPS} or more steps were not finite, and such a step changes nothing: "
    "check its data, or begin again with a lower inner.learning_rate"
)


@dataclass(frozen=True)
class StepDone:
    """Inner steps that have ended (usually one), on consecutive batches of a share of the data.

    ``tokens`` are those of each step; no step has more than ``most`` (None: all have as many). Without a ``share`` they were on
    data of the learner's own, which the run does not deal.
    ``loss`` is the newest known (None: none yet), and ``metrics`` are the task's own of the same step. Since the last call, as
    far as is known by now, a step was in flight for ``busy_s``, none for ``blocked_s`` because of this system, and none for
    ``data_s`` because the next batch was not made yet.
    """

    tokens: int
    share: int | None
    batch: int  # index in the share of the first step's
    loss: float | None
    busy_s: float
    blocked_s: float
    steps: int = 1
    data_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    finite: bool | None = None  # of a step that has no loss: whether the values that it led to are; None: not looked at
    most: int | None = None

    @property
    def most_tokens(self) -> int:
        """The most tokens that a step of this learner has."""
        return self.tokens if self.most is None else self.most


class MemberTraffic(NamedTuple):
    """Bytes that a member has sent and received, and the messages that it has refused."""

    bytes_up: int
    bytes_down: int
    refused: int


@dataclass
class Done:
    """Totals of this process, whatever its learner did before."""

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    blocked_s: float = 0.0
    data_s: float = 0.0
    not_finite: int = 0  # steps whose loss was not


@dataclass
class Accounts:
    """Totals of a learner in this run, also before a restart."""

    step: int = 0
    tokens: int = 0
    earlier_tokens: int = 0  # of these: processed before this process
    busy_s: float = 0.0
    blocked_s: float = 0.0
    loss: float | None = None  # the newest that is finite
    metrics: Mapping[str, float] = field(default_factory=dict)  # the task's own, of the same step
    evaluation_failure: str | None = None  # an evaluator's: of the newest evaluation
    steps_in_vain: int = 0  # the newest ones, one after the other, whose loss, or values, were not finite
    warming: int | None = None  # steps taken with an optimizer state that began fresh in a run under way
    schedule: tuple[int, int] = (0, 0)  # tokens of all learners as the newest applied version states, own tokens then
    others_tokens: int = 0  # of all other learners, at least: the most that a version or an announcement has shown
    step_average: MovingAverage = field(default_factory=MovingAverage)  # seconds
    done: Done = field(default_factory=Done)

    def book(self, done: StepDone) -> None:
        """Count steps that have ended."""
        tokens = done.steps * done.tokens
        self.step += done.steps
        self.tokens += tokens
        self.done.steps += done.steps
        self.done.tokens += tokens
        if self.warming is not None:
            self.warming += done.steps
        self.busy_s += done.busy_s
        self.blocked_s += done.blocked_s
        self.done.busy_s += done.busy_s
        self.done.blocked_s += done.blocked_s
        self.done.data_s += done.data_s
        if done.loss is not None and math.isfinite(done.loss):
            self.loss, self.metrics = done.loss, done.metrics
            self.steps_in_vain = 0
        elif done.loss is not None or done.finite is False:
            self.done.not_finite += 1
            self.steps_in_vain += done.steps
        elif done.finite:
            self.steps_in_vain = 0
        if done.busy_s:
            self.step_average.add((done.busy_s + done.blocked_s + done.data_s) / done.steps)

    def count_steps(self, name: str, chains: Iterable[Chain]) -> None:
        """Begin with the steps that the tokens were, by the mean of the merged steps of the learner of this name."""
        cursors = [chain.cursors[name] for chain in chains if name in chain.cursors]
        steps, tokens = max(((cursor.steps, cursor.tokens) for cursor in cursors), default=(0, 0))
        self.step = self.tokens * steps // max(1, tokens)

    def restored(self, plain: Mapping[str, Any]) -> Accounts:
        """Return the accounts of a learner that goes on from its state, :meth:`Learner.dump`.

        Raises:
            LookupError, TypeError, ValueError, OverflowError: it is none.
        """
        stated, own = (int(tokens) for tokens in plain["schedule"])
        return replace(
            self,
            step=int(plain["step"]),
            tokens=int(plain["tokens"]),
            earlier_tokens=int(plain["tokens"]),
            busy_s=float(plain["busy_s"]),
            blocked_s=float(plain["blocked_s"]),
            warming=None if plain["warming"] is None else int(plain["warming"]),
            schedule=(stated, own),
            others_tokens=stated - own,
        )

    def after(self, steps: StepDone) -> Accounts:
        """Return the accounts as they are once these steps have ended, of which no outcome is known."""
        after = replace(self, done=replace(self.done))
        after.book(steps)
        return after

    @property
    def is_stuck(self) -> bool:
        """Whether the newest steps were in vain, so many that it is no matter of a bad batch."""
        return self.steps_in_vain >= STUCK_STEPS

    @property
    def failure(self) -> str | None:
        """Return what people have to know of this member, whose process goes on; None: nothing."""
        return STUCK if self.is_stuck else self.evaluation_failure

    def count_on(self, cursor: Cursor | None, incarnation: int) -> int:
        """Square the totals with a merge of an offer that is not pending; return the tokens that were not known here.

        ``cursor`` is what the log holds of the learner; None: nothing, since it went back to before its first merged offer.
        An offer of this process, whose ``incarnation`` it has, was void, and all its tokens are known.
        """
        if cursor is None or cursor.incarnation == incarnation:
            return 0
        processed = cursor.tokens + cursor.lost_tokens
        unknown = max(0, processed - self.earlier_tokens)
        self.earlier_tokens += unknown
        self.tokens += unknown
        self.others_tokens = max(0, self.others_tokens - unknown)  # they may have been taken for another's
        return unknown

    def note_version(self, tokens: int) -> None:
        """Go on with the schedule from an applied version, as of which so many tokens of all learners count."""
        self.note_processed(tokens)
        if tokens > self.schedule[0]:
            self.schedule = (tokens, self.tokens)

    def note_processed(self, tokens: int) -> None:
        """Take in how many tokens all learners have processed, as an announcement or a version states it.

        The statement contains at most the own tokens of now, so the difference belongs to others. A later statement may not
        contain the newest own steps, and then shows less. The largest difference counts: else a learner that has stopped at the
        budget would go on.
        """
        self.others_tokens = max(self.others_tokens, tokens - self.tokens)

    def processed(self) -> int:
        """Return the tokens of all learners: own ones, and what is known of others. It never falls.

        What is announced goes by the log, and has nothing of a learner that was cut off before its first merge. A version may
        come before the announcement that says as much: learners that wait for it must not take a step more by chance.
        """
        return self.tokens + self.others_tokens

    def moment(self, budget: int) -> Moment:
        """Return what the learning rate goes by: the tokens that the newest applied version states and own ones since."""
        stated, own = self.schedule
        return Moment(stated + self.tokens - own, budget, self.warming)
