"""When a region counts as away, by heartbeats alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco_coordinator.presence import Absence, RegionPresence


def hear(presence: RegionPresence, *signs: tuple[float, str]) -> None:
    for at_s, region in signs:
        presence.hear(region, at_s)


def test_a_region_that_is_silent_while_others_talk_is_away_from_its_last_word_to_its_next() -> None:
    presence = RegionPresence(["us", "eu"], 6.0)
    hear(presence, (0, "us"), (1, "eu"), (2, "us"), (7, "us"))
    assert presence.away() == {}  # 6 s, not more
    hear(presence, (8, "us"))
    assert presence.away() == {"eu": 1}
    assert presence.absences() == [Absence("eu", 1, None)]
    hear(presence, (61, "us"))  # no process was heard for a while, which ends no absence
    assert presence.away() == {"eu": 1}
    hear(presence, (61.5, "eu"))
    assert presence.away() == {}
    assert presence.absences() == [Absence("eu", 1, 61.5)]


def test_who_hears_nobody_has_lost_its_own_hearing() -> None:
    presence = RegionPresence(["us", "eu", "ap"], 6.0)
    hear(presence, (0, "us"), (1, "eu"), (2, "ap"), (40, "ap"))
    assert presence.away() == {}
    hear(presence, (41, "us"), (46, "ap"))
    assert presence.away() == {}  # eu has as long as ever to be heard
    hear(presence, (46.5, "us"))
    assert presence.away() == {"eu": 40}


def test_a_region_that_was_never_heard_is_not_away_yet_and_one_that_the_run_does_not_have_is_nobody() -> None:
    presence = RegionPresence(["us", "eu"], 6.0)
    hear(presence, (0, "us"), (1, "moon"), (30, "us"), (60, "us"))
    assert presence.away() == {}


def test_another_process_goes_on_with_what_is_known() -> None:
    first = RegionPresence(["us", "eu", "ap"], 6.0)
    hear(
        first, (0, "us"), (0, "eu"), (0, "ap"), (5, "us"), (6, "ap"), (9, "us"), (10, "eu"), (14, "us"), (15, "eu"), (18, "us")
    )
    assert first.absences() == [Absence("eu", 0, 10), Absence("ap", 6, None)]
    second = RegionPresence(["us", "eu", "ap"], 6.0)
    second.resume(first.absences(), 18)
    assert second.absences() == first.absences()
    hear(second, (30, "us"), (31, "eu"), (35, "ap"))  # that they were not heard by any coordinator is no absence
    assert second.absences() == [Absence("eu", 0, 10), Absence("ap", 6, 35)]


@given(st.lists(st.tuples(st.floats(0, 20), st.sampled_from(["us", "eu", "ap"])), max_size=40))
def test_absences_of_a_region_are_long_enough_and_follow_each_other(signs: list[tuple[float, str]]) -> None:
    presence, now_s = RegionPresence(["us", "eu", "ap"], 6.0), 0.0
    for pause_s, region in signs:
        now_s += pause_s
        presence.hear(region, now_s)
        assert region not in presence.away()
    for region in ("us", "eu", "ap"):
        spans = [(each.from_s, each.to_s) for each in presence.absences() if each.region == region]
        ends = [now_s if to_s is None else to_s for _, to_s in spans]
        assert all(to_s - from_s > 6.0 for (from_s, _), to_s in zip(spans, ends, strict=True))
        assert all(before <= after for before, (after, _) in zip(ends, spans[1:], strict=False))


def test_a_region_that_only_begins_to_start_is_lost_after_a_minute() -> None:
    presence = RegionPresence(["us", "eu"], 6.0)
    hear(presence, (0, "us"), (1, "eu"), *((float(second), "us") for second in range(2, 61)))
    assert presence.away() == {"eu": 1}
    assert presence.lost() == {}
    hear(presence, (61, "us"))
    assert presence.lost() == {"eu": 1}


def test_a_region_that_was_there_is_lost_as_soon_as_it_is_away() -> None:
    presence = RegionPresence(["us", "eu"], 6.0)
    hear(presence, (0, "us"), (1, "eu"), (5, "us"), (7, "eu"), (12, "us"), (13.5, "us"))
    assert presence.lost() == presence.away() == {"eu": 7}
