"""Connections between processes that prove that both ends have the key of one learner, before anything else is read.

The key is :attr:`diloco.nats.identity.Identity.meeting_key`, of the identity that all processes of a learner share. Each end
sends 32 random bytes, and returns a keyed hash of both ends' and of which end it is, so that no answer serves twice or for the
other end. Nothing that is sent tells whose key it is: consumers are named by the public key, which is to stay secret. In a run
without identities the key is :data:`OPEN`, which everybody knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
from collections.abc import Iterator

from blake3 import blake3

from diloco.errors import HashError
from diloco.processes.stream import Stream
from diloco.wire.process_messages import Challenge, Proof

OPEN = bytes(32)
PROVING_S = 5.0  # four small messages, on a busy machine
MAX_STRANGERS = 256  # connections that have not proved anything; one holds 4 KiB


def secret_of(key: bytes, sent: bytes) -> bytes:
    """Return the secret of a generation, 32 bytes, of which ``sent`` has travelled: who only heard that does not know it."""
    return blake3(sent, key=key).digest()


async def prove(stream: Stream, key: bytes) -> None:
    """Prove to the process that listens that this one has the key, and find out that it has, too.

    Raises:
        HashError: it has another one.
        MessageError, EOFError, OSError, TimeoutError: it does not answer as a process does.
    """
    async with asyncio.timeout(PROVING_S):
        own = Challenge(os.urandom(32))
        await stream.send(own)
        theirs = await stream.receive_one(Challenge)
        await stream.send(Proof(_mac(key, "comes", own, theirs)))
        _check(await stream.receive_one(Proof), _mac(key, "listens", own, theirs))
    stream.trust()


class Door:
    """Where connections come in. Few are strangers at a time, and the oldest is closed, so that others can prove themselves."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._strangers: dict[Stream, None] = {}

    async def admit(self, stream: Stream) -> None:
        """Let a process in that has the key. One that has another is told so by a proof that it finds wrong.

        Raises:
            HashError: it has not.
            MessageError, EOFError, OSError, TimeoutError: it does not speak as a process does.
        """
        with self._stranger(stream):
            async with asyncio.timeout(PROVING_S):
                theirs, own = await stream.receive_one(Challenge), Challenge(os.urandom(32))
                await stream.send(own)
                proof = await stream.receive_one(Proof)
                await stream.send(Proof(_mac(self._key, "listens", theirs, own)))
                _check(proof, _mac(self._key, "comes", theirs, own))
        stream.trust()

    @contextlib.contextmanager
    def _stranger(self, stream: Stream) -> Iterator[None]:
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.abort()
        self._strangers[stream] = None
        try:
            yield
        finally:
            self._strangers.pop(stream, None)


def _mac(key: bytes, end: str, comes: Challenge, listens: Challenge) -> bytes:
    return blake3(f"{end} ".encode() + comes.nonce + listens.nonce, key=key).digest()


def _check(proof: Proof, expected: bytes) -> None:
    if not hmac.compare_digest(proof.mac, expected):
        raise HashError("it has the key of another identity, or no key")
