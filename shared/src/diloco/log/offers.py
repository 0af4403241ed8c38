"""Storing an offer, a learner's or a regional one, however often that has to be tried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from diloco.errors import AppendUncertainError, StorageFullError
from diloco.transport import Transport
from diloco.wire import framing, subjects
from diloco.wire.offers import Offer, RegionalOffer
from diloco.wire.subjects import Subjects

ID_BYTES = 16  # of an append's identifier, drawn at random, so that it cannot be guessed
STORAGE_RETRY_S = 1.0  # a full disk is not emptied sooner, and a round lasts longer


async def append_offer(
    transport: Transport,
    names: Subjects,
    run: bytes,
    offer: Offer | RegionalOffer,
    inline: bytes,
    parts: Sequence[bytes],
    *,
    timeout_s: float,
    failed: Callable[[AppendUncertainError | StorageFullError], None],
    wanted: Callable[[], bool] = lambda: True,
) -> int | None:
    """Append an offer; return its head's stream sequence, or None once it is no longer ``wanted``.

    It replaces the sender's offer before. While the server does not answer it is sent again at once, under the same message id,
    so that it is stored once. The id is random: a learner that could tell it beforehand would use it on a subject of its own,
    and the server would take this offer for a copy of that message. While there is no room the offer is sent again after a
    while: giving up would leave the round without this answer, and a round without answers never closes.

    Args:
        inline: body in the head, as :func:`diloco.wire.messages.describe_body` gives it.
        parts: body beside the head.
        timeout_s: how long to wait for the server's answer.
        failed: called at each failure, to log it.
        wanted: asked before each attempt.
    """
    if isinstance(offer, RegionalOffer):
        head = names.regional_offer(offer.fragment, offer.syncer)
    else:
        head = names.offer(offer.fragment, offer.learner)
    identifier = transport.random_bytes(ID_BYTES).hex()
    frame = framing.pack(offer, run, inline)
    while wanted():
        try:
            return await transport.append(
                head,
                frame,
                parts=parts,
                part_subject=lambda index: subjects.offer_part(head, index),
                message_id=identifier,
                fence=None,
                timeout_s=timeout_s,
            )
        except (AppendUncertainError, StorageFullError) as error:
            failed(error)
            if isinstance(error, StorageFullError):
                await asyncio.sleep(STORAGE_RETRY_S)
    return None
