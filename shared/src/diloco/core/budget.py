"""How much of the token budget a fragment's log shows to be used, whatever members claim.

Members say how many tokens they have processed, and owners that a run ends. The log is what all have checked: beyond it counts
no more than learners usually hold of what is not merged yet.
"""

from __future__ import annotations

from diloco.core.chain import Chain
from diloco.wire.entries import Cursor

UNMERGED = 2  # a learner's unmerged tokens count up to so many times its mean merged offer
IN_REACH = 2 * UNMERGED  # and those of all learners, the dead too, up to so many, where it is about whether a run may end


def accounted(chain: Chain) -> int:
    """Return the tokens of all learners that count towards the budget: those that the log has, merged or lost.

    No merge bears lost tokens out. So what one learner has lost beyond what was merged of it does not count, for the learner
    of which that is most: no single member ends a run by a claim. An honest learner of which that is so was cut off for long.
    Then the run goes on for as many tokens more.
    """
    return chain.tokens_merged + chain.tokens_lost - uncounted(chain)[1]


def uncounted(chain: Chain) -> tuple[str, int]:
    """Return the learner that has lost most tokens beyond its merged ones, and how many those are; 0: there is none."""
    beyond = ((max(0, cursor.lost_tokens - cursor.tokens), name) for name, cursor in chain.cursors.items())
    tokens, name = max(beyond, default=(0, ""))
    return name, tokens


def unmerged(cursor: Cursor) -> int:
    """Return the tokens that a learner may hold beyond its merged offers."""
    return UNMERGED * _mean(cursor)


def believable(chain: Chain) -> int:
    """Return the tokens that all learners may have processed at most: nothing beyond the log of one that has no offer in it."""
    return accounted(chain) + sum(map(unmerged, chain.cursors.values()))


def in_reach(chain: Chain, budget: int) -> bool:
    """Whether the log's tokens and those that may be on their way make up the budget."""
    if accounted(chain) + IN_REACH * chain.tokens_merged < budget:
        return False  # the mean offers of all learners are no more than all that was merged
    return accounted(chain) + IN_REACH * sum(map(_mean, chain.cursors.values())) >= budget


def _mean(cursor: Cursor) -> int:
    """Return the tokens of a learner's mean offer in the log."""
    return cursor.tokens // max(1, cursor.versions)
