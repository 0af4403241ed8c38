"""NATS key pairs; ``tests/services`` has servers that check their signatures."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import VerifyKey

from diloco.nats.nkey import NatsKey

# the pair that the documentation of NATS shows
SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
PUBLIC = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def test_a_seed_stands_for_the_key_that_the_documentation_says() -> None:
    key = NatsKey.from_seed(SEED)
    assert (key.public_key, key.seed) == (PUBLIC, SEED)
    assert SEED not in repr(key)


def test_what_is_signed_is_checked_with_the_public_key_alone() -> None:
    key = NatsKey.new()
    verify = VerifyKey(base64.b32decode(key.public_key)[1:33])
    assert verify.verify(b"nonce", base64.b64decode(key.sign("nonce"))) == b"nonce"
    assert NatsKey.from_seed(key.seed) == key
    assert NatsKey.new() != key


@pytest.mark.parametrize(
    ("seed", "reason"),
    [
        ("", "not a key of NATS"),
        (SEED[:-1], "not a key of NATS"),
        (SEED.lower(), "not a key of NATS"),
        (SEED[:-5] + "AAAAA", "not a key of NATS"),
        (SEED + "AAAAAAAA", "not a key of NATS"),
        (PUBLIC, "not a key of NATS"),
        ("SÜ", "not a key of NATS"),
        # an account's, of zeros
        ("SAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAHT5A", "not a key of a NATS user"),
    ],
)
def test_what_is_none_is_refused(seed: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"seed is {reason}"):
        NatsKey.from_seed(seed)


@given(st.text(max_size=80))
def test_any_text_is_refused_as_one_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="seed is not a key"):
        NatsKey.from_seed(text)
