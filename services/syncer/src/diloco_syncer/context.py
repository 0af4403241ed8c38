"""The run, the connections and the counts that all parts of one syncer share."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from diloco.control.creation import KnownRun
from diloco.control.sender_reports import ReportEntry, entries
from diloco.core.learner.refusals import Refusal, reason_of
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round_waits import RoundWaits
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import MessageError
from diloco.log.log import Log
from diloco.process.observe import Counted, Logger
from diloco.process.sender_counts import SenderCounts
from diloco.process.telemetry import Telemetry
from diloco.service.metrics import Histogram
from diloco.settings.service import SyncerSettings
from diloco.transport import Transport
from diloco.wire.offers import Answer, Offer
from diloco.wire.refusals import RefusalReason
from diloco_syncer.offers.refusing import RefusalReporter
from diloco_syncer.regions import Regions


@dataclass
class Counts:
    """The counts of a syncer's rounds, for its heartbeat and metrics."""

    rounds: int = 0  # opened
    versions: int = 0  # committed
    merged_members: int = 0  # of these versions
    quorum_times: Histogram = field(default_factory=Histogram)  # of these versions
    round_times: Histogram = field(default_factory=Histogram)
    unstored: set[int] = field(default_factory=set)  # fragments whose next entry waits because storage is full
    archive_full: bool = False
    in_vain: Counter[str] = field(default_factory=Counter)  # by learner: rounds that waited for it in vain
    refused_offers: SenderCounts = field(default_factory=SenderCounts)  # by sender and reason
    missed_offers: SenderCounts = field(default_factory=SenderCounts)  # by sender and reason: those that came too late


@dataclass(frozen=True)
class Context:
    """One syncer's run, and its ways to the others. ``store`` is the log of the syncer's own region."""

    transport: Transport
    run: KnownRun
    map: FragmentMap
    settings: SyncerSettings
    log: Logger
    store: Log
    regions: Regions | None  # None: a run without regions
    roster: Roster
    refused: Counted
    refusals: RefusalReporter
    counts: Counts = field(default_factory=Counts)
    telemetry: Telemetry | None = None  # None: nothing is told of rounds

    @property
    def region(self) -> str:
        """The syncer's own region; empty in a run without regions."""
        return self.settings.region or ""

    def counted(self, dropped: SenderCounts) -> list[ReportEntry]:
        """Return all that this syncer has counted of others; ``dropped``: heartbeats, by sender."""
        offers, in_vain = self.counts.refused_offers.counts(), self.counts.in_vain.items()
        # a refused offer is counted among the messages, too, by the error
        learners = {learner for learner, _ in offers}
        messages = {pair: count for pair, count in self.refused.counts().items() if pair[0] not in learners}
        return [
            *entries("message", messages),
            *entries("offer", offers),
            *entries("missed", self.counts.missed_offers.counts()),
            *entries("heartbeat", dropped.counts()),
            *entries("in_vain", {(learner, "no_answer"): count for learner, count in in_vain}),
        ]

    def tell_in_vain(self, fragment: int, waits: RoundWaits) -> None:
        """Count and log the learners that a fragment's round has given up since this was last called."""
        for gone in waits.take_news():
            self.counts.in_vain[gone.learner] += 1
            self.log.warning(
                "waited_in_vain",
                learner=gone.learner,
                fragment=fragment,
                waited_s=round(gone.waited_s, 3),
                patience_s=round(gone.left_s, 3),
                reason="it does not answer, or takes no step, while others wait: rounds go on without it, and wait for it less "
                "until it has answered many; look at its log, its step time and its link, or eject it: diloco eject DIR NAME",
            )

    def refuse(self, sender: str, error: MessageError, **values: Any) -> None:
        """Count a message that does not fit; log the first of each sender and kind of error."""
        self.refused.note(sender, type(error).__name__, reason=str(error), **values)

    def refuse_offer(self, learner: str, fragment: int, offer: Offer | Answer | None, error: MessageError) -> None:
        """Refuse a learner's offer (None: it could not be read), and report that to the learner."""
        self.refuse(learner, error, fragment=fragment)
        self.report_refusal(learner, fragment, offer, reason_of(error), str(error))

    def report_refusal(
        self, learner: str, fragment: int, offer: Offer | Answer | None, reason: RefusalReason, text: str
    ) -> None:
        """Count a refused offer, and report it to its learner."""
        self.counts.refused_offers.add(learner, reason)
        incarnation, number = (0, 0) if offer is None else (offer.incarnation, offer.number)
        self.refusals.note(
            Refusal(learner=learner, incarnation=incarnation, fragment=fragment, number=number, reason=reason, text=text)
        )


def clock_s() -> float:
    """Return the event loop's time: it never goes back, and is virtual in the simulation."""
    return asyncio.get_running_loop().time()


async def wait(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until ``event`` is set, but no longer than ``timeout_s``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
