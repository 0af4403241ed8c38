"""Keys between teams: a private key stays in the folder of the team that made it, and the authority signs a request.

===========================  =========================  ===================================================================
file                         in                         has
===========================  =========================  ===================================================================
``requests/NAME.key``        the team's folder          the private keys, until the answer is here
``requests/NAME.request``    goes to the operator       what is asked for, the public keys, and proofs that the asker has the
                                                        private ones
``answers/NAME.answer``      goes back to the team      the certificate, and all else of an identity file or a server's folder
===========================  =========================  ===================================================================

Both files are without a secret key. But the names of an identity's consumers come from its public key, so other members are not
to see them (docs/security.md). A change on the way changes the fingerprint, which both ends show to people.
"""

from __future__ import annotations

import base64
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from pydantic import BaseModel, ConfigDict, Field

from diloco.errors import SettingsError
from diloco.nats import identity
from diloco.nats.identity import Role
from diloco.nats.nkey import NatsKey, verify
from diloco.settings.run import Name, RegionName
from diloco.settings.validation import parse
from diloco.wire.process_messages import MAX_PROCESSES
from diloco_ops.keys import pki
from diloco_ops.keys.roster import HOST
from diloco_ops.keys.writing import PUBLIC, SECRET, check_secret, identity_text, make_private, toml_text, write

PURPOSE = "diloco 2026 request for keys"  # of a hash, as BLAKE3 wants it
MAX_REQUEST_BYTES, MAX_ANSWER_BYTES = 1 << 16, 1 << 26  # an answer to a server has its whole list
FINGERPRINT_LETTERS = 24  # 96 bits: no second file with the same one can be found
SERVER_FILES = ("ca.pem", "server.pem", "auth.conf", "routes.conf")  # all of a server's folder but its private key

Kind = Literal["server"] | Role


class _Handed(BaseModel):
    """A file that goes between teams."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    run: Name
    kind: Kind
    name: Name

    @property
    def fingerprint(self) -> str:
        """A hash of the content, for people to compare over a channel that they trust."""
        letters = _digest(self.model_dump(mode="json", exclude_none=True)).hex()[:FINGERPRINT_LETTERS]
        return "-".join(letters[at : at + 4] for at in range(0, FINGERPRINT_LETTERS, 4))


class Request(_Handed):
    """A team's request for a certificate: of a server, or of a process."""

    region: RegionName | None = None
    processes: Annotated[int, Field(ge=1, le=MAX_PROCESSES)] | None = None  # of a learner that share the identity
    hosts: list[Annotated[str, Field(pattern=HOST)]] = Field([], max_length=64)  # of a server
    serves: list[RegionName] = Field([], max_length=65)  # and the regions, or the control store, that it holds
    public_key: Annotated[str, Field(pattern=r"^U[A-Z2-7]{55}$")] | None = None  # of a process, its nkey
    certificate_request: Annotated[str, Field(max_length=8192)]  # PEM, signed by the key that the certificate is for
    proof: Annotated[str, Field(max_length=128)] | None = None  # the nkey's signature of all else, in base64

    @property
    def tls_key(self) -> EllipticCurvePublicKey:
        """The public key that a certificate is asked for.

        Raises:
            ValueError: the request is damaged, or not signed by its key.
        """
        return pki.requested_key(self.certificate_request)

    @property
    def content(self) -> bytes:
        """Return what ``proof`` signs, 32 bytes."""
        return _digest(self.model_dump(mode="json", exclude_none=True, exclude={"proof"}))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a request, and check that the asker has its private keys.

        Raises:
            SettingsError: it cannot be read, is damaged, or no proof holds.
        """
        values = _toml(path, MAX_REQUEST_BYTES)
        _check_named(values, ("run", "kind", "name", "certificate_request"), path, "diloco keys request")
        request = parse(cls, values, f"request {path}")
        try:
            request.check()
        except ValueError as error:
            raise SettingsError(f"request {path}: {error}; ask its team for another one (diloco keys request)") from None
        return request

    def check(self) -> None:
        """Refuse a request of which a part is missing, or not proven.

        Raises:
            ValueError: that part.
        """
        assert self.tls_key is not None
        if self.kind == "server":
            if (self.public_key, self.proof, self.region, self.processes) != (None, None, None, None):
                raise ValueError("a server has no nkey, region or processes")
            if not self.hosts:
                raise ValueError("a server's hosts are missing")
            return
        if self.hosts or self.serves or (self.processes is not None and self.kind != "learner"):
            raise ValueError(f"a {self.kind} has no hosts, serves" + ("" if self.kind == "learner" else " or processes"))
        if self.public_key is None or self.proof is None:
            raise ValueError("public_key or proof is missing")
        try:
            proven = verify(self.public_key, self.content, base64.b64decode(self.proof, validate=True))
        except ValueError:
            proven = False
        if not proven:
            raise ValueError("proof is not a signature by public_key")


class SignedAnswer(_Handed):
    """The operator's answer: an identity file without private keys, or a server's folder without its own."""

    identity: dict[str, Any] | None = None
    server: dict[str, str] | None = None  # texts by file

    @classmethod
    def of_identity(cls, run: str, role: Kind, name: str, values: Mapping[str, Any]) -> Self:
        there = {key: value for key, value in values.items() if value is not None}
        return cls(run=run, kind=role, name=name, identity=there)

    @classmethod
    def of_server(cls, run: str, name: str, texts: Mapping[str, str]) -> Self:
        return cls(run=run, kind="server", name=name, server=dict(texts))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read an answer.

        Raises:
            SettingsError: it cannot be read, or is damaged.
        """
        values = _toml(path, MAX_ANSWER_BYTES)
        _check_named(values, ("run", "kind", "name", "server" if "server" in values else "identity"), path, "diloco keys sign")
        answer = parse(cls, values, f"answer {path}")
        of_server = answer.kind == "server"
        if (answer.server is not None, answer.identity is not None) != (of_server, not of_server):
            raise SettingsError(f"answer {path}: lacks what a {answer.kind} needs; ask the operator for the answer again")
        if answer.server is not None and not {"ca.pem", "server.pem", "auth.conf"} <= answer.server.keys() <= set(SERVER_FILES):
            raise SettingsError(f"answer {path}: expected {', '.join(SERVER_FILES)}; ask the operator for it again")
        return answer

    @property
    def identity_values(self) -> dict[str, Any]:
        """Values of an identity's file without private keys; empty of a server."""
        return self.identity or {}

    @property
    def authority(self) -> str:
        """The certificate of the run's authority, as PEM."""
        values = self.server or {}
        return str(values.get("ca.pem") or self.identity_values.get("ca"))

    def text(self) -> str:
        """Return the file's text."""
        return toml_text(self.model_dump(exclude_none=True))


