"""The bounds of what a learner can state of its work in an offer.

A learner trains unseen: its steps, tokens, lost tokens and batches are claims. An owner, a region's aggregator, the owner
after a takeover and the simulators refuse those that cannot be, by :func:`judge` alone. It goes by the claim, the run's
settings, the fragment's log, the learner's grant, and the time at which a server stored the offer: by no clock of a syncer.
So a takeover judges as the owner before it, and a learner that was cut off passes.

A learner stops when its own tokens and those that it last heard of the others make up the budget. That may come late, so it may
have processed the budget twice, and the step that it was in. No claim is bounded by what other learners do: islands differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from diloco.core.log.chain import Chain
from diloco.core.run.grant_bounds import most_steps
from diloco.core.tensors import ranges
from diloco.core.tensors.built_in import is_built_in
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import ClaimError
from diloco.settings.run import RunSettings
from diloco.wire.fields import MAX_MEMBERS, Range
from diloco.wire.grants import Grant
from diloco.wire.offers import Answer, Offer

ISLAND = 8  # an island's batch is at most so many times the built-in task's, and at least that part of it
MAX_STEP_TOKENS = 1 << 27  # of one step of one learner in a task of one's own, on any devices
MAX_TOTAL = 1 << 61  # tokens of all learners of a fragment: half of what a field holds

Limit: TypeAlias = tuple[str, int, float]  # what is stated, how much, and how much it can be at most


@dataclass(frozen=True)
class StepBounds:
    """The tokens that one step of a learner can have; by default in a task, or a training loop, of one's own."""

    least_tokens: int = 1
    most_tokens: int = MAX_STEP_TOKENS


OWN_TASK = StepBounds()


def step_bounds(settings: RunSettings, fragments: FragmentMap) -> StepBounds:
    """Return the bounds of a run's steps.

    The settings describe the batch of the built-in task. They bind only where the run's model is that task's: a training loop
    that joins a run has a model and a batch of its own, whatever the settings say.
    """
    if not is_built_in(settings.task, fragments):
        return OWN_TASK
    batch_tokens = settings.task.tokens_per_batch
    return StepBounds(max(1, batch_tokens // ISLAND), ISLAND * batch_tokens)


def step_tokens(bounds: StepBounds, grant: Grant | None = None) -> int:
    """Return the most tokens that one step of a learner has."""
    if grant is not None and grant.batch_tokens is not None:
        return grant.batch_tokens
    return bounds.most_tokens


def processed_tokens(settings: RunSettings, bounds: StepBounds, grant: Grant | None = None) -> int:
    """Return the most tokens that one learner processes in a run: merged, lost and held."""
    return 2 * settings.tokens + step_tokens(bounds, grant)


def furthest_batch(settings: RunSettings, bounds: StepBounds, share: int) -> int:
    """Return the end that a share's batches do not pass: where it is after all that a learner can process, in small batches."""
    return settings.first_batch(share) + processed_tokens(settings, bounds) // bounds.least_tokens


def limits_of_batches(
    data: Sequence[Range], steps: int, settings: RunSettings, bounds: StepBounds, elapsed_s: float = math.inf
) -> list[Limit]:
    """Return the limits of the batches that a learner has trained in ``steps`` steps, ``elapsed_s`` after genesis."""
    # of the share whose end is furthest from where it begins in this run
    last, end = max(
        ((share, first + count) for share, first, count in data),
        key=lambda held: held[1] - settings.first_batch(held[0]),
        default=(0, 0),
    )
    begins = settings.first_batch(last)
    return [
        ("batches in its steps", ranges.batches(data), steps),
        ("the end of its batches", end, min(furthest_batch(settings, bounds, last), begins + most_steps(elapsed_s))),
        ("a share of the data", max((share for share, _, _ in data), default=0), settings.learners + MAX_MEMBERS - 1),
    ]


def judge(
    claim: Offer | Answer,
    chain: Chain | None,
    settings: RunSettings,
    bounds: StepBounds,
    grant: Grant | None = None,
    elapsed_s: float = math.inf,
) -> None:
    """Refuse a claim that cannot be.

    Args:
        chain: the fragment's log, whose cursor the claim follows; None: not known yet.
        bounds: of the run's steps.
        grant: the learner's; None: the run has no identities.
        elapsed_s: from genesis until a server stored the offer.

    Raises:
        ClaimError: the learner, the bound and the claim are named.
    """
    cursor = chain.cursors.get(claim.learner) if chain is not None else None
    steps, merged, lost = (cursor.steps, cursor.tokens, cursor.lost_tokens) if cursor else (0, 0, 0)
    limits: list[Limit] = [
        ("offers without a step", int(not claim.steps), 0),
        ("steps, at one token or more per step", claim.steps, claim.tokens),
        ("tokens in its steps", claim.tokens, claim.steps * step_tokens(bounds, grant)),
        ("steps since genesis, merged ones included", steps + claim.steps, most_steps(elapsed_s, grant)),
        ("tokens merged, lost and held", merged + claim.tokens + claim.lost_tokens, processed_tokens(settings, bounds, grant)),
        (
            "tokens since genesis, merged and lost ones included",
            merged + claim.tokens + claim.lost_tokens,
            most_steps(elapsed_s, grant) * step_tokens(bounds, grant),
        ),
        *limits_of_batches(claim.data, claim.steps, settings, bounds, elapsed_s),
    ]
    if chain is not None:
        totals = chain.tokens_merged + claim.tokens, chain.tokens_lost - lost + claim.lost_tokens
        limits.append(("tokens of all learners", max(totals), MAX_TOTAL))
    for what, stated, most in limits:
        if stated > most:
            raise ClaimError(
                f"offer {claim.number} of {claim.learner} is impossible: {what}: {stated}, at most {most:.0f} "
                f"({claim.steps} steps, {claim.tokens} tokens, {claim.lost_tokens} lost)"
            )
