"""Which syncer owns which fragments, and who is alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.made.heartbeats import shard_heartbeat

from diloco.core.syncer.ownership import FIRST_TABLE_S, UNEVEN, Ownership, OwnersTable, plan
from diloco.wire.control import ShardHeartbeat

TAKEOVER_S = 1.5
AWAY_S = 6.0
NAMES = [f"s{i}" for i in range(6)]
SIZES = [4, 4, 2, 2]


def loads(table: OwnersTable, sizes: Sequence[int]) -> dict[str, int]:
    found = dict.fromkeys(table.holders, 0)
    for owner, size in zip(table.owners, sizes, strict=True):
        found[owner] += size
    return found


# ---- the plan


def test_the_first_table_deals_largest_first_to_the_emptiest() -> None:
    # 8 to a, 7 to b, 6 to b (13), 5 to a (13), 4 to a, the first of two as full
    table = plan(None, {"b", "a"}, [8, 7, 6, 5, 4], 2)
    assert table == OwnersTable(["a", "b"], ["a", "b", "b", "a", "a"])


def test_more_syncers_than_places_stand_by() -> None:
    table = plan(None, {"c", "b", "a"}, SIZES, 2)
    assert table is not None
    assert table.holders == ["a", "b"]
    assert plan(table, {"c", "b", "a"}, SIZES, 2) is None


def test_a_standby_gets_all_that_a_dead_holder_had_and_nothing_else_moves() -> None:
    table = OwnersTable(["a", "b"], ["a", "b", "a", "b"])
    assert plan(table, {"b", "c"}, SIZES, 2) == OwnersTable(["b", "c"], ["c", "b", "c", "b"])


def test_without_a_standby_the_other_holders_share_what_a_dead_one_had() -> None:
    table = OwnersTable(["a", "b", "c"], ["a", "b", "a", "c"])
    # b has 4, c has 2: the larger of a's, 4, to c (6), the smaller, 2, to b (6)
    assert plan(table, {"b", "c"}, SIZES, 3) == OwnersTable(["b", "c"], ["c", "b", "b", "c"])


def test_one_that_joins_is_given_what_makes_bytes_even() -> None:
    table = OwnersTable(["a", "b"], ["a", "a", "a", "b", "b", "b"])
    # 9, 9, 0: of a 3 (6, 9, 3), of b 3 (6, 6, 6)
    assert plan(table, {"a", "b", "c"}, [3] * 6, 3) == OwnersTable(["a", "b", "c"], ["c", "a", "a", "c", "b", "b"])


def test_what_is_even_enough_stays() -> None:
    # 102 and 98: 4 of 100 is less than a tenth
    assert plan(OwnersTable(["a", "b"], ["a", "a", "b"]), {"a", "b"}, [100, 2, 98], 2) is None
    # 112 and 100, a difference of 12 of 106; to move 2 would be right, to move 10 would turn it round
    assert plan(OwnersTable(["a", "b"], ["a", "a", "b"]), {"a", "b"}, [102, 10, 100], 2) is None
    assert plan(OwnersTable(["a", "b"], ["a", "a", "b"]), {"a", "b"}, [110, 2, 100], 2) == OwnersTable(
        ["a", "b"], ["a", "b", "b"]
    )


def test_a_returned_holder_whose_place_is_taken_stands_by() -> None:
    taken = OwnersTable(["b", "c"], ["c", "b", "c", "b"])
    assert plan(taken, {"a", "b", "c"}, SIZES, 2) is None


def test_nobody_alive_no_plan() -> None:
    assert plan(OwnersTable(["a"], ["a"] * 4), set(), SIZES, 1) is None


REGIONS = {"ap0": "ap", "ap1": "ap", "eu0": "eu", "eu1": "eu", "us0": "us"}


def test_each_region_has_a_holder_before_one_has_two() -> None:
    table = plan(None, REGIONS, SIZES, 3, REGIONS)
    assert table is not None
    assert table.holders == ["ap0", "eu0", "us0"]
    table = plan(None, REGIONS, SIZES, 4, REGIONS)
    assert table is not None
    assert table.holders == ["ap0", "eu0", "us0", "ap1"]


def test_a_standby_of_the_same_region_takes_a_dead_holders_place() -> None:
    table = OwnersTable(["ap0", "eu0", "us0"], ["ap0", "eu0", "us0", "us0"])
    planned = plan(table, {"ap0", "ap1", "eu1", "us0"}, SIZES, 3, REGIONS)
    assert planned == OwnersTable(["ap0", "us0", "eu1"], ["ap0", "eu1", "us0", "us0"])


def test_a_region_that_returns_gets_its_share_back_from_one_that_has_two() -> None:
    away = plan(OwnersTable(["ap0", "eu0", "us0"], ["ap0", "eu0", "us0", "us0"]), {"ap0", "ap1", "us0"}, SIZES, 3, REGIONS)
    assert away is not None
    assert away.holders == ["ap0", "us0", "ap1"]
    back = plan(away, set(REGIONS), SIZES, 3, REGIONS)
    assert back is not None
    assert back.holders == ["ap0", "us0", "eu0"]
    assert plan(back, set(REGIONS), SIZES, 3, REGIONS) is None


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=30),
    st.sets(st.sampled_from(NAMES), min_size=1),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(0, 2**30)),
    st.data(),
)
def test_plans(sizes: list[int], live: set[str], shards: int, before: int | None, data: st.DataObject) -> None:
    table = None
    if before is not None:
        holders = data.draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=shards))
        owners = data.draw(st.lists(st.sampled_from(NAMES), min_size=len(sizes), max_size=len(sizes)))
        table = OwnersTable(holders, owners)
    planned = plan(table, live, sizes, shards)
    after = planned or table
    assert after is not None
    assert planned != table
    # as many of the living as may share the fragments do, and everything has an owner among them
    assert len(after.holders) == len(set(after.holders)) == min(shards, len(live))
    assert set(after.owners) <= set(after.holders) <= live
    # who holds a place and lives keeps it
    assert {name for name in (table.holders if table else []) if name in live} <= set(after.holders)
    # bytes are as even as the fragments allow
    filled = loads(after, sizes)
    margin = UNEVEN * sum(sizes) / len(after.holders)
    assert max(filled.values()) - min(filled.values()) <= max(sizes) + margin
    # everybody plans the same, and what was planned needs no change
    assert plan(after, live, sizes, shards) is None
    assert plan(table, sorted(live, reverse=True), sizes, shards) == planned


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.sets(st.sampled_from(NAMES), min_size=2), st.data())
def test_a_death_moves_only_what_the_dead_had_if_a_standby_is_there(sizes: list[int], live: set[str], data: Any) -> None:
    shards = len(live) - 1
    table = plan(None, live, sizes, shards)
    assert table is not None
    dead = data.draw(st.sampled_from(table.holders))
    after = plan(table, live - {dead}, sizes, shards)
    if after is None:  # it had nothing and its place stays empty
        assert dead not in table.owners
        return
    moved = sum(size for size, was, is_ in zip(sizes, table.owners, after.owners, strict=True) if was != is_ and was != dead)
    # the first deal may have been uneven by a fragment, which the new one may better
    assert moved <= 2 * max(sizes)


# ---- who is alive, by one's own clock


class Watch:
    """One syncer's view, driven by hand: it heartbeats to itself as often as it should unless it is frozen or cut off."""

    def __init__(
        self, name: str = "s0", shards: int = 2, sizes: Sequence[int] = SIZES, regions: Mapping[str, str] | None = None
    ) -> None:
        self.regions = dict(regions or {})
        self.own = Ownership(name, 1, sizes, shards, TAKEOVER_S, self.regions.get(name, ""), AWAY_S)
        self.now_s = 100.0
        self.numbers: dict[str, int] = {}
        self.talking: set[str] = {name}
        self.lists: dict[str, list[int]] = {}
        self.revisions: dict[str, int] = {}
        self.tick()

    def heartbeat(self, name: str, **changes: Any) -> ShardHeartbeat:
        self.numbers[name] = self.numbers.get(name, 0) + 1
        usual: dict[str, Any] = {
            "region": self.regions.get(name, ""),
            "revision": self.revisions.get(name, 0),
            "fragments": self.lists.get(name, []),
        }
        return shard_heartbeat(name, self.numbers[name], **(usual | changes))

    def tick(self) -> None:
        for name in sorted(self.talking):
            self.own.hear(self.heartbeat(name), self.now_s)

    def run(self, duration_s: float) -> None:
        ends_s = self.now_s + duration_s
        while self.now_s + self.own.heartbeat_s <= ends_s + 1e-9:
            self.now_s += self.own.heartbeat_s
            self.tick()
        self.now_s = ends_s

    def table(self, owners: str, holders: str = "01", revision: int = 5) -> None:
        """``"0011"``: fragments 0 and 1 are s0's, 2 and 3 are s1's."""
        table = OwnersTable([f"s{c}" for c in holders], [f"s{c}" for c in owners])
        self.own.read(table, revision, self.now_s - 100)
        self.own.read(table, revision, self.now_s)


