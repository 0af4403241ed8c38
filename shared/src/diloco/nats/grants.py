"""Signatures of grants (:mod:`diloco.wire.grants`), by the key of a run's authority: Ed25519, as all keys of NATS."""

from __future__ import annotations

import base64
import binascii

import msgspec

from diloco.errors import FormatError
from diloco.nats.nkey import NatsKey, verify
from diloco.wire.grants import Grant, SignedGrant


def sign(grant: Grant, authority: NatsKey) -> SignedGrant:
    """Return a grant, signed."""
    unsigned = SignedGrant(msgspec.msgpack.encode(grant), bytes(64))
    return SignedGrant(unsigned.content, authority.sign_bytes(unsigned.signed))


def opened(signed: SignedGrant | None, authority: str, run: str, learner: str) -> Grant:
    """Return the grant of a learner; ``authority``: the public key of the run's authority. Takes 0.2 ms.

    Raises:
        FormatError: there is none, or not the authority's, of this run and this learner.
    """
    if signed is None:
        raise FormatError(f"learner {learner} has no grant: diloco keys grant DIR {learner} makes one for its identity file")
    if not verify(authority, signed.signed, signed.signature):
        raise FormatError(
            f"the grant of learner {learner} is not signed by the authority of run {run!r}: it was made with another "
            f"folder of keys; make it with the folder of this run (diloco keys grant DIR {learner})"
        )
    grant = signed.decode()
    if (grant.run, grant.learner) != (run, learner):
        raise FormatError(
            f"the grant of learner {learner} of run {run!r} was issued for learner {grant.learner} of run {grant.run!r}"
        )
    return grant


def to_text(signed: SignedGrant) -> str:
    """Return a grant as identity files have it."""
    return base64.b64encode(msgspec.msgpack.encode(signed)).decode()


def from_text(text: str) -> SignedGrant:
    """Return the grant in an identity file.

    Raises:
        FormatError: it is damaged.
    """
    try:
        return msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=SignedGrant)
    except (binascii.Error, msgspec.MsgspecError, ValueError):
        raise FormatError("grant is damaged") from None
