"""The golden messages, made from ``docs/protocol.md`` alone: nothing of this project is imported.

``python tests/protocol/make_golden.py`` writes ``golden/``: a frame or value a file as hex, and ``expected.json`` with
every message's fields, the hashes and the state after each log entry. ``follows`` names the message that an entry
follows in its log, that a keyframe stands after, or that a claim or notice is of; it is null before genesis. Bodies are zstd
frames of raw blocks, which need no compressor; their bytes are as good as any.
"""

from __future__ import annotations

import json
import struct
from base64 import b32encode
from binascii import crc_hqx
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from blake3 import blake3
from nacl.signing import SigningKey
from numpy.typing import NDArray

FOLDER = Path(__file__).with_name("golden")
RUN_NAME = "golden"
SETTINGS = b'{"example":true,"outer":{"learning_rate":0.3}}'
PART_BYTES = 524288
AUTHORITY = bytes(range(32))  # its secret key
Floats = NDArray[np.float32]


def digest(data: bytes) -> bytes:
    return bytes(blake3(data).digest())


def packb(value: Any) -> bytes:
    """Return msgpack in its shortest form, with 64 bits for every float."""
    return bytes(msgpack.packb(value))


def zstd(content: bytes) -> bytes:
    """A zstd frame (RFC 8878) of raw blocks: single segment, content size in 4 bytes, no checksum."""
    blocks = [content[at : at + 65536] for at in range(0, len(content), 65536)]
    frame = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", len(content))
    for i, block in enumerate(blocks):
        frame += ((len(block) << 3) | (i == len(blocks) - 1)).to_bytes(3, "little") + block
    return frame


SETTINGS_DIGEST = digest(SETTINGS)
RUN = digest(RUN_NAME.encode() + b"\0" + SETTINGS_DIGEST)[:8]


def hash_of(kind: str, fields: bytes) -> bytes:
    return digest(b"DLC2" + kind.encode() + b"\0" + RUN + fields)


def frame(kind: str, fields: list[Any], inline: bytes = b"") -> bytes:
    packed = packb(fields)
    return packb(["DLC", 2, kind, RUN, packed, hash_of(kind, packed), inline])


# ---- bodies


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(halves: NDArray[np.uint16]) -> Floats:
    values: Floats = (halves.astype(np.uint32) << 16).view(np.float32)
    return values


