"""A link: its rate, its order, its fairness, its precedence, and that nothing is lost, whatever is done to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_ops.wan.link import (
    MIN_QUEUE_BYTES,
    PACKET_BYTES,
    WINDOW_BYTES,
    Delivery,
    Flow,
    LinkConditions,
    LinkTraffic,
    Traffic,
    WanLink,
)

MBIT = 1e6


def made(conditions: LinkConditions | None = None, **values: float) -> WanLink[str]:
    return WanLink(conditions or LinkConditions(**values), random.Random(1))  # type: ignore[arg-type]


def flow(name: str = "one", traffic: Traffic = "bulk") -> Flow[str]:
    return Flow(name, traffic)


def times(deliveries: list[Delivery[str]]) -> list[float]:
    return [delivery.at_s for delivery in deliveries]


def size(deliveries: list[Delivery[str]], name: str | None = None) -> int:
    return sum(len(each.data) for each in deliveries if name in (None, each.flow.receiver))


def run(link: WanLink[str], until_s: float) -> list[Delivery[str]]:
    """Everything that arrives until then, polled when the link asks for it."""
    arrived = link.poll(0.0)
    while (next_s := link.next_s()) is not None and next_s <= until_s:
        arrived += link.poll(next_s)
    return arrived + link.poll(until_s)


# ---- what it does, by hand


def test_bytes_arrive_after_their_serialisation_and_the_delay() -> None:
    # 1 Mbit/s: a packet of 1448 bytes takes 11.584 ms
    link = made(rate_bits_per_s=MBIT, delay_s=0.5)
    one = flow()
    link.enter(10.0, one, bytes(2 * 1448))
    assert link.poll(10.0) == []
    assert link.next_s() == pytest.approx(10.011584)
    link.poll(10.011584)
    arrived = link.poll(10.51159) + link.poll(20.0)
    assert times(arrived) == pytest.approx([10.511584, 10.523168])
    assert size(arrived) == 2896
    assert link.next_s() is None


def test_who_looks_late_loses_nothing_of_the_rate() -> None:
    # 8 Mbit/s: 1 MB/s, pieces of 6 packets. 40 kB take 40 ms, with a look every ms or one alone
    link = made(rate_bits_per_s=8 * MBIT)
    link.enter(1.0, flow(), bytes(40_000))
    arrived = link.poll(1.0401)
    assert size(arrived) == 40_000
    assert arrived[-1].at_s == pytest.approx(1.040)
    assert arrived[0].at_s == pytest.approx(1.0 + 6 * 1448 / 1e6)


def test_an_idle_link_saves_nothing_up() -> None:
    link = made(rate_bits_per_s=8 * MBIT)
    one = flow()
    link.enter(1.0, one, bytes(1000))
    link.poll(1.0)
    link.enter(60.0, one, bytes(1000))
    assert times(link.poll(61.0)) == pytest.approx([1.001, 60.001])


def test_without_limits_everything_passes_at_once() -> None:
    link = made()
    link.enter(1.0, flow(), bytes(1_000_000))
    assert size(link.poll(1.0)) == 1_000_000


def test_marks_come_behind_the_bytes_and_take_no_time() -> None:
    link = made(rate_bits_per_s=8 * MBIT, delay_s=0.1)
    one = flow()
    link.mark(0.0, one, "open")
    link.enter(0.0, one, bytes(1000))
    link.mark(0.0, one, "end")
    arrived = run(link, 1.0)
    assert [(each.mark, len(each.data)) for each in arrived] == [("open", 0), (None, 1000), ("end", 0)]
    assert times(arrived) == pytest.approx([0.1, 0.101, 0.101])


def test_jitter_is_within_its_bounds_and_of_all_sizes() -> None:
    link, one = made(delay_s=0.1, jitter_s=0.02), flow()
    for second in range(1, 1001):  # far apart, so that none has to wait for another one
        link.enter(float(second), one, b"x")
    delays_s = [delivery.at_s - second for second, delivery in enumerate(link.poll(2000.0), 1)]
    assert all(0.08 - 1e-9 <= delay_s <= 0.12 + 1e-9 for delay_s in delays_s)
    tenths = [round((delay_s - 0.08) / 0.004 - 0.5) for delay_s in delays_s]
    assert all(50 < tenths.count(tenth) < 200 for tenth in range(10))


def test_control_waits_for_one_piece_of_bulk_at_most() -> None:
    # 5 Mbit/s: pieces of 4 packets, 9.3 ms each; the queue alone would be 105 ms
    link, bulk, control = made(rate_bits_per_s=5 * MBIT), flow("bulk"), flow("heartbeat", "control")
    link.enter(0.0, bulk, bytes(MIN_QUEUE_BYTES))
    piece_s = 4 * 1448 * 8 / (5 * MBIT)
    for i in range(1, 11):
        at_s = i * 0.0107
        link.enter(at_s, control, bytes(200))
        heartbeats = [each for each in link.poll(at_s + 0.0106) if each.flow is control]
        assert len(heartbeats) == 1
        assert at_s + 0.00032 <= heartbeats[0].at_s <= at_s + piece_s + 0.00032 + 1e-9


def test_flows_share_by_bytes_however_large_their_writes_are() -> None:
    link, large, small = made(rate_bits_per_s=10 * MBIT), flow("large"), flow("small")
    link.enter(0.0, large, bytes(60_000))
    for _ in range(600):
        link.enter(0.0, small, bytes(100))
    arrived = run(link, 0.08)  # 100 kB
    assert abs(size(arrived, "large") - size(arrived, "small")) <= 2 * link.conditions.piece_bytes
    assert size(arrived) == pytest.approx(100_000, abs=link.conditions.piece_bytes)


def test_the_queue_is_a_tenth_of_a_second_and_at_least_64_kib() -> None:
    assert LinkConditions(100 * MBIT).queue_limit_bytes == 1_250_000
    assert LinkConditions(1 * MBIT).queue_limit_bytes == 65_536
    assert LinkConditions(1 * MBIT, queue_bytes=5000).queue_limit_bytes == 5000


def test_pieces_are_whole_packets_within_ten_milliseconds() -> None:
    assert LinkConditions(1 * MBIT).piece_bytes == 1448  # a packet alone takes 11.6 ms
    assert LinkConditions(5 * MBIT).piece_bytes == 4 * 1448
    assert LinkConditions(200 * MBIT).piece_bytes == 45 * 1448


def test_a_full_queue_takes_no_more_and_a_newcomer_still_gets_in() -> None:
    link, one, two = made(rate_bits_per_s=MBIT), flow("one"), flow("two")
    assert link.room(one) == MIN_QUEUE_BYTES
    link.enter(0.0, one, bytes(MIN_QUEUE_BYTES))
    assert link.room(one) == 0
    assert link.room(two) == 1448  # a piece, at least
    link.enter(0.0, two, bytes(1448))
    assert link.room(two) == 0  # while the other one's surplus drains
    link.poll(0.40)  # 50 kB later
    assert link.room(two) > 10_000
    assert link.room(flow("heartbeat", "control")) == MIN_QUEUE_BYTES  # the classes do not share


def test_a_flow_has_a_window_even_on_an_unlimited_link() -> None:
    link, one = made(delay_s=10.0), flow()
    entered = 0
    while room := link.room(one):
        link.enter(1.0, one, bytes(room))
        entered += room
        link.poll(1.0)
    assert WINDOW_BYTES - (1 << 20) <= entered <= WINDOW_BYTES
    assert size(link.poll(11.0)) == entered
    assert link.room(one) > 0


# ---- disturbed


def test_nothing_passes_a_cut_and_all_of_it_comes_after() -> None:
    link, one = made(rate_bits_per_s=8 * MBIT, delay_s=0.1), flow()
    link.enter(0.0, one, bytes(range(200)) * 50)  # 10 ms
    link.cut(0.0045)
    assert link.next_s() is None
    link.enter(1.0, one, b"said meanwhile")
    assert link.poll(50.0) == []
    link.heal(100.0)
    arrived = run(link, 200.0)
    assert b"".join(each.data for each in arrived) == bytes(range(200)) * 50 + b"said meanwhile"
    # the first piece had 4.188 ms to go when the link was cut
    assert arrived[0].at_s == pytest.approx(100.0 + 0.008688 - 0.0045 + 0.1)
    assert arrived[-1].at_s == pytest.approx(100.0 + 0.010014 - 0.0045 + 0.1)


def test_what_was_in_flight_at_the_cut_arrives_when_it_is_healed() -> None:
    link, one = made(delay_s=0.1), flow()
    link.enter(0.0, one, b"in flight")
    link.poll(0.0)
    link.cut(0.05)
    assert link.poll(5.0) == []
    link.heal(5.0)
    assert size(link.poll(5.0)) == 9


def test_cutting_or_healing_twice_is_as_once() -> None:
    link, one = made(rate_bits_per_s=8 * MBIT), flow()
    link.enter(0.0, one, bytes(8000))
    link.heal(0.001)
    link.cut(0.002)
    link.cut(1.0)
    link.heal(2.0)
    link.heal(2.003)
    assert times(run(link, 9.0)) == pytest.approx([2.006])


def test_a_changed_rate_holds_for_what_is_on_its_way_out() -> None:
    link, one = made(rate_bits_per_s=1000.0), flow()
    link.enter(0.0, one, bytes(1000))  # 8 s
    link.change(4.0, LinkConditions(rate_bits_per_s=MBIT))
    assert times(link.poll(5.0)) == pytest.approx([4.004])


def test_a_shorter_delay_does_not_overtake() -> None:
    link, one = made(delay_s=1.0), flow()
    link.enter(0.0, one, b"first")
    link.change(0.5, LinkConditions(delay_s=0.1))
    link.enter(0.5, one, b"second")
    arrived = run(link, 2.0)
    assert [(bytes(each.data), each.at_s) for each in arrived] == [(b"first", 1.0), (b"second", 1.0)]


def test_a_dropped_flow_is_gone_and_others_are_not() -> None:
    link, one, two = made(rate_bits_per_s=8 * MBIT), flow("one"), flow("two")
    link.enter(0.0, one, bytes(20_000))
    link.enter(0.0, two, bytes(1000))
    link.drop(one)
    arrived = run(link, 1.0)
    assert {each.flow.receiver for each in arrived} == {"two"}
    assert arrived[-1].at_s <= 0.010
    statistics = link.statistics(1.0)
    assert (statistics.queued_bytes, statistics.flying_bytes) == (0, 0)


# ---- what it counts


def test_it_counts_payload_and_packets_by_class_and_the_rate_achieved() -> None:
    link, bulk, heartbeat = made(rate_bits_per_s=8 * MBIT, delay_s=0.5), flow("bulk"), flow("heartbeat", "control")
    link.mark(100.0, heartbeat, "open")
    link.enter(100.0, heartbeat, bytes(200))
    link.enter(100.0, bulk, bytes(15_000))
    link.poll(100.010)
    statistics = link.statistics(100.010)
    assert (statistics.queued_bytes, statistics.flying_bytes) == (0, 15_200)  # 8.9 kB have left, the rest is leaving
    link.poll(102.0)
    assert link.carried == {"control": LinkTraffic(200, 2), "bulk": LinkTraffic(15_000, 6 + 5)}
    assert link.statistics(105.0).achieved_bits_per_s == pytest.approx(15_200 * 8 / 5)
    assert link.statistics(106.0).achieved_bits_per_s == 0


def test_the_age_of_the_queue_is_that_of_its_oldest_bytes() -> None:
    link, one = made(rate_bits_per_s=8000.0), flow()
    link.enter(1.0, one, bytes(1448))
    link.enter(1.5, one, bytes(1448))
    assert link.statistics(2.0).queue_age_s == pytest.approx(0.5)  # the first is on its way out
    link.poll(10.0)
    assert link.statistics(10.0).queue_age_s == 0


# ---- whatever happens


@dataclass
class Story:
    """A link, senders that fill whatever room they are given, and everything that arrived."""

    link: WanLink[str]
    now_s: float = 0.0
    flows: list[Flow[str]] = field(default_factory=lambda: [flow("a"), flow("b"), flow("c", "control")])
    entered: dict[str, bytearray] = field(default_factory=lambda: {name: bytearray() for name in "abc"})
    arrived: list[Delivery[str]] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(3))

    def send(self, index: int, most: int) -> None:
        one = self.flows[index]
        data = self.chance.randbytes(min(most, self.link.room(one)))
        self.link.enter(self.now_s, one, data)
        self.entered[one.receiver] += data

    def poll(self) -> None:
        self.arrived += self.link.poll(self.now_s)

    def got(self, name: str) -> bytes:
        return b"".join(each.data for each in self.arrived if each.flow.receiver == name)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "poll", "cut", "heal", "change"]),
        st.floats(0, 0.2),
        st.integers(0, 2),
        st.integers(1, 100_000),
        st.builds(
            LinkConditions,
            st.none() | st.floats(1e3, 1e9),
            st.floats(0, 0.5),
            st.floats(0, 0.6),
            st.none() | st.integers(PACKET_BYTES, 1 << 20),
        ),
    ),
    max_size=60,
)


@given(STEPS)
def test_every_byte_arrives_once_in_order_and_none_through_a_cut(
    steps: list[tuple[str, float, int, int, LinkConditions]],
) -> None:
    story = Story(made(rate_bits_per_s=MBIT, delay_s=0.03))
    for what, later_s, index, most, conditions in steps:
        story.now_s += later_s
        if what == "send":
            story.send(index, most)
        elif what == "change":
            story.link.change(story.now_s, conditions)
        elif what == "cut":
            story.link.cut(story.now_s)
        elif what == "heal":
            story.link.heal(story.now_s)
        before = len(story.arrived)
        story.poll()
        if story.link.is_cut:
            assert len(story.arrived) == before
            assert story.link.next_s() is None
        limit = story.link.conditions.queue_limit_bytes
        assert all(story.link.room(each) <= max(limit, story.link.conditions.piece_bytes) for each in story.flows)
    story.link.heal(story.now_s)
    story.link.change(story.now_s, LinkConditions())
    story.now_s += 60
    story.poll()
    assert {name: story.got(name) for name in "abc"} == {name: bytes(data) for name, data in story.entered.items()}
    assert times(story.arrived) == sorted(times(story.arrived))
    statistics = story.link.statistics(story.now_s)
    assert (statistics.queued_bytes, statistics.flying_bytes) == (0, 0)
    assert sum(each.payload_bytes for each in story.link.carried.values()) == sum(map(len, story.entered.values()))


@given(st.floats(5e5, 2e8), st.integers(0, 2**32))
@settings(max_examples=20)
def test_no_window_of_time_gets_more_than_the_rate_and_a_piece(rate_bits_per_s: float, seed: int) -> None:
    story, chance = Story(made(rate_bits_per_s=rate_bits_per_s, delay_s=0.05)), random.Random(seed)
    for _ in range(80):
        story.now_s += chance.expovariate(200)  # polls come late, and more is there at once
        story.send(chance.randrange(3), chance.randrange(1, 100_000))
        story.poll()
    story.now_s += 1000
    story.poll()
    # at each arrival, what came since any other one: the largest excess over the rate, as of a leaky bucket
    excess, last_s = 0.0, 0.0
    for each in story.arrived:
        excess = max(0.0, excess - rate_bits_per_s / 8 * (each.at_s - last_s)) + len(each.data)
        assert excess <= story.link.conditions.piece_bytes * (1 + 1e-6)
        last_s = each.at_s


@given(st.lists(st.floats(0, 0.05), min_size=10, max_size=40))
@settings(max_examples=50)
def test_a_backlogged_link_is_never_idle(gaps_s: list[float]) -> None:
    # the queue holds 105 ms, so anyone who comes at least every 50 ms and fills it keeps the link busy
    story = Story(made(rate_bits_per_s=5 * MBIT))
    story.send(0, MIN_QUEUE_BYTES)
    for gap_s in gaps_s:
        story.now_s += gap_s
        story.poll()
        story.send(0, MIN_QUEUE_BYTES)
    assert len(story.got("a")) == pytest.approx(story.now_s * 5 * MBIT / 8, abs=story.link.conditions.piece_bytes)


@given(st.integers(2, 6), st.integers(0, 2**32))
@settings(max_examples=50)
def test_backlogged_flows_of_a_class_get_equal_shares(count: int, seed: int) -> None:
    chance, now_s = random.Random(seed), 0.0
    link = made(rate_bits_per_s=20 * MBIT)
    flows = [flow(str(i)) for i in range(count)]
    for each in flows:
        link.enter(0.0, each, bytes(40_000))
    got = dict.fromkeys(map(str, range(count)), 0)
    for _ in range(50):
        now_s += chance.uniform(0, 0.002)
        for delivery in link.poll(now_s):
            got[delivery.flow.receiver] += len(delivery.data)
        for each in flows:  # as large or as small as their writes may be, all of them always have something
            if each.queued_bytes < 30_000:
                link.enter(now_s, each, bytes(chance.choice([10, 1000, 30_000])))
        if any(each.queued_bytes == 0 for each in flows):
            return
    assert max(got.values()) - min(got.values()) <= 2 * link.conditions.piece_bytes


@given(st.floats(1e6, 2e8), st.floats(0, 0.1), st.lists(st.floats(0, 0.3), min_size=1, max_size=20))
@settings(max_examples=50)
def test_control_waits_for_no_more_than_what_is_on_its_way_out(rate: float, delay_s: float, at: list[float]) -> None:
    conditions = LinkConditions(rate, delay_s)
    link, bulk, heartbeat = made(conditions), flow("bulk"), flow("heartbeat", "control")
    link.enter(0.0, bulk, bytes(int(rate / 8)))  # a second of bulk
    for at_s in sorted(at):
        link.enter(at_s, heartbeat, bytes(100))
    sent = iter(sorted(at))
    allowed_s = conditions.serialisation_s(conditions.piece_bytes + 100 * len(at)) + delay_s
    heartbeats = [each for each in run(link, 2.0) if each.flow is heartbeat]
    assert len(heartbeats) == len(at)
    for each in heartbeats:
        assert each.at_s <= next(sent) + allowed_s + 1e-9


def test_the_same_calls_draw_the_same_jitter() -> None:
    def arrivals() -> list[float]:
        link, one = made(replace(LinkConditions(), delay_s=0.05, jitter_s=0.01)), flow()
        for i in range(20):
            link.enter(float(i), one, b"x")
        return times(link.poll(100.0))

    assert arrivals() == arrivals()
