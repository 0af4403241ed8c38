"""Handlers of one kind of message: decoded, checked, and counted where it is refused.

A message is what its subject says: servers let each identity publish on its own subjects alone. One that names another learner,
syncer or fragment than its subject is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from diloco.errors import FormatError, MessageError
from diloco.process.observe import Counted
from diloco.transport import Heard, Transport
from diloco.wire import framing
from diloco.wire.fields import MAX_FRAGMENTS
from diloco.wire.frame_sizes import largest_bytes
from diloco.wire.framing import Message

M = TypeVar("M", bound=Message)


async def hear(
    transport: Transport,
    subject: str,
    kind: type[M],
    run: bytes,
    handle: Callable[[M, Heard], Awaitable[None]],
    refused: Counted | None,
    fragments: int = MAX_FRAGMENTS,
) -> None:
    """Call ``handle`` with each message of ``kind`` on ``subject`` (wildcards allowed) that belongs to ``run``.

    It decodes as :func:`decoding`.
    """
    await transport.subscribe(subject, decoding(kind, run, handle, refused, fragments))


def decoding(
    kind: type[M],
    run: bytes,
    handle: Callable[[M, Heard], Awaitable[None]],
    refused: Counted | None,
    fragments: int = MAX_FRAGMENTS,
) -> Callable[[Heard], Awaitable[None]]:
    """Return a function that decodes a message of ``kind`` and calls ``handle`` with it.

    A message that is larger than any of its kind, in a run of so many ``fragments``, is refused before it is decoded.

    ``handle`` checks before it acts: a MessageError that it raises refuses the message, as a damaged frame does. A refused
    message is counted in ``refused`` by its subject and the error's type, and the first of each is logged; None, for commands,
    leaves that to the members of the run.
    """
    limit_bytes = largest_bytes(kind, fragments)

    async def decoded(heard: Heard) -> None:
        try:
            if len(heard.data) > limit_bytes:
                raise FormatError(f"{kind.kind}: {len(heard.data)} bytes, expected at most {limit_bytes}")
            message, _, _ = framing.unpack(heard.data, kind, run)
            check_subject(message, heard.subject)
            await handle(message, heard)
        except MessageError as error:
            if refused is not None:
                refused.note(heard.subject, type(error).__name__, reason=str(error))

    return decoded


def check_subject(message: Message, subject: str) -> None:
    """Refuse a message that states another name, or fragment, than its subject.

    Raises:
        FormatError: both are named.
    """
    if message.subject_field is not None:
        stated, own = str(getattr(message, message.subject_field)), name_in(subject)
        if stated != own:
            raise FormatError(f"{message.kind}: its subject names {message.subject_field} {own}, its content {stated!r}")


def name_in(subject: str) -> str:
    """Return the name of the learner or syncer, or the number of the fragment, whose subject it is."""
    return subject.rpartition(".")[2]
