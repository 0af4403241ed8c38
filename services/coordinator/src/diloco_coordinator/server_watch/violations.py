"""Permission violations in a NATS server's log, by identity and subject: the server publishes them nowhere else.

A line of the log has texts that a client chose: its own name, and the subject. Only its end is read, behind the key that the
server knows the client by, and a subject has no spaces. So no client can have another one's violation counted.
"""

from __future__ import annotations

import re
from pathlib import Path

from blake3 import blake3

from diloco.process.sender_counts import SenderCounts
from diloco.service.metrics import Labelled

MAX_READ_BYTES = 1 << 23  # at a look: the rest follows at the next ones
MAX_LINE_BYTES = 1 << 16
MAX_SUBJECT = 128  # characters
NO_KEY = "unknown"  # of a client without an identity

_VIOLATION = re.compile(
    rb'\[ERR\] .* - "[^"/ ]*/?(?:nkey:(?P<key>U[A-Z2-7]{55})|[^" ]*)" - (?P<action>Publish|Subscription) Violation - '
    rb'(?:Subject|Reply) "(?P<subject>[^ ]*)"(?:, [^ ]+ [^ ]+)*$'
)
_LISTED = re.compile(r"^ *# (\S+): \S+\n *users: \[ \{ nkey: (U[A-Z2-7]{55})", re.MULTILINE)


def names_of(lists: str) -> dict[str, str]:
    """Return the names of identities in a server's ``auth.conf``, by public key."""
    return {key: name for name, key in _LISTED.findall(lists)}


class ViolationLog:
    """Counts the violations that a server writes into its log from now on."""

    def __init__(self, log_file: Path, lists_file: Path | None = None) -> None:
        """``lists_file``: the server's ``auth.conf``, which has the names of identities; None: they are shown by a hash."""
        self._log_file, self._lists_file = log_file, lists_file
        self._counts = SenderCounts()
        self._offset_bytes, self._rest = self._size_bytes(), b""

    @property
    def total(self) -> int:
        """Number of all violations."""
        return self._counts.total

    def counts(self) -> Labelled:
        """Return the violations by identity, action and subject. Identities have no public keys: these are secrets."""
        names = self._names()
        found: dict[tuple[str, ...], float] = {}
        for (key, what), count in self._counts.counts().items():
            action, _, subject = what.partition(" ")
            labels = names.get(key, _hidden(key)), action, subject
            found[labels] = found.get(labels, 0.0) + count
        return found

    def read(self) -> None:
        """Read what was written since the last look; a log that is shorter than before was begun again."""
        size_bytes = self._size_bytes()
        if size_bytes < self._offset_bytes:
            self._offset_bytes, self._rest = 0, b""
        try:
            with self._log_file.open("rb") as log:
                log.seek(self._offset_bytes)
                new = log.read(MAX_READ_BYTES)
        except OSError:  # it is away for a moment, as while it is rotated
            return
        self._offset_bytes += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        self._rest = self._rest[-MAX_LINE_BYTES:]
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        found = _VIOLATION.search(line) if len(line) <= MAX_LINE_BYTES else None
        if found is not None:
            key, action, subject = (found[name] or b"" for name in ("key", "action", "subject"))
            shown = subject.decode("ascii", "backslashreplace")[:MAX_SUBJECT]
            self._counts.add(key.decode(), f"{action.decode().lower()} {shown}")

    def _size_bytes(self) -> int:
        try:
            return self._log_file.stat().st_size
        except OSError:
            return 0

    def _names(self) -> dict[str, str]:
        try:
            return {} if self._lists_file is None else names_of(self._lists_file.read_text())
        except (OSError, UnicodeDecodeError):
            return {}


def _hidden(key: str) -> str:
    """Return how an identity is called whose name is not known; ``*``: all that were counted together."""
    if key in ("", "*"):
        return key or NO_KEY
    return f"key {blake3(key.encode()).hexdigest()[:8]}"
