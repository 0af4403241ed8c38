"""How much of the token budget a fragment's log shows to be used, whatever members claim.

Members say how many tokens they have processed, and owners that a run ends. The log is what all have checked: beyond it counts
no more than learners usually hold of what is not merged yet.
"""

from __future__ import annotations

from diloco.core.log.chain import Chain
from diloco.wire.entries import Cursor

UNMERGED = 2  # a learner's unmerged tokens count up to so many times its mean merged offer
IN_REACH = 2 * UNMERGED  # and those of all learners, the dead too, up to so many, where it is about whether a run may end


def accounted(chain: Chain) -> int:
    """Return the tokens of all learners that count towards the budget: those that the log has, merged or lost.

    Nothing proves lost tokens. The largest excess of lost over merged tokens of one learner does not count, so no single claim
    ends a run.
    """
    excess = (cursor.lost_tokens - cursor.tokens for cursor in chain.cursors.values())
    return stated(chain) - max(0, max(excess, default=0))


def stated(chain: Chain) -> int:
    """Return all tokens that the log has, merged or lost, as learners stated them."""
    return chain.tokens_merged + chain.tokens_lost


def unmerged(cursor: Cursor) -> int:
    """Return the tokens that a learner may hold beyond its merged offers."""
    return UNMERGED * _mean(cursor)


def believable(chain: Chain) -> int:
    """Return the tokens that all learners may have processed at most: nothing beyond the log of one that has no offer in it."""
    return accounted(chain) + sum(map(unmerged, chain.cursors.values()))


def in_reach(chain: Chain, budget: int) -> bool:
    """Whether the log's tokens and those that may be on their way make up the budget."""
    return _in_reach(chain, accounted(chain), budget)


def stated_in_reach(chain: Chain, budget: int) -> bool:
    """Whether all tokens that the log has, and those that may be on their way, make up the budget.

    That is enough once every live learner has stopped: each by its own count, which no other learner's claim raises.
    """
    return _in_reach(chain, stated(chain), budget)


def _in_reach(chain: Chain, tokens: int, budget: int) -> bool:
    if tokens + IN_REACH * chain.tokens_merged < budget:
        return False  # the mean offers of all learners are no more than all that was merged
    return tokens + IN_REACH * sum(map(_mean, chain.cursors.values())) >= budget


def _mean(cursor: Cursor) -> int:
    """Return the tokens of a learner's mean offer in the log."""
    return cursor.tokens // max(1, cursor.versions)
