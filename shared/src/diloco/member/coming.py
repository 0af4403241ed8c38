"""A learner's process comes to the others: it meets them, or finds that the run is over and that no other one comes."""

from __future__ import annotations

import asyncio

from diloco.control.creation import KnownRun, find_map
from diloco.log.log import Log
from diloco.member.group import Group
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.process.tasks import end
from diloco.transport import Transport
from diloco.wire.island import Facts

OVER_S = 2.0  # between two looks whether the run is over, while the others do not come


async def meet(group: Group, facts: Facts, generation: int, run: KnownRun, transport: Transport, log: Logger) -> bool:
    """Meet the learner's other processes, as :meth:`Group.meet` does; return whether they have met.

    Of a learner that goes on with fewer, processes begin one by one: they have not if the run is over.

    Raises:
        SettingsError: they differ.
        IslandError: they do not come, or cannot be reached.
    """
    if not group.settings.elastic:
        await group.meet(facts, generation)
        return True
    meeting = asyncio.create_task(group.meet(facts, generation))
    over = asyncio.create_task(_until_over(run, transport, log))
    try:
        await asyncio.wait([meeting, over], return_when=asyncio.FIRST_COMPLETED)
        if meeting.done():
            meeting.result()
            return True
        over.result()
        await group.close()
        return False
    finally:
        await end(meeting, over)


async def _until_over(run: KnownRun, transport: Transport, log: Logger) -> None:
    """Wait until every fragment's log is closed."""
    fragments = await until_available(lambda: find_map(run), log)
    store = Log(transport, run.name, run.identity, fragments, run.created)
    while not await store.reader.closed():
        await asyncio.sleep(OVER_S)