def test_who_is_silent_for_takeover_s_is_gone_and_its_fragments_go_to_a_standby() -> None:
    watch = Watch("s2")
    watch.talking |= {"s0", "s1"}
    watch.table("0101")
    watch.run(10)
    assert watch.own.propose(watch.now_s) is None
    watch.talking.remove("s0")
    watch.run(TAKEOVER_S - 0.25)
    assert watch.own.live(watch.now_s) == {"s0", "s1", "s2"}
    watch.run(0.25)
    assert watch.own.live(watch.now_s) == {"s1", "s2"}
    assert watch.own.propose(watch.now_s) == OwnersTable(["s1", "s2"], ["s2", "s1", "s2", "s1"])


def test_a_region_of_which_nobody_is_heard_has_longer_than_one_of_its_syncers() -> None:
    watch = Watch("us0", regions={"us0": "us", "eu0": "eu", "eu1": "eu"})
    watch.talking |= {"eu0", "eu1"}
    watch.run(10)
    watch.talking.remove("eu0")  # eu1 is heard: it is the process
    watch.run(TAKEOVER_S)
    assert watch.own.live(watch.now_s) == {"us0", "eu1"}
    watch.talking.remove("eu1")
    watch.run(AWAY_S - 0.25)
    assert watch.own.live(watch.now_s) == {"us0", "eu1"}
    assert watch.own.inhabited(watch.now_s) == {"us", "eu"}
    watch.run(0.25)
    assert watch.own.live(watch.now_s) == {"us0"}
    assert watch.own.inhabited(watch.now_s) == {"us"}


