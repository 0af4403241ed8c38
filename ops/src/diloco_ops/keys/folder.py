"""The operator's folder: a run's authority, its roster, and what each server and each process gets of it.

keys.toml                      the roster, without private keys
ca.pem  ca.key                 the authority, whose key stays here
grants.key                     its key that signs grants, which stays here too
identities/NAME.identity       for one process
servers/NAME/                  for one server: ca.pem, server.pem, server.key, auth.conf; of control servers, routes.conf
answers/NAME.answer            to a request for one of these, whose private keys are not here but where it was made
pages/NAME/                    for a page that is served over TLS: ca.pem, server.pem, server.key
"""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey as PublicKey

from diloco.errors import SettingsError
from diloco.nats import grants, identity
from diloco.nats.identity import FORMAT
from diloco.nats.nkey import NatsKey
from diloco.nats.server_list import DIGEST_LETTERS, ServerList
from diloco.wire.grants import Grant
from diloco_ops.keys import accounts, passphrase, pki, roster
from diloco_ops.keys.pki import Authority, Issued, for_browser, pin
from diloco_ops.keys.requests import SERVER_FILES, Request, SignedAnswer, with_secrets
from diloco_ops.keys.roster import IdentityEntry, IdentityRoster, ServerEntry
from diloco_ops.keys.writing import PUBLIC, SECRET, check_secret, identity_text, make_private, write

SIGNER = "grants.key"
PASSWORD_BYTES = 12  # of a file for a browser


