"""The accounts of a server's ``auth.conf``: an own one for every identity, and what each may reach of the others.

The lists of :mod:`diloco_ops.keys.permissions` would not do by themselves. nats-server checks no permission on the subject that
it is to answer to, and answers with rights of its own: a client that may ask for a message that does not exist could have the
empty answer sent to ``$JS.API.STREAM.DELETE`` of any stream, or into the bucket. But it answers within the account of the
client. So every identity is in an account of its own, which imports the subjects that the identity may publish, and no others:
an answer can land only where the asker may write itself.

===========  ====================  ====================================================================================
account      users                 has
===========  ====================  ====================================================================================
``RUN``      none                  the streams and the bucket
``SIGNALS``  none                  passes on all that is not stored: heartbeats, announcements, requests among processes
``P`` and a  one identity          an inbox, and imports
number
===========  ====================  ====================================================================================

A server that is reloaded does not connect the services of an account that it did not know before (nats-server 2.15.1; the next
reload does). So there are always at least :data:`SPARE` accounts without a user, of which new identities take theirs. Their
number grows by as many at a time, so that an identity that a server does not know changes nothing in its file.

A restored stream's chunks are no requests for a service, which would put a header before their bytes: an operator's account has
``RUN`` hear them, and the server answers in ``RUN``, to the inbox that the operator's account hears there.

``SIGNALS`` is apart from ``RUN`` because of consumers that push. The subject that they send to is the asker's choice as well,
and the server sends in the account of the streams. No subscription of a process is there.

A signal leaves an account under ``sent.``, and enters all those that may hear it under ``heard.``, which is taken off there:
nats-server refuses imports that lead from one account to itself, even through another one, under names that overlap. The reply
subject of a request becomes another one on each border, under ``_R_``, and leads back to the asker alone. So no process can be
made to answer anywhere else.

An identity asks which list its server goes by with a message to itself, which a mapping of its account gives another subject
(:mod:`diloco.nats.server_list`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from diloco.nats.server_list import ServerList
from diloco.wire.subjects import Subjects, list_answer, list_request
from diloco_ops.keys.permissions import ANSWERS, Allowed, Who, most_payload_bytes, permissions

STREAMS, SIGNALS = "RUN", "SIGNALS"  # names of processes are in lower case
SPARE = 64  # identities that may be added between two reloads of a server
CONNECTIONS = 32  # of one identity at a time: a service has two, and after a restart those that a server does not miss yet
CONNECTIONS_OF_PROCESS = 4  # where many processes share one
READER_CONNECTIONS = 8  # of an observer, for four commands at a time, or of an evaluator
SENT, HEARD = "sent.", "heard."
STORED = ("$JS.API.>", "$JS.SNAPSHOT.>")  # of RUN, beside the subjects that its streams store
RESTORED = "$JS.SNAPSHOT.RESTORE."  # chunks of a snapshot, which RUN hears: a service would put a header before their bytes

NOTHING = Allowed()


@dataclass(frozen=True)
class Import:
    """Subjects of another account: to ask or to write there (a service), or to hear (a stream); ``to`` are their names here."""

    kind: str
    account: str
    subject: str
    to: str = ""


@dataclass(frozen=True)
class Account:
    """An account: its user, and the subjects that lead out of it and into it."""

    name: str
    user: Who | None = None
    most_payload_bytes: int | None = None  # of a message of its user; None: as the server takes from all
    allowed: Allowed = NOTHING
    services: tuple[str, ...] = ()  # exported: others may ask or write these
    streams: tuple[str, ...] = ()  # exported: others may hear these
    imports: tuple[Import, ...] = ()
    renames: tuple[str, str] | None = None  # the prefix of what comes in, and the one that it gets here
    answer: tuple[str, str] | None = None  # where its user asks for the list, and where the answer comes

    @property
    def has_streams(self) -> bool:
        return self.name == STREAMS


def accounts(
    run: str, regions: Sequence[str], serves: Collection[str], known: Mapping[int, Who], count: int, listed: ServerList
) -> list[Account]:
    """Return the accounts of a server of these regions, of the control store, or both.

    Args:
        known: the identities that may connect there, by the number of their account.
        count: accounts that identities of the run have, or had, at any server.
        listed: the list that they make.
    """
    names = Subjects(run)
    own = [
        _own(number, known[number], run, regions, serves, listed) if number in known else Account(f"P{number}")
        for number in range((-(-count // SPARE) + 1) * SPARE)
    ]
    written = (*STORED, f"$KV.{names.bucket}.>", *names.log_filters(), *names.offer_filters(), *names.archive_filters())
    saved = tuple(one.subject for account in own for one in account.imports if one.kind == "stream")
    heard = tuple(Import("service", account.name, subject) for account in own for subject in account.services)
    sent = tuple(SENT + subject for subject in _signals(names))
    hub = Account(SIGNALS, services=sent, imports=heard, renames=(SENT, HEARD))
    restored = tuple(Import("stream", account.name, subject) for account in own for subject in account.streams)
    return [Account(STREAMS, services=written, streams=saved, imports=restored), hub, *own]


def _own(number: int, who: Who, run: str, regions: Sequence[str], serves: Collection[str], listed: ServerList) -> Account:
    """Return the account of an identity."""
    allowed, signals, inbox = permissions(who, run, regions, serves), _signals(Subjects(run)), f"_INBOX_{who.name}.>"

    def is_signal(subject: str) -> bool:
        return any(covers(signal, subject) for signal in signals)

    chunks = tuple(subject for subject in allowed.publish if subject.startswith(RESTORED))
    out = [subject for subject in allowed.publish if subject not in (inbox, ANSWERS, *chunks)]
    imports = [
        Import("service", SIGNALS, SENT + subject, subject) if is_signal(subject) else Import("service", STREAMS, subject)
        for subject in out
    ]
    if any(subject.startswith("$JS.SNAPSHOT.") for subject in out):
        imports.append(Import("stream", STREAMS, inbox))  # a snapshot is no answer: the server sends it to a subject of RUN
    heard = tuple(HEARD + subject for subject in allowed.subscribe if is_signal(subject))
    asked = list_request(who.name, "*")
    answer = asked, list_answer(who.name, "{{wildcard(1)}}", listed.server, listed.number, listed.digest)
    return Account(
        name=f"P{number}",
        user=who,
        most_payload_bytes=most_payload_bytes(who, regions, serves),
        allowed=allowed,
        services=heard,
        streams=chunks,
        imports=tuple(imports),
        renames=(HEARD, ""),
        answer=answer,
    )


def _signals(names: Subjects) -> tuple[str, ...]:
    """Return the subjects of all that is not stored: messages to all, and requests that a process answers."""
    named = (names.heartbeat(), names.presence(), names.shard(), names.sample(), names.gauges(), names.round())
    shown = (names.sender_report(), names.marker_answer())
    return (*named, *shown, names.state("*"), names.coordinator, names.changed, names.marker, names.status)


def most_connections(who: Who) -> int:
    """Return how many connections an identity may have at a time."""
    if who.role in ("observer", "evaluator"):
        return READER_CONNECTIONS
    return max(CONNECTIONS, CONNECTIONS_OF_PROCESS * who.processes)


def covers(pattern: str, subject: str) -> bool:
    """Whether ``pattern`` stands for every subject that ``subject`` stands for."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(given) >= len(wanted) and covers(".".join(wanted[:-1]), ".".join(given[: len(wanted) - 1]))
    return len(wanted) == len(given) and all(
        one == other or (one == "*" and other != ">") for one, other in zip(wanted, given, strict=True)
    )


