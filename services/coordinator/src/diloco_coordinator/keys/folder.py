"""The operator's folder: a run's authority, its roster, and what each server and each process gets of it.

keys.toml                      the roster, without secrets
ca.pem  ca.key                 the authority, whose key stays here
identities/NAME.identity       for one process
servers/NAME/                  for one server: ca.pem, server.pem, server.key, auth.conf
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from diloco import files
from diloco.errors import SettingsError
from diloco.identity import FORMAT, OTHERS_MODES
from diloco.nkey import NatsKey
from diloco_coordinator.keys import roster
from diloco_coordinator.keys.permissions import MEMBERS, crossing, permissions
from diloco_coordinator.keys.pki import Authority, Issued
from diloco_coordinator.keys.roster import IdentityEntry, Roster, ServerEntry

SECRET, PUBLIC = 0o600, 0o644


class Folder:
    """One run's keys. What it writes it writes before the roster, which says that it is there."""

    def __init__(self, path: Path, listed: Roster, authority: Authority) -> None:
        self.path, self.roster, self._authority = path, listed, authority

    @classmethod
    def make(cls, path: Path, run: str, regions: Sequence[str]) -> Folder:
        """A new folder.

        Raises:
            SettingsError: there is something already.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise SettingsError(f"{path}: is there, and not empty; keys are made in a folder of their own")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        made = cls(path, Roster(run=run, regions=list(regions)), Authority.new(run))
        _write(path / "ca.key", made._authority.private_key, SECRET)
        _write(path / "ca.pem", made._authority.certificate, PUBLIC)
        made._save(made.roster)
        return made

    @classmethod
    def open(cls, path: Path) -> Folder:
        """A folder that was made before.

        Raises:
            SettingsError: something of it is missing or damaged, or others of this machine may read its secrets.
        """
        listed = roster.load(path)
        key = path / "ca.key"
        try:
            mode = stat.S_IMODE(key.stat().st_mode)
            if mode & OTHERS_MODES:
                raise SettingsError(f"{key}: has mode {mode:04o}: others on this machine can read it; chmod 600 {key}")
            return cls(path, listed, Authority.of((path / "ca.pem").read_bytes(), key.read_bytes()))
        except OSError as error:
            raise SettingsError(f"{error.filename}: cannot be read: {error.strerror}; without it no key can be made") from None
        except ValueError as error:
            raise SettingsError(f"{path}: ca.pem or ca.key is damaged: {error}; put them back, or make a new folder") from None

    def identity_file(self, name: str) -> Path:
        return self.path / "identities" / f"{name}.identity"

    def server_folder(self, name: str) -> Path:
        return self.path / "servers" / name

    def put_server(self, name: str, hosts: list[str], serves: list[str], expires: datetime) -> ServerEntry:
        """Make a server's keys, in the place of those that it has."""
        issued = self._authority.server(name, self.roster.run, hosts, expires)
        entry = ServerEntry(name=name, serial=issued.serial, expires=issued.expires, hosts=hosts, serves=serves)
        target = self.server_folder(name)
        _write(target / "ca.pem", self._authority.certificate, PUBLIC)
        _write(target / "server.pem", issued.certificate, PUBLIC)
        _write(target / "server.key", issued.private_key, SECRET)
        others = [server for server in self.roster.servers if server.name != name]
        self._save(self.roster.model_copy(update={"servers": sorted([*others, entry], key=lambda server: server.name)}))
        return entry

    def put_identity(self, entry: IdentityEntry) -> IdentityEntry:
        """Make an identity's keys, in the place of those that it has; what ``entry`` says of keys is not heeded."""
        issued, key = self._authority.client(entry.name, self.roster.run, entry.role, entry.expires), NatsKey.new()
        made = {"serial": issued.serial, "expires": issued.expires, "public_key": key.public_key}
        entry = entry.model_copy(update=made)
        _write(self.identity_file(entry.name), _identity(self.roster.run, entry, issued, key, self._authority), SECRET)
        self.replace(entry)
        return entry

    def replace(self, *entries: IdentityEntry) -> None:
        """Have the roster, and the servers' lists, say this of these identities."""
        named = {entry.name: entry for entry in self.roster.identities} | {entry.name: entry for entry in entries}
        self._save(self.roster.model_copy(update={"identities": [named[name] for name in sorted(named)]}))

    def _save(self, listed: Roster) -> None:
        self.roster = listed
        for server in listed.servers:
            _write(self.server_folder(server.name) / "auth.conf", authorization(listed, server), PUBLIC)
        _write(self.path / roster.FILE, roster.text(listed), PUBLIC)


