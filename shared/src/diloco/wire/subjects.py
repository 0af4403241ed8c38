"""Names of subjects, streams and buckets. ``docs/protocol.md`` is the reference."""

from __future__ import annotations

import re
from dataclasses import dataclass

CONSUMERS = 8  # names that one process may give to its consumers of a stream: as many reads at a time

KEY_LETTERS = 20  # of an identity's public key in the names of its consumers: 100 random bits

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_CONSUMER = re.compile(rf"(.+?)(?:-[A-Z2-7]{{{KEY_LETTERS}}})?-(?:{_INDEX.pattern})")


@dataclass(frozen=True)
class Subjects:
    """The subjects of one run."""

    run: str

    @property
    def log_stream(self) -> str:
        """Stream of records, keyframes and the genesis record; shortened by purges below a keyframe alone."""
        return f"DILOCO_{self.run}_LOG"

    @property
    def offer_stream(self) -> str:
        """Stream of offers, which keeps the latest message of each subject."""
        return f"DILOCO_{self.run}_OFFERS"

    @property
    def archive_stream(self) -> str:
        """Stream of merged offers, where ``log.archive`` is set."""
        return f"DILOCO_{self.run}_ARCHIVE"

    @property
    def bucket(self) -> str:
        """Key-value bucket of the run's settings, fragment map, members and owners."""
        return f"DILOCO_{self.run}"

    @property
    def genesis(self) -> str:
        return f"diloco.{self.run}.genesis"

    def record(self, fragment: int | str) -> str:
        """Return the subject of the heads of a fragment's log entries."""
        return f"diloco.{self.run}.fragment.{fragment}.head"

    def commit_notice(self, fragment: int | str) -> str:
        """Return the subject of a fragment's commit notices, in a run with regions."""
        return f"diloco.{self.run}.fragment.{fragment}.commit_notice"

    def record_tree(self, fragment: int | str) -> str:
        """Return the subjects of a fragment's log entries, heads and parts, and of their commit notices."""
        return f"diloco.{self.run}.fragment.{fragment}.>"

    def heads_and_notices(self, fragment: int | str) -> str:
        """Return one pattern of the subjects of a fragment's heads and commit notices, without parts."""
        return f"diloco.{self.run}.fragment.{fragment}.*"

    def keyframe(self, fragment: int | str) -> str:
        """Return the subject of the heads of a fragment's keyframes."""
        return f"diloco.{self.run}.keyframe.{fragment}.head"

    def keyframe_tree(self, fragment: int | str) -> str:
        """Return the subjects of a fragment's keyframes, heads and parts."""
        return f"diloco.{self.run}.keyframe.{fragment}.>"

    def offer(self, fragment: int | str, learner: str = "*") -> str:
        """Return the subject of the heads of a learner's offers of a fragment."""
        return f"diloco.{self.run}.delta.{fragment}.{learner}.head"

    def offer_tree(self, fragment: int | str) -> str:
        """Return the subjects of all learners' offers of a fragment, heads and parts."""
        return f"diloco.{self.run}.delta.{fragment}.>"

    def offers_of(self, sender: str) -> list[str]:
        """Return the subjects of all offers of a learner or a syncer, heads and parts."""
        return [f"diloco.{self.run}.{kind}.*.{sender}.>" for kind in ("delta", "regional")]

    def regional_offer(self, fragment: int | str, syncer: str = "*") -> str:
        """Return the subject of the heads of a syncer's regional offers of a fragment."""
        return f"diloco.{self.run}.regional.{fragment}.{syncer}.head"

    def regional_offer_tree(self, fragment: int | str) -> str:
        """Return the subjects of a region's regional offers of a fragment, heads and parts."""
        return f"diloco.{self.run}.regional.{fragment}.>"

    def archived(self, fragment: int, learner: str, incarnation: int, number: int, attempt: bytes | None) -> str:
        """Return the subject of the head of a merged offer.

        ``attempt``: that of the version's body, which no other process knows before the offer is stored. None: the subject by
        which earlier versions kept it.
        """
        return _archived_head(f"diloco.{self.run}.archive.{fragment}.{learner}.{incarnation}.{number}", attempt)

    def archived_regional_offer(self, fragment: int, syncer: str, incarnation: int, number: int, attempt: bytes | None) -> str:
        """Return the subject of the head of a merged regional offer, as :meth:`archived` does that of a learner's."""
        return _archived_head(f"diloco.{self.run}.archive.{fragment}.regional.{syncer}.{incarnation}.{number}", attempt)

    def heartbeat(self, learner: str = "*") -> str:
        return f"diloco.{self.run}.heartbeat.{learner}"

    def sample(self, evaluator: str = "*") -> str:
        return f"diloco.{self.run}.sample.{evaluator}"

    def sender_report(self, member: str = "*") -> str:
        """Return the subject on which a member tells what it has counted of others."""
        return f"diloco.{self.run}.sender_report.{member}"

    def gauges(self, learner: str = "*") -> str:
        return f"diloco.{self.run}.gauges.{learner}"

    def shard(self, syncer: str = "*") -> str:
        return f"diloco.{self.run}.shard.{syncer}"

    def presence(self, syncer: str = "*") -> str:
        """Return the subject of a syncer's summaries of the learners that it hears."""
        return f"diloco.{self.run}.presence.{syncer}"

    def round(self, fragment: int | str = "*") -> str:
        return f"diloco.{self.run}.round.{fragment}"

    @property
    def coordinator(self) -> str:
        """Subject of the leading coordinator's heartbeat."""
        return f"diloco.{self.run}.coordinator"

    @property
    def changed(self) -> str:
        """Subject of an empty message that a change of the run has been stored; members then read the key."""
        return f"diloco.{self.run}.changed"

    @property
    def marker(self) -> str:
        """Subject of snapshot markers: learners save their states for a checkpoint of the whole run."""
        return f"diloco.{self.run}.marker"

    def marker_answer(self, learner: str = "*") -> str:
        """Return the subject of a learner's acknowledgement of a snapshot marker."""
        return f"diloco.{self.run}.marker_answer.{learner}"

    @property
    def status(self) -> str:
        """Subject of requests that the coordinator answers with its status as JSON."""
        return f"diloco.{self.run}.status"

    def answers(self, asker: str, nonce: str = "*") -> str:
        """Return the subject of answers to a member or a command."""
        return f"diloco.{self.run}.answer.{asker}.{nonce}"

    @property
    def fragment_trees(self) -> str:
        """Return one pattern of all fragments' log entries, commit notices and keyframes, heads and parts."""
        return f"diloco.{self.run}.*.*.>"

    def log_filters(self) -> list[str]:
        """Return the subjects that the log stream stores."""
        return [self.genesis, f"diloco.{self.run}.fragment.>", f"diloco.{self.run}.keyframe.>"]

    def state(self, learner: str) -> str:
        """Return the subject of requests for a learner's optimizer state."""
        return f"diloco.{self.run}.state.{learner}"

    def archive_filters(self) -> list[str]:
        """Return the subjects that the archive stores."""
        return [f"diloco.{self.run}.archive.>"]

    def offer_filters(self) -> list[str]:
        """Return the subjects that the offer stream stores."""
        return [f"diloco.{self.run}.delta.>", f"diloco.{self.run}.regional.>"]


