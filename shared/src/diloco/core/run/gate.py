"""The gate: which learners' heartbeats are heard.

A heartbeat is its sender's claim. The name is that of its *subject*, on which a server lets one identity publish. Role and
incarnation are those of the admission in the run's bucket: the gate says which admissions are to be read, at a bounded rate,
and holds the newest heartbeat of a learner back until its admission has been read. A heartbeat that claims more than can be is
refused.

Names that are not admitted cost a read now and then and nothing else; what is kept of them is bounded. Evaluators have no
admission: nothing is decided by what they say.

Pure: it is given the time, heartbeats and admissions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from diloco.core.run.grant_bounds import FASTEST_STEP_S
from diloco.core.syncer.claims import MAX_STEP_TOKENS, Limit, StepBounds, limits_of_batches
from diloco.errors import FormatError
from diloco.settings.run import RunSettings
from diloco.wire.control import Heartbeat
from diloco.wire.fields import MAX_MEMBERS

MAX_HELD = 256  # learners whose newest heartbeat is held back; others send another one soon
MAX_STRANGERS = 1024  # names of which it is known that they are not admitted
AGAIN_S = 2.0  # from one look at an admission to the next: a server's crash may have undone it
READS, READS_PER_S = 64, 32.0  # looks at admissions at once, and for ever: a run's learners at its start, and a trickle
SLACK_STEPS = 1000  # steps whose heartbeats were late or lost, and tokens of offers that an earlier process had made


class HeartbeatVerdict(Enum):
    """The fate of a heartbeat."""

    HEARD = "heard"  # its learner is admitted in its incarnation
    HELD = "held"  # its admission is to be read first
    DROPPED = "dropped"  # its learner is not admitted, or in another incarnation, as far as is known
    CROWDED = "crowded"  # too many wait for their admissions to be read


@dataclass
class _Member:
    """An admitted learner, and its first heartbeat in this incarnation: the first that does not say ``starting``."""

    incarnation: int
    read_s: float  # when its admission was read
    heard_s: float
    first: tuple[Heartbeat, float] | None = None  # and when it came


class Gate:
    """The admissions that one listener knows, and the heartbeats that wait for one."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._strangers: dict[str, float] = {}  # names that are not admitted: when that was read
        self._held: dict[str, Heartbeat] = {}  # by name, those that wait longest first
        self._reads, self._filled_s = float(READS), 0.0  # that may be made at once, as of then

    def admits(self, name: str) -> bool:
        """Whether a learner of this name is admitted, as far as is known."""
        return name in self._members

    def is_stranger(self, name: str) -> bool:
        """Whether it is known that no learner of this name is admitted."""
        return name in self._strangers

    def glance(self, name: str, now_s: float) -> HeartbeatVerdict | None:
        """Return the fate of a heartbeat on a name's subject, whatever it says; None: it is to be decoded."""
        if name in self._members or name in self._held:
            return None
        if now_s - self._strangers.get(name, -AGAIN_S) < AGAIN_S:
            return HeartbeatVerdict.DROPPED
        return HeartbeatVerdict.CROWDED if len(self._held) >= MAX_HELD else None

    def hear(self, heartbeat: Heartbeat, budget: int, now_s: float) -> HeartbeatVerdict:
        """Judge a learner's heartbeat whose name is that of its subject; ``budget``: the run's tokens.

        Raises:
            FormatError: it claims more than can be.
        """
        name = heartbeat.learner
        member = self._members.get(name)
        if member is not None and member.incarnation == heartbeat.incarnation:
            first, first_s = member.first or (heartbeat, now_s)
            if first.state == "starting":  # it has not restored its checkpoint yet, whose steps count
                first, first_s = heartbeat, now_s
            check_claims(heartbeat, first, now_s - first_s, budget)
            member.first = first, first_s
            member.heard_s = now_s
            return HeartbeatVerdict.HEARD
        if member is not None and now_s - member.read_s < AGAIN_S:
            return HeartbeatVerdict.DROPPED
        self._held[name] = heartbeat
        return HeartbeatVerdict.HELD

    def wanted(self, now_s: float) -> list[str]:
        """Return the learners whose admissions are to be read now; those that were admitted before come first."""
        self._reads = min(READS, self._reads + (now_s - self._filled_s) * READS_PER_S)
        self._filled_s = now_s
        names = sorted(self._held, key=lambda name: name not in self._members)[: int(self._reads)]
        self._reads -= len(names)
        return names

    def admit(self, name: str, incarnation: int | None, now_s: float) -> Heartbeat | None:
        """Take in an admission as it was read (None: there is none). Return the heartbeat held back, if it is its learner's."""
        held = self._held.pop(name, None)
        if incarnation is None:
            self._members.pop(name, None)
            self._strangers.pop(name, None)
            self._strangers[name] = now_s
            if len(self._strangers) > MAX_STRANGERS:
                del self._strangers[next(iter(self._strangers))]
            return None
        self._strangers.pop(name, None)
        member = self._members.get(name)
        if member is not None and member.incarnation == incarnation:
            member.read_s = now_s
        else:
            if member is None and len(self._members) >= MAX_MEMBERS:
                del self._members[min(self._members, key=lambda other: self._members[other].heard_s)]
            self._members[name] = _Member(incarnation, now_s, now_s)
        return held if held is not None and held.incarnation == incarnation else None

    @property
    def waits(self) -> bool:
        """Whether an admission is to be read."""
        return bool(self._held)