def authorization(made: Sequence[Account]) -> str:
    """Return the text of accounts."""
    return "\n".join(["accounts {", *chain.from_iterable(_text(account) for account in made), "}"]) + "\n"


def _text(account: Account) -> list[str]:
    if account == Account(account.name):
        return [f"  {account.name} {{}}"]
    lines = [f"  {account.name} {{"]
    if account.has_streams:
        lines.append("    jetstream: enabled")
    if account.user is not None:
        lines += [
            f"    # {account.user.name}: {account.user.role}",
            f"    users: [ {{ nkey: {account.user.public_key}, permissions: {{",
        ]
        for what, subjects in (("publish", account.allowed.publish), ("subscribe", account.allowed.subscribe)):
            lines += [f"      {what}: {{ allow: [", *(f'        "{subject}"' for subject in subjects), "      ] }"]
        limits = f"max_connections: {most_connections(account.user)}"
        if account.most_payload_bytes is not None:
            limits += f", max_payload: {account.most_payload_bytes}"
        lines += ["    } } ]", f"    limits: {{ {limits} }}"]
    answered = ", response_type: stream" if account.has_streams else ""
    exports = [f'{{ service: "{subject}"{answered} }}' for subject in account.services]
    exports += [f'{{ stream: "{subject}" }}' for subject in account.streams]
    imports = [_imported(one) for one in account.imports]
    mappings = [account.answer] if account.answer is not None else []
    if account.renames is not None:
        coming, here = account.renames
        mappings.append((f"{coming}diloco.>", f"{here}diloco.>"))
    if mappings:
        lines += ["    mappings: {", *(f'      "{subject}": "{to}"' for subject, to in mappings), "    }"]
    for what, items in (("exports", exports), ("imports", imports)):
        if items:
            lines += [f"    {what}: [", *(f"      {item}" for item in items), "    ]"]
    return [*lines, "  }"]


def _imported(one: Import) -> str:
    to = f', to: "{one.to}"' if one.to else ""
    return f'{{ {one.kind}: {{ account: {one.account}, subject: "{one.subject}" }}{to} }}'
