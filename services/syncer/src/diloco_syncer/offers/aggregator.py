"""Combine the offers of a region's learners, of fragments that are owned elsewhere: one offer crosses instead of each of them.

:mod:`diloco.core.log.regional_round` decides when and which; this hears rounds and learners, and stores the regional offers in
the region's own stream, where the owner reads them.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from diloco.core.log.chain import Chain
from diloco.core.log.regional_round import HeldOffer, RegionalRound, bits_of
from diloco.core.syncer.roster import Roster
from diloco.core.tensors import codec
from diloco.core.tensors.fragments import Fragment
from diloco.errors import UnmergeableError
from diloco.log.offers import append_offer
from diloco.process.retry import Complaint
from diloco.wire.body import ATTEMPT_BYTES, describe_body
from diloco.wire.control import Announcement, Heartbeat
from diloco.wire.entries import Record
from diloco.wire.offers import Answer, RegionalOffer
from diloco_syncer.context import Context, clock_s, wait
from diloco_syncer.offers.judging import UNKNOWN_THETA, OfferJudge
from diloco_syncer.offers.quarantine import OutlierRecord
from diloco_syncer.syncer_tracing import RegionalTrace

LOOK_S = 0.25  # at all fragments, if nothing is heard: a round's announcement comes as often
STORE_TIMEOUT_S = 5.0  # for the own region's server to acknowledge an offer


def _unknown() -> float:
    return math.inf


@dataclass(eq=False)
class Aggregated:
    """A fragment whose offers are combined here."""

    fragment: Fragment
    round: RegionalRound
    judge: OfferJudge
    busy: bool = False


class RegionalAggregator:
    """One syncer's. :meth:`serve` says which fragments' offers are combined, and :meth:`work` combines them."""

    def __init__(self, context: Context, incarnation: int, outliers: OutlierRecord) -> None:
        """``incarnation``: of the syncer's process."""
        self.context, self.run, self.log, self.outliers = context, context.run, context.log, outliers
        self.syncer, self.incarnation = context.settings.name, incarnation
        self.roster = Roster(context.run.in_force, context.roster.bounds, context.roster.grants)
        self.fragments: dict[int, Aggregated] = {}
        self.news = asyncio.Event()
        self._chains: dict[int, Chain] = {}  # of all fragments that are followed, as of their newest entry
        self._usual: dict[int, float] = {}  # norms of their merges
        self._own_norms: dict[int, Callable[[], float]] = {}  # of their newest versions
        self._numbers: Counter[int] = Counter()  # by fragment: of the newest regional offer

    def change(self, excluded: frozenset[str], on_trial: frozenset[str]) -> None:
        """Go by the settings in force, and without these learners; those ``on_trial`` are judged all the same."""
        self.roster.change(self.run.in_force, excluded, on_trial)
        for aggregated in self.fragments.values():
            aggregated.round.changed()
        self.news.set()

    def serve(self, fragments: Collection[int]) -> None:
        """Combine the offers of these fragments, and of no others."""
        self.fragments = {index: self.fragments.get(index) or self._begin(index) for index in fragments}

    def _begin(self, index: int) -> Aggregated:
        fragment = self.context.map.fragments[index]
        judge = OfferJudge(self.context, fragment, lambda: self._own_norms.get(index, _unknown)())
        aggregated = Aggregated(fragment, RegionalRound(self.roster, fragment), judge)
        if index in self._chains:
            self._follow(aggregated, self._chains[index], None)
        return aggregated

    def hear_learner(self, heartbeat: Heartbeat) -> None:
        """Take in a learner's heartbeat; those of other regions are ignored."""
        if heartbeat.region == self.context.region and self.roster.hear(heartbeat, clock_s()):
            self.news.set()

    def hear_round(self, announced: Announcement) -> None:
        """Take in that a round is open; that it is one of the last is believed where a log shows the run near its end."""
        aggregated = self.fragments.get(announced.fragment)
        if aggregated is not None:
            near = announced.closing and any(chain.closed or self.roster.in_reach(chain) for chain in self._chains.values())
            aggregated.round.hear(structs.replace(announced, closing=near), clock_s())
            self.news.set()

    def follow(self, chain: Chain, record: Record | None, usual: float, own_norm: Callable[[], float]) -> None:
        """Take in that a fragment's log has the entry ``record``, or (None) was loaded; no thread may be folding ``chain``.

        ``usual``: the norm that a merge of it usually has (:func:`diloco.core.syncer.excess.usual`); 0: not known.
        ``own_norm`` returns the norm of its newest version, as far as that is folded.
        """
        self._chains[chain.fragment] = known = replace(chain, cursors=dict(chain.cursors))
        self._usual[chain.fragment], self._own_norms[chain.fragment] = usual, own_norm
        aggregated = self.fragments.get(chain.fragment)
        if aggregated is not None:
            self._follow(aggregated, known, record)
            self.news.set()

    def _follow(self, aggregated: Aggregated, chain: Chain, record: Record | None) -> None:
        aggregated.round.usual = self._usual[chain.fragment]
        aggregated.round.follow(chain, record, (self.syncer, self.incarnation))

    async def work(self) -> None:
        """Combine offers when they are due, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self.news.clear()
                wait_s = LOOK_S
                for aggregated in self.fragments.values():
                    held = () if aggregated.busy else aggregated.round.poll(clock_s())
                    self.context.tell_in_vain(aggregated.fragment.index, aggregated.round.waits)
                    if held:
                        aggregated.busy = True
                        group.create_task(self._combine(aggregated, held))
                    remaining_s = aggregated.round.remaining_s(clock_s())
                    if remaining_s is not None and not aggregated.busy:
                        wait_s = min(wait_s, remaining_s)
                await wait(self.news, max(wait_s, 0.001))

    async def _combine(self, aggregated: Aggregated, held: Sequence[HeldOffer]) -> None:
        index, round_ = aggregated.fragment.index, aggregated.round
        trace = RegionalTrace.begin(self.context, index, round_.round)
        try:
            await self._judge(aggregated, held)
            raw, rest = await asyncio.to_thread(round_.combine, held, round_.residual)
            packed = await asyncio.to_thread(codec.pack, raw, self.run.created.codec.zstd_level)
        except UnmergeableError as error:
            values = {"fragment": index, "version": round_.round, "learners": list(error.learners)}
            self.log.error(error.event, **values, reason=str(error))
            offers = {own.offer.learner: own.offer for own in held}
            for learner in error.learners:
                self.context.refuse_offer(learner, index, offers.get(learner), error)
            round_.without(error.learners)
        else:
            self._numbers[index] += 1
            round_.send(self._numbers[index], rest)
            attempt = self.context.transport.random_bytes(ATTEMPT_BYTES)
            if trace is not None:
                trace.combined()
            body, inline, parts = describe_body(packed, codec.content_hash(raw), attempt)
            members = [Answer.of(own.offer) for own in held]
            offer = RegionalOffer(
                fragment=index,
                syncer=self.syncer,
                incarnation=self.incarnation,
                number=self._numbers[index],
                bits=bits_of(held),
                members=members,
                body=body,
            )
            if await self._store(aggregated, offer, inline, parts):
                if trace is not None:
                    trace.stored(offer)
                self.log.debug("regional_offer_stored", fragment=index, version=round_.round, members=len(held))
        finally:
            aggregated.busy = False
            self.news.set()

    async def _judge(self, aggregated: Aggregated, held: Sequence[HeldOffer]) -> None:
        """Judge the region's offers of a fragment by each other.

        Raises:
            UnmergeableError: some are outliers. None is cut here, where Theta is not at hand.
        """
        round_ = aggregated.round
        live = {seen.heartbeat.learner for seen in self.roster.live(clock_s())}
        if round_.chain is None:
            return  # nothing is due then
        judged = await aggregated.judge.judge(round_.chain, held, round_.on_trial.values(), live)
        self.outliers.note(aggregated.fragment.index, round_.round, judged)
        left_out = await aggregated.judge.left_out(round_.round, held, judged, UNKNOWN_THETA)
        if left_out is not None:
            raise left_out

    async def _store(self, aggregated: Aggregated, offer: RegionalOffer, inline: bytes, parts: Sequence[bytes]) -> bool:
        """Store a regional offer, however often it has to be tried. Return False if it is no longer wanted here."""
        complaint = Complaint(self.log)
        sequence = await append_offer(
            self.context.transport,
            self.context.store.subjects,
            self.run.identity,
            offer,
            inline,
            parts,
            timeout_s=STORE_TIMEOUT_S,
            failed=lambda error: complaint.warn("regional_offer_not_stored", fragment=offer.fragment, reason=str(error)),
            wanted=lambda: self.fragments.get(offer.fragment) is aggregated,
        )
        return sequence is not None
