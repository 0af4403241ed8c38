"""The identity of a process on NATS servers with permissions: a file of its own, made by ``diloco keys``.

It holds a key pair of NATS (nkey), which stands for the permissions of its role and name, and a certificate for mutual TLS.
A reader of the file can act as that process, so a file that others of the machine may read is refused.
"""

from __future__ import annotations

import os
import ssl
import stat
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from blake3 import blake3

from diloco.errors import FormatError, SettingsError
from diloco.nats import grants
from diloco.nats.nkey import NatsKey, verify_key
from diloco.settings.validation import shown
from diloco.wire.grants import SignedGrant
from diloco.wire.process_messages import MAX_PROCESSES

FORMAT = 1
MAX_BYTES = 1 << 16
MEETING = "diloco 2026 processes of one learner"  # the purpose of a key, as BLAKE3 wants it
Role = Literal["learner", "evaluator", "syncer", "coordinator", "operator", "observer"]
ROLES: tuple[Role, ...] = get_args(Role)
OTHERS_MODES = stat.S_IRWXG | stat.S_IRWXO
_TEXTS = ("run", "role", "name", "public_key", "seed", "certificate", "private_key", "ca")
_KNOWN = {"format", "expires", "region", "founder", "processes", "authority", "grant", *_TEXTS}


@dataclass(frozen=True)
class Identity:
    """The content of an identity file; ``repr`` shows none of its secrets."""

    path: Path
    run: str
    role: Role
    name: str
    region: str | None
    founder: bool  # a learner that may propose the fragment map and publish version 0
    processes: int  # of a learner: so many share this identity, at most
    public_key: str
    expires: datetime
    authority: str | None  # public key of the run's authority, which signs grants; None: of an older version
    grant: SignedGrant | None  # of a learner
    seed: str = field(repr=False)
    ca: str = field(repr=False)

    @property
    def sends_little(self) -> bool:
        """Whether a server's list has a limit of its messages: only syncers, operators and founders send the largest ones."""
        return self.role in ("evaluator", "observer", "coordinator") or (self.role == "learner" and not self.founder)

    @property
    def inbox(self) -> str:
        """The prefix of inboxes that only this identity may listen to."""
        return f"_INBOX_{self.name}"

    @property
    def meeting_key(self) -> bytes:
        """Key, 32 bytes, by which processes that share this identity know each other without a server."""
        return blake3(self.seed.encode(), derive_key_context=MEETING).digest()

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """TLS context of connections on which both sides show a certificate of the run's own authority.

        Raises:
            SettingsError: the file's certificate, key or authority is damaged.
        """
        try:
            # OpenSSL finds the blocks that it wants in any text; the first certificate is the process's own
            context = ssl.create_default_context(cadata=self.ca)
            context.load_cert_chain(self.path)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise SettingsError(
                f"{self.path}: certificate, private_key or ca is damaged ({error}); make it again (diloco keys)"
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


def load(path: Path) -> Identity:
    """Read an identity file.

    Raises:
        SettingsError: it is missing, damaged, expired, or others than its owner may read it.
    """
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"identity {path}: cannot be read: {error.strerror}; make it with 'diloco keys add'") from None
    if stat.S_IMODE(mode) & OTHERS_MODES:
        raise SettingsError(
            f"identity {path}: its mode is {stat.S_IMODE(mode):04o}, others here can read or change it: chmod 600 {path}"
        )
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        identity = _of(path, tomllib.loads(data.decode()))
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"identity {path}: {error}; make it again with 'diloco keys add'") from None
    if identity.expires <= datetime.now(UTC):
        raise SettingsError(
            f"identity {path}: its certificate ended on {identity.expires:%Y-%m-%d}, by this machine's clock; make it again "
            f"with 'diloco keys renew {identity.name}'"
        )
    return identity


