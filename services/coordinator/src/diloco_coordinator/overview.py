"""The report of a run that goes on: what :mod:`diloco_report.page` draws, made of a coordinator's picture and curves.

Pure: no clock, no network, no file. A coordinator that stands by makes it of what the leading one stored
(:mod:`diloco_coordinator.history`), so both pages are made alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.core.changes import Changes, text_of
from diloco.settings.run import RunSettings
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
        **monitor.crossing.dump(),
        **alerts.dump(now_s),
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
        "now": {
            **{key: seen[key] for key in ("tokens_per_s", "busy_fraction", "alerts", "events")},
            "state": facts["state"],
            "eta_s": facts["eta_s"],
            "known_s_ago": known_s_ago,
            "syncers": facts["shards"],
            "open": [opened | {"syncer": name} for name, shard in facts["shards"].items() for opened in shard["open"]],
        },
    }


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
        "rollbacks": curves["rollbacks"],
    }


def _learner(learner: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **learner,
        "steps": learner["step"],
        "tokens_processed": learner["tokens"],
        "tokens_lost": learner.get("lost_tokens"),
    }
