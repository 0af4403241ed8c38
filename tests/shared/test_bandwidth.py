"""Precision and pace as they follow the links, over emulated ones."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core.syncer import bandwidth
from diloco.core.syncer.bandwidth import Appends, Bandwidth, Level, LevelChange, Moved, WayState
from diloco.core.tensors.quantise import body_bytes
from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_ops.wan.link import Flow, LinkConditions, WanLink

VALUES = 64_000  # of a fragment: 128 kB at 16 bits, 34 kB at 4
FRAGMENTS = 4
CYCLE_S = 12.0
DELAY_S = 0.05


def adapting(**overrides: Any) -> RunSettings:
    """Two regions, 16 bits at best; in a keyword ``__`` stands for the dot of a setting's name."""
    own = {key.replace("__", "."): value for key, value in overrides.items()}
    base = {"regions.names": ["eu", "us"], "codec.offer_bits": 16, "codec.record_bits": 16}
    return run_settings(overrides=base | own)


def bytes_per_s(load: float, bits: int = 16, pace: float = 1.0) -> float:
    """Of a link that a cycle's bytes at that level keep busy for that share of it."""
    return FRAGMENTS * body_bytes(VALUES, bits) / (CYCLE_S * pace * load)


@dataclass
class Writer:
    """An owner that writes its fragments' entries to one other region over an emulated link, at what follows from that."""

    settings: RunSettings
    rate: float
    now_s: float = 0.0
    changes: list[tuple[float, LevelChange]] = field(default_factory=list)
    oldest_s: float = 0.0  # that an entry waited, ever

    def __post_init__(self) -> None:
        self.own = Bandwidth(self.settings, ["eu"])
        self.link: WanLink[int] = WanLink(self.conditions(), random.Random(1))
        self.flow = Flow(0, "bulk")
        self.appends = Appends()
        self.queue: deque[tuple[float, int]] = deque()  # when made, bytes
        self.sent_bytes = self.due_s = self.silent_s = 0.0
        self.began_s: float | None = None
        self.left_bytes = 0

    def conditions(self) -> LinkConditions:
        return LinkConditions(rate_bits_per_s=8 * self.rate, delay_s=DELAY_S)

    def change(self, rate: float) -> None:
        """The link is another one from now on."""
        self.rate = rate
        self.link.change(self.now_s, self.conditions())

    def run(self, cycles: float) -> Writer:
        """Go on for so many of the shortest cycles."""
        until_s, look_s = self.now_s + cycles * CYCLE_S, math.floor(self.now_s) + 1.0
        while self.now_s < until_s:
            self.now_s += 0.05
            if self.now_s >= self.due_s:
                self.queue.append((self.now_s, body_bytes(VALUES, self.own.record_bits)))
                self.due_s = self.now_s + CYCLE_S * self.own.pace / FRAGMENTS
            self._move()
            if self.now_s >= look_s:
                look_s += 1.0
                self._look()
        return self

    def _move(self) -> None:
        if self.began_s is None and self.queue:
            self.began_s, self.left_bytes = self.now_s, self.queue[0][1]
        room = min(self.link.room(self.flow), self.left_bytes)
        if room > 0:
            self.link.enter(self.now_s, self.flow, bytes(room))
            self.left_bytes -= room
        arrived = sum(len(delivery.data) for delivery in self.link.poll(self.now_s))
        self.sent_bytes += arrived
        if self.queue and self.began_s is not None and self.sent_bytes >= self.queue[0][1]:
            made_s, size = self.queue.popleft()
            self.oldest_s = max(self.oldest_s, self.now_s - made_s)
            self.sent_bytes -= size
            self.appends.done(self.began_s, self.now_s + DELAY_S, size)
            self.appends.done(self.now_s, self.now_s + 2 * DELAY_S, 0)  # its notice
            self.began_s = None

    def _look(self) -> None:
        if self.link.is_cut:
            self.appends.broken(self.now_s)
            self.own.look(self.now_s, CYCLE_S, {})
            return
        age_s = self.now_s - self.queue[0][0] if self.queue else 0.0
        seen = WayState(self.appends.moved, FRAGMENTS * VALUES, age_s)
        found = self.own.look(self.now_s, CYCLE_S, {"eu": (WayState(Moved(), 0, 0.0), seen)})
        self.changes += [(self.now_s, change) for change in found]

    @property
    def level(self) -> Level:
        return Level(self.own.record_bits, self.own.pace)


def test_levels_are_fewer_bits_and_then_longer_cycles() -> None:
    assert bandwidth.levels(16, adapting()) == [
        Level(16, 1),
        Level(8, 1),
        Level(4, 1),
        Level(4, 1.5),
        Level(4, 2),
        Level(4, 3),
        Level(4, 4),
    ]
    assert bandwidth.levels(32, adapting(regions__min_bits=16, regions__max_pace=2.5)) == [
        Level(32, 1),
        Level(16, 1),
        Level(16, 1.5),
        Level(16, 2),
        Level(16, 2.5),
    ]
    # whose codec has less already keeps it
    assert bandwidth.levels(4, adapting(regions__min_bits=16, regions__max_pace=1)) == [Level(4, 1)]


