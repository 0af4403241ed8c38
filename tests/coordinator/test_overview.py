"""The report of a run that goes on: its regions and links, its storage, its settings in force."""

from __future__ import annotations

import html
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.made.monitors import entry_record, monitor, region_settings
from tests.made.reports import fake_report

from diloco.core.run.changes import Changes, Effective
from diloco.transport import Room
from diloco_coordinator import overview
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.monitor import Monitor
from diloco_coordinator.page.drawing import CURVED
from diloco_coordinator.page.source import CoordinatorSource
from diloco_coordinator.service import Coordinator
from diloco_report.page import PARTS, parts


def report_of(made: Monitor, now_s: float) -> dict[str, Any]:
    seen = overview.picture(made, Alerts(), Changes(bytes(16)), now_s)
    return overview.report(seen, region_settings(*made.presence.regions), None)


def in_two_regions() -> Monitor:
    """Owners in both, of 16 parameters in 2 fragments; us has sent 1000 bytes by 10 s, and 400 more within the next 5 s."""
    made = monitor("us", "eu")
    made.hear(learner_heartbeat("ann", 3, region="us", sending=True), 14.0)
    made.hear(learner_heartbeat("bob", 3, region="eu"), 14.0)
    us = shard_heartbeat(
        "s-us", region="us", crossing=[("eu", 1000, 50)], state="owner", record_bits=4, pace=1.0, open=[(0, 1, 2, 0.5)]
    )
    eu = shard_heartbeat("s-eu", region="eu", state="owner", record_bits=8, pace=2.0, offer_bits=[("us", 2)])
    made.hear_shard(us, 10.0)
    made.hear_shard(eu, 10.0)
    made.hear_shard(replace(us, crossing=[("eu", 1400, 50)]), 15.0)
    for version in (1, 2, 3):
        for fragment in (0, 1):
            made.entry(entry_record(fragment, version, "s-us", "ann"), 10.0)
    return made


def test_a_picture_that_an_older_version_stored_is_read() -> None:
    """Such a one has no count of the state that is merged, nor of versions since the first cycle."""
    made = in_two_regions()
    seen = overview.picture(made, Alerts(), Changes(bytes(16)), 15.0)
    del seen["facts"]["state_values"], seen["steady"]
    assert overview.report(seen, region_settings(*made.presence.regions), 4.0)["state_values"] == 0


def test_links_have_their_rate_and_the_bits_that_their_owners_ask_for() -> None:
    now = report_of(in_two_regions(), 15.0)["now"]
    there, back = now["links"]
    # offers of us go to the owner in eu, which asks for 2 bits; versions come from the one in us
    assert there == {
        "from": "us", "to": "eu", "bytes": 1400, "bytes_per_s": 80.0, "offer_bits": 2, "record_bits": 4, "pace": 2.0,
    }  # fmt: skip
    assert (back["from"], back["bytes"], back["bytes_per_s"], back["record_bits"]) == ("eu", 50, 0.0, 8)
    assert back["offer_bits"] == region_settings("us", "eu").codec.offer_bits  # fewer are not asked for
    us = now["regions"]["us"]
    assert (us["sending"], us["open"], us["heard"], us["members"]) == (1, 1, 2, 2)
    assert us["of_bound"] is None  # the syncers themselves have told of no version


def test_bytes_are_compared_with_a_rings_from_the_end_of_the_first_cycle_on() -> None:
    """A ring between two: (2 - 1) / 2 of 16 parameters, of 4 bits there and 4 back, are 8 bytes a cycle of two versions."""
    made = monitor("us", "eu")

    def of_bound(us_versions: int, us_sent: int, eu_versions: int, eu_sent: int) -> list[float | None]:
        made.hear_shard(shard_heartbeat("s-us", region="us", crossing=[("eu", us_sent, 0)], versions=us_versions), 1.0)
        made.hear_shard(shard_heartbeat("s-eu", region="eu", crossing=[("us", eu_sent, 0)], versions=eu_versions), 1.0)
        return [region["of_bound"] for region in report_of(made, 1.0)["now"]["regions"].values()]

    assert of_bound(0, 1000, 0, 5) == [None, None]  # the initial model, and offers of the first rounds
    assert of_bound(1, 1005, 1, 10) == [None, None]  # the first cycle ends
    assert of_bound(2, 1009, 1, 14) == [None, None]
    assert of_bound(2, 1015, 2, 16) == [10 / 8, 6 / 8]
    assert of_bound(3, 1023, 3, 26) == [18 / 16, 16 / 16]
    # another coordinator goes on with what this one stored, and a syncer begins again
    stored = json.loads(json.dumps(made.series(2.0)))
    made = monitor("us", "eu")
    made.resume(stored)
    assert of_bound(3, 1023, 3, 26) == [18 / 16, 16 / 16]
    made.hear_shard(shard_heartbeat("s-us", region="us", crossing=[("eu", 7, 0)], incarnation=2, versions=1), 2.0)
    assert of_bound(3, 1023, 4, 33) == [25 / 24, 23 / 24]


