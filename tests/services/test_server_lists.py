"""Which list of identities a server goes by: it says so itself, to every identity, and ``diloco keys status`` compares."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
from tests.made.command_line import Command, commanding
from tests.pace import DEADLINE_S
from tests.services.cluster import Events
from tests.services.secured import guest, make_keys, put, serving

from diloco.nats import identity, server_list
from diloco.nats.identity import ROLES
from diloco.nats.server_list import ServerList, ask_list
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco.service.metrics import Exporter
from diloco.settings.service import SyncerSettings
from diloco_ops.broker.server import Server
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.keys_command import keys
from diloco_ops.keys.permissions import CONTROL, Who

RUN = "demo"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with commanding(keys, ("keys",), 200, tmp_path, monkeypatch, capfd) as made:
        yield made


def listed(folder: Folder, name: str) -> ServerList:
    entry = Folder.open(folder.path).roster.server(name)
    assert entry is not None
    assert entry.list_number is not None
    assert entry.list_digest is not None
    return ServerList(name, entry.list_number, entry.list_digest)


def of_before(folder: Folder, name: str) -> None:
    """Have a server's list be as versions before wrote it."""
    path = folder.server_folder(name) / "auth.conf"
    path.write_text(re.sub(r'\n      "_INBOX_.*', "", path.read_text()))


async def test_a_server_whose_list_has_no_limits_is_named_by_those_whose_messages_it_should_limit(tmp_path: Path) -> None:
    limited = [Who(f"a-{role}", role) for role in ROLES]
    folder = make_keys(tmp_path / "keys", RUN, [*limited, Who("a-founder", "learner", None, founder=True)])
    names = {who.name for who in limited} | {"a-founder"}

    async def told() -> set[str]:
        found = set()
        for name in names:
            async with guest(server, folder, name) as visitor:
                found |= {name} if visitor.count("server_without_limits") else set()
        return found

    with serving(folder, tmp_path / "nats") as server:
        assert await told() == set()
        path = folder.server_folder("nats") / "auth.conf"
        path.write_text(re.sub(r", max_payload: \d+", "", path.read_text()))
        server.reload()
        assert await told() == {"a-learner", "a-evaluator", "a-coordinator", "a-observer"}


async def test_a_server_says_its_lists_number_to_every_identity_and_a_reload_changes_it_at_once(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys", RUN, [Who(f"a-{role}", role) for role in ROLES])
    with serving(folder, tmp_path / "nats") as server:
        for role in ROLES:
            async with guest(server, folder, f"a-{role}") as visitor:
                assert await ask_list(visitor.link.control, f"a-{role}") == listed(folder, "nats")
        async with guest(server, folder, "a-learner") as visitor:
            before = listed(folder, "nats")
            put(folder, Who("more", "learner"))
            assert await ask_list(visitor.link.control, "a-learner") == before
            server.reload()
            after = await ask_list(visitor.link.control, "a-learner")
            assert after == listed(folder, "nats")
            assert after is not None
            assert (after.server, after.number) == ("nats", before.number + 1)
            assert visitor.link.control.stats["reconnects"] == 0
            of_before(folder, "nats")
            server.reload()
            assert await ask_list(visitor.link.control, "a-learner") is None


async def test_a_service_shows_the_numbers_as_a_metric_and_logs_that_a_list_is_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_list, "ASK_S", 0.05)
    folder = make_keys(tmp_path / "keys", RUN, [Who("a", "syncer")])
    auth, events = folder.server_folder("nats") / "auth.conf", Events()
    older = auth.read_text()
    put(folder, Who("b", "learner"))
    newest = listed(folder, "nats").number
    with serving(folder, tmp_path / "nats") as server:
        exporter = Exporter(SyncerSettings(name="a", run=RUN, region="us", nats_url=server.url), "syncer", cast(Logger, events))
        own = identity.load(folder.identity_file("a"))
        log = cast(Logger, events)
        exporter.transport = await NatsTransport.open(server.url, server.url, "a", log, DEADLINE_S, identity=own)
        exporter.far["eu"] = await NatsTransport.open_bulk(server.url, "a-eu", log, own)

        def shown(connection: str, region: str, name: str) -> float | None:
            labels = f'connection="{connection}",name="a",other_region="{region}",region="us",run="{RUN}",server="{name}"'
            found = re.search(rf"diloco_server_list_number\{{{labels}\}} (\S+)", exporter.exposition().decode())
            return None if found is None else float(found[1])

        async def until(connection: str, region: str, name: str, number: int) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while shown(connection, region, name) != number:
                    await asyncio.sleep(0.02)

        for connection, region in (("control", ""), ("bulk", ""), ("bulk", "eu")):
            await until(connection, region, "nats", newest)
        auth.write_text(older)
        server.reload()
        for connection, region in (("control", ""), ("bulk", ""), ("bulk", "eu")):
            await until(connection, region, "nats", newest - 1)
        of_before(folder, "nats")
        server.reload()
        await until("control", "", "", 0)
        await exporter.transport.close()
        assert shown("control", "", "nats") is None
        await exporter.far["eu"].close()
    changes = [(level, values) for level, event, values in events.entries if event == "server_list_changed"]
    assert ("warning", {"connection": "control", "server": "nats", "number": newest - 1, "before": newest}) in changes


