"""``diloco page``: an operator acts on a run by the page of the own machine, in its own name, and no other person does."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.made.fixtures import Launch
from tests.made.page_process import PageProcess
from tests.services.cluster import Cluster, Service, small, some_versions
from tests.services.secured import make_keys, members, serving
from tests.services.toy import SAMPLES

from diloco.control.changes import read_changes
from diloco.errors import EjectedError, RunError, SettingsError
from diloco_ops.page import page_command as command
from diloco_ops.reading import run_reader

RUN = "paged"


async def acted(page: PageProcess, name: str, **values: str) -> Any:
    return await asyncio.to_thread(page.act, name, **values)


async def test_an_operator_acts_by_the_page_in_its_own_name(launch: Launch, tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", RUN, members(3, 2))
    with serving(keys, tmp_path / "nats") as server:
        cluster = launch(small(tokens=10**9), server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        cluster.toy(0)
        cluster.toy(1)
        third = cluster.toy_process(2)
        await cluster.begin()
        await cluster.until(lambda: "toy-2" in cluster.heartbeats, "the third takes part")
        await some_versions(cluster, 2)
        file = str(keys.identity_file("operator"))
        page = await asyncio.to_thread(PageProcess, tmp_path, server.url, "--run", RUN, "--identity", file, "--run-dir", "own")
        try:
            with cluster.slowly():
                await act_on(page, cluster, tmp_path / "own", third)
                cluster.gate.close()  # or they might have used it up before it is set
                await acted(page, "set", key="tokens", value=str(cluster.tokens() + 100 * SAMPLES))
                cluster.gate.open()
            await cluster.ended()
            shown = await page.shows("Steps blocked", "round.grace_factor")  # figures of a run that is over: the report
            assert "stepped too fast" in shown
        finally:
            page.end()
        await demand_authors(tmp_path / "own")
        assert "denied" not in json.dumps(cluster.events("permission_denied"))


async def act_on(page: PageProcess, cluster: Cluster, own: Path, third: Service) -> None:
    """Take every action, and meet each of its errors as the command's own line."""
    assert f"page of run {RUN}, with actions, as operator" in page.said
    shown = await page.shows("Roll back", "toy-2", "syncer-0", "data-chart")
    assert "stands by" not in shown
    assert await acted(page, "set", key="round.grace_factor", value="0.5", reason="tried") == [
        "change 1: round.grace_factor = 0.5"
    ]
    assert "no setting 'round.grace' (did you mean" in await acted(page, "set", key="round.grace", value="1")
    assert await acted(page, "set", key="round.grace_factor", value="") == "value: is missing"
    assert await acted(page, "eject", learner="toy-2", reason="stepped too fast") == ["change 2: eject toy-2"]
    [(code, _)] = await cluster.refused(third)
    assert code == EjectedError.exit_code
    assert "no learner 'missing' was ever admitted" in await acted(page, "eject", learner="missing")
    assert await acted(page, "readmit", learner="toy-2") == ["change 3: readmit toy-2"]
    assert "toy-0' already takes part" in await acted(page, "readmit", learner="toy-0")
    told = await acted(page, "preview", version="1")
    assert re.match(r"fragment 0: versions 2 to \d+, \d+", told[0]), told
    assert re.match(r"lost in all: \d+ versions of 4 fragments", told[-2]), told
    assert "no fragment is beyond version 99999" in await acted(page, "rollback", version="99999")
    assert "expected a whole number" in await acted(page, "rollback", version="-1")
    back = await acted(page, "rollback", version="1", reason="a spike")
    assert "4 fragments go back to version 1" in back
    taken = await acted(page, "checkpoint", out="")
    assert str(own.name) in taken[-1]
    assert (own / "whole" / "1" / "manifest.json").exists()


async def demand_authors(own: Path) -> None:
    """All that was done stands in the run's changes, in the operator's name."""
    async with run_reader.reached(own) as live:
        changes = (await read_changes(live.run)).records
    assert {change.author for change in changes} == {"operator"}
    assert [change.reason for change in changes[:4]] == ["tried", "stepped too fast", "", "a spike"]


def test_what_cannot_be_served_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run's directory"):
        command.page(str(tmp_path))
    with pytest.raises(SettingsError, match="give the run's NATS server"):
        command.page("http://127.0.0.1:8420/")
    with pytest.raises(SettingsError, match="other machines can reach this address"):
        command.page(str(tmp_path), address="0.0.0.0:8421")
    with pytest.raises(SettingsError, match="--bulk: only with a URL"):
        command.page(str(tmp_path), bulk_url="nats://127.0.0.1:4222")
