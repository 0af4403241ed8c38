"""Members' counts of others: refused messages and offers, late offers, dropped heartbeats, and waits in vain.

Pure but for :func:`listen`: no clock, no file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from diloco.control.hearing import decoding
from diloco.transport import Heard
from diloco.wire.control import SenderReport
from diloco.wire.fields import MAX_SYNCERS

if TYPE_CHECKING:
    from diloco_coordinator.service import Coordinator

MAX_ROWS = 100  # that are shown: the most frequent ones
ALERT_S = 600.0  # after the last refusal, or wait in vain, of a sender
ALERTING = ("message", "offer", "in_vain")  # late offers are usual

_Key = tuple[str, str, str]  # sender, what is counted of it, reason


class MemberReports:
    """The newest report of each member, and when the count of each sender last grew."""

    def __init__(self) -> None:
        self._newest: dict[str, SenderReport] = {}
        self._grew_s: dict[str, float] = {}  # by sender, of what is in ALERTING

    def note(self, report: SenderReport, now_s: float) -> None:
        """Take in a member's report; a count that is smaller than before is of a new process."""
        if report.member not in self._newest and len(self._newest) >= MAX_SYNCERS:
            return
        known = self._newest.get(report.member)
        before: dict[_Key, int] = {entry[:3]: entry[3] for entry in known.entries} if known is not None else {}
        for sender, what, reason, count in report.entries:
            if what in ALERTING and count != before.get((sender, what, reason), 0):
                self._grew_s[sender] = now_s
        self._newest[report.member] = report
        self._grew_s = {sender: at_s for sender, at_s in self._grew_s.items() if now_s - at_s < ALERT_S}

    def troubling(self, now_s: float) -> Iterator[str]:
        """Yield the senders of which messages were refused, or that were waited for in vain, a short time ago."""
        yield from (sender for sender, at_s in sorted(self._grew_s.items()) if now_s - at_s < ALERT_S)

    def dump(self) -> list[dict[str, Any]]:
        """Return a row for each sender, what is counted of it, and the reason, with the members that count; for JSON."""
        counts, members = defaultdict[_Key, int](int), defaultdict[_Key, list[str]](list)
        for member, report in sorted(self._newest.items()):
            for sender, what, reason, count in report.entries:
                counts[sender, what, reason] += count
                members[sender, what, reason].append(member)
        most = sorted(counts, key=lambda key: (-counts[key], key))[:MAX_ROWS]
        return [
            {"sender": sender, "what": what, "reason": reason, "count": counts[sender, what, reason], "by": by}
            for sender, what, reason in sorted(most)
            for by in (members[sender, what, reason],)
        ]


async def listen(coordinator: Coordinator) -> None:
    """Have a coordinator hear what members have counted."""

    async def noted(report: SenderReport, _: Heard) -> None:
        if coordinator.monitor is not None:
            coordinator.monitor.reports.note(report, coordinator.now_s())

    heard = decoding(SenderReport, coordinator.run.identity, noted, coordinator.refused)
    await coordinator.transport.subscribe(coordinator.subjects.sender_report(), heard, optional=True)