@pytest.mark.parametrize("bits", [1, 2])
def test_only_the_settings_have_fewer_than_4_bits(bits: Literal[1, 2]) -> None:
    """Members that do not know them may be in any other run, however slow its links become."""
    slow = adapting(regions__min_bits=4)
    assert bandwidth.possible(16, slow) == bandwidth.precisions(16, slow) == [16, 8, 4]
    assert bandwidth.possible(bits, slow) == bandwidth.precisions(bits, slow) == [bits]
    with pytest.raises(SettingsError, match=r"regions\.min_bits"):
        adapting(regions__min_bits=bits)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"regions.adaptive": False}, [Level(16, 1)]),
        ({"regions.names": []}, [Level(16, 1)]),
        ({"round.steps": 1, "round.learners_wait": True}, [Level(16, 1)]),  # lockstep
        # who waits for a version takes no step that a later round could wait for
        ({"round.learners_wait": True}, [Level(16, 1), Level(8, 1), Level(4, 1)]),
    ],
)
def test_a_run_that_is_not_to_adapt_does_not(overrides: dict[str, Any], expected: list[Level]) -> None:
    assert bandwidth.levels(16, adapting(**overrides)) == expected


def test_a_link_with_room_is_left_alone() -> None:
    writer = Writer(adapting(), bytes_per_s(load=0.5)).run(20)

    assert writer.level == Level(16, 1)
    assert writer.changes == []


@pytest.mark.parametrize(
    ("load", "fits"),
    [
        (1.2, Level(8, 1)),
        (1.9, Level(4, 1)),  # 8 bits take 1.01 of a cycle, 4 bits 0.51
        (4.0, Level(4, 1.5)),  # 4 bits take 1.06
        (9.0, Level(4, 3)),  # 4 bits take 2.4
        (40.0, Level(4, 4)),  # nothing fits, and this is the least
    ],
)
def test_a_slow_link_gets_what_fits(load: float, fits: Level) -> None:
    writer = Writer(adapting(), bytes_per_s(load)).run(12)

    assert writer.level == fits


def test_rounds_fit_their_window_again_after_a_link_became_slow() -> None:
    writer = Writer(adapting(), bytes_per_s(load=0.3)).run(4)
    writer.change(bytes_per_s(load=2.5))
    writer.run(6)  # what was made before has gone
    writer.oldest_s = 0.0

    writer.run(10)

    assert writer.level == Level(4, 1)
    assert writer.oldest_s < CYCLE_S


def test_a_link_that_recovers_gets_its_precision_back() -> None:
    writer = Writer(adapting(), bytes_per_s(load=0.2)).run(3)
    writer.change(bytes_per_s(load=6.0))
    writer.run(8)
    assert writer.level == Level(4, 2)
    writer.change(bytes_per_s(load=0.2))

    writer.run(30)

    assert writer.level == Level(16, 1)
    ups = [(change.level, change.reason) for _, change in writer.changes[-4:]]
    assert ups == [(Level(4, 1.5), "spare"), (Level(4, 1), "spare"), (Level(8, 1), "spare"), (Level(16, 1), "spare")]


@settings(max_examples=15)
@given(st.floats(-2.5, 4).map(lambda power: 2.0**power))
def test_a_steady_link_is_settled_on(load: float) -> None:
    writer = Writer(adapting(), bytes_per_s(load)).run(12)
    changes = len(writer.changes)

    writer.run(18)

    assert changes <= 6
    assert len(writer.changes) - changes <= 1  # what just fits may turn out not to
    # with room to spare for a level, that one or a better one
    levels, room_bytes = bandwidth.levels(16, adapting()), 0.39 * writer.rate * CYCLE_S
    fitting = [level for level in levels if FRAGMENTS * body_bytes(VALUES, level.bits) < room_bytes * level.pace]
    if fitting:
        assert levels.index(writer.level) <= levels.index(fitting[0])


