"""A member's counts of others, for coordinators: they show them, and nothing goes by them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from diloco.control.creation import KnownRun
from diloco.control.hearing import name_in
from diloco.transport import Transport
from diloco.wire import framing
from diloco.wire.control import MAX_REASON, MAX_REPORTED, MAX_SENDER, Reported, SenderReport
from diloco.wire.subjects import Subjects

REPORT_EVERY_S = 5.0  # people look at a page, and a report is small

ReportEntry = tuple[str, Reported, str, int]  # sender, what is counted, reason, how often


def entries(what: Reported, counts: Mapping[tuple[str, str], int]) -> list[ReportEntry]:
    """Return the entries of a report for counts by sender and reason. A sender may be known by its subject."""
    return [
        (_fitting(name_in(sender), MAX_SENDER), what, _fitting(reason, MAX_REASON), count)
        for (sender, reason), count in counts.items()
    ]


class SenderReporter:
    """Sends the reports of one member, as long as :meth:`work` runs; ``read`` returns all that it has counted."""

    def __init__(self, transport: Transport, run: KnownRun, member: str, read: Callable[[], Iterable[ReportEntry]]) -> None:
        self._transport, self._run, self._member, self._read = transport, run, member, read

    async def work(self) -> None:
        """Send a report every few seconds, once there is something to report, until cancelled."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            report = self.report()
            if report.entries and self._transport.connected:
                subject = Subjects(self._run.name).sender_report(self._member)
                await self._transport.publish(subject, framing.pack(report, self._run.identity), optional=True)

    def report(self) -> SenderReport:
        """Return the report as of now, with the most frequent entries."""
        found = sorted(self._read(), key=lambda entry: -entry[-1])
        return SenderReport(self._member, found[:MAX_REPORTED])


def _fitting(text: str, characters: int) -> str:
    return text[:characters].encode(errors="replace").decode()
