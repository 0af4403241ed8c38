"""Names of subjects, streams and buckets. ``docs/protocol.md`` is the reference."""

from __future__ import annotations

import re
from dataclasses import dataclass

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Subjects:
    """The subjects of one run."""

    run: str

    @property
    def log_stream(self) -> str:
        """Stream of records, keyframes and the genesis record: never shortened but by purges below a keyframe."""
        return f"DILOCO_{self.run}_LOG"

    @property
    def offer_stream(self) -> str:
        """Stream of offers: only the latest message of each subject is kept."""
        return f"DILOCO_{self.run}_OFFERS"

    @property
    def archive_stream(self) -> str:
        """Stream of merged offers, where ``log.archive`` is set."""
        return f"DILOCO_{self.run}_ARCHIVE"

    @property
    def bucket(self) -> str:
        """Key-value bucket: the run's settings, fragment map, members and owners."""
        return f"DILOCO_{self.run}"

    @property
    def genesis(self) -> str:
        return f"diloco.{self.run}.genesis"

    def record(self, fragment: int | str) -> str:
        """Heads of one fragment's log entries."""
        return f"diloco.{self.run}.fragment.{fragment}.head"

    def notice(self, fragment: int | str) -> str:
        """Which of one fragment's log entries are committed, in a run with regions."""
        return f"diloco.{self.run}.fragment.{fragment}.notice"

    def record_tree(self, fragment: int | str) -> str:
        """Heads and parts of one fragment's log entries, and notices of them."""
        return f"diloco.{self.run}.fragment.{fragment}.>"

    def keyframe(self, fragment: int | str) -> str:
        """Heads of one fragment's keyframes."""
        return f"diloco.{self.run}.keyframe.{fragment}.head"

    def keyframe_tree(self, fragment: int | str) -> str:
        """Heads and parts of one fragment's keyframes."""
        return f"diloco.{self.run}.keyframe.{fragment}.>"

    def offer(self, fragment: int | str, learner: str = "*") -> str:
        """Heads of one learner's offers of one fragment."""
        return f"diloco.{self.run}.delta.{fragment}.{learner}.head"

    def offer_tree(self, fragment: int | str) -> str:
        """Heads and parts of all learners' offers of one fragment."""
        return f"diloco.{self.run}.delta.{fragment}.>"

    def offers_of(self, sender: str) -> list[str]:
        """Heads and parts of all that a learner or a syncer has offered."""
        return [f"diloco.{self.run}.{kind}.*.{sender}.>" for kind in ("delta", "combined")]

    def combined(self, fragment: int | str, syncer: str = "*") -> str:
        """Heads of the offers of one fragment that a syncer has combined."""
        return f"diloco.{self.run}.combined.{fragment}.{syncer}.head"

    def combined_tree(self, fragment: int | str) -> str:
        """Heads and parts of a region's combined offers of one fragment."""
        return f"diloco.{self.run}.combined.{fragment}.>"

    def archived(self, fragment: int, learner: str, incarnation: int, number: int) -> str:
        """Head of a merged offer."""
        return f"diloco.{self.run}.archive.{fragment}.{learner}.{incarnation}.{number}.head"

    def archived_combined(self, fragment: int, syncer: str, incarnation: int, number: int) -> str:
        """Head of a merged combined offer."""
        return f"diloco.{self.run}.archive.{fragment}.combined.{syncer}.{incarnation}.{number}.head"

    def pulse(self, learner: str = "*") -> str:
        return f"diloco.{self.run}.pulse.{learner}"

    def shard(self, syncer: str = "*") -> str:
        return f"diloco.{self.run}.shard.{syncer}"

    def round(self, fragment: int | str = "*") -> str:
        return f"diloco.{self.run}.round.{fragment}"

    @property
    def coordinator(self) -> str:
        """The leading coordinator's sign of life."""
        return f"diloco.{self.run}.coordinator"

    @property
    def changed(self) -> str:
        """Rung when a change of the run has been stored: an empty message, after which whoever hears it reads the key."""
        return f"diloco.{self.run}.changed"

    @property
    def mark(self) -> str:
        """Asks learners to save their states for a checkpoint of the whole run."""
        return f"diloco.{self.run}.mark"

    def marked(self, learner: str = "*") -> str:
        """A learner's answer to a mark."""
        return f"diloco.{self.run}.marked.{learner}"

    @property
    def status(self) -> str:
        """Answered by the coordinator with its status as JSON."""
        return f"diloco.{self.run}.status"

    def answers(self, asker: str, nonce: str = "*") -> str:
        """Where answers come that somebody asked for, of a member or of a command."""
        return f"diloco.{self.run}.answer.{asker}.{nonce}"

    def log_filters(self) -> list[str]:
        """What the log stream stores."""
        return [self.genesis, f"diloco.{self.run}.fragment.>", f"diloco.{self.run}.keyframe.>"]

    def state(self, learner: str) -> str:
        """Asks a learner for its optimizer's state."""
        return f"diloco.{self.run}.state.{learner}"

    def archive_filters(self) -> list[str]:
        """What the archive stores."""
        return [f"diloco.{self.run}.archive.>"]

    def offer_filters(self) -> list[str]:
        """What the offer stream stores."""
        return [f"diloco.{self.run}.delta.>", f"diloco.{self.run}.combined.>"]


def answer_to(subject: str, asker: str, nonce: str) -> str:
    """Where the answer to a message on ``subject`` is to come."""
    return Subjects(subject.split(".")[1]).answers(asker, nonce)


def log_part(head: str, attempt: bytes, index: int) -> str:
    """Where part ``index`` of a log entry's or keyframe's body is stored: attempts never share a subject."""
    return f"{head.removesuffix('.head')}.part.{attempt.hex()}.{index}"


def offer_part(head: str, index: int) -> str:
    """Where part ``index`` of an offer's body is stored: the next attempt replaces it, so that the stream stays small."""
    return f"{head.removesuffix('.head')}.part.{index}"


def is_head(subject: str) -> bool:
    """Whether a stored message is a head; all others are parts.

    Only the exact subject counts: a fence guards one subject, and a head beside it would be unfenced.
    """
    tokens = subject.split(".")
    return tokens[-1] == "head" and len(tokens) == (6 if tokens[2] in ("delta", "combined") else 5)


def is_notice(subject: str) -> bool:
    """Whether a message of the log says which entry is committed."""
    tokens = subject.split(".")
    return tokens[-1] == "notice" and len(tokens) == 5


def fragment_of(subject: str) -> int | None:
    """The fragment that a record, keyframe, offer or round subject names in plain decimal, or None if it names none."""
    tokens = subject.split(".")
    if len(tokens) > 3 and tokens[2] in ("fragment", "keyframe", "delta", "combined", "round") and _INDEX.fullmatch(tokens[3]):
        return int(tokens[3])
    return None


def part_of_offer(subject: str) -> int | None:
    """The index in plain decimal of an offer's part, or None if it is none."""
    tokens = subject.split(".")
    return int(tokens[6]) if len(tokens) == 7 and tokens[5] == "part" and _INDEX.fullmatch(tokens[6]) else None


def sender_of(subject: str) -> str | None:
    """The learner that an offer's subject names, or the syncer of a combined one's; None if it is neither."""
    tokens = subject.split(".")
    return tokens[4] if len(tokens) > 5 and tokens[2] in ("delta", "combined") else None
