"""Key pairs by which a NATS server knows who connects (nkeys): Ed25519, in base32 with what they are for and a checksum.

A seed is ``SU`` and 56 characters more, a public key ``U`` and 55. (The package ``nkeys`` does the same; there is no wheel of
it, and nothing in the images is built from other people's source.)
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass

from nacl.signing import SigningKey

KEY_BYTES = 32
CHECKSUM_BYTES = 2
_SEED, _USER = 18 << 3, 20 << 3  # what the first five bits, and in a seed the next eight, say
_SEED_PREFIX = bytes([_SEED | _USER >> 5, (_USER & 31) << 3])


@dataclass(frozen=True)
class NatsKey:
    """A user's key pair; ``repr`` does not show the seed."""

    public_key: str
    _signing: SigningKey

    @classmethod
    def new(cls) -> NatsKey:
        """One that nobody has."""
        return cls._of(os.urandom(KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: str) -> NatsKey:
        """The one that a seed stands for.

        Raises:
            ValueError: it is no seed of a user's key.
        """
        try:
            raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
        except ValueError:  # also of characters that are not ASCII
            raise ValueError("seed is no key of NATS") from None
        content, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
        if len(raw) != len(_SEED_PREFIX) + KEY_BYTES + CHECKSUM_BYTES or checksum != _checksum(content):
            raise ValueError("seed is no key of NATS")
        if not content.startswith(_SEED_PREFIX):
            raise ValueError("seed is no key of a user of NATS")
        return cls._of(content[len(_SEED_PREFIX) :])

    @classmethod
    def _of(cls, key: bytes) -> NatsKey:
        signing = SigningKey(key)
        return cls(_text(bytes([_USER]) + bytes(signing.verify_key)), signing)

    def __repr__(self) -> str:
        return f"NatsKey({self.public_key})"

    @property
    def seed(self) -> str:
        """What is to be kept secret."""
        return _text(_SEED_PREFIX + bytes(self._signing))

    def sign(self, nonce: str) -> bytes:
        """What a server wants to see of whoever says that the key is theirs: the signature of its nonce, in base64."""
        return base64.b64encode(self._signing.sign(nonce.encode()).signature)


def _text(content: bytes) -> str:
    return base64.b32encode(content + _checksum(content)).decode().rstrip("=")


def _checksum(content: bytes) -> bytes:
    return binascii.crc_hqx(content, 0).to_bytes(CHECKSUM_BYTES, "little")