def authorization(listed: Roster, server: ServerEntry) -> str:
    """A server's ``auth.conf``: its accounts, who may connect, and what each may do."""
    known, crosses = listed.known_to(server), crossing(listed.run, listed.regions, server.serves)
    run = ["    jetstream: enabled", *_users(listed, server, [entry for entry in known if entry.role not in MEMBERS])]
    members = _users(listed, server, [entry for entry in known if entry.role in MEMBERS])
    services = [
        (f'{{ service: "{subject}", response_type: stream }}', _imported("service", "RUN", subject))
        for subject in crosses.services
    ]
    down = [(f'{{ stream: "{subject}" }}', _imported("stream", "RUN", subject)) for subject in crosses.down]
    up = [(f'{{ stream: "{subject}" }}', _imported("stream", "MEMBERS", subject)) for subject in crosses.up]
    run += _listed("exports", [there for there, _ in services + down]) + _listed("imports", [here for _, here in up])
    members += _listed("exports", [there for there, _ in up]) + _listed("imports", [here for _, here in services + down])
    head = [f"# run {listed.run}, server {server.name}: written by diloco keys", "authorization { timeout: 5 }", "accounts {"]
    return "\n".join([*head, "  RUN {", *run, "  }", "  MEMBERS {", *members, "  }", "}"]) + "\n"


def _imported(kind: str, account: str, subject: str) -> str:
    return f'{{ {kind}: {{ account: {account}, subject: "{subject}" }} }}'


def _users(listed: Roster, server: ServerEntry, entries: list[IdentityEntry]) -> list[str]:
    lines = ["    users: ["]
    for entry in entries:
        allowed = permissions(entry.who, listed.run, listed.regions, server.serves)
        lines += [f"      # {entry.name}: {entry.role}", f"      {{ nkey: {entry.public_key}, permissions: {{"]
        for what, subjects in (("publish", allowed.publish), ("subscribe", allowed.subscribe)):
            lines += [f"        {what}: {{ allow: [", *(f'          "{subject}"' for subject in subjects), "        ] }"]
        lines += ["      } }"]
    return [*lines, "    ]"]


def _listed(what: str, items: list[str]) -> list[str]:
    return [f"    {what}: [", *(f"      {item}" for item in items), "    ]"]


def _identity(run: str, entry: IdentityEntry, issued: Issued, key: NatsKey, authority: Authority) -> str:
    """An identity file. OpenSSL reads the blocks in it in this order: the process's certificate first, the authority last."""
    values = {"run": run, "role": entry.role, "name": entry.name, "region": entry.region, "public_key": key.public_key}
    return "\n".join(
        [
            "# Whoever can read this file can be this process: hand it over by a safe way, and keep no copy.",
            f"format = {FORMAT}",
            *(f'{name} = "{value}"' for name, value in values.items() if value is not None),
            f"founder = {str(entry.founder).lower()}",
            f"expires = {roster.moment(entry.expires)}",
            f'seed = "{key.seed}"',
            f'certificate = """\n{issued.certificate}"""',
            f'private_key = """\n{issued.private_key}"""',
            f'ca = """\n{authority.certificate}"""\n',
        ]
    )


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file that nobody can read meanwhile who may not read it afterwards."""

    def write(draft: Path) -> None:
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)

    try:
        files.replace(path, write)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None
