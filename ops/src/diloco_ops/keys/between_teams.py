"""``diloco keys request``, ``sign`` and ``complete``: keys of a team whose private parts never leave it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import typer

from diloco.errors import SettingsError
from diloco.nats.identity import ROLES
from diloco.settings.validation import nearest, parse
from diloco_ops.keys.folder import Folder
from diloco_ops.keys.place import folder_and, folder_and_files
from diloco_ops.keys.requests import Request, SignedAnswer, TeamFolder, read_all
from diloco_ops.keys.roster import IdentityEntry, ServerEntry

KINDS = ("server", *ROLES)


def request(
    words: Annotated[list[str], typer.Argument(metavar="[DIR] KIND NAME", help=f"The team's own folder; {', '.join(KINDS)}.")],
    run: Annotated[str, typer.Option(help="The run's name.")],
    region: Annotated[str | None, typer.Option(help="The process's region, in a run with regions.")] = None,
    host: Annotated[list[str] | None, typer.Option(help="A server's name or address, as clients use it; repeatable.")] = None,
    serves: Annotated[list[str] | None, typer.Option(help="What a server stores: a region, or control; repeatable.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="For a learner: number of its processes, one per host, that share these keys.")
    ] = None,
) -> None:
    """Make the private keys of a server or process in this folder, and a request for the operator to sign."""
    folder, (kind, name) = folder_and(words, "KIND", "NAME")
    if kind not in KINDS:
        raise SettingsError(f"{kind}: no such kind{nearest(kind, KINDS)}; there are {', '.join(KINDS)}")
    _refuse_options(kind, region=region, host=host, serves=serves, processes=processes)
    if kind == "server" and not host:
        raise SettingsError(f"server {name}: its names and addresses are missing: give each with --host, as clients use it")
    team = TeamFolder(folder)
    values = {"run": run, "kind": kind, "name": name, "region": region, "processes": processes}
    made = team.make_request(values | {"hosts": host or [], "serves": serves or []})
    print(f"{_asked(made)}: send {team.request_file(name)} to the operator; the private keys stay in {folder}")
    print(f"fingerprint {made.fingerprint}: the operator must see the same one")


def _refuse_options(kind: str, **options: object) -> None:
    others = (
        {"region", "processes"} if kind == "server" else {"host", "serves"} | ({"processes"} if kind != "learner" else set())
    )
    for option, value in options.items():
        if value and option in others:
            raise SettingsError(f"--{option} does not apply to a {kind}")


def sign_requests(
    opened: Folder, words: list[str], granted: Mapping[str, Any], expires: datetime, *, founder: bool, renew: bool
) -> None:
    """Sign requests, all or none; ``granted``: to learners."""
    _, files = folder_and_files(words)
    opened.authority.check_good()
    # servers last: their answers have the lists, with all that the same command signs
    requests = sorted(read_all(files), key=lambda one: one.kind == "server")
    entries = [_entry(opened, one, granted, expires, founder=founder, renew=renew) for one in requests]
    for one in requests:
        print(f"{_asked(one)}; fingerprint {one.fingerprint}")
    if sys.stdin.isatty() and sys.stdout.isatty():
        typer.confirm("sign, if its team sees the same fingerprints?", abort=True)
    for one, entry in zip(requests, entries, strict=True):
        if isinstance(entry, ServerEntry):
            signed: ServerEntry | IdentityEntry = opened.sign_server(one, entry.serves, expires)
        else:
            signed = opened.sign_identity(entry, one.tls_key)
        file = opened.answer_file(one.name)
        print(f"{one.kind} {one.name}: good until {signed.expires:%Y-%m-%d}; its team gets {file}, for diloco keys complete")
        print(f"fingerprint {SignedAnswer.read(file).fingerprint}")


def _asked(one: Request) -> str:
    """Return what a request asks for, for people."""
    about = [f"in {one.region}"] if one.region else []
    about += [f"{one.processes} processes"] if (one.processes or 1) > 1 else []
    about += [f"for {', '.join(one.hosts)}", f"with {', '.join(one.serves) or 'everything'}"] if one.kind == "server" else []
    return f"{one.kind} {one.name}" + (f" ({'; '.join(about)})" if about else "")


def _entry(
    opened: Folder, one: Request, granted: Mapping[str, Any], expires: datetime, *, founder: bool, renew: bool
) -> ServerEntry | IdentityEntry:
    """Return the entry that a request is to have.

    Raises:
        SettingsError: it fits neither the run nor the folder.
    """
    roster = opened.roster
    if one.run != roster.run:
        raise SettingsError(f"request for {one.name}: is for run {one.run!r}, and this folder has the keys of {roster.run!r}")
    before = roster.server(one.name) or roster.identity(one.name)
    if not renew:
        if before is not None and not getattr(before, "revoked", False):
            raise SettingsError(f"{one.name!r} already exists: if its team asks for new keys, sign with --renew")
        roster.check_new(one.name)
    elif before is None or getattr(before, "revoked", False):
        raise SettingsError(f"{one.name!r} is not there, or was revoked, so nothing can be renewed: leave --renew out")
    if one.kind == "server":
        return _server_entry(opened, one, before, expires)
    return _identity_entry(opened, one, before, granted, expires, founder=founder)


def _server_entry(opened: Folder, one: Request, before: ServerEntry | IdentityEntry | None, expires: datetime) -> ServerEntry:
    serves = opened.roster.checked_serves(one.serves)
    if before is not None and (not isinstance(before, ServerEntry) or before.serves != serves):
        raise SettingsError(f"request for {one.name}: asks for {_asked(one)}, but {one.name} had another kind or place before")
    values = {"name": one.name, "hosts": one.hosts, "serves": serves, "serial": "0", "expires": expires}
    return parse(ServerEntry, values, "diloco keys sign")


def _identity_entry(
    opened: Folder,
    one: Request,
    before: ServerEntry | IdentityEntry | None,
    granted: Mapping[str, Any],
    expires: datetime,
    *,
    founder: bool,
) -> IdentityEntry:
    roster = opened.roster
    assert one.kind != "server"
    roster.check_region(one.region, one.kind)
    if founder and one.kind != "learner":
        raise SettingsError(f"--founder: only a learner founds a run, not a {one.kind}")
    for entry in roster.identities:
        if entry.public_key == one.public_key and entry.name != one.name:
            raise SettingsError(f"request for {one.name}: has the public key of {entry.name}: each name must have its own keys")
    made: dict[str, Any] = {"name": one.name, "role": one.kind, "region": one.region, "processes": one.processes}
    made |= {"public_key": one.public_key, "serial": "0", "expires": expires}
    if before is None:
        made |= {"founder": founder or one.kind == "coordinator"} | (dict(granted) if one.kind == "learner" else {})
        return parse(IdentityEntry, made, "diloco keys sign")
    if not isinstance(before, IdentityEntry) or (before.role, before.region) != (one.kind, one.region):
        raise SettingsError(f"request for {one.name}: asks for {_asked(one)}, but {one.name} had another role or region before")
    if one.processes is None:
        made["processes"] = before.processes
    return parse(IdentityEntry, before.model_dump() | made, "diloco keys sign")


def complete(
    words: Annotated[
        list[str], typer.Argument(metavar="[DIR] ANSWER...", help="The team's own folder; the operator's answers.")
    ],
) -> None:
    """Combine the operator's answers with the private keys in this folder."""
    folder, files = folder_and_files(words)
    team = TeamFolder(folder)
    for answer in [SignedAnswer.read(file) for file in files]:
        made = team.complete(answer)
        print(f"{answer.kind} {answer.name}: it gets {'all of ' if answer.kind == 'server' else ''}{made}")
        print(f"fingerprint {answer.fingerprint}: the operator has seen the same one")
