"""A connection that is being remade, over and over, can be closed at any moment; nothing of it is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
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
    own = identity.load(put(keys, Who(NAME, "learner")))
    with serving(keys, tmp_path / "nats") as server:
        log = cast(Logger, Events())
        opening = [NatsTransport.open(server.url, server.url, NAME, log, DEADLINE_S, identity=own) for _ in range(COUNT)]
        links = await asyncio.gather(*opening)
        own.tls.load_cert_chain(put(keys, Who(NAME, "learner"), timedelta(seconds=-1)))  # shown from the next handshake on
        server.reload()
        clients = [client for link in links for client in (link.control, link.bulk)]
        await until(lambda: not any(client.is_connected for client in clients), "all are cut off")
        await until(lambda: b"certificate has expired" in server.log_file.read_bytes(), "none comes in again")

        async def close(link: NatsTransport, after_s: float) -> None:
            await asyncio.sleep(after_s)
            async with asyncio.timeout(DEADLINE_S):
                await link.close()

        await asyncio.gather(*[close(link, RETRY_S * (0.6 + i / COUNT)) for i, link in enumerate(links)])
        await until(lambda: not tasks_of_nats(), "nothing of them is left")
    assert not any(client.is_connected or client.is_reconnecting for client in clients)


def tasks_of_nats() -> list[str]:
    return [name for task in asyncio.all_tasks() if "nats" in (name := str(task.get_coro()))]


async def until(predicate: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not predicate():
        assert time.monotonic() < ends_s, f"{what}: {tasks_of_nats()}"
        await asyncio.sleep(0.05)
