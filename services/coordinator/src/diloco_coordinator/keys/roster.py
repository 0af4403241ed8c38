"""``keys.toml``: which servers a run has, and who may take part in it. It holds no secrets."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from diloco.errors import SettingsError
from diloco.identity import Role
from diloco.settings import Name, RegionName, nearest, parse, read_toml
from diloco_coordinator.keys.permissions import CONTROL, Who, is_known

FORMAT = 1
FILE = "keys.toml"
MAX_ENTRIES = 4096  # of a kind, as many as a run has learners at most
HOST = r"^[A-Za-z0-9]([A-Za-z0-9.:_-]{0,251}[A-Za-z0-9])?$"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    serial: Annotated[str, Field(pattern=r"^[0-9a-f]{1,40}$")]
    expires: AwareDatetime


class ServerEntry(_Entry):
    """A NATS server: its host names and addresses, and which regions' streams it holds, or the control store."""

    hosts: list[Annotated[str, Field(pattern=HOST)]] = Field(min_length=1, max_length=64)
    serves: list[RegionName] = Field(max_length=65)  # empty in a run without regions: everything


class IdentityEntry(_Entry):
    """Who may connect."""

    role: Role
    region: RegionName | None = None
    founder: bool = False
    public_key: Annotated[str, Field(pattern=r"^U[A-Z2-7]{55}$")]
    revoked: bool = False

    @property
    def who(self) -> Who:
        return Who(self.name, self.role, self.region, self.founder)


class Roster(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    run: Name
    regions: list[RegionName] = Field(max_length=64)
    servers: list[ServerEntry] = Field([], max_length=MAX_ENTRIES)
    identities: list[IdentityEntry] = Field([], max_length=MAX_ENTRIES)

    def server(self, name: str) -> ServerEntry | None:
        return next((server for server in self.servers if server.name == name), None)

    def identity(self, name: str) -> IdentityEntry | None:
        return next((identity for identity in self.identities if identity.name == name), None)

    def known_to(self, server: ServerEntry) -> list[IdentityEntry]:
        """Who may connect to a server."""
        return [entry for entry in self.identities if not entry.revoked and is_known(entry.who, self.regions, server.serves)]

    def servers_of(self, who: Who) -> list[ServerEntry]:
        """The servers that have to know an identity."""
        return [server for server in self.servers if is_known(who, self.regions, server.serves)]

    def check_new(self, name: str) -> None:
        """Refuse a name that is taken.

        Raises:
            SettingsError: it is, or was, somebody's.
        """
        identity = self.identity(name)
        if identity is not None and identity.revoked:
            raise SettingsError(f"{name!r} was revoked, and is never given out again: choose another name")
        if identity is not None or self.server(name) is not None:
            raise SettingsError(f"{name!r} is there already: choose another name, or make its keys anew (diloco keys renew)")

    def check_region(self, region: str | None, role: Role) -> None:
        """Refuse a region that the run does not have, or none where one is needed.

        Raises:
            SettingsError: the run's regions are named.
        """
        if region is not None and region not in self.regions:
            there = f"there are {', '.join(self.regions)}" if self.regions else "it has no regions"
            raise SettingsError(f"--region {region}: not one of run {self.run!r}{nearest(region, self.regions)}; {there}")
        if region is None and self.regions and role in ("learner", "evaluator", "syncer"):
            raise SettingsError(f"a {role} is in one of the regions {', '.join(self.regions)}: say which with --region")

    def checked_serves(self, serves: list[str]) -> list[str]:
        """What a server is to serve.

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


def load(folder: Path) -> Roster:
    """Read a folder's roster.

    Raises:
        SettingsError: there is none, or it is damaged.
    """
    path = folder / FILE
    if not path.exists():
        raise SettingsError(f"{path}: not there; make the folder with: diloco keys init {folder} --run NAME")
    values = read_toml(path)
    if values.get("format") != FORMAT:
        raise SettingsError(f"{path}: format = {values.get('format')!r}, this version reads {FORMAT}")
    roster = parse(Roster, values, str(path))
    names = [entry.name for entry in (*roster.servers, *roster.identities)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"{path}: {twice[0]!r} is there twice")
    return roster


def text(roster: Roster) -> str:
    """The file's text."""
    lines = [
        "# Who may take part in this run. Written by diloco keys, which is how it is to be changed. No secrets are in it.",
        *_values({"format": roster.format, "run": roster.run, "regions": roster.regions}),
    ]
    for title, entries in (("servers", roster.servers), ("identities", roster.identities)):
        for entry in entries:
            lines += ["", f"[[{title}]]", *_values(entry.model_dump(exclude_none=True))]
    return "\n".join(lines) + "\n"


def _values(values: dict[str, Any]) -> list[str]:
    return [f"{key} = {moment(value) if isinstance(value, datetime) else json.dumps(value)}" for key, value in values.items()]


def moment(time: datetime) -> str:
    """A time in TOML, to the second."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
