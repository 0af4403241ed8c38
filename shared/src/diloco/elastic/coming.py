"""A process of a learner that goes on with fewer comes to the others: it meets them, or finds that the run is over."""

from __future__ import annotations

import asyncio

from diloco.control.creation import KnownRun, find_map
from diloco.elastic.assembly import ElasticAssembly
from diloco.elastic.renewing import Renewing
from diloco.log.log import Log
from diloco.process import renewal
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.process.tasks import end
from diloco.processes.group import Group
from diloco.settings.service import LearnerSettings
from diloco.transport import Transport
from diloco.wire.process_messages import Facts

OVER_S = 2.0  # between two looks whether the run is over, while the others do not come


def make_group(settings: LearnerSettings, run: KnownRun, key: bytes, log: Logger) -> Group:
    """Return a group that begins again by itself, with those that the process before this one knew to come."""
    group = Group(settings, run.identity, log, key, ElasticAssembly(settings, renewal.expected()))
    group.renewal = Renewing(group, settings)
    return group


async def meet(group: Group, facts: Facts, generation: int, run: KnownRun, transport: Transport, log: Logger) -> bool:
    """Meet the learner's other processes, as :meth:`Group.meet` does; return whether they have met.

    Processes begin one by one: they have not if the run is over, and no other one comes any more.

    Raises:
        SettingsError: they differ.
        IslandError: they do not come, or cannot be reached.
    """
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
