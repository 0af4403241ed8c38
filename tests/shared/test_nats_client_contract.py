"""What `diloco.nats` relies on of the client library beyond its public interface, one test for each.

A test that fails after an upgrade of nats-py names our code and what to look at. The library goes on working with its own
parts; ours must be given what theirs get.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from nats.aio import client as library
from nats.aio.transport import Transport
from nats.protocol.parser import Parser

from diloco.nats.client import Client
from diloco.nats.tcp import TcpTransport

ROOT = Path(__file__).parents[2]
NATS = ROOT / "shared/src/diloco/nats"
VERSION = metadata.version("nats-py")


def changed(ours: str, relies_on: str, look_at: str) -> str:
    return f"nats-py {VERSION}: {ours} in shared/src/diloco/nats relies on {relies_on}; look at {look_at}"


def source(member: Callable[..., Any] | type) -> str:
    return inspect.getsource(member)


def parameters(member: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(member).parameters)


def test_the_version_is_the_one_that_is_pinned() -> None:
    required = tomllib.loads((ROOT / "shared/pyproject.toml").read_text())["project"]["dependencies"]
    assert "nats-py>=2.16,<2.17" in required
    assert VERSION.startswith("2.16."), changed("pyproject.toml", "nats-py 2.16", "every test of this file, and then the pin")


def test_the_client_asks_its_reading_for_parse_and_reset_alone() -> None:
    message = changed("client.py, _Parser as Client._ps,", "Client calling _ps.parse and _ps.reset", "Client._read_loop, _ps")
    assert set(re.findall(r"self\._ps\.(\w+)", source(library.Client))) == {"parse", "reset"}, message
    assert parameters(Parser.parse) == ["self", "data"], message
    assert inspect.iscoroutinefunction(Parser.parse), message
    assert parameters(Parser.reset) == ["self"], message
    assert "except errors.ProtocolError" in source(library.Client._read_loop), message


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        ("_process_msg", ["self", "sid", "subject", "reply", "data", "headers"]),
        ("_process_ping", ["self"]),
        ("_process_pong", ["self"]),
        ("_process_err", ["self", "err_msg"]),
        ("_process_info", ["self", "info", "initial_connection"]),
    ],
)
def test_our_reading_hands_on_what_the_library_s_reading_hands_on(member: str, expected: list[str]) -> None:
    message = changed("client.py, Client.deliver and Client.hear,", f"Client.{member}{tuple(expected[1:])}", "Parser.parse")
    found = getattr(library.Client, member, None)
    assert found is not None, message
    assert inspect.iscoroutinefunction(found), message
    assert parameters(found) == expected, message
    assert set(re.findall(r"self\.nc\.(\w+)", source(Parser))) == {
        "_process_msg", "_process_ping", "_process_pong", "_process_err", "_process_info",
    }, message  # fmt: skip


async def test_an_answer_to_a_flush_that_was_cancelled_is_taken_away_and_is_an_invalid_state() -> None:
    message = changed("client.py, Client.hear,", "Client._process_pong taking a cancelled future first", "_process_pong")
    client: Any = library.Client()
    cancelled, waiting = asyncio.Future[bool](), asyncio.Future[bool]()
    cancelled.cancel()
    client._pongs = [cancelled, waiting]
    try:
        await client._process_pong()
    except asyncio.InvalidStateError:
        await client._process_pong()
    assert waiting.done(), message


async def test_headers_are_read_where_ours_are_read() -> None:
    message = changed("client.py, Client._process_headers,", "_process_msg awaiting it with the block", "_process_msg")
    assert parameters(library.Client._process_headers) == ["self", "headers"], message
    assert "await self._process_headers(headers)" in source(library.Client._process_msg), message


def test_a_greeting_is_looked_at_before_it_is_answered() -> None:
    message = changed("client.py, Client._process_info,", "it being first in _process_connect_init", "_process_connect_init")
    text = source(library.Client._process_connect_init)
    looks = text.find("self._process_info(srv_info, initial_connection=True)")
    assert looks > 0, message
    assert looks < min(text.find("self._connect_command()"), text.find("self._transport.write(")), message


async def test_a_limit_that_the_server_states_later_is_what_the_library_compares_with() -> None:
    message = changed(
        "client.py, Client._process_info,", "publish comparing with _max_payload", "Client.publish, _process_info"
    )
    assert "if payload_size > self._max_payload:" in source(library.Client.publish), message
    assert "_max_payload" not in source(library.Client._process_info), message
    client: Any = Client(None)
    client._current_server = library.Srv(urlparse("nats://somewhere:4222"))
    await client._process_info({"max_payload": 1 << 20}, initial_connection=True)
    await client._process_info({"max_payload": 1 << 16})
    assert (client.max_payload, client.largest_bytes) == (1 << 16, 1 << 20), message


async def test_the_library_uses_the_transport_that_is_there() -> None:
    message = changed(
        "client.py, Client._transport, and tcp.py", "_connect_to_server keeping a true transport", "_connect_to_server"
    )

    class Noted(TcpTransport):
        async def connect(self, uri: Any, buffer_size: int, connect_timeout: float) -> None:
            self.asked = uri.hostname, uri.port, connect_timeout

    client: Any = Client(None)
    client._transport = noted = Noted()
    client.options["connect_timeout"] = 7
    await client._connect_to_server(library.Srv(urlparse("nats://somewhere:4222")))
    assert client._transport is noted, message
    assert noted.asked == ("somewhere", 4222, 7), message


def test_a_transport_has_the_methods_that_the_library_calls() -> None:
    message = changed("tcp.py, TcpTransport,", "nats.aio.transport.Transport", "its abstract methods and _connect_to_server")
    called = set(re.findall(r"self\._transport\.(\w+)", source(library.Client)))
    assert called <= Transport.__abstractmethods__ <= set(dir(TcpTransport)), message
    for name in sorted(Transport.__abstractmethods__):
        theirs, ours = (parameters(getattr(kind, name)) for kind in (Transport, TcpTransport))
        assert theirs == ours, f"{message}: {name}"


def test_a_key_is_sent_with_a_signature_that_is_made_elsewhere() -> None:
    message = changed("client.py, Client._public_nkey,", "_connect_command sending it as nkey", "_connect_command")
    client: Any = library.Client()
    client._auth_configured, client._public_nkey = True, "U123"
    client._server_info, client._signature_cb = {"nonce": "abc"}, lambda nonce: b"signed " + nonce.encode()
    client.options = {"verbose": False, "pedantic": False, "name": None, "no_echo": None, "token": None}
    command = client._connect_command()
    assert b'"nkey": "U123"' in command, message
    assert b'"sig": "signed abc"' in command, message


async def test_pings_that_were_not_answered_are_counted_where_ours_sets_it_back() -> None:
    message = changed("client.py, Client.heard,", "_ping_interval counting in _pings_outstanding", "Client._ping_interval")
    client: Any = Client(None)
    client._pings_outstanding = 2
    client.heard()
    assert client._pings_outstanding == 0, message
    text = source(library.Client._ping_interval)
    assert "self._pings_outstanding += 1" in text, message
    assert 'self._pings_outstanding > self.options["max_outstanding_pings"]' in text, message


def test_a_connection_is_remade_by_one_task_that_closes_its_transport_first() -> None:
    message = changed(
        "client.py, Client._attempt_reconnect and Client.close,", "_reconnection_task running _attempt_reconnect",
        "Client._process_op_err and _attempt_reconnect",
    )  # fmt: skip
    assert parameters(library.Client._attempt_reconnect) == ["self"], message
    begins = "self._reconnection_task = asyncio.get_running_loop().create_task(self._attempt_reconnect())"
    assert begins in source(library.Client._process_op_err), message
    text = source(library.Client._attempt_reconnect)
    assert 0 < text.find("self._transport.close()") < text.find("await self._transport.wait_closed()"), message
    assert "except asyncio.CancelledError" in text, message


def test_the_pause_between_two_attempts_is_read_at_each_of_them() -> None:
    message = changed(
        "opening.py, Opening._turn_away,", 'options["reconnect_time_wait"] at each attempt', "_select_next_server"
    )
    assert 'self.options["reconnect_time_wait"]' in source(library.Client._select_next_server), message


def test_no_other_private_member_of_the_library_is_used() -> None:
    """A new use belongs into ``client.py``, with a test here."""
    theirs = set(re.findall(r"self\.(_[a-z]\w*)", source(library.Client))) | set(dir(library.Client))
    used = set(re.findall(r"(?:self|super\(\))\.(_[a-z]\w*)", (NATS / "client.py").read_text()))
    assert used & theirs == {
        "_ps", "_process_msg", "_process_ping", "_process_pong", "_process_err", "_process_info", "_transport",
        "_public_nkey", "_pings_outstanding", "_attempt_reconnect", "_reconnection_task", "_max_payload",
    }  # fmt: skip
    of_the_library = re.compile(r"\b(?:client|control|bulk|subscription|message|raw|reply|answer|api|error)\._[a-z]\w*")
    for path in sorted(NATS.glob("*.py")):
        assert not of_the_library.findall(path.read_text()), path.name
