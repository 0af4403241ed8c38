"""The server of a world in virtual time: streams with subjects, fences and a duplicate window, and buckets.

It behaves as nats-server 2.15.1 does where services rely on it (``diloco.nats`` documents and tests that). What it does, it
does at once and in one piece; time and loss are the network's (:mod:`diloco.testing.virtual_transport`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from diloco.errors import FenceError, StorageFullError
from diloco.transport import Fence, Stored

DUPLICATE_WINDOW_S = 60.0  # as our streams are configured
FIRST_KEYS = ("run", "map", "founder")  # without these there is no run to go on with


@lru_cache(1 << 14)
def matches(pattern: str, subject: str) -> bool:
    """Whether a subject fits a pattern with ``*`` (one token) and ``>`` (the rest)."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > index
        if index >= len(tokens) or token not in ("*", tokens[index]):
            return False
    return len(tokens) == len(wanted)


@dataclass
class VirtualStream:
    """Messages by sequence, the first being 1."""

    name: str
    subjects: list[str]
    max_msgs_per_subject: int
    region: str = ""
    messages: list[Stored | None] = field(default_factory=list)
    by_subject: dict[str, list[int]] = field(default_factory=dict)
    identifiers: dict[str, tuple[float, int, bytes]] = field(default_factory=dict)  # when, where and what was stored
    full: bool = False
    synced: int = 0  # what is up to this sequence can no more be lost
    rewinds: int = 0

    def last(self, subject: str) -> Stored | None:
        sequences = self.by_subject.get(subject)
        return self.messages[sequences[-1] - 1] if sequences else None

    def first(self, subject: str, start_sequence: int) -> Stored | None:
        found = next((sequence for sequence in self.by_subject.get(subject, ()) if sequence >= start_sequence), None)
        return None if found is None else self.messages[found - 1]

    def get(self, sequence: int) -> Stored | None:
        return self.messages[sequence - 1] if 0 < sequence <= len(self.messages) else None

    def check(self, fence: Fence | None) -> None:
        """Raise FenceError if the fence does not hold."""
        if fence is None:
            return
        last = self.last(fence.subject)
        if (last.sequence if last else 0) != fence.expected_sequence:
            raise FenceError(f"{fence.subject}: another process appended first")

    def store(self, subject: str, data: bytes, at_s: float) -> int:
        stored = Stored(subject, len(self.messages) + 1, data, stored_at_s=at_s)
        self.messages.append(stored)
        sequences = self.by_subject.setdefault(subject, [])
        sequences.append(stored.sequence)
        if 0 < self.max_msgs_per_subject < len(sequences):
            self._drop(sequences[0])
        return stored.sequence

    def rewind(self, sequence: int) -> None:
        """Lose what was stored after ``sequence``, acknowledged or not."""
        for stored in self.messages[sequence:]:
            if stored is not None:
                self.by_subject[stored.subject].remove(stored.sequence)
        del self.messages[sequence:]
        self.identifiers = {name: stored for name, stored in self.identifiers.items() if stored[1] <= sequence}
        self.rewinds += 1

    def lose(self) -> None:
        """Lose all messages: it is another stream of the same name."""
        self.messages, self.by_subject, self.identifiers, self.synced = [], {}, {}, 0
        self.rewinds += 1

    def keeps(self, read: Stored) -> bool:
        """Whether this still is the stream that a message was read from, as :class:`diloco.nats.pull.Puller` finds it out."""
        stored = self.get(read.sequence)
        return len(self.messages) >= read.sequence if stored is None else stored == read

    def purge(self, pattern: str, below_sequence: int) -> None:
        self.synced = len(self.messages)
        for subject, sequences in list(self.by_subject.items()):
            if matches(pattern, subject):
                for sequence in [s for s in sequences if s < below_sequence]:
                    self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        stored = self.messages[sequence - 1]
        assert stored is not None
        self.messages[sequence - 1] = None
        self.by_subject[stored.subject].remove(sequence)

    def after(self, sequence: int, patterns: Sequence[str]) -> list[Stored]:
        """Return the messages that a reader of ``patterns`` gets next, which has read up to and with ``sequence``."""
        new = self.messages[sequence:]
        return [stored for stored in new if stored is not None and any(matches(p, stored.subject) for p in patterns)]


