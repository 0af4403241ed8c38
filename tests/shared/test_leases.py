"""Leases of data shares: what claims fold to, who takes which, and what holds whatever happens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.core.run import leases
from diloco.core.run.leases import BLOCK_BATCHES, ClaimedShare, LeaseWatch, RoundRobin, ShareClaim, Shares
from diloco.core.syncer import claims
from diloco.errors import ClaimError, FormatError, MessageError
from diloco.settings.run import ContinuedRun, RunSettings

LEASE_S = 30.0
RUN = RunSettings(learners=2)
OWN = claims.StepBounds()


class Bucket:
    """All learners' claims, and the revision that the server gave last."""

    def __init__(self, learners: int) -> None:
        self.learners, self.revision = learners, 0
        self.claims: dict[str, ShareClaim] = {}

    @property
    def table(self) -> Shares:
        return leases.fold(self.claims, self.learners)

    def put(self, claim: ShareClaim) -> None:
        self.revision += 1
        settings = RunSettings(learners=self.learners)
        self.claims[claim.learner] = leases.unpack(claim.pack(), claim.learner, self.revision, settings, OWN)

    def change(
        self,
        learner: str,
        take: Collection[int] = (),
        free: Collection[int] = (),
        table: Shares | None = None,
        **positions: int,
    ) -> None:
        """Have a learner take and free shares; ``s0=5``: of share 0, batch 5. ``table``: as it read it, if that was before."""
        claim = self.claims.get(learner) or ShareClaim(learner, 1, [])
        batches = {int(share[1:]): batch for share, batch in positions.items()}
        changed = leases.revised(table or self.table, claim, take=take, free=free, positions=batches)
        if changed is not None:
            self.put(changed)

    def join(self, learner: str, preferred: int | None = None, **ends: Any) -> None:
        self.change(learner, [leases.wanted(self.table, preferred)], **ends)

    @property
    def holders(self) -> list[str | None]:
        return [lease.holder for lease in self.table.leases.values()]

    def next(self, share: int) -> int:
        return self.table.leases[share].next


def test_each_learner_gets_the_share_that_it_prefers() -> None:
    bucket = Bucket(3)
    for learner, preferred in (("cat", 2), ("ann", 0), ("bob", 1)):
        bucket.join(learner, preferred)
    assert bucket.holders == ["ann", "bob", "cat"]


def test_who_prefers_a_share_that_is_held_gets_a_free_one_and_then_another_lap() -> None:
    bucket = Bucket(2)
    for learner, preferred in (("ann", 1), ("bob", 1), ("cat", 1), ("dan", None)):
        bucket.join(learner, preferred)
    assert bucket.holders == ["bob", "ann", "cat", "dan"]
    # of the same two texts, each lap in another order
    orders = [leases.data_of(share, 2, 7) for share in range(6)]
    assert [part for part, _ in orders] == [0, 1, 0, 1, 0, 1]
    assert orders[0][1] == orders[1][1] == 7
    assert len({seed for _, seed in orders}) == 3


def test_of_two_that_take_a_share_at_once_the_first_has_it_whoever_writes_again() -> None:
    bucket = Bucket(1)
    read = bucket.table
    bucket.change("bob", [0], table=read)
    bucket.change("ann", [0], table=read)
    assert bucket.holders == ["bob"]
    bucket.put(msgspec.structs.replace(bucket.claims["bob"], incarnation=2))  # a later revision, and still the first claim
    assert bucket.holders == ["bob"]
    bucket.change("ann", [1])
    assert [entry.share for entry in bucket.claims["ann"].entries] == [1]  # it has let the other one be


def test_a_share_goes_on_where_the_furthest_of_claims_and_log_is() -> None:
    bucket = Bucket(1)
    bucket.join("ann")
    bucket.change("ann", free=[0], s0=25)
    assert (bucket.holders, bucket.next(0)) == ([None], 25)
    bucket.change("bob", [0], s0=20)
    assert (bucket.holders, bucket.next(0)) == (["bob"], 25)
    bucket.change("bob", free=[0], s0=7)
    bucket.change("ann", [0], s0=31)
    assert (bucket.holders, bucket.next(0)) == (["ann"], 31)


def test_a_claim_that_was_taken_over_stays_void_though_its_learner_is_gone_for_ever() -> None:
    bucket = Bucket(1)
    for learner in ("ann", "bob", "cat"):
        bucket.change(learner, [0], s0=4)
        assert bucket.holders == [learner]
    bucket.change("cat", free=[0], s0=9)
    assert (bucket.holders, bucket.next(0)) == ([None], 9)
    bucket.change("dan", [0])
    bucket.change("cat")
    assert bucket.claims["cat"].entries == []  # forgotten: dan's claim knows of it
    assert (bucket.holders, bucket.next(0)) == (["dan"], 9)


