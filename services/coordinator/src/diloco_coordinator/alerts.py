"""Conditions of a run that need an operator's attention, and what happened in it.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diloco_coordinator.monitor import Monitor
from diloco_report.facts import natural
from diloco_report.units import lasting, size

MAX_EVENTS = 200  # the oldest are forgotten
MAX_TEXT = 200  # characters of an event
STALLED_S = 30.0  # without a version of a fragment, at least: a takeover and a round take less
STALLED_INTERVALS = 10  # and so many times as long as a version of it usually takes
UNMERGED_ROUNDS = 5  # versions of each fragment without a learner that steps
SILENT = ": not heard"  # a learner
NO_PROCESS = ": no process is heard"  # of a region
NEARLY_FULL = 0.9  # of a stream's bound


class Alerts:
    """Conditions that hold, each with the time since which it does, and events: each condition's beginning and end too."""

    def __init__(self) -> None:
        self.holding: dict[str, float] = {}  # by text: since when
        self.events: list[tuple[float, str]] = []
        self._incarnations: dict[str, int] = {}  # by learner: of the process that was heard last

    def note(self, monitor: Monitor, now_s: float) -> None:
        """Look at the run as of now."""
        found = set(conditions(monitor, now_s))
        for text in sorted(found - self.holding.keys()):
            self.holding[text] = now_s
            self.tell(text, now_s)
        for text in sorted(self.holding.keys() - found):
            since_s = self.holding.pop(text)
            self.tell(_ended(text, now_s - since_s), now_s)
        for name, learner in sorted(monitor.learners.items(), key=lambda item: natural(item[0])):
            incarnation = learner.heartbeat.incarnation
            if self._incarnations.setdefault(name, incarnation) != incarnation:
                self._incarnations[name] = incarnation
                self.tell(f"{name}: was restarted; its new process is heard", now_s)

    def tell(self, text: str, now_s: float) -> None:
        """Note an event."""
        self.events.append((round(now_s, 1), text[:MAX_TEXT]))
        del self.events[:-MAX_EVENTS]

    def dump(self, now_s: float) -> dict[str, Any]:
        """Return the report's ``alerts`` and ``events``."""
        holding = sorted(self.holding.items(), key=lambda item: -item[1])
        return {
            "alerts": [{"text": text, "since_s": round(now_s - since_s)} for text, since_s in holding],
            "events": [{"at_s": at_s, "text": text} for at_s, text in self.events],
        }

    def resume(self, now: Mapping[str, Any], now_s: float) -> None:
        """Continue what an earlier process dumped.

        Raises:
            KeyError, TypeError, ValueError: it is damaged; nothing has changed.
        """
        events = [(float(event["at_s"]), str(event["text"])[:MAX_TEXT]) for event in now["events"][-MAX_EVENTS:]]
        holding = {str(alert["text"])[:MAX_TEXT]: now_s - float(alert["since_s"]) for alert in now["alerts"]}
        self.events, self.holding = events, holding


def _ended(text: str, lasted_s: float) -> str:
    """Return the event of a condition's end: of silence, that a process is heard again."""
    for silence in (SILENT, NO_PROCESS):
        if text.endswith(silence):
            return f"{text.removesuffix(silence)}: heard again, after {lasting(lasted_s)}"
    return f"over after {lasting(lasted_s)}: {text}"


def conditions(monitor: Monitor, now_s: float) -> Iterator[str]:
    """Yield what is wrong with a run now, each in words that stay the same while it lasts."""
    yield from _of_learners(monitor, now_s)
    for sender in monitor.reports.troubling(now_s):
        yield f"{sender}: syncers refuse its messages, or wait for it in vain: see its refusals"
    for name, failure in sorted(monitor.failures.items()):
        yield f"{name}: {failure}"
    for region in sorted(monitor.presence.away()):
        yield f"region {region}{NO_PROCESS}"
    for room in monitor.rooms:
        if room.size_bytes >= NEARLY_FULL * room.max_bytes:
            yield f"{room.name}: nearly full; versions wait once it reaches its limit of {size(room.max_bytes)}"
    if monitor.state not in ("training", "closing"):
        return
    if monitor.slow_fragments.found is not None:
        yield monitor.slow_fragments.found
    unowned = monitor.unowned(now_s)
    for fragment in sorted(_stalled(monitor, now_s)):
        reason = "no syncer serves it yet" if fragment in unowned else f"{monitor.owners[fragment]} makes no version"
        yield f"fragment {fragment}: stalled, {reason}"


def _of_learners(monitor: Monitor, now_s: float) -> Iterator[str]:
    versions, fragments = sum(monitor.versions), len(monitor.versions)
    for name, learner in sorted(monitor.learners.items(), key=lambda item: natural(item[0])):
        heartbeat = learner.heartbeat
        if heartbeat.state in ("finished", "left"):
            continue
        if name in monitor.now.excluded:
            yield f"{name}: {'ejected' if name in monitor.now.ejected else _quarantined(monitor, name)}"
            continue
        if name in monitor.now.outlying.suspected:
            yield (
                f"{name}: its outer gradients are outliers in most fragments; a syncer of an earlier version merges them: "
                "eject the learner, or update the syncer"
            )
        if now_s - learner.seen_s > monitor.gone_s:
            yield f"{name}{SILENT}"
            continue
        if name not in monitor.merged and heartbeat.step and versions - learner.began_at > UNMERGED_ROUNDS * fragments:
            yield f"{name}: takes steps, but none of its work is merged"
        if learner.spike:
            yield f"{name}: its loss has risen far above its earlier values"


def _quarantined(monitor: Monitor, name: str) -> str:
    """Return why a learner is quarantined: in words that stay the same, and with who says so."""
    outlier = monitor.now.outlying.quarantined.get(name)
    by = "" if outlier is None or name in monitor.now.quarantined else f", as {', '.join(outlier.syncers)} found"
    return f"quarantined, its outer gradients were outliers{by}"


def _stalled(monitor: Monitor, now_s: float) -> Iterator[int]:
    made = sum(monitor.versions)
    usual_s = now_s * len(monitor.versions) / made if made else 0.0
    for fragment, (at_s, _) in monitor.last_merges.items():
        if fragment not in monitor.closed and now_s - at_s > max(STALLED_S, STALLED_INTERVALS * usual_s):
            yield fragment
