"""``groups_closed``: a learner's processes that meet in a test are parted after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.made.process_groups import OPEN_GROUPS, OPEN_LINKS


@pytest.fixture
async def groups_closed() -> AsyncIterator[None]:
    yield
    for group in OPEN_GROUPS:
        group.ending()  # or its watch would end this process, which misses the others
        await group.close()
    for links in OPEN_LINKS:
        await links.close()
    OPEN_GROUPS.clear()
    OPEN_LINKS.clear()
    await asyncio.sleep(0.01)  # for sockets to be closed
