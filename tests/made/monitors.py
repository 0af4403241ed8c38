"""A coordinator's picture of a run, with what it heard of learners and syncers."""

from __future__ import annotations

from typing import Any

from diloco.control.history import Past
from diloco.core.changes import Changes
from diloco.core.fragments import TensorSpec, build_map
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco.wire.entries import Record
from diloco.wire.offers import Member
from diloco_coordinator import overview
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.monitor import Monitor


def region_settings(*regions: str) -> RunSettings:
    return run_settings("decoupled", {"learners": 2, "regions.names": list(regions), "regions.away_s": 6.0})


def monitor(*regions: str) -> Monitor:
    return Monitor(
        "run", region_settings(*regions), build_map([TensorSpec("a", (8,)), TensorSpec("b", (8,))], 2, "balanced"), ""
    )


def heartbeat(learner: str, region: str, step: int) -> Heartbeat:
    values: dict[str, Any] = dict.fromkeys(Heartbeat.__struct_fields__, 0)
    values |= {name: [] for name in ("versions", "steps", "fragment_tokens", "lost_tokens", "trained")}
    values |= {"learner": learner, "region": region, "role": "learner", "state": "stepping", "sending": False, "loss": None}
    values |= {"software": "0.1.0", "failure": None}
    return Heartbeat(**values | {"step": step, "incarnation": 1})


def shard(syncer: str, region: str, *crossing: tuple[str, int, int], incarnation: int = 1) -> ShardHeartbeat:
    values: dict[str, Any] = dict.fromkeys(ShardHeartbeat.__struct_fields__, 0)
    values |= {
        "fragments": [],
        "closed": [],
        "open": [],
        "state": "owner",
        "syncer": syncer,
        "region": region,
        "software": "0.1.0",
    }
    return ShardHeartbeat(**values | {"incarnation": incarnation, "crossing": list(crossing), "offer_bits": []})


def entry_record(fragment: int, version: int, syncer: str, *learners: str) -> Record:
    members = [Member(name, 1, version, version, version - 1, 24, 240, 0, 1.0, []) for name in learners]
    return Record(
        fragment, "version", version, 1, syncer, bytes(32), members, [], 4, 0.3, 0.9, 0, 0, bytes(32), False,
        0.0, 0.5, 1.0, None,
    )  # fmt: skip


def story() -> Monitor:
    """Two regions; eu is silent from 2 s on, to 62 s, and us takes its fragment over. A syncer began again in between."""
    made = monitor("us", "eu")
    made.hear(heartbeat("ann", "us", 1), 1.0)
    made.hear(heartbeat("bob", "eu", 1), 1.0)
    made.hear_shard(shard("s-us", "us", ("eu", 1000, 50)), 2.0)
    made.hear_shard(shard("s-eu", "eu", ("us", 300, 7)), 2.0)
    made.entry(entry_record(0, 1, "s-us", "ann", "bob"), 2.0)
    made.entry(entry_record(1, 1, "s-eu", "ann", "bob"), 2.0)
    for at_s in range(3, 32):
        made.hear_shard(shard("s-us", "us", ("eu", 1500, 60)), float(at_s))
    made.hear_shard(shard("s-us", "us", ("eu", 20, 1), incarnation=2), 32.0)
    made.entry(entry_record(1, 2, "s-us", "ann"), 32.0)
    return made


def past_of(made: Monitor, now_s: float, term: int = 1, alerts: Alerts | None = None) -> Past:
    seen = overview.picture(made, alerts or Alerts(), Changes(bytes(16)), now_s)
    return Past(term, 1.7e9, seen, made.curves(now_s))
