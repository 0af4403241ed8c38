"""``keys.toml``: a run's servers and identities. No private key is in it, but nor is it for members (docs/security.md)."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from diloco.errors import SettingsError
from diloco.nats.identity import Role
from diloco.settings.loading import read_toml
from diloco.settings.run import Name, RegionName
from diloco.settings.validation import nearest, parse
from diloco.wire.process_messages import MAX_PROCESSES
from diloco_ops.keys.permissions import CONTROL, Who, is_known

FORMAT = 1
FILE = "keys.toml"
MAX_ENTRIES = 4096  # of a kind, as many as a run has learners at most
HOST = r"^[A-Za-z0-9]([A-Za-z0-9.:_-]{0,251}[A-Za-z0-9])?$"

BatchTokens = Annotated[int, Field(ge=1, le=1 << 40)]
StepSeconds = Annotated[float, Field(ge=1e-6, le=1e6)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    serial: Annotated[str, Field(pattern=r"^[0-9a-f]{1,40}$")]
    expires: AwareDatetime


class ServerEntry(_Entry):
    """A NATS server: its host names and addresses, and which regions' streams it holds, or the control store."""

    hosts: list[Annotated[str, Field(pattern=HOST)]] = Field(min_length=1, max_length=64)
    serves: list[RegionName] = Field(max_length=65)  # empty in a run without regions: everything
    list_number: Annotated[int, Field(ge=1, lt=10**18)] | None = None  # of its auth.conf; None: of an older version, or new
    list_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")] | None = None  # of the file's content

    @property
    def is_control(self) -> bool:
        """Whether it holds the control store, alone or as one of several."""
        return not self.serves or CONTROL in self.serves


class IdentityEntry(_Entry):
    """A process that may connect."""

    role: Role
    region: RegionName | None = None
    founder: bool = False  # or, of a coordinator, whether it may create the run
    processes: Annotated[int, Field(ge=1, le=MAX_PROCESSES)] | None = None  # of a learner that share it; None: one
    public_key: Annotated[str, Field(pattern=r"^U[A-Z2-7]{55}$")]
    revoked: bool = False
    batch_tokens: BatchTokens | None = None  # granted to a learner: of a step, at most; None: as the run's settings bound it
    min_step_s: StepSeconds | None = None  # and of its fastest step
    account: Annotated[int, Field(ge=0)] | None = (
        None  # the number of its account at servers; None: of an older version, or new
    )

    @property
    def who(self) -> Who:
        return Who(
            name=self.name,
            role=self.role,
            region=self.region,
            founder=self.founder,
            public_key=self.public_key,
            processes=self.processes or 1,
        )


class IdentityRoster(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    run: Name
    regions: list[RegionName] = Field(max_length=64)
    servers: list[ServerEntry] = Field([], max_length=MAX_ENTRIES)
    identities: list[IdentityEntry] = Field([], max_length=MAX_ENTRIES)

    def numbered(self) -> IdentityRoster:
        """Return the roster with an account's number for each identity, which it keeps for ever."""
        following = itertools.count(
            max((entry.account for entry in self.identities if entry.account is not None), default=-1) + 1
        )
        numbered = [
            entry if entry.account is not None else entry.model_copy(update={"account": next(following)})
            for entry in self.identities
        ]
        return self.model_copy(update={"identities": numbered})

    def replaced(self, *servers: ServerEntry) -> IdentityRoster:
        """Return the roster with these servers, in place of those of the same names."""
        named = {server.name: server for server in (*self.servers, *servers)}
        return self.model_copy(update={"servers": [named[name] for name in sorted(named)]})

    def server(self, name: str) -> ServerEntry | None:
        return next((server for server in self.servers if server.name == name), None)

    def identity(self, name: str) -> IdentityEntry | None:
        return next((identity for identity in self.identities if identity.name == name), None)

    def known_to(self, server: ServerEntry) -> list[IdentityEntry]:
        """Return the identities that may connect to a server: neither revoked nor ended."""
        now = datetime.now(UTC)
        good = (entry for entry in self.identities if not entry.revoked and entry.expires > now)
        return [entry for entry in good if is_known(entry.who, self.regions, server.serves)]

    def servers_of(self, who: Who) -> list[ServerEntry]:
        """Return the servers that have to know an identity."""
        return [server for server in self.servers if is_known(who, self.regions, server.serves)]

    def check_new(self, name: str) -> None:
        """Refuse a name that is taken.

        Raises:
            SettingsError: it is, or was, in use.
        """
        identity = self.identity(name)
        if identity is not None and identity.revoked:
            raise SettingsError(f"{name!r} was revoked, and is never given out again: choose another name")
        if identity is not None or self.server(name) is not None:
            raise SettingsError(f"{name!r} already exists: choose another name, or renew its keys (diloco keys renew)")

    def check_region(self, region: str | None, role: Role) -> None:
        """Refuse a region that the run does not have, or none where one is needed.

        Raises:
            SettingsError: the run's regions are named.
        """
        if region is not None and region not in self.regions:
            there = f"its regions are {', '.join(self.regions)}" if self.regions else "it has no regions"
            raise SettingsError(f"--region {region}: not one of run {self.run!r}{nearest(region, self.regions)}; {there}")
        if region is None and self.regions and role in ("learner", "evaluator", "syncer"):
            raise SettingsError(f"a {role} is in one of the regions {', '.join(self.regions)}: say which with --region")

    def checked_serves(self, serves: list[str]) -> list[str]:
        """Return the places that a server is to serve.

        Raises:
            SettingsError: it is none of the run's regions, nor the control store; or nothing.
        """
        choices = [*self.regions, CONTROL]
        if not self.regions:
            if serves:
                raise SettingsError(f"--serves {serves[0]}: run {self.run!r} has no regions; its servers serve everything")
            return []
        for place in serves:
            if place not in choices:
                raise SettingsError(
                    f"--serves {place}: no region of run {self.run!r}{nearest(place, choices)}; there are {', '.join(choices)}"
                )
        if not serves:
            raise SettingsError(f"a server of run {self.run!r} serves some of {', '.join(choices)}: say which with --serves")
        return sorted(set(serves), key=choices.index)


def load(folder: Path) -> IdentityRoster:
    """Read a folder's roster.

    Raises:
        SettingsError: there is none, or it is damaged.
    """
    path = folder / FILE
    if not path.exists():
        raise SettingsError(f"{path}: does not exist; make the folder with: diloco keys init {folder} --run NAME")
    values = read_toml(path)
    if values.get("format") != FORMAT:
        raise SettingsError(f"{path}: format = {values.get('format')!r}, this version reads {FORMAT}")
    roster = parse(IdentityRoster, values, str(path))
    names = [entry.name for entry in (*roster.servers, *roster.identities)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"{path}: {twice[0]!r} is listed twice")
    return roster


def text(roster: IdentityRoster) -> str:
    """Return the file's text."""
    head = "# Who may take part in this run. Written by diloco keys, which is how it is to be changed. No private key is in it."
    return f"{head}\n{tomli_w.dumps(roster.model_dump(exclude_none=True))}"
