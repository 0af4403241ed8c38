"""Quarantines by syncers' statements: who is quarantined, who comes back, and what a syncer that lies can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.run.changes import Changes, Effective, Quarantine, Readmit, Set, in_force
from diloco.core.run.quarantine import Outlying, Verdict, judge, outlying, settle, take_over
from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.wire.quarantines import MAX_STATEMENT_BYTES, OutlierStatement, SeenOutlier, unpack_outliers

OWNERS = ["syncer-0", "syncer-0", "syncer-1", "syncer-1"]


def seen(learner: str, fragment: int, **changes: Any) -> SeenOutlier:
    values = {"incarnation": 1, "version": 7, "norm": 20.0, "threshold": 5.0, "change": 0, "is_over": False}
    return SeenOutlier(learner=learner, fragment=fragment, **(values | changes))


def statement(
    syncer: str, *outliers: SeenOutlier, fragments: Sequence[int] | None = None, counting: int = 4
) -> OutlierStatement:
    own = [index for index, owner in enumerate(OWNERS) if owner == syncer] if fragments is None else list(fragments)
    return OutlierStatement(syncer, 1, counting, own, list(outliers))


def fold(*statements: OutlierStatement, owners: Sequence[str] | None = OWNERS, number: int = 0, **changes: Any) -> Outlying:
    values: dict[str, Any] = {"readmitted": {}, "judged_by_all": False} | changes
    return outlying({each.syncer: each for each in statements}, owners, number=number, **values)


def names(found: Outlying) -> list[str]:
    return sorted(found.quarantined)


def test_outliers_in_more_than_half_of_the_fragments_are_needed() -> None:
    half = statement("syncer-0", seen("dan", 0), seen("dan", 1))
    assert names(fold(half, statement("syncer-1"))) == []
    found = fold(half, statement("syncer-1", seen("dan", 3, norm=90.0)))
    assert names(found) == ["dan"]
    dan = found.quarantined["dan"]
    assert dan.syncers == ["syncer-0", "syncer-1"]
    assert dan.label == ("outliers in 3 fragments, as syncer-0, syncer-1 found: in fragment 3 a norm of 90, above 5")
    # of six fragments two are embedding-like: more than half of the other four
    assert names(fold(statement("syncer-0", seen("dan", 0), seen("dan", 1), counting=3), statement("syncer-1"))) == []
    assert names(
        fold(statement("syncer-0", seen("dan", 0), seen("dan", 1), counting=3), statement("syncer-1", counting=3))
    ) == ["dan"]


def test_what_a_syncer_states_of_fragments_of_others_does_not_count() -> None:
    liar = statement("syncer-0", *(seen("ann", index) for index in range(4)))
    assert names(fold(liar, statement("syncer-1"))) == []
    assert names(fold(liar, statement("syncer-1"), judged_by_all=True)) == ["ann"]  # where others' offers are judged, too
    assert names(fold(liar, statement("syncer-1"), owners=None)) == ["ann"]  # where it cannot be checked


def test_statements_hold_until_the_next_owner_has_taken_them_over() -> None:
    gone = statement("syncer-9", seen("dan", 2), seen("dan", 3), fragments=[2, 3])
    first = statement("syncer-0", seen("dan", 0))
    fresh = statement("syncer-1", fragments=[])
    assert names(fold(gone, first, fresh)) == ["dan"]
    taken = take_over(fresh, [2, 3], {each.syncer: each for each in (gone, first, fresh)})
    assert taken.fragments == [2, 3]
    assert names(fold(gone, first, taken)) == ["dan"]
    assert names(fold(first, taken)) == ["dan"]
    # of fragments that it judged already it knows better
    sound = judge(taken, 2, [Verdict("dan", None)], [])
    assert [each.fragment for each in take_over(sound, [2, 3], {"syncer-9": gone}).outliers] == [3]
    # who judges them no more states them until the next owner does
    left = take_over(taken, [2], {})
    assert (left.fragments, [each.fragment for each in left.outliers]) == ([2], [2, 3])
    assert names(fold(first, left, owners=["syncer-0", "syncer-0", "syncer-1", "syncer-2"])) == []  # syncer-2 has no key
    new = statement("syncer-2", fragments=[])
    assert names(fold(first, left, new, owners=["syncer-0", "syncer-0", "syncer-1", "syncer-2"])) == ["dan"]
    assert settle(left, ["dan"], {}, {"syncer-2": new}).outliers == left.outliers
    adopted = take_over(new, [3], {each.syncer: each for each in (first, left)})
    assert [each.fragment for each in settle(left, ["dan"], {}, {"syncer-2": adopted}).outliers] == [2]
    assert names(fold(first, left, adopted, owners=["syncer-0", "syncer-0", "syncer-1", "syncer-2"])) == ["dan"]


def test_with_an_owner_of_an_earlier_version_learners_are_only_suspected() -> None:
    both = statement("syncer-0", seen("dan", 0), seen("dan", 1), seen("bob", 1))
    found = fold(both)  # more than half of its two fragments
    assert (names(found), sorted(found.suspected)) == ([], ["dan"])


def test_a_cycle_of_sound_offers_ends_a_quarantine() -> None:
    first, second = statement("syncer-0", seen("dan", 0), seen("dan", 1)), statement("syncer-1", seen("dan", 2))
    for fragment in (0, 1):
        first = judge(first, fragment, [Verdict("dan", None)], ["dan"])
        assert names(fold(first, second)) == ["dan"]
    lapse = judge(first, 1, [Verdict("dan", seen("dan", 1, version=9))], ["dan"])
    second = judge(second, 2, [Verdict("dan", None)], ["dan"])
    assert names(fold(lapse, second)) == ["dan"]
    assert names(fold(first, second)) == []
    assert settle(first, [], {}, {}).outliers == []
    # of a learner that is not quarantined a sound offer ends what was stated
    assert judge(lapse, 1, [Verdict("dan", None)], []).outliers == [seen("dan", 0, is_over=True)]


def test_an_outlier_that_goes_on_is_stated_once() -> None:
    known = statement("syncer-0", seen("dan", 0))
    assert judge(known, 0, [Verdict("dan", seen("dan", 0, version=8, norm=30.0))], ["dan"]) == known


def test_an_operator_wins() -> None:
    stated = [statement("syncer-0", seen("dan", 0), seen("dan", 1)), statement("syncer-1", seen("dan", 2), seen("dan", 3))]
    assert names(fold(*stated, number=3, readmitted={"dan": 3})) == []
    assert settle(stated[0], ["dan"], {"dan": 3}, {}).outliers == []
    again = [
        statement("syncer-0", seen("dan", 0, change=3), seen("dan", 1, change=3)),
        statement("syncer-1", seen("dan", 2, change=3)),
    ]
    assert names(fold(*again, number=3, readmitted={"dan": 3})) == ["dan"]
    assert names(fold(*again, number=2)) == []  # of a change that there is not yet


def test_what_is_in_force_knows_both_kinds_of_quarantine() -> None:
    settings = run_settings()
    changes = Changes(bytes(8)).then(Quarantine("bob", 1, 9.0, 3.0), at_s=0.0, author="syncer-0")
    stated = {"syncer-0": statement("syncer-0", *(seen("dan", index) for index in range(4)))}
    now = in_force(settings, changes.records).judged(stated, ["syncer-0"] * 4)
    assert now.excluded == {"bob", "dan"}
    assert now.on_trial == {"dan"}  # bob comes back when an operator says so
    assert list(now.quarantines()) == ["bob", "dan"]
    back = changes.then(Readmit("bob"), at_s=0.0, author="op").then(Readmit("dan"), at_s=0.0, author="op")
    assert in_force(settings, back.records).judged(stated, ["syncer-0"] * 4).excluded == frozenset()
    off = changes.then(Set("quarantine.factor", 0.0), at_s=0.0, author="op")
    assert in_force(settings, off.records).judged(stated, ["syncer-0"] * 4).excluded == {"bob"}


def test_regions_that_merge_are_judged_only_where_all_members_know_how() -> None:
    regional = {"regions.names": ["eu", "us"], "regions.merge": True}
    assert run_settings(overrides=regional).requires == ["regional_quarantine"]
    before = run_settings(overrides=regional | {"quarantine.factor": 0.0})  # as a run of an earlier version
    assert before.requires == []
    on = Changes(bytes(8)).then(Set("quarantine.factor", 5.0), at_s=0.0, author="op")
    with pytest.raises(SettingsError, match="change 1: the run does not require regional_quarantine of its members"):
        in_force(before, on.records)
    # where it was on from the beginning, it can be switched off and on
    off_on = (
        Changes(bytes(8))
        .then(Set("quarantine.factor", 0.0), at_s=0.0, author="op")
        .then(Set("quarantine.factor", 6.0), at_s=0.0, author="op")
    )
    assert in_force(run_settings(overrides=regional), off_on.records).settings.quarantine.factor == 6.0
    assert Effective(run_settings()).outlying == Outlying()


def test_a_statement_comes_back_and_another_syncers_is_none() -> None:
    sent = statement("syncer-0", seen("dan", 0))
    assert unpack_outliers(sent.pack(), "syncer-0") == sent
    assert unpack_outliers(sent.pack(), "syncer-1") is None
    assert unpack_outliers(b"junk", "syncer-0") is None
    assert unpack_outliers(b"", "syncer-0") is None
    assert unpack_outliers(None, "syncer-0") is None
    assert (
        unpack_outliers(msgspec.msgpack.encode(["syncer-0", 1, 4, [], [["dan", 1, 9000, 1, 1.0, 1.0, 0, False]]]), "syncer-0")
        is None
    )


def test_a_statement_stays_within_its_bound_and_keeps_the_newest() -> None:
    many = statement("syncer-0", *(seen(f"{'x' * 40}-{i % 40}", i // 40) for i in range(20_000)))
    packed = many.pack()
    assert len(packed) <= MAX_STATEMENT_BYTES
    kept = unpack_outliers(packed, "syncer-0")
    assert kept is not None
    assert len(kept.outliers) > 1000
    assert kept.outliers[-1] == many.outliers[-1]


LEARNERS, FRAGMENTS = ("ann", "bob", "cat"), 4
OFFERS = st.lists(st.tuples(st.sampled_from(LEARNERS), st.integers(0, FRAGMENTS - 1), st.booleans()), max_size=60)


@given(OFFERS)
def test_the_newest_offers_decide_whoever_owns_the_fragments(offers: list[tuple[str, int, bool]]) -> None:
    """Against the definition: in more than half, until none of those that were outliers is one any more."""
    statements = {name: statement(name) for name in ("syncer-0", "syncer-1")}
    state: dict[str, dict[int, bool]] = {name: {} for name in LEARNERS}  # by fragment: whether the newest is an outlier
    quarantined: set[str] = set()
    for learner, fragment, is_outlier in offers:
        owner = OWNERS[fragment]
        verdict = Verdict(learner, seen(learner, fragment) if is_outlier else None)
        statements[owner] = judge(statements[owner], fragment, [verdict], quarantined)
        known = state[learner]
        if is_outlier or (learner in quarantined and fragment in known):
            known[fragment] = is_outlier
        elif learner not in quarantined:
            known.pop(fragment, None)
        if 2 * len(known) > FRAGMENTS and any(known.values()):
            quarantined.add(learner)
        elif learner in quarantined:
            quarantined.discard(learner)
            state[learner] = {}
        found = fold(*statements.values())
        statements = {name: settle(each, found.quarantined, {}, {}) for name, each in statements.items()}
        assert set(found.quarantined) == quarantined
