"""Processes of loops that join a run, beside its services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster


@asynccontextmanager
async def beside_services(cluster: Cluster) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Begin the run's services, and yield a list for the processes that a test starts: those that it has left are killed."""
    cluster.coordinator()
    cluster.syncers()
    await cluster.link()
    async with ended_at_last() as started:
        yield started


@asynccontextmanager
async def ended_at_last() -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Yield a list for processes; those that still run at the end are killed."""
    started: list[asyncio.subprocess.Process] = []
    try:
        yield started
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def ended(*processes: asyncio.subprocess.Process) -> list[tuple[int | None, str]]:
    """Return the exit code of each process, and what it said on stderr."""
    async with asyncio.timeout(DEADLINE_S):
        said = await asyncio.gather(*(process.communicate() for process in processes))
    return [(process.returncode, err.decode()) for process, (_, err) in zip(processes, said, strict=True)]