def most_tokens(heartbeat: Heartbeat, first: Heartbeat, budget: int) -> int:
    """Return the tokens that a learner can have processed by a heartbeat; ``first`` was its process's first.

    A step has the tokens of its batch, which each learner chooses for itself. A learner stops when its own tokens and those
    that it last heard of the others make up the budget; that may come late, so it may have processed the budget twice, and
    the step that it was in.
    """
    steps = heartbeat.step - first.step + SLACK_STEPS
    step_tokens = min(heartbeat.batch_tokens or MAX_STEP_TOKENS, MAX_STEP_TOKENS)
    return min(first.tokens + steps * step_tokens, 2 * budget + MAX_STEP_TOKENS)


def check_claims(heartbeat: Heartbeat, first: Heartbeat, elapsed_s: float, budget: int) -> None:
    """Refuse a heartbeat that claims more than its learner can have done, ``elapsed_s`` after its process's ``first``.

    Raises:
        FormatError: it claims too many steps, tokens or versions.
    """
    _refuse(heartbeat, _claims(heartbeat, first, elapsed_s, budget))


def check_trained(heartbeat: Heartbeat, settings: RunSettings, bounds: StepBounds) -> None:
    """Refuse a heartbeat that states batches which its learner cannot have trained; ``bounds``: of the run's steps.

    Raises:
        FormatError: the bound is named.
    """
    _refuse(heartbeat, limits_of_batches(heartbeat.trained, heartbeat.step + SLACK_STEPS, settings, bounds))


def _refuse(heartbeat: Heartbeat, limits: Iterable[Limit]) -> None:
    for what, claimed, most in limits:
        if claimed > most:
            raise FormatError(
                f"heartbeat of {heartbeat.learner}: {claimed} {what}, expected at most {most:.0f}; "
                "check its clock and batch size"
            )


def _claims(heartbeat: Heartbeat, first: Heartbeat, elapsed_s: float, budget: int) -> Iterator[Limit]:
    """Yield what a heartbeat claims."""
    more = SLACK_STEPS + int(elapsed_s / FASTEST_STEP_S)
    tokens = most_tokens(heartbeat, first, budget)
    yield "steps", heartbeat.step, first.step + more
    yield "tokens", heartbeat.tokens, tokens
    yield "tokens in a batch", heartbeat.batch_tokens, MAX_STEP_TOKENS
    yield "unmerged steps of a fragment", max(heartbeat.steps, default=0), first.step + more
    yield "unmerged tokens of a fragment", max(heartbeat.fragment_tokens, default=0), tokens
    yield "lost tokens of a fragment", max(heartbeat.lost_tokens, default=0), tokens
    # however many the log has when a learner joins: a version takes a token
    yield "versions of a fragment", max(heartbeat.versions, default=0), 2 * budget + MAX_STEP_TOKENS
