"""What became of every batch of the data: trained by whom, merged in which fragments, lost, or repeated.

Fed with what learners say (or their tapes hold) that they trained, and with the records of the fragments' logs, in any order of
the two; both may be told again. It keeps ranges, and a learner takes a share's batches one after another, so that its size is
that of the breaks in their order: restarts, shares taken over, work that no version merged.

A batch may be *repeated*: trained by two processes, since the share of a learner that died goes on behind the last batch
merged. That one process's work on it is merged into a fragment twice is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.core import ranges
from diloco.wire.messages import Range, Record

Process = tuple[str, int]  # learner and incarnation
MAX_ERRORS = 100


@dataclass(frozen=True)
class Line:
    """A contiguous range of one share, whose batches all have the same history in one fragment."""

    share: int
    first: int
    count: int
    trained: tuple[Process, ...]
    merged: tuple[Process, ...]  # whose offers were merged; a process also offers what it restored of an earlier one's work

    @property
    def lost(self) -> bool:
        """Whether it was trained and is in no version."""
        return bool(self.trained) and not self.merged

    @property
    def repeated(self) -> bool:
        """Whether more than one process trained it."""
        return len(self.trained) > 1


@dataclass(frozen=True)
class ShareSummary:
    """One share's batches: trained by anybody, merged into every fragment or into none, trained more than once."""

    share: int
    learners: tuple[str, ...]
    trained: int
    merged: int
    lost: int
    repeated: int


