"""Connections to a real server: bad addresses, servers that are late, silent or gone, and what is logged about it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import nats.errors
import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs
from tests.made.fixtures import MakeServer
from tests.pace import DEADLINE_S, scaled_s
from tests.services.secured import make_keys, put, serving

from diloco.core.syncer.bandwidth import Moved
from diloco.errors import AppendUncertainError, BrokerError, SettingsError
from diloco.nats import connection, opening
from diloco.nats.connection import NatsLink, subscribe, wait_connected
from diloco.nats.identity import Identity, load
from diloco.nats.tcp import TcpTransport
from diloco.process.observe import get_logger
from diloco_ops.broker import raw_messages
from diloco_ops.broker.server import Server, find_binary, free_port
from diloco_ops.keys.permissions import Who

Events = list[Any]


async def opened(url: str, give_up_after_s: float | None = DEADLINE_S) -> NatsLink:
    return await NatsLink.open(url, url, "test", get_logger(), give_up_after_s)


def named(events: Events, name: str) -> Events:
    return [event for event in events if event["event"] == name]


async def until(condition: Callable[[], bool], limit_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def events() -> Any:
    with capture_logs() as captured:
        yield captured


@pytest.fixture
async def own(make_server: MakeServer) -> AsyncIterator[tuple[Server, NatsLink]]:
    """A server of the test's own, and connections to it."""
    server = make_server()
    link = await opened(server.url)
    yield server, link
    await link.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nats://",
        "nats://127.0.0.1:port",
        "nats://127.0.0.1:99999",
        "nats://127.0.0.1:0",
        "nats://[::1",
        "nats://none:4222",
        "nats://two words:4222",
        "nats://127.0.0.1:4222/path",
        "http://127.0.0.1:4222",
        "ws://127.0.0.1:4222",
    ],
)
async def test_what_is_no_address_is_refused_at_once_by_name(url: str, events: Events) -> None:
    with pytest.raises(SettingsError) as caught:
        await opened(url, None)
    assert repr(url) in str(caught.value)
    assert "expected nats://HOST:PORT" in str(caught.value)
    with pytest.raises(SettingsError):
        await NatsLink.open("nats://127.0.0.1:1", url, "test", get_logger())  # before anything is connected
    assert not events


async def test_of_several_addresses_the_wrong_one_is_named() -> None:
    for wrong in ("", "http://127.0.0.1:4223", "nats://127.0.0.1:port"):
        with pytest.raises(SettingsError) as caught:
            await opened(f"nats://127.0.0.1:4222,{wrong}", None)
        assert repr(wrong) in str(caught.value)


@pytest.mark.services
async def test_the_next_server_is_used_when_one_is_gone(make_server: MakeServer, events: Events) -> None:
    first, second = make_server(), make_server()
    link = await opened(f"{first.url},{second.url}")
    used = {first.url: first, second.url: second}[str(link.bulk.connected_url.geturl())]
    await asyncio.to_thread(used.kill)
    await until(lambda: bool(named(events, "nats_reconnected")) and link.bulk.is_connected)
    assert str(link.bulk.connected_url.geturl()) == (second if used is first else first).url
    assert {event["url"] for event in named(events, "nats_reconnected")} == {f"{first.url},{second.url}"}
    await link.close()


async def test_no_password_is_shown(events: Events) -> None:
    for url in ("nats://me:secret@127.0.0.1:x", "me:secret@", "http://me:sec/ret@host"):
        with pytest.raises(SettingsError) as wrong:
            await opened(url)
        assert "sec" not in str(wrong.value)
    port = free_port()
    with pytest.raises(BrokerError) as caught:
        await opened(f"nats://me:secret@127.0.0.1:{port}", 0.2)
    assert f"nats://127.0.0.1:{port}" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert named(events, "waiting_for_nats")
    assert "secret" not in str(events)


