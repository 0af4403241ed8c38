"""Connections to a server of a test's own."""

from __future__ import annotations

from diloco.nats.connection import Link
from diloco.process.observe import get_logger
from diloco_ops.broker.server import Server


async def open_link(server: Server) -> Link:
    return await Link.open(server.url, server.url, "test", get_logger(), give_up_after_s=10)
