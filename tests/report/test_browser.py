"""The page in a real browser: what a run brings along stays text, and parts are taken over as they come."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.report.test_page import HOSTILE, fake_report

from diloco_coordinator.page.server import HEADERS
from diloco_report import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

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


class Site:
    """A page as the coordinator serves it, by its own renderer, style, script and headers, with frames that a test gives."""

    def __init__(self, report: dict[str, Any], frames: list[dict[str, str]]) -> None:
        self.report, self.frames, self.asked = report, frames, 0

    def answer(self, path: str) -> tuple[str, bytes]:
        name = path.partition("?")[0]
        if name == "/":
            return "text/html; charset=utf-8", page.render_live(self.report, page.parts(self.report), "a.1").encode()
        if name == "/events":
            self.asked += 1
            sent = "".join(f"id: a.{n + 2}\nevent: parts\ndata: {json.dumps(parts)}\n\n" for n, parts in enumerate(self.frames))
            over = "event: over\ndata:\n\n" if self.asked > 1 else "retry: 10\n\n"  # the first time it breaks off
            return "text/event-stream", (sent + over).encode()
        return ("text/css" if name.endswith("css") else "text/javascript"), page.asset(name.removeprefix("/"))


@contextmanager
def served(site: Site) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            media, body = site.answer(self.path)
            self.send_response(200)
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


def dumped(url: str, folder: Path) -> str:
    """The page's elements as the browser has them after its script has run."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}",
        "--virtual-time-budget=3000",
    ]
    environment = {**os.environ, "DBUS_SESSION_BUS_ADDRESS": "unix:path=/dev/null"}
    ended = subprocess.run(
        [*command, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    return ended.stdout


def test_names_and_texts_of_a_run_do_nothing_in_a_browser(tmp_path: Path) -> None:
    frames = [page.parts(hostile(number)) for number in range(len(ATTACKS))]
    with served(Site(hostile(0), frames)) as url:
        shown = dumped(url, tmp_path / "browser")
    title = shown.partition("<title>")[2].partition("</title>")[0]
    assert title.endswith("· diloco")
    assert title != "owned"
    assert "constructor.constructor" in shown  # the last frame is there, as text
    for element in ("<img", "<iframe", "onload=document", 'onerror="document'):
        assert element not in shown.replace("&lt;", "")
    assert shown.count("<script") == 1


def test_a_report_with_its_data_inside_does_nothing_either(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    page.write_html(hostile(1), file)
    shown = dumped(file.as_uri(), tmp_path / "browser")
    assert shown.count("<script") == 1
    assert "<title>owned" not in shown


def test_the_page_goes_on_where_it_was_when_its_connection_breaks(tmp_path: Path) -> None:
    report = fake_report(learners=2, fragments=2) | {"now": {"state": "training"}}
    later = page.parts(report | {"tokens_processed": 42, "sample": "the newest sample"})
    site = Site(report, [{"headline": later["headline"]}, {"sample": later["sample"]}])
    with served(site) as url:
        shown = dumped(url, tmp_path / "browser")
    assert site.asked == 2
    assert "42 of" in shown
    assert "the newest sample" in shown
    assert "The run is over" in shown