def with_secrets(values: Mapping[str, Any], seed: str, private_key: str) -> dict[str, Any]:
    """Return the values of an identity file: ``values`` and its private keys, in the order that OpenSSL reads them."""
    last = {key: value for key, value in values.items() if key in ("ca", "authority", "grant")}
    first = {key: value for key, value in values.items() if key not in last}
    return first | {"seed": seed, "private_key": private_key} | last


# ---- the team's folder


class TeamFolder:
    """The folder of a team: the requests that it has made, and what has become of them."""

    def __init__(self, path: Path) -> None:
        """Take a folder that may not be there yet.

        Raises:
            SettingsError: it is an operator's.
        """
        if (path / "keys.toml").exists():
            raise SettingsError(f"{path}: has the authority itself: make keys there with 'diloco keys add', without a request")
        self.path = path

    def request_file(self, name: str) -> Path:
        return self.path / "requests" / f"{name}.request"

    def make_request(self, values: Mapping[str, Any]) -> Request:
        """Make private keys and a request, in place of those of the same name that have no answer yet.

        Raises:
            SettingsError: a value is wrong, or a file cannot be written.
        """
        key, own = pki.new_key(), None if values["kind"] == "server" else NatsKey.new()
        signed = {"certificate_request": pki.certificate_request(str(values["name"]), key)}
        if own is not None:
            signed["public_key"] = own.public_key
        request = parse(Request, {**values, **signed}, "diloco keys request")
        if own is not None:
            request = request.model_copy(update={"proof": base64.b64encode(own.sign_bytes(request.content)).decode()})
        make_private(self.path)
        secrets = {"private_key": pki.plain_text(key), "seed": own.seed if own is not None else None}
        write(self._key_file(request.name), toml_text(secrets), SECRET)
        write(self.request_file(request.name), toml_text(request.model_dump(exclude_none=True)), SECRET)
        return request

    def complete(self, answer: SignedAnswer) -> Path:
        """Put an answer and the private keys that it is for together. Return the identity's file, or the server's folder.

        Raises:
            SettingsError: its private keys are not here, or it is of another authority than those before.
        """
        known = self.path / "ca.pem"
        if known.exists() and known.read_text(encoding="utf-8") != answer.authority:
            raise SettingsError(
                f"answer for {answer.name}: is from another authority than {known}, which earlier answers came from: ask "
                "the operator; for another run use another folder"
            )
        made = self._complete_server(answer) if answer.server is not None else self._complete_identity(answer)
        write(known, answer.authority, PUBLIC)
        for file in (self._key_file(answer.name), self.request_file(answer.name)):
            file.unlink(missing_ok=True)
        return made

    def _complete_server(self, answer: SignedAnswer) -> Path:
        texts, target = answer.server or {}, self.path / "servers" / answer.name
        try:
            candidates = self._secrets(self._key_file(answer.name)), {"private_key": _text(target / "server.key")}
            private_key = next(
                (one["private_key"] for one in candidates if _fits(texts["server.pem"], one.get("private_key"))), None
            )
        except ValueError as error:
            raise SettingsError(f"answer for {answer.name}: {error}; ask the operator for it again") from None
        if private_key is None:
            raise self._not_here(answer.name)
        there = _list_number(_text(target / "auth.conf") or "")
        if there > _list_number(texts["auth.conf"]):  # an answer of before, which is typed again: the lists go on without it
            texts = {name: text for name, text in texts.items() if name not in ("auth.conf", "routes.conf")}
        for name, text in texts.items():
            write(target / name, text, PUBLIC)
        write(target / "server.key", private_key, SECRET)
        return target

    def _complete_identity(self, answer: SignedAnswer) -> Path:
        values, target = answer.identity_values, self.path / "identities" / f"{answer.name}.identity"
        named = {"run": answer.run, "name": answer.name, "role": answer.kind}
        if any(values.get(what) != value for what, value in named.items()):
            raise SettingsError(f"answer for {answer.name}: its parts are of several identities; ask the operator for it again")
        for secrets in (self._secrets(self._key_file(answer.name)), self._secrets(target)):
            if _has_key(secrets, values.get("public_key")):
                draft = self.path / "requests" / f"{answer.name}.identity"
                write(draft, identity_text(with_secrets(values, secrets["seed"], secrets["private_key"])), SECRET)
                try:
                    assert identity.load(draft).tls is not None  # certificate and key belong together
                    write(target, draft.read_bytes(), SECRET)
                finally:
                    draft.unlink()
                return target
        raise self._not_here(answer.name)

    def _key_file(self, name: str) -> Path:
        return self.path / "requests" / f"{name}.key"

    def _secrets(self, path: Path) -> dict[str, Any]:
        """Return the private keys in a file of this folder; none where it is not there."""
        if not path.exists():
            return {}
        check_secret(path)
        return _toml(path, MAX_REQUEST_BYTES)

    def _not_here(self, name: str) -> SettingsError:
        return SettingsError(
            f"answer for {name}: {self.path} lacks the private key that belongs to it: the request came from another "
            "folder, or was made again since; send the newest request"
        )


