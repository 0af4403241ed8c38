"""Grants: how much work a learner may state, as its operator has it signed.

A grant travels as the bytes that were signed, so that they are not encoded again to check the signature
(:mod:`diloco.nats.grants`). It also binds the learner's public key to its name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from diloco.errors import FormatError
from diloco.wire.fields import MemberName, Number

CONTEXT = b"DLC1grant\x00"  # in front of what is signed: the key signs nothing else by accident
MAX_BYTES = 512

PublicKey = Annotated[str, Meta(pattern=r"^U[A-Z2-7]{55}\Z")]
StepSeconds = Annotated[float, Meta(ge=1e-6, le=1e6)]


class Grant(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The work that a learner may state."""

    run: MemberName
    learner: MemberName
    public_key: PublicKey  # of the learner
    batch_tokens: Number | None  # of one step, at most; None: as the run's settings bound it
    min_step_s: StepSeconds | None  # of its fastest step; None: as of any learner


class SignedGrant(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A grant, and the signature of the run's authority."""

    content: Annotated[bytes, Meta(max_length=MAX_BYTES)]  # a Grant, as it was signed
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]

    @property
    def signed(self) -> bytes:
        """The bytes that the signature is of."""
        return CONTEXT + self.content

    def decode(self) -> Grant:
        """Return the grant; the signature is not checked.

        Raises:
            FormatError: it is none.
        """
        try:
            return _DECODER.decode(self.content)
        except (msgspec.MsgspecError, ValueError) as error:
            raise FormatError(f"grant: {error}") from None


_DECODER = msgspec.msgpack.Decoder(Grant)