@pytest.mark.services
async def test_an_address_needs_no_scheme(nats_server: Server) -> None:
    link = await opened(nats_server.url.removeprefix("nats://"))
    assert link.bulk.is_connected
    await link.close()


async def test_no_server_in_time_is_an_error_that_names_it(events: Events) -> None:
    port = free_port()
    with pytest.raises(BrokerError, match=rf"no connection to nats://127.0.0.1:{port} \(tried for .*start a server there"):
        await opened(f"nats://127.0.0.1:{port}", 0.3)
    waiting = named(events, "waiting_for_nats")
    assert [(event["url"], event["log_level"]) for event in waiting] == [(f"nats://127.0.0.1:{port}", "warning")]


async def test_a_listener_that_says_nothing_is_given_up_and_its_socket_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(BrokerError, match="no connection"):
            await opened(f"nats://127.0.0.1:{listener.getsockname()[1]}", 0.3)
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(DEADLINE_S)
            assert await asyncio.to_thread(peer.recv, 1) == b""


async def test_a_refused_identity_leaves_no_socket_behind(tmp_path: Path) -> None:
    """Also where the server never says that it has closed its side of TLS; two refusals are believed."""
    keys = make_keys(tmp_path / "keys", "demo", [Who("a", "learner")])
    folder = keys.server_folder("nats")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    gone: list[bytes] = []

    def refuse(listener: socket.socket) -> None:
        for _ in range(2):
            refuse_one(listener)

    def refuse_one(listener: socket.socket) -> None:
        plain, _ = listener.accept()
        plain.sendall(b'INFO {"tls_required": true, "version": "2.12.0", "nonce": "abc", "auth_required": true}\r\n')
        with context.wrap_socket(plain, server_side=True, suppress_ragged_eofs=True) as secure:
            secure.settimeout(10)
            while secure.recv(1) not in (b"\n", b""):  # of its CONNECT
                pass
            secure.sendall(b"-ERR 'Authorization Violation'\r\n")
            with socket.socket(fileno=secure.detach()) as bare:  # so that nothing answers its end of TLS
                bare.settimeout(DEADLINE_S)
                while more := bare.recv(1 << 16):
                    gone.append(more)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        refusing = asyncio.create_task(asyncio.to_thread(refuse, listener))
        url = f"nats://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BrokerError, match="does not know the identity"):
            await NatsLink.open(url, url, "a", get_logger(), DEADLINE_S, load(keys.identity_file("a")))
        gc.collect()  # a warning of asyncio's for what is left open ends the test
        await refusing
    assert gone, "it said the end of TLS before that of the connection"


