"""A member's spans: an offer being made (snapshot, encode, upload), and a version being read (fetch, fold, apply)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.fragment_state import DueOffer
from diloco.core.run.tracing import Ids, Span, offer_ids, version_ids
from diloco.log.log_tracing import tell_of_read
from diloco.process.telemetry import Telemetry
from diloco.wire.entries import Record
from diloco.wire.offers import Offer

Vector = NDArray[np.float32]

MAX_READS = 4096  # versions that are folded and not applied yet: as many as fragments have


class MemberTraces:
    """The spans of one member of a run; without telemetry there are none.

    Times are the loop's, and turned into Unix time when a span is told.
    """

    def __init__(
        self, telemetry: Telemetry | None, run: bytes, name: str, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self.telemetry, self.run, self.name, self.clock, self._wall = telemetry, run, name, clock, wall
        self._reads: dict[tuple[int, int], tuple[Record, float, float]] = {}  # by fragment and version: fetched, folded

    def offer(self, fragment: int, version: int) -> OfferTrace | None:
        """Return the trace of an offer that is being made, if the way of the version is told that its round makes."""
        if self.telemetry is None:
            return None
        ids = version_ids(self.run, fragment, version)
        return OfferTrace(self, self.telemetry, ids) if self.telemetry.wants(ids) else None

    def folded(self, record: Record, came_s: float) -> None:
        """Note a version that was folded; all of it was there at ``came_s``."""
        if self.telemetry is None or not record.makes_version:
            return
        if self.telemetry.wants(version_ids(self.run, record.fragment, record.version)):
            if len(self._reads) >= MAX_READS:
                self._reads.pop(next(iter(self._reads)))
            self._reads[record.fragment, record.version] = record, came_s, self.clock()

    def applied(self, versions: Iterable[tuple[int, int]], step: int) -> None:
        """Tell of versions that were applied at the boundary after ``step`` steps. Callable from any thread.

        ``versions``: of fragments, (fragment, version) each.
        """
        if self.telemetry is None:
            return
        for version in versions:
            found = self._reads.pop(version, None)
            if found is not None:
                (record, came_s, folded_s), shift_s = found, self.shift_s()
                applied = self.clock() + shift_s, step
                tell_of_read(self.telemetry, self.run, self.name, record, came_s + shift_s, folded_s + shift_s, applied)

    def shift_s(self) -> float:
        """Return how much Unix time is ahead of the loop's clock now: one number for a trace, or its spans would overlap."""
        return self._wall() - self.clock()


class OfferTrace:
    """An offer that is being made."""

    def __init__(self, traces: MemberTraces, telemetry: Telemetry, version: Ids) -> None:
        self._traces, self._telemetry, self._version = traces, telemetry, version
        self._began_s = self._snapshot_s = self._encoded_s = traces.clock()

    def take(self, answer: DueOffer) -> DueOffer:
        """Return the same answer; its reader says when it has read. The snapshot is not kept here."""
        reader = answer.snapshot.reader
        if reader is None:
            return answer

        def read() -> Vector:
            values = reader()
            self.read()
            return values

        return replace(answer, snapshot=replace(answer.snapshot, reader=read))

    def read(self) -> None:
        """Note that the snapshot was read."""
        self._snapshot_s = self._traces.clock()

    def encoded(self) -> None:
        """Note that the offer was quantised."""
        self._encoded_s = self._traces.clock()

    def stored(self, offer: Offer) -> None:
        """Tell of the offer, which is stored."""
        traces = self._traces
        ids = offer_ids(traces.run, offer.learner, offer.incarnation, offer.fragment, offer.number)
        add, shift_s = self._telemetry.add, traces.shift_s()
        began, read, encoded, now = (
            at_s + shift_s for at_s in (self._began_s, self._snapshot_s, self._encoded_s, traces.clock())
        )
        about: dict[str, str | int | float] = {
            "diloco.member": offer.learner,
            "diloco.fragment": offer.fragment,
            "diloco.number": offer.number,
            "diloco.base_version": offer.base_version,
            "diloco.bits": offer.bits,
            "diloco.bytes": offer.body.size_bytes,
        }
        add(Span(name="offer", ids=ids, parent=None, began_s=began, ended_s=now, attributes=about, links=(self._version,)))
        add(Span("snapshot", ids.child("snapshot"), ids.span, began, read))
        add(Span("encode", ids.child("encode"), ids.span, read, encoded))
        add(Span("upload", ids.child("upload"), ids.span, encoded, now))