class Folder:
    """One run's keys. A file is written before the roster that names it."""

    def __init__(self, path: Path, listed: IdentityRoster, authority: Authority, signer: NatsKey) -> None:
        self.path, self.roster, self.authority, self._signer = path, listed, authority, signer
        self._relisted: set[str] = set()  # servers whose lists have been changed since

    @classmethod
    def make(cls, path: Path, run: str, regions: Sequence[str], passphrase: bytes | None = None) -> Folder:
        """Make a new folder; ``passphrase``: of its authority's key.

        Raises:
            SettingsError: there is something already.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise SettingsError(f"{path}: exists and is not empty; give a new or empty folder for the keys")
        make_private(path)
        key = pki.new_key()
        made = cls(path, IdentityRoster(run=run, regions=list(regions)), Authority.new(run, key), _new_signer(path))
        write(path / "ca.key", _authority_text(key, passphrase), SECRET)
        write(path / "ca.pem", made.authority.certificate, PUBLIC)
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
            check_secret(key)
            authority = Authority.of((path / "ca.pem").read_bytes(), key.read_bytes(), passphrase.known)
            if not signer.exists():  # of an older version
                return cls(path, listed, authority, _new_signer(path))
            check_secret(signer)
            return cls(path, listed, authority, NatsKey.from_seed(signer.read_text(encoding="utf-8").strip()))
        except OSError as error:
            raise SettingsError(f"{error.filename}: cannot be read: {error.strerror}; without it no key can be made") from None
        except ValueError as error:
            raise SettingsError(
                f"{path}: ca.pem, ca.key or {SIGNER} is damaged: {error}; restore it from a backup, or make a new folder"
            ) from None

    def identity_file(self, name: str) -> Path:
        return self.path / "identities" / f"{name}.identity"

    def answer_file(self, name: str) -> Path:
        return self.path / "answers" / f"{name}.answer"

    def server_folder(self, name: str) -> Path:
        return self.path / "servers" / name

    @property
    def relisted(self) -> list[ServerEntry]:
        """The servers whose lists have been changed since the folder was opened."""
        return [server for server in self.roster.servers if server.name in self._relisted]

    def protect(self, new: bytes | None) -> None:
        """Put the authority's key under another passphrase, or under none.

        Raises:
            SettingsError: the one that it is under now is another one.
        """
        path = self.path / "ca.key"
        text = path.read_bytes()
        key = pki.unlocked(text, passphrase.known()) if pki.is_protected(text) else pki.private_key(text.decode())
        write(path, _authority_text(key, new), SECRET)

    def put_server(self, name: str, hosts: list[str], serves: list[str], expires: datetime) -> ServerEntry:
        """Make a server's keys, in the place of those that it has."""
        target, key = self.server_folder(name), pki.new_key()
        issued = self._put_certificate(target, name, hosts, expires, key.public_key())
        write(target / "server.key", pki.plain_text(key), SECRET)
        self.answer_file(name).unlink(missing_ok=True)
        return self._list_server(name, issued, hosts, serves)

    def sign_server(self, request: Request, serves: list[str], expires: datetime) -> ServerEntry:
        """Sign the certificate that a server's team asks for, and write the answer; the private key is only the team's."""
        name, hosts, target = request.name, request.hosts, self.server_folder(request.name)
        issued = self._put_certificate(target, name, hosts, expires, request.tls_key)
        (target / "server.key").unlink(missing_ok=True)  # of a certificate before
        entry = self._list_server(name, issued, hosts, serves)
        texts = {part.name: part.read_text(encoding="utf-8") for part in sorted(target.iterdir()) if part.name in SERVER_FILES}
        write(self.answer_file(name), SignedAnswer.of_server(self.roster.run, name, texts).text(), SECRET)
        return entry

    def _list_server(self, name: str, issued: Issued, hosts: list[str], serves: list[str]) -> ServerEntry:
        made = {"serial": issued.serial, "expires": issued.expires, "hosts": hosts, "serves": serves}
        before = self.roster.server(name)
        entry = ServerEntry(name=name, **made) if before is None else before.model_copy(update=made)
        self._save(self.roster.replaced(entry))
        return entry

    def put_page(self, name: str, hosts: list[str], expires: datetime) -> Path:
        """Make the keys of a page; return its folder. It is in no roster: no NATS server knows of it, or lets it in."""
        target, key = self.path / "pages" / name, pki.new_key()
        self._put_certificate(target, name, hosts, expires, key.public_key())
        write(target / "server.key", pki.plain_text(key), SECRET)
        return target

    def _put_certificate(self, target: Path, name: str, hosts: list[str], expires: datetime, key: PublicKey) -> Issued:
        issued = self.authority.server(name, self.roster.run, hosts, expires, key)
        write(target / "ca.pem", self.authority.certificate, PUBLIC)
        write(target / "server.pem", issued.certificate, PUBLIC)
        return issued

    def put_identity(self, entry: IdentityEntry) -> IdentityEntry:
        """Make an identity's keys, in place of those that it has. ``entry``'s own keys are ignored."""
        own, key = pki.new_key(), NatsKey.new()
        entry, values = self._signed(entry.model_copy(update={"public_key": key.public_key}), own.public_key())
        write(self.identity_file(entry.name), identity_text(with_secrets(values, key.seed, pki.plain_text(own))), SECRET)
        self.answer_file(entry.name).unlink(missing_ok=True)
        self.replace(entry)
        return entry

    def sign_identity(self, entry: IdentityEntry, key: PublicKey) -> IdentityEntry:
        """Sign the certificate of a key, and write the answer, which is the identity without its private keys."""
        entry, values = self._signed(entry, key)
        write(
            self.answer_file(entry.name),
            SignedAnswer.of_identity(self.roster.run, entry.role, entry.name, values).text(),
            SECRET,
        )
        self.identity_file(entry.name).unlink(missing_ok=True)  # of keys before, which were made here
        self.replace(entry)
        return entry

    def _signed(self, entry: IdentityEntry, key: PublicKey) -> tuple[IdentityEntry, dict[str, Any]]:
        """Return an identity with its new certificate, and the values of its file without private keys."""
        run, authority = self.roster.run, self.authority
        issued = authority.client(entry.name, run, entry.role, entry.expires, key)
        entry = entry.model_copy(update={"serial": issued.serial, "expires": issued.expires})
        values = {"format": FORMAT, "run": run, "role": entry.role, "name": entry.name, "region": entry.region}
        values |= {"public_key": entry.public_key, "founder": entry.founder, "expires": entry.expires}
        values |= {"processes": entry.processes, "certificate": issued.certificate, "ca": authority.certificate}
        return entry, values | self._granted(entry)

    def grant(self, entry: IdentityEntry) -> Path:
        """Write the grant of ``entry`` into a learner's identity file, or into the answer to its request. The keys stay.

        Returns:
            That file.

        Raises:
            SettingsError: neither is here any more, or it is damaged.
        """
        path, answer = self.identity_file(entry.name), self.answer_file(entry.name)
        granted = self._granted(entry)
        if not path.exists() and answer.exists():
            known = SignedAnswer.read(answer)
            values = known.identity_values | granted
            write(answer, SignedAnswer.of_identity(known.run, known.kind, known.name, values).text(), SECRET)
            self.replace(entry)
            return answer
        if not path.exists():
            raise SettingsError(f"{path}: is missing, and the grant is written into it: put the file back")
        identity.load(path)
        write(path, identity_text(tomllib.loads(path.read_text(encoding="utf-8")) | granted), SECRET)
        self.replace(entry)
        return path

    def forget(self, name: str) -> None:
        """Remove what is here to be handed over to a process."""
        self.identity_file(name).unlink(missing_ok=True)
        self.answer_file(name).unlink(missing_ok=True)

    def _granted(self, entry: IdentityEntry) -> dict[str, str]:
        """Return the values of an identity file that show, and check, what learners were granted."""
        values = {"authority": self._signer.public_key}
        if entry.role == "learner":
            grant = Grant(self.roster.run, entry.name, entry.public_key, entry.batch_tokens, entry.min_step_s)
            values["grant"] = grants.to_text(grants.sign(grant, self._signer))
        return values

    def replace(self, *entries: IdentityEntry) -> None:
        """Write these identities into the roster and the servers' lists."""
        named = {entry.name: entry for entry in self.roster.identities} | {entry.name: entry for entry in entries}
        self._save(self.roster.model_copy(update={"identities": [named[name] for name in sorted(named)]}))

    def add_region(self, name: str) -> None:
        """Add a region to the roster and the servers' lists."""
        self._save(self.roster.model_copy(update={"regions": [*self.roster.regions, name]}))

    def refresh(self, above: int = 0) -> None:
        """Write the servers' files again as this version has them; the lists get new numbers if ``above`` is a larger one."""
        behind = [server for server in self.roster.servers if (server.list_number or 0) <= above] if above else []
        self._save(self.roster.replaced(*(server.model_copy(update=_list_after(above)) for server in behind)))

    def _save(self, listed: IdentityRoster) -> None:
        listed = listed.numbered()
        before = {server.name: server for server in listed.servers}
        self.roster = listed = listed.replaced(*(counted(listed, server) for server in listed.servers))
        self._relisted |= {server.name for server in listed.servers if server != before[server.name]}
        pins = [self._pin(server) for server in listed.servers if server.is_control]
        for server in listed.servers:
            write(self.server_folder(server.name) / "auth.conf", authorization(listed, server), PUBLIC)
            if server.is_control:
                write(self.server_folder(server.name) / "routes.conf", routes(listed, pins), PUBLIC)
        write(self.path / roster.FILE, roster.text(listed), PUBLIC)

    def _pin(self, server: ServerEntry) -> str:
        path = self.server_folder(server.name) / "server.pem"
        try:
            return pin(path.read_bytes())
        except (OSError, ValueError) as error:
            raise SettingsError(f"{path}: cannot be read: {error}; put it back, or make a new folder") from None


