"""The page's server: it answers those who may see it, sends what changed, and waits for no viewer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import pkcs12
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tests.pace import DEADLINE_S
from tests.services.secured import make_keys

from diloco.errors import SettingsError
from diloco.nats import identity
from diloco_coordinator.page import drawing as pace
from diloco_coordinator.page import page_server as serving
from diloco_coordinator.page.drawing import Drawing
from diloco_coordinator.page.guard import LEAST_TOKEN, check, make_token
from diloco_coordinator.page.page_server import PageServer
from diloco_ops.keys import pki
from diloco_ops.keys.permissions import Who
from diloco_report.page import PARTS

TOKEN = "0123456789abcdef0123"
MOVED = "<b>&"


class Run:
    """A run whose report the test sets."""

    def __init__(self) -> None:
        self.tokens, self.over, self.sample, self.reports = 0, False, "", 0

    async def report(self) -> Mapping[str, Any]:
        self.reports += 1
        return {"run": "run", "tokens_processed": self.tokens, "sample": self.sample, "now": {"state": "training"}}

    async def series(self) -> Callable[[], Mapping[str, Any]]:
        return dict


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **values: self.said.append(f"{level} {event} {values}")


class Acts:
    """Actions that only note that they were taken."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def form(self, report: Mapping[str, Any]) -> str:
        return "<p>actions</p>"

    async def act(self, request: Request) -> Response:
        self.taken.append(request.path_params["name"])
        return JSONResponse({"lines": [], "code": 0})


@contextlib.asynccontextmanager
async def served(run: Run, token: str | None = None, acting: Acts | None = None) -> AsyncIterator[PageServer]:
    log: Any = Log()
    server = PageServer(Drawing(run, "feed", log), "127.0.0.1:0", token, log, acting=acting)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def opened(server: PageServer, path: str = "/", method: str = "GET", body: str = "", **headers: str) -> Any:
    """A connection, the answer's status and headers, and a reader of its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 24)
    given = {"Host": f"127.0.0.1:{server.port}", "Content-Length": str(len(body))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n{body}".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    found = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return writer, int(head[0].split()[1]), found, reader


async def fetched(server: PageServer, path: str = "/", **given: str) -> tuple[int, dict[str, str], str]:
    writer, status, headers, reader = await opened(server, path, **given)
    text = (await reader.read()).decode()
    writer.close()
    return status, headers, text


async def frame(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """The next frame's id and parts."""
    while True:
        found = {}
        while line := (await asyncio.wait_for(reader.readline(), DEADLINE_S)).decode().strip("\r\n"):
            name, _, value = line.partition(": ")
            found[name] = value
        if found.get("event") == "parts":
            return found["id"], json.loads(found["data"])
        if found.get("event") == "over":
            return "over", {}
        assert not reader.at_eof()


@pytest.mark.parametrize(
    ("token", "link"), [("secret-token", "https://us.example.org:8443/#secret-token"), (None, "https://us.example.org:8443/")]
)
async def test_the_log_has_the_page_and_its_token_as_one_link(token: str | None, link: str) -> None:
    log: Any = Log()
    server = PageServer(Drawing(Run(), "feed", log), "127.0.0.1:0", token, log, url="https://us.example.org:8443/")
    await server.start()
    await server.close()
    assert f"info page_link {{'link': '{link}'}}" in log.said


async def test_the_page_is_whole_without_its_script_and_lets_the_browser_do_nothing_else() -> None:
    run = Run()
    run.tokens, run.sample = 1234567, MOVED
    async with served(run) as server:
        status, headers, text = await fetched(server)
        assert status == 200
        assert "1.23M" in text
        assert "&lt;b&gt;&amp;" in text
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
        assert "<script>" not in text
        for asset, media in (("/page.js", "text/javascript"), ("/page.css", "text/css")):
            status, headers, text = await fetched(server, asset)
            assert (status, headers["content-type"].split(";")[0]) == (200, media)
            assert len(text) > 2000
        assert (await fetched(server, "/nothing"))[0] == 404
        assert (await fetched(server, method="POST"))[0] == 405
        assert (await fetched(server, "/events", method="DELETE"))[0] == 405


