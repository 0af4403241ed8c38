"""The run, the connections and the counts that all parts of one syncer share."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from diloco.control.creation import KnownRun
from diloco.core.learner.refusals import Refusal, reason_of
from diloco.core.syncer.roster import Roster
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import MessageError
from diloco.log.log import Log
from diloco.process.observe import Counted, Logger
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
        """Report a refused offer to its learner."""
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