@dataclass
class Ledger:
    """The ledger of a run with so many fragments."""

    fragments: int
    trained: dict[Process, list[Range]] = field(default_factory=dict)
    merged: list[dict[Process, list[Range]]] = field(default_factory=list)  # by fragment
    versions: list[int] = field(default_factory=list)  # by fragment: the newest entered
    batch_tokens: int = 0  # of one batch, as far as is known: the same for all of a run
    errors: list[str] = field(default_factory=list)  # the first few

    def __post_init__(self) -> None:
        self.merged = self.merged or [{} for _ in range(self.fragments)]
        self.versions = self.versions or [0] * self.fragments

    def train(self, process: Process, trained: Sequence[Range], batch_tokens: int = 0) -> None:
        """Enter what a process has trained, and how many tokens a batch has (0: not known)."""
        self.trained[process] = ranges.normal([*self.trained.get(process, ()), *trained])
        self.batch_tokens = batch_tokens or self.batch_tokens

    def processed(self, learner: str | None = None) -> int:
        """Tokens that a learner (None: all of them) has trained in all its processes, repetitions included."""
        own = [trained for (name, _), trained in self.trained.items() if learner in (None, name)]
        return self.batch_tokens * sum(map(ranges.batches, own))

    def merge(self, record: Record) -> None:
        """Enter a version; versions of a fragment in order, those entered before are passed over."""
        if record.entry != "version" or record.version <= self.versions[record.fragment]:
            return
        self.versions[record.fragment] = record.version
        merged = self.merged[record.fragment]
        for member in record.members:
            process = member.learner, member.incarnation
            known = merged.get(process, [])
            twice = ranges.common(known, member.data)
            if twice and len(self.errors) < MAX_ERRORS:
                self.errors.append(
                    f"fragment {record.fragment}, version {record.version}: merges batches of {member.learner} (incarnation "
                    f"{member.incarnation}) that an earlier version holds: {_spell(twice)}"
                )
            merged[process] = ranges.normal([*known, *member.data])

    def untrained(self) -> list[str]:
        """What was merged although its learner had not trained it, by then or ever: errors, if ``trained`` is complete."""
        wrong = []
        for fragment, merged in enumerate(self.merged):
            for (learner, incarnation), held in sorted(merged.items()):
                own = [r for (name, number), r in self.trained.items() if name == learner and number <= incarnation]
                rest = ranges.subtract(held, ranges.normal(piece for r in own for piece in r))
                if rest:
                    wrong.append(
                        f"fragment {fragment}: versions hold batches of {learner} (incarnation {incarnation}) that it never "
                        f"trained: {_spell(rest)}"
                    )
        return wrong

    def lines(self, fragment: int) -> Iterator[Line]:
        """The history of all data in one fragment, by share and batch."""
        trained = _cuts(self.trained)
        merged = _cuts(self.merged[fragment])
        for share in sorted(trained.keys() | merged.keys()):
            changes = sorted(
                [(*change, 0) for change in trained.get(share, ())] + [(*change, 1) for change in merged.get(share, ())]
            )
            holding: tuple[set[Process], set[Process]] = set(), set()
            for i, (batch, process, which) in enumerate(changes):
                holding[which].symmetric_difference_update({process})
                if i + 1 < len(changes) and changes[i + 1][0] == batch:
                    continue
                if any(holding):
                    count = changes[i + 1][0] - batch
                    yield Line(share, batch, count, tuple(sorted(holding[0])), tuple(sorted(holding[1])))

    def shares(self) -> list[ShareSummary]:
        """Every share's batches in all fragments together."""
        trained = ranges.normal(piece for own in self.trained.values() for piece in own)
        everywhere, somewhere = trained, list[Range]()
        for merged in self.merged:
            union = ranges.normal(piece for own in merged.values() for piece in own)
            everywhere = ranges.common(everywhere, union)
            somewhere = ranges.normal([*somewhere, *union])
        lost = ranges.subtract(trained, somewhere)
        learners: dict[int, set[str]] = {}
        for (learner, _), own in self.trained.items():
            for share, _, _ in own:
                learners.setdefault(share, set()).add(learner)
        total = _by_share(piece for own in self.trained.values() for piece in own)
        once, all_merged, none = _by_share(trained), _by_share(everywhere), _by_share(lost)
        return [
            ShareSummary(
                share,
                tuple(sorted(learners[share])),
                once[share],
                all_merged.get(share, 0),
                none.get(share, 0),
                total[share] - once[share],
            )
            for share in sorted(once)
        ]

    def dump(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "batch_tokens": self.batch_tokens,
            "trained": [[*process, own] for process, own in sorted(self.trained.items())],
            "merged": [[[*process, own] for process, own in sorted(merged.items())] for merged in self.merged],
            "versions": self.versions,
            "errors": self.errors,
        }

    @classmethod
    def load(cls, fragments: int, values: Mapping[str, Any]) -> Ledger:
        """What :meth:`dump` gave.

        Raises:
            KeyError, TypeError, ValueError: it is no such thing, or of another number of fragments.
        """
        ledger = cls(fragments, versions=[int(version) for version in values["versions"]])
        ledger.batch_tokens = int(values["batch_tokens"])
        for learner, incarnation, own in values["trained"]:
            ledger.train((str(learner), int(incarnation)), _plain(own))
        for merged, stored in zip(ledger.merged, values["merged"], strict=True):
            merged |= {(str(learner), int(incarnation)): ranges.normal(_plain(own)) for learner, incarnation, own in stored}
        ledger.errors = [str(error) for error in values["errors"]]
        if len(ledger.versions) != fragments:
            raise ValueError(f"a ledger of {len(ledger.versions)} fragments, expected {fragments}")
        return ledger


def versions_of(records: Iterable[Record], data: Sequence[Range]) -> Iterator[tuple[Record, Process, list[Range]]]:
    """Which of the records hold some of ``data``, of whom, and which of it."""
    for record in records:
        for member in record.members:
            held = ranges.common(data, member.data)
            if held:
                yield record, (member.learner, member.incarnation), held


def _cuts(held: Mapping[Process, Sequence[Range]]) -> dict[int, list[tuple[int, Process]]]:
    """By share: the batches at which a process begins or ceases to hold."""
    cuts: dict[int, list[tuple[int, Process]]] = {}
    for process, own in held.items():
        for share, first, count in own:
            cuts.setdefault(share, []).extend([(first, process), (first + count, process)])
    return cuts


def _by_share(data: Iterable[Range]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for share, _, count in data:
        counts[share] = counts.get(share, 0) + count
    return counts


def _plain(values: Iterable[Sequence[int]]) -> list[Range]:
    return [(int(share), int(first), int(count)) for share, first, count in values]


def _spell(data: Sequence[Range]) -> str:
    """Ranges for people; a few of many."""
    spelled = [f"share {share}: {first} to {first + count - 1}" for share, first, count in data[:3]]
    return ", ".join(spelled) + (f" and {len(data) - 3} more ranges" if len(data) > 3 else "")
