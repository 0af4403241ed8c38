"""How long rounds wait for a learner that others wait for, and what it costs the learner to be waited for in vain.

A learner has *patience*: the seconds for which others wait for it (:meth:`diloco.core.syncer.roster.Roster.patience_s`). It is
one account for all fragments of a syncer, so that a learner which holds up one fragment after the other has no more of it than
one that holds up all of them at once. The account is debited by the time for which a round cannot close without the learner,
as far as that exceeds its usual wait. Patience that is used up comes back over :data:`RETURN` times as many answered rounds as
were missed: each answer gives back that part of the time since the answer before. A learner that answers and fails in turn
holds the others up for a twentieth of the time, and not for half of it.

A learner whose patience is used up is still waited for: twice its usual wait, or one of its steps if that is longer. So it is
in the versions that it answers as usual. Its usual wait only grows by what its patience has paid for, and shrinks with each
time that it was waited for in vain: none buys itself a long one by a late answer, and then gives none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RETURN = 20.0  # answered rounds for each one that was missed, until the patience is whole again
USUAL_ROUNDS = 16  # whose mean is the usual wait, about
LEAST = 2.0  # a learner without patience is waited for so many times its usual wait


@dataclass
class Patience:
    """One learner's account."""

    spent_s: float = 0.0  # of its patience
    usual_s: float = 0.0  # for which others wait for its answer
    _rounds: int = 0  # that its usual wait is made of
    _failed: bool = False  # it was waited for in vain, and has answered nothing since
    _debited_s: float = -math.inf  # the time up to which waits were debited
    _answered_s: float = -math.inf

    def left_s(self, whole_s: float) -> float:
        """Return what is left of a patience of ``whole_s`` seconds."""
        return max(0.0, whole_s - self.spent_s)

    def least_s(self, step_s: float) -> float:
        """Return for how long a learner is waited for whose patience is used up; ``step_s``: of its usual step."""
        return max(LEAST * self.usual_s, step_s)

    def debit(self, waited_s: float, before_s: float, now_s: float, whole_s: float) -> None:
        """Take in that a round has waited ``waited_s`` seconds in all, ``before_s`` of them by the last look.

        Fragments that wait at the same time count once.
        """
        excess_s = min(waited_s - max(before_s, self.usual_s), now_s - self._debited_s)
        if excess_s > 0:
            self.spent_s = min(whole_s, self.spent_s + excess_s)
            self._debited_s = now_s

    def answer(self, waited_s: float, now_s: float, whole_s: float) -> None:
        """Take in that it answered a round that had waited for it for ``waited_s`` seconds."""
        self._note_wait(min(waited_s, self.usual_s) if self.spent_s >= whole_s else waited_s)
        self.spent_s = max(0.0, self.spent_s - min(now_s - self._answered_s, whole_s) / RETURN)
        self._answered_s, self._failed = now_s, False

    def fail(self) -> None:
        """Take in that a round waited for it in vain: it counts as a wait of no time, once until it answers again."""
        if not self._failed:
            self._note_wait(0.0)
        self._failed = True

    def _note_wait(self, waited_s: float) -> None:
        self._rounds = min(USUAL_ROUNDS, self._rounds + 1)
        self.usual_s += (waited_s - self.usual_s) / self._rounds
