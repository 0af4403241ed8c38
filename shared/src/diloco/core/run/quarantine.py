"""Quarantines by what syncers state of outliers: who is quarantined, and what a syncer states next.

Each syncer states, under a key of its own, an outlier of each learner in each fragment that it judges, as long as the learner's
newest offer of the fragment is one. A learner is quarantined while so many statements hold for more than half of the
fragments that count. A learner offers each fragment about once a cycle, so these are outliers of one cycle, and no syncer that
owns few fragments decides.

The way back: the offers of a quarantined learner are judged on, and not merged. A syncer then keeps what it stated of a
fragment, and marks it as over once the learner's next offer is sound. When all that is stated is over, as after a cycle of
sound offers, the quarantine is, too. An operator's ``readmit`` ends it at once: what was stated before that change counts no
more.

A fragment's statements are those of its owner, by the owners table. As long as the owner does not name the fragment among
those that it judges, those of owners before it hold: a new one takes them over. In a run whose regions merge first, fragments
are also judged by syncers that do not own them, and all are heard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from diloco.wire.quarantines import OutlierStatement, SeenOutlier

Statements = Mapping[str, OutlierStatement]  # by syncer


@dataclass(frozen=True)
class OutlyingLearner:
    """A learner with outliers in more than half of the fragments that count, and what was stated of it, by syncer."""

    learner: str
    stated: tuple[tuple[str, SeenOutlier], ...]

    @property
    def syncers(self) -> list[str]:
        """The syncers that stated so, by name."""
        return sorted({syncer for syncer, _ in self.stated})

    @property
    def largest(self) -> SeenOutlier:
        """The outlier that exceeds its threshold by the largest factor; ties: the first fragment."""
        return max(
            (seen for _, seen in self.stated), key=lambda seen: (seen.norm / max(seen.threshold, 1e-300), -seen.fragment)
        )

    @property
    def label(self) -> str:
        """The syncers that found outliers, and the largest one, as messages state them."""
        seen = self.largest
        return (
            f"outliers in {len(self.stated)} fragments, as {', '.join(self.syncers)} found: in fragment {seen.fragment} a norm "
            f"of {seen.norm:.4g}, above {seen.threshold:.4g}"
        )


@dataclass(frozen=True)
class Outlying:
    """The learners whose offers are outliers in more than half of the fragments.

    ``quarantined``: they are excluded. ``suspected``: nothing automatic happens, since some fragment's owner is of a version
    that states no outliers, and would merge what the others leave out; an operator decides. Then the fragments that the other
    owners judge are all that count.
    """

    quarantined: Mapping[str, OutlyingLearner] = field(default_factory=dict)
    suspected: Mapping[str, OutlyingLearner] = field(default_factory=dict)


def outlying(
    statements: Statements, owners: Sequence[str] | None, readmitted: Mapping[str, int], *, number: int, judged_by_all: bool
) -> Outlying:
    """Fold all syncers' statements.

    Args:
        statements: by syncer.
        owners: by fragment; None: not known.
        readmitted: by learner, the number of the change that readmitted it last.
        number: of the newest change of the run: a statement of a later one is not believed.
        judged_by_all: whether syncers other than a fragment's owner judge its offers (``regions.merge``).
    """
    counting = max((statement.counting for statement in statements.values()), default=0)
    stated: defaultdict[str, dict[int, tuple[str, SeenOutlier]]] = defaultdict(dict)
    for syncer, statement in sorted(statements.items()):
        for seen in statement.outliers:
            if not readmitted.get(seen.learner, 0) <= seen.change <= number:
                continue
            if not judged_by_all and not _judges(syncer, seen.fragment, statements, owners):
                continue
            known = stated[seen.learner].get(seen.fragment)
            if known is None or known[1].is_over:
                stated[seen.learner][seen.fragment] = syncer, seen
    all_state = owners is None or statements.keys() >= set(owners)
    if not all_state:
        counting = min(counting, len({index for statement in statements.values() for index in statement.fragments}))
    found = {
        learner: OutlyingLearner(learner, tuple(by_fragment[index] for index in sorted(by_fragment)))
        for learner, by_fragment in sorted(stated.items())
        if 2 * len(by_fragment) > counting and not all(seen.is_over for _, seen in by_fragment.values())
    }
    return Outlying(quarantined=found) if all_state else Outlying(suspected=found)


def _judges(syncer: str, fragment: int, statements: Statements, owners: Sequence[str] | None) -> bool:
    """Whether a syncer's statements of a fragment hold."""
    if owners is None:
        return True
    if fragment >= len(owners):
        return False
    owner = statements.get(owners[fragment])
    if owner is not None and fragment in owner.fragments:
        return syncer == owner.syncer
    return True


@dataclass(frozen=True)
class Verdict:
    """Verdict on a learner's newest offer of a fragment: an outlier that counts (``seen``), or (None) a sound offer."""

    learner: str
    seen: SeenOutlier | None


def judge(
    statement: OutlierStatement, fragment: int, verdicts: Iterable[Verdict], quarantined: Collection[str]
) -> OutlierStatement:
    """Return a syncer's statement after it has judged offers of a fragment; ``quarantined``: the learners that are by now."""
    outliers = {(seen.learner, seen.fragment): seen for seen in statement.outliers}
    for verdict in verdicts:
        known = outliers.get((verdict.learner, fragment))
        if verdict.seen is not None:
            if known is None or known.is_over:  # else it is stated already
                outliers.pop((verdict.learner, fragment), None)
                outliers[verdict.learner, fragment] = verdict.seen
        elif known is not None and verdict.learner in quarantined:
            outliers[verdict.learner, fragment] = structs.replace(known, is_over=True)
        elif known is not None:
            del outliers[verdict.learner, fragment]
    return structs.replace(statement, outliers=list(outliers.values()))


def take_over(statement: OutlierStatement, fragments: Collection[int], others: Statements) -> OutlierStatement:
    """Return a syncer's statement once it judges these fragments, and no others.

    What ``others`` have stated of those that are new to it, it states from now on. What it has stated itself of fragments that
    it judges no more stays until their next owner has taken it over (:func:`settle`).
    """
    new = set(fragments) - set(statement.fragments)
    known = {(seen.learner, seen.fragment): seen for seen in statement.outliers}
    for syncer, other in sorted(others.items()):
        if syncer != statement.syncer:
            for seen in other.outliers:
                if seen.fragment in new:
                    known.setdefault((seen.learner, seen.fragment), seen)
    return structs.replace(statement, fragments=sorted(fragments), outliers=list(known.values()))


def settle(
    statement: OutlierStatement, quarantined: Collection[str], readmitted: Mapping[str, int], others: Statements
) -> OutlierStatement:
    """Return a syncer's statement without what is over, was stated before a readmission, or is by now stated by an owner."""
    elsewhere = {index for other in others.values() if other.syncer != statement.syncer for index in other.fragments}
    handed_over = elsewhere.difference(statement.fragments)
    outliers = [
        seen
        for seen in statement.outliers
        if seen.change >= readmitted.get(seen.learner, 0)
        and (seen.learner in quarantined or not seen.is_over)
        and seen.fragment not in handed_over
    ]
    return structs.replace(statement, outliers=outliers)
