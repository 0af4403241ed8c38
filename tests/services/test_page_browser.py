"""``diloco page URL --identity`` in a browser: an operator acts on a run over a real server; slow, and needs Chromium."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.sync_api import Page as Tab
from playwright.sync_api import sync_playwright
from tests.made.browser import CHROMIUM
from tests.made.fixtures import Launch
from tests.made.page_process import PageProcess
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, small, some_versions
from tests.services.secured import make_keys, members, serving
from tests.services.toy import SAMPLES

from diloco.control.changes import read_changes
from diloco_ops.reading import run_reader

RUN = "paged"
pytestmark = [
    pytest.mark.usefixtures("patient_commands"),
    pytest.mark.slow,  # the parts are in test_page_actions.py and tests/report/test_browser.py
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]


def act(tab: Tab, action: str, fields: dict[str, str], then: str) -> None:
    """Fill in an action's form, say yes to it, and wait for its answer."""
    form = tab.locator(f"form[data-act={action}]")
    for name, value in fields.items():
        form.locator(f"[name={name}]").fill(value)
    form.locator("button").click()
    tab.locator("#confirm").get_by_role("button", name="Yes").click()
    tab.locator("#said").get_by_text(then).first.wait_for()


def look_and_act(address: str, cluster: Cluster) -> list[str]:
    """Open the address that the command printed, act until the run is over; return what the browser complained of."""
    complaints = list[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        tab.set_default_timeout(DEADLINE_S * 1000)
        tab.goto(address)
        tab.get_by_text("syncer-0").first.wait_for()
        assert "#" not in tab.url  # the token is in no history
        # not before: without its cookie the address answers 401 and a form, which the page's script fills in with the token
        tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.locator("#actions summary").click()
        act(tab, "set", {"key": "round.grace_factor", "value": "0.5", "reason": "tried"}, "change 1: round.grace_factor = 0.5")
        act(tab, "rollback", {"version": "1", "reason": "a spike"}, "4 fragments go back to version 1")
        tab.reload()  # the tab keeps its token
        tab.locator("#actions summary").click()
        cluster.gate.close()  # or the learners might have used it up before it is set
        budget = cluster.tokens() + 100 * SAMPLES
        act(tab, "set", {"key": "tokens", "value": str(budget), "reason": "enough"}, f"tokens = {budget}")
        cluster.gate.open()
        tab.get_by_text("Steps blocked").first.wait_for()  # the run is over, and the page is its report
        with tab.expect_download() as saved:
            tab.get_by_text("Save its report").click()
        assert "Steps blocked" in saved.value.path().read_text()
        browser.close()
    return complaints


async def test_an_operator_acts_by_a_browser_until_the_run_is_over(launch: Launch, tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", RUN, members(2, 2))
    with serving(keys, tmp_path / "nats") as server:
        cluster = launch(small(tokens=10**9), server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        cluster.toy(0)
        cluster.toy(1)
        await cluster.begin()
        await some_versions(cluster, 2)
        file = str(keys.identity_file("operator"))
        page = await asyncio.to_thread(PageProcess, tmp_path, server.url, "--run", RUN, "--identity", file, "--run-dir", "own")
        try:
            with cluster.slowly():
                assert await asyncio.to_thread(look_and_act, f"{page.url}#{page.token}", cluster) == []
        finally:
            page.end()
        async with run_reader.reached(tmp_path / "own") as live:
            changes = (await read_changes(live.run)).records
        told = [(change.author, change.reason) for change in changes]
        assert told == [("operator", "tried"), ("operator", "a spike"), ("operator", "enough")]