async def test_the_figures_come_before_the_curves_are_drawn() -> None:
    class Slow(Run):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = asyncio.Event()

        async def series(self) -> Callable[[], Mapping[str, Any]]:
            await self.drawn.wait()
            return dict

    run = Slow()
    run.tokens, run.sample = 4321, "the end"
    async with served(run) as server:
        writer, *_, reader = await opened(server)
        begun = (await asyncio.wait_for(reader.readuntil(b'id="part-alerts"'), DEADLINE_S)).decode()
        assert "4.32k" in begun
        assert "page.css" in begun
        run.tokens = 8765
        async with asyncio.timeout(DEADLINE_S):
            while "8.77k" not in server.drawing.parts["headline"]:  # drawn again, as for a viewer
                await server.drawing.draw(curves=False)
                await asyncio.sleep(0.01)
        run.drawn.set()
        rest = (await reader.read()).decode()
        assert "the end" in rest
        assert "8.77k" not in rest
        # the page asks for all that came after its figures
        state = rest.split('data-state="')[1].split('"')[0]
        assert "8.77k" in server.drawing.since(state)["headline"]
        writer.close()


async def test_viewers_are_sent_what_changed_and_no_more() -> None:
    run = Run()
    async with served(run) as server:
        _, _, text = await fetched(server)
        state = text.split('data-state="')[1].split('"')[0]
        writer, status, headers, reader = await opened(server, f"/events?since={state}")
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        run.tokens = 5_000
        _, parts = await frame(reader)
        assert parts.keys() == {"headline"}
        assert "5.00k" in parts["headline"]
        run.sample = "text"
        last, parts = await frame(reader)
        assert parts.keys() == {"sample"}
        writer.close()
        # one that comes again is sent what it missed; one of another process is sent all
        writer, *_, reader = await opened(server, "/events", Last_Event_ID=state)
        assert (await frame(reader))[1].keys() == {"headline", "sample"}
        writer.close()
        writer, *_, reader = await opened(server, "/events", Last_Event_ID="beef.7")
        again, parts = await frame(reader)
        assert again == last
        assert list(parts) == list(PARTS)
        writer.close()


async def test_without_viewers_nothing_is_drawn_and_with_many_it_is_drawn_once() -> None:
    run = Run()
    async with served(run) as server:
        await asyncio.sleep(0)
        assert run.reports == 0
        viewers = [await opened(server, "/events") for _ in range(20)]
        await asyncio.gather(*(frame(reader) for *_, reader in viewers))
        assert server.viewers.count == 20
        before = run.reports
        run.tokens = 10
        await asyncio.gather(*(frame(reader) for *_, reader in viewers))
        assert run.reports - before <= 4  # two groups of parts, twice at most
        for writer, *_ in viewers:
            writer.close()
        async with asyncio.timeout(DEADLINE_S):
            while server.viewers.count:
                await asyncio.sleep(0.01)


async def test_a_viewer_that_never_reads_holds_up_nobody_and_gets_no_old_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "FRAME_S", 0.01)
    monkeypatch.setattr("diloco_coordinator.page.viewers.FRAME_S", 0.01)
    monkeypatch.setattr(pace, "SHARE", 1.0)
    run = Run()
    async with served(run) as server:
        stalled, *_, unread = await opened(server, "/events")
        unread._transport.pause_reading()
        other, *_, reader = await opened(server, "/events")
        for number in range(1, 60):  # 200 kB each: more than all buffers between the two take
            run.sample = str(number) * 100_000
            while run.sample not in (await frame(reader))[1].get("sample", ""):
                pass
        unread._transport.resume_reading()
        last = ""
        while not last.startswith("59"):
            shown = (await frame(unread))[1].get("sample", "")
            last = shown.partition('<pre tabindex="0">')[2]
        assert server.viewers.dropped > 10
        stalled.close()
        other.close()


async def test_a_viewer_that_takes_nothing_for_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "FRAME_S", 0.01)
    monkeypatch.setattr("diloco_coordinator.page.viewers.FRAME_S", 0.01)
    monkeypatch.setattr(pace, "SHARE", 1.0)
    monkeypatch.setattr(serving, "STALLED_S", 0.2)
    run = Run()
    async with served(run) as server:
        writer, *_, unread = await opened(server, "/events")
        unread._transport.pause_reading()
        async with asyncio.timeout(DEADLINE_S):
            number = 0
            while server.viewers.count or not number:
                number += 1
                run.sample = str(number) * 200_000
                await asyncio.sleep(0.02)
        assert server.viewers.dropped > 0  # it never came to take those that were drawn meanwhile
        monkeypatch.setattr(serving, "STALLED_S", DEADLINE_S)  # a slow machine is not to be taken for a stalled viewer
        assert (await fetched(server))[0] == 200
        writer.close()


