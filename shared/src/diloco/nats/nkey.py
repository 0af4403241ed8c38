"""Key pairs that identify a client to a NATS server (nkeys): Ed25519, in base32 with their kind and a checksum.

A seed is ``SU`` and 56 characters more, a public key ``U`` and 55. (The package ``nkeys`` does the same; there is no wheel of
it, and nothing in the images is built from other people's source.)
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass

from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

KEY_BYTES = 32
CHECKSUM_BYTES = 2
_SEED, _USER = 18 << 3, 20 << 3  # the kind, in the first five bits, and in a seed the next eight
_SEED_PREFIX = bytes([_SEED | _USER >> 5, (_USER & 31) << 3])


@dataclass(frozen=True)
class NatsKey:
    """A user's key pair; ``repr`` does not show the seed."""

    public_key: str
    _signing: SigningKey

    @classmethod
    def new(cls) -> NatsKey:
        """Make a new key pair."""
        return cls._of(os.urandom(KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: str) -> NatsKey:
        """Return the key pair of a seed.

        Raises:
            ValueError: it is no seed of a user's key.
        """
        try:
            raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
        except ValueError:  # also of characters that are not ASCII
            raise ValueError("seed is not a key of NATS") from None
        content, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
        if len(raw) != len(_SEED_PREFIX) + KEY_BYTES + CHECKSUM_BYTES or checksum != _checksum(content):
            raise ValueError("seed is not a key of NATS")
        if not content.startswith(_SEED_PREFIX):
            raise ValueError("seed is not a key of a NATS user")
        return cls._of(content[len(_SEED_PREFIX) :])

    @classmethod
    def _of(cls, key: bytes) -> NatsKey:
        signing = SigningKey(key)
        return cls(_text(bytes([_USER]) + bytes(signing.verify_key)), signing)

    def __repr__(self) -> str:
        return f"NatsKey({self.public_key})"

    @property
    def seed(self) -> str:
        """The secret form of the key pair."""
        return _text(_SEED_PREFIX + bytes(self._signing))

    def sign(self, nonce: str) -> bytes:
        """Return the signature of a server's nonce, in base64, which proves possession of the key."""
        return base64.b64encode(self.sign_bytes(nonce.encode()))

    def sign_bytes(self, content: bytes) -> bytes:
        """Return the signature of ``content``, 64 bytes."""
        return self._signing.sign(content).signature


def verify_key(public_key: str) -> VerifyKey:
    """Return the key that checks signatures by the key pair of a user.

    Raises:
        ValueError: it is no public key of a user.
    """
    try:
        raw = base64.b32decode(public_key + "=" * (-len(public_key) % 8))
    except ValueError:  # also of characters that are not ASCII
        raise ValueError("not a public key of NATS") from None
    key, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
    if len(key) != 1 + KEY_BYTES or key[0] != _USER or checksum != _checksum(key):
        raise ValueError("not a public key of a NATS user")
    return VerifyKey(key[1:])


def verify(public_key: str, content: bytes, signature: bytes) -> bool:
    """Whether ``signature``, 64 bytes, is that of ``content`` by the key pair of a user's public key.

    Raises:
        ValueError: ``public_key`` is none.
    """
    try:
        verify_key(public_key).verify(content, signature)
    except BadSignatureError:
        return False
    return True


def _text(content: bytes) -> str:
    return base64.b32encode(content + _checksum(content)).decode().rstrip("=")


def _checksum(content: bytes) -> bytes:
    return binascii.crc_hqx(content, 0).to_bytes(CHECKSUM_BYTES, "little")
