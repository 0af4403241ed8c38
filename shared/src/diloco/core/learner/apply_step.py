"""The boundary that applies a version where the overlap has a fixed length (``apply.at = overlap``).

Streaming DiLoCo (arXiv 2501.18512) sends a fragment after step t and applies what comes of it after step t + tau, however early
it came; a learner whose version is late waits for it. Here t is the own step with whose value a learner answers a round, or
could have answered it: the first boundary that finds the round announced. Tau is ``round.overlap_steps``.

A version is applied on arrival where there is no such step, or nothing is gained by holding it: the learner heard of no round,
a later round or version is known already, the version is no merge (a loaded log, a rollback), or the own value is invalid.
"""

from __future__ import annotations

import math

from diloco.core.learner.fragment_state import FragmentState, Phase


def steps_left(state: FragmentState, overlap_steps: float, step: int) -> int | None:
    """Return the own steps from ``step`` to the boundary that applies the open round's version, 0 or more; None: on arrival."""
    next_version = state.delta.base_version + 1
    if state.open_version != next_version or state.newest.chain.version > next_version:
        return None
    if state.phase is Phase.INVALID or (state.pending and not state.pending[0].merges):
        return None
    begun = step if state.answer_step is None else state.answer_step
    return max(0, math.ceil(begun + overlap_steps - step))
