"""How long a learner waits that joins where the log is old, under a clock of the test's own, and among liars."""

from __future__ import annotations

from typing import Any

from tests.made.heartbeats import learner_heartbeat

from diloco.core.log.catch_up import LISTEN_HEARTBEATS, LISTEN_S, MOST_S, QUIET_S, CatchUp, LogStanding
from diloco.wire.control import Announcement

LISTENED_S = 1.5  # of heartbeats that are 0.5 s apart
LIE = 10**9


def joining(**versions: tuple[str, int]) -> CatchUp:
    """A learner that joins in eu, and has heard these: region, and the version of the only fragment."""
    known = CatchUp("eu", 1, 0.5, 0.0)
    for name, (region, version) in versions.items():
        hear(known, name, version, region=region)
    return known


def hear(known: CatchUp, name: str, version: int, **changes: Any) -> None:
    known.hear(learner_heartbeat(name, 1, version, **changes))


def announced(version: int, fragment: int = 0) -> Announcement:
    return Announcement(fragment, version, 1, "syncer-0", 1.0, False, 0, 30, [])


def test_it_listens_before_it_believes_that_nothing_is_missing() -> None:
    known = joining()
    assert known.judge([0], LISTENED_S - 0.1) is LogStanding.UNKNOWN
    hear(known, "ann", 7, region="us")
    assert known.judge([0], LISTENED_S) is LogStanding.BEHIND
    slow = CatchUp("eu", 1, 60.0, 0.0)
    assert LISTEN_HEARTBEATS * 60.0 > LISTEN_S
    assert slow.judge([0], LISTEN_S) is LogStanding.CURRENT, "no learner is there: a run's first one does not wait"


def test_it_waits_for_what_the_others_had_when_it_joined_and_no_longer() -> None:
    known = joining(ann=("us", 7), bob=("ap", 8))
    assert known.judge([6], LISTENED_S) is LogStanding.BEHIND
    hear(known, "ann", 20, region="us")
    hear(known, "bob", 20, region="ap")
    assert known.judge([6], 3.0) is LogStanding.BEHIND
    assert known.furthest([6], 3.0) == (0, 7)
    assert known.judge([7], 4.0) is LogStanding.CURRENT


def test_learners_of_its_own_region_and_those_that_take_no_part_do_not_count() -> None:
    known = joining(ann=("us", 7), bob=("eu", 2), cat=("eu", 2), dan=("eu", 2))
    hear(known, "eve", 90, region="ap", state="starting")
    hear(known, "fay", 90, region="ap")
    hear(known, "fay", 90, region="ap", state="left")
    assert known.judge([2], LISTENED_S) is LogStanding.BEHIND
    assert known.judge([7], LISTENED_S) is LogStanding.CURRENT


def test_a_liar_among_others_is_waited_for_in_nothing() -> None:
    for honest in (1, 2, 3):
        known = joining(eve=("us", LIE), **{f"ann{n}": ("ap", 7) for n in range(honest)})
        assert known.judge([7], LISTENED_S) is LogStanding.CURRENT
        assert (
            joining(eve=("us", 0), **{f"ann{n}": ("ap", 7) for n in range(max(2, honest))}).judge([6], LISTENED_S)
            is LogStanding.BEHIND
        ), "nor does it make the learner begin on old versions, where two others say so"


def test_a_liar_alone_is_waited_for_until_an_owner_announces_a_round() -> None:
    known = joining(eve=("us", LIE))
    assert known.judge([7], LISTENED_S) is LogStanding.BEHIND
    known.hear_round(announced(4))  # of an owner that does not know that it was replaced
    known.hear_round(announced(9))
    known.hear_round(announced(9, fragment=5))  # of none that there is
    assert known.judge([7], 3.0) is LogStanding.BEHIND
    assert known.judge([8], 4.0) is LogStanding.CURRENT


def test_an_announcement_alone_makes_nobody_wait() -> None:
    known = joining(ann=("us", 7))
    known.hear_round(announced(LIE))
    assert known.judge([7], LISTENED_S) is LogStanding.CURRENT


def test_it_gives_up_where_nothing_comes_and_in_the_end_whatever_comes() -> None:
    known = joining(eve=("us", LIE))
    assert known.judge([1], LISTENED_S) is LogStanding.BEHIND
    assert known.judge([2], LISTENED_S + QUIET_S - 1) is LogStanding.BEHIND
    assert known.judge([2], LISTENED_S + 2 * QUIET_S - 2) is LogStanding.BEHIND
    assert known.judge([2], LISTENED_S + 2 * QUIET_S - 1) is LogStanding.GIVEN_UP
    known = joining(eve=("us", LIE))
    for second in range(int(MOST_S)):
        assert known.judge([second], LISTENED_S + second) is LogStanding.BEHIND
    assert known.judge([int(MOST_S)], LISTENED_S + MOST_S) is LogStanding.GIVEN_UP
