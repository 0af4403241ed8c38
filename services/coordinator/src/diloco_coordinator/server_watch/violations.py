"""Violations in a NATS server's log, by identity and subject: the server publishes them nowhere else.

They are subjects that an identity has no right to, and messages larger than it may send, for which the server closes the
connection before it knows a subject (action ``payload``).

A line of the log has texts that a client chose: its own name, and the subject. Only its end is read, behind the key that the
server knows the client by, and a subject has no spaces. So no client can have another one's violation counted.
"""

from __future__ import annotations

import os
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
    rb'\[ERR\] .* - "[^"/ ]*/?(?:nkey:(?P<key>U[A-Z2-7]{55})|[^" ]*)" - (?:'
    rb'(?P<action>Publish|Subscription) Violation - (?:Subject|Reply) "(?P<subject>[^ ]*)"(?:, [^ ]+ [^ ]+)*'
    rb"|maximum payload exceeded: \d+ vs \d+)$"
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
        found = _stat(log_file)
        self._inode = None if found is None else found.st_ino  # of the file that is read
        self._offset_bytes, self._rest = (0 if found is None else found.st_size), b""

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
        """Read what was written since the last look, also into files that were rotated away meanwhile."""
        found = _stat(self._log_file)
        if found is None:  # it is away for a moment, as while it is rotated
            return
        if self._inode is None:
            self._inode = found.st_ino
        if found.st_ino != self._inode:
            for inode, rotated in self._rotated():
                self._begin(inode)
                while self._read_on(rotated):
                    pass
            self._begin(found.st_ino)
        elif found.st_size < self._offset_bytes:
            self._begin(None)  # it was emptied
        self._read_on(self._log_file)

    def _rotated(self) -> list[tuple[int, Path]]:
        """Return inode and path of the file that was read last and of those after it, oldest first, without the newest."""
        files = [(_stat(path), path) for path in self._log_file.parent.glob(f"{self._log_file.name}.*")]
        aged = sorted((found.st_mtime_ns, found.st_ino, path) for found, path in files if found is not None)
        inodes = [inode for _, inode, _ in aged]
        first = inodes.index(self._inode) if self._inode in inodes else len(inodes)
        return [(inode, path) for _, inode, path in aged[first:]]

    def _begin(self, inode: int | None) -> None:
        """Read this file next, from its beginning unless it is the one that was read last."""
        if inode != self._inode:
            self._offset_bytes, self._rest = 0, b""
        self._inode = inode

    def _read_on(self, path: Path) -> bool:
        """Read further in a file. Return whether there was something; no other file of its name is read."""
        try:
            with path.open("rb") as log:
                if self._inode not in (None, os.fstat(log.fileno()).st_ino):
                    return False
                log.seek(self._offset_bytes)
                new = log.read(MAX_READ_BYTES)
        except OSError:
            return False
        self._offset_bytes += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        self._rest = self._rest[-MAX_LINE_BYTES:]
        for line in lines:
            self._take(line)
        return bool(new)

    def _take(self, line: bytes) -> None:
        found = _VIOLATION.search(line) if len(line) <= MAX_LINE_BYTES else None
        if found is not None:
            key, action, subject = found["key"] or b"", found["action"] or b"payload", found["subject"] or b""
            shown = subject.decode("ascii", "backslashreplace")[:MAX_SUBJECT]
            self._counts.add(key.decode(), f"{action.decode().lower()} {shown}")

    def _names(self) -> dict[str, str]:
        try:
            return {} if self._lists_file is None else names_of(self._lists_file.read_text())
        except (OSError, UnicodeDecodeError):
            return {}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _hidden(key: str) -> str:
    """Return how an identity is called whose name is not known; ``*``: all that were counted together."""
    if key in ("", "*"):
        return key or NO_KEY
    return f"key {blake3(key.encode()).hexdigest()[:8]}"
