"""Connections to a server of a test's own."""

from __future__ import annotations

import asyncio
import signal

import psutil
from tests.pace import DEADLINE_S

from diloco.nats.connection import NatsLink
from diloco.process.observe import get_logger
from diloco_ops.broker.server import Server


async def open_link(server: Server) -> NatsLink:
    return await NatsLink.open(server.url, server.url, "test", get_logger(), give_up_after_s=DEADLINE_S)


async def freeze(server: Server) -> None:
    """Stop it, and return when it has stopped: on a busy machine it may answer once more before that."""
    server.send_signal(signal.SIGSTOP)
    while psutil.Process(server.pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)