async def test_the_end_of_a_run_is_shown_and_the_page_asks_for_no_more() -> None:
    run = Run()
    async with served(run) as server:
        writer, *_, reader = await opened(server, "/events")
        await frame(reader)
        run.tokens, run.over = 77, True
        shown: dict[str, str] = {}
        while (sent := await frame(reader))[0] != "over":
            shown |= sent[1]
        assert "77" in shown["headline"]
        writer.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),  # a name that its owner has lead to this machine
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Host": ""}, 421),
        ({"Host": "["}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),  # another port of this machine
        ({"Sec_Fetch_Site": "same-origin"}, 200),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 200),  # a link that is followed
    ],
)
async def test_other_sites_read_nothing(headers: dict[str, str], status: int) -> None:
    async with served(Run()) as server:
        assert (await fetched(server, **headers))[0] == status
        if status != 200:
            assert (await fetched(server, "/events", **headers))[0] == status


async def test_with_a_token_nobody_sees_anything_without_it() -> None:
    async with served(Run(), TOKEN) as server:
        status, _, text = await fetched(server)
        assert status == 401
        assert "page_token_file" in text
        for path in ("/events", "/page.js"):
            assert (await fetched(server, path))[0] == 401
        for wrong in ("", "0123456789abcdef012", "é", TOKEN.upper()):
            assert (await fetched(server, Authorization=f"Bearer {wrong}", Host="anything"))[0] == 401
            assert (await fetched(server, "/token", method="POST", body=f"token={wrong}"))[0] == 401
        assert (await fetched(server, Authorization=f"Bearer {TOKEN}", Host="any.name"))[0] == 200
        assert (await fetched(server, "/token"))[0] == 405
        assert (await fetched(server, "/token", method="POST", body="token=" + "x" * 9000))[0] == 413
        foreign = {"Origin": "https://evil.example"}
        assert (await fetched(server, "/token", method="POST", body=f"token={TOKEN}", **foreign))[0] == 403
        status, headers, _ = await fetched(server, "/token", method="POST", body=f"token={TOKEN}&x=1")
        assert (status, headers["location"]) == (303, ".")
        cookie = headers["set-cookie"]
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert TOKEN not in cookie
        assert (await fetched(server, "/page.js", Cookie=cookie.split(";")[0]))[0] == 200
        assert (await fetched(server, "/page.js", Cookie=cookie.split(";")[0][:-1]))[0] == 401


async def test_actions_need_the_token_itself_from_this_page_on_this_machine() -> None:
    acts = Acts()
    async with served(Run(), TOKEN, acts) as server:
        here = {"Authorization": f"Bearer {TOKEN}", "Origin": f"http://127.0.0.1:{server.port}"}
        _, headers, _ = await fetched(server, "/token", method="POST", body=f"token={TOKEN}")
        cookie = {"Cookie": headers["set-cookie"].split(";")[0]}
        assert f"diloco_page_{server.port}=" in cookie["Cookie"]  # pages at several ports keep each other's
        page = (await fetched(server, **cookie))[2]
        assert "<p>actions</p>" in page
        assert "act.js" in page
        assert TOKEN not in page
        refused: list[tuple[dict[str, str], int]] = [
            ({}, 401),
            (cookie, 401),  # a browser sends it to every port of this machine, and so to any program that listens there
            ({"Authorization": f"Bearer {TOKEN}0"}, 401),
            (here | {"Origin": "https://evil.example"}, 403),
            (here | {"Origin": "null"}, 403),
            (here | {"Origin": f"http://127.0.0.1:{(server.port or 0) + 1}"}, 403),
            (here | {"Sec_Fetch_Site": "cross-site"}, 403),
            (here | {"Host": "evil.example", "Origin": "http://evil.example"}, 421),
        ]
        for headers, expected in refused:
            assert (await fetched(server, "/act/eject", method="POST", **headers))[0] == expected, headers
        assert (await fetched(server, "/act/eject", **here))[0] == 405
        assert acts.taken == []
        assert (await fetched(server, "/act/eject", method="POST", **here))[0] == 200
        assert acts.taken == ["eject"]


async def test_a_page_without_actions_has_no_way_to_act() -> None:
    async with served(Run(), TOKEN) as server:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert (await fetched(server, "/act/eject", method="POST", **bearer))[0] == 405
        assert (await fetched(server, "/act.js", **bearer))[0] == 404


async def test_who_holds_connections_keeps_nobody_from_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 8)
    async with served(Run()) as server:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(30)]
        assert (await fetched(server))[0] == 200
        assert await asyncio.wait_for(held[0][0].read(), DEADLINE_S) == b""  # the oldest gave way
        for _, writer in held:
            writer.close()


async def test_a_page_that_cannot_be_drawn_ends_nothing() -> None:
    class Broken(Run):
        async def report(self) -> Mapping[str, Any]:
            return {"run": "run", "learners": 7}

    async with served(Broken()) as server:
        assert (await fetched(server))[0] == 200
        log: Any = server.log
        assert [line for line in log.said if line.startswith("error page_not_drawn")]


