"""Changing a run by a command: in whose name, and how it is told."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from diloco.control.changes import append_changes
from diloco.control.creation import KnownRun
from diloco.core.run.changes import MAX_AUTHOR, Action, Change, Effective, text_of
from diloco.nats.transport import NatsTransport

Reason = Annotated[str, typer.Option(help="Reason, one line, stored with the change.")]
Say = Callable[[str], object]  # takes a line for the person who changes the run


async def make_changes(
    transport: NatsTransport, run: KnownRun, decide: Callable[[Effective], Sequence[Action]], reason: str, say: Say = print
) -> list[Change]:
    """Append the changes that ``decide`` gives for those in force, say and return them.

    Raises: as :func:`diloco.control.changes.append_changes`.
    """
    made = await append_changes(transport, run, decide, author=author(transport), reason=reason)
    for one in made:
        say(f"change {one.number}: {text_of(one)}")
    return made


def author(transport: NatsTransport) -> str:
    """Return the name of the author: the identity, or else the user and the machine, as far as they can be told."""
    if transport.identity is not None:
        return transport.identity.name
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = "operator"
    text = f"{user}@{socket.gethostname()}"
    return "".join(c if c.isprintable() else "?" for c in text)[:MAX_AUTHOR]
