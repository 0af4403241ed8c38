"""Bytes that this project does not write: arbitrary ones, valid ones mutated, and valid structures with hostile values."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

Bytes = st.SearchStrategy[bytes]
DEPTH = 20_000  # deeper than any reader may recurse

_HUGE = [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\x00\xff\xff\xff", b"\x80\x80\x80\x80\x7f"]


def packed(value: object) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(value)


# one msgpack value, whole or not, of every type and of sizes that are not there
_SCALARS: list[object] = [None, True, -1, 0, 2**62, 2**63, 2**64 - 1, -(2**63), -0.0, 1e308, 5e-324]
_OF_TYPES: list[object] = [
    *_SCALARS,
    *[float("nan"), float("inf"), -float("inf"), b"", "", [], {}, {"a": 1}, "learner-0\n", "\ud7ff\u0000"],
    *["x" * 70_000, b"x" * 70_000, [0] * 5000, ["learner-0"] * 5000, [[0, 0, 1]] * 5000],
]
MSGPACK: list[bytes] = [
    *map(packed, _OF_TYPES),
    b"\xa1\xff",  # not UTF-8
    b"\xa3\xed\xa0\x80",  # a surrogate
    b"\xc1",  # of no type
    b"\xd4\x01\x00",  # extension
    b"\xd6\xff\x00\x00\x00\x00",  # a time
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a time that is none
    b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
    *[head + b"\xff\xff\xff\xff" for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")],
    *[head + b"\x00\xff\xff\xff" for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")],
    b"\x91" * DEPTH,
    b"\x91" * DEPTH + b"\x00",
    b"\x81\xa1a" * DEPTH,
    b"\x82" * 600,
]

JSON: list[str] = [
    *[
        "null",
        "true",
        "-1",
        "0",
        "1e999",
        "-1e999",
        "1e308",
        "NaN",
        "Infinity",
        "-Infinity",
        "-0.0",
        "5e-324",
        "{}",
        "[]",
        "9223372036854775808",
        "1.5",
    ],
    "1" + "0" * 400,  # beyond a double
    "1" + "0" * 5000,  # more digits than Python reads
    '""',
    '"\\ud800"',
    '"\\u0000"',
    '"../../x"',
    '"' + "x" * 70_000 + '"',
    '"1"',
    "[" + ",".join("0" * 5000) + "]",
    "[[]]",
    '[["learner-0", 1]]',
    '{"": 0}',
    "[" * DEPTH,
    "[" * DEPTH + "]" * DEPTH,
    "[" * 700 + "]" * 700,
    '{"a":' * DEPTH,
    '{"a":' * 700 + "0" + "}" * 700,
]

TOML: list[str] = [
    *[
        "true",
        "-1",
        "0",
        "inf",
        "-inf",
        "nan",
        "1e308",
        "1e999",
        "[]",
        "{}",
        "1979-05-27",
        "07:32:00",
        "1979-05-27T07:32:00Z",
        "0xffffffffffffffffff",
    ],
    "9999-13-41",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "0x" + "f" * 5000,
    '""',
    '"\\u0000"',
    '"\\uD800"',
    '"' + "x" * 70_000 + '"',
    '"[::1]:99999999999999999999"',
    "[" * DEPTH,
    "[" * 700 + "]" * 700,
    "[[1, 2], {a = 1}]",
    "{a = " * 700 + "0" + "}" * 700,
    "{a.b.c = 1}",
    ".".join("a" * 5000) + " = 1",
]


@st.composite
def mutated(draw: st.DrawFn, valid: Bytes) -> bytes:
    """A valid one with a few of its bytes flipped, cut, repeated, moved, or made a huge length."""
    data = draw(valid)
    for _ in range(draw(st.integers(1, 3))):
        at, upto = sorted(draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data)))))
        way = draw(st.sampled_from(["flip", "cut", "drop", "repeat", "splice", "huge", "arbitrary"]))
        if way == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
        elif way == "cut":
            data = data[:at]
        elif way == "drop":
            data = data[:at] + data[upto:]
        elif way == "repeat":
            data = data[:at] + data[at:upto] * draw(st.integers(2, 50)) + data[upto:]
        elif way == "splice":
            data = data[:at] + draw(valid)[at:]
        elif way == "huge":
            huge = draw(st.sampled_from(_HUGE))
            data = data[:at] + huge + data[at + len(huge) :]
        else:
            data = data[:at] + draw(st.binary(max_size=16)) + data[upto:]
    return data[: 1 << 21]


def _replaced(value: Any, path: list[Any], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy


@st.composite
def _place(draw: st.DrawFn, value: Any) -> list[Any]:
    """A path to somewhere in a tree of dicts and lists; not in most cases the whole."""
    path: list[Any] = []
    while isinstance(value, dict | list | tuple) and value and draw(st.integers(0, 4)) > (0 if path else -1):
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        path.append(key)
        value = value[key]
    return path


@st.composite
def hostile_msgpack(draw: st.DrawFn, tree: st.SearchStrategy[Any]) -> bytes:
    """A valid structure of which one value, wherever it stands, is another; or is gone, or there twice."""
    value = draw(tree)
    path = draw(_place(value))
    new = draw(st.sampled_from(MSGPACK) | st.binary(max_size=12))
    if len(new) > 1000 and draw(st.booleans()):
        return new
    return packed(_replaced(value, path, msgspec.Raw(new)))


@st.composite
def hostile_json(draw: st.DrawFn, tree: st.SearchStrategy[Any]) -> bytes:
    """As :func:`hostile_msgpack`, of JSON."""
    value = draw(tree)
    path = draw(_place(value))
    if path and draw(st.integers(0, 5)) == 0:
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        shorter = {k: v for k, v in parent.items() if k != path[-1]} if isinstance(parent, dict) else parent[:-1]
        return json.dumps(_replaced(value, path[:-1], shorter)).encode()
    text = json.dumps(_replaced(value, path, "@@"))
    return text.replace('"@@"', draw(st.sampled_from(JSON))).encode()


@st.composite
def hostile_toml(draw: st.DrawFn, text: str) -> bytes:
    """A valid file of which one value is another, or of which a line is gone or there twice."""
    lines = text.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    key, equals, _ = lines[at].partition("=")
    new = draw(st.sampled_from(TOML))
    lines[at] = draw(st.sampled_from([f"{key}= {new}", f"{key}.x = {new}", lines[at] + "\n" + lines[at], ""])) if equals else ""
    return "\n".join(lines).encode()


def frames_of_zstd(valid: Bytes) -> Bytes:
    """zstd frames with something behind them, that state other sizes, or that hold far more than they are long."""
    bomb = st.sampled_from(
        [b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", size) + _zeros(size) for size in (64, 1 << 20, 1 << 30)]
    )
    behind = st.sampled_from(
        [
            b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00",  # an empty frame
            b"\x28\xb5\x2f\xfd\x00\x88\x01\x00\x00",  # one that wants a window of 128 MiB
            b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd",  # to be skipped
            b"\x50\x2a\x4d\x18\xff\xff\xff\xff",  # 4 GiB of that, which are not there
            b"\x00",
        ]
    )
    return st.one_of(bomb, st.tuples(valid, behind).map(b"".join), st.tuples(behind, valid).map(b"".join))


def _zeros(size: int) -> bytes:
    """Blocks of a zstd frame that each say: so many zeros."""
    blocks, left = b"", min(size, 1 << 24)
    while left:
        count = min(left, 1 << 17)
        left -= count
        blocks += struct.pack("<I", count << 3 | 1 << 1 | (not left))[:3] + b"\x00"
    return blocks


def sources(valid: Bytes, *hostile: Bytes, seal: Callable[[bytes], bytes] = bytes) -> Bytes:
    """All three; ``seal`` makes right a check that would else hide what stands behind it."""
    mutants = mutated(valid)
    return st.one_of(st.binary(max_size=200), mutants, mutants.map(seal), *hostile)
