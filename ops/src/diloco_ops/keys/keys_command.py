"""``diloco keys``: an authority, certificates and NATS keys for a run whose servers only their holders may use."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import SettingsError
from diloco.nats.identity import ROLES, Role
from diloco.process import observe
from diloco.settings.counts import COUNT, parse_count
from diloco.settings.run import RunSettings
from diloco.settings.validation import nearest, parse
from diloco_ops.keys import passphrase
from diloco_ops.keys.between_teams import complete, request, sign_requests
from diloco_ops.keys.folder import Folder, write_for_browser
from diloco_ops.keys.permissions import CONTROL
from diloco_ops.keys.place import folder_and, folder_and_files
from diloco_ops.keys.region_keys import region as add_region
from diloco_ops.keys.roster import IdentityEntry, IdentityRoster, ServerEntry
from diloco_ops.keys.server_status import addresses, ask_servers, asking_identity

DAYS = 365
SOON_DAYS = 30
MAX_DAYS = 3650
EXIT_BEHIND = 1  # a server has not the newest list, or does not answer
MAX_LIST_NUMBER = 10**15  # no folder counts so far; more digits than that are a slip
KINDS = ("server", "page", *ROLES)

keys = typer.Typer(no_args_is_help=True, help="Manage who may take part in a run: issue and revoke certificates and NATS keys.")

FOLDER = "The folder of the run's keys; default: DILOCO_KEYS, else ~/diloco-keys."
Where = Annotated[list[str] | None, typer.Argument(metavar="[DIR]", help=FOLDER)]
Named = Annotated[
    list[str], typer.Argument(metavar="[DIR] NAME", help=f"{FOLDER} The name of the server or process, as in its settings.")
]
# a grant bounds what its learner can claim at once, so the default is one for small models; `diloco keys grant` gives more
BATCH_TOKENS = 65_536
MIN_STEP_S = 0.01  # a step of a small model on a fast processor
BatchTokens = Annotated[
    int | None,
    typer.Option(
        parser=parse_count, metavar=COUNT, help="For a learner: the largest number of tokens in a step. Default: 65536."
    ),
]
MinStepS = Annotated[
    float | None, typer.Option("--min-step-s", help="For a learner: the seconds of its fastest step. Default: 0.01.")
]
Processes = Annotated[
    int | None, typer.Option(help="For a learner: number of its processes, one per host, that share these keys.")
]
NewFile = Annotated[
    Path | None, typer.Option("--new-file", help="File whose first line is the new passphrase, for use without a terminal.")
]
Days = Annotated[int, typer.Option(help="Days for which the keys are valid.")]

keys.command("region")(add_region)


@keys.command()
def init(
    run: Annotated[str, typer.Option(help="The run's name.")],
    where: Where = None,
    region: Annotated[list[str] | None, typer.Option(help="A region of the run; repeatable.")] = None,
    protect: Annotated[
        bool, typer.Option("--passphrase", help="Encrypt ca.key with a passphrase, which is asked for.")
    ] = False,
    new_file: NewFile = None,
) -> None:
    """Make the folder of keys, with the run's certificate authority."""
    folder, _ = folder_and(where)
    regions = region or []
    if CONTROL in regions:
        raise SettingsError(f"--region {CONTROL}: is reserved for the control store; give the region another name")
    if len(set(regions)) < len(regions):
        raise SettingsError(f"--region {', '.join(regions)}: one region is named twice")
    parse(IdentityRoster, {"run": run, "regions": regions}, "diloco keys init")
    if regions:
        parse(RunSettings, {"regions": {"names": regions}}, "diloco keys init")
    Folder.make(folder, run, regions, passphrase.chosen(new_file) if protect or new_file else None)
    print(f"{folder}: keys of run {run}{' in ' + ', '.join(regions) if regions else ''}; {folder / 'ca.key'} never leaves it")


