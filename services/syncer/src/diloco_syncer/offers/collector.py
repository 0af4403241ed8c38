"""Read the offers of some fragments from their stream, check them, and give them to the fragments' rounds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diloco.control.admission import LearnerStanding, admitted
from diloco.core.log.regional_round import HeldOffer
from diloco.core.syncer import bandwidth
from diloco.core.syncer.offer_fit import OF_ANOTHER_LOG, MissedOffer
from diloco.core.syncer.round import RoundOffer
from diloco.core.tensors import codec, quantise
from diloco.core.tensors.fragments import Fragment
from diloco.errors import BrokerError, FormatError, MessageError, NotAdmittedError, RewoundError
from diloco.log.stream import open_quantised
from diloco.process.retry import RETRY_S, Complaint, until_available
from diloco.process.tasks import computed, end
from diloco.transport import Stored, Transport
from diloco.wire import framing, subjects
from diloco.wire.assemble import ChunkAssembler, part_index
from diloco.wire.entries import Genesis
from diloco.wire.offers import Offer, RegionalOffer
from diloco_syncer.context import Context
from diloco_syncer.owning.owner import FragmentOwner


class OfferKeeper(Protocol):
    """Decides which offers of a fragment are kept. One that combines a region's offers is given learners' own alone."""

    def refuse(self, offer: Any, elapsed_s: float) -> MissedOffer | None: ...

    def hold(self, held: Any) -> MissedOffer | None: ...


class Taker(Protocol):
    """A fragment whose offers are wanted."""

    @property
    def fragment(self) -> Fragment: ...

    @property
    def round(self) -> OfferKeeper: ...


@dataclass
class _Reading:
    """A task that reads some fragments' offers."""

    fragments: frozenset[int]
    read: Stored | None  # the last message; None: nothing yet
    task: asyncio.Task[None] | None = None


