"""Schedules of clusters in three regions, each with a server of its own, that are cut off from one another."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.simulation.invariants import Violation
from tests.simulation.play import play, play_all
from tests.simulation.world import FAULTS_APART, THIN, World

from diloco.log import Entry, Log
from diloco_syncer import regions, replication

SCHEDULES = 120
SEARCHED = 400
THIN_SCHEDULES = 30

Patch = pytest.MonkeyPatch


def test_no_schedule_forks_a_log_or_hangs() -> None:
    total: Counter[str] = Counter()
    failed = {}
    for outcome in play_all(range(SCHEDULES), regions=True).outcomes:
        total.update(outcome.stats)
        if outcome.error is not None:
            failed[outcome.seed] = repr(outcome.error)
    assert not failed, f"replay with `python -m tests.simulation --regions --replay SEED`: {failed}"
    happens = ("state restored", "state borrowed", "keyframe", "takeover", "purge")
    for kind in (*(f"fault {kind}" for kind in FAULTS_APART), *happens):
        assert total[kind] > SCHEDULES / 20, f"{kind} hardly ever happens: {total}"


def test_precision_follows_the_links_whatever_goes_wrong() -> None:
    total: Counter[str] = Counter()
    failed = {}
    for seed in range(THIN_SCHEDULES):
        outcome = World(seed, number=THIN, regions=True).run()
        total.update(outcome.stats)
        if outcome.error is not None:
            failed[seed] = repr(outcome.error)
    assert not failed
    for bits, least in ((4, 2), (32, 2), (8, 0.2), (16, 0.2)):  # they fall at once, and come back one by one
        assert total[f"version of {bits} bits"] > least * THIN_SCHEDULES, total


def one_is_a_majority(patch: Patch) -> None:
    """What the own region holds counts as committed."""
    patch.setattr(regions, "majority", lambda count: 1)


def own_log_gone_on_with(patch: Patch) -> None:
    """A new owner goes on from what its own region has."""
    patch.setattr(replication, "best", lambda tips, own: own)


def notices_not_waited_for(patch: Patch) -> None:
    """Readers take entries as soon as they are stored in their region."""
    follow = Log.follow

    def eager(self: Log, *arguments: Any) -> AsyncIterator[Entry]:
        hasty = copy.copy(self)
        hasty.regions = False
        return follow(hasty, *arguments)

    patch.setattr(Log, "follow", eager)


# with the schedule that has found it, which is played first
MUTATIONS: list[tuple[Callable[[Patch], None], int, str]] = [
    (one_is_a_majority, 0, r"only \['..'\] hold the entry"),
    (own_log_gone_on_with, 56, "fork|is not over|does not follow"),
    (notices_not_waited_for, 0, "no version of the log"),
]


@pytest.mark.parametrize(("mutate", "seed", "found"), MUTATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_defect_is_found(mutate: Callable[[Patch], None], seed: int, found: str, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    for number in (seed, *range(SEARCHED)):
        error = play(number, regions=True).error
        if error is not None:
            with pytest.raises(Violation, match=found):
                raise error
            return
    pytest.fail(f"{mutate.__doc__} was not noticed in {SEARCHED} schedules")