@keys.command()
def add(
    words: Annotated[list[str], typer.Argument(metavar="[DIR] KIND NAME", help=f"{FOLDER} KIND is one of {', '.join(KINDS)}.")],
    region: Annotated[str | None, typer.Option(help="The process's region, in a run with regions.")] = None,
    founder: Annotated[bool, typer.Option("--founder", help="A learner that may found the run.")] = False,
    host: Annotated[list[str] | None, typer.Option(help="A server's name or address, as clients use it; repeatable.")] = None,
    serves: Annotated[list[str] | None, typer.Option(help="What a server stores: a region, or control; repeatable.")] = None,
    batch_tokens: BatchTokens = None,
    min_step_s: MinStepS = None,
    processes: Processes = None,
    days: Days = DAYS,
) -> None:
    """Make the keys of a server or process."""
    folder, (kind, name) = folder_and(words, "KIND", "NAME")
    opened = Folder.open(folder)
    expires = _expiry(days)
    opened.roster.check_new(name)
    given: dict[str, object] = {"--host": host, "--serves": serves}
    if kind == "server":
        given = {"--region": region, "--founder": founder}
    elif kind == "page":
        given = {"--region": region, "--founder": founder, "--serves": serves}
    if kind != "learner":
        given |= {"--batch-tokens": batch_tokens, "--min-step-s": min_step_s, "--processes": processes}
    if kind not in KINDS:
        raise SettingsError(f"{kind}: no such kind{nearest(kind, KINDS)}; there are {', '.join(KINDS)}")
    for option, value in given.items():
        if value:
            raise SettingsError(f"{option} does not apply to a {kind}")
    if kind == "page":
        _add_page(opened, name, host or [], expires)
    elif kind == "server":
        _add_server(opened, name, host or [], serves or [], expires)
    else:
        granted = _grant_given(batch_tokens, min_step_s) if kind == "learner" else {}
        _add_identity(opened, name, kind, region, founder, expires, granted | {"processes": processes})


def _grant_given(batch_tokens: int | None, min_step_s: float | None) -> dict[str, float | None]:
    """Return a learner's grant: as given, else as asked for at a terminal, else the default."""
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if batch_tokens is None:
        batch_tokens = typer.prompt("most tokens of one step", BATCH_TOKENS, type=int) if asks else BATCH_TOKENS
    if min_step_s is None:
        min_step_s = typer.prompt("seconds of its fastest step", MIN_STEP_S, type=float) if asks else MIN_STEP_S
    return {"batch_tokens": batch_tokens, "min_step_s": min_step_s}


def _add_page(opened: Folder, name: str, hosts: list[str], expires: datetime) -> None:
    if not hosts:
        raise SettingsError(f"page {name}: its names and addresses are missing: give each with --host, as browsers use it")
    parse(ServerEntry, {"name": name, "hosts": hosts, "serves": [], "serial": "0", "expires": expires}, "diloco keys add")
    target = opened.put_page(name, hosts, expires)
    print(
        f"page {name}: good until {expires:%Y-%m-%d}, for {', '.join(hosts)}; the coordinator gets all of {target}, as page_tls"
    )


def _add_server(opened: Folder, name: str, hosts: list[str], serves: list[str], expires: datetime) -> None:
    if not hosts:
        raise SettingsError(f"server {name}: its names and addresses are missing: give each with --host, as clients use it")
    places = opened.roster.checked_serves(serves)
    values = {"name": name, "hosts": hosts, "serves": places, "serial": "0", "expires": expires}
    parse(ServerEntry, values, "diloco keys add")
    entry = opened.put_server(name, hosts, places, expires)
    print(f"server {name}: good until {entry.expires:%Y-%m-%d}, for {', '.join(hosts)}")
    print(f"it gets all of {opened.server_folder(name)}")
    _say_routes(opened, entry)


