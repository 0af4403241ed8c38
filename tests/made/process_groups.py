"""Groups of a learner's processes, over real connections, which the fixture ``groups_closed`` closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.pace import DEADLINE_S, scaled_s

from diloco.elastic.assembly import ElasticAssembly
from diloco.process.observe import get_logger
from diloco.processes.group import Group
from diloco.processes.links import Links
from diloco.processes.meeting import free_port
from diloco.settings.service import LearnerSettings, MeshSettings, ProcessesSettings
from diloco.wire.process_messages import facts

RUN = bytes(8)
FACTS = facts({"mesh": "fsdp 2", "software": "1"})
REGROUP_S = scaled_s(0.5)
OPEN_LINKS: list[Links] = []  # of the test that runs
OPEN_GROUPS: list[Group] = []


def group(
    index: int,
    address: str,
    count: int = 2,
    start_s: float = DEADLINE_S,
    least: int | None = None,
    regroup_s: float = REGROUP_S,
) -> Group:
    processes = ProcessesSettings(
        count=count, index=index, address=address, start_s=start_s, least=least, regroup_s=min(regroup_s, start_s)
    )
    made = group_of(processes, count)
    OPEN_GROUPS.append(made)
    OPEN_LINKS.append(made.links)
    return made


def group_of(processes: ProcessesSettings, data: int) -> Group:
    """Return a group whose rule is that of its settings."""
    settings = LearnerSettings(name="ann", processes=processes, mesh=MeshSettings(data=data))
    assembly = ElasticAssembly(settings) if processes.elastic else None
    return Group(settings, RUN, get_logger(), assembly=assembly)


def address() -> str:
    return f"127.0.0.1:{free_port('127.0.0.1')}"


async def met(count: int = 2) -> list[Group]:
    where = address()
    groups = [group(index, where, count) for index in range(count)]
    await asyncio.gather(*(each.meet(FACTS, 5) for each in groups))
    return groups


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not reached():
            await asyncio.sleep(0.01)
