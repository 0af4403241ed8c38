"""A syncer's spans: rounds, from their opening to the version in the log; regional offers; and versions that a standby read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from diloco.core.run.tracing import Ids, Span, offer_ids, regional_offer_ids, version_ids
from diloco.core.syncer.round import Merge, Round
from diloco.log.follower import FollowedEntry
from diloco.log.log_tracing import tell_of_read
from diloco.process.telemetry import Telemetry
from diloco.wire.entries import Record
from diloco.wire.offers import RegionalOffer
from diloco_syncer.context import Context


@dataclass
class RoundTrace:
    """A round that was closed and is being merged; nothing is told of it unless its version's way is."""

    context: Context
    telemetry: Telemetry
    clock: Callable[[], float]
    ids: Ids
    began_s: float  # by the clock, as are the others
    quorum_s: float
    closed_s: float
    stages: list[tuple[str, float, float]] = field(default_factory=list)

    @classmethod
    def begin(cls, context: Context, fragment: int, round_: Round, merge: Merge) -> RoundTrace | None:
        """Return the trace of a round that has closed, or None if its version's way is not told."""
        telemetry = context.telemetry
        if telemetry is None or round_.opened_at_s is None:
            return None
        ids = version_ids(context.run.identity, fragment, merge.version)
        if not telemetry.wants(ids):
            return None
        clock = asyncio.get_running_loop().time
        closed_s = clock()
        quorum_s = closed_s if round_.quorum_at_s is None else round_.quorum_at_s
        return cls(context, telemetry, clock, ids, round_.opened_at_s, quorum_s, closed_s)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the merge; in any thread."""
        began_s = self.clock()
        yield
        self.stages.append((name, began_s, self.clock()))

    def committed(self, record: Record) -> None:
        """Tell of the round, whose version is in the log."""
        now_s, add, run = self.clock(), self.telemetry.add, self.context.run.identity
        wall_s = self.context.transport.wall_s() - now_s
        about: dict[str, str | int | float] = {
            "diloco.member": record.syncer,
            "diloco.fragment": record.fragment,
            "diloco.version": record.version,
            "diloco.epoch": record.epoch,
            "diloco.members": len(record.members),
            "diloco.bits": record.bits,
            "diloco.bytes": record.body.size_bytes if record.body else 0,
        }
        links = [offer_ids(run, m.learner, m.incarnation, record.fragment, m.number) for m in record.members]
        links += [
            regional_offer_ids(run, offer.syncer, offer.incarnation, record.fragment, offer.number)
            for offer in record.regional_offers
        ]
        add(
            Span(
                name="round",
                ids=self.ids,
                parent=None,
                began_s=wall_s + self.began_s,
                ended_s=wall_s + now_s,
                attributes=about,
                links=tuple(links),
            )
        )
        waits = [("quorum", self.began_s, self.quorum_s), ("grace", self.quorum_s, self.closed_s)]
        for name, began_s, ended_s in [*waits, *self.stages]:
            add(Span(name, self.ids.child(name), self.ids.span, wall_s + began_s, wall_s + ended_s))


def stage(trace: RoundTrace | None, name: str) -> AbstractContextManager[None]:
    """Return a context in which a stage of a merge is timed, where its round is told of."""
    return nullcontext() if trace is None else trace.stage(name)


@dataclass
class RegionalTrace:
    """A regional offer that is being made, from the offers of a region that are due."""

    context: Context
    telemetry: Telemetry
    version: Ids
    clock: Callable[[], float]
    began_s: float
    combined_s: float = 0.0

    @classmethod
    def begin(cls, context: Context, fragment: int, version: int) -> RegionalTrace | None:
        """Return the trace of an offer to the round that makes a version, or None if that version's way is not told."""
        telemetry, ids = context.telemetry, version_ids(context.run.identity, fragment, version)
        if telemetry is None or not telemetry.wants(ids):
            return None
        clock = asyncio.get_running_loop().time
        return cls(context, telemetry, ids, clock, clock())

    def combined(self) -> None:
        """Note that the offers were merged, and the sum packed."""
        self.combined_s = self.clock()

    def stored(self, offer: RegionalOffer) -> None:
        """Tell of the offer, which is stored."""
        now_s, add, run = self.clock(), self.telemetry.add, self.context.run.identity
        wall_s = self.context.transport.wall_s() - now_s
        ids = regional_offer_ids(run, offer.syncer, offer.incarnation, offer.fragment, offer.number)
        about: dict[str, str | int | float] = {
            "diloco.member": offer.syncer,
            "diloco.fragment": offer.fragment,
            "diloco.number": offer.number,
            "diloco.members": len(offer.members),
            "diloco.bits": offer.bits,
            "diloco.bytes": offer.body.size_bytes,
        }
        links = [offer_ids(run, m.learner, m.incarnation, offer.fragment, m.number) for m in offer.members]
        began, combined, now = wall_s + self.began_s, wall_s + self.combined_s, wall_s + now_s
        add(
            Span(
                name="regional offer",
                ids=ids,
                parent=None,
                began_s=began,
                ended_s=now,
                attributes=about,
                links=(self.version, *links),
            )
        )
        add(Span("merge", ids.child("merge"), ids.span, began, combined))
        add(Span("upload", ids.child("upload"), ids.span, combined, now))


def tell_of_copy(context: Context, folded: FollowedEntry) -> None:
    """Tell of a version that a syncer read which does not own its fragment, if its way is told."""
    telemetry, record, run = context.telemetry, folded.entry.record, context.run.identity
    if telemetry is None or not record.makes_version:
        return
    if telemetry.wants(version_ids(run, record.fragment, record.version)):
        now_s, wall_s = asyncio.get_running_loop().time(), context.transport.wall_s()
        tell_of_read(telemetry, run, context.settings.name, record, folded.came_s + wall_s - now_s, wall_s)