@settings(max_examples=5)
@given(
    st.lists(st.tuples(st.floats(-3, 5), st.floats(1, 6)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_whatever_a_link_went_through_it_gets_its_precision_back(story: list[tuple[float, float]], cuts: int) -> None:
    writer = Writer(adapting(), bytes_per_s(0.1))
    for index, (power, cycles) in enumerate(story):
        writer.change(bytes_per_s(2.0**power))
        writer.run(cycles)
        if index < cuts:
            writer.link.cut(writer.now_s)
            writer.run(cycles)
            writer.link.heal(writer.now_s)
    writer.change(bytes_per_s(0.1))

    writer.run(150)

    assert writer.level == Level(16, 1)


def test_a_step_up_that_does_not_hold_is_tried_less_and_less() -> None:
    """A link that gives way whenever there is more than 8 bits on it: to see it idle says nothing."""
    own, times = Bandwidth(adapting(), ["eu"]), list[float]()
    bytes_, busy_s, rate = 0, 0.0, 0.0
    for second in range(400 * int(CYCLE_S)):
        rate = bytes_per_s(0.3) if own.record_bits < 16 else bytes_per_s(1.5)
        bytes_, busy_s = bytes_ + 10_000, busy_s + 10_000 / rate
        found = own.look(
            second, CYCLE_S, {"eu": (WayState(Moved(), 0, 0), WayState(Moved(bytes_, busy_s), FRAGMENTS * VALUES, 0))}
        )
        times += [second / CYCLE_S for change in found if change.reason == "spare"]

    assert 4 <= len(times) <= 9  # at 2 cycles each time it would be a hundred
    waits = [after - before for before, after in pairwise(times[2:])]
    assert all(after > 1.5 * before for before, after in pairwise(waits))


def test_one_slow_region_slows_the_entries_of_all_and_its_own_offers_alone() -> None:
    own = Bandwidth(adapting(regions__names=["ap", "eu", "us"]), ["ap", "eu"])
    slow, fast, values = bytes_per_s(1.2), bytes_per_s(0.1), FRAGMENTS * VALUES

    def link(rate: float, second: int) -> tuple[WayState, WayState]:
        moved = Moved(10_000 * second, 10_000 * second / rate)
        return WayState(moved, values, 0.0), WayState(moved, values, 0.0)

    for second in range(10):
        own.look(second, CYCLE_S, {"ap": link(slow, second), "eu": link(fast, second)})

    assert (own.record_bits, own.pace) == (8, 1.0)
    assert own.offer_bits == [("ap", 8)]


def test_a_region_that_is_away_holds_nobody_up() -> None:
    own, values = Bandwidth(adapting(), ["eu"]), FRAGMENTS * VALUES

    def see(second: int, *, present: bool = True) -> list[tuple[Level, str]]:
        moved = Moved(10_000 * second, 10_000 * second / bytes_per_s(12))
        seen = {"eu": (WayState(Moved(), values, 0.0), WayState(moved, values, 0.0))} if present else {}
        return [(change.level, change.reason) for change in own.look(second, CYCLE_S, seen)]

    changes = [change for second in range(10) for change in see(second)]
    assert changes == [(Level(4, 4), "load")]
    assert (own.record_bits, own.pace, own.steps) == (4, 4.0, 96)

    assert see(10, present=False) == [(Level(16, 1), "cut")]
    assert (own.record_bits, own.pace, own.steps) == (16, 1.0, 24)
    assert see(11, present=False) == []

    # back, it is as slow as it was
    assert see(12) == [(Level(4, 4), "back")]
    assert (own.record_bits, own.pace) == (4, 4.0)


def test_a_queue_that_grows_without_a_rate_is_noticed_too() -> None:
    """Entries so small that nothing is known of a rate, or none acknowledged for long."""
    own, found = Bandwidth(adapting(), ["eu"]), list[tuple[int, LevelChange]]()
    for second in range(int(3 * CYCLE_S)):
        seen = {"eu": (WayState(Moved(), 0, 0.0), WayState(Moved(), FRAGMENTS * VALUES, float(second)))}
        found += [(second, change) for change in own.look(second, CYCLE_S, seen)]

    # older than a window of 12 s; then after every window in which nothing comes over
    assert [(second, change.level, change.reason) for second, change in found] == [
        (13, Level(8, 1), "queue"),
        (25, Level(4, 1), "queue"),
    ]


@pytest.mark.parametrize(
    ("parties", "busy_s"),
    [
        # a round trip of 0.1 s is known from a notice; 1 s for what it took beyond that
        ([(0.0, 0.1, 300), (1.0, 2.1, 100_000)], 1.0),
        # two at once: the second is served when the first is
        ([(0.0, 0.1, 300), (1.0, 2.1, 100_000), (1.0, 3.1, 100_000)], 2.0),
        # one that was begun in vain before the link was cut counts for nothing
        ([(0.0, 0.1, 300), (1.0, 2.1, 100_000), (-5.0, 60.0, 100_000)], 1.0),
    ],
)
def test_what_an_append_took_beyond_a_round_trip_the_link_was_busy_with(
    parties: list[tuple[float, float, int]], busy_s: float
) -> None:
    appends = Appends()
    for began_s, ended_s, size in parties:
        if began_s < 0:
            appends.broken(30.0)
        appends.done(began_s, ended_s, size)

    assert appends.moved.busy_s == pytest.approx(busy_s)
    assert appends.moved.bytes == int(busy_s) * 100_000
