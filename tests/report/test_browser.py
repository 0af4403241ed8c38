"""The page in a real browser: what a run brings along stays text, and parts are taken over as they come."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page
from tests.made.browser import CHROMIUM, chromium, opened
from tests.made.reports import HOSTILE, fake_report, report_with_regions
from tests.pace import DEADLINE_S

from diloco_coordinator.page.page_server import HEADERS
from diloco_report import actions, page
from diloco_report.actions import WHY, Action, Field

pytestmark = [pytest.mark.services, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")]

# each of them makes the page's title its own if it is run
ATTACKS = (
    HOSTILE,
    "<svg/onload=document.title='owned'>",
    "</pre><iframe srcdoc=\"<script>parent.document.title='owned'</script>\">",
    "'\"><img src=x onerror=\"document.title='owned'\">",
    "javascript:document.title='owned'",
    "\x00\u2028<scr\x00ipt>document.title='owned'</scr\x00ipt>",
    "</svg></style></title><script>document.title='owned'</script>",
    "${document.title='owned'}{{constructor.constructor('document.title=\"owned\"')()}}",
)


def hostile(number: int) -> dict[str, Any]:
    """A report of a run that goes on, in which all text comes from an attacker."""
    attack = ATTACKS[number % len(ATTACKS)]
    report = fake_report(learners=3, fragments=2)
    names = {f"learner-{n}": f"{attack}{n}" for n in range(3)}
    text = json.dumps(report, ensure_ascii=False)
    for name, evil in names.items():
        text = text.replace(json.dumps(name), json.dumps(evil, ensure_ascii=False))
    report = dict(json.loads(text))
    for learner in report["learners"].values():
        learner |= {"state": attack, "loss": 1.0}
    for fragment in report["fragments"]:
        fragment |= {"owner": attack, "members": [attack], "members_count": 1}
    event = {"at_s": 1.0, "since_s": 1.0, "text": attack}
    shard = {"state": attack, "fragments": 1, "rounds": 1, "versions": 1}
    report["now"] = {"state": attack, "alerts": [event], "events": [event], "syncers": {attack: shard}, "open": []}
    return report | {"run": attack, "preset": attack, "sample": attack, "settings": {attack: {attack: attack}}, "units": attack}


def lively() -> dict[str, Any]:
    """A report of a run in three regions that goes on, with all that its page can show."""
    report = report_with_regions()
    learners = list(report["learners"])
    for number, learner in enumerate(report["learners"].values()):
        learner |= {
            "state": ("stepping", "sending", "gone", "ejected")[number % 4],
            "loss": 2.0,
            "seen_s_ago": 1.0,
            "tokens_per_s": 9e3,
        }
    for fragment in report["fragments"]:
        fragment |= {"epoch": 3, "merged_at_s": 100.0, "members": learners, "members_count": 4}
    region: dict[str, Any] = {
        "members": 3,
        "heard": 3,
        "away_s": None,
        "fragments": 4,
        "sending": 1,
        "open": 2,
        "bytes_in": 10**8,
    }
    regions = {name: region | {"bytes_out": 9 * 10**7, "of_bound": 0.9} for name in ("us", "eu", "ap")}
    regions["ap"] |= {"away_s": 12.0, "heard": 0}
    link = {"bytes": 5 * 10**7, "bytes_per_s": 40_000.0, "offer_bits": 4, "record_bits": 4, "pace": 1.0}
    links = [link | {"from": a, "to": b, "bytes_per_s": 4e4 * n} for n, (a, b) in enumerate(permutations(regions, 2))]
    report["now"] = {
        "state": "training",
        "tokens_per_s": 36_000.0,
        "busy_fraction": 0.97,
        "eta_s": 3600,
        "alerts": [{"text": "region ap: no process is heard", "since_s": 12}],
        "events": [{"at_s": 118.0, "text": "region ap: no process is heard"}],
        "syncers": {"syncer-us": {"state": "owner", "fragments": 1, "rounds": 9, "versions": 9, "seen_s_ago": 0.2}},
        "open": [{"fragment": 0, "answers": 1, "quorum": 2, "waited_s": 0.4}],
        "regions": regions,
        "links": links,
        "storage": [{"name": "OFFERS", "size_bytes": 9 * 10**8, "max_bytes": 10**9}],
    }
    report["changes"] = [{"number": 1, "at_s": 1.7e9, "author": "ann", "reason": "it oscillates", "text": "round.steps = 12"}]
    report["series"]["merges_missed"] = 40
    return report | {"in_force": {"round.steps": 12}}


VERSION = Field("version", "Version", kind="number")
FIELD = Field("name", "Label", suggested=[HOSTILE])
FORM = actions.form(
    "ann",
    [
        Action(
            "checkpoint", "Checkpoint", "Of the whole run.", "Take one into {out}?", [Field("out", "Folder", required=False)]
        ),
        Action("eject", "Eject", "A learner.", "Eject {learner}?", [Field("learner", "Learner", suggested=["learner-0"]), WHY]),
        Action("rollback", "Roll back", "To a version.", "Go back to version {version}?", [VERSION, WHY], preview="preview"),
    ],
)


class Site:
    """A page as it is served, by its own renderer, style, script and headers, with frames and answers that a test gives."""

    def __init__(
        self, report: dict[str, Any], frames: list[dict[str, str]], form: str | None = None, breaks: float = 1
    ) -> None:
        self.report, self.frames, self.form, self.asked = report, frames, form, 0
        self.breaks = breaks  # so often its connection breaks off before the run is over
        self.process, self.status = "a-1", 200  # the process that draws, and what it answers
        self.freezes = False  # it takes connections, and answers none of its events
        self.thaw = threading.Event()
        self.answers: dict[str, Any] = {}  # by action
        self.posted: list[tuple[str, str, dict[str, Any]]] = []  # action, token, fields

    def post(self, path: str, token: str, body: bytes) -> bytes:
        name = path.removeprefix("/act/")
        self.posted.append((name, token, json.loads(body)))
        return json.dumps({"code": 0} | self.answers[name]).encode()

    def page(self) -> bytes:
        if self.status != 200:
            return b"<!doctype html><html lang=en><title>token</title><h1>This page needs a token</h1></html>"
        begun, drawn = page.begin_live(self.report, self.form), page.body(page.parts(self.report))
        return (begun + drawn + page.end_live(f"{self.process}.1")).encode()

    def answer(self, path: str) -> tuple[str, bytes]:
        name = path.partition("?")[0]
        if name == "/":
            return "text/html; charset=utf-8", self.page()
        if name == "/events":
            self.asked += 1
            if self.freezes:
                self.thaw.wait(DEADLINE_S)
            sent = "".join(
                f"id: {self.process}.{n + 2}\nevent: parts\ndata: {json.dumps(parts)}\n\n"
                for n, parts in enumerate(self.frames)
            )
            over = "event: over\ndata:\n\n" if self.asked > self.breaks else "retry: 10\n\n"  # else it breaks off
            return "text/event-stream", (sent + over).encode()
        return ("text/css" if name.endswith("css") else "text/javascript"), page.asset(name.removeprefix("/"))


@contextmanager
def served(site: Site) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.give(*site.answer(self.path))

        def do_HEAD(self) -> None:
            self.give("text/javascript", b"")

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            self.give("application/json", site.post(self.path, self.headers["Authorization"], sent))

        def give(self, media: str, body: bytes) -> None:
            self.send_response(site.status)
            for name, value in {**HEADERS, "Content-Type": media, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def test_names_and_texts_of_a_run_do_nothing_in_a_browser(browser: Browser) -> None:
    frames = [page.parts(hostile(number)) for number in range(len(ATTACKS))]
    site = Site(hostile(0), frames, actions.form(HOSTILE, [Action(HOSTILE, HOSTILE, HOSTILE, HOSTILE, [FIELD])]))
    with served(site) as url, opened(browser, url) as shown:
        shown.get_by_text("The run is over").wait_for()
        assert shown.title().endswith("· diloco")
        text = shown.content()
        assert "constructor.constructor" in text  # the last frame is there, as text
        for element in ("img", "iframe", "[onload]", "[onerror]"):
            assert shown.locator(element).count() == 0
        assert shown.locator("script").count() == 2


def test_a_report_with_its_data_inside_does_nothing_either(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    page.write_html(hostile(1), file)
    with opened(browser, file.as_uri()) as shown:
        assert shown.locator("script").count() == 1
        assert shown.title().endswith("· diloco")


def test_the_page_goes_on_where_it_was_when_its_connection_breaks(browser: Browser) -> None:
    report = fake_report(learners=2, fragments=2) | {"now": {"state": "training"}}
    later = page.parts(report | {"tokens_processed": 42, "sample": "the newest sample"})
    site = Site(report, [{"headline": later["headline"]}, {"sample": later["sample"]}])
    with served(site) as url, opened(browser, url) as shown:
        shown.get_by_text("The run is over").wait_for()
        assert site.asked == 2
        assert shown.get_by_text("42 of").count() == 1
        assert shown.get_by_text("the newest sample").count() == 1


def test_the_page_loads_itself_again_where_its_address_is_another_runs_by_now(browser: Browser) -> None:
    report = fake_report(learners=2, fragments=2) | {"now": {"state": "training"}}
    site = Site(report, [], breaks=math.inf)
    with served(site) as url, opened(browser, url) as shown:
        assert shown.locator("h1").text_content() == report["run"]
        site.report, site.process, site.frames = report | {"run": "another"}, "b-1", [page.parts(report)]
        shown.locator("h1", has_text="another").wait_for()


def test_the_page_goes_on_with_another_process_of_its_run_and_is_not_loaded_again(browser: Browser) -> None:
    report = fake_report(learners=2, fragments=2) | {"now": {"state": "training"}}
    site = Site(report, [], breaks=math.inf)
    with served(site) as url, opened(browser, url) as shown:
        shown.evaluate("document.kept = true")
        site.process, site.frames = "a-2", [page.parts(report | {"tokens_processed": 42})]
        shown.get_by_text("42 of").wait_for()
        assert shown.evaluate("document.kept")


def test_the_page_says_so_when_nothing_comes_over_a_connection_that_stands(browser: Browser) -> None:
    """As behind a coordinator that is frozen, or a network that was cut without a word."""
    site = Site(fake_report(learners=2, fragments=2) | {"now": {"state": "training"}}, [], breaks=0)
    site.freezes = True
    context = browser.new_context()
    shown = context.new_page()
    shown.clock.install()
    with served(site) as url:
        shown.goto(url)
        assert not shown.locator("#link").is_visible()
        shown.clock.fast_forward(46_000)
        shown.get_by_text("Nothing comes from the coordinator").wait_for()
        site.thaw.set()
        shown.get_by_text("The run is over").wait_for()
        assert site.asked == 2  # over another connection
        shown.clock.fast_forward(46_000)
        assert shown.get_by_text("The run is over").is_visible()  # nothing more is expected
    context.close()


def test_the_page_asks_for_the_token_where_it_is_another_one_by_now(browser: Browser) -> None:
    site = Site(fake_report(learners=2, fragments=2) | {"now": {"state": "training"}}, [], breaks=math.inf)
    with served(site) as url, opened(browser, url) as shown:
        site.status = 401
        shown.locator("h1", has_text="This page needs a token").wait_for()


def test_a_browser_that_does_not_run_the_script_shows_all_and_says_that_it_stays_as_it_is(browser: Browser) -> None:
    site = Site(lively(), [])
    with served(site) as url, opened(browser, url, java_script_enabled=False) as shown:
        assert not shown.get_by_text("This page does not update itself").is_visible()
        shown.get_by_text("This page does not update itself").wait_for()
        assert shown.locator("svg.map").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_in_a_live_page_with_actions(browser: Browser, scheme: Any, width: int) -> None:
    site = Site(lively(), [], FORM)
    with served(site) as url, opened(browser, url, color_scheme=scheme, viewport={"width": width, "height": 900}) as shown:
        shown.get_by_text("The run is over").wait_for()
        shown.locator("#actions summary").click()
        assert problems(shown) == []
        wide = shown.evaluate("document.documentElement.scrollWidth")
        assert wide <= width  # what is wide scrolls within its part


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_a_report(browser: Browser, tmp_path: Path, scheme: Any) -> None:
    file = tmp_path / "report.html"
    page.write_html(report_with_regions(), file)
    with opened(browser, file.as_uri(), color_scheme=scheme) as shown:
        assert problems(shown) == []
        shown.emulate_media(media="print")
        assert not shown.locator("#theme").is_visible()
        assert shown.locator("section").first.is_visible()


def test_an_action_is_asked_about_and_sent_with_the_token_and_can_be_done_by_keyboard(browser: Browser) -> None:
    site = Site(lively(), [], FORM)
    site.answers = {"preview": {"lines": ["lost in all: 7 versions"]}, "rollback": {"error": "run 'run': <b>ends</b>"}}
    with served(site) as url, opened(browser, f"{url}#secret") as shown:
        assert shown.url == url  # the token is in no history
        shown.locator("#actions summary").focus()
        shown.keyboard.press("Enter")
        shown.locator("form[data-act=rollback] [name=version]").focus()
        shown.keyboard.type("3")
        shown.keyboard.press("Enter")
        dialog = shown.locator("#confirm")
        dialog.get_by_text("lost in all: 7 versions").wait_for()
        assert dialog.get_by_text("Go back to version 3").is_visible()
        shown.keyboard.press("Escape")
        assert [name for name, *_ in site.posted] == ["preview"]
        shown.locator("form[data-act=rollback] button").click()
        dialog.get_by_role("button", name="Yes").click()
        shown.get_by_text("run 'run': <b>ends</b>").wait_for()
        assert site.posted[-1] == ("rollback", "Bearer secret", {"version": "3", "reason": ""})


def problems(shown: Page) -> list[str]:
    """What axe finds: each violation, and where."""
    found = Axe().run(shown).response["violations"]
    return [
        f"{one['id']} ({one['impact']}): {node['target']} {node['failureSummary']}" for one in found for node in one["nodes"]
    ]