def test_a_region_that_returns_is_given_nothing_before_it_has_had_time_to_catch_up() -> None:
    watch = Watch("us0", regions={"us0": "us", "eu0": "eu", "ap0": "ap"}, shards=3)
    watch.talking |= {"ap0"}
    watch.own.read(OwnersTable(["ap0", "us0"], ["ap0", "us0", "us0", "ap0"]), 1, watch.now_s)
    watch.run(10 * AWAY_S)
    assert watch.own.propose(watch.now_s) is None
    watch.talking.add("eu0")
    watch.run(2 * AWAY_S)  # the first heartbeat comes one interval later
    assert watch.own.propose(watch.now_s) is None
    watch.run(watch.own.heartbeat_s)
    table = watch.own.propose(watch.now_s)
    assert table is not None
    assert table.holders == ["ap0", "us0", "eu0"]
    watch.talking.remove("ap0")  # but a fragment without an owner is given to one that is there
    watch.run(AWAY_S)
    table = watch.own.propose(watch.now_s)
    assert table is not None
    assert set(table.owners) == {"us0", "eu0"}


def test_who_is_silent_in_the_own_region_is_gone_at_once() -> None:
    watch = Watch("us0", regions={"us0": "us", "us1": "us"})
    watch.talking |= {"us1"}
    watch.run(10)
    watch.talking.remove("us1")
    watch.run(TAKEOVER_S)
    assert watch.own.live(watch.now_s) == {"us0"}


