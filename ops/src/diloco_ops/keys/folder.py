"""The operator's folder: a run's authority, its roster, and what each server and each process gets of it.

keys.toml                      the roster, without private keys
ca.pem  ca.key                 the authority, whose key stays here
grants.key                     its key that signs grants, which stays here too
identities/NAME.identity       for one process
servers/NAME/                  for one server: ca.pem, server.pem, server.key, auth.conf; of control servers, routes.conf
pages/NAME/                    for a page that is served over TLS: ca.pem, server.pem, server.key
"""

from __future__ import annotations

import os
import secrets
import stat
import tomllib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from diloco.errors import SettingsError
from diloco.nats import grants, identity
from diloco.nats.identity import FORMAT, OTHERS_MODES
from diloco.nats.nkey import NatsKey
from diloco.process import files
from diloco.wire.grants import Grant
from diloco_ops.keys import accounts, roster
from diloco_ops.keys.pki import Authority, Issued, for_browser, pin
from diloco_ops.keys.roster import IdentityEntry, Roster, ServerEntry

SECRET, PUBLIC = 0o600, 0o644
SIGNER = "grants.key"
PASSWORD_BYTES = 12  # of a file for a browser


class Folder:
    """One run's keys. A file is written before the roster that names it."""

    def __init__(self, path: Path, listed: Roster, authority: Authority, signer: NatsKey) -> None:
        self.path, self.roster, self._authority, self._signer = path, listed, authority, signer

    @classmethod
    def make(cls, path: Path, run: str, regions: Sequence[str]) -> Folder:
        """Make a new folder.

        Raises:
            SettingsError: there is something already.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise SettingsError(f"{path}: is there, and not empty; keys are made in a folder of their own")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        made = cls(path, Roster(run=run, regions=list(regions)), Authority.new(run), _new_signer(path))
        _write(path / "ca.key", made._authority.private_key, SECRET)
        _write(path / "ca.pem", made._authority.certificate, PUBLIC)
        made._save(made.roster)
        return made

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Open a folder that was made before.

        Raises:
            SettingsError: something of it is missing or damaged, or others of this machine may read its secrets.
        """
        listed = roster.load(path)
        key, signer = path / "ca.key", path / SIGNER
        try:
            _check_secret(key)
            authority = Authority.of((path / "ca.pem").read_bytes(), key.read_bytes())
            if not signer.exists():  # of an older version
                return cls(path, listed, authority, _new_signer(path))
            _check_secret(signer)
            return cls(path, listed, authority, NatsKey.from_seed(signer.read_text(encoding="utf-8").strip()))
        except OSError as error:
            raise SettingsError(f"{error.filename}: cannot be read: {error.strerror}; without it no key can be made") from None
        except ValueError as error:
            raise SettingsError(
                f"{path}: ca.pem, ca.key or {SIGNER} is damaged: {error}; put it back, or make a new folder"
            ) from None

    def identity_file(self, name: str) -> Path:
        return self.path / "identities" / f"{name}.identity"

    def server_folder(self, name: str) -> Path:
        return self.path / "servers" / name

    def put_server(self, name: str, hosts: list[str], serves: list[str], expires: datetime) -> ServerEntry:
        """Make a server's keys, in the place of those that it has."""
        issued = self._put_certificate(self.server_folder(name), name, hosts, expires)
        entry = ServerEntry(name=name, serial=issued.serial, expires=issued.expires, hosts=hosts, serves=serves)
        others = [server for server in self.roster.servers if server.name != name]
        self._save(self.roster.model_copy(update={"servers": sorted([*others, entry], key=lambda server: server.name)}))
        return entry

    def put_page(self, name: str, hosts: list[str], expires: datetime) -> Path:
        """Make the keys of a page; return its folder. It is in no roster: no NATS server knows of it, or lets it in."""
        target = self.path / "pages" / name
        self._put_certificate(target, name, hosts, expires)
        return target

    def _put_certificate(self, target: Path, name: str, hosts: list[str], expires: datetime) -> Issued:
        issued = self._authority.server(name, self.roster.run, hosts, expires)
        _write(target / "ca.pem", self._authority.certificate, PUBLIC)
        _write(target / "server.pem", issued.certificate, PUBLIC)
        _write(target / "server.key", issued.private_key, SECRET)
        return issued

    def put_identity(self, entry: IdentityEntry) -> IdentityEntry:
        """Make an identity's keys, in place of those that it has. ``entry``'s own keys are ignored."""
        issued, key = self._authority.client(entry.name, self.roster.run, entry.role, entry.expires), NatsKey.new()
        made = {"serial": issued.serial, "expires": issued.expires, "public_key": key.public_key}
        entry = entry.model_copy(update=made)
        values = _identity(self.roster.run, entry, issued, key, self._authority)
        _write(self.identity_file(entry.name), _identity_text(values | self._granted(entry)), SECRET)
        self.replace(entry)
        return entry

    def grant(self, entry: IdentityEntry) -> None:
        """Have a learner's identity file say what ``entry`` grants; its keys stay.

        Raises:
            SettingsError: the file is not here any more, or damaged.
        """
        path = self.identity_file(entry.name)
        if not path.exists():
            raise SettingsError(f"{path}: was handed over and is not here any more: put it back, since its keys are to stay")
        identity.load(path)
        _write(path, _identity_text(tomllib.loads(path.read_text(encoding="utf-8")) | self._granted(entry)), SECRET)
        self.replace(entry)

    def _granted(self, entry: IdentityEntry) -> dict[str, str]:
        """Return the values of an identity file that show, and check, what learners were granted."""
        values = {"authority": self._signer.public_key}
        if entry.role == "learner":
            grant = Grant(self.roster.run, entry.name, entry.public_key, entry.batch_tokens, entry.min_step_s)
            values["grant"] = grants.to_text(grants.sign(grant, self._signer))
        return values

    def replace(self, *entries: IdentityEntry) -> None:
        """Have the roster, and the servers' lists, say this of these identities."""
        named = {entry.name: entry for entry in self.roster.identities} | {entry.name: entry for entry in entries}
        self._save(self.roster.model_copy(update={"identities": [named[name] for name in sorted(named)]}))

    def add_region(self, name: str) -> None:
        """Have the roster, and the servers' lists, know a region more."""
        self._save(self.roster.model_copy(update={"regions": [*self.roster.regions, name]}))

    def refresh(self) -> None:
        """Write the servers' files again as this version has them."""
        self._save(self.roster)

    def _save(self, listed: Roster) -> None:
        self.roster = listed = listed.numbered()
        pins = [self._pin(server) for server in listed.servers if server.is_control]
        for server in listed.servers:
            _write(self.server_folder(server.name) / "auth.conf", authorization(listed, server), PUBLIC)
            if server.is_control:
                _write(self.server_folder(server.name) / "routes.conf", routes(listed, pins), PUBLIC)
        _write(self.path / roster.FILE, roster.text(listed), PUBLIC)

    def _pin(self, server: ServerEntry) -> str:
        path = self.server_folder(server.name) / "server.pem"
        try:
            return pin(path.read_bytes())
        except (OSError, ValueError) as error:
            raise SettingsError(f"{path}: cannot be read: {error}; put it back, or make a new folder") from None