@pytest.mark.services
async def test_a_server_that_reads_its_users_again_keeps_nobody_out(tmp_path: Path) -> None:
    """Such a server refuses each client that has connected and has not said its name yet, known or not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        opening = asyncio.create_task(opened(f"nats://me:right@127.0.0.1:{port}"))
        plain, _ = await asyncio.to_thread(listener.accept)
        with plain:
            plain.sendall(b'INFO {"version": "2.12.0", "auth_required": true}\r\n')
            plain.sendall(b"-ERR 'Authorization Violation'\r\n")
            while await asyncio.to_thread(plain.recv, 1 << 16):  # until the client has read it
                pass
    user = "authorization { users: [{ user: me, password: right }] }\n"
    process, _ = plain_server(tmp_path, user + f'jetstream {{ store_dir: "{tmp_path}" }}', port)
    try:
        link = await opening
        assert link.control.is_connected
        await link.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.services
async def test_another_regions_server_is_waited_for_until_it_knows_the_identity(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the beginning, and when it is given a list without the identity later, by those who are late."""
    monkeypatch.setattr(opening, "ASK_AGAIN_S", 0.1)
    monkeypatch.setattr(opening, "COMPLAIN_EVERY_S", 0.2)
    monkeypatch.setattr(opening, "TURNED_AWAY_S", 0.0)
    keys = make_keys(tmp_path / "keys", "demo", [Who("known", "syncer")])
    listed = keys.server_folder("nats") / "auth.conf"
    before = listed.read_text()
    own = load(put(keys, Who("late", "syncer")))
    newest = listed.read_text()
    listed.write_text(before)
    with serving(keys, tmp_path / "nats") as server:
        connecting = asyncio.create_task(NatsLink.open_bulk(server.url, "late", get_logger(), own))
        await until(lambda: len(named(events, "waiting_for_nats")) >= 3)
        waits = named(events, "waiting_for_nats")
        assert waits[0]["attempts"] == 1
        assert all("does not know the identity" in event["reason"] for event in waits)
        assert waits[2]["waited_s"] - waits[1]["waited_s"] >= 0.4  # twice as long as between the first two
        listed.write_text(newest)
        await asyncio.to_thread(server.reload)
        link = await connecting

        listed.write_text(before)
        await asyncio.to_thread(server.reload)
        await until(lambda: len(named(events, "nats_turns_away")) >= 2)
        assert not link.bulk.is_closed
        assert {event["log_level"] for event in named(events, "nats_turns_away")} == {"warning"}
        listed.write_text(newest)
        await asyncio.to_thread(server.reload)
        await until(lambda: bool(named(events, "nats_reconnected")) and link.bulk.is_connected)
        await link.close()


@pytest.mark.services
async def test_the_first_connection_is_closed_when_the_second_fails(make_server: MakeServer) -> None:
    server = make_server()
    with pytest.raises(BrokerError, match="no connection"):
        await NatsLink.open(server.url, f"nats://127.0.0.1:{free_port()}", "test", get_logger(), 0.3)
    opening = asyncio.create_task(NatsLink.open(server.url, f"nats://127.0.0.1:{free_port()}", "test", get_logger()))
    await asyncio.sleep(0.3)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len(asyncio.all_tasks()) == 1, "an open connection has tasks that read and ping"


@pytest.mark.services
async def test_a_server_that_is_late_is_waited_for(make_server: MakeServer, events: Events) -> None:
    server = make_server(start=False, port=free_port())
    opening = asyncio.create_task(opened(server.url, None))
    await until(lambda: bool(named(events, "waiting_for_nats")))
    await asyncio.to_thread(server.start)
    link = await opening
    assert link.control.is_connected
    assert link.bulk.is_connected
    await link.close()


@pytest.mark.services
async def test_a_normal_start_and_end_log_nothing(make_server: MakeServer, events: Events) -> None:
    server = make_server()
    link = await opened(server.url)
    await link.bulk.publish("unheard", b"x")
    await link.close()
    await asyncio.to_thread(server.stop)
    assert events == []


@pytest.mark.services
async def test_a_flush_that_is_cancelled_leaves_the_connection_as_it_is(own: tuple[Server, NatsLink], events: Events) -> None:
    """The server's answer comes after the process has stopped waiting for it, as when a service is told to stop."""
    _, link = own
    flush = asyncio.create_task(link.control.flush())
    await asyncio.sleep(0)  # its ping waits to be sent
    await asyncio.sleep(0)
    flush.cancel()
    await asyncio.wait({flush})
    assert flush.cancelled()
    await link.control.flush()
    assert link.control.is_connected
    assert events == []


