"""A status with the types that views expect. An answer may have others: it comes from the network, or another version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diloco_report.units import finite

_TEXTS = ("run", "preset", "state", "units", "region", "software")
_TABLES = ("learners", "shards", "regions")
_NUMBERS = (
    "wall_s", "eta_s", "tokens_before", "tokens_budget", "tokens_processed", "tokens_merged", "versions", "rounds",
    "parameters", "changes", "step", "tokens", "lost_tokens", "tokens_per_s", "loss", "step_s", "mean_step_s", "busy_fraction",
    "blocked_fraction", "bytes_up", "bytes_down", "rounds_merged", "rounds_missed", "seen_s_ago", "refused", "bytes_in",
    "bytes_out", "members", "heard", "away_s",
)  # fmt: skip
_OPEN = ("fragment", "answers", "quorum", "waited_s")


def shaped(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a status whose tables are tables, and whose numbers are finite numbers; what is of another type is left out."""
    made = _row({key: value for key, value in status.items() if key not in ("loss", "validation")})
    for name in _TABLES:
        made[name] = {key: _row(row) for key, row in _table(made.get(name)).items() if isinstance(row, Mapping)}
    for shard in made["shards"].values():
        shard["fragments"] = int(shard["fragments"]) if finite(shard.get("fragments")) else 0
        shard["open"] = [each for each in _rows(shard.get("open")) if all(finite(each.get(key)) for key in _OPEN)]
    made["fragments"] = [row for row in _rows(made.get("fragments")) if _is_count(row.get("fragment"), row.get("version"))]
    made["epochs"] = {name: value for name, value in _table(made.get("epochs")).items() if finite(value)}
    made["loss"] = {name: _points(each) for name, each in _table(status.get("loss")).items()}
    return made | {
        "validation": _points(status.get("validation")),
        "run": made.get("run", "run"),
        "state": made.get("state", "waiting"),
    }


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    made = {str(key): value for key, value in row.items() if key not in _NUMBERS or finite(value)}
    return made | {key: str(made[key]) for key in _TEXTS if made.get(key) is not None}


def _rows(rows: object) -> list[Mapping[str, Any]]:
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _points(points: object) -> list[Sequence[float]]:
    if not isinstance(points, list):
        return []
    return [point for point in points if isinstance(point, list | tuple) and len(point) == 3 and all(map(finite, point))]


def _table(rows: object) -> dict[str, Any]:
    return {str(name): row for name, row in rows.items()} if isinstance(rows, Mapping) else {}


def _is_count(*values: object) -> bool:
    return all(isinstance(value, int) and value >= 0 for value in values)
