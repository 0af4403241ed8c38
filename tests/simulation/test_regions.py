"""Schedules of clusters in three regions, each with a server of its own, that are cut off from one another."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.simulation.blocks import in_blocks
from tests.simulation.invariants import Violation
from tests.simulation.play import happens, play, play_all, survived
from tests.simulation.world import FAULTS_APART, THIN, World

from diloco.core.log.chain import Chain
from diloco.core.log.regional_round import RegionalRound
from diloco.core.syncer import merging
from diloco.core.syncer.offer_fit import MissedOffer
from diloco.core.syncer.round import Round, RoundOffer
from diloco.errors import BrokerError, ChainError, MessageError, RunError
from diloco.log.entries import Entries
from diloco.log.regional import RegionalLog
from diloco.log.stream import LogEntry
from diloco.wire.entries import CommitNotice, Record
from diloco_syncer import regions, replication
from diloco_syncer.regions import Regions

SEARCHED = 400

# What schedules of regions that lose their disks have found, as `FOUND` of test_simulation.py
FOUND = {
    32: "a notice that was stored late hid later ones: a lost log came back with old notices, and a learner went back to them",
    60008: "a late claim in an empty log was taken for the beginning of one that was brought, and version 0 was not stored",
}

Patch = pytest.MonkeyPatch


@in_blocks(120, 20)
def test_no_schedule_forks_a_log_or_hangs(seeds: range) -> None:
    total = survived(play_all(seeds, regions=True).outcomes, "--regions ")
    faults = (f"fault {kind}" for kind in FAULTS_APART)
    happens(total, (*faults, "state restored", "keyframe", "takeover", "purge"), seeds)


@in_blocks(30, 10)
def test_precision_follows_the_links_whatever_goes_wrong(seeds: range) -> None:
    total: Counter[str] = Counter()
    failed = {}
    for seed in seeds:
        outcome = World(seed, number=THIN, regions=True).run()
        total.update(outcome.stats)
        if outcome.error is not None:
            failed[seed] = repr(outcome.error)
    assert not failed
    for bits, least in ((4, 2), (32, 2), (8, 0.2), (16, 0.2)):  # they fall at once, and come back one by one
        assert total[f"version of {bits} bits"] > least * len(seeds), total


@in_blocks(100, 20)
def test_where_offers_are_merged_in_their_regions_nothing_is_lost_nor_merged_twice(seeds: range) -> None:
    total = survived(play_all(seeds, regions=True, merged=True).outcomes, "--merged ")
    # states are hardly ever borrowed: a learner borrows from one of its own region, and in most of these each is alone
    faults = (f"fault {kind}" for kind in FAULTS_APART)
    happens(total, (*faults, "state restored", "keyframe", "takeover", "merged in its region"), seeds)
    # learners' own offers cross where their region has no syncer for a while
    assert 0 < total["delta crossed"] < total["regional crossed"] / 2


@in_blocks(60, 15)
def test_a_region_whose_server_is_empty_counts_for_nothing_until_it_has_all_that_it_was_counted_for(seeds: range) -> None:
    total = survived(play_all(seeds, regions=True, empties=True).outcomes, "--empties ")
    happens(
        total,
        ("region lost its disk", "syncer stands still as a region is lost", "region lags behind one that is lost", "takeover"),
        seeds,
    )


@pytest.mark.parametrize("seed", FOUND)
def test_what_lost_disks_have_found_stays_found(seed: int) -> None:
    error = play(seed, regions=True, empties=True).error
    assert error is None, f"{FOUND[seed]}: {error}"


def test_an_offer_that_a_region_combined_too_late_for_its_round_is_merged_later() -> None:
    late = (play(seed, regions=True, merged=True).stats["merged as a late answer"] for seed in range(SEARCHED))
    assert any(late)


def one_is_a_majority(patch: Patch) -> None:
    """An entry that the own region holds counts as committed."""
    patch.setattr(regions, "majority", lambda count: 1)


def own_log_gone_on_with(patch: Patch) -> None:
    """A new owner goes on from what its own region has."""
    patch.setattr(replication, "best", lambda log_heads, own: own)


def notices_not_waited_for(patch: Patch) -> None:
    """Readers take entries as soon as they are stored in their region."""
    follow = Entries.follow

    def eager(self: Entries, *arguments: Any) -> AsyncIterator[LogEntry]:
        hasty = copy.copy(self.stream)
        hasty.regions = False
        return follow(Entries(hasty), *arguments)

    patch.setattr(Entries, "follow", eager)


def _members_pass(patch: Patch) -> None:
    """All look at the place of an entry in the log, and not at its members."""
    check = Chain.check

    def lenient(self: Chain, record: Record) -> None:
        try:
            check(self, record)
        except ChainError as error:
            if any(rule in str(error) for rule in (": hash of", ": version: ", ": epoch: ")):
                raise

    patch.setattr(Chain, "check", lenient)


def held_beside_one_another(patch: Patch) -> None:
    """A regional offer does not replace what is held of its members."""
    hold = Round.hold

    def beside(self: Round, held: RoundOffer) -> MissedOffer | None:
        before = dict(self.held)
        reason = hold(self, held)
        self.held |= {f"{name} again": other for name, other in before.items() if other is not self.held.get(name)}
        return reason

    patch.setattr(Round, "hold", beside)
    _members_pass(patch)


def left_over_twice(patch: Patch) -> None:
    """Offers that a region has combined it combines again, with later ones, though they were merged."""
    patch.setattr(RegionalRound, "_unfit", lambda self, offer, *, tried=False: None)
    patch.setattr(Round, "_unfit", lambda self, offer, *, tried=False: None)
    _members_pass(patch)


def of_the_heaviest(patch: Patch) -> None:
    """A regional offer weighs as much as one learner's."""
    patch.setattr(merging, "sum", max, raising=False)


