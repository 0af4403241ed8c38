"""The page on an operator's machine, after training has ended and before the final report is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.made.monitors import monitor, region_settings

from diloco.control.history import Past
from diloco.core.run.changes import Changes
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco_coordinator import overview
from diloco_coordinator.alerts import Alerts
from diloco_ops.page.source import OperatorSource
from diloco_report.page import parts


@pytest.mark.parametrize("up", [True, False])
async def test_a_finished_run_is_preliminary_as_long_as_diloco_up_is_at_work_on_it(tmp_path: Path, up: bool) -> None:
    directory = RunDirectory(tmp_path, "run", "nats://x", None, settings=region_settings())
    directory.save()
    picture = overview.picture(monitor(), Alerts(), Changes(bytes(16)), 6.0)
    picture["facts"]["state"] = "finished"
    past = Past(1, 1_700_000_000.0, picture, {})

    class Stored:
        async def read(self) -> Past:
            return past

    class Source(OperatorSource):
        async def _answer(self) -> None:
            """The coordinator has ended."""

    run = SimpleNamespace(name="run", registry=None, created=directory.settings)
    live: Any = SimpleNamespace(directory=directory, run=run, transport=SimpleNamespace(wall_s=lambda: 1_700_000_060.0))
    source: Any = Source(live, None)  # type: ignore[arg-type]
    source._stored = Stored()
    if up:
        with rundir.locked(tmp_path):
            drawn = parts(await source.report())["state"]
    else:
        drawn = parts(await source.report())["state"]
    assert ("Preliminary, as of 2023-11-14 22:14:20 UTC" in drawn) is up
    assert source.over
