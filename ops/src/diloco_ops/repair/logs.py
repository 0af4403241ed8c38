"""A fragment's stored log: messages that readers skip, and versions that a repair would undo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco.core.log.chain import Chain, WrongEntries
from diloco.core.run.changes import Repair
from diloco.errors import MessageError, RunError
from diloco.log.reader import LoadedState
from diloco.log.stream import RefusedEntry, pass_over
from diloco_ops.reading.run_reader import RunReader


@dataclass(frozen=True)
class PassedOver:
    """A message on a fragment's subjects that no reader takes for an entry of its log."""

    subject: str
    sequence: int  # in the stream
    size_bytes: int
    reason: str


@dataclass
class Examined:
    """One fragment's log."""

    chain: Chain  # as of its end
    first_version: int  # the oldest one that the log can go on from
    passed_over: list[PassedOver] = field(default_factory=list)
    merged: dict[int, int] = field(default_factory=dict)  # by version: tokens merged up to it
    fault: str | None = None  # why the fold stopped before the log's end

    @property
    def is_stuck(self) -> bool:
        """Whether nothing that readers take stands behind the last message that they pass over."""
        return self.fault is not None or any(message.sequence > self.chain.sequence for message in self.passed_over)

    def lost(self, version: int) -> tuple[int, int]:
        """Return the number of versions that a repair to ``version`` undoes, and the tokens merged in them."""
        return self.chain.version - version, self.chain.tokens_merged - self.merged[version]

    def order(self, run: str, version: int | None) -> Repair:
        """Return the order to go on from a version, by default the newest one.

        Raises:
            RunError: it cannot be carried out.
        """
        chain, index = self.chain, self.chain.fragment
        version = chain.version if version is None else version
        if chain.closed:
            raise RunError(
                f"run {run!r}, fragment {index}: its log is closed at version {chain.version}, and nothing follows that; "
                f"go on from a version in a new directory: diloco up --run-dir NEW --resume DIR --resume-at {version}"
            )
        if not self.first_version <= version <= chain.version:
            raise RunError(
                f"run {run!r}, fragment {index}: version {version} is not in the log, which has those from "
                f"{self.first_version} to {chain.version}; go on from one of them, or from a checkpoint (diloco up --resume)"
            )
        return Repair(index, version, self.passed_over[-1].sequence if self.passed_over else 0)

    def lines(self) -> Iterator[str]:
        """Describe what was found, a line each."""
        index, chain = self.chain.fragment, self.chain
        for message in self.passed_over:
            behind = "the log goes on behind it" if message.sequence < chain.sequence else "nothing stands behind it yet"
            yield (
                f"fragment {index}: message {message.sequence} on {message.subject}, {message.size_bytes} bytes: "
                f"{message.reason}; all readers pass over it, and {behind}"
            )
        if self.fault is not None:
            yield f"fragment {index}: cannot be read beyond version {chain.version}: {self.fault}"


async def examine(seen: RunReader, fragment: int) -> Examined:
    """Read and fold a fragment's log from the oldest state that it has, and judge every message.

    Raises:
        RunError: no state of the fragment is whole; go on from a checkpoint.
    """
    reader, refusals = seen.log.reader, list[RefusedEntry]()
    end = await reader.end_sequence(fragment)
    replica, fault = (await _oldest(seen, fragment)).replica, None
    merged = {replica.chain.version: replica.chain.tokens_merged}
    first_version = replica.chain.version
    try:
        async for entry in seen.log.entries.fold_missed(replica, end, refusals.append, WrongEntries(), judge=True):
            if entry.record.makes_version:
                merged[entry.record.version] = entry.record.tokens_merged
    except MessageError as error:
        fault = str(error)
    passed_over = [await _named(seen, refusal) for refusal in refusals]
    return Examined(replica.chain, first_version, passed_over, merged, fault)


async def _oldest(seen: RunReader, fragment: int) -> LoadedState:
    """Return version 0 if the log still goes on from there, or else the oldest keyframe that is whole."""
    reader = seen.log.reader
    if await reader.begins_with(fragment, seen.genesis_check):
        with contextlib.suppress(MessageError, RunError):
            return await seen.load_first(fragment)
    async for loaded in reader.keyframes(fragment, pass_over):
        if await reader.holds(loaded.replica.chain):
            return loaded
    raise RunError(
        f"run {seen.run.name!r}, fragment {fragment}: no keyframe is intact; go on from a checkpoint (diloco up --resume)"
    )


async def _named(seen: RunReader, refusal: RefusedEntry) -> PassedOver:
    stored = await seen.log.stream.get(refusal.sequence)
    return PassedOver(refusal.subject, refusal.sequence, len(stored.data) if stored else 0, str(refusal.error))
