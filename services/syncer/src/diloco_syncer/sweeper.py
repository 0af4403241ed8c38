"""Drop messages from the stream of offers that can be part of no offer.

A learner may write below its own name only, but a NATS server knows of no fragments: one could fill the disk with parts of
fragments that the run does not have, or with ever more parts of one. No process reads such messages, so they are looked for. A
sender that has stored any loses all that it has stored: one that goes by the protocol never does, and so one request is enough
for each that does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from diloco.core.tensors import codec, quantise
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import BrokerError
from diloco.nats import streams
from diloco.nats.connection import NatsLink
from diloco.process.observe import Counted, Logger
from diloco.wire import subjects
from diloco.wire.body import ATTEMPT_BYTES, PART_BYTES
from diloco.wire.subjects import Subjects

EVERY_S = 30.0  # from one look to the next: a learner fills no disk in less
_NEVER = 1 << 62  # a sequence that no message has


def most_parts(fragment_map: FragmentMap) -> list[int]:
    """Return by fragment how many parts an offer may have."""
    limits = [codec.packed_limit(quantise.body_bytes(fragment.size, 32)) for fragment in fragment_map.fragments]
    return [-(-limit // (PART_BYTES - ATTEMPT_BYTES)) for limit in limits]


def is_stray(subject: str, parts: Sequence[int]) -> bool:
    """Whether a message on this subject is no head and no part of an offer of a run whose fragments have so many parts."""
    fragment = subjects.fragment_of(subject)
    if fragment is None or fragment >= len(parts):
        return True
    part = subjects.part_of_offer(subject)
    return part >= parts[fragment] if part is not None else not subjects.is_head(subject)


class Sweeper:
    """Looks at one server's stream of offers now and then."""

    def __init__(self, link: NatsLink, run: str, fragment_map: FragmentMap, log: Logger) -> None:
        self.link, self.subjects, self.log, self.every_s = link, Subjects(run), log, EVERY_S
        self.swept = Counted(log, "offers_dropped")
        self._parts = most_parts(fragment_map)

    async def work(self) -> None:
        """Sweep for ever; a server that does not answer is asked again later."""
        while True:
            await asyncio.sleep(self.every_s)
            try:
                await self.sweep()
            except BrokerError as error:
                self.log.debug("not_swept", reason=str(error))

    async def sweep(self) -> None:
        """Drop the messages that belong to no offer.

        Raises:
            BrokerError: the server refuses, or does not answer.
        """
        strays: dict[str | None, list[str]] = {}
        for within in self.subjects.offer_filters():
            for subject in await streams.subjects(self.link, self.subjects.offer_stream, within):
                if is_stray(subject, self._parts):
                    strays.setdefault(subjects.sender_of(subject), []).append(subject)
        for sender, found in strays.items():
            reason = f"{len(found)} messages belong to no offer of this run; the first is on {found[0]}"
            self.swept.note(sender or "*", "stray", reason=reason)
            for doomed in self.subjects.offers_of(sender) if sender else found:
                await streams.purge(self.link, self.subjects.offer_stream, doomed, _NEVER)
