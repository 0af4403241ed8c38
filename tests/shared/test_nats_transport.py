"""What the transport adds to the modules below it: appends whose connection is lost, and a clock that may be wrong."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from tests.made.fixtures import MakeServer
from tests.made.nats_links import freeze
from tests.pace import DEADLINE_S

from diloco.errors import AppendUncertainError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger

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