def test_a_learner_with_a_further_lap_takes_a_free_share_of_the_run_and_lets_the_lap_go() -> None:
    bucket = Bucket(1)
    bucket.join("ann")
    bucket.join("bob")
    assert bucket.holders == ["ann", "bob"]
    assert leases.spare(bucket.table, "bob") == []
    bucket.change("ann", free=[0], s0=12)
    assert leases.spare(bucket.table, "bob") == [0]
    bucket.change("bob", [0], s0=15)
    assert (bucket.holders, bucket.next(0)) == (["bob", "bob"], 15)
    assert leases.surplus(bucket.table, "bob") == 1
    bucket.change("bob", free=[1], s1=3)
    assert leases.surplus(bucket.table, "bob") is None


def test_who_holds_several_shares_lets_one_go_for_a_living_learner_that_has_none_of_them() -> None:
    bucket = Bucket(3)
    bucket.change("ann", [0, 2])
    bucket.change("bob", [1])
    assert leases.surplus(bucket.table, "ann") is None
    bucket.join("cat")
    assert bucket.holders == ["ann", "bob", "ann", "cat"]
    assert leases.surplus(bucket.table, "ann") == 2
    assert leases.surplus(bucket.table, "ann", gone={"cat"}) is None
    assert leases.surplus(bucket.table, "bob") is None
    # another share is free already: that one is to be taken first
    bucket.change("bob", free=[1])
    assert leases.surplus(bucket.table, "ann") is None


# ---- a claim's bytes


def test_a_claim_there_and_back() -> None:
    claim = ShareClaim("ann", 2**50, [ClaimedShare(0, True, 5, 0, 6), ClaimedShare(1, False, 7, 3, 3)])
    read = leases.unpack(claim.pack(), "ann", 9, RUN, OWN)
    assert read == ShareClaim("ann", 2**50, [ClaimedShare(0, True, 5, 9, 6), ClaimedShare(1, False, 7, 3, 3)])
    most = ShareClaim(
        "a" * 48, 2**62, [ClaimedShare(share, share < 32, 2**62, 2**62, 2**62) for share in range(leases.MAX_ENTRIES)]
    )
    assert len(most.pack()) <= leases.MAX_CLAIM_BYTES


def test_shares_begin_where_those_of_the_run_before_ended() -> None:
    before = ContinuedRun(run="old", identity="00" * 8, tokens=9, batches=[43, 33, 5])  # share 2 is a further lap
    settings = RunSettings(learners=2, continues=before)

    def table(*claimed: ShareClaim) -> Shares:
        read = {claim.learner: leases.unpack(claim.pack(), claim.learner, 9, settings, OWN) for claim in claimed}
        return leases.fold(read, 2, settings.first_batch)

    assert {share: lease.next for share, lease in table().leases.items()} == {0: 43, 1: 33}
    ann = leases.revised(table(), ShareClaim("ann", 1, []), take=[0, 2, 3], positions={})
    assert ann is not None
    assert {entry.share: entry.next for entry in ann.entries} == {0: 43, 2: 5, 3: 0}
    further = leases.revised(table(), ShareClaim("bob", 1, []), take=[1], positions={1: 50})  # merged by now
    assert further is not None
    assert further.entries[0].next == 50
    # a claim that goes back does not take a share back
    assert table(ShareClaim("eve", 1, [ClaimedShare(1, False, 2, 5, 5)])).leases[1].next == 33
    most = claims.furthest_batch(settings, OWN, 1)
    assert most == 33 + claims.furthest_batch(RunSettings(learners=2), OWN, 1)
    leases.unpack(ShareClaim("eve", 1, [ClaimedShare(1, True, most, 0, 0)]).pack(), "eve", 9, settings, OWN)
    with pytest.raises(ClaimError, match=f"share 1: {most + 1}, at most {most}"):
        leases.unpack(ShareClaim("eve", 1, [ClaimedShare(1, True, most + 1, 0, 0)]).pack(), "eve", 9, settings, OWN)