def test_keyframes_are_one_syncers_of_each_region_and_the_owners_in_its_own() -> None:
    regions = {"eu0": "eu", "eu1": "eu", "us0": "us"}
    watches = {name: Watch(name, regions=regions) for name in regions}
    kept: dict[str, list[int]] = {}
    for name, watch in watches.items():
        watch.talking |= set(regions)
        watch.own.read(OwnersTable(["eu1", "us0"], ["eu1", "us0", "us0", "eu1"]), 1, watch.now_s)
        watch.run(1)
        kept[name] = [fragment for fragment in range(4) if watch.own.keeps(fragment, watch.now_s)]
    assert kept == {"eu0": [1, 2], "eu1": [], "us0": [0, 3]}


def test_a_frozen_syncer_that_goes_on_hears_the_others_again_before_it_thinks_them_gone() -> None:
    watch = Watch("s1")
    watch.talking |= {"s0"}
    watch.table("0101")
    watch.run(5)
    watch.now_s += 60  # frozen
    assert watch.own.propose(watch.now_s) is None
    watch.talking.remove("s0")
    watch.tick()
    watch.run(TAKEOVER_S - 0.25)
    assert watch.own.propose(watch.now_s) is None
    watch.run(0.25)
    assert watch.own.propose(watch.now_s) == OwnersTable(["s1"], ["s1"] * 4)


def test_while_its_own_heartbeats_do_not_come_back_nobody_is_gone() -> None:
    watch = Watch("s1")
    watch.talking |= {"s0"}
    watch.table("0101")
    watch.run(5)
    watch.talking.clear()  # the server is away
    watch.run(30)
    assert watch.own.live(watch.now_s) == {"s0", "s1"}
    watch.talking |= {"s0", "s1"}
    watch.run(5)
    assert watch.own.propose(watch.now_s) is None


def test_a_holder_that_was_never_heard_gets_as_long_as_the_others() -> None:
    watch = Watch("s1")
    watch.table("0101")
    watch.run(TAKEOVER_S - 0.25)
    assert watch.own.propose(watch.now_s) is None
    watch.run(0.25)
    assert watch.own.propose(watch.now_s) == OwnersTable(["s1"], ["s1"] * 4)


def test_there_are_no_more_holders_than_fragments() -> None:
    watch = Watch(shards=4, sizes=[5, 3])
    watch.talking |= {"s1", "s2"}
    watch.tick()
    # so that two syncers are waited for, and have one each
    assert watch.own.propose(watch.now_s) == OwnersTable(["s0", "s1"], ["s0", "s1"])
    watch.own.change(3, TAKEOVER_S, AWAY_S)
    assert watch.own.shards == 2


def test_the_first_table_waits_for_all_shards_or_a_while() -> None:
    watch = Watch("s0")
    watch.own.read(None, 0, watch.now_s)
    watch.run(FIRST_TABLE_S - 0.25)
    assert watch.own.propose(watch.now_s) is None
    watch.talking.add("s1")
    watch.run(0.25)
    first = watch.own.propose(watch.now_s)
    assert first is not None
    assert first.holders == ["s0", "s1"]

    alone = Watch("s0")
    alone.own.read(None, 0, alone.now_s)
    alone.run(FIRST_TABLE_S)
    assert alone.own.propose(alone.now_s) == OwnersTable(["s0"], ["s0"] * 4)


def test_one_that_joins_waits_until_the_table_has_been_still() -> None:
    watch = Watch("s0")
    watch.own.read(OwnersTable(["s0"], ["s0"] * 4), 5, watch.now_s)  # just set
    watch.talking.add("s1")
    watch.run(2 * TAKEOVER_S - 0.25)
    assert watch.own.propose(watch.now_s) is None
    watch.run(0.25)
    planned = watch.own.propose(watch.now_s)
    assert planned is not None
    assert loads(planned, SIZES) == {"s0": 6, "s1": 6}


