"""The archive of a run: the offers that were merged, where ``log.archive`` is set, so that every merge can be made again."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco.core.tensors import codec, quantise
from diloco.errors import FenceError, FormatError
from diloco.log.stream import LogStream, open_quantised
from diloco.log.writer import Writer
from diloco.process.tasks import computed
from diloco.transport import Fence
from diloco.wire import framing
from diloco.wire.body import ATTEMPT_BYTES, check_body_size, describe_body
from diloco.wire.offers import Offer, RegionalOffer

Archived = TypeVar("Archived", Offer, RegionalOffer)


class Archive:
    """The archive beside one log stream."""

    def __init__(self, stream: LogStream, writer: Writer) -> None:
        self.stream, self.writer = stream, writer

    async def put(self, offer: Offer | RegionalOffer, raw: NDArray[np.uint8]) -> None:
        """Keep an offer that is about to be merged, with its body, uint8 [quantised bytes]; keeping it twice keeps it once.

        Raises:
            StorageFullError: the archive is full.
        """
        head = self._place_of(offer)
        packed = await asyncio.to_thread(codec.pack, raw, -1)
        attempt = self.stream.transport.random_bytes(ATTEMPT_BYTES)
        body, inline, parts = describe_body(packed, offer.body.content_hash, attempt)
        frame = framing.pack(msgspec.structs.replace(offer, body=body), self.stream.run, inline)
        try:
            await self.writer.append(head, frame, parts, attempt, Fence(head, 0), self.stream.subjects.archive_stream)
        except FenceError:
            return  # the merge was begun before, by this owner or the one before it

    def _place_of(self, offer: Offer | RegionalOffer) -> str:
        """Return the subject that an offer is kept on."""
        if isinstance(offer, RegionalOffer):
            return self.stream.subjects.archived_regional_offer(offer.fragment, offer.syncer, offer.incarnation, offer.number)
        return self.stream.subjects.archived(offer.fragment, offer.learner, offer.incarnation, offer.number)

    async def offer(self, fragment: int, learner: str, incarnation: int, number: int) -> tuple[Offer, NDArray[np.uint8]] | None:
        """Return a merged offer and its uncompressed body, uint8 [quantised bytes]; None if it was not kept.

        Raises:
            MessageError: it is damaged.
            BrokerError: the run has no archive.
        """
        head = self.stream.subjects.archived(fragment, learner, incarnation, number)
        return await self._read(Offer, fragment, head, f"fragment {fragment}, archived offer {number} of {learner}")

    async def regional_offer(
        self, fragment: int, syncer: str, incarnation: int, number: int
    ) -> tuple[RegionalOffer, NDArray[np.uint8]] | None:
        """Return a merged regional offer and its body, uint8 [quantised bytes], as :meth:`offer` does one of a learner."""
        head = self.stream.subjects.archived_regional_offer(fragment, syncer, incarnation, number)
        what = f"fragment {fragment}, archived regional offer {number} of {syncer}"
        return await self._read(RegionalOffer, fragment, head, what)

    async def _read(
        self, cls: type[Archived], fragment: int, head: str, what: str
    ) -> tuple[Archived, NDArray[np.uint8]] | None:
        stream = self.stream.subjects.archive_stream
        stored = await self.stream.transport.last(stream, head)
        if stored is None:
            return None
        offer, _, inline = framing.unpack(stored.data, cls, self.stream.run)
        if self._place_of(offer) != head:
            raise FormatError(f"{what}: another one stands there, which would be at {self._place_of(offer)}")
        size = self.stream.map.fragments[fragment].size
        check_body_size(offer.body, codec.packed_limit(quantise.body_bytes(size, offer.bits)), what)
        pieces = await self.stream.parts(head, offer.body, what, stored.sequence, stream)
        work = partial(open_quantised, offer.body, inline, pieces, size, offer.bits, what)
        return offer, await computed(size, work)