def test_status_says_which_servers_are_behind(command: Command, tmp_path: Path) -> None:
    places = {"control-us": [CONTROL], "nats-eu": ["eu"], "nats-us": ["us"]}
    people = [Who("ada", "operator"), Who("toy", "learner", "us")]
    folder = make_keys(tmp_path / "k", RUN, people, regions=("us", "eu"), servers=places)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(folder, tmp_path / name, name)) for name in places}

        def status(*more: str, **urls: str) -> tuple[int, dict[str, list[str]]]:
            at = [f"--at={name}={urls.get(name, server.url)}" for name, server in servers.items()]
            ended = command("status", "k", *at, *more)
            assert ended.err == ""
            rows = [re.split(r"  +", line) for line in ended.out.splitlines()]
            assert rows[0] == ["server", "list here", "list there"]
            return ended.code, {name: rest for name, *rest in rows[1:]}

        numbers = {name: str(listed(folder, name).number) for name in places}
        assert status() == (0, {name: [number, number, "has the newest list"] for name, number in numbers.items()})

        # a learner of us concerns no server of eu, a syncer every one
        assert "nats-eu" not in command("add", "k", "learner", "one", "--region", "us").out
        said = command("revoke", "k", "toy").out
        assert "docker compose kill -s HUP control\n" in said
        assert "docker compose kill -s HUP nats\n" in said
        servers["control-us"].reload()
        code, rows = status()
        assert code == 1
        assert rows["nats-eu"][2] == rows["control-us"][2] == "has the newest list"
        assert rows["nats-us"][:2] == [str(int(numbers["nats-us"]) + 2), numbers["nats-us"]]
        assert rows["nats-us"][2].startswith("behind: hand over its auth.conf")
        servers["nats-us"].reload()
        assert status()[0] == 0

        of_before(folder, "nats-eu")
        servers["nats-eu"].reload()
        assert status()[1]["nats-eu"][1:] == [
            "of before",
            "behind, its list was written before lists had numbers: hand over its auth.conf, and reload it",
        ]
        wrong = status(**{"nats-eu": servers["nats-us"].url})[1]["nats-eu"][2]
        assert "is server nats-us: give the address of nats-eu with --at nats-eu=tls://HOST:PORT" in wrong
        check_refusals(command, folder, servers)


def check_refusals(command: Command, folder: Folder, servers: dict[str, Server]) -> None:
    """A server that is away, one that does not know who asks, and what is typed wrong."""
    at = [f"--at={name}={server.url}" for name, server in servers.items()]
    servers["nats-eu"].kill()
    put(folder, Who("bob", "observer"))
    ended = command("status", "k", *at, "--identity", "k/identities/bob.identity")
    assert ended.code == 1
    lines = {line.split()[0]: line for line in ended.out.splitlines()}
    assert "unknown" in lines["nats-eu"]
    assert "does not know the identity" in lines["nats-us"]
    for line, said in (
        (("--at=nats-ue=tls://h:1",), "expected NAME=tls://HOST:PORT, of one of control-us, nats-eu, nats-us"),
        (("--at=tls://h:1",), "expected NAME=tls://HOST:PORT"),
        (("--at=nats-us=http://h:1",), "not the address of a server"),
        (("--identity=k/identities/none.identity",), "cannot be read"),
    ):
        ended = command("status", "k", *line)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err


def test_a_folder_that_is_an_older_copy_is_said_and_its_lists_can_be_numbered_above_the_servers(
    command: Command, tmp_path: Path
) -> None:
    folder = make_keys(tmp_path / "k", RUN, [Who("ada", "operator"), Who("leaver", "learner")])
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    for name in ("leaver", "ada"):
        assert command("renew", "k", name).code == 0
    assert command("revoke", "k", "leaver").code == 0
    newest = listed(folder, "nats").number
    with serving(folder, tmp_path / "nats") as server:
        ada = folder.identity_file("ada").read_bytes()
        for path, content in before.items():
            path.write_bytes(content)
        # ada's own key is of the newer copy, as an operator has it who restores the folder
        own = tmp_path / "ada.identity"
        own.write_bytes(ada)
        own.chmod(0o600)
        asked = ("status", "k", f"--at=nats={server.url}", f"--identity={own}")
        ended = command(*asked)
        assert ended.code == 1
        assert f"'diloco keys refresh --above {newest}', and check who is in them" in ended.out
        for name in ("one", "two", "three"):  # as many lists as the other copy made: another list of the same number
            assert command("add", "k", "learner", name).code == 0
        assert listed(folder, "nats").number == newest
        assert "newer than this folder" in command(*asked).out
        assert command("refresh", "k", "--above", str(newest)).code == 0
        assert listed(folder, "nats").number == newest + 1
        server.reload()
        assert command("status", "k", f"--at=nats={server.url}").code == 0
        assert "--above -1: expected 0 to" in command("refresh", "k", "--above", "-1").err


def test_a_list_counts_up_with_its_content_alone(command: Command, tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "k", RUN, [Who("a", "learner")])
    first = listed(folder, "nats")
    for line in ("refresh k", "grant k a --min-step-s 0.01 --batch-tokens 70000", "renew k nats", "list k"):
        assert command(*line.split()).code == 0
        assert listed(folder, "nats") == first
    assert "as before" in command("refresh", "k").out
    assert command("add", "k", "syncer", "b").code == 0
    assert listed(folder, "nats").number == first.number + 1
    text = (folder.path / "keys.toml").read_text()
    (folder.path / "keys.toml").write_text(re.sub(r"list_.*\n", "", text))  # as an older version has it
    assert "has no identity file of an operator or observer" in command("status", "k").err
    assert "list 1, which is new" in command("refresh", "k").out
