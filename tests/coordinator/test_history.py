"""The history in the bucket: bounded whatever the run is like, and enough to go on from."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.made.heartbeats import learner_heartbeat
from tests.made.monitors import entry_record, monitor, past_of, region_settings, story

from diloco.control.history import MAX_BYTES, MAX_PLAIN_BYTES, Past, unpack
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import FenceError, FormatError
from diloco.settings.presets import run_settings
from diloco_coordinator import history, overview
from diloco_coordinator.alerts import Alerts
from diloco_coordinator.history import RunHistory
from diloco_coordinator.monitor import Monitor
from diloco_coordinator.thinning import evenly, fewer
from diloco_report.page import parts


def test_what_is_stored_goes_on_at_another_coordinator() -> None:
    first, alerts = story(), Alerts()
    alerts.note(first, 33.0)
    found = unpack(history.pack(past_of(first, 33.0, 7, alerts)))
    assert (found.term, found.at_s) == (7, 1.7e9)
    second, again = monitor("us", "eu"), Alerts()
    second.resume(found.curves)
    again.resume(found.picture, 33.0)
    assert second.merges.kept == first.merges.kept
    assert second.crossing.borders() == first.crossing.borders()
    assert again.events == alerts.events
    assert again.holding.keys() == alerts.holding.keys() == {
        "ann: not heard", "bob: not heard", "region eu: no process is heard"
    }  # fmt: skip
    # the log is read from its keyframe on: what was counted before is not counted again
    second.entry(entry_record(1, 2, "s-us", "ann"), 40.0)
    second.entry(entry_record(1, 3, "s-us", "ann"), 40.0)
    assert [merge["version"] for merge in second.merges.kept if merge["fragment"] == 1] == [1, 2, 3]


def test_a_page_of_what_is_stored_is_drawn_as_the_leaders_own() -> None:
    first = story()
    found = unpack(history.pack(past_of(first, 33.0)))
    drawn = parts(overview.report(found.picture, region_settings("us", "eu"), 4.0) | {"series": overview.series(found.curves)})
    own = past_of(first, 33.0)
    series = overview.series(overview.thinned(own.curves))
    leads = parts(overview.report(own.picture, region_settings("us", "eu"), None) | {"series": json.loads(json.dumps(series))})
    assert "stands by" in drawn["headline"]
    assert "stands by" not in leads["headline"]
    assert {name for name in drawn if drawn[name] != leads[name]} == {"headline"}
    assert "bob: not heard" not in drawn["alerts"]  # not looked at yet


def large(learners: int, fragments: int, versions: int, points: int) -> Monitor:
    """A coordinator's picture of a long run of many."""
    chance = random.Random(1)
    made = Monitor(
        "run",
        run_settings("decoupled", {"learners": learners}),
        build_map([TensorSpec(f"t{n}", (8,)) for n in range(fragments)], fragments, "balanced"),
        "",
    )
    names = [f"learner-{number}" for number in range(learners)]
    for name in names:
        made.hear(learner_heartbeat(name, 1), 0.0)
        made.learners[name].points = [(t, t * 1000, t, chance.uniform(1, 5)) for t in range(points)]
        made.learners[name].activity = [(t, t + 1, chance.choice(("stepping", "sending"))) for t in range(points)]
    for version in range(1, versions + 1):
        for fragment in range(fragments):
            members = [name for name in names if chance.random() < 0.8]
            made.entry(entry_record(fragment, version, "syncer-0", *members), float(version))
    return made


def test_a_large_and_long_run_is_stored_within_the_bound() -> None:
    made = large(learners=64, fragments=16, versions=40, points=1500)
    packed = history.pack(past_of(made, 604_800.0))
    assert len(packed) <= MAX_BYTES
    curves = unpack(packed).curves
    assert len(curves["learners"]) == 64
    for learner in curves["learners"].values():
        assert learner["points"][-1][0] == 1499  # the newest point stays
        assert len(learner["points"]) >= 32
    assert curves["merges_every"] * len(curves["merges"]) == pytest.approx(16 * 40, rel=0.05)


def test_a_run_whose_members_alone_are_too_many_is_refused_in_words() -> None:
    made = monitor()
    past = Past(1, 0.0, {"noise": random.Random(2).randbytes(1 << 19).hex()}, made.curves(1.0))
    with pytest.raises(FormatError, match=r"without its curves, at most 262144 can be stored"):
        history.pack(past)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (b"", "zstd|frame"),
        (zstandard.compress(b"[]"), "unknown format"),
        (zstandard.compress(b'{"format": 2}'), "unknown format"),
        (zstandard.compress(bytes(MAX_PLAIN_BYTES + 1)), "bytes when unpacked"),
        (bytes(MAX_BYTES + 1), "at most"),
        (zstandard.compress(b'{"format": 1, "picture": [], "curves": {}}'), "objects"),
        (zstandard.compress(b"[" * 100_000), "damaged"),
    ],
)
def test_what_is_no_history_is_refused(stored: bytes, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        unpack(stored)


@given(st.lists(st.integers(), max_size=300), st.integers(1, 100))
def test_points_are_thinned_evenly_and_the_last_one_stays(points: list[int], most: int) -> None:
    thin = evenly(points, most)
    assert len(thin) <= most + 1
    assert thin[-1:] == points[-1:]
    if len(points) <= most:
        assert thin == points


@given(st.lists(st.tuples(st.floats(0, 9), st.sampled_from("ab")), max_size=200), st.integers(1, 50))
def test_spans_are_joined_and_leave_no_gap(lengths: list[tuple[float, str]], most: int) -> None:
    spans, at_s = [], 0.0
    for length_s, state in lengths:
        spans.append((at_s, at_s + length_s, state))
        at_s += length_s
    thin = fewer(spans, most)
    assert len(thin) <= max(2, most)
    if spans:
        assert (thin[0][0], thin[-1][1]) == (0.0, at_s)
        assert all(a[1] == b[0] for a, b in pairwise(thin))


class Key:
    """One key of a bucket, in memory; a real one's fence is tried in tests/services/test_page.py."""

    def __init__(self) -> None:
        self.value, self.revision = b"", 0

    async def get(self, _: str) -> tuple[bytes, int] | None:
        return (self.value, self.revision) if self.revision else None

    async def update(self, _: str, value: bytes, revision: int) -> int:
        if revision != self.revision:
            raise FenceError("set by another process")
        self.value, self.revision = value, self.revision + 1
        return self.revision

    async def create(self, key: str, value: bytes) -> int:
        return await self.update(key, value, 0)


async def test_a_leader_that_was_replaced_writes_no_more_and_its_successor_does() -> None:
    key: Any = Key()
    old, new = RunHistory(key), RunHistory(key)
    packed = {term: history.pack(past_of(story(), 33.0, term)) for term in (3, 5)}
    assert await new.read() is None
    await old.write(packed[3], 3)
    await new.write(packed[5], 5)  # behind a value of an earlier term
    with pytest.raises(FenceError):
        await old.write(packed[3], 3)
    await new.write(packed[5], 5)
    found = await old.read()
    assert found is not None
    assert found.term == 5


async def test_a_damaged_history_is_written_over() -> None:
    key: Any = Key()
    await key.create("history", b"nonsense")
    own = RunHistory(key)
    with pytest.raises(FormatError):
        await own.read()
    await own.write(history.pack(past_of(story(), 33.0, 1)), 1)
    assert unpack(key.value).term == 1