def _archived_head(offer: str, attempt: bytes | None) -> str:
    return f"{offer}.head" if attempt is None else f"{offer}.attempt.{attempt.hex()}.head"


def answer_to(subject: str, asker: str, nonce: str) -> str:
    """Return the subject for the answer to a message on ``subject``."""
    return Subjects(subject.split(".")[1]).answers(asker, nonce)


def reader(process: str, public_key: str | None) -> str:
    """Return how a process is called in its consumers' names: by letters of its key too, if it has an identity.

    No other member knows these. One who knew a consumer's name could take its messages (docs/security.md).
    """
    return process if public_key is None else f"{process}-{public_key[1 : 1 + KEY_LETTERS]}"


def consumers(reader: str, process: int = 0) -> list[str]:
    """Return the names of a reader's consumers. The slot stands behind the last dash, so no two readers share a name.

    The ``process``-th of several that share an identity has slots of its own.
    """
    return [f"{reader}-{slot}" for slot in range(CONSUMERS * process, CONSUMERS * (process + 1))]


def reader_of(consumer: str) -> str:
    """Return the process whose consumer this is, by its name; the name itself if it is of no such form."""
    found = _CONSUMER.fullmatch(consumer)
    return found[1] if found else consumer


def list_request(name: str, nonce: str) -> str:
    """Return the subject on which an identity asks a server for its list; ``nonce`` may be ``*``.

    The server itself answers, by a mapping of the subject in the identity's own account.
    """
    return f"_INBOX_{name}.list.{nonce}"


def list_answer(name: str, nonce: str, server: str, number: int, digest: str) -> str:
    """Return the subject that a server makes of :func:`list_request`: its name, and its list's number and digest."""
    return f"{list_request(name, nonce)}.{server}.{number}.{digest}"


def log_part(head: str, attempt: bytes, index: int) -> str:
    """Return the subject of part ``index`` of a log entry's or keyframe's body. Attempts never share a subject."""
    return f"{head.removesuffix('.head')}.part.{attempt.hex()}.{index}"


def offer_part(head: str, index: int) -> str:
    """Return the subject of part ``index`` of an offer's body. The next attempt replaces it: the stream stays small."""
    return f"{head.removesuffix('.head')}.part.{index}"


def is_head(subject: str) -> bool:
    """Whether a stored message is a head and not a part.

    Only the exact subject counts: a fence guards one subject, and a head beside it would be unfenced.
    """
    tokens = subject.split(".")
    return tokens[-1] == "head" and len(tokens) == (6 if tokens[2] in ("delta", "regional") else 5)


def is_commit_notice(subject: str) -> bool:
    """Whether a message of the log is a commit notice."""
    tokens = subject.split(".")
    return tokens[-1] == "commit_notice" and len(tokens) == 5


def fragment_of(subject: str) -> int | None:
    """Return the fragment that a record, keyframe, offer or round subject names in plain decimal, or None."""
    tokens = subject.split(".")
    if len(tokens) > 3 and tokens[2] in ("fragment", "keyframe", "delta", "regional", "round") and _INDEX.fullmatch(tokens[3]):
        return int(tokens[3])
    return None


def part_of_offer(subject: str) -> int | None:
    """Return the index of an offer's part, in plain decimal, or None if the subject is no part's."""
    tokens = subject.split(".")
    return int(tokens[6]) if len(tokens) == 7 and tokens[5] == "part" and _INDEX.fullmatch(tokens[6]) else None


def sender_of(subject: str) -> str | None:
    """Return the learner that an offer's subject names, or the syncer of a regional offer's, or None."""
    tokens = subject.split(".")
    return tokens[4] if len(tokens) > 5 and tokens[2] in ("delta", "regional") else None