def blocks_of(values: Floats) -> Floats:
    padded = np.zeros(-(-values.size // 64) * 64, np.float32)
    padded[: values.size] = values
    return padded.reshape(-1, 64)


def encode(values: Floats, bits: int) -> bytes:
    """A body; here no scale is zero, subnormal or too large."""
    if bits in (16, 32):
        return bytes(values.astype("<f4").data if bits == 32 else to_bfloat16(values).astype("<u2").data)
    blocks = blocks_of(values)
    if bits < 4:
        return (encode1 if bits == 1 else encode2)(blocks, values.size)
    largest = np.abs(blocks).max(axis=1)
    if bits == 8:
        scales = largest / np.float32(127)
        codes = np.rint(np.clip(blocks * (np.float32(1) / scales)[:, None], -127, 127)).astype(np.int8)
        return bytes(scales.astype("<f4").tobytes() + codes.tobytes())
    halves = to_bfloat16(largest / np.float32(7))
    inverse = np.float32(1) / from_bfloat16(halves)
    nibbles = (np.rint(np.clip(blocks * inverse[:, None], -7, 7)) + 8).astype(np.uint8)
    return bytes(halves.astype("<u2").tobytes() + (nibbles[:, :32] | (nibbles[:, 32:] << 4)).tobytes())


def total(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of blocks in the order that the text gives, with the 16 lanes as columns."""
    lanes = grid[:, :16] + grid[:, 16:32] + grid[:, 32:48] + grid[:, 48:]
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


def encode1(blocks: Floats, n: int) -> bytes:
    """A body of 1 bit."""
    in_block = np.minimum(64, n - 64 * np.arange(len(blocks)))[:, None]
    halves = to_bfloat16((total(np.abs(blocks).astype(np.float64)) / in_block).astype(np.float32).reshape(-1))
    packed = sum((blocks[:, 8 * k : 8 * k + 8] >= 0).astype(np.uint8) << k for k in range(8))
    return bytes(halves.astype("<u2").tobytes() + np.asarray(packed, np.uint8).tobytes())


def encode2(blocks: Floats, n: int) -> bytes:
    """A body of 2 bits."""
    sizes = np.abs(blocks).astype(np.float64)
    in_block = np.minimum(64, n - 64 * np.arange(len(blocks)))[:, None]
    far = sizes > 0.7875 * total(sizes * sizes) / total(sizes)
    scales = (2 * total(sizes) + 5 * total(sizes * far)) / (4 * in_block + 45 * total(far.astype(np.float64)))
    halves = to_bfloat16(scales.astype(np.float32).reshape(-1))
    y = blocks * (np.float32(1) / from_bfloat16(halves))[:, None]
    codes = np.where(y < 0, np.where(y < -4.5, 0, 1), np.where(y > 4.5, 3, 2)).astype(np.uint8)
    packed = sum(codes[:, 16 * k : 16 * k + 16] << (2 * k) for k in range(4))
    return bytes(halves.astype("<u2").tobytes() + np.asarray(packed, np.uint8).tobytes())


def decode(body: bytes, n: int, bits: int) -> Floats:
    if bits == 32:
        return np.frombuffer(body, "<f4").astype(np.float32)
    if bits == 16:
        return from_bfloat16(np.frombuffer(body, "<u2"))
    count = -(-n // 64)
    if bits == 8:
        scales, codes = np.frombuffer(body[: 4 * count], "<f4"), np.frombuffer(body[4 * count :], np.int8)
        values: Floats = codes.reshape(count, 64).astype(np.float32) * scales[:, None]
        return values.reshape(-1)[:n]
    halves = np.frombuffer(body[: 2 * count], "<u2")
    if bits == 1:
        packed = np.frombuffer(body[2 * count :], np.uint8).reshape(count, 8)
        signs = np.concatenate([packed >> k & 1 for k in range(8)], axis=1).astype(np.float32) * np.float32(2) - np.float32(1)
        values = signs * from_bfloat16(halves)[:, None]
        return values.reshape(-1)[:n]
    if bits == 2:
        packed = np.frombuffer(body[2 * count :], np.uint8).reshape(count, 16)
        codes = np.concatenate([packed >> (2 * k) & 3 for k in range(4)], axis=1)
        values = np.array([-7, -2, 2, 7], np.float32)[codes] * from_bfloat16(halves)[:, None]
        return values.reshape(-1)[:n]
    packed = np.frombuffer(body[2 * count :], np.uint8).reshape(count, 32)
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32) - np.float32(8)
    values = nibbles * from_bfloat16(halves)[:, None]
    return values.reshape(-1)[:n]


def describe(raw: bytes, attempt: bytes) -> tuple[list[Any], bytes, list[bytes]]:
    """The body's description, what stands in the head, and the parts."""
    packed = zstd(raw)
    if len(packed) <= PART_BYTES:
        return [len(packed), digest(raw), 0, attempt], packed, []
    step = PART_BYTES - 8
    parts = [attempt + packed[at : at + step] for at in range(0, len(packed), step)]
    return [len(packed), digest(raw), len(parts), attempt], b"", parts


# ---- the outer step


def fold(theta: Floats, momentum: Floats, delta: Floats, learning_rate: float, mu: float) -> tuple[Floats, Floats]:
    """Every operation rounds to float32 once."""
    rate, mu32 = np.float32(learning_rate), np.float32(mu)
    product = mu32 * momentum
    buffer = product + delta
    ahead = mu32 * buffer
    step = rate * (delta + ahead)
    return theta - step, buffer


def fold_adamw(
    vectors: tuple[Floats, Floats, Floats], gradient: Floats, version: int, learning_rate: float, beta1: float
) -> tuple[Floats, Floats, Floats]:
    """Parameters, mean and mean of squares; every operation rounds to float32 once."""
    theta, *moments = vectors
    new, unbiased = [], []
    for old, beta, values in zip(moments, (beta1, ADAMW["beta2"]), (gradient, gradient * gradient), strict=True):
        kept = np.float32(beta) * old
        taken = np.float32(1.0 - beta) * values
        new.append(kept + taken)
        unbiased.append(new[-1] / np.float32(1.0 - power(beta, version)))
    root = np.sqrt(unbiased[1])
    update = unbiased[0] / (root + np.float32(ADAMW["epsilon"]))
    decayed = np.array(ADAMW["decay"], np.float32) * theta
    step = np.float32(learning_rate) * (update + decayed)
    return theta - step, new[0], new[1]


def power(base: float, exponent: int) -> float:
    product = 1.0
    while exponent:
        if exponent % 2:
            product = product * base
        base = base * base
        exponent = exponent // 2
    return product


def state_hash(*vectors: Floats) -> bytes:
    """Of parameters and momentum, the momentum's vectors each by itself."""
    return digest(b"".join(digest(vector.astype("<f4").tobytes()) for vector in vectors))


# ---- the run

TENSORS: list[Any] = [["block/b", [16], False], ["block/w", [10, 16], False], ["embed", [4, 3], True], ["scale", [], False]]
MAP = packb([TENSORS, 3, "balanced"])
# with all that a list may have: a tensor that is arranged otherwise in the model, state that is merged, and a fixed tensor
FULL_TENSORS: list[Any] = [
    ["block/b", [16], False],
    ["block/w", [10, 16], False, [[16, 10], [1]]],
    ["state/mean", [4], False, None, True],
]
FULL_MAP = packb([FULL_TENSORS, 3, "balanced", [["base", "bfloat16", [2, 3], digest(bytes(range(12)))]]])
SIZES = [12, 96, 81]
FRAGMENT = 2
SIZE = SIZES[FRAGMENT]
# fragment 1 as of a run whose outer optimizer is AdamW: `block/b` does not decay, `block/w` does
ADAMW: dict[str, Any] = {"beta2": 0.95, "epsilon": 1e-8, "decay": [0.0] * 16 + [0.1] * 80}


def pattern(n: int, factor: int, modulus: int, unit: float) -> Floats:
    """Exact float32 values around zero, without two alike next to each other."""
    return ((np.arange(n) * factor % modulus - modulus // 2) * unit).astype(np.float32)


# by kind of a log's message: the place of the field with the hash of the entry before, or the one that it stands after
HASH_BEFORE = {"record": 5, "keyframe": 3, "claim": 6, "commit_notice": 3}


def attempt(number: int) -> bytes:
    return bytes([0xA0 + number] * 8)


class Golden:
    """Collects messages."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.expected: dict[str, Any] = {}
        self.names: dict[bytes, str] = {}  # of messages by their checks

    def add(self, name: str, kind: str, fields: list[Any], inline: bytes = b"", **more: Any) -> bytes:
        """Add a message; returns its hash."""
        entry_hash = hash_of(kind, packb(fields))
        self.values[name] = frame(kind, fields, inline)
        self.names[entry_hash] = name
        follows = {"follows": self.names.get(fields[HASH_BEFORE[kind]])} if kind in HASH_BEFORE else {}
        self.expected[name] = {
            "kind": kind,
            "hash": entry_hash,
            **follows,
            "fields": fields,
            "inline_bytes": len(inline),
            **more,
        }
        return entry_hash


def make() -> tuple[dict[str, bytes], dict[str, Any], list[bytes]]:
    """Values by file name, what is expected of them, and the parts of the offer that has parts."""
    golden = Golden()
    golden.values["map"] = MAP
    golden.values["map_full"] = FULL_MAP
    golden.values["refusals"] = packb(
        [
            "learner-0",
            1700000000000,
            [[1, "claim", 2, 9], [0, "form", 1, 0]],
            [["claim", "too many steps"], ["form", "no frame"]],
        ]
    )
    golden.values["outlier_statement"] = packb(
        [
            "syncer-1",
            1700000000000,
            2,
            [0, 2],
            [
                ["learner-1", 1700000000001, 2, 8, 30.0, 6.25, 0, False],
                ["learner-0", 7, 0, 9, 8.5, 4.0, 3, True],
            ],
        ]
    )
    golden.values["share_claim"] = packb(["learner-0", 1700000000000, [[0, True, 16, 0, 7], [1, False, 3, 9, 9]]])
    golden.values["owners"] = packb([["syncer-1", "syncer-0"], ["syncer-1", "syncer-0", "syncer-1"]])
    grant = packb([RUN_NAME, "learner-0", "U" + 55 * "A", 2048, 0.05])
    signed = [grant, SigningKey(AUTHORITY).sign(b"DLC1grant\0" + grant).signature]
    golden.values["admission"] = packb(["learner-0", 1700000000000, SETTINGS_DIGEST, digest(MAP), signed])
    golden.values["admission_without"] = packb(["learner-0", 1700000000000, SETTINGS_DIGEST, digest(MAP), None])

    counts = [[3, 3, 0], [24, 12, 0], [24576, 12288, 0], [0, 0, 1024]]
    heartbeat: list[Any] = ["learner-0", "ap_2", 1700000000000, "learner", "stepping", True, 300, 307200, 0.125, 2.5, *counts]
    golden.add("heartbeat", "heartbeat", [*heartbeat, [[0, 0, 200], [4, 8, 100]], 1024, 37.5, 0.0625, 70000, 2**32, 0, "0.1.0"])
    idle = [[0, 0, 0]] * 4
    evaluator = ["evaluator", "", 1, "evaluator", "starting", False, 0, 0, 0.0, None, *idle, [], 0, 0.0, 0.0, 0, 0, 0, ""]
    golden.add("heartbeat_evaluator", "heartbeat", evaluator)
    golden.add("heartbeat_failure", "heartbeat", [*evaluator, "ZeroDivisionError: division by zero (task.py, line 7)"])
    golden.add("gauges", "gauges", ["learner-0", 0.0125, 1.5, 0.75, 2**30, None, "NVIDIA H100 \u00e9", "node-7"])
    golden.add("validation_loss", "validation_loss", ["learner-0", 2.125])
    golden.add("sample", "sample", ["evaluator", [3, 3, 0], "To be, \u00e9 \U0001f600\n"])
    shard = ["syncer-1", "us", 1700000000000, 1200, "owner", 7, [0, 2], [1], 9, 8, [[2, 1, 2, 0.75]], 0, 65536, 255]
    crossing = [["eu", 4096, 200], ["ap", 0, 70000]]
    golden.add("shard", "shard", [*shard, crossing, 8, 1.5, [["ap", 4], ["eu", 8]], "0.1.0"])
    heard = [["learner-0", 0.25], ["learner-1", 0.0], ["learner-2", 29.5]]
    golden.add("presence", "presence", ["syncer-1", 1700000000000, 9, True, heard])
    golden.add("presence_came", "presence", ["syncer-1", 1700000000000, 10, False, [["learner-3", 0.125]]])
    counted = [
        ["learner-1", "offer", "claim", 3],
        ["evaluator", "message", "FormatError", 2**40],
        ["learner-2", "in_vain", "no_answer", 1],
    ]
    golden.add("sender_report", "sender_report", ["syncer-1", counted])
    golden.add("coordinator", "coordinator", ["coordinator-1", 3, False, ""])
    golden.add("round", "round", [FRAGMENT, 1, 1, "syncer-1", 0.5, False, 98304, 36, [["eu", 8]]])

    golden.add("marker", "marker", [7, [3, 3, 0]])
    golden.add("state_request", "state_request", ["learner-1", b"", 0, [], []])
    golden.add("state_request_part", "state_request", ["learner-1", attempt(9), 2, [0, 128], [3, 256]])
    loan = ["learner-0", attempt(9), 300, [3, 3, 0], digest(b"a layout"), 524293, digest(b"a state")]
    golden.add("state_loan", "state_loan", loan)
    golden.add("state_loan_later", "state_loan", ["learner-0", b"", 0, [], bytes(32), 0, bytes(32)])
    golden.add("state_part", "state_part", [attempt(9), 2, [0, 128], digest(b"state")], b"state")
    golden.add("marker_answer", "marker_answer", ["learner-0", 7, 300, [3, 4, 0], 70000, digest(b"a file")])
    files: list[Any] = [[69000, digest(b"a second file")], [0, digest(b"")]]
    files_answer = ["learner-1", 2**32, 0, [0, 0, 70000], 2**33, digest(b"a first file"), files]
    golden.add("marker_answer_parts", "marker_answer", files_answer)
    golden.add("marker_declined", "marker_declined", ["learner-2", 7, "not_saved", "No space left on device"])

    momentum = np.zeros(SIZE, np.float32)
    thetas = [pattern(n, 37, 101, 1 / 64) for n in SIZES]
    theta = thetas[FRAGMENT]
    hashes = [state_hash(t, np.zeros_like(t)) for t in thetas]
    zeros = bytes(32)

    keyframe_raw = np.concatenate([theta, momentum, np.zeros_like(theta)]).astype("<f4").tobytes()
    body, inline, _ = describe(keyframe_raw, attempt(0))
    golden.add("keyframe_0", "keyframe", [FRAGMENT, 0, 0, zeros, 0, 0, 0, [], [], hashes[FRAGMENT], False, body], inline)
    genesis = golden.add("genesis", "genesis", ["learner-0", SETTINGS_DIGEST, digest(MAP), hashes, 1700000001.5])
    golden.add("claim", "claim", [FRAGMENT, 1, "syncer-1", 0, 0, False, genesis, 0])

    offer_raw = encode(pattern(SIZE, 53, 97, 1 / 256), 4)
    body, inline, _ = describe(offer_raw, attempt(1))
    offer = [FRAGMENT, "learner-0", 1700000000000, 1, [0, 0], 1, 0, hashes[FRAGMENT], 4, 4, 4096, 0, [[0, 0, 4]], body]
    golden.add("offer", "offer", offer, inline, raw=offer_raw)

    # as in runs that require `two_bits` and `one_bit`
    for bits, name, number in ((2, "offer_2_bits", 10), (1, "offer_1_bit", 13)):
        narrow_raw = encode(pattern(SIZE, 53, 97, 1 / 256), bits)
        body, inline, _ = describe(narrow_raw, attempt(number))
        offer = [FRAGMENT, "learner-0", 1700000000000, 1, [0, 0], 1, 0, hashes[FRAGMENT], bits, 4, 4096, 0, [[0, 0, 4]], body]
        golden.add(name, "offer", offer, inline, raw=narrow_raw)

    large_raw = pattern(150_000, 7919, 65521, 1 / 1024).astype("<f4").tobytes()
    body, inline, parts = describe(large_raw, attempt(2))
    offer = [
        FRAGMENT,
        "learner-1",
        2,
        3,
        [2, 2],
        5,
        3,
        digest(b"a base"),
        32,
        70000,
        2**33,
        300,
        [[1, 300, 69999], [5, 0, 1]],
        body,
    ]
    golden.add("offer_in_parts", "offer", offer, inline, raw_hash=digest(large_raw), part_hashes=[digest(p) for p in parts])

    answers: list[Any] = [
        ["learner-0", 1700000000000, 2, [1700000000000, 1], 2, 1, digest(b"a base"), 4, 4096, 0, [[0, 4, 4]]],
        ["learner-1", 7, 1, [0, 0], 1, 0, digest(b"another"), 3, 1000, 24, [[1, 1, 2], [5, 0, 1]]],
    ]
    body, inline, _ = describe(offer_raw, attempt(12))
    regional = [FRAGMENT, "syncer-3", 1700000000000, 5, 4, answers, body]
    golden.add("regional_offer", "regional_offer", regional, inline, raw=offer_raw)

    # the fragment's log: a takeover, a version in each codec (the last one closes), and a takeover after closing
    previous, merged, lost = genesis, 0, 0
    takeover = [FRAGMENT, "takeover", 0, 1, "syncer-1", previous, [], [], 4, 0.3, 0.9, 0, 0, hashes[FRAGMENT], False]
    previous = golden.add("record_takeover", "record", [*takeover, 1700000002.0, 0.0, 0.0, None])
    state = hashes[FRAGMENT]
    members: list[Any] = [["learner-0", 1700000000000, 1, 1, 0, 4, 4096, 0, 4194304.0, [[0, 0, 4]]]]
    # in runs that require `two_bits` or `one_bit` the first version could be one of these
    for bits, name, number in ((2, "record_2_bits", 11), (1, "record_1_bit", 14)):
        narrow_raw = encode(pattern(SIZE, 55, 97, 1 / 256), bits)
        narrow = fold(theta, momentum, decode(narrow_raw, SIZE, bits), 0.3, 0.9)
        body, inline, _ = describe(narrow_raw, attempt(number))
        entry = [FRAGMENT, "version", 1, 1, "syncer-1", previous, members, [], bits, 0.3, 0.9, 4096, 0]
        golden.add(
            name,
            "record",
            [*entry, state_hash(*narrow), False, 1700000003.0, 0.25, 0.5, body],
            inline,
            raw=narrow_raw,
            theta_first=[float(x) for x in narrow[0][:3]],
            momentum_first=[float(x) for x in narrow[1][:3]],
        )
    for version, bits in enumerate((4, 16, 8, 32), 1):
        delta = pattern(SIZE, 53 + 2 * version, 97, 1 / 256)
        raw = encode(delta, bits)
        theta, momentum = fold(theta, momentum, decode(raw, SIZE, bits), 0.3, 0.9)
        state = state_hash(theta, momentum)
        body, inline, _ = describe(raw, attempt(2 + version))
        members = [
            ["learner-0", 1700000000000, version, version, version - 1, 4, 4096, 0, 4194304.0, [[0, 4 * version - 4, 4]]]
        ]
        if version == 2:
            members.append(["learner-1", 7, 1, 2, 0, 3, 1000, 24, 1000 * 1000 / 3, [[1, 1, 2], [5, 0, 1]]])
        together: list[Any] = [["syncer-3", 1700000000000, 5, [0, 1]]] if version == 2 else []
        merged, lost = merged + sum(member[6] for member in members), 24 if version >= 2 else 0
        entry = [FRAGMENT, "version", version, 1, "syncer-1", previous, members, together, bits, 0.3, 0.9, merged, lost, state]
        closing = version == 4
        if version == 3:
            golden.add("claim_after", "claim", [FRAGMENT, 2**40, "syncer-2", 1, 2, False, previous, 70000])
            golden.add("commit_notice", "commit_notice", [FRAGMENT, 2, 1, previous, 70000])
        previous = golden.add(
            f"record_{version}",
            "record",
            [*entry, closing, 1700000002.0 + version, 0.25, 0.5, body],
            inline,
            raw=raw,
            theta_first=[float(x) for x in theta[:3]],
            momentum_first=[float(x) for x in momentum[:3]],
        )
        if version == 1:
            past = np.concatenate([theta, momentum]).astype("<f4").tobytes(), state
        if version == 3:
            # had the run's change 7 taken the fragment back to version 1 here
            body, inline, _ = describe(past[0], attempt(13))
            back = [FRAGMENT, "rollback", 4, 1, "syncer-1", previous, [], [], 32, 0.3, 0.9, merged, lost, past[1], False]
            made = [7, 1, 4]
            entry = [*back, 1700000006.0, 0.0, 0.0, body, made]
            entry_hash = golden.add("record_rollback", "record", entry, inline, content=past[0])
            # or repaired it, because of message 8 of the stream
            entry = [FRAGMENT, "repair", *back[2:], 1700000006.0, 0.0, 0.0, body, made, [8, [[0, 4]]]]
            golden.add("record_repair", "record", entry, inline, content=past[0])
            body, inline, _ = describe(past[0] + bytes(4 * SIZE), attempt(14))
            cursors = [["learner-0", 1700000000000, 3, 3, 12288, 0, 12], ["learner-1", 7, 1, 1, 1000, 24, 3]]
            fields = [
                FRAGMENT,
                4,
                1,
                entry_hash,
                9,
                merged,
                lost,
                cursors,
                [[0, 12], [1, 3], [5, 1]],
                past[1],
                False,
                body,
                made,
            ]
            golden.add("keyframe_rollback", "keyframe", fields, inline)
    cursors = [["learner-0", 1700000000000, 4, 4, 16384, 0, 16], ["learner-1", 7, 1, 1, 1000, 24, 3]]
    ends = [[0, 16], [1, 3], [5, 1]]
    residual = pattern(SIZE, 3, 11, 1 / 4096)
    body, inline, _ = describe(np.concatenate([theta, momentum, residual]).astype("<f4").tobytes(), attempt(7))
    golden.add("keyframe_4", "keyframe", [FRAGMENT, 4, 1, previous, 9, merged, lost, cursors, ends, state, True, body], inline)
    after = [FRAGMENT, "takeover", 4, 2, "syncer-2", previous, [], [], 4, 0.3, 0.9, merged, lost, state, False]
    golden.add("record_takeover_after", "record", [*after, 1700000010.0, 0.0, 0.0, None])

    # another fragment, to which nobody contributed
    opened = [0, "takeover", 0, 1, "syncer-1", genesis, [], [], 4, 0.3, 0.9, 0, 0, hashes[0], False]
    entry_hash = golden.add("record_takeover_0", "record", [*opened, 1700000002.0, 0.0, 0.0, None])
    close = [0, "close", 0, 1, "syncer-1", entry_hash, [], [], 4, 0.3, 0.9, 0, 0, hashes[0], True, 1700000009.0, 0.0, 0.0, None]
    golden.add("record_close", "record", close)

    # a third one, whose outer optimizer is AdamW
    vectors, none = (thetas[1], np.zeros(SIZES[1], np.float32), np.zeros(SIZES[1], np.float32)), np.zeros(SIZES[1], np.float32)
    previous = genesis
    for version, rate in enumerate((0.004, 0.008), 1):
        raw = encode(pattern(SIZES[1], 41 + 2 * version, 89, 1 / 512), 16)
        vectors = fold_adamw(vectors, decode(raw, SIZES[1], 16), version, rate, 0.9)
        body, inline, _ = describe(raw, attempt(7 + version))
        members = [["learner-0", 1700000000000, version, version, version - 1, 1, 1024, 0, 1024.0, [[0, version - 1, 1]]]]
        state = state_hash(*vectors)
        entry = [1, "version", version, 0, "syncer-1", previous, members, [], 16, rate, 0.9, 1024 * version, 0, state, False]
        previous = golden.add(
            f"record_adamw_{version}",
            "record",
            [*entry, 1700000002.0 + version, 0.25, 0.5, body],
            inline,
            raw=raw,
            vectors_first=[[float(x) for x in vector[14:18]] for vector in vectors],
        )
    body, inline, _ = describe(np.concatenate([*vectors, none]).astype("<f4").tobytes(), attempt(5))
    cursors = [["learner-0", 1700000000000, 2, 2, 2048, 0, 2]]
    fields = [1, 2, 0, previous, 14, 2048, 0, cursors, [[0, 2]], state, False, body]
    golden.add("keyframe_adamw_2", "keyframe", fields, inline)

    # the last fragment as of a run whose list is `map_full`: state, whose offers are values; the example of section 8
    theta, momentum = np.array([100, 0, 5, 2], np.float32), np.zeros(4, np.float32)
    base, members, tokens = state_hash(theta, momentum), [], [10, 30]
    offered = [np.array(values, np.float32) for values in ([3, 4, 0, 1], [1, 6, 8, 1])]
    for number, (values, count) in enumerate(zip(offered, tokens, strict=True)):
        raw, learner = encode(values, 32), f"learner-{number}"
        body, inline, _ = describe(raw, attempt(11 + number))
        offer = [FRAGMENT, learner, 7, 1, [0, 0], 1, 0, base, 32, 1, count, 0, [[number, 0, 1]], body]
        golden.add(f"offer_state_{number}", "offer", offer, inline, raw=raw, values=4)
        members.append([learner, 7, 1, 1, 0, 1, count, 0, float(count), [[number, 0, 1]]])
    mean = sum(np.float32(count) * values for values, count in zip(offered, tokens, strict=True)) / np.float32(sum(tokens))
    raw = encode(theta - mean, 32)
    theta, momentum = fold(theta, momentum, decode(raw, 4, 32), 1.0, 0.0)
    state = state_hash(theta, momentum)
    body, inline, _ = describe(raw, attempt(13))
    entry = [FRAGMENT, "version", 1, 0, "syncer-1", genesis, members, [], 32, 1.0, 0.0, 40, 0, state, False]
    entry_hash = golden.add(
        "record_state",
        "record",
        [*entry, 1700000003.0, 0.25, 0.5, body],
        inline,
        raw=raw,
        values=4,
        vectors=[[float(x) for x in vector] for vector in (theta, momentum)],
    )
    body, inline, _ = describe(np.concatenate([theta, momentum, np.zeros_like(theta)]).astype("<f4").tobytes(), attempt(14))
    cursors = [["learner-0", 7, 1, 1, 10, 0, 1], ["learner-1", 7, 1, 1, 30, 0, 1]]
    fields = [FRAGMENT, 1, 0, entry_hash, 15, 40, 0, cursors, [[0, 1], [1, 1]], state, False, body]
    golden.add("keyframe_state", "keyframe", fields, inline)

    kind_and_key = bytes([20 << 3]) + bytes(SigningKey(AUTHORITY).verify_key)
    expected = {
        "authority": b32encode(kind_and_key + struct.pack("<H", crc_hqx(kind_and_key, 0))).decode().rstrip("="),
        "adamw": ADAMW,
        "run_name": RUN_NAME,
        "settings": SETTINGS,
        "settings_digest": SETTINGS_DIGEST,
        "run": RUN,
        "map_digest": digest(MAP),
        "pieces": [
            [["embed", 0, 4, 0]],
            [["block/b", 0, 16, 0], ["block/w", 0, 5, 16]],
            [["block/w", 5, 10, 0], ["scale", 0, 1, 80]],
        ],
        "map_full_digest": digest(FULL_MAP),
        "pieces_full": [
            [["block/b", 0, 16, 0], ["block/w", 0, 5, 16]],
            [["block/w", 5, 10, 0]],
            [["state/mean", 0, 4, 0]],
        ],
        "messages": golden.expected,
    }
    return golden.values, expected, parts


def to_json(expected: Any) -> str:
    """Bytes become ``{"hex": ...}``."""
    return json.dumps(expected, indent=1, default=lambda value: {"hex": value.hex()}) + "\n"


def to_hex(value: bytes) -> str:
    """Lines of 32 bytes."""
    return "".join(value[at : at + 32].hex() + "\n" for at in range(0, len(value), 32))


def main() -> None:
    values, expected, _ = make()
    FOLDER.mkdir(exist_ok=True)
    for name, value in values.items():
        (FOLDER / f"{name}.hex").write_text(to_hex(value))
    (FOLDER / "expected.json").write_text(to_json(expected))


if __name__ == "__main__":
    main()
