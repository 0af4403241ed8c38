"""What members wrote for others to read: lines and headers of any bytes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.nats.received import READ_BYTES, Delivered, delivered, headers


def test_lines_before_messages() -> None:
    assert delivered(b"MSG a.b 7 12") == Delivered(b"a.b", 7, b"", 0, 12)
    assert delivered(b"HMSG a.b 7 reply 10 12") == Delivered(b"a.b", 7, b"reply", 10, 12)
    assert delivered(b"MSG a\x0cb\xff 7 \xfe 0") == Delivered("a\x0cb\ufffd".encode(), 7, "\ufffd".encode(), 0, 0)
    assert delivered(b"PING") is None
    for wrong in (b"MSG a 1", b"MSG a b 1", b"MSG a 1 -1", b"HMSG a 1 13 12", b"MSG a 1 r 2 3", b"MSG a 1 " + b"9" * 5000):
        with pytest.raises(ValueError, match="MSG"):
            delivered(wrong)


def test_a_status_is_the_servers_word_alone() -> None:
    assert headers(b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 1\r\n\r\n") == {
        "Status": "408",
        "Description": "Request Timeout",
        "Nats-Pending-Messages": "1",
    }
    assert headers(b"NATS/1.0\r\nStatus: 503\r\nDescription: x\r\n\r\n") == {}
    # as the server answers a direct get of a message whose writer pretends
    stored = b"NATS/1.0 404 x\r\nNats-Sequence: 7\r\nNats-Subject: another\r\n"
    assert headers(stored + b"Nats-Subject: own\r\nNats-Sequence: 3\r\n\r\n") == {"Nats-Subject": "own", "Nats-Sequence": "3"}


def test_a_large_block_takes_no_longer_than_a_small_one() -> None:
    block = b"NATS/1.0\r\n" + b"a:\r\n" * (1 << 18) + b"Nats-Subject: own\r\n\r\n"
    began_s = time.process_time()
    assert headers(block)["Nats-Subject"] == "own"
    assert time.process_time() - began_s < 0.05
    assert READ_BYTES < 1 << 13


@given(st.binary(max_size=200))
def test_any_bytes_are_headers(block: bytes) -> None:
    for name, value in headers(block).items():
        assert isinstance(name + value, str)
