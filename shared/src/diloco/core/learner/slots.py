"""When the rounds of fragments are due: each in a slot of its own of a cycle of H steps, by the steps of one learner.

As published, fragment p is synchronised when ``t mod H = t_p``, with fixed, distinct offsets ``t_p``, so that traffic is even
(Decoupled DiLoCo, arXiv 2604.21428, equation 2). There, ``t`` is the syncer's own step. Here, there are several syncers, which
may be replaced. So ``t`` is a number that all of them hear: the step of one live learner, the *reference*. Offsets are
``floor(p H / P)`` for P fragments.

A slot that is missed is missed: the next one comes H steps later. So whatever happened before, rounds are spread over a cycle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco.core.run.pace import MovingAverage, Recent
from diloco.wire.control import Heartbeat

LIKE = 1.5  # learners whose steps are at most so many times as long, or as short, as another's are as fast: times vary
KEPT = 1.8  # so many times longer or shorter may the steps of the reference become before it is replaced
STALLED = 5.0  # a step that already lasts so many times longer than usual counts as a fifth of its time
LATE_STEPS = 2.0  # a round may open so many steps after its slot begins,
LATE_S = 0.1  # or so many seconds, whichever is more: a syncer looks only so often
LONG_ROUNDS = 3  # in a row: a single one may have waited for a learner that was gone


@dataclass
class SeenHeartbeat:
    """The newest heartbeat of a learner and when it came."""

    heartbeat: Heartbeat
    at_s: float
    first_s: float  # when its name was first heard
    stepped_s: float  # when it was first heard with its present step
    since: dict[int, tuple[int, int]] = field(default_factory=dict)  # fragment: (version applied, step when first seen so)
    steps: bool = False  # whether a step was heard to end: the time from then on is that of the next one
    step_times: MovingAverage = field(default_factory=MovingAverage)  # seconds of a step, as heard
    recent_steps: Recent = field(default_factory=Recent)  # the same, of the newest

    @property
    def step_s(self) -> float | None:
        """Seconds of a step: as heard, else as the learner states; None if neither is known."""
        return self.step_times.value or self.heartbeat.step_s or None

    @property
    def usual_step_s(self) -> float | None:
        """Seconds of its usual steps, of which a few long ones change nothing; None if none is known."""
        return self.recent_steps.median() or self.step_s

    @property
    def long_step_s(self) -> float | None:
        """Seconds of its long steps; None if none is known."""
        return self.recent_steps.high() or self.step_s


def offset(steps: int, fragment: int, fragments: int) -> int:
    """Return the step at which a fragment's slot begins, in a cycle of ``steps`` steps."""
    return steps * fragment // fragments


def first_slot(steps: int, fragment: int, fragments: int) -> int:
    """Return the step of a fragment's first round, in a cycle of ``steps`` steps: its offset, or H where that is 0."""
    return offset(steps, fragment, fragments) or steps


def choose(times_s: Sequence[float], quorum: int, known: int | None = None) -> int:
    """Return the place of the reference among one or more learners, sorted by name, whose steps take ``times_s``.

    A learner that is far faster than the ``quorum``-th fastest is not chosen, whatever its name: rounds need so many learners.
    ``known``, the place of the reference so far, is kept within wider bounds: on a busy machine step times vary, and each
    change of the reference moves all slots.
    """
    slow_s = sorted(times_s)[min(quorum, len(times_s)) - 1]
    if known is not None and slow_s / KEPT <= times_s[known] <= KEPT * slow_s:
        return known
    return next(place for place, step_s in enumerate(times_s) if slow_s / LIKE <= step_s <= LIKE * slow_s)


@dataclass
class LongRounds:
    """Whether a fragment's rounds last longer than its cycle: each of them misses the next slot.

    Then the period is a multiple of the cycle. ``found``: seconds of a round and of the cycle; None: they fit.
    """

    found: tuple[float, float] | None = None
    _in_a_row: int = 0

    def add(self, round_s: float, cycle_s: float) -> None:
        """Note how long a round has lasted."""
        self._in_a_row = self._in_a_row + 1 if round_s > cycle_s else 0
        self.found = (round_s, cycle_s) if self._in_a_row >= LONG_ROUNDS else None


