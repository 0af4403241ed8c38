"""Offers of the owned fragments: read from their stream, checked, and given to the fragments' rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from diloco import membership
from diloco.core import bandwidth, codec, quantise
from diloco.core.round import Held
from diloco.errors import BrokerError, FormatError, MessageError, RewoundError
from diloco.log import open_body
from diloco.membership import Run
from diloco.observe import Logger
from diloco.patience import RETRY_S, patiently
from diloco.tasks import end
from diloco.transport import Stored, Transport
from diloco.wire import messages, subjects
from diloco.wire.assemble import Parts, part_index
from diloco.wire.messages import Offer
from diloco.wire.subjects import Subjects
from diloco_syncer.owned import Owned

MAX_STEP_TOKENS = 1 << 27  # of one step of one learner, whatever its task and its devices


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
        self._precisions = bandwidth.precisions(run.settings.codec.offer_bits, run.settings)
        self._owned: dict[int, Owned] = {}
        self._parts: dict[int, Parts] = {}  # by fragment; of bodies whose heads have not come yet
        self._readings: list[_Reading] = []
        self._admitted: dict[str, int] = {}

    async def serve(self, owned: Mapping[int, Owned], group: asyncio.TaskGroup) -> None:
        """Read these fragments' offers and no others': from the stream's beginning for those that are new.

        What was held for a fragment that was let go of is not; the stream has every learner's latest.
        """
        if owned == self._owned:
            return
        await self.stop()
        kept = [index for index in owned if self._owned.get(index) is owned[index]]
        before = [reading.read for reading in self._readings if reading.fragments.intersection(kept)]
        read = None if None in before else min(filter(None, before), key=lambda stored: stored.sequence, default=None)
        self._readings = []
        self._owned = dict(owned)
        self._parts = {index: self._parts.get(index, Parts()) if index in kept else Parts() for index in owned}
        self._start(kept, read, group)
        self._start(owned.keys() - set(kept), None, group)

    def replace(self, owned: Owned) -> None:
        """The fragment begins again without the offers that have been read."""
        self._owned[owned.fragment.index] = owned

    async def stop(self) -> None:
        """Read no more."""
        await end(*(reading.task for reading in self._readings))

    def _start(self, fragments: Iterable[int], read: Stored | None, group: asyncio.TaskGroup) -> None:
        reading = _Reading(frozenset(fragments), read)
        if reading.fragments:
            reading.task = group.create_task(self._read(reading))
            self._readings.append(reading)

    async def _read(self, reading: _Reading) -> None:
        filters, complaint = [self.subjects.offer_tree(index) for index in sorted(reading.fragments)], ""
        while True:
            start = reading.read.sequence + 1 if reading.read else 1
            try:
                async for message in self.transport.pull(self.subjects.offer_stream, filters, start, reading.read):
                    index, learner = subjects.fragment_of(message.subject), subjects.learner_of(message.subject)
                    if index is not None and learner is not None and index in reading.fragments:
                        await self._take(index, learner, message)
                    reading.read = message
            except RewoundError as error:
                self.log.error("offers_rewound", reason=str(error))
                reading.read = None
            except BrokerError as error:
                if self.elsewhere is None:
                    raise
                if str(error) != complaint:
                    self.log.warning("waiting_for_offers", region=self.elsewhere, reason=str(error))
                complaint, reading.read = str(error), None
                await asyncio.sleep(RETRY_S)

    async def _take(self, index: int, learner: str, message: Stored) -> None:
        parts = self._parts[index]
        if not subjects.is_head(message.subject):
            number, size = part_index(message.subject), self._owned[index].fragment.size
            if number is not None:
                parts.add(learner, number, message.data, codec.packed_limit(quantise.body_bytes(size, 32)))
            return
        try:
            await self._take_offer(index, learner, message.data, parts)
        except MessageError as error:
            self.refuse(learner, error, fragment=index)

    async def _take_offer(self, index: int, learner: str, data: bytes, parts: Parts) -> None:
        owned = self._owned[index]
        offer, _, inline = messages.unpack(data, Offer, self.run.identity)
        what = f"fragment {index}, offer {offer.number} of {learner}"
        if offer.fragment != index or offer.learner != learner:
            raise FormatError(f"{what}: it says fragment {offer.fragment}, learner {offer.learner}")
        # a learner stops when what it last heard of the others and its own make up the budget; what it heard, and when, may be
        # late, so it may have done the budget twice, and the step that it was in
        most = 2 * self.run.settings.tokens + MAX_STEP_TOKENS
        if offer.bits not in self._precisions or offer.tokens > most or offer.steps > offer.tokens:
            raise FormatError(
                f"{what}: {offer.bits} bits, {offer.steps} steps, {offer.tokens} tokens; the run has "
                f"{' or '.join(map(str, self._precisions))} bits and {self.run.settings.tokens} tokens in all"
            )
        pieces = parts.take(learner, offer.body)
        if pieces is None:
            return  # a newer attempt is on its way: it has replaced parts of this one
        if await self._admitted_incarnation(learner, offer.incarnation) < offer.incarnation:
            raise FormatError(f"{what}: incarnation {offer.incarnation} is not admitted to run {self.run.name!r}")
        self.learners.add(learner)
        reason = owned.round.refuse(offer)
        if reason is not None:
            # nobody's fault: offers cross with versions, and after a restart the stream still holds merged ones
            self._pass_over(offer, reason)
            return
        raw_bytes = quantise.body_bytes(owned.fragment.size, offer.bits)
        body = await asyncio.to_thread(open_body, offer.body, inline, pieces, raw_bytes, what)
        await asyncio.to_thread(quantise.validate, body, owned.fragment.size, offer.bits)
        reason = owned.round.hold(Held(offer, body))
        if reason is not None:
            self._pass_over(offer, reason)
            return
        self.held()

    def _pass_over(self, offer: Offer, reason: str) -> None:
        values: dict[str, Any] = {"fragment": offer.fragment, "learner": offer.learner, "number": offer.number}
        self.log.debug("offer_passed_over", **values, reason=reason)

    async def _admitted_incarnation(self, learner: str, incarnation: int) -> int:
        if self._admitted.get(learner, -1) < incarnation:
            admitted = await patiently(partial(membership.admitted, self.run, learner, self.map_digest), self.log)
            self._admitted[learner] = admitted or -1
        return self._admitted[learner]
