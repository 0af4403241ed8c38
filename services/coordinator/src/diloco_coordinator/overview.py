"""The report of a run that goes on: what :mod:`diloco_report.page` draws, made of a coordinator's picture and curves.

Pure: no clock, no network, no file. A coordinator that stands by makes it of what the leading one stored
(:mod:`diloco_coordinator.history`), so both pages are made alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from diloco.core.run.changes import SETTABLE, Changes, text_of
from diloco.core.tensors.fragments import STATE_BITS
from diloco.settings.run import RunSettings
from diloco.settings.validation import value_of
from diloco.wire.control import ShardHeartbeat
from diloco_coordinator import merges
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.monitor import STATUS_POINTS, Monitor
from diloco_coordinator.thinning import evenly, fewer
from diloco_report import regions, traffic

FORMAT = 1  # docs/report.md
MAX_POINTS = 1 << 14  # of all learners' losses together; as many spans of their activity, and as many members of merges
MOST_STATUS_BYTES = 500_000  # fewer than a server takes from a coordinator (diloco_ops.keys.permissions)
MAX_MEMBERS = 8  # of a fragment's last merge that are named

_CURVES = ("points", "activity", "trained_time", "bytes_counted")


def picture(monitor: Monitor, alerts: Alerts, changes: Changes, now_s: float) -> dict[str, Any]:
    """Return all that a page shows but the curves: facts that change from second to second."""
    facts = monitor.facts(now_s)
    for row, fragment in zip(facts["fragments"], monitor.map.fragments, strict=True):
        at_s, members = monitor.last_merges.get(fragment.index, (None, []))
        row |= {"parameters": fragment.size, "embedding": fragment.embedding, "state": fragment.state}
        row |= {"epoch": monitor.epochs[fragment.index]}
        row |= {"merged_at_s": at_s, "members": members[:MAX_MEMBERS], "members_count": len(members)}
    before = {
        name: {key: value for key, value in learner.items() if key not in _CURVES} | {"state": "gone", "seen_s_ago": None}
        for name, learner in monitor.past.items()
    }
    return {
        "facts": facts | {"learners": before | facts["learners"]},
        "tokens_per_s": monitor.tokens_per_s(now_s),
        "busy_fraction": monitor.busy_fraction(now_s),
        "goodput": monitor.goodput(now_s),
        "val_loss": monitor.validation[-1][2] if monitor.validation else None,
        "changes": [
            {"number": each.number, "at_s": each.at_s, "author": each.author, "reason": each.reason, "text": text_of(each)}
            for each in changes.records
        ],
        "absences": [[absence.region, absence.from_s, absence.to_s] for absence in monitor.presence.absences()],
        "in_force": in_force(monitor.settings),
        "storage": [asdict(room) for room in monitor.rooms],
        "refusals": monitor.reports.dump(),
        "links": links(monitor),
        **monitor.crossing.dump(),
        "steady": monitor.crossing.steady(),
        **alerts.dump(now_s),
    }


def packed_status(monitor: Monitor, now_s: float) -> bytes:
    """Return a run's status as JSON, with as few points of its curves as it takes to fit into ``MOST_STATUS_BYTES``."""
    points, packed = STATUS_POINTS, b""
    while points and not 0 < len(packed) <= MOST_STATUS_BYTES:
        packed = json.dumps(monitor.status(now_s, points)).encode()
        points //= 4
    return packed


def in_force(settings: RunSettings) -> dict[str, Any]:
    """Return the settings that may change while a run goes on, by name."""
    return {key: value_of(settings, key) for key in ("tokens", *SETTABLE)}


def changed(values: Mapping[str, Any], created: RunSettings) -> dict[str, Any]:
    """Return those of :func:`in_force` that differ from the ones that the run was created with: the report's ``in_force``."""
    return {key: value for key, value in values.items() if value != value_of(created, key)}


def links(monitor: Monitor) -> list[dict[str, Any]]:
    """Return what goes from each region to each other: bytes, as syncers count them, and the bits and the pace in use.

    Offers go to the owners in the other region, who say with how many bits; versions come from those in the first one.
    """
    sizes, settings = monitor.crossing.borders(), monitor.settings
    owners: dict[str, list[ShardHeartbeat]] = {name: [] for name in monitor.presence.regions}
    for heartbeat, _ in monitor.shards.values():
        if heartbeat.region in owners and heartbeat.state == "owner":
            owners[heartbeat.region].append(heartbeat)
    usual = settings.codec.offer_bits
    return [
        {
            "from": source,
            "to": to,
            "bytes": sizes.get((source, to), 0),
            "bytes_per_s": monitor.crossing.rates.get((source, to)),
            "offer_bits": min((dict(owner.offer_bits).get(source, usual) for owner in owners[to]), default=None),
            "record_bits": min((owner.record_bits for owner in owners[source]), default=None),
            "pace": max((owner.pace for owner in owners[to]), default=None),
        }
        for source in owners
        for to in owners
        if source != to
    ]


def _islands(seen: Mapping[str, Any], settings: RunSettings) -> dict[str, Any]:
    """Return the regions as of now, each with offers under way, open rounds, and its bytes as a part of those of a ring."""
    facts = seen["facts"]
    ring, (made, sent) = _ring_bytes(facts, settings), seen.get("steady") or (0, {})  # an older version's picture has none
    return {
        name: {
            **region,
            "sending": sum(each["region"] == name and each["state"] == "sending" for each in facts["learners"].values()),
            "open": sum(len(shard["open"]) for shard in facts["shards"].values() if shard["region"] == name),
            "of_bound": sent[name] / (ring * made) if name in sent else None,
        }
        for name, region in facts["regions"].items()
    }


