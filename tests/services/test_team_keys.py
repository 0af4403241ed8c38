"""A real server and a real member whose private keys their team made, and their operator has never seen."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.made.command_line import Command, commanding
from tests.pace import DEADLINE_S

from diloco.nats import identity
from diloco.nats.server_list import ask_list
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco_ops.broker.server import Server
from diloco_ops.keys.keys_command import keys


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with commanding(keys, ("keys",), 200, tmp_path, monkeypatch, capfd) as made:
        yield made


def typed(command: Command, *lines: str) -> None:
    for line in lines:
        ended = command(*line.split())
        assert ended.code == 0, ended


def test_a_teams_server_and_members_work_with_keys_that_only_the_team_has(command: Command, tmp_path: Path) -> None:
    typed(
        command,
        "init op --run demo --region us --region eu",
        "add op operator ada",
        "request team server nats-eu --run demo --serves eu --host 127.0.0.1",
        "request team syncer syncer-eu --run demo --region eu",
        "sign op team/requests/nats-eu.request team/requests/syncer-eu.request",
        "complete team op/answers/nats-eu.answer op/answers/syncer-eu.answer",
    )
    own = tmp_path / "team" / "servers" / "nats-eu"
    server = Server(tmp_path / "nats", keys=own)
    server.start()
    try:

        def newest() -> bool:
            return command("status", "op", f"--at=nats-eu={server.url}").code == 0

        assert newest()
        assert (
            list_of(server, tmp_path / "team/identities/syncer-eu.identity") == 1
        )  # a server is signed last, and has all that was signed with it
        typed(command, "revoke op syncer-eu")
        assert not newest()
        shutil.copy(tmp_path / "op/servers/nats-eu/auth.conf", own)  # as bundle --lists does
        server.reload()
        assert newest()
    finally:
        server.kill()


def list_of(server: Server, file: Path) -> int:
    """The number of the server's list, as a member hears it."""

    async def ask() -> int:
        known = identity.load(file)
        link = await NatsTransport.open(server.url, server.url, known.name, get_logger(), DEADLINE_S, identity=known)
        try:
            found = await ask_list(link.bulk, known.name)
        finally:
            await link.close()
        assert found is not None
        assert found.server == "nats-eu"
        return found.number

    return asyncio.run(ask())
