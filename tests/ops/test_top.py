"""The views of ``diloco top`` of states made by hand: what lanes say, orders, details, and that everything fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from rich.cells import cell_len
from rich.text import Text
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.made.monitors import entry_record
from tests.made.statuses import fake_status

from diloco.nats.transport import NatsTransport
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco_ops.live import lanes, rows
from diloco_ops.live.rows import Shown
from diloco_ops.live.watched import Watched
from diloco_ops.top.app import VIEWS, Top
from diloco_ops.top.feed import RunFeed


class Connected:
    """In place of a connection: there is one."""

    connected = True


def top(watched: Watched, clock: Callable[[], float] = time.monotonic) -> Top:
    directory = RunDirectory(Path("none"), "run", "nats://127.0.0.1:4222", None, RunSettings())
    return Top(RunFeed(directory, cast(NatsTransport, Connected()), watched, local=False), clock)


def watched(learners: int = 4, shards: int = 2, **changed: Any) -> Watched:
    """A run as of 74 s, answered at 1000 s of the watcher's clock."""
    made = Watched("run", 5.0)
    made.answer(fake_status(learners, shards, **changed), 1000.0)
    return made


def plain(lines: list[Text]) -> list[str]:
    return [line.plain for line in lines]


def test_a_lane_has_a_character_for_each_state_and_a_gap_where_nothing_was_heard() -> None:
    spans = [(0.0, 4.0, "stepping"), (4.0, 5.0, "sending"), (5.0, 6.0, "waiting"), (8.0, 9.0, "recovering"), (9.0, 10.0, "x")]
    assert lanes.lane(spans, 0.0, 10.0, 10).plain == "━━━━▲·  r?"
    assert lanes.lane(spans, 0.0, 10.0, 5).plain == "━━▲ r"  # of two halves of a cell the one that came first
    assert lanes.lane(spans, 4.0, 6.0, 4).plain == "▲▲··"
    assert lanes.lane([], 0.0, 10.0, 3).plain == "   "


def test_a_lane_of_merges_has_the_fewest_learners_of_each_cell() -> None:
    merges = [(0.5, 3), (0.9, 2), (2.0, 12), (3.99, 4), (4.0, 1)]
    assert lanes.merge_lane(merges, 0.0, 4.0, 4).plain == "2─+1"
    assert lanes.merge_lane(merges, 2.0, 4.0, 4).plain == "+──1"


def test_heartbeats_make_lanes_and_a_silent_learner_leaves_a_gap() -> None:
    made = Watched("run", 5.0)
    made.answer({"run": "run", "wall_s": 0.0, "state": "training"}, 100.0)
    for at_s, state, sending in ((101.0, "stepping", False), (103.0, "stepping", True), (104.0, "waiting", False)):
        made.hear(learner_heartbeat("ann", state=state, sending=sending), at_s)
    made.hear(learner_heartbeat("ann"), 110.0)
    assert made.lane("ann") == [
        (1.0, 1.0, "stepping"), (1.0, 3.0, "sending"), (3.0, 4.0, "waiting"), (10.0, 10.0, "stepping")
    ]  # fmt: skip


def test_without_answers_members_are_shown_as_they_are_heard() -> None:
    made = watched()
    made.hear(learner_heartbeat("learner-0", 500, tokens=7, loss=1.25), 1001.0)
    made.hear_shard(shard_heartbeat("syncer-9"), 1001.0)
    assert made.status(1002.0)["learners"]["learner-0"]["step"] == 461  # by its answer
    made.answer(None, 1003.5)
    status = made.status(1003.5)
    ann = status["learners"]["learner-0"]
    assert (ann["step"], ann["loss"], ann["seen_s_ago"], ann["state"]) == (500, 1.25, 2.5, "stepping")
    assert status["shards"].keys() == {"syncer-0", "syncer-1", "syncer-9"}
    assert made.status(1010.0)["learners"]["learner-0"]["state"] == "gone"
    made.answer(fake_status(), 1011.0)
    assert [event.text for event in made.events if event.who == "coordinator"] == [
        "no coordinator answers", "a coordinator answers again"
    ]  # fmt: skip