def test_one_that_leaves_is_planned_without_at_once_and_keeps_what_nobody_else_could_have() -> None:
    watch = Watch("s0")
    watch.talking.add("s1")
    watch.table("0101")
    watch.own.read(watch.own.table, 6, watch.now_s)
    watch.run(0.5)
    watch.own.leaving = True
    assert watch.own.propose(watch.now_s) == OwnersTable(["s1"], ["s1"] * 4)
    assert watch.own.mine(watch.now_s) == {0, 2}
    watch.own.hear(watch.heartbeat("s1", state="leaving"), watch.now_s)
    assert watch.own.propose(watch.now_s) is None
    assert watch.own.mine(watch.now_s) == set()  # so that they are given up, with a keyframe


def test_one_from_which_nothing_can_be_committed_is_heard_and_loses_its_fragments_to_others() -> None:
    regions = {"s0": "us", "s1": "eu", "s2": "ap"}
    stuck, other = Watch("s0", regions=regions), Watch("s1", regions=regions)
    for watch in (stuck, other):
        watch.talking |= set(regions)
        watch.lists["s0"] = [0, 2]
        watch.table("0101")
        watch.run(5)
    stuck.own.reach(commits=False, now_s=stuck.now_s)
    stuck.run(AWAY_S - 0.25)
    stuck.own.reach(commits=False, now_s=stuck.now_s)
    assert not stuck.own.unable(stuck.now_s)
    stuck.run(0.25)
    assert stuck.own.unable(stuck.now_s)
    assert stuck.own.live(stuck.now_s) == {"s1", "s2"}

    assert not other.own.may_take(0, other.now_s)
    other.own.hear(other.heartbeat("s0", state="unable"), other.now_s)
    assert other.own.live(other.now_s) == {"s1", "s2"}
    planned = other.own.propose(other.now_s)
    assert planned is not None
    assert set(planned.owners) == {"s1", "s2"}
    assert planned == stuck.own.propose(stuck.now_s)  # it sees to it itself, if it is the first
    assert other.own.may_take(0, other.now_s)  # though s0 still says that it owns it

    stuck.own.reach(commits=True, now_s=stuck.now_s)
    assert not stuck.own.unable(stuck.now_s)
    assert stuck.own.live(stuck.now_s) == {"s0", "s1", "s2"}


def test_where_nobody_can_commit_anything_all_stays_as_it_is() -> None:
    watch = Watch("s0")
    watch.table("0101")
    watch.talking |= {"s1"}
    watch.run(5)
    watch.own.reach(commits=False, now_s=watch.now_s)
    watch.talking.remove("s1")
    watch.own.hear(watch.heartbeat("s1", state="unable"), watch.now_s)
    watch.now_s += AWAY_S
    watch.talking = {"s0"}
    watch.run(1)
    assert watch.own.propose(watch.now_s) is None
    assert watch.own.mine(watch.now_s) == {0, 2}


def test_a_fragment_is_taken_when_nobody_alive_owns_it() -> None:
    watch = Watch("s1")
    watch.talking.add("s0")
    watch.lists["s0"] = [0, 2]
    watch.table("1111", "1")
    watch.run(1)
    assert [f for f in range(4) if watch.own.may_take(f, watch.now_s)] == [1, 3]
    # after a freeze it does not know what others have taken meanwhile, until it has heard their heartbeats
    watch.now_s += 10
    watch.tick()
    watch.run(0.25)
    assert not watch.own.may_take(1, watch.now_s)
    watch.run(0.25)
    assert watch.own.may_take(1, watch.now_s)
    watch.lists["s0"] = [2]
    watch.run(0.25)
    assert watch.own.may_take(0, watch.now_s)
    watch.talking.remove("s0")
    watch.run(TAKEOVER_S)
    assert watch.own.may_take(2, watch.now_s)
    watch.own.distrust()
    assert not watch.own.may_take(2, watch.now_s)
    watch.table("1111", "1")
    watch.own.hear(watch.heartbeat("s2", fragments=[2], closed=[2]), watch.now_s)
    assert not watch.own.may_take(2, watch.now_s)
    watch.own.hear(watch.heartbeat("s2"), watch.now_s)
    assert watch.own.may_take(2, watch.now_s)  # closed or not: whom the table gives it to has to see for itself


