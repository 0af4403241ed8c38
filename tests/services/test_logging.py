"""The logs of a whole run: every line fits the schema of docs/operations.md, and at level info there are few of them."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import small

from diloco.process.logs import FIXED_KEYS, LEVELS

ROLES = {"coordinator": "coordinator", "syncer-0": "syncer", "syncer-1": "syncer"} | {f"toy-{i}": "learner" for i in range(3)}
# keys that mean the same wherever they are
TYPES: dict[str, type] = {
    "fragment": int, "version": int, "learner": str, "sender": str, "kind": str, "reason": str, "other_region": str,
    "epoch": int, "step": int, "tokens": int, "bytes": int, "file": str,
}  # fmt: skip
# of a process that begins, does its work and ends: connected, found the run, joined, serves, hands over, is finished
LIFE_LINES = 12
PROGRESS_A_MINUTE = 2


@pytest.mark.promise("every log line fits the documented schema")
async def test_every_line_fits_the_schema_and_few_are_for_people(launch: Launch) -> None:
    # no process is taken for dead, which would be said; and versions keep step with learners
    cluster = launch(
        small(tokens=4 * 60 * 16, round__learners_wait=True, liveness__dead_s=DEADLINE_S, liveness__takeover_s=scaled_s(8.0))
    )
    cluster.gate.close()
    cluster.coordinator()
    cluster.syncers()
    for share in range(3):
        cluster.toy_process(share)
    await cluster.link()
    await cluster.until(lambda: len(cluster.heartbeats) == 3, "all learners are there")
    cluster.gate.open()
    await cluster.ended()
    read = {path.stem: path.read_text().splitlines() for path in (cluster.directory / "logs").iterdir()}
    assert read.keys() == ROLES.keys()
    versions = 0
    for service, lines in read.items():
        events = [json.loads(line) for line in lines]
        for event in events:
            check(event, service, cluster.name)
        versions += sum(event["event"] == "version_committed" for event in events)
        first, last = (datetime.fromisoformat(event["time"]) for event in (events[0], events[-1]))
        shown = [event for event in events if event["level"] != "debug"]
        most = LIFE_LINES + PROGRESS_A_MINUTE * (last - first).total_seconds() / 60
        assert len(shown) <= most, f"{service}: {[event['event'] for event in shown]}"
    assert versions > 3 * LIFE_LINES  # each of which would have been a line


def check(event: dict[str, Any], service: str, run: str) -> None:
    assert tuple(event)[: len(FIXED_KEYS)] == FIXED_KEYS
    assert event["time"].endswith("Z")
    assert event["level"] in LEVELS
    assert (event["service"], event["role"], event["run"], event["region"]) == (service, ROLES[service], run, "")
    for key in (event["event"], *event):
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", key), event
    for key, kind in TYPES.items():
        assert isinstance(event.get(key, kind()), kind), event
