"""Leases of data shares: who gets which, what a steward changes, and what holds whatever happens."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core import leases
from diloco.core.leases import BLOCK_BATCHES, Lease, Rota, Shares, Steward
from diloco.errors import FormatError
from diloco.wire.messages import Pulse

LEASE_S = 30.0


def pulse(learner: str, incarnation: int = 1, role: str = "learner") -> Pulse:
    values: dict[str, Any] = dict.fromkeys(Pulse.__struct_fields__, 0)
    values |= {"learner": learner, "incarnation": incarnation, "role": role, "state": "stepping", "sending": False}
    values |= {"region": "", "software": ""} | {
        name: [] for name in ("versions", "steps", "fragment_tokens", "lost_tokens", "trained")
    }
    return Pulse(**values)


def joined(table: Shares, learner: str, preferred: int | None = None, incarnation: int = 1, **ends: int) -> Shares:
    """``table`` with a learner more; ``s0=5``: the log has merged share 0 up to batch 5."""
    merged = {int(share[1:]): end for share, end in ends.items()}
    return leases.join(table, learner, incarnation, preferred, merged) or table


def holders(table: Shares) -> list[str | None]:
    return [lease.holder for lease in table.leases]


def test_each_learner_gets_the_share_that_it_prefers() -> None:
    table = leases.begin(3)
    for learner, preferred in (("cat", 2), ("ann", 0), ("bob", 1)):
        table = joined(table, learner, preferred)
    assert holders(table) == ["ann", "bob", "cat"]


def test_who_prefers_a_share_that_is_held_gets_a_free_one_and_then_another_lap() -> None:
    table = joined(joined(leases.begin(2), "ann", 1), "bob", 1)
    assert holders(table) == ["bob", "ann"]
    table = joined(joined(table, "cat", 1), "dan")
    assert holders(table) == ["bob", "ann", "cat", "dan"]
    # of the same two texts, each lap in another order
    orders = [leases.data_of(share, 2, 7) for share in range(6)]
    assert [part for part, _ in orders] == [0, 1, 0, 1, 0, 1]
    assert orders[0][1] == orders[1][1] == 7
    assert len({seed for _, seed in orders}) == 3


def test_who_returns_finds_its_shares_as_they_were() -> None:
    table = joined(joined(leases.begin(2), "ann", 0), "bob", 1)
    again = joined(table, "ann", preferred=1, incarnation=9, s0=40, s1=3)
    assert again.leases == [Lease(0, "ann", 9, 40), Lease(1, "bob", 1, 0)]
    assert leases.join(again, "ann", 9, 1, {0: 40}) is None


def test_a_share_goes_on_where_the_furthest_of_table_and_log_is() -> None:
    table = leases.free(joined(leases.begin(1), "ann"), [0], {0: 25})
    assert table is not None
    assert table.leases == [Lease(0, None, 1, 25)]
    assert joined(table, "bob", s0=20).leases == [Lease(0, "bob", 1, 25)]
    assert joined(table, "bob", s0=31).leases == [Lease(0, "bob", 1, 31)]
    freed = leases.free(joined(table, "bob", s0=31), [0], {0: 7})
    assert freed is not None
    assert freed.leases[0].next == 31


def test_a_learner_with_a_further_lap_claims_a_free_share_of_the_run_and_lets_the_lap_go() -> None:
    table = joined(joined(leases.begin(1), "ann"), "bob")
    assert holders(table) == ["ann", "bob"]
    assert leases.claim(table, "bob", 1, 1, {}) is None
    table = leases.free(table, [0], {0: 12}) or table
    table = leases.claim(table, "bob", 1, 1, {0: 15}) or table
    assert table.leases == [Lease(0, "bob", 1, 15), Lease(1, "bob", 1, 0)]
    assert leases.surplus(table, "bob", 1) == 1
    table = leases.free(table, [1], {1: 3}) or table
    assert leases.surplus(table, "bob", 1) is None


def test_who_holds_several_shares_lets_one_go_for_a_learner_that_has_none_of_them() -> None:
    table = Shares([Lease(0, "ann", 1, 0), Lease(1, "bob", 1, 0), Lease(2, "ann", 1, 0)])
    assert leases.surplus(table, "ann", 3) is None
    table = joined(table, "cat")
    assert holders(table) == ["ann", "bob", "ann", "cat"]
    assert leases.surplus(table, "ann", 3) == 2
    assert leases.surplus(table, "bob", 3) is None
    # another share is free already: that one is to be claimed first
    assert leases.surplus(leases.free(table, [1], {}) or table, "ann", 3) is None


# ---- the steward


def test_a_silent_learners_share_goes_to_the_living_one_with_the_fewest() -> None:
    table = Shares([Lease(i, name, 1, 0) for i, name in enumerate(("ann", "ann", "bob", "cat"))])
    steward = Steward(4, LEASE_S)
    for now_s in range(30):
        for learner in ("ann", "bob"):
            steward.hear(pulse(learner, incarnation=5), now_s)
        assert steward.look(table, {3: 17}, now_s) is None
    # cat was never heard: its time runs from the first look on. Its share goes on behind what was merged.
    changed = steward.look(table, {3: 17}, 30)
    assert changed is not None
    assert changed.leases == [*table.leases[:3], Lease(3, "bob", 5, 17)]


def test_a_free_share_waits_for_a_learner_that_has_yet_to_join() -> None:
    table = joined(leases.begin(2), "ann", 0)
    steward = Steward(2, LEASE_S)
    for now_s in range(100, 130):
        steward.hear(pulse("ann"), now_s)
        assert steward.look(table, {}, now_s) is None
    steward.hear(pulse("ann"), 130)
    changed = steward.look(table, {}, 130)
    assert changed is not None
    assert holders(changed) == ["ann", "ann"]


def test_a_steward_that_slept_or_hears_nobody_takes_nothing_away() -> None:
    table = joined(leases.begin(1), "ann", 0)
    steward = Steward(1, LEASE_S)
    steward.hear(pulse("ann"), 0)
    steward.hear(pulse("eva", role="evaluator"), 0)
    assert steward.look(table, {}, 1) is None
    assert steward.look(table, {}, 500) is None  # frozen in between
    for now_s in range(501, 530):
        assert steward.look(table, {}, now_s) is None
    changed = steward.look(table, {}, 530)  # awake all the time, and still nothing heard: free, as nobody else lives
    assert changed is not None
    assert holders(changed) == [None]


def test_one_learner_holds_so_many_shares_at_most() -> None:
    table = joined(leases.begin(100), "ann", 0)
    steward = Steward(100, LEASE_S)
    for now_s in range(40):
        steward.hear(pulse("ann"), now_s)
        table = steward.look(table, {}, now_s) or table
    assert len(table.held()["ann"]) == leases.MAX_HELD


# ---- the table's bytes


def test_the_table_there_and_back() -> None:
    table = Shares([Lease(0, None, 0, 0), Lease(1, "ann", 2**50, 2**40)])
    assert leases.unpack(table.pack()) == table


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        msgspec.msgpack.encode([[[1, None, 0, 0]]]),
        msgspec.msgpack.encode([[[0, None, 0, 0], [0, None, 0, 0]]]),
        msgspec.msgpack.encode([[[0, "A B", 0, 0]]]),
        msgspec.msgpack.encode([[[0, None, 0, -1]]]),
        msgspec.msgpack.encode([[[0, None, 0]]]),
    ],
)
def test_what_is_no_table_is_refused(value: bytes) -> None:
    with pytest.raises(FormatError, match="the table of data shares"):
        leases.unpack(value)


# ---- the rota


def test_one_share_gives_its_batches_in_order() -> None:
    rota = Rota()
    assert [rota.next({2: 5}) for _ in range(20)] == [(2, 5 + i) for i in range(20)]


def test_several_shares_take_turns_in_blocks() -> None:
    rota, held = Rota(), {1: 100, 4: 7}
    dealt = [rota.next(held) for _ in range(3 * BLOCK_BATCHES)]
    assert dealt == [(1, 100 + i) for i in range(8)] + [(4, 7 + i) for i in range(8)] + [(1, 108 + i) for i in range(8)]


def test_a_share_taken_away_ends_its_block_and_none_at_all_goes_on_with_the_last() -> None:
    rota = Rota()
    assert [rota.next({0: 0, 1: 0}) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert [rota.next({1: 0}) for _ in range(2)] == [(1, 0), (1, 1)]
    assert [rota.next({}) for _ in range(2)] == [(1, 2), (1, 3)]
    # leased again, further on: others were there meanwhile; leased as before: it goes on
    assert rota.next({0: 9}) == (0, 9)
    assert rota.next({0: 9}) == (0, 10)


# ---- whatever happens


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.data())
def test_no_share_has_two_holders_none_stays_orphaned_and_no_position_goes_back(learners: int, data: st.DataObject) -> None:
    """Learners that join, leave, die, return and look at the table, beside a steward that may be away for a while."""
    table, steward, now_s, merged = leases.begin(learners), Steward(learners, LEASE_S), 0.0, Counter[int]()
    alive: dict[str, int] = {}  # the incarnation
    joins = itertools.count(1)
    stewardless_until_s = 0.0

    def settle(changed: Shares | None) -> None:
        nonlocal table
        if changed is None:
            return
        assert changed != table
        for old, new in zip(table.leases, changed.leases, strict=False):
            assert new.next >= old.next
            if old.holder != new.holder and new.holder is not None:
                assert new.next >= merged[new.share]
                # nobody who lives and is heard loses a share to another one
                assert old.holder is None or old.holder not in alive
        assert len(changed.leases) >= len(table.leases)
        table = changed

    def look(learner: str) -> None:
        settle(leases.claim(table, learner, alive[learner], learners, merged))
        share = leases.surplus(table, learner, learners)
        if share is not None:
            settle(leases.free(table, [share], {share: merged[share] + 3}))

    for _ in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(["join", "die", "leave", "wait", "merge", "coordinator dies"]))
        name = data.draw(st.sampled_from("abcdef"))
        if act == "join" and name not in alive:
            alive[name] = next(joins)
            settle(leases.join(table, name, alive[name], data.draw(st.none() | st.integers(0, 5)), merged))
            assert table.held_by(name)
        elif act == "die":
            alive.pop(name, None)
        elif act == "leave" and name in alive:
            del alive[name]
            settle(leases.free(table, table.held().get(name, []), merged))
        elif act == "merge":
            share = data.draw(st.integers(0, len(table.leases) - 1))
            merged[share] += 5
        elif act == "coordinator dies":
            steward, stewardless_until_s = Steward(learners, LEASE_S), now_s + data.draw(st.integers(0, 100))
        for _ in range(data.draw(st.integers(1, 40)) if act == "wait" else 1):
            now_s += 1
            for learner, incarnation in alive.items():
                look(learner)
                steward.hear(pulse(learner, incarnation), now_s)
            if now_s >= stewardless_until_s:
                settle(steward.look(table, merged, now_s))
    for _ in range(round(4 * LEASE_S) + 120):
        now_s += 1
        for learner, incarnation in alive.items():
            look(learner)
            steward.hear(pulse(learner, incarnation), now_s)
        settle(steward.look(table, merged, now_s))
    if alive:
        own = table.leases[:learners]
        assert all(lease.holder in alive for lease in own)
        assert set(table.held()) == set(alive)
        if len(alive) >= learners:
            assert len({lease.holder for lease in own}) == learners