def test_whose_log_is_closed_is_its_owners_to_say() -> None:
    watch = Watch("s1")
    watch.table("0111", "01")

    def closed_after(name: str, **heartbeat: list[int]) -> set[int]:
        watch.own.hear(watch.heartbeat(name, **heartbeat), watch.now_s)
        return watch.own.closed_elsewhere

    assert closed_after("s2", fragments=[0, 1], closed=[0, 1]) == set()  # it has yet to hand them over
    assert closed_after("s0", fragments=[0], closed=[0]) == {0}
    assert closed_after("s2", closed=[]) == {0}
    assert closed_after("s0", fragments=[0], closed=[]) == set()  # the entry was lost with a server's last writes
    assert closed_after("s0", fragments=[0], closed=[0]) == {0}
    watch.table("2111", "12", revision=6)
    assert watch.own.closed_elsewhere == set()  # s0 looks after it no more
    assert closed_after("s2", fragments=[0], closed=[0]) == {0}
    watch.table("1111", "1", revision=7)
    assert watch.own.closed_elsewhere == set()  # it is s1's own to see


def test_repeated_and_late_heartbeats_say_nothing() -> None:
    watch = Watch("s1")
    old = watch.heartbeat("s0", fragments=[0])
    new = watch.heartbeat("s0", fragments=[])
    watch.table("1111", "1")
    assert watch.own.hear(new, watch.now_s)
    for _ in range(8):
        watch.run(0.25)
        assert not watch.own.hear(old, watch.now_s)
        assert not watch.own.hear(new, watch.now_s)
    assert watch.own.may_take(0, watch.now_s)
    assert watch.own.live(watch.now_s) == {"s1"}
    # one that was started again after its clock was set back is heard once the one before is gone
    assert watch.own.hear(watch.heartbeat("s0", incarnation=0), watch.now_s)
    assert watch.own.live(watch.now_s) == {"s0", "s1"}


def test_the_table_is_read_when_somebody_knows_a_newer_one_and_now_and_then() -> None:
    watch = Watch("s1")
    watch.table("0101", revision=5)
    assert not watch.own.must_read(watch.now_s)
    watch.own.hear(watch.heartbeat("s0", revision=6), watch.now_s)
    assert watch.own.must_read(watch.now_s)
    watch.own.read(watch.own.table, 5, watch.now_s)  # the server has lost it: not asked for again and again
    assert not watch.own.must_read(watch.now_s)
    watch.now_s += 2
    assert watch.own.must_read(watch.now_s)


@pytest.mark.parametrize(("incarnation", "replaced"), [(2, True), (0, False)])
def test_of_two_processes_with_one_name_the_older_gives_up(incarnation: int, replaced: bool) -> None:
    watch = Watch("s0")
    for number in range(1, 5):
        assert not watch.own.replaced
        watch.own.hear(watch.heartbeat("s0", incarnation=incarnation, number=number), watch.now_s)
        watch.own.hear(watch.heartbeat("s0", incarnation=incarnation, number=number), watch.now_s)  # repeated: no other sign
    assert watch.own.replaced == replaced


def test_names_without_end_take_no_memory_without_end() -> None:
    watch = Watch("s0")
    for number in range(3000):
        watch.own.hear(watch.heartbeat(f"x{number}"), watch.now_s)
    assert len(watch.own.live(watch.now_s)) <= 1025
    watch.run(TAKEOVER_S)
    assert watch.own.hear(watch.heartbeat("s1"), watch.now_s)  # the silent ones made place
    assert watch.own.live(watch.now_s) == {"s0", "s1"}
