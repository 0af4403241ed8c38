"""A learner's or an evaluator's metrics: the content of its heartbeat, and totals since it began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from diloco.core.learner.learner import Activity
from diloco.core.tensors.fragments import FragmentMap
from diloco.member.member import Member
from diloco.nats.transport import NatsTransport
from diloco.processes.part import Part
from diloco.service.metrics import SILENT_S, Labelled, Metric, by_kind, families, one_of
from diloco.wire.control import Heartbeat
from diloco.wire.refusals import RefusalReason

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

WORKING = ("stepping", "waiting", "closing", "finished")
LATE_HEARTBEATS = 3


@dataclass(frozen=True)
class MemberMoment:
    """A member at one moment."""

    member: Member
    heartbeat: Heartbeat

    def training(self, value: float | None) -> float | None:
        """Return the value of a learner; an evaluator, which takes no steps, has none."""
        return value if self.heartbeat.role == "learner" else None

    def tokens(self) -> Labelled | None:
        """Return tokens by their fate: the mean over fragments, weighted by parameters, as of the versions applied so far."""
        if self.heartbeat.role == "evaluator":
            return None
        held, lost = _mean(self.member.map, self.heartbeat.fragment_tokens), _mean(self.member.map, self.heartbeat.lost_tokens)
        return {("merged",): self.heartbeat.tokens - held - lost, ("lost",): lost, ("held",): held}

    def refused_offers(self) -> Labelled | None:
        """Return refused offers by reason, each from 0: Prometheus sees no increase of a series that begins at 1."""
        if self.heartbeat.role == "evaluator":
            return None
        refused = self.member.refusals.offers
        return {(reason,): float(refused.get(reason, 0)) for reason in get_args(RefusalReason)}

    def versions(self) -> Labelled:
        """Return versions applied, by whether own work is in them."""
        return {("yes",): float(self.member.learner.rounds_merged), ("no",): float(self.member.learner.rounds_missed)}


def _mean(fragments: FragmentMap, counts: list[int]) -> float:
    return sum(f.size * count for f, count in zip(fragments.fragments, counts, strict=True)) / fragments.size


class ObservedMember:
    """A member that has joined, as the exporter wants it."""

    def __init__(self, member: Member, transport: NatsTransport, labels: Mapping[str, str]) -> None:
        self.member, self.transport, self.labels, self.refused = member, transport, labels, member.refused
        self.quiet_s = max(SILENT_S, LATE_HEARTBEATS * member.run.in_force.liveness.heartbeat_s)

    def waits_for(self) -> str | None:
        if self.member.learner.activity in WORKING:
            return None
        leaves = self.member.learner.activity in ("leaving", "left")
        return "its end: it leaves the run" if leaves else "the newest global model"

    def beat_s(self) -> float | None:
        return self.transport.published_s

    def families(self) -> Iterator[Family]:
        return families(METRICS, MemberMoment(self.member, self.member.heartbeat()), self.labels)


class ObservedPart:
    """One of a learner's processes, as its exporter wants it; ``member``: what a leader tells besides."""

    quiet_s = SILENT_S

    def __init__(self, part: Part, labels: Mapping[str, str], member: ObservedMember | None = None) -> None:
        self.part, self.labels, self.member = part, labels, member
        self.refused = None if member is None else member.refused

    def waits_for(self) -> str | None:
        return None if self.member is None else self.member.waits_for()

    def beat_s(self) -> float | None:
        return None if self.member is None else self.member.beat_s()

    def families(self) -> Iterator[Family]:
        if self.member is not None:
            yield from self.member.families()
        yield from families(OF_PROCESSES, self.part, self.labels)


OF_PROCESSES: tuple[Metric[Part], ...] = (
    Metric(
        "diloco_island_generation",
        "gauge",
        "Number of this generation of the learner's processes",
        lambda part: part.group.generation,
    ),
    Metric("diloco_island_processes", "gauge", "Processes of the learner that are there", lambda part: part.group.size),
    Metric("diloco_island_process", "gauge", "Index of this process among them", lambda part: part.group.index),
    Metric("diloco_island_steps_total", "counter", "Steps of this generation", lambda part: part.course.step),
    Metric(
        "diloco_island_carried_parameters",
        "gauge",
        "Parameters of the fragments that this process carries",
        lambda part: part.carried_parameters,
    ),
    Metric(
        "diloco_island_sent_bytes_total",
        "counter",
        "Bytes sent by this process, `to`: the learner's other processes, or NATS",
        lambda part: {("processes",): float(part.links.moved_bytes[0]), ("nats",): float(part.transport.bytes_out)},
        ("to",),
    ),
    Metric(
        "diloco_island_received_bytes_total",
        "counter",
        "Bytes received by this process, `from`: the learner's other processes, or NATS",
        lambda part: {("processes",): float(part.links.moved_bytes[1]), ("nats",): float(part.transport.bytes_in)},
        ("from",),
    ),
)