@dataclass
class VirtualKeys:
    """A bucket: value and revision by key, and the id of who wrote it."""

    name: str
    values: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    revision: int = 0
    journal: list[tuple[str, tuple[bytes, int] | None, int]] = field(default_factory=list)  # key, and what it was before

    def get(self, key: str) -> tuple[bytes, int] | None:
        return self.values.get(key)

    def after(self, keys: str, revision: int) -> tuple[str, bytes, int] | None:
        """Return key, value and revision of the first value set after ``revision`` under ``keys`` (wildcards allowed)."""
        found = ((at, key, value) for key, (value, at) in self.values.items() if at > revision and matches(keys, key))
        at, key, value = min(found, default=(0, "", b""))
        return (key, value, at) if at else None

    def write(self, key: str, value: bytes, revision: int | None, writer: int) -> int:
        """Set a key: at ``revision`` only (0: if there is none), or whatever it is (None)."""
        stored = self.get(key)
        if revision is not None and (stored[1] if stored else 0) != revision:
            raise FenceError(f"bucket {self.name}: key {key!r} was set by another process")
        self.revision += 1
        self.journal.append((key, stored, self.writers.get(key, 0)))
        self.values[key], self.writers[key] = (value, self.revision), writer
        return self.revision

    def rewind(self, writes: int) -> None:
        """Lose the last so many writes; those that began the run are not among them."""
        while writes and self.journal and self.journal[-1][0] not in FIRST_KEYS:
            key, before, writer = self.journal.pop()
            self.revision -= 1
            writes -= 1
            if before is None:
                del self.values[key], self.writers[key]
            else:
                self.values[key], self.writers[key] = before, writer


@dataclass
class Append:
    """A message to be stored, and the parts of its body before it."""

    subject: str
    data: bytes
    parts: list[tuple[str, bytes]]
    identifier: str
    fence: Fence | None


class VirtualServer:
    """``observe(stream, subject, data, sequence)`` is told of every message stored."""

    def __init__(self, observe: Callable[[str, str, bytes, int], None]) -> None:
        self.streams: dict[str, VirtualStream] = {}
        self.buckets: dict[str, VirtualKeys] = {}
        self.observe = observe
        self.losses = 0  # of its disk
        self.wall_s: Callable[[], float] = lambda: math.inf  # Unix time here; inf: it is not asked for
        self._stream_of: dict[str, VirtualStream] = {}

    def lose(self) -> None:
        """Lose the disk: the streams are made again, with nothing in them."""
        self.losses += 1
        for stream in self.streams.values():
            stream.lose()

    def stream_of(self, subject: str) -> VirtualStream:
        stream = self._stream_of.get(subject)
        if stream is None:
            (stream,) = (s for s in self.streams.values() if any(matches(pattern, subject) for pattern in s.subjects))
            self._stream_of[subject] = stream
        return stream

    def last(self, subject: str) -> Stored | None:
        return self.stream_of(subject).last(subject)

    def append(self, request: Append, now_s: float, parts: int | None = None) -> int:
        """Store a message behind its parts; with ``parts``, only that many of them.

        A fence stands on every message of a batch. A duplicate is answered as stored, unless its fence has moved, which is
        said first; the answer to a batch that was stored before does not say where, unless its head is still the last.
        """
        stream = self.stream_of(request.subject)
        if stream.full:
            raise StorageFullError(f"{request.subject}: storage is full")
        stream.check(request.fence)
        known = stream.identifiers.get(request.identifier)
        if known is not None and now_s - known[0] < DUPLICATE_WINDOW_S:
            if known[2] != request.data:
                raise AssertionError(f"{request.subject}: identifier {request.identifier} names two messages")
            if not request.parts:
                return known[1]
            last = stream.last(request.subject)
            return last.sequence if last is not None and last.data == request.data else 0
        for subject, data in request.parts[:parts]:
            self._store(stream, subject, data)
        if parts is not None and parts < len(request.parts):
            return 0
        sequence = self._store(stream, request.subject, request.data)
        stream.identifiers[request.identifier] = (now_s, sequence, request.data)
        return sequence

    def _store(self, stream: VirtualStream, subject: str, data: bytes) -> int:
        sequence = stream.store(subject, data, self.wall_s())
        self.observe(stream.name, subject, data, sequence)
        return sequence