def test_the_page_draws_them_and_marks_a_region_that_is_away() -> None:
    made = in_two_regions()
    drawn = parts(report_of(made, 15.0))["islands"]
    assert "us → eu" in drawn
    assert "80 B/s" in drawn
    assert 'class="island cut"' not in drawn
    for at_s in range(16, 62, 2):
        made.hear(learner_heartbeat("ann", 4, region="us"), float(at_s))
    drawn = parts(report_of(made, 60.0))["islands"]
    assert drawn.count('class="island cut"') == 1
    assert drawn.count('class="link cut"') == 2
    unheard = monitor("us", "eu")  # no syncer has said a pace
    assert "×" not in parts(report_of(unheard, 15.0))["islands"]
    assert "2.0×" in drawn
    assert parts(report_of(monitor(), 1.0))["islands"] == ""


def test_storage_and_settings_that_were_changed() -> None:
    made = monitor()
    made.rooms = [Room("OFFERS", 250, 1000)]
    made.change(Effective(made.settings.model_copy(update={"tokens": 77})))
    drawn = parts(report_of(made, 1.0))
    assert "25 %" in drawn["storage"]
    assert f"<del>{region_settings().tokens}</del> <ins>77</ins>" in drawn["settings"]
    assert drawn["settings"].count("<ins>") == 1


def test_a_page_says_from_where_it_knows_a_run() -> None:
    made = monitor()
    made.entry(entry_record(0, 41, "s", "ann"), 5.0)
    series = overview.series(overview.thinned(made.curves(6.0)))
    assert "40 older versions are missing" in parts(report_of(made, 6.0) | {"series": series})["merges"]


def test_all_parts_that_show_a_series_are_drawn_with_it() -> None:
    """The quick parts are drawn without: one of them that needs the series would stay empty on the live page."""
    whole = fake_report() | {"now": {"state": "training"}}
    quick = {key: value for key, value in whole.items() if key != "series"}
    assert {name for name, draw in PARTS.items() if draw(whole) != draw(quick)} <= set(CURVED)


@pytest.mark.parametrize("follows", [True, False])
async def test_the_page_of_a_runs_end_is_preliminary_where_diloco_up_has_yet_to_write_the_final_one(
    tmp_path: Path, follows: bool
) -> None:
    made = monitor()
    made.entry(entry_record(0, 1, "s", "ann"), 5.0)
    picture = overview.picture(made, Alerts(), Changes(bytes(16)), 6.0)
    stand_in: Any = SimpleNamespace(
        run=SimpleNamespace(created=region_settings(), name="run", registry=None),
        settings=SimpleNamespace(report_follows=follows, state_dir=tmp_path),
        transport=SimpleNamespace(wall_s=lambda: 1_700_000_000.0),
        monitor=made,
        now_s=lambda: 6.0,
        picture=lambda: picture,
        finished=False,
        log=None,
    )
    served = CoordinatorSource(stand_in)
    assert "Preliminary" not in parts(await served.report())["state"]  # it goes on, and moves by itself
    stand_in.finished = True
    await Coordinator.write_page(stand_in)
    for page in (parts(await served.report())["state"], (tmp_path / "report.html").read_text()):
        said = "Preliminary, as of 2023-11-14 22:13:20 UTC: training has ended, and the run's final checks are still running."
        assert (said in html.unescape(page)) is follows
        assert ("finished after 0:06" in page) is not follows
