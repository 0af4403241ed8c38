"""The fate of every batch of the data: trained by which processes, merged in which fragments, lost, or repeated.

Its sources are heartbeats or tapes of learners, with the batches that they trained, and records of the fragments' logs. Both
come in any order, and may come again. The ledger keeps ranges. A learner takes a share's batches one after another, so the
ledger grows only with breaks in their order: restarts, takeovers of shares, work that no version merged.

A batch may be *repeated*: two processes trained it, since the share of a dead learner continues behind the last batch merged.
It is an error if a fragment merges one process's work on a batch twice.
A step counts the tokens that its loss counted, at most those of a batch. Heartbeats state them in sum over all processes of a
learner; what one process counted is the growth of that sum since it was heard first. A tape has those of each step.
A learner may train on data of its own, as loops with a loader of theirs do. Its offers state no batches: the ledger
cannot account for them, and says how many tokens that are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.core.tensors import ranges
from diloco.wire.entries import Record
from diloco.wire.fields import Range

Process = tuple[str, int]  # learner and incarnation
MAX_ERRORS = 100


@dataclass(frozen=True)
class BatchRange:
    """A contiguous range of one share, whose batches all have the same history in one fragment."""

    share: int
    first: int
    count: int
    trained: tuple[Process, ...]
    merged: tuple[Process, ...]  # with merged offers; a process also offers work that it restored of an earlier one

    @property
    def lost(self) -> bool:
        """Whether it was trained and no version holds it."""
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
    """The ledger of a run with ``fragments`` fragments."""

    fragments: int
    trained: dict[Process, list[Range]] = field(default_factory=dict)
    merged: list[dict[Process, list[Range]]] = field(default_factory=list)  # by fragment
    versions: list[int] = field(default_factory=list)  # by fragment: the newest one entered
    own: list[dict[str, int]] = field(default_factory=list)  # by fragment and learner: tokens merged of data of its own
    batch_tokens: int = 0  # of one batch of any learner, at most; 0: not known yet
    most: dict[Process, int] = field(default_factory=dict)  # the same of a process, where it is known
    counted: dict[Process, int] = field(default_factory=dict)  # tokens of processes of whose batches some had fewer than that
    heard: dict[Process, tuple[int, int]] = field(default_factory=dict)  # first: the learner's tokens, the process's batches
    newest: dict[Process, int] = field(default_factory=dict)  # the learner's tokens as heard last
    errors: list[str] = field(default_factory=list)  # the first few

    def __post_init__(self) -> None:
        self.merged = self.merged or [{} for _ in range(self.fragments)]
        self.own = self.own or [{} for _ in range(self.fragments)]
        self.versions = self.versions or [0] * self.fragments

    def train(
        self, process: Process, trained: Sequence[Range], batch_tokens: int = 0, learner_tokens: int | None = None
    ) -> None:
        """Enter the batches that a process has trained, and the most tokens of a batch (0: not known).

        ``learner_tokens``: that the learner has processed by then, in all its processes, as it says; None: it does not.
        """
        self.trained[process] = ranges.normal([*self.trained.get(process, ()), *trained])
        if batch_tokens:
            self.most[process] = max(batch_tokens, self.most.get(process, 0))
            self.batch_tokens = max(self.batch_tokens, batch_tokens)
        if learner_tokens is not None:
            self._note_tokens(process, learner_tokens)

    def _note_tokens(self, process: Process, tokens: int) -> None:
        """Count a process's tokens, if they have grown by less than its batches have at most.

        Its first batches, of which nothing was heard, are taken to have as many as the others on average.
        """
        batches = ranges.batches(self.trained[process])
        first_tokens, first_batches = self.heard.setdefault(process, (tokens, batches))
        newest = self.newest[process] = max(tokens, self.newest.get(process, 0))  # heartbeats may overtake one another
        grown, more = newest - first_tokens, batches - first_batches
        if 0 <= grown < self.most_tokens(process) * more:
            self.count(process, grown + round(first_batches * grown / more))

    def count(self, process: Process, tokens: int) -> None:
        """Enter how many tokens a process has counted in all the batches that it has trained."""
        self.counted[process] = tokens

    def batches(self, learner: str) -> int:
        """Return how many batches a learner has trained in all its processes, repetitions included."""
        return sum(ranges.batches(trained) for (name, _), trained in self.trained.items() if name == learner)

    def steps(self, learner: str, processed: int, heard: int) -> int:
        """Return the steps in which a learner has ``processed`` tokens; so many it was ``heard`` to say it took."""
        if any(name == learner for name, _ in self.counted):
            return max(heard, self.batches(learner))
        most = self.most_tokens((learner, 0))
        return processed // most if most else heard

    @property
    def varies(self) -> bool:
        """Whether some batches had fewer tokens than others."""
        return bool(self.counted) or len(set(self.most.values())) > 1

    def most_tokens(self, process: Process) -> int:
        """Return the most tokens of a process's batches; where nothing was heard of it, those of its learner, or of all."""
        known = self.most.get(process)
        return known or max((most for (name, _), most in self.most.items() if name == process[0]), default=self.batch_tokens)

    def processed(self, learner: str | None = None) -> int:
        """Return the tokens that a learner (None: all of them) has trained in all its processes, repetitions included."""
        own = [process for process in self.trained if learner in (None, process[0])]
        return sum(
            self.counted.get(process, self.most_tokens(process) * ranges.batches(self.trained[process])) for process in own
        )

    def merge(self, record: Record) -> None:
        """Enter a version. Versions of a fragment come in order; one that was entered before is ignored."""
        if record.entry != "version" or record.version <= self.versions[record.fragment]:
            return
        self.versions[record.fragment] = record.version
        merged = self.merged[record.fragment]
        own = self.own[record.fragment]
        for member in record.members:
            if not member.data:
                own[member.learner] = own.get(member.learner, 0) + member.tokens
            process = member.learner, member.incarnation
            known = merged.get(process, [])
            twice = ranges.common(known, member.data)
            if twice and len(self.errors) < MAX_ERRORS:
                self.errors.append(
                    f"fragment {record.fragment}, version {record.version}: merges batches of {member.learner} "
                    f"(incarnation {member.incarnation}) that an earlier version already contains: {_spell(twice)}"
                )
            merged[process] = ranges.normal([*known, *member.data])

    def untrained(self) -> list[str]:
        """Describe merged batches that their learners never trained: errors, if ``trained`` is complete."""
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

    def lines(self, fragment: int) -> Iterator[BatchRange]:
        """Yield the history of all data in one fragment, by share and batch."""
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
                    yield BatchRange(share, batch, count, tuple(sorted(holding[0])), tuple(sorted(holding[1])))

    def shares(self) -> list[ShareSummary]:
        """Summarise every share's batches over all fragments."""
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
                share=share,
                learners=tuple(sorted(learners[share])),
                trained=once[share],
                merged=all_merged.get(share, 0),
                lost=none.get(share, 0),
                repeated=total[share] - once[share],
            )
            for share in sorted(once)
        ]

    def own_tokens(self, sizes: Sequence[int]) -> dict[str, int]:
        """Return by learner the merged tokens of data of its own, which are not accounted for.

        They are the mean over fragments, weighted by their ``sizes``.
        """
        learners = sorted({learner for own in self.own for learner, tokens in own.items() if tokens})
        return {learner: round(fragment_mean([own.get(learner, 0) for own in self.own], sizes)) for learner in learners}

    def dump(self) -> dict[str, Any]:
        """Return the ledger as plain values."""
        return {
            "batch_tokens": self.batch_tokens,
            "most": [[*process, tokens] for process, tokens in sorted(self.most.items())],
            "counted": [[*process, tokens] for process, tokens in sorted(self.counted.items())],
            "heard": [[*process, *first, self.newest[process]] for process, first in sorted(self.heard.items())],
            "trained": [[*process, own] for process, own in sorted(self.trained.items())],
            "merged": [[[*process, own] for process, own in sorted(merged.items())] for merged in self.merged],
            "versions": self.versions,
            "own": self.own,
            "errors": self.errors,
        }

    @classmethod
    def load(cls, fragments: int, values: Mapping[str, Any]) -> Ledger:
        """Return the ledger that :meth:`dump` wrote.

        Raises:
            KeyError, TypeError, ValueError: the values are damaged, or of another number of fragments.
        """
        ledger = cls(fragments, versions=[int(version) for version in values["versions"]])
        ledger.batch_tokens = int(values["batch_tokens"])
        for learner, incarnation, own in values["trained"]:
            ledger.train((str(learner), int(incarnation)), _plain(own))
        # an older version writes none of these three, nor ``own``
        for learner, incarnation, tokens in values.get("most", ()):
            ledger.most[str(learner), int(incarnation)] = int(tokens)
        for learner, incarnation, tokens in values.get("counted", ()):
            ledger.counted[str(learner), int(incarnation)] = int(tokens)
        for learner, incarnation, tokens, batches, newest in values.get("heard", ()):
            process = str(learner), int(incarnation)
            ledger.heard[process], ledger.newest[process] = (int(tokens), int(batches)), int(newest)
        for merged, stored in zip(ledger.merged, values["merged"], strict=True):
            merged |= {(str(learner), int(incarnation)): ranges.normal(_plain(own)) for learner, incarnation, own in stored}
        for own, stored in zip(ledger.own, values.get("own", ledger.own), strict=True):
            own |= {str(learner): int(tokens) for learner, tokens in stored.items()}
        ledger.errors = [str(error) for error in values["errors"]]
        if len(ledger.versions) != fragments:
            raise ValueError(f"a ledger of {len(ledger.versions)} fragments, expected {fragments}")
        return ledger


def _cuts(held: Mapping[Process, Sequence[Range]]) -> dict[int, list[tuple[int, Process]]]:
    """Return, by share, the batches at which the work of a process begins or ends."""
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
    """Describe ranges, the first few of many."""
    spelled = [f"share {share}: {first} to {first + count - 1}" for share, first, count in data[:3]]
    return ", ".join(spelled) + (f" and {len(data) - 3} more ranges" if len(data) > 3 else "")


def fragment_mean(values: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the mean of values by fragment, weighted by the fragments' ``sizes`` in parameters."""
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
