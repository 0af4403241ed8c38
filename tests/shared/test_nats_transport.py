"""What the transport adds to the modules below it: lost connections, tasks that end with it, and a clock that may be wrong."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
from tests.made.fixtures import MakeServer
from tests.made.nats_links import freeze
from tests.pace import DEADLINE_S

from diloco.errors import AppendUncertainError
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.transport import Heard, Stored
from diloco_ops.broker.server import Server

LONG_S = 10 * DEADLINE_S


@pytest.mark.services
async def test_an_append_whose_connection_is_lost_is_uncertain_at_once(make_server: MakeServer) -> None:
    server = make_server()
    transport = await NatsTransport.open(server.url, server.url, "test", get_logger(), give_up_after_s=DEADLINE_S)
    try:
        await transport.ensure_stream("S", ["s.>"])
        await freeze(server)  # it takes the message and does not answer
        append = asyncio.ensure_future(transport.append("s.1", b"data", message_id="1", fence=None, timeout_s=LONG_S))
        await asyncio.sleep(0.2)
        assert not append.done()
        server.kill()
        with pytest.raises(AppendUncertainError, match="connection was lost"):
            async with asyncio.timeout(DEADLINE_S):
                await append
        # who tries again waits for the connection, and is answered
        again = asyncio.ensure_future(transport.append("s.1", b"data", message_id="1", fence=None, timeout_s=LONG_S))
        server.start()
        assert await again == 1
    finally:
        await transport.close()


@pytest.mark.services
async def test_a_subscription_that_has_ended_hears_nothing_and_others_go_on(link: NatsTransport) -> None:
    ended, other = asyncio.Queue[bytes](), asyncio.Queue[bytes]()

    def putting(queue: asyncio.Queue[bytes]) -> Callable[[Heard], Awaitable[None]]:
        async def put(message: Heard) -> None:
            queue.put_nowait(message.data)

        return put

    async with asyncio.timeout(DEADLINE_S):
        ends = await link.subscribe("topic.*", putting(ended))
        await link.subscribe("topic.*", putting(other))
        await link.publish("topic.a", b"1")
        assert [await ended.get(), await other.get()] == [b"1", b"1"]
        await ends.end()
        await ends.end()
        await link.publish("topic.a", b"2")
        assert await other.get() == b"2"
    assert ended.empty()


@pytest.mark.services
async def test_consumers_are_removed_before_a_connection_is_closed(link: NatsTransport, nats_server: Server) -> None:
    transport = await NatsTransport.open(nats_server.url, nats_server.url, "test", get_logger(), DEADLINE_S)
    await transport.ensure_stream("removed", ["removed.>"])
    await transport.append("removed.1", b"data", message_id="1", fence=None, timeout_s=DEADLINE_S)
    reader = cast(AsyncGenerator[Stored, None], aiter(transport.pull("removed", ["removed.>"], 1)))
    await anext(reader)
    assert len(await streams.consumers(link, "removed")) == 1
    await reader.aclose()
    await transport.close()
    assert await streams.consumers(link, "removed") == []


@pytest.mark.services
async def test_a_refusal_that_comes_as_the_caller_is_cancelled_is_no_error_of_the_event_loop(
    link: NatsTransport, caplog: pytest.LogCaptureFixture
) -> None:
    """As where one of several appends to a server that ends fails first, and the others are cancelled for it."""
    await _cancelled_as_it_is_refused(link)
    gc.collect()  # asyncio finds then that no one has asked for a task's error
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio" and each.levelno >= logging.ERROR] == []


async def _cancelled_as_it_is_refused(link: NatsTransport) -> None:
    appending = asyncio.ensure_future(
        link.append("no.stream.takes.it", b"data", message_id="1", fence=None, timeout_s=DEADLINE_S)
    )
    await asyncio.sleep(0)  # it begins
    await asyncio.sleep(0)
    (asked,) = (task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") == "append")
    asked.add_done_callback(lambda _: appending.cancel())
    await asyncio.wait({appending})
    assert appending.cancelled()


def test_the_clock_is_as_wrong_as_its_file_says(tmp_path: Path) -> None:
    transport = NatsTransport.__new__(NatsTransport)  # a clock needs no connection

    def is_wrong_by(seconds: float) -> bool:
        before_s, shown_s = time.time(), transport.wall_s()
        return before_s + seconds <= shown_s <= time.time() + seconds

    assert is_wrong_by(0.0)
    transport.clock_file = tmp_path / "clock"
    assert is_wrong_by(0.0)
    transport.clock_file.write_text("-3600.5\n")
    assert is_wrong_by(-3600.5)
    transport.clock_file.write_text("later")
    assert is_wrong_by(0.0)


@pytest.mark.services
async def test_a_service_is_alive_while_what_it_says_goes_out(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    transport = await NatsTransport.open(server.url, server.url, "test", get_logger(), give_up_after_s=DEADLINE_S)
    transport.alive_file = tmp_path / "alive"
    try:
        assert not transport.alive_file.exists()
        await transport.publish("heartbeat", b"")
        os.utime(transport.alive_file, (1, 1))
        await transport.publish("heartbeat", b"")
        assert transport.alive_file.stat().st_mtime > 1
        server.kill()
        while transport.connected:
            await asyncio.sleep(0.01)
        os.utime(transport.alive_file, (1, 1))
        await transport.publish("heartbeat", b"")  # it waits for the connection
        assert transport.alive_file.stat().st_mtime == 1
    finally:
        await transport.close()
