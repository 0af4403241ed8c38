"""Offers that are lost on their way. The server acknowledges them, so a learner goes on as after any other.

A live run does not lose offers so. It is the experiment of DiLoCo (arXiv 2311.08105), in which learners cannot send some of
their outer gradients.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from diloco.testing.server import matches
from diloco.testing.virtual_transport import VirtualTransport
from diloco.testing.world import DELAY_S, VirtualProcess

LOST = (1 << 53) - 1  # the sequence of an offer that is in no stream


class DroppingTransport(VirtualTransport):
    """A learner's way to the server, on which some of its offers are lost.

    Args:
        process: the learner's.
        pattern: the subjects of its offers.
        share: of offers that are lost, at random.
        rng: draws which.
    """

    def __init__(self, process: VirtualProcess, pattern: str, share: float, rng: random.Random) -> None:
        super().__init__(process, process.region)
        self._pattern, self._share, self._rng = pattern, share, rng

    async def append(self, subject: str, data: bytes, *, parts: Sequence[bytes | memoryview] = (), **others: Any) -> int:
        """Store a message, unless it is an offer and lost."""
        if not matches(self._pattern, subject) or self._rng.random() >= self._share:
            return await super().append(subject, data, parts=parts, **others)
        self.bytes_out += len(data) + sum(len(part) for part in parts)
        waited = self.loop.create_future()
        self.loop.call_later(2 * DELAY_S, self._settle, waited, LOST, None)
        sequence: int = await waited
        return sequence