@pytest.mark.services
async def test_connections_are_remade_and_it_is_logged(own: tuple[Server, NatsLink], events: Events) -> None:
    server, link = own
    heard: list[bytes] = []

    async def hear(message: Any) -> None:
        heard.append(message.data)

    await link.control.subscribe("topic", cb=hear)
    for number in range(2):
        await asyncio.to_thread(server.kill)
        await until(lambda: not link.control.is_connected and not link.bulk.is_connected)
        await asyncio.to_thread(server.start)
        await until(lambda: link.control.is_connected and link.bulk.is_connected)
        await link.bulk.publish("topic", b"%d" % number)
        await until(lambda number=number: len(heard) > number)  # type: ignore[misc]
    assert heard == [b"0", b"1"]
    assert [event["log_level"] for event in named(events, "nats_disconnected")] == ["warning"] * 4
    assert {event["connection"] for event in named(events, "nats_disconnected")} == {"test-control", "test-bulk"}
    await until(lambda: len(named(events, "nats_reconnected")) >= 4)
    assert len(named(events, "nats_reconnected")) == 4
    assert not named(events, "nats_error"), "a disconnect is told once"


@pytest.mark.services
async def test_a_frozen_server_is_noticed(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, events: Events) -> None:
    monkeypatch.setattr(opening, "PING_S", 0.3)
    server = make_server()
    link = await opened(server.url)
    server.send_signal(signal.SIGSTOP)
    await until(lambda: bool(named(events, "nats_disconnected")))
    server.send_signal(signal.SIGCONT)
    await until(lambda: link.control.is_connected and link.bulk.is_connected)
    await link.close()


async def fill(link: NatsLink) -> None:
    """Send more than the buffers of both ends take, until the client takes no more either."""
    with contextlib.suppress(nats.errors.OutboundBufferLimitError):
        for _ in range(64):
            await link.bulk.publish("nothing", bytes(1 << 18))


@pytest.mark.services
async def test_a_server_that_is_cut_off_is_noticed_with_tls_and_with_much_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    """Neither the end of TLS is waited for, which asyncio does for 30 s, nor what was not sent, for which it has no limit."""
    monkeypatch.setattr(opening, "PING_S", 0.3)
    keys = make_keys(tmp_path / "keys", "demo", [Who("syncer-0", "syncer")])
    with serving(keys, tmp_path / "server") as server:
        link = await NatsLink.open(
            server.url, server.url, "test", get_logger(), DEADLINE_S, load(keys.identity_file("syncer-0"))
        )
        server.send_signal(signal.SIGSTOP)
        frozen_s = asyncio.get_running_loop().time()
        filling = asyncio.ensure_future(fill(link))
        await until(lambda: len(named(events, "nats_disconnected")) == 2)
        noticed_s = asyncio.get_running_loop().time() - frozen_s
        server.send_signal(signal.SIGCONT)
        await until(lambda: link.control.is_connected and link.bulk.is_connected)
        await filling
        await link.close()
    assert noticed_s < scaled_s(10)


@pytest.mark.services
async def test_errors_in_the_background_are_logged(link: NatsLink, events: Events) -> None:
    async def fail(message: Any) -> None:
        raise ValueError("deliberate")

    opened_again = await opened(str(link.bulk.connected_url.geturl()))
    await opened_again.bulk.subscribe("fails", cb=fail)
    await opened_again.bulk.publish("fails", b"")
    await until(lambda: bool(named(events, "nats_error")))
    (event,) = named(events, "nats_error")
    assert (event["connection"], event["reason"], event["log_level"]) == ("test-bulk", "deliberate", "warning")
    await opened_again.close()