END = claims.furthest_batch(RUN, OWN, 0)
FORGED = [
    (b"", FormatError),
    (b"\xc1", FormatError),
    (b"\x91" * 4000, FormatError),
    (bytes(1 << 20), FormatError),
    (ShareClaim("bob", 1, []), FormatError),  # another's
    (ShareClaim("ann", 1, [ClaimedShare(1, True, 0, 0, 0), ClaimedShare(0, True, 0, 0, 0)]), FormatError),
    (ShareClaim("ann", 1, [ClaimedShare(0, True, 0, 0, 0)] * 2), FormatError),
    (ShareClaim("ann", 1, [ClaimedShare(0, True, 0, 10, 0)]), FormatError),  # since a revision that is still to come
    (ShareClaim("ann", 1, [ClaimedShare(0, True, 0, 0, 9)]), FormatError),  # it could not be taken over
    (ShareClaim("ann", 1, [ClaimedShare(0, False, 0, 0, 2**62)]), FormatError),
    (ShareClaim("ann", 1, [ClaimedShare(0, True, END + 1, 0, 0)]), ClaimError),
    (ShareClaim("ann", 1, [ClaimedShare(0, False, 2**62, 0, 0)]), ClaimError),
    (ShareClaim("ann", 1, [ClaimedShare(RUN.learners + 4096, True, 0, 0, 0)]), ClaimError),
    (ShareClaim("ann", 1, [ClaimedShare(share, True, 0, 0, 0) for share in range(leases.MAX_HELD + 1)]), ClaimError),
    (ShareClaim("ann", 1, [ClaimedShare(share, False, 0, 0, 0) for share in range(leases.MAX_ENTRIES + 1)]), FormatError),
]


@pytest.mark.parametrize(("value", "error"), FORGED)
def test_a_claim_that_cannot_be_is_refused_by_its_writers_name(value: bytes | ShareClaim, error: type[MessageError]) -> None:
    with pytest.raises(error, match="claim of ann"):
        leases.unpack(value if isinstance(value, bytes) else value.pack(), "ann", 9, RUN, OWN)


def test_the_furthest_claims_that_are_let_through_hold_nobody_up() -> None:
    """A liar claims what it can, over everybody: others take the next laps, and from it as soon as it is silent."""
    bucket = Bucket(2)
    bucket.join("ann")
    bucket.put(
        ShareClaim("liar", 2**62, [ClaimedShare(share, True, END, 0, bucket.revision) for share in range(leases.MAX_HELD)])
    )
    assert set(bucket.holders) == {"liar"}
    bucket.join("ann", s32=4)
    assert bucket.table.held()["ann"] == [leases.MAX_HELD]
    assert bucket.next(leases.MAX_HELD) == 4
    bucket.change("ann", [0])
    assert bucket.holders[0] == "ann"


# ---- who takes the shares of learners that are gone


def watched(bucket: Bucket, learner: str, heard: Collection[str], seconds: range, watch: LeaseWatch | None = None) -> list[int]:
    """Have a learner look every second, hearing some, and return what it is to take at last: nothing before."""
    watch = watch or LeaseWatch(learner, LEASE_S)
    due: list[int] = []
    for now_s in seconds:
        assert due == []
        due = watch.due(bucket.table, now_s)
        for name in heard:
            watch.hear(name, now_s)
    return due


def test_a_silent_learners_share_goes_to_the_living_one_with_the_fewest() -> None:
    bucket = Bucket(4)
    bucket.change("ann", [0, 1])
    bucket.join("bob")
    bucket.join("cat")
    # cat was never heard: its time runs from the first look on
    for second in (29, 30):
        bob = watched(bucket, "bob", ("ann", "bob"), range(second + 1))
        assert bob == [3] * (second == 30)
    assert watched(bucket, "ann", ("ann", "bob"), range(31)) == []
    bucket.change("bob", bob, s3=17)
    assert (bucket.holders, bucket.next(3)) == (["ann", "ann", "bob", "bob"], 17)
    # bob takes nothing though it is alive: the next one does after a while
    bucket = Bucket(2)
    bucket.change("ann", [1, 2])
    bucket.join("bob", 3)
    assert bucket.holders == ["bob", "ann", "ann"]
    assert watched(bucket, "ann", ("ann",), range(31)) == [0]


def test_who_is_to_take_a_share_and_does_not_is_not_waited_for() -> None:
    bucket = Bucket(4)
    bucket.change("ann", [0, 1])
    bucket.join("bob")
    bucket.join("cat")
    assert watched(bucket, "ann", ("ann", "bob"), range(36)) == []
    assert watched(bucket, "ann", ("ann", "bob"), range(37)) == [3]


def test_a_free_share_waits_for_a_learner_that_has_yet_to_join() -> None:
    bucket = Bucket(2)
    bucket.join("ann")
    assert watched(bucket, "ann", ("ann",), range(100, 130)) == []
    assert watched(bucket, "ann", ("ann",), range(100, 131)) == [1]


def test_who_slept_or_does_not_hear_itself_takes_nothing() -> None:
    bucket = Bucket(2)
    bucket.join("ann")
    bucket.join("bob")
    watch = LeaseWatch("ann", LEASE_S)
    for now_s in (0, 1, 500, *range(501, 530)):  # frozen in between
        assert watched(bucket, "ann", ("ann",), range(now_s, now_s + 1), watch) == []
    assert watched(bucket, "ann", ("ann",), range(530, 531), watch) == [1]  # awake all the time, and still nothing heard
    assert watched(bucket, "ann", (), range(100)) == []