def _has_key(secrets: Mapping[str, Any], public_key: object) -> bool:
    seed = secrets.get("seed")
    try:
        return isinstance(seed, str) and NatsKey.from_seed(seed).public_key == public_key
    except ValueError:
        return False


def _fits(certificate: str, private_key: str | None) -> bool:
    """Whether a certificate is a private key's. Raise ValueError if the certificate is damaged."""
    return private_key is not None and pki.belongs(certificate, pki.private_key(private_key))


def _list_number(auth: str) -> int:
    """Return the number of a list, which its first line has; 0: of a version before."""
    found = re.match(r"# run \S+, list (\d{1,18}) of server ", auth)
    return int(found[1]) if found else 0


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _digest(values: Mapping[str, Any]) -> bytes:
    text = json.dumps(values, sort_keys=True, default=str).encode()
    return blake3(text, derive_key_context=PURPOSE).digest()


def _check_named(values: Mapping[str, Any], names: Sequence[str], path: Path, command: str) -> None:
    """Refuse a file of another kind, without a word of what is in it: it may be one of private keys.

    Raises:
        SettingsError: one of the names is missing.
    """
    missing = [name for name in names if name not in values]
    if missing:
        raise SettingsError(f"{path}: has no {missing[0]}: is it a file that '{command}' wrote?")


def _toml(path: Path, limit_bytes: int) -> dict[str, Any]:
    """Read the values of a file.

    Raises:
        SettingsError: it cannot be read, is too large, or no TOML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > limit_bytes:
        raise SettingsError(f"{path}: has more than {limit_bytes} bytes")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: no TOML: {error}") from None


def read_all(paths: Sequence[Path]) -> list[Request]:
    """Read requests, no two of one name or key.

    Raises:
        SettingsError: one cannot be used, or is there twice.
    """
    requests = [Request.read(path) for path in paths]
    for path, request in zip(paths, requests, strict=True):
        if sum(other.name == request.name for other in requests) > 1:
            raise SettingsError(f"request {path}: another request is also for {request.name}: sign only the newest")
        if request.public_key is not None and sum(other.public_key == request.public_key for other in requests) > 1:
            raise SettingsError(f"request {path}: another one has the same public key: each name must have its own keys")
    return requests