def _ring_bytes(facts: Mapping[str, Any], settings: RunSettings) -> float:
    """Return the bytes that a ring all-reduce between the regions sends from each, by version: a fragment's, in the mean.

    Of D regions each sends (D - 1) / D of the fragment twice: as outer gradients, and as their merge.
    """
    rows, regions = facts["fragments"], len(facts["regions"])
    trained, state = settings.codec.offer_bits + settings.codec.record_bits, 2 * STATE_BITS
    bits = sum(row["parameters"] * (state if row["state"] else trained) for row in rows)
    return float((regions - 1) / max(1, regions) * bits / 8 / len(rows))


def thinned(curves: Mapping[str, Any], most: int = MAX_POINTS) -> dict[str, Any]:
    """Return a monitor's curves with about ``most`` points, spans and members of merges, and numbers cut to be shown."""
    learners: Mapping[str, Any] = curves["learners"]
    each = most // max(1, len(learners))
    return {
        **curves,
        "learners": {name: learner | _fewer(learner, each) for name, learner in learners.items()},
        "validation": [[round(at, 1), tokens, round(loss, 5)] for at, tokens, loss in evenly(curves["validation"], most)],
        "gauges": {name: evenly(points, each) for name, points in curves.get("gauges", {}).items()},
        **merges.thinned(curves, most),
    }


def _fewer(learner: Mapping[str, Any], most: int) -> dict[str, Any]:
    points, spans = evenly(learner["points"], most), fewer(learner["activity"], most)
    return {
        "points": [[round(at, 1), tokens, step, round(loss, 4)] for at, tokens, step, loss in points],
        "activity": [[round(from_s, 1), round(to_s, 1), state] for from_s, to_s, state in spans],
    }


def report(seen: Mapping[str, Any], settings: RunSettings, known_s_ago: float | None) -> dict[str, Any]:
    """Return the report without its series.

    Args:
        seen: from :func:`picture`.
        known_s_ago: age of the picture, where another coordinator made it.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the picture is damaged.
    """
    facts = seen["facts"]
    learners = {name: _learner(learner) for name, learner in facts["learners"].items()}
    owners, names = [row["owner"] for row in facts["fragments"]], settings.regions.names
    return {
        "format": FORMAT,
        **{key: facts[key] for key in _SAME},
        "state_values": facts.get("state_values", 0),  # which an older version's picture has not
        "origin": seen.get("origin", {}),  # which an older version's picture has not
        "val_loss": seen["val_loss"],
        "learners": learners,
        "fragments": [row | {"versions": row["version"]} for row in facts["fragments"]],
        "traffic": traffic.compared(learners, facts["parameters"], regions.borders(names, seen, {})),
        "regions": regions.describe(names, {**seen, "learners": learners}, owners),
        "settings": settings.model_dump(),
        "changes": seen["changes"],
        "in_force": changed(seen.get("in_force", {}), settings),
        "now": {
            **{key: seen[key] for key in ("tokens_per_s", "busy_fraction", "alerts", "events")},
            "goodput": seen.get("goodput"),  # which an older version's picture has not
            "state": facts["state"],
            "eta_s": facts["eta_s"],
            "known_s_ago": known_s_ago,
            "syncers": facts["shards"],
            "regions": _islands(seen, settings),
            "links": seen.get("links", []),
            "storage": seen.get("storage", []),
            "refusals": seen.get("refusals", []),  # which an older version's picture has not
            "open": [opened | {"syncer": name} for name, shard in facts["shards"].items() for opened in shard["open"]],
        },
    }


def ended(report: Mapping[str, Any], preliminary_at_s: float | None = None) -> dict[str, Any]:
    """Return a report of a run that is over: it has no ``now``.

    Args:
        report: from :func:`report`.
        preliminary_at_s: the time (Unix), where ``diloco up`` has yet to write the final report.
    """
    over = {key: value for key, value in report.items() if key != "now"}
    return over if preliminary_at_s is None else over | {"preliminary_at_s": preliminary_at_s}


_SAME = (
    "run", "preset", "wall_s", "parameters", "tokens_before", "tokens_budget", "tokens_processed",
    "tokens_merged", "rounds", "versions",
)  # fmt: skip


def series(curves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report's ``series``, from a monitor's curves, :func:`thinned` or whole; raise as :func:`report`.

    An older version had no samples, gauges, traffic or rollbacks, and kept all merges.
    """
    learners: Mapping[str, Any] = curves["learners"]
    return {
        "learners": {name: learner["points"] for name, learner in learners.items()},
        "activity": {name: learner["activity"] for name, learner in learners.items()},
        "global": curves["validation"],
        "traffic": curves.get("traffic", []),
        "samples": curves.get("samples", []),
        "gauges": curves.get("gauges", {}),
        "merges": curves["merges"],
        "merges_every": curves.get("merges_every", 1),
        "merges_missed": curves.get("merges_missed", 0),
        "merges_missed_until_s": curves.get("merges_missed_until_s", 0.0),
        "rollbacks": curves.get("rollbacks", []),
    }


def _learner(learner: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **learner,
        "steps": learner.get("steps", learner["step"]),  # an older version's picture has the step alone
        "tokens_processed": learner["tokens"],
        "tokens_lost": learner.get("lost_tokens"),
    }