METRICS: tuple[Metric[MemberMoment], ...] = (
    Metric(
        "diloco_learner_state",
        "gauge",
        "1 for the current state",
        lambda seen: one_of(seen.heartbeat.state, get_args(Activity)),
        ("state",),
    ),
    Metric(
        "diloco_learner_steps_total",
        "counter",
        "Inner steps since the process started",
        lambda seen: seen.training(seen.member.learner.accounts.done.steps),
    ),
    Metric(
        "diloco_learner_tokens_total",
        "counter",
        "Tokens processed since the process started",
        lambda seen: seen.training(seen.member.learner.accounts.done.tokens),
    ),
    Metric(
        "diloco_learner_busy_seconds_total",
        "counter",
        "Time with a step in flight since the process started",
        lambda seen: seen.training(seen.member.learner.accounts.done.busy_s),
    ),
    Metric(
        "diloco_learner_blocked_seconds_total",
        "counter",
        "Time in which no step was in flight because of this system",
        lambda seen: seen.training(seen.member.learner.accounts.done.blocked_s),
    ),
    Metric(
        "diloco_learner_data_seconds_total",
        "counter",
        "Time without a step in flight, because the next batch was not ready",
        lambda seen: seen.training(seen.member.learner.accounts.done.data_s),
    ),
    Metric(
        "diloco_learner_step_seconds",
        "gauge",
        "Time of a step, averaged",
        lambda seen: seen.training(seen.heartbeat.step_s),
    ),
    Metric(
        "diloco_learner_loss_nats",
        "gauge",
        "Training loss of the last step with a finite loss, in nats per token",
        lambda seen: seen.training(seen.heartbeat.loss),
    ),
    Metric(
        "diloco_learner_not_finite_steps_total",
        "counter",
        "Inner steps whose loss was not finite; they change nothing",
        lambda seen: seen.training(seen.member.learner.accounts.done.not_finite),
    ),
    Metric(
        "diloco_learner_task_metric",
        "gauge",
        "The task's own metrics of the last step, by `name`",
        lambda seen: {(name,): value for name, value in seen.member.learner.accounts.metrics.items()} or None,
        ("name",),
    ),
    Metric(
        "diloco_learner_validation_loss_nats",
        "gauge",
        "Validation loss of the global model, from an evaluator",
        lambda seen: seen.heartbeat.loss if seen.heartbeat.role == "evaluator" else None,
    ),
    Metric(
        "diloco_learner_run_tokens",
        "gauge",
        "Tokens processed in this run, by `fate`: merged, lost, or held (not merged yet); the mean over fragments",
        MemberMoment.tokens,
        ("fate",),
    ),
    Metric(
        "diloco_learner_offers_total",
        "counter",
        "Offers made to rounds",
        lambda seen: seen.training(seen.member.offers()),
    ),
    Metric(
        "diloco_learner_refused_offers_total",
        "counter",
        "Offers that the run has refused for good, by reason",
        MemberMoment.refused_offers,
        ("reason",),
    ),
    Metric(
        "diloco_learner_versions_applied_total",
        "counter",
        "Versions written into the model, by whether they contain the learner's own work",
        MemberMoment.versions,
        ("own_work",),
    ),
    Metric("diloco_learner_sent_bytes_total", "counter", "Payload sent to NATS", lambda seen: seen.heartbeat.bytes_up),
    Metric(
        "diloco_learner_received_bytes_total", "counter", "Payload received from NATS", lambda seen: seen.heartbeat.bytes_down
    ),
    Metric(
        "diloco_learner_refused_messages_total",
        "counter",
        "Messages refused as invalid, by kind of error",
        lambda seen: by_kind(seen.member.refused),
        ("kind",),
    ),
)
