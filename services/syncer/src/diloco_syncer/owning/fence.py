"""The fence of a fragment's log, as one syncer knows it: where the log ends, and what may stand behind that.

Any syncer may store anything on a fragment's head subject, and every message there has the next append refused. If everyone
passes over all that is stored behind the fence, no process has taken the fragment over: the fence moves behind it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from diloco.core.log import quorum
from diloco.errors import FenceError
from diloco.log.follower import LogCopy
from diloco.log.log import Log
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.wire.entries import Claim, Record

TRIES = 16  # of one append: as many messages must come between a look and the append behind it

T = TypeVar("T")


async def holds(store: Log, copy: LogCopy, behind: int) -> bool:
    """Whether a fragment's log goes on from its copy; the fence moves to the last message, if all are passed over.

    ``behind``: sequence of the message after which all are looked at: the fence's, or one before it.

    Raises:
        AppendUncertainError: the server is silent.
    """
    chain, fence = copy.replica.chain, copy.fence

    def ends_turn(message: Claim | Record) -> bool:
        if store.stream.regions:
            return quorum.outbids(message, chain.epoch)
        return isinstance(message, Record) and chain.is_left_by(message)

    end = await store.reader.passed_over(chain.fragment, behind, ends_turn)
    if end is None or end < fence or not await store.reader.holds(chain):
        return False
    if copy.fence == fence:  # it may have gone on meanwhile
        copy.fence = end
    return True


async def append_behind(store: Log, copy: LogCopy, append: Callable[[int], Awaitable[T]], log: Logger) -> T:
    """Return what ``append`` does, given the fence of a copy; do it again if the fence moves, :data:`TRIES` times at most.

    Raises:
        FenceError: another process has appended, or messages are stored all the time.
    """
    for _ in range(TRIES - 1):
        fence = copy.fence
        try:
            return await append(fence)
        except FenceError as error:
            if not await until_available(partial(holds, store, copy, fence), log) or copy.fence == fence:
                raise
            log.debug("fence_moved", fragment=copy.replica.chain.fragment, reason=str(error))
    return await append(copy.fence)
