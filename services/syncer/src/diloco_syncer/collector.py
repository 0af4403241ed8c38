"""Offers of some fragments: read from their stream, checked, and given to the fragments' rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diloco import membership
from diloco.core import bandwidth, codec, quantise
from diloco.core.combining import Own
from diloco.core.fragments import Fragment
from diloco.core.round import Held, Round
from diloco.errors import BrokerError, FormatError, MessageError, RewoundError
from diloco.log import open_body
from diloco.membership import Run
from diloco.observe import Logger
from diloco.patience import RETRY_S, patiently
from diloco.tasks import end
from diloco.transport import Stored, Transport
from diloco.wire import messages, subjects
from diloco.wire.assemble import Parts, part_index
from diloco.wire.messages import Combined, Offer
from diloco.wire.subjects import Subjects
from diloco_syncer.owned import Owned

MAX_STEP_TOKENS = 1 << 27  # of one step of one learner, whatever its task and its devices


class Keeper(Protocol):
    """Decides which offers of a fragment are kept."""

    def refuse(self, offer: Offer) -> str | None: ...

    def hold(self, held: Own) -> str | None: ...


class Taker(Protocol):
    """A fragment whose offers are wanted."""

    @property
    def fragment(self) -> Fragment: ...

    @property
    def round(self) -> Keeper: ...


@dataclass
class _Reading:
    """A task that reads some fragments' offers."""

    fragments: frozenset[int]
    read: Stored | None  # the last message; None: nothing yet
    task: asyncio.Task[None] | None = None


