"""Which list of identities each server of a folder goes by, asked of the servers themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from diloco.errors import BrokerError, SettingsError
from diloco.nats import identity
from diloco.nats.identity import Identity
from diloco.nats.opening import checked
from diloco.nats.server_list import ServerList
from diloco_ops.broker.probe import Probe
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.permissions import CONTROL
from diloco_ops.keys.roster import ServerEntry

LOGIN_S = 5.0  # several round trips over the slowest link that a run bears
PORT, CONTROL_PORT = 4222, 4223  # as deploy/datacenter publishes them
ASKING = ("operator", "observer")  # roles that every server knows, and that people have


@dataclass(frozen=True)
class ServerStatus:
    """One server: the list that the folder has for it, and the one that it goes by, for people."""

    name: str
    here: str
    there: str
    verdict: str
    current: bool


def asking_identity(folder: Folder, file: Path | None) -> Identity:
    """Return the identity to ask servers by: of a file, else an operator's or an observer's of the folder.

    Raises:
        SettingsError: there is none, or it cannot be used.
    """
    if file is not None:
        return identity.of_command(file, folder.roster.run)
    now = datetime.now(UTC)
    for role in ASKING:
        for entry in folder.roster.identities:
            own = folder.identity_file(entry.name)
            if entry.role == role and not entry.revoked and entry.expires > now and own.exists():
                return identity.of_command(own, folder.roster.run)
    raise SettingsError(
        f"{folder.path}: has no identity file of an operator or observer, which is needed to ask servers: give one with "
        f"--identity, or make one with 'diloco keys add {folder.path} operator NAME'"
    )


def addresses(folder: Folder, given: list[str]) -> dict[str, str]:
    """Return each server's URL: as ``given`` (NAME=URL), else its first host with the port of ``deploy/datacenter``.

    Raises:
        SettingsError: what is given names no server of the folder, or no URL of NATS.
    """
    found = {server.name: _address(server) for server in folder.roster.servers}
    for text in given:
        name, equals, url = text.partition("=")
        if not equals or name not in found:
            raise SettingsError(f"--at {text}: expected NAME=tls://HOST:PORT, of one of {', '.join(found) or 'no server'}")
        found[name] = url
    for url in found.values():
        checked(url)
    return found


def _address(server: ServerEntry) -> str:
    host = f"[{server.hosts[0]}]" if ":" in server.hosts[0] else server.hosts[0]
    return f"tls://{host}:{CONTROL_PORT if server.serves == [CONTROL] else PORT}"


async def ask_servers(folder: Folder, own: Identity, urls: Mapping[str, str]) -> list[ServerStatus]:
    """Ask all servers of a folder at once."""
    return list(await asyncio.gather(*(_ask(server, own, urls[server.name]) for server in folder.roster.servers)))


async def _ask(server: ServerEntry, own: Identity, url: str) -> ServerStatus:
    here = "none" if server.list_number is None else str(server.list_number)
    try:
        probe = await Probe.open(checked(url), f"{own.name}-status", own, LOGIN_S)
        try:
            found = await probe.server_list()
        finally:
            await probe.transport.close()
    except BrokerError as error:
        return ServerStatus(server.name, here, "unknown", str(error), current=False)
    there = "of before" if found is None else str(found.number)
    verdict = judge(server, found, url)
    return ServerStatus(server.name, here, there, verdict or "has the newest list", current=not verdict)


def judge(server: ServerEntry, found: ServerList | None, url: str) -> str:
    """Return what is wrong with the list that a server goes by, and what to do; empty if it is the folder's newest."""
    hand = "hand over its auth.conf, and reload it"
    if server.list_number is None:
        return "the folder was written before lists had numbers: diloco keys refresh"
    if found is None:
        return f"behind, its list was written before lists had numbers: {hand}"
    if found.server != server.name:
        return f"{url} is server {found.server}: give the address of {server.name} with --at {server.name}=tls://HOST:PORT"
    if found.number < server.list_number:
        return f"behind: {hand}"
    if found.number > server.list_number or found.digest != server.list_digest:
        return (
            "newer than this folder, which is therefore an older copy: use the newer folder, or number the lists above "
            f"the server's with 'diloco keys refresh --above {found.number}', and check who is in them"
        )
    return ""