def routes(listed: Roster, pins: Sequence[str]) -> str:
    """Return ``routes.conf``, for the ``tls`` block of the cluster of control servers: whose certificates do for a route."""
    items = [f'  "{one}"' for one in pins]
    return "\n".join([f"# control servers of run {listed.run}: written by diloco keys", "pinned_certs: [", *items, "]"]) + "\n"


def authorization(listed: Roster, server: ServerEntry) -> str:
    """Return a server's ``auth.conf``: who may connect, and what each may do."""
    known = listed.known_to(server)
    numbered = {entry.account: entry.who for entry in known if entry.account is not None}
    made = accounts.accounts(listed.run, listed.regions, server.serves, numbered, len(listed.identities))
    head = f"# run {listed.run}, server {server.name}: written by diloco keys\nauthorization {{ timeout: 5 }}\n"
    return head + accounts.authorization(made)


def _identity(run: str, entry: IdentityEntry, issued: Issued, key: NatsKey, authority: Authority) -> dict[str, Any]:
    """Return the values of an identity file but for what is granted."""
    values = {"format": FORMAT, "run": run, "role": entry.role, "name": entry.name, "region": entry.region}
    values |= {"public_key": key.public_key, "founder": entry.founder, "expires": entry.expires, "seed": key.seed}
    values |= {"processes": entry.processes}
    return values | {"certificate": issued.certificate, "private_key": issued.private_key, "ca": authority.certificate}


def _identity_text(values: Mapping[str, Any]) -> str:
    """Return the text of an identity file.

    OpenSSL reads the blocks in it in this order: the process's certificate first, the authority last.
    """
    head = "# A reader of this file can act as this process: hand it over by a safe way, and keep no copy."
    there = {name: value for name, value in values.items() if value is not None}
    return f"{head}\n{tomli_w.dumps(there, multiline_strings=True)}"


def _check_secret(path: Path) -> None:
    """Refuse a secret that others may read."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & OTHERS_MODES:
        raise SettingsError(f"{path}: has mode {mode:04o}: others on this machine can read it; chmod 600 {path}")


def _new_signer(folder: Path) -> NatsKey:
    """Make the key that signs grants."""
    key = NatsKey.new()
    _write(folder / SIGNER, f"{key.seed}\n", SECRET)
    return key


def write_for_browser(file: Path, out: Path) -> str:
    """Write the certificate of an identity file as a browser takes it, under a password; return that.

    Raises:
        SettingsError: it is no identity that can be used, or ``out`` cannot be written.
    """
    known = identity.load(file)
    values, password = tomllib.loads(file.read_text(encoding="utf-8")), secrets.token_hex(PASSWORD_BYTES)
    try:
        data = for_browser(values["certificate"], values["private_key"], known.name, password.encode())
    except ValueError as error:
        raise SettingsError(f"identity {file}: {error}; make it again with 'diloco keys add'") from None
    _write(out, data, SECRET)
    return password


def _write(path: Path, text: str | bytes, mode: int) -> None:
    """Write a file that has its final access rights from the beginning."""

    def write(draft: Path) -> None:
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text.encode() if isinstance(text, str) else text)

    try:
        files.replace(path, write)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None