def _add_identity(
    opened: Folder, name: str, kind: str, region: str | None, founder: bool, expires: datetime, granted: dict[str, float | None]
) -> None:
    role: Role = kind  # type: ignore[assignment]  # one of KINDS
    if founder and role != "learner":
        raise SettingsError(f"--founder: only a learner founds a run, not a {role}")
    founder = founder or role == "coordinator"  # which creates it
    opened.roster.check_region(region, role)
    nothing = {"serial": "0", "public_key": "U" + "A" * 55}  # made with the keys
    values = {"name": name, "role": role, "region": region, "founder": founder, "expires": expires}
    entry = opened.put_identity(parse(IdentityEntry, nothing | values | granted, "diloco keys add"))
    print(f"{role} {name}: good until {entry.expires:%Y-%m-%d}; it gets {opened.identity_file(name)}")
    if role == "learner":
        print(f"granted: {_grant_of(entry)}; more with: diloco keys grant {opened.path} {name} --batch-tokens N --min-step-s S")
    _say_reload(opened)


@keys.command()
def renew(words: Named, processes: Processes = None, days: Days = DAYS) -> None:
    """Make new keys for a server or process: before the old ones expire, or when they may have been stolen."""
    folder, (name,) = folder_and(words, "NAME")
    opened = Folder.open(folder)
    expires = _expiry(days)
    server = opened.roster.server(name)
    if server is not None:
        if processes is not None:
            raise SettingsError("--processes does not apply to a server")
        entry = opened.put_server(name, server.hosts, server.serves, expires)
        print(
            f"server {name}: good until {entry.expires:%Y-%m-%d}; it gets all of {opened.server_folder(name)}: restart it then"
        )
        _say_routes(opened, entry)
        return
    before = _living(opened, name)
    if processes is not None and before.role != "learner":
        raise SettingsError(f"--processes does not apply to a {before.role}")
    changes = {"expires": expires, "processes": before.processes if processes is None else processes}
    renewed = opened.put_identity(parse(IdentityEntry, before.model_dump() | changes, "diloco keys renew"))
    print(f"{renewed.role} {name}: good until {renewed.expires:%Y-%m-%d}; it gets {opened.identity_file(name)}")
    print("its earlier keys stop working once these servers have been reloaded:")
    _say_reload(opened)


keys.command()(request)
keys.command()(complete)


@keys.command()
def sign(
    words: Annotated[list[str], typer.Argument(metavar="[DIR] REQUEST...", help=f"{FOLDER} Requests of diloco keys request.")],
    renew: Annotated[bool, typer.Option("--renew", help="For names that exist: replace their keys.")] = False,
    founder: Annotated[bool, typer.Option("--founder", help="A learner that may found the run.")] = False,
    batch_tokens: BatchTokens = None,
    min_step_s: MinStepS = None,
    days: Days = DAYS,
) -> None:
    """Sign requests of other teams, and write the answers. The private keys stay with the teams."""
    opened = Folder.open(folder_and_files(words)[0])
    granted = {
        "batch_tokens": BATCH_TOKENS if batch_tokens is None else batch_tokens,
        "min_step_s": MIN_STEP_S if min_step_s is None else min_step_s,
    }
    sign_requests(opened, words, granted, _expiry(days), founder=founder, renew=renew)
    _say_reload(opened)


@keys.command("passphrase")
def passphrase_(
    where: Where = None,
    new_file: NewFile = None,
    remove: Annotated[bool, typer.Option("--remove", help="Leave ca.key without a passphrase.")] = False,
) -> None:
    """Put ca.key under a new passphrase. The old one is asked for, or read from DILOCO_CA_PASSPHRASE_FILE."""
    if remove and new_file is not None:
        raise SettingsError("--remove and --new-file contradict each other: give one of them")
    opened = Folder.open(folder_and(where)[0])
    opened.protect(None if remove else passphrase.chosen(new_file))
    print(f"{opened.path / 'ca.key'}: {'has no passphrase' if remove else 'has the new passphrase'}")


