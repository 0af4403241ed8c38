"""The picture of the other syncers: heard, silent or gone, by one's own clock."""

from __future__ import annotations

from typing import Any

import pytest
from tests.made.heartbeats import shard_heartbeat

from diloco.core.syncer.syncers import SyncerNews, SyncerPresence, Syncers
from diloco.wire.fields import MAX_SYNCERS

TAKEOVER_S = 2.0
AWAY_S = 10.0


class Picture:
    """The others as one syncer of region ``us`` (or of a run without regions) has them; it hears itself unless it is deaf."""

    def __init__(self, region: str = "") -> None:
        self.syncers = Syncers(region, TAKEOVER_S, AWAY_S)
        self.now_s = 0.0
        self.numbers: dict[str, int] = {}
        self.deaf = False
        self.syncers.hear_own(self.now_s)

    def hear(self, name: str, region: str = "", **changes: Any) -> SyncerNews:
        self.numbers[name] = self.numbers.get(name, 0) + 1
        return self.syncers.hear(shard_heartbeat(name, self.numbers[name], region=region, **changes), self.now_s)

    def wait(self, seconds: float) -> None:
        """Time goes on; own heartbeats come back as often as they should."""
        until_s = self.now_s + seconds
        while not self.deaf and self.now_s + TAKEOVER_S / 6 < until_s:
            self.now_s += TAKEOVER_S / 6
            self.syncers.hear_own(self.now_s)
        self.now_s = until_s
        if not self.deaf:
            self.syncers.hear_own(self.now_s)

    def presence(self, name: str) -> SyncerPresence:
        return self.syncers.presence(name, self.now_s)


@pytest.mark.parametrize(
    ("silent_s", "presence"),
    [
        (0.0, SyncerPresence.HEARD),
        (0.9, SyncerPresence.HEARD),
        (1.0, SyncerPresence.SILENT),
        (1.9, SyncerPresence.SILENT),
        (2.0, SyncerPresence.GONE),
    ],
)
def test_a_syncer_is_heard_then_silent_then_gone(silent_s: float, presence: SyncerPresence) -> None:
    picture = Picture()
    picture.hear("a")
    picture.wait(silent_s)
    assert picture.presence("a") is presence


def test_one_never_heard_is_silent_for_as_long_as_it_may_be_from_when_this_one_hears() -> None:
    picture = Picture()
    assert picture.presence("a") is SyncerPresence.SILENT
    picture.wait(TAKEOVER_S)
    assert picture.presence("a") is SyncerPresence.GONE
    assert "a" not in picture.syncers


def test_who_is_deaf_thinks_nobody_gone_and_waits_again_once_it_hears() -> None:
    picture = Picture()
    picture.hear("a")
    picture.deaf = True
    picture.wait(60.0)
    assert not picture.syncers.hears(picture.now_s)
    assert picture.syncers.hearing_s(picture.now_s) == 0.0
    assert picture.presence("a") is SyncerPresence.SILENT
    picture.deaf = False
    picture.syncers.hear_own(picture.now_s)
    picture.wait(TAKEOVER_S - 0.1)
    assert picture.presence("a") is SyncerPresence.SILENT
    picture.wait(0.1)
    assert picture.presence("a") is SyncerPresence.GONE


@pytest.mark.parametrize(
    ("region", "neighbour", "patience_s"),
    [
        ("us", None, TAKEOVER_S),  # of the own region: the process is silent
        ("eu", "eu", TAKEOVER_S),  # another one of its region is heard
        ("eu", None, AWAY_S),  # its region may be cut off
        ("eu", "ap", AWAY_S),
    ],
)
def test_in_a_run_with_regions_patience_depends_on_whether_the_silence_is_its_own(
    region: str, neighbour: str | None, patience_s: float
) -> None:
    picture = Picture("us")
    picture.hear("a", region)
    for _ in range(round(patience_s / 0.25) - 1):
        picture.wait(0.25)
        if neighbour:
            picture.hear("b", neighbour)
        assert picture.presence("a") is not SyncerPresence.GONE
    picture.wait(0.25)
    assert picture.presence("a") is SyncerPresence.GONE


def test_a_heartbeat_is_news_if_it_says_something_new_or_comes_from_one_that_was_gone() -> None:
    picture = Picture()
    assert picture.hear("a") is SyncerNews.NEWS
    assert picture.hear("a") is SyncerNews.ALIVE
    assert picture.hear("a", fragments=[1]) is SyncerNews.NEWS
    assert picture.hear("a", fragments=[1], closed=[1]) is SyncerNews.NEWS
    assert picture.hear("a", fragments=[1], closed=[1], state="leaving") is SyncerNews.NEWS
    repeated = shard_heartbeat("a", picture.numbers["a"])
    assert picture.syncers.hear(repeated, picture.now_s) is SyncerNews.NOTHING
    picture.wait(TAKEOVER_S)
    assert picture.syncers.hear(repeated, picture.now_s) is SyncerNews.NOTHING, "it is late, whenever it comes"
    restarted = shard_heartbeat("a", 1, incarnation=0)  # its clock was set back
    assert picture.syncers.hear(restarted, picture.now_s) is SyncerNews.NEWS


def test_in_a_run_with_regions_one_has_to_be_back_for_a_while() -> None:
    picture = Picture("us")
    picture.hear("a", "eu")
    assert not picture.syncers.is_back("a", picture.now_s)
    for _ in range(int(2 * AWAY_S)):
        picture.wait(1.0)
        picture.hear("a", "eu")
    assert picture.syncers.is_back("a", picture.now_s)
    assert picture.syncers.is_back(None, picture.now_s), "this one has heard all the time"
    picture.hear("a", "eu", state="unable")
    picture.hear("a", "eu")
    assert not picture.syncers.is_back("a", picture.now_s), "it could commit nothing meanwhile"
    alone = Picture()
    alone.hear("a")
    assert alone.syncers.is_back("a", alone.now_s)


def test_there_is_room_for_so_many_and_for_others_once_they_are_gone() -> None:
    picture = Picture()
    for number in range(MAX_SYNCERS):
        assert picture.hear(f"x{number}") is SyncerNews.NEWS
    assert picture.hear("a") is SyncerNews.NOTHING
    picture.wait(TAKEOVER_S)
    assert picture.hear("a") is SyncerNews.NEWS
    assert [name for name, _ in picture.syncers] == ["a"]