def plain_server(tmp_path: Path, text: str, port: int | None = None) -> tuple[subprocess.Popen[bytes], str]:
    """A nats-server with a configuration that is not ours."""
    port, config = port or free_port(), tmp_path / "plain.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\n{text}\n')
    process = subprocess.Popen([find_binary(), "-c", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return process, f"nats://127.0.0.1:{port}"


@pytest.mark.services
async def test_a_server_without_jetstream_is_an_error(tmp_path: Path) -> None:
    process, url = plain_server(tmp_path, "")
    try:
        with pytest.raises(BrokerError, match=rf"NATS at {url}: JetStream is not enabled; start nats-server with -js"):
            await opened(url)
    finally:
        process.kill()
        process.wait()


@pytest.mark.services
async def test_another_regions_server_without_jetstream_is_waited_for(tmp_path: Path, events: Events) -> None:
    process, url = plain_server(tmp_path, "")
    try:
        opening = asyncio.create_task(NatsLink.open_bulk(url, "test", get_logger()))
        await until(lambda: any("JetStream is not enabled" in event["reason"] for event in named(events, "waiting_for_nats")))
        process.kill()
        process.wait()
        process, _ = plain_server(tmp_path, f'jetstream {{ store_dir: "{tmp_path}" }}', int(url.rsplit(":", 1)[1]))
        link = await asyncio.wait_for(opening, DEADLINE_S)
        await link.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("version", "is_said"),
    [("2.12.8", True), ("1.99.0", True), ("2.14.0", False), ("3.0.0-RC.1", False), ("of my own", False)],
)
async def test_a_server_is_too_old_or_not(version: str, is_said: bool) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"%s","max_payload":1048576,"headers":true}\r\n' % version.encode())
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    expected = f"{url}: nats-server {version} is too old: at least 2.14 is needed" if is_said else "JetStream does not answer"
    try:
        with pytest.raises(BrokerError, match=expected):
            await opened(url, DEADLINE_S if is_said else scaled_s(1))
    finally:
        server.close()


@pytest.mark.services
async def test_wrong_credentials_end_the_waiting(tmp_path: Path) -> None:
    process, url = plain_server(tmp_path, "authorization { user: me, password: right }\njetstream {}")
    try:
        await until(lambda: listens(url))
        with pytest.raises(BrokerError, match=r"no connection to .*[Aa]uthorization"):
            async with asyncio.timeout(DEADLINE_S):
                await opened(url.replace("//", "//me:wrong@"), None)
    finally:
        process.kill()
        process.wait()


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) == 0


@pytest.mark.services
async def test_silent_jetstream_is_an_error_or_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    monkeypatch.setattr(connection, "JETSTREAM_TIMEOUT_S", 0.2)
    user = "authorization {{ users: [{{ user: me, password: right, permissions: {{ publish: {{ deny: [{}] }} }} }}] }}\n"
    jetstream = f'jetstream {{ store_dir: "{tmp_path}" }}'
    process, url = plain_server(tmp_path, user.format('"$JS.API.INFO"') + jetstream)  # such a question is never answered
    try:
        await until(lambda: listens(url))
        url_as_me = url.replace("//", "//me:right@")
        with pytest.raises(BrokerError, match=rf"NATS at {url}: JetStream does not answer"):
            await opened(url_as_me, scaled_s(2))
        opening = asyncio.create_task(opened(url_as_me, None))
        await until(lambda: any("JetStream" in event["reason"] for event in named(events, "waiting_for_nats")))
        config = tmp_path / "plain.conf"
        config.write_text(config.read_text().replace("$JS.API.INFO", "nothing"))
        process.send_signal(signal.SIGHUP)
        link = await asyncio.wait_for(opening, DEADLINE_S)
        await link.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.services
async def test_waiting_for_a_connection_ends(own: tuple[Server, NatsLink]) -> None:
    server, link = own
    await wait_connected(link.bulk, 0, "subject")
    await asyncio.to_thread(server.kill)
    await until(lambda: not link.bulk.is_connected)
    with pytest.raises(AppendUncertainError, match=r"subject: NATS: no connection for 0.1 s"):
        await wait_connected(link.bulk, 0.1, "subject")
    waiting = asyncio.create_task(wait_connected(link.bulk, DEADLINE_S, "subject"))
    await asyncio.to_thread(server.start)
    await waiting
    assert link.bulk.is_connected
    await link.close()
    with pytest.raises(BrokerError, match="connection is closed"):
        await wait_connected(link.bulk, DEADLINE_S, "subject")


