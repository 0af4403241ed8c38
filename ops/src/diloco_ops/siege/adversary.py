"""Hostile messages of a member of a run, drawn from a seed. Pure.

An action is one message, or several equal ones. Its subject is from the rights of any role, most often of its own. Its payload
is a message of this project, valid or damaged, or other bytes. Its headers mean something to a server or to a client, and its
reply subject is from any role's rights. Messages that the adversary has heard are sent again later, as its own or as they were:
valid messages at the wrong time.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from diloco.wire.framing import MAGIC, VERSION
from diloco.wire.subjects import Subjects
from diloco_ops.keys.permissions import Who, permissions
from diloco_ops.siege.drawn_messages import KINDS as _CLASSES
from diloco_ops.siege.drawn_messages import draw_message

MAX_PAYLOAD = 1 << 20
_LIKE_THEIR_SUBJECTS = ("genesis", "keyframe", "coordinator", "marker", "marker_answer", "commit_notice", "gauges", "sample")
_KIND_OF = {kind: kind for kind in _LIKE_THEIR_SUBJECTS} | {  # by the subject's third token; commit notices by their last
    "delta": "offer",
    "regional": "regional_offer",
    "heartbeat": "heartbeat",
    "shard": "shard",
    "presence": "presence",
    "round": "round",
    "fragment": "record",
    "archive": "offer",
}
KINDS = ("valid", "fields", "damaged", "random", "json", "empty", "large", "value")
OWN = 0.6  # of all actions are on subjects that the server lets it write: the others are refused there
CALLS = 0.4  # of JetStream's API; most rights are to these
LARGE = 0.01
REPEATED = 0.02  # of all actions: the same message many times
MOST_TIMES = 50
HEARD = 256  # messages of each kind that are remembered
FIRST_INCARNATION = 10**12  # incarnations are milliseconds since 1970; no other field of a usual message is as large
TOKENS = (
    b"0",
    b"1",
    b"3",
    b"4",
    b"00",
    b"999999999",
    b"-1",
    b"x",
    b"*",
    b">",
    b"\xff",
    b"a\x0cb",
    b"\x1b[2J",
    b"toy-1",
    b"head",
)
NUMBERS: tuple[Any, ...] = (0, 1, 2, 2**31, 2**53, 2**62, 2**62 + 1, 2**63, 2**64 - 1, -1, -(2**63), 0.5, 1e308, None, True)
VALUES: tuple[Any, ...] = (*NUMBERS, "", "toy-1", "x" * 5000, b"", bytes(32), [], [[]], {}, [0] * 5000, ["toy-1"] * 100)
HEADERS = (
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0\r\nNats-Expected-Last-Sequence: 4611686018427387904\r\n\r\n",
    b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: 0\r\n\r\n",
    b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: -1\r\nNats-Expected-Last-Subject-Sequence-Subject: >\r\n\r\n",
    b"NATS/1.0\r\nNats-Expected-Stream: other\r\n\r\n",
    b"NATS/1.0\r\nNats-Msg-Id: 0\r\n\r\n",
    b"NATS/1.0\r\nStatus: 100\r\nDescription: Idle Heartbeat\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 408 Request Timeout\r\n\r\n",
    b"NATS/1.0 409 Consumer Deleted\r\nNats-Sequence: 1\r\n\r\n",
    b"NATS/1.0 \xff\xfe\r\n\r\n",
    b"NATS/1.0\r\n\xff: \xff\r\n\r\n",
    b"NATS/1.0",
    b"\xff",
    b"NATS/1.0\r\nNats-Rollup: all\r\n\r\n",
    b"NATS/1.0\r\nNats-Rollup: sub\r\n\r\n",
    b"NATS/1.0\r\nNats-TTL: 1s\r\n\r\n",
    b"NATS/1.0\r\nNats-Schedule: @every 1s\r\nNats-Schedule-Target: diloco.x\r\n\r\n",
    b"NATS/1.0\r\nKV-Operation: PURGE\r\n\r\n",
    b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n",
    b"NATS/1.0\r\nNats-Batch-Id: b\r\nNats-Batch-Sequence: 1\r\n\r\n",
    b"NATS/1.0\r\n" + b"a:\r\n" * 20_000 + b"\r\n",
)


@dataclass(frozen=True)
class HostileAction:
    """A message to be sent, ``times`` times."""

    kind: str  # of the payload
    subject: bytes
    data: bytes
    headers: bytes
    reply: bytes
    server: int = 0  # the place of the one that it goes to
    times: int = 1


@dataclass(frozen=True)
class HeardMessage:
    """A message that frames are made of: its fields as in a frame, and the body that the frame holds."""

    fields: list[Any]
    body: bytes


class Adversary:
    """Draws the actions of one identity against one run."""

    def __init__(
        self,
        seed: int,
        names: Subjects,
        run_id: bytes,
        who: Who,
        everyone: Sequence[Who],
        *,
        values: Sequence[bytes] = (),
        withheld: Sequence[str] = (),
        regions: Sequence[str] = (),
        servers: Sequence[Collection[str]] = ((),),
    ) -> None:
        """Attack a run.

        Args:
            seed: all that it draws depends on it, on its role and its name, and on what it hears.
            names: the run's subjects.
            run_id: the run's identity, which frames carry.
            who: the identity under which it sends.
            everyone: identities whose rights name the subjects that it tries.
            values: of the run's keys, to be written elsewhere.
            withheld: beginnings of subjects that it is entitled to do harm on.
            regions: of the run.
            servers: what each server serves that it may connect to; a run without regions has one, of everything.
        """
        self.incarnation = 1  # in which its messages are its own, if it is admitted
        self.random, self.names, self.run, self.who = random.Random(f"{seed} {who.role} {who.name}"), names, run_id, who
        self._own: list[list[str]] = []  # by server
        self._of_others: list[list[str]] = []
        of_all: set[str] = set()
        for serves in servers:
            own = permissions(who, names.run, regions, serves).publish
            published = {p for one in everyone for p in permissions(one, names.run, regions, serves).publish}
            heard = {p for one in everyone for p in permissions(one, names.run, regions, serves).subscribe}
            self._own.append([p for p in own if not p.startswith(tuple(withheld))])
            self._of_others.append(sorted(published - set(own)))
            of_all |= published | heard
        self._replies = sorted(of_all)
        self._texts = [who.name, *sorted({one.name for one in everyone} - {who.name}), "", "1.0", "norm", *regions]
        self._templates: dict[str, deque[HeardMessage]] = {}
        self._names = {one.name for one in everyone}
        self._values = [*values, b"", b"\xff"]

    def hear(self, frame: bytes) -> None:
        """Remember a message of another member, to send it later."""
        with suppress(ValueError, TypeError, msgspec.MsgspecError):
            magic, _, kind, _, fields, _, body = msgspec.msgpack.decode(frame)
            if magic == MAGIC:
                template = HeardMessage(msgspec.msgpack.decode(fields), body)
                self._templates.setdefault(kind, deque(maxlen=HEARD)).append(template)

    def actions(self) -> Iterator[HostileAction]:
        """Yield actions for ever."""
        while True:
            own = self.random.random() < OWN
            calls = self.random.random() < CALLS
            server = self.random.randrange(len(self._own)) if len(self._own) > 1 else 0
            patterns = self._own[server] if own else self._of_others[server]
            pattern = self.random.choice([p for p in patterns if p.startswith("$JS.") == calls] or patterns)
            kind, data = self._payload(pattern)
            reply = self._one_of(self.random.choice(self._replies)) if self.random.random() < 0.5 else b""
            headers = self.random.choice(HEADERS) if self.random.random() < 0.4 else b""
            if self.random.random() < 0.05:
                target = self._one_of(self.random.choice(self._replies))
                headers = b"NATS/1.0\r\nNats-Trace-Dest: %s\r\n\r\n" % target.replace(b"\x0c", b"")
            data = data[: MAX_PAYLOAD - len(headers)]
            times = self.random.randint(2, MOST_TIMES) if self.random.random() < REPEATED and kind != "large" else 1
            yield HostileAction(
                kind=kind, subject=self._one_of(pattern), data=data, headers=headers, reply=reply, server=server, times=times
            )

    def _one_of(self, pattern: str) -> bytes:
        """Return a subject that a pattern stands for."""
        tokens = []
        for token in pattern.encode().split(b"."):
            if token == b"*":
                tokens.append(self.random.choice(TOKENS))
            elif token == b">":
                tail = self.random.choice([self.names.record(0), self.names.offer(0, "toy-1"), "0", "0.toy-1.1.1.head"])
                tokens.append(tail.encode())
            else:
                tokens.append(token)
        return b".".join(tokens)

    def _payload(self, pattern: str) -> tuple[str, bytes]:
        kind = "large" if self.random.random() < LARGE else self.random.choice([k for k in KINDS if k != "large"])
        if pattern.startswith("$JS.API.") and kind in ("valid", "fields", "value"):
            kind = "json"
        make: dict[str, Callable[[], bytes]] = {
            "valid": lambda: self._frame(pattern, 0),
            "fields": lambda: self._frame(pattern, self.random.randint(1, 3)),
            "damaged": lambda: self._damaged(pattern),
            "random": lambda: self.random.randbytes(self.random.randint(1, 300)),
            "json": lambda: self._json(pattern),
            "empty": bytes,
            "large": lambda: self.random.choice([bytes(MAX_PAYLOAD), b"\x91" * MAX_PAYLOAD, b"[" * MAX_PAYLOAD]),
            "value": lambda: self.random.choice(self._values),
        }
        return kind, make[kind]()

    def _frame(self, pattern: str, changed: int) -> bytes:
        """Return a frame that the run's members take for one of theirs, with so many fields changed."""
        fitting = _KIND_OF.get(self._subject_of(pattern))
        kind = fitting if fitting and self.random.random() < 0.7 else self.random.choice(_CLASSES).kind
        fields, body = self._message(kind)
        for _ in range(changed):
            fields[self.random.randrange(len(fields))] = self.random.choice(VALUES)
        packed = msgspec.msgpack.encode(fields)
        check = blake3(f"{MAGIC}{VERSION}{kind}\0".encode() + self.run + packed).digest()
        return msgspec.msgpack.encode((MAGIC, VERSION, kind, self.run, packed, check, body))

    def _message(self, kind: str) -> tuple[list[Any], bytes]:
        """Return the fields and body of a message: one that was heard, as its own more often than not, or one of its own."""
        heard = self._templates.get(kind)
        if heard and self.random.random() < 0.7:
            template = self.random.choice(heard)
            if self.random.random() < 0.2:
                return list(template.fields), template.body
            return [self._as_own(field) for field in template.fields], template.body
        cls = next(cls for cls in _CLASSES if cls.kind == kind)
        body = self.random.randbytes(self.random.choice([0, 0, 40]))
        return draw_message(cls, self.random, self._texts), body

    def _as_own(self, field: Any) -> Any:
        if isinstance(field, str) and field in self._names:
            return self.who.name
        return self.incarnation if type(field) is int and field > FIRST_INCARNATION else field

    @staticmethod
    def _subject_of(pattern: str) -> str:
        tokens = pattern.split(".")
        if tokens[-1] == "commit_notice":
            return "commit_notice"
        return tokens[2] if tokens[0] == "diloco" else ""

    def _damaged(self, pattern: str) -> bytes:
        frame = bytearray(self._frame(pattern, 0))
        if self.random.random() < 0.5:
            return bytes(frame[: self.random.randrange(len(frame))])
        frame[self.random.randrange(len(frame))] ^= 1 << self.random.randrange(8)
        return bytes(frame)

    def _json(self, pattern: str) -> bytes:
        stream = self.random.choice([self.names.log_stream, self.names.offer_stream, f"KV_{self.names.bucket}"])
        asked: list[Any] = [
            {},
            [],
            None,
            {"seq": self.random.choice(NUMBERS)},
            {"last_by_subj": self.random.choice([self.names.record(0), ">", "$KV." + self.names.bucket + ".run"])},
            {"batch": 1 << 40, "expires": 60 * 10**9, "idle_heartbeat": 10**8},
            {"batch": 1, "no_wait": True},
            {"subjects_filter": ">", "offset": self.random.choice(NUMBERS)},
            {"name": stream, "subjects": [self.names.genesis, ">"], "max_msgs": 1, "republish": {"src": ">", "dest": "x.>"}},
            {"stream_name": stream, "config": self._consumer(pattern), "action": self.random.choice(["", "create", "update"])},
        ]
        text = json.dumps(self.random.choice(asked)).encode()
        return text if self.random.random() < 0.8 else text[: self.random.randrange(len(text))]

    def _consumer(self, pattern: str) -> dict[str, Any]:
        config: dict[str, Any] = {"ack_policy": "none", "mem_storage": True, "filter_subject": self.names.record(0)}
        named = [name for name in self.who.consumers if f".{name}" in pattern]
        if named:
            config["name"] = named[0]
        if self.random.random() < 0.5:
            target = self._one_of(self.random.choice(self._replies)).decode(errors="replace")
            config |= {"deliver_subject": target, "idle_heartbeat": 10**8, "flow_control": True}
        else:
            config |= {"max_waiting": self.random.choice([1, 512, 1 << 30])}
        return config
