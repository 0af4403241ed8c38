"""A copy of a learner's state in the midst of training, for processes that keep it where they like.

All processes ask for it between the same two steps. The leader lets no offer begin until all others know of the copy, and what
it says to a process comes in order: all offers that its counts have are in the arrays by then.
"""

from __future__ import annotations

from typing import Any

from diloco.core.learner.learner import Dump
from diloco.core.learner.saving import set_name
from diloco.member.member import copy_own_state
from diloco.processes.follower import ProcessSide
from diloco.processes.leader import Leader
from diloco.wire.process_messages import CopyState


async def copy_state(process: ProcessSide) -> tuple[str, Dump]:
    """Return the name of the state as of the last boundary, and a process's part of it: its plain values are the leader's.

    Call it in the loop's thread. The part must remember what was before its newest decision.

    Raises:
        IslandError: not all processes ask for it.
        DilocoError: a task of the loop's thread failed.
    """
    part, accounts = process.part, dict[str, Any]()
    number = part.course.number - 1
    if isinstance(process, Leader):
        member = process.member
        async with member.answering.paused():
            accounts, _ = await copy_own_state(member)
            part.links.write_all(CopyState(number))
    arrays = await part.copied(number, part.group.settings.start_s)
    return set_name(part.course.generation, number), (accounts, arrays)