def an_empty_region_counts(patch: Patch) -> None:
    """A region that has lost its log begins as a new one does."""

    async def begin(self: Regions, frame: bytes, *_: Any) -> None:
        for log in self.others:
            with contextlib.suppress(BrokerError, MessageError, RunError):
                await self.home.region.begin_from(log.region, frame)

    patch.setattr(Regions, "_bring_back", begin)


def the_notice_stored_last_counts(patch: Patch) -> None:
    """A notice that its sender gave up, and that was stored long after later ones, is taken for the newest."""

    async def last(self: RegionalLog, fragment: int) -> CommitNotice | None:
        stored = await self.stream.last(self.stream.subjects.commit_notice(fragment))
        notice = None if stored is None else self._notice(stored)
        return notice if notice is not None and await self._is_true(notice) else None

    patch.setattr(RegionalLog, "furthest_notice", last)


# with the schedule that has found it, which is played first; whether offers are merged in their regions
MUTATIONS: list[tuple[Callable[[Patch], None], int, bool, str]] = [
    (one_is_a_majority, 0, False, r"only \['..'\] hold the entry"),
    (own_log_gone_on_with, 19, False, "fork|is not over|does not follow"),
    (notices_not_waited_for, 0, False, r"no version of the log|only \['..'\] hold the entry"),
    (held_beside_one_another, 0, True, "merged before|merged twice|made without knowing|made of|each may be named once"),
    (left_over_twice, 1, True, "merged before|merged twice|made without knowing|made of"),
    (of_the_heaviest, 1, True, "is not the mean"),
    (an_empty_region_counts, 0, False, "counts again without|fork|hold the entry"),
    (the_notice_stored_last_counts, 32, False, "counts again, and its notices|applies version|its learner began when"),
]

EMPTIES = {an_empty_region_counts, the_notice_stored_last_counts}


@pytest.mark.parametrize(("mutate", "seed", "merged", "found"), MUTATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_defect_is_found(mutate: Callable[[Patch], None], seed: int, merged: bool, found: str, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    for number in (seed, *range(SEARCHED)):
        error = play(number, regions=True, merged=merged, empties=mutate in EMPTIES).error
        if error is not None:
            with pytest.raises((Violation, ValueError), match=found):  # a message may refuse to be made
                raise error
            return
    pytest.fail(f"{mutate.__doc__} was not noticed in {SEARCHED} schedules")
