"""The coordinator's metrics: those of the run while it leads, and whether it leads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.service.metrics import SILENT_S, Labelled, Metric, Values, by_kind, families, one_of
from diloco_coordinator.monitor import Monitor

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from diloco_coordinator.page.page_server import PageServer
    from diloco_coordinator.service import Coordinator

STATES = ("waiting", "training", "closing", "finished")


@dataclass(frozen=True)
class CoordinatorMoment:
    """A coordinator and the time; without a monitor it stands by, or the run has no fragment map yet."""

    coordinator: Coordinator
    monitor: Monitor | None
    now_s: float
    page: PageServer | None


class ObservedCoordinator:
    """A coordinator, as the exporter observes it."""

    quiet_s = SILENT_S

    def __init__(self, coordinator: Coordinator, labels: Mapping[str, str]) -> None:
        self.coordinator, self.labels, self.refused = coordinator, labels, coordinator.refused
        self.page: PageServer | None = None

    def waits_for(self) -> str | None:
        return None if self.coordinator.leads or self.coordinator.follows else "word of who leads"

    def beat_s(self) -> float | None:
        return self.coordinator.ticked_s

    def families(self) -> Iterator[Family]:
        coordinator = self.coordinator
        return families(
            METRICS, CoordinatorMoment(coordinator, coordinator.monitor, coordinator.now_s(), self.page), self.labels
        )


def _run(value: Callable[[Monitor, float], Values]) -> Callable[[CoordinatorMoment], Values]:
    """Read a value of the run, which the leader alone has."""
    return lambda moment: None if moment.monitor is None else value(moment.monitor, moment.now_s)


def _page(value: Callable[[PageServer], Values]) -> Callable[[CoordinatorMoment], Values]:
    """Read a value of the page, where one is served."""
    return lambda moment: None if moment.page is None else value(moment.page)


def _away(monitor: Monitor, now_s: float) -> Labelled:
    away = monitor.presence.away()
    return {(name,): float(name in away) for name in monitor.presence.regions}


def _outlying(monitor: Monitor, now_s: float) -> Labelled:
    outlying = monitor.now.outlying
    return {(name,): 1.0 for name in sorted({*outlying.quarantined, *outlying.suspected, *monitor.now.quarantined})}


METRICS: tuple[Metric[CoordinatorMoment], ...] = (
    Metric(
        "diloco_coordinator_leader",
        "gauge",
        "1 for the leading coordinator, 0 for one that stands by",
        lambda moment: moment.coordinator.leads,
    ),
    Metric(
        "diloco_coordinator_run_state",
        "gauge",
        "1 for the current state of the run",
        _run(lambda monitor, now_s: one_of(monitor.state, STATES)),
        ("state",),
    ),
    Metric(
        "diloco_coordinator_run_seconds", "gauge", "Time for which the run has been watched", _run(lambda monitor, now_s: now_s)
    ),
    Metric(
        "diloco_coordinator_live_learners",
        "gauge",
        "Learners that take part, with a heartbeat within `liveness.dead_s`",
        _run(lambda monitor, now_s: len(monitor.live(now_s))),
    ),
    Metric(
        "diloco_coordinator_live_syncers",
        "gauge",
        "Syncers with a heartbeat within `liveness.dead_s`",
        _run(lambda monitor, now_s: len(monitor.heard(now_s) & monitor.shards.keys())),
    ),
    Metric(
        "diloco_coordinator_unowned_fragments",
        "gauge",
        "Fragments that none of these syncers owns",
        _run(lambda monitor, now_s: len(monitor.unowned(now_s))),
    ),
    Metric(
        "diloco_coordinator_budget_tokens",
        "gauge",
        "Token budget of the run",
        _run(lambda monitor, now_s: monitor.settings.tokens),
    ),
    Metric(
        "diloco_coordinator_processed_tokens",
        "gauge",
        "Tokens processed by all learners",
        _run(lambda monitor, now_s: monitor.tokens_processed()),
    ),
    Metric(
        "diloco_coordinator_merged_tokens",
        "gauge",
        "Processed tokens that are in the global model; the mean over fragments",
        _run(lambda monitor, now_s: monitor.tokens_merged()),
    ),
    Metric(
        "diloco_coordinator_tokens_per_second",
        "gauge",
        "Tokens per second of all learners, a moving average",
        _run(lambda monitor, now_s: monitor.tokens_per_s(now_s)),
    ),
    Metric(
        "diloco_coordinator_busy_ratio",
        "gauge",
        "Share of time with a step in flight, over all live learners since each started",
        _run(lambda monitor, now_s: monitor.busy_fraction(now_s)),
    ),
    Metric("diloco_coordinator_versions", "gauge", "Versions in the log", _run(lambda monitor, now_s: sum(monitor.versions))),
    Metric(
        "diloco_coordinator_validation_loss_nats",
        "gauge",
        "Validation loss of the global model, as last reported by an evaluator",
        _run(lambda monitor, now_s: monitor.validation[-1][2] if monitor.validation else None),
    ),
    Metric(
        "diloco_coordinator_region_away",
        "gauge",
        "1 for a region without a heartbeat of any process",
        _run(_away),
        ("other_region",),
    ),
    Metric(
        "diloco_coordinator_outlying_learner",
        "gauge",
        "1 for a learner whose offers are outliers by norm: it is quarantined, or merged by syncers of earlier versions alone",
        _run(_outlying),
        ("learner",),
    ),
    Metric(
        "diloco_coordinator_page_viewers",
        "gauge",
        "Browsers that show the run's page",
        _page(lambda page: page.viewers.count),
    ),
    Metric(
        "diloco_coordinator_page_frames_dropped_total",
        "counter",
        "Frames of the page that a viewer skipped because the next one was ready; the viewer got the newest state later",
        _page(lambda page: page.viewers.dropped),
    ),
    Metric(
        "diloco_coordinator_page_drawing_seconds_total",
        "counter",
        "Processor time that drawing the page took",
        _page(lambda page: page.drawing.cost_s),
    ),
    Metric(
        "diloco_coordinator_refused_messages_total",
        "counter",
        "Messages refused as invalid, by kind of error",
        lambda moment: by_kind(moment.coordinator.refused),
        ("kind",),
    ),
)