def _of(path: Path, values: dict[str, Any]) -> Identity:
    """Return the identity in a file's values.

    Raises:
        ValueError: a value is missing, unknown or damaged.
    """
    if values.get("format") != FORMAT:
        raise ValueError(f"format = {shown(values.get('format'))}, this version reads {FORMAT}")
    unknown = sorted(values.keys() - _KNOWN)
    if unknown:
        raise ValueError(f"no such key: {shown(unknown[0])}")
    for key in _TEXTS:
        if not isinstance(values.get(key), str):
            raise ValueError(f"{key} is missing or is not a string")
    role, region, founder, expires = values["role"], values.get("region"), values.get("founder", False), values.get("expires")
    if role not in ROLES:
        raise ValueError(f"role = {shown(role)}, expected one of {', '.join(ROLES)}")
    if not isinstance(region, str | None) or not isinstance(founder, bool):
        raise ValueError("region must be a string, and founder must be true or false")
    processes = values.get("processes", 1)
    if type(processes) is not int or not 1 <= processes <= MAX_PROCESSES or (processes > 1 and role != "learner"):
        raise ValueError(f"processes = {shown(processes)}, expected 1 to {MAX_PROCESSES} for a learner, 1 for others")
    if not isinstance(expires, datetime) or expires.tzinfo is None:
        raise ValueError("expires must be a time with a time zone")
    if NatsKey.from_seed(values["seed"]).public_key != values["public_key"]:
        raise ValueError("seed and public_key do not belong together")
    own = {key: values[key] for key in ("run", "name", "public_key", "seed", "ca")}
    authority, grant = _granted(values)
    about = {"role": role, "region": region, "founder": founder, "processes": processes, "expires": expires}
    return Identity(path, authority=authority, grant=grant, **about, **own)


def _granted(values: dict[str, Any]) -> tuple[str | None, SignedGrant | None]:
    """Return the authority and the grant in a file's values.

    Raises:
        ValueError: one is damaged, or they do not belong together.
    """
    authority, text = values.get("authority"), values.get("grant")
    if not isinstance(authority, str | None) or not isinstance(text, str | None):
        raise ValueError("authority and grant must be strings")
    if authority is None:
        if text is not None:
            raise ValueError("grant without authority")
        return None, None
    verify_key(authority)
    if text is None:
        return authority, None
    try:
        signed = grants.from_text(text)
        grant = grants.opened(signed, authority, values["run"], values["name"])
    except FormatError as error:
        raise ValueError(str(error)) from None
    if grant.public_key != values["public_key"]:
        raise ValueError("grant was issued for another public_key")
    return authority, signed


def identity_file(path: str, name: str) -> Path:
    """Return the path of a service's identity: ``{name}`` in ``path`` stands for its name."""
    return Path(path.replace("{name}", name))


def of_service(path: str, name: str, run: str, region: str | None, role: Role, processes: int = 1) -> Identity:
    """Load the identity of a service, which must fit its settings; ``processes``: so many share it.

    Raises:
        SettingsError: as :func:`load`; or it is of another run, name, role or region, or of fewer processes.
    """
    identity = load(identity_file(path, name))
    expected = {"run": (identity.run, run), "name": (identity.name, name), "role": (identity.role, role)}
    wrong = [f"{what} {theirs!r}, not {ours!r}" for what, (theirs, ours) in expected.items() if theirs != ours]
    if identity.region is not None and identity.region != region:
        wrong.append(f"region {identity.region!r}, not {region!r}")
    if wrong:
        raise SettingsError(
            f"identity {identity.path}: is for {'; for '.join(wrong)}: set DILOCO_IDENTITY to the identity of this process"
        )
    if processes > identity.processes:
        raise SettingsError(
            f"identity {identity.path}: is for {identity.processes} processes of {name}, and processes.count = {processes}: "
            f"make it again with 'diloco keys renew DIR {name} --processes {processes}'"
        )
    return identity


def of_command(path: Path, run: str) -> Identity:
    """Load the identity of an operator's command, which must be of ``run``.

    Raises:
        SettingsError: as :func:`load`; or it is of another run.
    """
    identity = load(path)
    if identity.run != run:
        raise SettingsError(f"identity {path}: is for run {identity.run!r}, not {run!r}: give an identity of run {run!r}")
    return identity