class Collector:
    """Reads the offers of the fragments that :meth:`serve` was last given."""

    def __init__(
        self,
        transport: Transport,
        run: Run,
        map_digest: bytes,
        refuse: Callable[..., None],
        held: Callable[[], None],
        log: Logger,
        elsewhere: str | None = None,
    ) -> None:
        """``elsewhere``: the other region whose offers are read; that it has no such stream is then waited out."""
        self.elsewhere = elsewhere
        self.transport, self.run, self.map_digest, self.refuse, self.held, self.log = (
            transport,
            run,
            map_digest,
            refuse,
            held,
            log,
        )
        self.subjects = Subjects(run.name)
        self.learners: set[str] = set()  # whose offers come from here
        self._precisions = bandwidth.possible(run.settings.codec.offer_bits, run.settings)
        self._takers: dict[int, Taker] = {}
        self._again = False
        self.combined = False  # whether combined offers are read, and no others
        self._parts: dict[int, Parts] = {}  # by fragment; of bodies whose heads have not come yet
        self._readings: list[_Reading] = []
        self._admitted: dict[str, int] = {}

    async def serve(self, takers: Mapping[int, Taker], group: asyncio.TaskGroup, *, combined: bool = False) -> None:
        """Read these fragments' offers and no others': from the stream's beginning for those that are new.

        What was held for a fragment that was let go of is not; the stream has every learner's latest. ``combined``: read what
        the region's syncer has made of them in their place.
        """
        if takers == self._takers and combined == self.combined and not self._again:
            return
        await self.stop()
        if self._again:
            self._takers, self._again = {}, False
        kept = [index for index in takers if self._takers.get(index) is takers[index] and combined == self.combined]
        before = [reading.read for reading in self._readings if reading.fragments.intersection(kept)]
        read = None if None in before else min(filter(None, before), key=lambda stored: stored.sequence, default=None)
        self._readings = []
        self._takers, self.combined = dict(takers), combined
        self._parts = {index: self._parts.get(index, Parts()) if index in kept else Parts() for index in takers}
        self._start(kept, read, group)
        self._start(takers.keys() - set(kept), None, group)

    def again(self) -> None:
        """What is read next is read from its beginning: of what was refused, something may be wanted by now."""
        self._again = True

    def replace(self, owned: Owned) -> None:
        """The fragment begins again without the offers that have been read."""
        self._takers[owned.fragment.index] = owned

    async def stop(self) -> None:
        """Read no more."""
        await end(*(reading.task for reading in self._readings))

    def _start(self, fragments: Iterable[int], read: Stored | None, group: asyncio.TaskGroup) -> None:
        reading = _Reading(frozenset(fragments), read)
        if reading.fragments:
            reading.task = group.create_task(self._read(reading))
            self._readings.append(reading)

    async def _read(self, reading: _Reading) -> None:
        tree = self.subjects.combined_tree if self.combined else self.subjects.offer_tree
        filters, complaint = [tree(index) for index in sorted(reading.fragments)], ""
        while True:
            start = reading.read.sequence + 1 if reading.read else 1
            try:
                async for message in self.transport.pull(self.subjects.offer_stream, filters, start, reading.read):
                    index, sender = subjects.fragment_of(message.subject), subjects.sender_of(message.subject)
                    if index is not None and sender is not None and index in reading.fragments:
                        await self._take(index, sender, message)
                    reading.read = message
            except RewoundError as error:
                self.log.error("offers_rewound", reason=str(error))
                reading.read = None
            except BrokerError as error:
                if self.elsewhere is None:
                    raise
                if str(error) != complaint:
                    self.log.warning("waiting_for_offers", other_region=self.elsewhere, reason=str(error))
                complaint, reading.read = str(error), None
                await asyncio.sleep(RETRY_S)

    async def _take(self, index: int, sender: str, message: Stored) -> None:
        parts = self._parts[index]
        if not subjects.is_head(message.subject):
            number, size = part_index(message.subject), self._takers[index].fragment.size
            if number is not None:
                parts.add(sender, number, message.data, codec.packed_limit(quantise.body_bytes(size, 32)))
            return
        try:
            if self.combined:
                await self._take_combined(index, sender, message.data, parts)
            else:
                await self._take_offer(index, sender, message.data, parts)
        except MessageError as error:
            self.refuse(sender, error, fragment=index)

    async def _take_offer(self, index: int, learner: str, data: bytes, parts: Parts) -> None:
        taker = self._takers[index]
        offer, _, inline = messages.unpack(data, Offer, self.run.identity)
        what = f"fragment {index}, offer {offer.number} of {learner}"
        if offer.fragment != index or offer.learner != learner:
            raise FormatError(f"{what}: it says fragment {offer.fragment}, learner {offer.learner}")
        body = await self._open(offer, inline, parts, learner, partial(taker.round.refuse, offer), what)
        if body is not None:
            self._tell(offer, learner, taker.round.hold(Own(offer, body)))

    async def _take_combined(self, index: int, syncer: str, data: bytes, parts: Parts) -> None:
        round_ = self._takers[index].round
        assert isinstance(round_, Round), "other regions' offers are read for an owner"
        offer, _, inline = messages.unpack(data, Combined, self.run.identity)
        what = f"fragment {index}, combined offer {offer.number} of {syncer}"
        if offer.fragment != index or offer.syncer != syncer:
            raise FormatError(f"{what}: it says fragment {offer.fragment}, syncer {offer.syncer}")
        body = await self._open(offer, inline, parts, syncer, partial(round_.refuse, offer), what)
        if body is not None:
            self._tell(offer, syncer, round_.hold(Held(offer, body)))

    async def _open(
        self,
        offer: Offer | Combined,
        inline: bytes,
        parts: Parts,
        sender: str,
        refuse: Callable[[], str | None],
        what: str,
    ) -> NDArray[np.uint8] | None:
        """The content of an offer that is as it should be; None if it is of no use."""
        # a learner stops when what it last heard of the others and its own make up the budget; what it heard, and when, may be
        # late, so it may have done the budget twice, and the step that it was in
        budget = self.run.now.settings.tokens
        most = 2 * budget + MAX_STEP_TOKENS
        for member in offer.members:
            if offer.bits not in self._precisions or member.tokens > most or member.steps > member.tokens:
                raise FormatError(
                    f"{what}: {offer.bits} bits, {member.steps} steps, {member.tokens} tokens; the run has "
                    f"{' or '.join(map(str, self._precisions))} bits and {budget} tokens in all"
                )
        pieces = parts.take(sender, offer.body)
        if pieces is None:
            return None  # a newer attempt is on its way: it has replaced parts of this one
        for member in offer.members:
            if await self._admitted_incarnation(member.learner, member.incarnation) < member.incarnation:
                raise FormatError(
                    f"{what}: incarnation {member.incarnation} of {member.learner} is not admitted to run {self.run.name!r}"
                )
        self.learners.update(member.learner for member in offer.members)
        reason = refuse()
        if reason is not None:
            # nobody's fault: offers cross with versions, and after a restart the stream still holds merged ones
            self._tell(offer, sender, reason)
            return None
        size = self._takers[offer.fragment].fragment.size
        raw_bytes = quantise.body_bytes(size, offer.bits)
        body = await asyncio.to_thread(open_body, offer.body, inline, pieces, raw_bytes, what)
        await asyncio.to_thread(quantise.validate, body, size, offer.bits)
        return body

    def _tell(self, offer: Offer | Combined, sender: str, reason: str | None) -> None:
        """An offer is held, or (``reason``) passed over."""
        if reason is None:
            self.held()
        else:
            values: dict[str, Any] = {"fragment": offer.fragment, "sender": sender, "number": offer.number}
            self.log.debug("offer_passed_over", **values, reason=reason)

    async def _admitted_incarnation(self, learner: str, incarnation: int) -> int:
        if self._admitted.get(learner, -1) < incarnation:
            admitted = await patiently(partial(membership.admitted, self.run, learner, self.map_digest), self.log)
            self._admitted[learner] = admitted or -1
        return self._admitted[learner]