def test_entries_of_the_log_are_events_and_merges() -> None:
    made = watched()
    began_s = 1000.0 - fake_status()["wall_s"]
    made.entry(entry_record(3, 17, "syncer-1", "ann", "bob"), began_s + 80)
    made.entry(entry_record(3, 17, "syncer-1", "ann", "bob"), began_s + 81)  # once more: a region's log may have it twice
    fragment = made.fragments[3]
    assert (fragment.version, fragment.owner, fragment.epoch) == (17, "syncer-1", 1)
    assert [(round(at_s), version, members) for at_s, version, members in fragment.merges] == [(80, 17, ("ann", "bob"))]
    assert [(event.who, event.text, event.minor) for event in made.events] == [
        ("fragment 3", "version 17 of ann, bob, round 1.0 s", True)
    ]
    assert [event.who for event in made.events_of("bob")] == ["fragment 3"]


def history(*merges: dict[str, Any], activity: list[Any], events: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    facts = {"wall_s": 60.0, "state": "training", "run": "run"}
    facts |= {"fragments": [{"fragment": 0, "version": 9, "owner": "syncer-0", "epoch": 2, "parameters": 32}]}
    alerts = [{"text": "fragment 0: stalled", "since_s": 3}]
    picture = {"facts": facts, "events": [{"at_s": at, "text": text} for at, text in events], "alerts": alerts}
    return picture, {"learners": {"ann": {"activity": activity}}, "merges": list(merges)}


def test_the_history_comes_before_all_that_was_heard_since() -> None:
    made = Watched("run", 5.0)
    made.answer({"run": "run", "wall_s": 58.0, "state": "training"}, 1000.0)
    made.hear(learner_heartbeat("ann"), 1001.0)
    made.hear(learner_heartbeat("ann"), 1004.0)
    made.entry(entry_record(0, 10, "syncer-0", "ann"), 1003.0)
    merge = {"wall_s": 30.0, "fragment": 0, "version": 9, "members": [["ann", 1.0, 0, 6]]}
    picture, curves = history(merge, activity=[[0.0, 20.0, "stepping"], [20.0, 60.0, "waiting"]], events=[[5.0, "it leads"]])
    made.past(picture, curves, 0.5, 1004.5)
    assert made.lane("ann") == [(0.0, 20.0, "stepping"), (20.0, 60.0, "waiting"), (60.0, 62.0, "stepping")]
    assert made.fragments[0].merges == [(30.0, 9, ("ann",)), (61.0, 10, ("ann",))]
    assert (made.fragments[0].version, made.fragments[0].parameters) == (10, 32)
    assert [(event.at_s, event.text) for event in made.events if not event.minor] == [(5.0, "it leads")]
    made.past(picture, curves, 1.0, 1005.0)  # the same one again
    assert [event.at_s for event in made.events if not event.minor] == [5.0]
    for damaged in ({}, {"facts": {"wall_s": "x"}}, picture | {"alerts": [{}]}):
        with pytest.raises((KeyError, ValueError, TypeError, AttributeError)):
            made.past(damaged, curves, 1.0, 1006.0)
    assert made.lane("ann")[-1] == (60.0, 62.0, "stepping")


def test_the_newest_sample_stands_below_the_loss() -> None:
    made = watched()
    picture, curves = history(activity=[], events=[])
    samples = [[10.0, 1, 2, "old"], [40.0, 900, 17, "To be, or\nnot to \x1b[2Jbe" + "!" * 100]]
    made.past(picture, curves | {"samples": samples}, 0.5, 1000.0)
    app = top(made)
    app.view = VIEWS.index("loss")
    lines = plain(app.picture(80, 40, 1000.0)[1])
    at = lines.index(" a sample of version 17, 0:34 ago")
    assert lines[at + 1 : at + 4] == [" To be, or", " not to \\x1b[2Jbe" + "!" * 62, " " + "!" * 38]
    app = top(watched())
    app.view = VIEWS.index("loss")
    assert not [line for line in plain(app.picture(80, 40, 1000.0)[1]) if "sample" in line]


def test_tables_are_sorted_by_any_column() -> None:
    made = watched()
    status = made.status(1000.0)
    orders = [title for title, _ in rows.LEARNER_ORDERS]

    def names(title: str, *, turned: bool = False) -> list[str]:
        shown = Shown(order=orders.index(title), descending=turned)
        return [name.removeprefix("learner-") for name in rows.learners(made, status, shown, 74.0, 80).names]

    assert names("name") == ["0", "1", "2", "3"]
    assert names("name", turned=True) == ["3", "2", "1", "0"]
    assert names("loss") == ["3", "2", "1", "0"]  # the worst one first
    assert names("doing") == ["2", "0", "1", "3"]  # sending, stepping
    many = watched(learners=12)
    assert list(rows.learners(many, many.status(1000.0), Shown(), 74.0, 80).names)[:3] == [
        "learner-0", "learner-1", "learner-2"
    ]  # fmt: skip


def test_80_by_24() -> None:
    made = watched()
    for fragment in range(24):
        made.entry(entry_record(fragment, 17, "syncer-1", "learner-0", "learner-1"), 999.0)
    app = top(made)
    head, body, foot = app.picture(80, 24, 1000.0)
    assert plain(head)[-1] == " [1 learners] 2 fragments  3 syncers  4 events  5 logs  6 loss "
    assert plain(body)[0] == "  learner     doing        step  tok/s   loss lane                              "
    assert plain(body)[1].startswith("▸ ● learner-0 stepping      461  6.35k  1.912 ")
    assert plain(foot) == [" ↑↓ enter  s by name  r turn   w whole run   ? keys   q end"]
    later = app.picture(80, 24, 1000.0 + 600.0)[2]  # the run is 674 s old
    assert plain(later) == [" ↑↓ enter  s by name  r turn   w last 10:00   ? keys   q end"]
    app.view = 1
    _, body, _ = app.picture(80, 24, 1000.0)
    assert plain(body)[1].startswith("▸ f0            17 syncer-1    none         2 in, 0:01  ")
    assert plain(body)[4].startswith("  f3            17 syncer-1    ●● 0.1s      2 in, 0:01  ")
    assert len(body) == 24 - len(head) - 1  # the heading and as many rows as fit
    app.tables["fragments"] = Shown(chosen="23")
    assert plain(app.picture(80, 24, 1000.0)[1])[-1].startswith("▸ f23 ")
    app.in_detail = True
    lines = plain(app.picture(80, 24, 1000.0)[1])
    assert lines[1] == "version       17 of syncer-1, epoch 1"
    assert "members       learner-0 1/1  learner-1 1/1" in lines
    assert "version 17    0:01 ago: learner-0, learner-1" in lines


NAMES = {"learner-\x1b[2Jx": {"state": "\x07", "step": "\n", "loss": float("nan")}, "長い名前" * 20: {}, "": {"state": None}}


@pytest.mark.parametrize(("width", "height"), [(66, 12), (80, 24), (113, 30), (240, 70)])
@pytest.mark.parametrize("made", [Watched("run", 5.0), watched(), watched(64, 40), watched(learners=0, shards=0)])
@pytest.mark.parametrize("hostile", [False, True])
def test_every_view_fits(made: Watched, width: int, height: int, hostile: bool) -> None:
    if hostile:
        status = {"run": "a\nb" * 50, "learners": NAMES, "shards": {"s": "no table"}, "fragments": 3, "wall_s": "x", "state": 1}
        made = Watched("run", 5.0)
        made.answer(status, 1000.0)
        made.tell(1000.0, "\x1b[31m", "red\n" * 100)
        made.alerts = ["\x1b]0;title\x07" * 90] * 5
        made.sample = (5.0, 3, "\x1b[2J長い\n" * 300)
    app = top(made)
    for view in range(len(VIEWS)):
        for app.in_detail in (False, True):
            for app.helping in (False, True):
                app.view = view
                lines = [line for part in app.picture(width, height, 1001.0) for line in part]
                assert len(lines) <= height
                assert max(cell_len(line.plain) for line in lines) <= width
                assert all(line.plain.isprintable() for line in lines)


async def test_keys_and_a_terminal_that_is_made_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(_: RunFeed) -> None:
        return

    monkeypatch.setattr(RunFeed, "listen", nothing)
    made = watched()
    made.entry(entry_record(0, 17, "syncer-1", "learner-0"), 999.0)
    app = top(made, lambda: 1000.0)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("j", "j", "k", "s", "r")
        shown = app.tables["learners"]
        assert (shown.chosen, shown.order, shown.descending) == ("learner-1", 1, True)
        await pilot.press("end", "enter")
        assert app.in_detail
        await pilot.press("escape", "w", "tab", "tab", "shift+tab", "h")
        assert (app.in_detail, app.view, app.helping) == (False, 1, True)
        assert app.tables["learners"].window_s == 3600.0
        await pilot.press("h", "4", "v")
        assert app.with_versions
        await pilot.resize_terminal(40, 10)
        await pilot.pause()
        assert str(app.query_one("#head").render()).startswith("40 x 10: too small, at least 66 x 12")
        await pilot.press("q")
    assert app.return_code == 0
