"""A connection that is being remade, over and over, can be closed at any moment; nothing of it is left."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

from tests.pace import DEADLINE_S
from tests.services.cluster import Events
from tests.services.secured import make_keys, put, serving

from diloco.nats import identity
from diloco.nats.opening import RETRY_S
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco_ops.keys.permissions import Who

NAME = "toy-0"
COUNT = 16  # connections, closed one after another in the course of one attempt: some in the middle of a handshake


async def test_one_whose_certificate_has_ended_can_be_closed_at_any_moment(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys" / "run", "closed", [])
    put(keys, Who(NAME, "learner"), timedelta(seconds=6))
    entry, own = keys.roster.identity(NAME), identity.load(keys.identity_file(NAME))
    assert entry is not None
    with serving(keys, tmp_path / "nats") as server:
        log = cast(Logger, Events())
        opening = [NatsTransport.open(server.url, server.url, NAME, log, DEADLINE_S, identity=own) for _ in range(COUNT)]
        links = await asyncio.gather(*opening)
        await asyncio.sleep((entry.expires - datetime.now(UTC)).total_seconds() + 0.5)
        keys.refresh()
        server.reload()

        async def close(link: NatsTransport, after_s: float) -> None:
            await asyncio.sleep(after_s)
            async with asyncio.timeout(DEADLINE_S):
                await link.close()

        await asyncio.gather(*[close(link, RETRY_S * (0.6 + i / COUNT)) for i, link in enumerate(links)])
        await asyncio.sleep(2 * RETRY_S)
    left = {str(task.get_coro()) for task in asyncio.all_tasks() - {asyncio.current_task()}}
    assert {coroutine for coroutine in left if "nats" in coroutine} == set()
    assert not any(client.is_connected or client.is_reconnecting for link in links for client in (link.control, link.bulk))