class Collector:
    """Reads the offers of the fragments that :meth:`serve` was last given."""

    def __init__(
        self, context: Context, transport: Transport, held: Callable[[int], None], elsewhere: str | None = None
    ) -> None:
        """Read over ``transport``.

        ``held`` is called with the fragment of an offer that is held. ``elsewhere`` is the other region whose offers are read:
        its stream is waited for.
        """
        self.context, self.transport, self.held, self.elsewhere = context, transport, held, elsewhere
        self.run, self.log = context.run, context.log
        self.subjects = context.store.subjects
        self.learners: set[str] = set()  # whose offers come from this region
        created = context.run.created
        allowed = bandwidth.possible(created.codec.offer_bits, created)
        self._precisions = [sorted({each.bits(bits) for bits in allowed}) for each in context.map.fragments]  # of offers
        self._takers: dict[int, Taker] = {}
        self._again = False
        self.regional = False  # whether regional offers are read, and no others
        self._parts: dict[int, ChunkAssembler] = {}  # by fragment; of bodies whose heads have not come yet
        self._readings: list[_Reading] = []
        self._admitted: dict[str, int] = {}
        self._began_s: float | None = None

    async def serve(self, takers: Mapping[int, Taker], group: asyncio.TaskGroup, *, regional: bool = False) -> None:
        """Read these fragments' offers and no others': from the stream's beginning for those that are new.

        The stream has every learner's latest offer, also those that were held for a fragment before. ``regional``: read the
        offers that the region's aggregator has combined, in place of the learners' own.
        """
        if takers == self._takers and regional == self.regional and not self._again:
            return
        await self.stop()
        if self._again:
            self._takers, self._again = {}, False
        kept = [index for index in takers if self._takers.get(index) is takers[index] and regional == self.regional]
        before = [reading.read for reading in self._readings if reading.fragments.intersection(kept)]
        read = None if None in before else min(filter(None, before), key=lambda stored: stored.sequence, default=None)
        self._readings = []
        self._takers, self.regional = dict(takers), regional
        self._parts = {
            index: self._parts.get(index, ChunkAssembler()) if index in kept else ChunkAssembler() for index in takers
        }
        self._start(kept, read, group)
        self._start(takers.keys() - set(kept), None, group)

    def again(self) -> None:
        """Read everything again at the next :meth:`serve`: offers that were refused may be wanted by now."""
        self._again = True

    def replace(self, owner: FragmentOwner) -> None:
        """Give the fragment's next offers to a new owner, which begins without those read so far."""
        self._takers[owner.index] = owner

    async def stop(self) -> None:
        """Read no more."""
        await end(*(reading.task for reading in self._readings))

    def _start(self, fragments: Iterable[int], read: Stored | None, group: asyncio.TaskGroup) -> None:
        reading = _Reading(frozenset(fragments), read)
        if reading.fragments:
            reading.task = group.create_task(self._read(reading))
            self._readings.append(reading)

    async def _read(self, reading: _Reading) -> None:
        tree = self.subjects.regional_offer_tree if self.regional else self.subjects.offer_tree
        filters, complaint = [tree(index) for index in sorted(reading.fragments)], Complaint(self.log)
        while True:
            start = reading.read.sequence + 1 if reading.read else 1
            try:
                async for message in self.transport.pull(self.subjects.offer_stream, filters, start, reading.read):
                    index, sender = subjects.fragment_of(message.subject), subjects.sender_of(message.subject)
                    if index is not None and sender is not None and index in reading.fragments:
                        await self._take(index, sender, message)
                    reading.read = message
                    complaint.over()
            except RewoundError as error:
                self.log.error("offers_rewound", reason=str(error))
                reading.read = None
            except BrokerError as error:
                if self.elsewhere is None:
                    raise
                complaint.warn("waiting_for_offers", other_region=self.elsewhere, reason=str(error))
                reading.read = None
                await asyncio.sleep(RETRY_S)

    async def _take(self, index: int, sender: str, message: Stored) -> None:
        parts = self._parts[index]
        if not subjects.is_head(message.subject):
            number, size = part_index(message.subject), self._takers[index].fragment.size
            if number is not None:
                largest = quantise.body_bytes(size, max(self._precisions[index]))
                parts.add(sender, number, message.data, codec.packed_limit(largest))
            return
        offer: Offer | RegionalOffer | None = None
        try:
            kind: type[Offer | RegionalOffer] = RegionalOffer if self.regional else Offer
            offer, _, inline = framing.unpack(message.data, kind, self.run.identity)
            await self._take_offer(index, sender, message, parts, offer, inline)
        except MessageError as error:
            if isinstance(offer, RegionalOffer) or self.regional:
                self.context.refuse(sender, error, fragment=index)
            else:
                self.context.refuse_offer(sender, index, offer, error)

    async def _take_offer(
        self, index: int, sender: str, message: Stored, parts: ChunkAssembler, offer: Offer | RegionalOffer, inline: bytes
    ) -> None:
        """Give the fragment's round an offer: a learner's, or where the region's are combined, a syncer's."""
        what = f"fragment {index}, {'regional ' if self.regional else ''}offer {offer.number} of {sender}"
        role, author = ("syncer", offer.syncer) if isinstance(offer, RegionalOffer) else ("learner", offer.learner)
        if (offer.fragment, author) != (index, sender):
            raise FormatError(f"{what}: its content names fragment {offer.fragment}, {role} {author}")
        round_, elapsed_s = self._takers[index].round, message.stored_at_s - await self._genesis_s()
        body = await self._open(offer, inline, parts, sender, partial(round_.refuse, offer, elapsed_s), what)
        if body is not None:
            held = HeldOffer(offer, body, elapsed_s) if isinstance(offer, Offer) else RoundOffer(offer, body, elapsed_s)
            self._tell(offer, sender, round_.hold(held))
            outlier = self.run.now.outlying.quarantined.get(sender)
            if isinstance(offer, Offer) and outlier is not None and sender in self.context.roster.on_trial:
                text = f"{sender} is quarantined ({outlier.label}); its offers are merged again after a cycle of sound ones"
                self.context.report_refusal(sender, index, offer, "ejected", text)

    async def _genesis_s(self) -> float:
        """Return the time of genesis, in Unix time of the server whose offers are read: its learners began no sooner.

        A stream that was made again has a younger copy of the record. So its founder's clock and the own region's server count
        too, where they say earlier.
        """
        if self._began_s is None:
            found = []
            for transport in (self.transport, self.context.transport):
                look = partial(transport.last, self.subjects.log_stream, self.subjects.genesis)
                stored = await until_available(look, self.log)
                if stored is None:
                    return -math.inf
                found.append(stored)
            genesis = framing.unpack(found[0].data, Genesis, self.run.identity)[0]
            self._began_s = min(genesis.created_at_s, *(stored.stored_at_s for stored in found))
        return self._began_s

    async def _open(
        self,
        offer: Offer | RegionalOffer,
        inline: bytes,
        parts: ChunkAssembler,
        sender: str,
        refuse: Callable[[], MissedOffer | None],
        what: str,
    ) -> NDArray[np.uint8] | None:
        """Return the content of an offer, uint8 [bytes], checked; None if the offer is of no use.

        Raises:
            FormatError: it has bits that the run has not.
            NotAdmittedError: the learner is not admitted.
            ClaimError: it states more than a learner can have done.
            MessageError: the content is damaged.
        """
        precisions = self._precisions[offer.fragment]
        if offer.bits not in precisions:
            raise FormatError(f"{what}: {offer.bits} bits; the run has {' or '.join(map(str, precisions))}")
        pieces = parts.take(sender, offer.body)
        if pieces is None:
            return None  # a newer attempt is on its way: it has replaced parts of this one
        for member in offer.members:
            standing = await self._not_admitted(member.learner, member.incarnation)
            if standing is not None:
                raise NotAdmittedError(
                    f"{what}: incarnation {member.incarnation} of {member.learner} is not admitted to run {self.run.name!r}"
                    f"{standing.reason and ': '}{standing.reason}",
                    lacks_grant=standing.lacks_grant,
                )
        self.learners.update(member.learner for member in offer.members)
        missed = refuse()
        if missed is not None:
            # no fault: offers cross with versions, and after a restart the stream still holds merged ones
            self._tell(offer, sender, missed)
            return None
        size = self._takers[offer.fragment].fragment.size
        return await computed(size, partial(open_quantised, offer.body, inline, pieces, size, offer.bits, what))

    def _tell(self, offer: Offer | RegionalOffer, sender: str, missed: MissedOffer | None) -> None:
        """Tell that an offer is held, or count it as missed."""
        if missed is None:
            self.held(offer.fragment)
            return
        values: dict[str, Any] = {"fragment": offer.fragment, "sender": sender, "number": offer.number}
        self.log.debug("offer_passed_over", **values, kind=missed.reason, reason=missed.text)
        if missed.reason != "ejected":
            _, count = self.context.counts.missed_offers.add(sender, missed.reason)
            if missed.reason in OF_ANOTHER_LOG and count == 1:
                self.log.warning("offer_of_another_log", **values, kind=missed.reason, reason=missed.text)
        elif isinstance(offer, Offer):
            self.context.report_refusal(sender, offer.fragment, offer, "ejected", missed.text)

    async def _not_admitted(self, learner: str, incarnation: int) -> LearnerStanding | None:
        """Return the standing of a learner that is not admitted in an incarnation or a later one; None: it is."""
        standing = LearnerStanding(None)
        if self._admitted.get(learner, -1) < incarnation:
            standing = await until_available(partial(admitted, self.run, learner, self.context.map.digest), self.log)
            self._admitted[learner] = -1 if standing.incarnation is None else standing.incarnation
            if standing.grant is not None:
                self.context.roster.grants[learner] = standing.grant
        return None if self._admitted[learner] >= incarnation else standing
