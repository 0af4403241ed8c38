"""The generation of trials: a number that changes when the same settings and seed end with another loss.

Results carry it. Losses of different generations are not comparable, so results of an earlier one are shown, but no claim is
judged by them. A change of schedule or arithmetic that changes a loss adds an entry to ``RULES``:
``tests/lab/test_generation.py`` fails if a loss changes and the number does not.
"""

from __future__ import annotations

RULES = {  # what is new in each generation
    1: "a round is due H steps after the fragment's version arrived, so H = 24 is a period of about 25 steps",
    2: "fragments have slots in a cycle of H steps",
}
GENERATION = max(RULES)


def remark(generation: int) -> str:
    """Return a sentence about results of another generation than the current one."""
    theirs = RULES.get(generation, "unknown to this version")
    ours = f"trials of this version are of generation {GENERATION} ({RULES[GENERATION]})"
    return f"These losses are of generation {generation} ({theirs}), but {ours}. No claim is judged by them"