def routes(listed: IdentityRoster, pins: Sequence[str]) -> str:
    """Return ``routes.conf``, for the ``tls`` block of the cluster of control servers: whose certificates do for a route."""
    items = [f'  "{one}"' for one in pins]
    return "\n".join([f"# control servers of run {listed.run}: written by diloco keys", "pinned_certs: [", *items, "]"]) + "\n"


def authorization(listed: IdentityRoster, server: ServerEntry) -> str:
    """Return a server's ``auth.conf``, its list: who may connect, and what each may do."""
    known = listed.known_to(server)
    numbered = {entry.account: entry.who for entry in known if entry.account is not None}
    own = ServerList(server.name, server.list_number or 0, server.list_digest or "")
    made = accounts.accounts(listed.run, listed.regions, server.serves, numbered, len(listed.identities), own)
    head = f"# run {listed.run}, {own}: written by diloco keys\nauthorization {{ timeout: 5 }}\n"
    return head + accounts.authorization(made)


def counted(listed: IdentityRoster, server: ServerEntry) -> ServerEntry:
    """Return a server with its list's number and digest, which are other ones if the list's content is."""
    text = authorization(listed, server.model_copy(update=_list_after(0)))
    digest = blake3(text.encode()).hexdigest()[:DIGEST_LETTERS]
    if digest == server.list_digest:
        return server
    return server.model_copy(update={"list_number": (server.list_number or 0) + 1, "list_digest": digest})


def _list_after(number: int) -> dict[str, int | None]:
    """Return the values of a server whose list is to get the number behind this one."""
    return {"list_number": number or None, "list_digest": None}


def _authority_text(key: pki.Key, new: bytes | None) -> str:
    return pki.plain_text(key) if new is None else pki.protected_text(key, new)


def _new_signer(folder: Path) -> NatsKey:
    """Make the key that signs grants."""
    key = NatsKey.new()
    write(folder / SIGNER, f"{key.seed}\n", SECRET)
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
    write(out, data, SECRET)
    return password