@keys.command()
def grant(words: Named, batch_tokens: BatchTokens = None, min_step_s: MinStepS = None) -> None:
    """Grant a learner more work than before. Limits that are not given stay. Servers need no new list."""
    folder, (name,) = folder_and(words, "NAME")
    opened = Folder.open(folder)
    entry = _living(opened, name)
    if entry.role != "learner":
        raise SettingsError(f"{name!r} is a {entry.role}: only learners need grants")
    if (batch_tokens or math.inf) < (entry.batch_tokens or 0) or (min_step_s or 0) > (entry.min_step_s or math.inf):
        raise SettingsError(
            f"{name!r} already has a larger grant ({_grant_of(entry)}), which cannot be reduced: revoke it, and add "
            "another name"
        )
    changes = {"batch_tokens": batch_tokens, "min_step_s": min_step_s}
    given = {what: value for what, value in changes.items() if value is not None}
    entry = parse(IdentityEntry, entry.model_dump() | given, "diloco keys grant")
    file = opened.grant(entry)
    print(f"learner {name}: {_grant_of(entry)}")
    if file == opened.answer_file(name):
        print(f"its team gets {file}, for diloco keys complete, and restarts it")
    else:
        print(f"it gets {file}, and is restarted")


def _grant_of(entry: IdentityEntry) -> str:
    """Return what a learner was granted, for people."""
    tokens = "the batch that the run's settings allow" if entry.batch_tokens is None else f"{entry.batch_tokens} tokens a step"
    return tokens if entry.min_step_s is None else f"{tokens}, steps of {entry.min_step_s:g} s or longer"


@keys.command()
def revoke(words: Named) -> None:
    """Revoke an identity for good."""
    folder, (name,) = folder_and(words, "NAME")
    opened = Folder.open(folder)
    if opened.roster.server(name) is not None:
        raise SettingsError(f"{name!r} is a server, which is trusted until its certificate expires: make a new folder")
    entry = _living(opened, name).model_copy(update={"revoked": True, "founder": False})
    opened.replace(entry)
    opened.forget(name)
    print(f"{entry.role} {name}: revoked")
    _say_reload(opened)


@keys.command()
def founded(where: Where = None) -> None:
    """Remove the rights to found and create a run from founders and coordinators, once the run has begun."""
    folder, _ = folder_and(where)
    opened = Folder.open(folder)
    founders = [entry for entry in opened.roster.identities if entry.founder]
    if not founders:
        raise SettingsError(f"{folder}: no identity may found run {opened.roster.run!r} (any more)")
    opened.replace(*(entry.model_copy(update={"founder": False}) for entry in founders))
    print(f"may no longer create or found the run: {', '.join(entry.name for entry in founders)}")
    _say_reload(opened)


@keys.command()
def refresh(
    where: Where = None,
    above: Annotated[
        int, typer.Option(help="Give the lists numbers above this one: the number of a server, if the folder is an older copy.")
    ] = 0,
) -> None:
    """Write the servers' files again: after an update of diloco, or when identities have expired."""
    if not 0 <= above <= MAX_LIST_NUMBER:
        raise SettingsError(f"--above {above}: expected 0 to {MAX_LIST_NUMBER}, the number of a server's list")
    opened = Folder.open(folder_and(where)[0])
    opened.refresh(above)
    changed = {server.name for server in opened.relisted}
    for server in opened.roster.servers:
        news = "which is new" if server.name in changed else "as before"
        print(f"server {server.name} gets all of {opened.server_folder(server.name)}: list {server.list_number}, {news}")


@keys.command()
def status(
    where: Where = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="A server's address; repeatable. Default: its first host, at port 4222, or 4223 of a control store alone.",
        ),
    ] = None,
    by: Annotated[
        Path | None,
        typer.Option(
            "--identity", help="Identity with which servers are asked. Default: an operator's or observer's of the folder."
        ),
    ] = None,
) -> int:
    """Ask every server which list of identities it has. Exit code 1 unless all have the newest."""
    opened = Folder.open(folder_and(where)[0])
    urls = addresses(opened, at or [])
    own = asking_identity(opened, by)
    observe.configure(own.name, own.run, level="error", fmt="console")
    found = asyncio.run(ask_servers(opened, own, urls))
    rows = [("server", "list here", "list there", ""), *((one.name, one.here, one.there, one.verdict) for one in found)]
    _print_table(rows)
    return 0 if all(one.current for one in found) else EXIT_BEHIND