async def test_an_address_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        log: Any = Log()
        server = PageServer(Drawing(Run(), "feed", log), f"127.0.0.1:{port}", None, log)
        with pytest.raises(SettingsError, match=rf"'127.0.0.1:{port}': cannot listen there: address already in use"):
            await server.start()


def test_others_reach_no_page_without_a_token(tmp_path: Path) -> None:
    for here in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        assert check(here, None) == (None, None)
    with pytest.raises(SettingsError, match=r"page_address = '0.0.0.0:1': other machines can reach this address"):
        check("0.0.0.0:1", None)
    file = tmp_path / "token"
    with pytest.raises(SettingsError, match="cannot be read"):
        check("0.0.0.0:1", file)
    file.write_text("short\n")
    os.chmod(file, 0o600)
    with pytest.raises(SettingsError, match="5 characters, expected at least 16"):
        check("0.0.0.0:1", file)
    file.write_text(TOKEN + "\n")
    assert check("0.0.0.0:1", file) == (TOKEN, None)
    os.chmod(file, 0o644)
    with pytest.raises(SettingsError, match=f"its mode is 0644, .* chmod 600 {file}"):
        check("127.0.0.1:1", file)


def test_each_deployment_makes_a_token_of_its_own(tmp_path: Path) -> None:
    tokens = set()
    for name in ("a", "b"):
        file = tmp_path / name
        assert make_token(file)
        assert file.stat().st_mode & 0o777 == 0o600
        token, _ = check("0.0.0.0:1", file)
        assert token is not None
        assert len(token) >= 2 * LEAST_TOKEN
        assert not make_token(file)
        assert check("0.0.0.0:1", file) == (token, None)
        tokens.add(token)
    assert len(tokens) == 2
    with pytest.raises(SettingsError, match=r"page_token_file .*: is missing, and cannot be created: .*No such file"):
        make_token(tmp_path / "nowhere" / "token")


async def test_over_tls_the_runs_identities_are_let_in_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 8)
    keys = make_keys(tmp_path / "keys", "run", [Who("watcher", "observer")])
    others = make_keys(tmp_path / "others", "run", [Who("stranger", "observer")])
    folder = keys.put_page("page", ["127.0.0.1"], datetime.now(UTC) + timedelta(hours=1))
    token, tls = check("0.0.0.0:0", None, folder)
    assert token is None
    log: Any = Log()
    server = PageServer(Drawing(Run(), "feed", log), "127.0.0.1:0", token, log, tls=tls)
    await server.start()
    try:

        async def status(client: ssl.SSLContext) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=client)
            writer.write(b"GET / HTTP/1.1\r\nHost: any.name\r\nConnection: close\r\n\r\n")
            answer = (await reader.read()).decode()
            writer.close()
            return answer.split("\r\n")[0]

        watcher = identity.load(keys.identity_file("watcher")).tls
        assert await status(watcher) == "HTTP/1.1 200 OK"
        # who connects and shakes no hands keeps no viewer away: the oldest are closed
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2 * serving.MAX_CONNECTIONS)]
        assert await status(watcher) == "HTTP/1.1 200 OK"
        assert await asyncio.wait_for(held[0][0].read(), DEADLINE_S) == b""
        for _, writer in held:
            writer.close()
        unknown = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        stranger = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        stranger.load_cert_chain(others.identity_file("stranger"))
        for client in (unknown, stranger):
            said = ""  # in TLS 1.3 a client learns of its refusal when it reads, or finds the connection closed
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                said = await status(client)
            assert said == ""
    finally:
        await server.close()


async def test_over_tls_a_token_does_in_place_of_an_identity(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "run", [])
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    folder = keys.put_page("page", ["127.0.0.1"], datetime.now(UTC) + timedelta(hours=1))
    token, tls = check("0.0.0.0:0", file, folder)
    assert (token, tls is not None and tls.verify_mode) == (TOKEN, ssl.CERT_NONE)
    (folder / "server.key").chmod(0o644)
    with pytest.raises(SettingsError, match=r"page_tls .*: the mode of server.key is 0644"):
        check("0.0.0.0:0", None, folder)
    with pytest.raises(SettingsError, match=r"page_tls .*: server.pem, server.key or ca.pem cannot be used"):
        check("0.0.0.0:0", None, tmp_path)


def test_an_identity_is_given_to_a_browser(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "run", [Who("watcher", "observer")])
    text = keys.identity_file("watcher").read_text()
    data = pki.for_browser(tomllib.loads(text)["certificate"], tomllib.loads(text)["private_key"], "watcher", b"secret")
    key, certificate, _ = pkcs12.load_key_and_certificates(data, b"secret")
    assert key is not None
    assert certificate is not None
    assert "CN=watcher" in certificate.subject.rfc4514_string()