@pytest.mark.services
async def test_what_comes_in_the_middle_of_a_message_shows_the_rate(
    nats_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, now_s = await opened(nats_server.url), 100.0
    parser, loop = link.bulk._ps, asyncio.get_running_loop()
    frame = b"MSG unheard 99 1000\r\n" + bytes(1000) + b"\r\n"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "time", lambda: now_s)
        await parser.parse(frame)  # at once: nothing is known
        now_s += 5.0
        assert link.incoming == Moved(0, 0.0)
        await parser.parse(frame[:500])  # nor of the time since the last one
        now_s += 0.25
        await parser.parse(frame[500:900])
        now_s += 0.5
        await parser.parse(frame[900:] + frame[:300])
        assert link.incoming == Moved(400 + len(frame) - 900 + 300, 0.75)
        now_s += 3.0
        await parser.parse(frame[300:])  # a cut, not a rate
        assert link.incoming.busy_s == 0.75
    await link.close()


@pytest.mark.services
async def test_bytes_are_counted(nats_server: Server) -> None:
    link = await opened(nats_server.url)
    sent, received = link.bytes_out, link.bytes_in
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    await subscribe(link.control, "bytes", heard.put)
    await link.bulk.publish("bytes", bytes(1000))
    await asyncio.wait_for(heard.get(), DEADLINE_S)
    assert (link.bytes_out - sent, link.bytes_in - received) == (1000, 1000)
    await link.close()


HOSTILE_HEADERS = (
    b"\xff",
    b"NATS/1.0",
    b"NATS/1.0 \xff\xfe\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 100 \xff\r\n\xff: \xff\r\n\r\n",
    b"NATS/1.0\r\nStatus: 408\r\nDescription: Consumer Deleted\r\n\r\n",
)


@pytest.mark.services
async def test_no_message_makes_a_listener_deaf(nats_server: Server, events: Events) -> None:
    """Headers, subjects and reply subjects are whatever their sender likes; the server passes them on."""
    link, liar = await opened(nats_server.url), await opened(nats_server.url)
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    await subscribe(link.control, "hostile.>", hear)
    for headers in HOSTILE_HEADERS:
        await raw_messages.publish(liar.control, b"hostile.header", b"x", headers)
    for subject in (b"hostile.\xff", b"hostile.\x0c", b"hostile.a\x0bb"):
        await raw_messages.publish(liar.control, subject, b"x")
        await raw_messages.publish(liar.control, b"hostile.reply", b"x", reply=subject)
    await raw_messages.publish(liar.control, b"hostile.last", b"y")
    await until(lambda: bool(heard) and heard[-1].data == b"y")
    assert len(heard) == len(HOSTILE_HEADERS) + 2 * 3 + 1
    assert not named(events, "nats_disconnected")
    assert link.control.stats["reconnects"] == 0
    await link.close()
    await liar.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (9, "this machine's clock is behind, or that of the machine that made it was ahead: set the clock"),
        (10, "make it again with 'diloco keys renew' and the server's name, unless this machine's clock is ahead"),
        (20, "it and this identity are not of the same authority: check which folder of 'diloco keys' made them"),
        (62, "make it with 'diloco keys add server'"),  # another host's
    ],
)
def test_a_certificate_that_is_not_accepted_names_its_probable_cause(code: int, said: str) -> None:
    error = ssl.SSLCertVerificationError()
    error.verify_code, error.verify_message = code, "why"
    assert opening._said(error, cast(Identity, object())) == f"the server's certificate is not accepted: why; {said}"


async def test_a_connection_that_was_reset_has_nothing_to_drain() -> None:
    """A server resets the connection of a client that sends too large a message, which then ends whole."""
    reset = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        linger = struct.pack("ii", 1, 0)  # a close within no time resets the connection
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        reset.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        transport = TcpTransport()
        await transport.connect(urlsplit(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"), 0, DEADLINE_S)
        await reset.wait()
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                await transport.read(1)
        transport.write(b"x")
        await transport.drain()
        transport.close()
