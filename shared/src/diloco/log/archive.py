"""The archive of a run: the offers that were merged, where ``log.archive`` is set, so that every merge can be made again.

Any syncer may store anything in the archive. So the subject of an offer has the attempt of the version that merges it, which is
drawn just before. No other process has stored anything there by then; what it stores later stands behind the offer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco.core.tensors import codec, quantise
from diloco.errors import FormatError, MessageError
from diloco.log.stream import LogStream, open_quantised
from diloco.log.writer import Writer
from diloco.process.tasks import computed
from diloco.transport import Stored
from diloco.wire import framing
from diloco.wire.body import check_body_size, describe_body
from diloco.wire.entries import Record
from diloco.wire.offers import MergeMember, Offer, RegionalMembers, RegionalOffer

Archived = TypeVar("Archived", Offer, RegionalOffer)

MOST_LOOKED_AT = 64  # messages on the subject of one offer; its own is the first


class Archive:
    """The archive beside one log stream."""

    def __init__(self, stream: LogStream, writer: Writer) -> None:
        self.stream, self.writer = stream, writer

    async def put(self, offer: Offer | RegionalOffer, raw: NDArray[np.uint8], attempt: bytes) -> None:
        """Keep an offer that is about to be merged, with its body, uint8 [quantised bytes].

        ``attempt``: that of the body of the version that merges it.

        Raises:
            StorageFullError: the archive is full.
        """
        head = self._place_of(offer, attempt)
        packed = await asyncio.to_thread(codec.pack, raw, -1)
        body, inline, parts = describe_body(packed, offer.body.content_hash, attempt)
        frame = framing.pack(msgspec.structs.replace(offer, body=body), self.stream.run, inline)
        # without a fence: whatever another process stores on the subject keeps no version from being made
        await self.writer.append(head, frame, parts, attempt, None, self.stream.subjects.archive_stream)

    def _place_of(self, offer: Offer | RegionalOffer, attempt: bytes | None) -> str:
        """Return the subject that an offer is kept on."""
        names = self.stream.subjects
        if isinstance(offer, RegionalOffer):
            return names.archived_regional_offer(offer.fragment, offer.syncer, offer.incarnation, offer.number, attempt)
        return names.archived(offer.fragment, offer.learner, offer.incarnation, offer.number, attempt)

    async def offer(self, record: Record, member: MergeMember) -> tuple[Offer, NDArray[np.uint8]] | None:
        """Return an offer that a version merges, and its uncompressed body, uint8 [quantised bytes]; None if it was not kept.

        Raises:
            MessageError: it is damaged.
            BrokerError: the run has no archive.
        """
        place = partial(self.stream.subjects.archived, record.fragment, member.learner, member.incarnation, member.number)
        what = f"fragment {record.fragment}, archived offer {member.number} of {member.learner}"
        return await self._read(Offer, record, [place(attempt) for attempt in _attempts(record)], what)

    async def regional_offer(self, record: Record, together: RegionalMembers) -> tuple[RegionalOffer, NDArray[np.uint8]] | None:
        """Return a merged regional offer and its body, uint8 [quantised bytes], as :meth:`offer` does one of a learner."""
        names, identity = self.stream.subjects, (together.syncer, together.incarnation, together.number)
        place = partial(names.archived_regional_offer, record.fragment, *identity)
        what = f"fragment {record.fragment}, archived regional offer {together.number} of {together.syncer}"
        return await self._read(RegionalOffer, record, [place(attempt) for attempt in _attempts(record)], what)

    async def _read(
        self, cls: type[Archived], record: Record, heads: list[str], what: str
    ) -> tuple[Archived, NDArray[np.uint8]] | None:
        """Return the first offer on one of these subjects that is whole."""
        fault: MessageError | None = None
        for head in heads:
            async for stored in self._stored(head):
                try:
                    return await self._open(cls, record, stored, what)
                except MessageError as error:
                    fault = fault or error
        if fault is not None:
            raise fault
        return None

    async def _stored(self, head: str) -> AsyncIterator[Stored]:
        """Yield the first messages on a subject, the oldest first."""
        transport, stream = self.stream.transport, self.stream.subjects.archive_stream
        stored = await transport.first(stream, head, 1)
        for _ in range(MOST_LOOKED_AT):
            if stored is None:
                return
            yield stored
            stored = await transport.first(stream, head, stored.sequence + 1)

    async def _open(self, cls: type[Archived], record: Record, stored: Stored, what: str) -> tuple[Archived, NDArray[np.uint8]]:
        offer, _, inline = framing.unpack(stored.data, cls, self.stream.run)
        places = [self._place_of(offer, attempt) for attempt in _attempts(record)]
        if stored.subject not in places:
            raise FormatError(f"{what}: another one stands there, which would be at {places[0]}")
        size = self.stream.map.fragments[record.fragment].size
        check_body_size(offer.body, codec.packed_limit(quantise.body_bytes(size, offer.bits)), what)
        pieces = await self.stream.parts(stored.subject, offer.body, what, stored.sequence, self.stream.subjects.archive_stream)
        work = partial(open_quantised, offer.body, inline, pieces, size, offer.bits, what)
        return offer, await computed(size, work)


def _attempts(record: Record) -> list[bytes | None]:
    """Return what may stand for the attempt in the subjects of a version's offers; None: in the form of earlier versions."""
    return [record.body.attempt, None] if record.body is not None else [None]
