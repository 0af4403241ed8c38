"""The report of a run that goes on: what :mod:`diloco_report.page` draws, made of a coordinator's picture and curves.

Pure: no clock, no network, no file. A coordinator that stands by makes it of what the leading one stored
(:mod:`diloco_coordinator.history`), so both pages are made alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from diloco.core.changes import SETTABLE, Changes, text_of
from diloco.settings.run import RunSettings
from diloco.settings.validation import value_of
from diloco.wire.control import ShardHeartbeat
from diloco_coordinator import merges
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.monitor import Monitor
from diloco_coordinator.thinning import evenly, fewer
from diloco_report import regions, traffic

FORMAT = 1  # docs/report.md
MAX_POINTS = 1 << 14  # of all learners' losses together; as many spans of their activity, and as many members of merges
MAX_MEMBERS = 8  # of a fragment's last merge that are named

_CURVES = ("points", "activity")


def picture(monitor: Monitor, alerts: Alerts, changes: Changes, now_s: float) -> dict[str, Any]:
    """Return all that a page shows but the curves: facts that change from second to second."""
    facts = monitor.facts(now_s)
    for row, fragment in zip(facts["fragments"], monitor.map.fragments, strict=True):
        at_s, members = monitor.last_merges.get(fragment.index, (None, []))
        row |= {"parameters": fragment.size, "embedding": fragment.embedding, "epoch": monitor.epochs[fragment.index]}
        row |= {"merged_at_s": at_s, "members": members[:MAX_MEMBERS], "members_count": len(members)}
    before = {
        name: {key: value for key, value in learner.items() if key not in _CURVES} | {"state": "gone", "seen_s_ago": None}
        for name, learner in monitor.past.items()
    }
    return {
        "facts": facts | {"learners": before | facts["learners"]},
        "tokens_per_s": monitor.tokens_per_s(now_s),
        "busy_fraction": monitor.busy_fraction(now_s),
        "val_loss": monitor.validation[-1][2] if monitor.validation else None,
        "changes": [
            {"number": each.number, "at_s": each.at_s, "author": each.author, "reason": each.reason, "text": text_of(each)}
            for each in changes.records
        ],
        "absences": [[absence.region, absence.from_s, absence.to_s] for absence in monitor.presence.absences()],
        "in_force": {key: value_of(monitor.settings, key) for key in ("tokens", *SETTABLE)},
        "storage": [asdict(room) for room in monitor.rooms],
        "links": links(monitor),
        **monitor.crossing.dump(),
        **alerts.dump(now_s),
    }


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
    """Return the regions as of now, each with offers under way, open rounds, and the bytes that a ring would have sent.

    A ring all-reduce between D regions sends 2 (D - 1) / D of the model from each of them, a cycle.
    """
    facts, regions = seen["facts"], seen["facts"]["regions"]
    cycles = facts["versions"] / max(1, len(facts["fragments"]))
    ring = 2 * max(0, len(regions) - 1) / max(1, len(regions)) * facts["parameters"] * settings.codec.record_bits / 8
    return {
        name: {
            **region,
            "sending": sum(each["region"] == name and each["state"] == "sending" for each in facts["learners"].values()),
            "open": sum(len(shard["open"]) for shard in facts["shards"].values() if shard["region"] == name),
            "bound_bytes": cycles * ring,
        }
        for name, region in regions.items()
    }


def thinned(curves: Mapping[str, Any], most: int = MAX_POINTS) -> dict[str, Any]:
    """Return a monitor's curves with about ``most`` points, spans and members of merges, and numbers cut to be shown."""
    learners: Mapping[str, Any] = curves["learners"]
    each = most // max(1, len(learners))
    return {
        **curves,
        "learners": {name: learner | _fewer(learner, each) for name, learner in learners.items()},
        "validation": [[round(at, 1), tokens, round(loss, 5)] for at, tokens, loss in evenly(curves["validation"], most)],
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
        "val_loss": seen["val_loss"],
        "learners": learners,
        "fragments": [row | {"versions": row["version"]} for row in facts["fragments"]],
        "traffic": traffic.compared(learners, facts["parameters"], regions.borders(names, seen, {})),
        "regions": regions.describe(names, {**seen, "learners": learners}, owners),
        "settings": settings.model_dump(),
        "changes": seen["changes"],
        "in_force": {key: value for key, value in seen.get("in_force", {}).items() if value != value_of(settings, key)},
        "now": {
            **{key: seen[key] for key in ("tokens_per_s", "busy_fraction", "alerts", "events")},
            "state": facts["state"],
            "eta_s": facts["eta_s"],
            "known_s_ago": known_s_ago,
            "syncers": facts["shards"],
            "regions": _islands(seen, settings),
            "links": seen.get("links", []),
            "storage": seen.get("storage", []),
            "open": [opened | {"syncer": name} for name, shard in facts["shards"].items() for opened in shard["open"]],
        },
    }


def ended(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report of a run that is over: it has no ``now``."""
    return {key: value for key, value in report.items() if key != "now"}


_SAME = (
    "run", "preset", "wall_s", "parameters", "tokens_before", "tokens_budget", "tokens_processed", "tokens_merged", "rounds",
    "versions",
)  # fmt: skip


def series(curves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report's ``series``, from :func:`thinned` curves; raise as :func:`report`."""
    learners: Mapping[str, Any] = curves["learners"]
    return {
        "learners": {name: learner["points"] for name, learner in learners.items()},
        "activity": {name: learner["activity"] for name, learner in learners.items()},
        "global": curves["validation"],
        "merges": curves["merges"],
        "merges_every": curves["merges_every"],
        "merges_missed": curves.get("merges_missed", 0),
        "merges_missed_until_s": curves.get("merges_missed_until_s", 0.0),
        "rollbacks": curves["rollbacks"],
    }


def _learner(learner: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **learner,
        "steps": learner["step"],
        "tokens_processed": learner["tokens"],
        "tokens_lost": learner.get("lost_tokens"),
    }
