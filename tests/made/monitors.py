"""A coordinator's picture of a run, with what it heard of learners and syncers."""

from __future__ import annotations

from typing import Any

from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.made.log_entries import record_of

from diloco.control.history import Past
from diloco.core.run.changes import Changes
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.wire.entries import Record
from diloco.wire.offers import MergeMember
from diloco_coordinator import overview
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.monitor import Monitor


def region_settings(*regions: str) -> RunSettings:
    return run_settings("decoupled", {"learners": 2, "regions.names": list(regions), "regions.away_s": 6.0})


def monitor(*regions: str) -> Monitor:
    return Monitor(
        "run", region_settings(*regions), build_map([TensorSpec("a", (8,)), TensorSpec("b", (8,))], 2, "balanced"), ""
    )


def entry_record(fragment: int, version: int, syncer: str, *learners: str) -> Record:
    members = [MergeMember(name, 1, version, version, version - 1, 24, 240, 0, 1.0, []) for name in learners]
    values: dict[str, Any] = {"learning_rate": 0.3, "momentum": 0.9, "quorum_s": 0.5, "round_s": 1.0, "body": None}
    return record_of(version, *members, fragment=fragment, epoch=1, syncer=syncer, **values)


def story() -> Monitor:
    """Two regions; eu is silent from 2 s on, to 62 s, and us takes its fragment over. A syncer began again in between."""
    made = monitor("us", "eu")
    made.hear(learner_heartbeat("ann", 1, region="us"), 1.0)
    made.hear(learner_heartbeat("bob", 1, region="eu"), 1.0)
    made.hear_shard(shard_heartbeat("s-us", region="us", crossing=[("eu", 1000, 50)]), 2.0)
    made.hear_shard(shard_heartbeat("s-eu", region="eu", crossing=[("us", 300, 7)]), 2.0)
    made.entry(entry_record(0, 1, "s-us", "ann", "bob"), 2.0)
    made.entry(entry_record(1, 1, "s-eu", "ann", "bob"), 2.0)
    for at_s in range(3, 32):
        made.hear_shard(shard_heartbeat("s-us", region="us", crossing=[("eu", 1500, 60)]), float(at_s))
    made.hear_shard(shard_heartbeat("s-us", region="us", crossing=[("eu", 20, 1)], incarnation=2), 32.0)
    made.entry(entry_record(1, 2, "s-us", "ann"), 32.0)
    return made


def past_of(made: Monitor, now_s: float, term: int = 1, alerts: Alerts | None = None) -> Past:
    seen = overview.picture(made, alerts or Alerts(), Changes(bytes(16)), now_s)
    return Past(term, 1.7e9, seen, made.curves(now_s))
