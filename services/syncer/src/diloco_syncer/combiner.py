"""Combines the offers of its region's learners, of fragments that are owned elsewhere: one crosses instead of each of them.

What is combined when is :mod:`diloco.core.combining`'s; this hears rounds and learners, and stores what comes of it in the
region's own stream, where the owner reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from diloco.core import codec
from diloco.core.chain import Chain
from diloco.core.combining import Combining, Own, bits_of
from diloco.core.fragments import Fragment, FragmentMap
from diloco.core.round import Roster
from diloco.errors import AppendUncertainError, NonFiniteError, StorageFullError
from diloco.membership import Run
from diloco.observe import Logger
from diloco.transport import Transport
from diloco.wire import messages, subjects
from diloco.wire.messages import Announcement, Answer, Combined, Pulse, Record
from diloco.wire.subjects import Subjects

LOOK_S = 0.25
STORE_TIMEOUT_S = 5.0
RETRY_S = 1.0


@dataclass(eq=False)
class Gathered:
    """A fragment whose offers are combined here."""

    fragment: Fragment
    round: Combining
    busy: bool = False


class Combiner:
    """Of one syncer. :meth:`serve` says which fragments, and :meth:`work` combines what comes of them."""

    def __init__(
        self, transport: Transport, run: Run, fragment_map: FragmentMap, syncer: str, incarnation: int, region: str, log: Logger
    ) -> None:
        """``transport``: to the region's own server."""
        self.transport, self.run, self.map, self.log = transport, run, fragment_map, log
        self.syncer, self.incarnation, self.region = syncer, incarnation, region
        self.subjects = Subjects(run.name)
        self.roster = Roster(run.now.settings)
        self.gathered: dict[int, Gathered] = {}
        self.news = asyncio.Event()
        self._chains: dict[int, Chain] = {}  # of all fragments that are followed, as of their newest entry
        self._numbers: Counter[int] = Counter()  # by fragment: of the newest combined offer

    def change(self, barred: frozenset[str]) -> None:
        """Go by what is in force now, and without these learners."""
        self.roster.change(self.run.now.settings, barred)
        for gathered in self.gathered.values():
            gathered.round.changed()
        self.news.set()

    def serve(self, fragments: Collection[int]) -> None:
        """Combine the offers of these fragments, and of no others."""
        self.gathered = {index: self.gathered.get(index) or self._begin(index) for index in fragments}

    def _begin(self, index: int) -> Gathered:
        fragment = self.map.fragments[index]
        gathered = Gathered(fragment, Combining(self.roster, fragment))
        if index in self._chains:
            self._follow(gathered, self._chains[index], None)
        return gathered

    def hear_learner(self, pulse: Pulse) -> None:
        """A learner, of whatever region, is alive."""
        if pulse.region == self.region and self.roster.hear(pulse, asyncio.get_running_loop().time()):
            self.news.set()

    def hear_round(self, announced: Announcement) -> None:
        """A round is open."""
        gathered = self.gathered.get(announced.fragment)
        if gathered is not None:
            gathered.round.hear(announced, asyncio.get_running_loop().time())
            self.news.set()

    def follow(self, chain: Chain, record: Record | None) -> None:
        """The log of a fragment, as it is known here, has a new entry or (None) was loaded; nobody may be folding it."""
        self._chains[chain.fragment] = known = replace(chain, cursors=dict(chain.cursors))
        gathered = self.gathered.get(chain.fragment)
        if gathered is not None:
            self._follow(gathered, known, record)
            self.news.set()

    def _follow(self, gathered: Gathered, chain: Chain, record: Record | None) -> None:
        gathered.round.follow(chain, record, (self.syncer, self.incarnation))

    async def work(self) -> None:
        """Combine what is to be combined, until cancelled."""
        clock = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            while True:
                self.news.clear()
                wait_s = LOOK_S
                for gathered in self.gathered.values():
                    held = () if gathered.busy else gathered.round.poll(clock())
                    if held:
                        gathered.busy = True
                        group.create_task(self._combine(gathered, held))
                    remaining_s = gathered.round.remaining_s(clock())
                    if remaining_s is not None and not gathered.busy:
                        wait_s = min(wait_s, remaining_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(wait_s, 0.001)):
                        await self.news.wait()

    async def _combine(self, gathered: Gathered, held: Sequence[Own]) -> None:
        index, round_ = gathered.fragment.index, gathered.round
        try:
            raw, rest = await asyncio.to_thread(round_.combine, held, round_.residual)
            packed = await asyncio.to_thread(codec.pack, raw, self.run.settings.codec.zstd_level)
        except NonFiniteError as error:
            # offers are checked one by one; what they add up to overflowed: begin again without them
            self.log.error("combined_not_finite", fragment=index, version=round_.round, reason=str(error))
            round_.drop(held)
        else:
            self._numbers[index] += 1
            round_.send(self._numbers[index], rest)
            attempt = self.transport.random_bytes(messages.ATTEMPT_BYTES)
            body, inline, parts = messages.describe_body(packed, codec.content_hash(raw), attempt)
            members = [Answer.of(own.offer) for own in held]
            combined = Combined(index, self.syncer, self.incarnation, self._numbers[index], bits_of(held), members, body)
            if await self._store(gathered, combined, inline, parts):
                self.log.debug("offers_combined", fragment=index, version=round_.round, members=len(held))
        finally:
            gathered.busy = False
            self.news.set()

    async def _store(self, gathered: Gathered, combined: Combined, inline: bytes, parts: Sequence[bytes]) -> bool:
        """Store a combined offer, however often it has to be tried; False: it is no longer wanted here."""
        head, complained = self.subjects.combined(combined.fragment, self.syncer), False
        frame = messages.pack(combined, self.run.identity, inline)
        while self.gathered.get(combined.fragment) is gathered:
            try:
                await self.transport.append(
                    head,
                    frame,
                    parts=parts,
                    part_subject=lambda part: subjects.offer_part(head, part),
                    message_id=f"combined/{self.syncer}/{self.incarnation}/{combined.fragment}/{combined.number}",
                    fence=None,
                    timeout_s=STORE_TIMEOUT_S,
                )
                return True
            except (AppendUncertainError, StorageFullError) as error:
                if not complained:
                    self.log.warning("combined_not_stored", fragment=combined.fragment, reason=str(error))
                complained = True
                await asyncio.sleep(RETRY_S)
        return False
