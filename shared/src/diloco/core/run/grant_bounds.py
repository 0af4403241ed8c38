"""The bounds that a learner's grant and the time set to its work; without a grant, those of any learner.

A learner trains from the run's beginning on at the earliest, and a step has a shortest time. So all steps that it ever has
merged, and those of its next offer, fit into the time since genesis. That holds for one that was cut off, too, however late its
offers arrive; a bound by the time since its last offer would not: two offers may arrive at once that were made minutes apart.

Both times are those at which one server stored genesis and the offer. So a successor, which reads the same offers, judges
alike.
"""

from __future__ import annotations

from diloco.wire.grants import Grant

FASTEST_STEP_S = 1e-4  # of the smallest model: no framework calls a step sooner
CLOCKS_S = 60.0  # servers' clocks may differ by so much, and a younger process may train beside the one that it ends


def most_steps(elapsed_s: float, grant: Grant | None = None) -> float:
    """Return the most steps that a learner can have taken ``elapsed_s`` after genesis, by clocks of servers."""
    fastest_s = FASTEST_STEP_S if grant is None or grant.min_step_s is None else grant.min_step_s
    return (max(0.0, elapsed_s) + CLOCKS_S) / fastest_s