def test_one_learner_holds_so_many_shares_at_most() -> None:
    bucket = Bucket(100)
    bucket.join("ann")
    bucket.change("ann", watched(bucket, "ann", ("ann",), range(31)))
    assert len(bucket.table.held()["ann"]) == leases.MAX_HELD


# ---- the round robin


def test_one_share_gives_its_batches_in_order() -> None:
    round_robin = RoundRobin()
    assert [round_robin.next({2: 5}) for _ in range(20)] == [(2, 5 + i) for i in range(20)]


def test_several_shares_take_turns_in_blocks() -> None:
    round_robin, held = RoundRobin(), {1: 100, 4: 7}
    dealt = [round_robin.next(held) for _ in range(3 * BLOCK_BATCHES)]
    assert dealt == [(1, 100 + i) for i in range(8)] + [(4, 7 + i) for i in range(8)] + [(1, 108 + i) for i in range(8)]


def test_a_share_taken_away_ends_its_block_and_none_at_all_goes_on_with_the_last() -> None:
    round_robin = RoundRobin()
    assert [round_robin.next({0: 0, 1: 0}) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert [round_robin.next({1: 0}) for _ in range(2)] == [(1, 0), (1, 1)]
    assert [round_robin.next({}) for _ in range(2)] == [(1, 2), (1, 3)]
    # leased again, further on: others were there meanwhile; leased as before: it goes on
    assert round_robin.next({0: 9}) == (0, 9)
    assert round_robin.next({0: 9}) == (0, 10)


# ---- whatever happens


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32))
@example(3, 3773)  # one returns as its lease ends
def test_no_share_has_two_holders_none_stays_orphaned_and_no_position_goes_back(learners: int, seed: int) -> None:
    """Learners that join, leave, die, return and look, each by itself: some read before others write, and write after."""
    bucket, now_s, merged, rng = Bucket(learners), 0, Counter[int](), random.Random(seed)
    watches: dict[str, LeaseWatch] = {}  # of the living
    heard: set[str] = set()  # the living that all others have heard: who returns at last may find its share taken
    late: list[tuple[str, Shares, list[int]]] = []  # claims that were decided, and are still to be written

    def ends() -> dict[str, Any]:
        return {f"s{share}": batch for share, batch in merged.items()}

    def settle(learner: str, take: Collection[int] = (), table: Shares | None = None, **positions: Any) -> None:
        old = bucket.table
        bucket.change(learner, take, table=table, **positions)
        new = bucket.table
        for share, before in old.leases.items():
            after = new.leases.get(share, leases.Lease(share))
            assert max(after.next, merged[share]) >= before.next
            if after.holder not in (None, before.holder):
                assert after.entry is not None
                assert after.entry.next >= before.next or merged[share] >= before.next
                assert before.holder not in heard  # no live learner that is heard loses a share to another one

    def look(learner: str) -> None:
        table, watch = bucket.table, watches[learner]
        due = watch.due(table, now_s)
        take = [leases.wanted(table, None)] if not table.held_by(learner) else due or leases.spare(table, learner)
        if take and rng.random() < 0.3:
            late.append((learner, table, take))
            return
        share = None if take else leases.surplus(table, learner, watch.gone)
        if share is None:
            settle(learner, take, **ends())
        else:
            settle(learner, free=[share], **dict[str, Any]({f"s{share}": merged[share] + 3}))

    def round_of_looks() -> None:
        nonlocal now_s
        now_s += 3
        for learner, table, take in late:
            if learner in watches and not bucket.table.held_by(learner):
                settle(learner, take, table, **ends())
        late.clear()
        for learner in rng.sample(sorted(watches), len(watches)):
            look(learner)
        for watch in watches.values():
            for name in watches:
                watch.hear(name, now_s)
        heard.update(watches)

    for _ in range(rng.randrange(1, 25)):
        act = rng.choice(["join", "join", "die", "leave", "wait", "merge"])
        name = rng.choice("abcdef")
        if act == "join" and name not in watches:
            watches[name] = LeaseWatch(name, LEASE_S)
        elif act == "die":
            watches.pop(name, None)
            heard.discard(name)
        elif act == "leave" and watches.pop(name, None) is not None:
            heard.discard(name)
            settle(name, free=bucket.table.held().get(name, []), **ends())
        elif act == "merge":
            merged[rng.randrange(learners + 2)] += 5
        for _ in range(rng.randrange(1, 14) if act == "wait" else 1):
            round_of_looks()
    for _ in range(80):
        round_of_looks()
    if watches:
        own = [lease.holder for lease in bucket.table.leases.values()][:learners]
        assert set(own) <= set(watches)
        if len(watches) >= learners:
            assert len(set(own)) == learners
        assert all(bucket.table.held_by(name) for name in watches)
