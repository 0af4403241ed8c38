"""One direction of a link at work: the pure link of :mod:`diloco_ops.wan.link`, its timer, and the conditions that hold now."""

from __future__ import annotations

import asyncio
import math
import random
import socket
from asyncio.trsock import TransportSocket
from typing import Any, Protocol

from diloco.process.observe import Logger
from diloco_ops.failures import Failure
from diloco_ops.wan import impairments
from diloco_ops.wan.link import Delivery, Flow, LinkConditions, Mark, WanLink

UNLIMITED_BUFFER_BYTES = 4 << 20
HEADER_BYTES = 52  # IPv4 20, TCP 20, timestamps 12


class Receiver(Protocol):
    """One end of a connection: takes deliveries, and reads only while its line has room."""

    def deliver(self, delivery: Delivery[Receiver]) -> None:
        """Take payload or a mark that arrived."""

    def update_reading(self) -> None:
        """Read if the line has room."""


class WanLine:
    """One direction of a link at work: the core's link, its timer, and what holds for it now."""

    def __init__(self, name: str, conditions: LinkConditions, seed: int, log: Logger) -> None:
        self.name = name
        self.base = conditions  # as the file or an operator says
        self.slow = 1.0
        self.cut = False  # by an operator
        self.lasting: list[Failure] = []  # of the tape that is played, in the order in which they began
        self.link: WanLink[Receiver] = WanLink(conditions, random.Random(f"{seed}/{name}"))
        self.waiting: set[Receiver] = set()  # sides that may not read now
        self.sockets: set[socket.socket | TransportSocket] = set()  # that are read into it, or listen for such
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._fitted = False
        self._log = log

    def apply(self) -> None:
        """Bring the current conditions about."""
        now_s = self._loop.time()
        before, conditions = self.link.conditions, impairments.slowed(impairments.left(self.base, self.lasting), self.slow)
        self.link.change(now_s, conditions)
        if before.rate_bits_per_s != conditions.rate_bits_per_s:
            for sock in self.sockets:
                self.fit_buffer(sock)
        if self.cut or impairments.is_cut(self.lasting):
            self.link.cut(now_s)
        else:
            self.link.heal(now_s)
        self._log.info(
            "link_changed",
            link=self.name,
            cut=self.link.is_cut,
            rate_bits_per_s=conditions.rate_bits_per_s,
            delay_s=conditions.delay_s,
            jitter_s=conditions.jitter_s,
        )
        self._pump()

    def fit_buffer(self, sock: socket.socket | TransportSocket) -> None:
        """Keep the kernel's receive buffer about as small as the queue: its delay is nowhere counted.

        As long as the link was never limited, the kernel's own choice stays, which is the fastest.
        """
        conditions = self.link.conditions
        self._fitted |= conditions.rate_bits_per_s is not None
        if self._fitted:
            size = UNLIMITED_BUFFER_BYTES if conditions.rate_bits_per_s is None else conditions.queue_limit_bytes
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    def enter(self, flow: Flow[Receiver], data: bytes) -> None:
        """Send payload of a flow."""
        self.link.enter(self._loop.time(), flow, data)
        self._pump()

    def mark(self, flow: Flow[Receiver], mark: Mark) -> None:
        """Send a mark of a flow."""
        self.link.mark(self._loop.time(), flow, mark)
        self._pump()

    def _pump(self) -> None:
        """Hand over deliveries that are due, and come back for the next."""
        for delivery in self.link.poll(self._loop.time()):
            delivery.flow.receiver.deliver(delivery)
        next_s = self.link.next_s()
        if self._timer is not None and (next_s is None or next_s < self._timer.when()):
            self.close()
        if self._timer is None and next_s is not None:
            self._timer = self._loop.call_at(next_s, self._wake)
        for side in tuple(self.waiting):
            side.update_reading()

    def _wake(self) -> None:
        self._timer = None
        self._pump()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def status(self, back: WanLine, connections: int) -> dict[str, Any]:
        """Return the line's status. ``back`` is the other direction, whose packets are acknowledged on this one."""
        stats = self.link.statistics(self._loop.time())
        packets, acknowledged = (sum(carried.packets for carried in line.link.carried.values()) for line in (self, back))
        return {
            "state": "cut" if self.link.is_cut else "up",
            "rate_bits_per_s": self.link.conditions.rate_bits_per_s,
            "delay_s": self.link.conditions.delay_s,
            "jitter_s": self.link.conditions.jitter_s,
            "control_bytes": self.link.carried["control"].payload_bytes,
            "bulk_bytes": self.link.carried["bulk"].payload_bytes,
            "packets_estimated": packets,
            "header_bytes_estimated": HEADER_BYTES * (packets + math.ceil(acknowledged / 2)),
            "achieved_bits_per_s": stats.achieved_bits_per_s,
            "queued_bytes": stats.queued_bytes,
            "queue_age_s": stats.queue_age_s,
            "flying_bytes": stats.flying_bytes,
            "connections": connections,
            "disturbed_by": [failure.kind for failure in self.lasting],
        }