@keys.command()
def browser(
    file: Annotated[Path, typer.Argument(metavar="IDENTITY", help="Identity file, preferably an observer's.")],
    out: Annotated[Path, typer.Option(help="File to write, NAME.p12.")],
) -> None:
    """Write an identity's certificate for a browser, to open a page that asks for one (page_tls)."""
    password = write_for_browser(file, out)
    print(f"{out}: import it into the browser's own certificates with the password {password}, then delete it")


@keys.command("list")
def list_(where: Where = None) -> None:
    """List servers and identities, and for how long each is valid."""
    opened, now = Folder.open(folder_and(where)[0]), datetime.now(UTC)
    rows = [
        ("server", server.name, ", ".join(server.serves) or "everything", _until(server.expires, now), ", ".join(server.hosts))
        for server in opened.roster.servers
    ]
    for entry in opened.roster.identities:
        until = "revoked" if entry.revoked else _until(entry.expires, now)
        rows.append((entry.role, entry.name, entry.region or "-", until, _notes(entry)))
    regions, authority = ", ".join(opened.roster.regions) or "none", _until(opened.authority.expires, now)
    print(f"run {opened.roster.run}, regions: {regions}; its authority: {authority}")
    _print_table(rows)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _notes(entry: IdentityEntry) -> str:
    """Return what is special about an identity, for people."""
    notes = ["founder"] if entry.founder else []
    return ", ".join(notes + ([f"{entry.processes} processes"] if (entry.processes or 1) > 1 else []))


def _until(expires: datetime, now: datetime) -> str:
    if expires <= now:
        return f"ended {expires:%Y-%m-%d}"
    return f"until {expires:%Y-%m-%d}" + (" (soon)" if expires - now < timedelta(days=SOON_DAYS) else "")


def _expiry(days: int) -> datetime:
    if not 1 <= days <= MAX_DAYS:
        raise SettingsError(f"--days {days}: expected 1 to {MAX_DAYS}; expired keys give no access")
    return datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)


def _living(opened: Folder, name: str) -> IdentityEntry:
    entry = opened.roster.identity(name)
    if entry is None:
        known = [entry.name for entry in (*opened.roster.servers, *opened.roster.identities)]
        raise SettingsError(f"{opened.path}: there is no {name!r}{nearest(name, known)}; diloco keys list {opened.path}")
    if entry.revoked:
        raise SettingsError(f"{name!r} was revoked already; to admit it again, add another name (diloco keys add)")
    return entry


def _say_reload(opened: Folder) -> None:
    """Print the servers whose lists have changed, which are to be reloaded."""
    for server in opened.relisted:
        path = opened.server_folder(server.name) / "auth.conf"
        reload = f"nats-server --signal reload, or docker compose kill -s HUP {_container(opened, server)}"
        print(f"server {server.name} gets {path}, its list {server.list_number}, and is reloaded: {reload}")


def _container(opened: Folder, server: ServerEntry) -> str:
    """Return how a server is called in the compose file of its datacenter, where ``bundle`` puts its files."""
    if not server.name.startswith(CONTROL):
        return "nats"
    return "control" if sum(other.is_control for other in opened.roster.servers) == 1 else "control-of-three"


def _say_routes(opened: Folder, entry: ServerEntry) -> None:
    """Print the other servers of the control store, which let no server in whose certificate they do not know."""
    for server in opened.roster.servers:
        if entry.is_control and server.is_control and server.name != entry.name:
            path = opened.server_folder(server.name) / "routes.conf"
            print(f"server {server.name} gets {path}, and is reloaded, before it forms a cluster with {entry.name}")
