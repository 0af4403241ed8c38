"""One run's log: the parts by which a process reads it, follows it and writes to it.

Modules, from the bottom up: :mod:`~diloco.log.stream` (where the log lies, and how its messages are decoded),
:mod:`~diloco.log.entries` (the entries in their order), :mod:`~diloco.log.reader` (single things), :mod:`~diloco.log.writer`,
:mod:`~diloco.log.archive`, :mod:`~diloco.log.regional` (one of a quorum of regions), and on top
:mod:`~diloco.log.follower`, which keeps replicas of fragments up to date.
"""

from __future__ import annotations

from diloco.core.tensors.fragments import FragmentMap
from diloco.log.archive import Archive
from diloco.log.entries import Entries
from diloco.log.reader import Reader
from diloco.log.regional import RegionalLog
from diloco.log.stream import LogStream
from diloco.log.writer import Writer
from diloco.settings.run import RunSettings
from diloco.transport import Transport


class Log:
    """One run's log, seen through one service's transport.

    In a run with regions it is one of several, each in a region of its own (:mod:`diloco.core.log.quorum`).
    """

    def __init__(
        self, transport: Transport, run_name: str, run: bytes, fragment_map: FragmentMap, settings: RunSettings
    ) -> None:
        self.stream = LogStream(transport, run_name, run, fragment_map, settings)
        self.transport, self.run, self.map, self.subjects = transport, run, fragment_map, self.stream.subjects
        self.entries = Entries(self.stream)
        self.reader = Reader(self.stream, self.entries)
        self.writer = Writer(self.stream)
        self.archive = Archive(self.stream, self.writer)
        self.region = RegionalLog(self.stream, self.reader, self.writer)