@dataclass
class ReferenceClock:
    """The steps of the reference, as one syncer hears them.

    ``position``: its step, extrapolated by its step time since it was last heard to end one. ``elapsed``: steps that references
    have taken while they were the reference; it never goes back, so it measures how long ago something was.
    """

    reference: SeenHeartbeat | None = None
    position: float = 0.0
    elapsed: float = 0.0
    _known: tuple[str, int] = ("", 0)  # name and incarnation of the reference before

    def look(self, stepping: Sequence[SeenHeartbeat], quorum: int, heartbeat_s: float, now_s: float) -> None:
        """Choose the reference among learners that step, sorted by name, and read its step.

        It is the first one by name of those whose steps are about as short as those of the ``quorum``-th fastest, so all
        syncers choose the same one. It is kept while its steps stay roughly so, and equally fast learners do not take turns.
        """
        self.reference = self._chosen(stepping, quorum, now_s)
        if self.reference is None:
            return
        reference = self.reference
        known = reference.heartbeat.learner, reference.heartbeat.incarnation
        position = _position(reference, heartbeat_s, now_s)
        if known == self._known:
            position = max(position, self.position)  # it was extrapolated too far
            self.elapsed += position - self.position
        self._known, self.position = known, position

    def _chosen(self, stepping: Sequence[SeenHeartbeat], quorum: int, now_s: float) -> SeenHeartbeat | None:
        if not stepping:
            return None
        names = [(seen.heartbeat.learner, seen.heartbeat.incarnation) for seen in stepping]
        known = names.index(self._known) if self._known in names else None
        return stepping[choose([_present_step_s(seen, now_s) for seen in stepping], quorum, known)]

    def cycle_s(self, steps: int) -> float:
        """Return the seconds of a cycle of ``steps`` steps; inf if no learner's step time is known."""
        step_s = None if self.reference is None else self.reference.step_s
        return steps * step_s if step_s else math.inf

    def in_slot(self, steps: int, fragment: int, fragments: int) -> bool:
        """Return whether a fragment's slot has just begun, in a cycle of ``steps`` steps."""
        late = self._since_slot(steps, fragment, fragments)
        step_s = None if self.reference is None else self.reference.step_s
        return late < min(max(LATE_STEPS, LATE_S / step_s if step_s else 0.0), steps / 2)

    def next_slot_s(self, steps: int, fragment: int, fragments: int) -> float:
        """Return the seconds until a fragment's next slot begins; inf if no learner's step time is known."""
        return self.cycle_s(steps) * (1 - self._since_slot(steps, fragment, fragments) / steps)

    def _since_slot(self, steps: int, fragment: int, fragments: int) -> float:
        """Return the steps since a fragment's slot began last."""
        return (self.position - offset(steps, fragment, fragments)) % steps


def _present_step_s(seen: SeenHeartbeat, now_s: float) -> float:
    """Return the seconds of a learner's usual steps, more if the present one lasts far longer; inf if they are not known.

    On a busy machine the mean of the newest steps goes up and down, and learners would take turns as the reference.
    """
    usual_s = seen.usual_step_s
    return math.inf if usual_s is None else max(usual_s, (now_s - seen.stepped_s) / STALLED)


def _position(seen: SeenHeartbeat, heartbeat_s: float, now_s: float) -> float:
    """Return a learner's step as it presumably is: it says so at least every ``heartbeat_s`` seconds, if it takes any."""
    heartbeat, step_s = seen.heartbeat, seen.step_s
    if heartbeat.state != "stepping" or step_s is None:
        return heartbeat.step
    return heartbeat.step + max(0.0, min(now_s - seen.stepped_s, step_s + heartbeat_s)) / step_s
