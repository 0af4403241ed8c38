"""``docs/backup.md`` is typed as it stands in containers of three data centers: a night, a disaster, and the restore."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.compose.datacenters import ALL_HOSTS, STATUS, Machine, datacenters, deploy, named, status, steps_beyond
from tests.made.docker_commands import ROOT
from tests.made.pages import Block, blocks, sections
from tests.pace import scaled_s

from diloco_ops.checkpoints import manifest

PAGE = sections(ROOT / "docs" / "backup.md")
RESTORE_S = 300.0  # from empty servers until all regions train


def type_all(machines: dict[str, Machine], typed: list[Block]) -> list[str]:
    return [machines[host].type(block).stdout for hosts, block in typed for host in hosts]


@pytest.mark.compose
def test_three_datacenters_that_lost_everything_are_restored_by_the_page_alone(tmp_path: Path) -> None:
    with datacenters(tmp_path, ALL_HOSTS) as machines:
        deploy(machines)
        check(machines)


def check(machines: dict[str, Machine]) -> None:
    """Take a checkpoint by the page, lose everything, and restore it by the page."""
    us = machines["us"]
    taken, *_, collected = type_all(machines, blocks(PAGE["Each night"]))
    assert "not here yet: learner-eu-0" in taken
    assert "whole, with 3 learners' states" in collected
    folder = max((us.place / "seen" / "whole").iterdir(), key=lambda path: int(path.name))
    saved = manifest.load(folder).manifest
    steps = {name: learner.step or 0 for name, learner in saved.learners.items()}
    for name, step in steps.items():
        us.until(f"{name} trains on", STATUS, steps_beyond(name, step))
    lost = status(us)["learners"]

    for machine in machines.values():
        machine.type("docker compose down --volumes --timeout 5")

    *servers, restore, put, start, looking = blocks(PAGE["Everything is lost"])
    began_s = time.monotonic()
    type_all(machines, servers)
    [said] = type_all(machines, [restore])
    assert "run demo is restored at versions" in said
    type_all(machines, [put, start])
    for name, step in steps.items():
        us.until(f"{name} trains again", STATUS, steps_beyond(name, step))
    took_s = time.monotonic() - began_s
    print(f"restored, and all train, after {took_s:.0f} s")
    assert took_s < scaled_s(RESTORE_S)

    # what is lost is what came after the checkpoint: each learner begins from its state in it
    for host, machine in machines.items():
        events = machine.events("learner", "syncer")
        [restored] = named("checkpoint_restored", events)
        assert restored["step"] == steps[f"learner-{host}-0"] < lost[f"learner-{host}-0"]["step"]
        assert not named("message_refused", events)
    assert "holds" in type_all(machines, [looking])[0]
    assert json.loads(us.type("./diloco verify seen --json").stdout)["holds"]
