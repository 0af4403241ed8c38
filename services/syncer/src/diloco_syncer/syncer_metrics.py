"""A syncer's metrics: the counts of its heartbeat, and the times of its rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.nats.transport import NatsTransport
from diloco.service.metrics import SILENT_S, Labelled, Metric, by_kind, by_sender, families, one_of
from diloco.wire.control import ShardHeartbeat
from diloco_syncer.shard import STATES, Shard

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


@dataclass(frozen=True)
class SyncerMoment:
    """A syncer at one moment."""

    shard: Shard
    heartbeat: ShardHeartbeat

    def crossing(self) -> Labelled:
        """Bytes by the other region, and the way that they went."""
        sizes: dict[tuple[str, ...], float] = {}
        for region, sent, received in self.heartbeat.crossing:
            sizes[region, "sent"], sizes[region, "received"] = sent, received
        return sizes

    def in_vain(self) -> Labelled:
        """Return how often a round went on without each learner, 0 for those that are heard."""
        times = dict.fromkeys(self.shard.context.roster.learners, 0) | self.shard.counts.in_vain
        return {(learner,): float(count) for learner, count in times.items()}

    def reached(self) -> Labelled:
        """Whether there is a connection to the server of each other region."""
        regions = self.shard.context.regions
        return {} if regions is None else {(name,): float(there) for name, there in regions.reached().items()}

    def offer_bits(self) -> Labelled:
        """Precision asked of the offers from each other region."""
        usual, asked = self.shard.run.created.codec.offer_bits, dict(self.heartbeat.offer_bits)
        others = [name for name in self.shard.run.created.regions.names if name != self.heartbeat.region]
        return {(name,): float(asked.get(name, usual)) for name in others}


class ObservedShard:
    """A syncer that knows its run, as the exporter wants it."""

    quiet_s = SILENT_S

    def __init__(self, shard: Shard, transport: NatsTransport, labels: Mapping[str, str]) -> None:
        self.shard, self.transport, self.labels = shard, transport, labels
        self.refused = shard.refused

    def waits_for(self) -> str | None:
        return self.shard.waits_for()

    def beat_s(self) -> float | None:
        return self.transport.published_s

    def families(self) -> Iterator[Family]:
        return families(METRICS, SyncerMoment(self.shard, self.shard.heartbeat()), self.labels)


METRICS: tuple[Metric[SyncerMoment], ...] = (
    Metric(
        "diloco_syncer_state",
        "gauge",
        "1 for the current state; `unable`: it can commit nothing",
        lambda seen: one_of(seen.heartbeat.state, STATES),
        ("state",),
    ),
    Metric("diloco_syncer_owned_fragments", "gauge", "Fragments that it owns", lambda seen: len(seen.shard.owned)),
    Metric(
        "diloco_syncer_closed_fragments",
        "gauge",
        "Owned fragments whose log is closed",
        lambda seen: len(seen.heartbeat.closed),
    ),
    Metric(
        "diloco_syncer_open_rounds",
        "gauge",
        "Rounds that wait for offers, or are being merged",
        lambda seen: len(seen.heartbeat.open),
    ),
    Metric(
        "diloco_syncer_oldest_round_seconds",
        "gauge",
        "Time for which the oldest open round has been open",
        lambda seen: max((waited_s for *_, waited_s in seen.heartbeat.open), default=0.0),
    ),
    Metric("diloco_syncer_rounds_total", "counter", "Rounds opened", lambda seen: seen.heartbeat.rounds),
    Metric("diloco_syncer_versions_total", "counter", "Versions committed to the log", lambda seen: seen.heartbeat.versions),
    Metric(
        "diloco_syncer_merged_members_total",
        "counter",
        "Offers merged into these versions: one per version and learner in it",
        lambda seen: seen.shard.counts.merged_members,
    ),
    Metric(
        "diloco_syncer_quorum_seconds",
        "histogram",
        "From a committed round's opening to its quorum",
        lambda seen: seen.shard.counts.quorum_times,
    ),
    Metric(
        "diloco_syncer_round_seconds",
        "histogram",
        "From a committed round's opening to its merge",
        lambda seen: seen.shard.counts.round_times,
    ),
    Metric(
        "diloco_syncer_waited_in_vain_total",
        "counter",
        "Times that a round went on without a learner that others had waited for",
        SyncerMoment.in_vain,
        ("learner",),
    ),
    Metric("diloco_syncer_sent_bytes_total", "counter", "Payload sent to NATS", lambda seen: seen.heartbeat.bytes_up),
    Metric(
        "diloco_syncer_received_bytes_total", "counter", "Payload received from NATS", lambda seen: seen.heartbeat.bytes_down
    ),
    Metric(
        "diloco_syncer_crossing_bytes_total",
        "counter",
        "Part of the sent and received bytes: to and from the servers of other regions",
        SyncerMoment.crossing,
        ("other_region", "way"),
    ),
    Metric(
        "diloco_syncer_region_connected",
        "gauge",
        "1 while connected to the server of the other region; no value before the first connection",
        SyncerMoment.reached,
        ("other_region",),
    ),
    Metric(
        "diloco_syncer_record_precision_bits",
        "gauge",
        "Bits per value of its next versions",
        lambda seen: seen.heartbeat.record_bits,
    ),
    Metric(
        "diloco_syncer_offer_precision_bits",
        "gauge",
        "Bits per value that it requests for offers from another region",
        SyncerMoment.offer_bits,
        ("other_region",),
    ),
    Metric(
        "diloco_syncer_pace_ratio",
        "gauge",
        "Steps between two rounds of a fragment, divided by `round.steps`; above 1 if a link is too slow",
        lambda seen: seen.heartbeat.pace,
    ),
    Metric(
        "diloco_syncer_unstored_fragments",
        "gauge",
        "Fragments whose next entry waits because storage is full",
        lambda seen: len(seen.shard.counts.unstored),
    ),
    Metric(
        "diloco_syncer_archive_full",
        "gauge",
        "1 if merged offers are no longer kept because their stream is full",
        lambda seen: float(seen.shard.counts.archive_full),
    ),
    Metric(
        "diloco_syncer_refused_offers_total",
        "counter",
        "Offers that it refused for good, or left out of a merge, by sender and reason; at most 1024 pairs",
        lambda seen: by_sender(seen.shard.counts.refused_offers),
        ("sender", "reason"),
    ),
    Metric(
        "diloco_syncer_missed_offers_total",
        "counter",
        "Offers that came too late to be merged, or again, by sender and reason; at most 1024 pairs",
        lambda seen: by_sender(seen.shard.counts.missed_offers),
        ("sender", "reason"),
    ),
    Metric(
        "diloco_syncer_dropped_heartbeats_total",
        "counter",
        "Heartbeats of a sender that sends more than 200 a second, replaced by newer ones; at most 1024 senders",
        lambda seen: {(sender,): count for (sender, _), count in by_sender(seen.shard.gate.dropped).items()},
        ("sender",),
    ),
    Metric(
        "diloco_syncer_refused_messages_total",
        "counter",
        "Messages refused as invalid, by kind of error",
        lambda seen: by_kind(seen.shard.refused),
        ("kind",),
    ),
)
