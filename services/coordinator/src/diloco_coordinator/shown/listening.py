"""The ears of a coordinator for all that is only shown, and its own part in that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.control.hearing import hear
from diloco.control.sender_reports import SenderReporter, entries
from diloco.transport import Heard
from diloco.wire.control import Sample
from diloco_coordinator.shown import gauges, sender_reports

if TYPE_CHECKING:
    from diloco_coordinator.service import Coordinator


async def listen_to_members(coordinator: Coordinator) -> None:
    """Have a coordinator hear learners' figures, evaluators' samples, and what members have counted of others."""

    async def drawn(sample: Sample, _: Heard) -> None:
        if coordinator.monitor is not None:
            coordinator.monitor.hear_sample(sample, coordinator.now_s())

    transport, subjects = coordinator.transport, coordinator.subjects
    await hear(transport, subjects.sample(), Sample, coordinator.run.identity, drawn, coordinator.refused)
    await gauges.listen(coordinator)
    await sender_reports.listen(coordinator)


async def report_refusals(coordinator: Coordinator) -> None:
    """Tell what this coordinator has refused, as syncers do, until cancelled; it hears that itself."""
    name = coordinator.settings.name
    reporter = SenderReporter(
        coordinator.transport, coordinator.run, name, lambda: entries("message", coordinator.refused.counts())
    )
    await reporter.work()
